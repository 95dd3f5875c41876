"""Recognise the kind of a saved model by its files, and load it as a `SupCLAPModel`."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import ClapProcessor

from ..hub_ids import is_hub_id
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from .clap import load_clap, processor_from_clap, supclap_from_clap
from .files import OPEN_CLIP_CONFIG, is_open_clip_audio, read_json
from .open_clip import load_open_clip, load_open_clip_processor

ACCEPTED = (
    "a SupCLAP model, a ClapModel, an audio model in OpenCLIP's format, or, to embed only, a model for audio and text "
    "in the format of sentence-transformers, or module:function (for PE-AV: examples/pe_av.py)"
)
_CONFIGS = ("config.json", OPEN_CLIP_CONFIG, "modules.json", "config_sentence_transformers.json")


def find_kind(name: str) -> str:
    """Return the kind of a saved model: "supclap", "clap", "open_clip" or "sentence_transformers".

    A SupCLAP model or `ClapModel` with prompts or further modules of sentence-transformers is of the kind
    "sentence_transformers", because its embeddings depend on them.

    Args:
        name: Folder or Hub id.

    Raises:
        FileNotFoundError: The folder or repository does not exist.
        ValueError: The model is of another kind.
    """
    folder = config_folder(name)
    if is_open_clip_audio(folder):
        return "open_clip"
    fields = read_json(folder / "config.json")
    model_type = fields.get("model_type")
    if model_type in ("supclap", "clap") and not _has_sentence_settings(folder):
        return str(model_type)
    if (folder / "modules.json").is_file():
        family = read_json(folder / "config_sentence_transformers.json").get("model_type")
        if family not in (None, "SentenceTransformer"):
            raise ValueError(f"{name} is a {family} of sentence-transformers; pass {ACCEPTED}")
        return "sentence_transformers"

    if model_type is None:
        files = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ValueError(f"{name} has no config.json with a model_type, it contains {files}; pass {ACCEPTED}")
    remote = " It has code of its own (auto_map), which this package does not run." if "auto_map" in fields else ""
    raise ValueError(f"{name} is a {model_type!r} model; pass {ACCEPTED}.{remote}")


def config_folder(name: str) -> Path:
    """Return the folder of a model's configurations. They are downloaded from the Hub in one request.

    Raises:
        FileNotFoundError: There is no such folder, and no such model in the cache or on the Hub.
        ValueError: The name is that of a file.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"{name} is a file; pass a folder or a Hub id (supclap convert converts checkpoint files)")
    if not is_hub_id(name):
        raise FileNotFoundError(f"folder {name} does not exist; pass a folder or a Hub id such as owner/name")
    try:
        # Without a network, a request for several files fails at once. One for a single file is tried for 23 s.
        return Path(snapshot_download(name, allow_patterns=list(_CONFIGS)))
    except (OSError, HfHubHTTPError) as error:
        raise FileNotFoundError(
            f"{name} is neither a local folder nor in the cache, and the Hub has no such model or cannot be "
            f"reached: {str(error).strip().splitlines()[0]}"
        ) from error


def _has_sentence_settings(folder: Path) -> bool:
    """Return whether a folder has prompts or modules of sentence-transformers that change the embeddings."""
    path = folder / "modules.json"
    if not path.is_file():
        return False
    later = [module["type"] for module in json.loads(path.read_text(encoding="utf-8"))[1:]]
    settings = read_json(folder / "config_sentence_transformers.json")
    has_prompt = any((settings.get("prompts") or {}).values())
    return has_prompt or "truncate_dim" in settings or not all(kind.endswith(".Normalize") for kind in later)


def load_model(name: str) -> SupCLAPModel:
    """Load a SupCLAP model, a `ClapModel` or an audio model in OpenCLIP's format (CLAP2), from a folder or Hub id.

    Returns:
        The model in float32, in evaluation mode, with its processor as `model.processor`.

    Raises:
        FileNotFoundError: The folder or repository does not exist.
        ValueError: The model is of another kind, or its weights or settings do not fit.
    """
    match _convertible_kind(name):
        case "open_clip":
            model, processor = load_open_clip(name)
            model.processor = processor
        case "clap":
            model = supclap_from_clap(load_clap(name))
            model.processor = load_processor(name)
        case _:
            model = SupCLAPModel.from_pretrained(name)
    return model


def load_processor(name: str) -> SupCLAPProcessor:
    """Load the processor of a model that `load_model` loads, without its weights."""
    match _convertible_kind(name):
        case "open_clip":
            return load_open_clip_processor(name)
        case "clap":
            return processor_from_clap(ClapProcessor.from_pretrained(name, trust_remote_code=False))
        case _:
            return SupCLAPProcessor.from_pretrained(name)


def _convertible_kind(name: str) -> str:
    """Return the kind of a model as `find_kind`. Raise ValueError if it does not become a `SupCLAPModel`."""
    kind = find_kind(name)
    if kind == "sentence_transformers":
        raise ValueError(
            f"{name} is of the kind {kind}, which can be evaluated and searched with, but not trained; pass a SupCLAP "
            "model, a ClapModel or an audio model in OpenCLIP's format"
        )
    return kind
