"""Recognise the kind of a saved model by its files, and load it as a `SupCLAPModel`."""

from __future__ import annotations

import os
from typing import Any

from transformers import ClapProcessor, PreTrainedConfig

from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from ..strict_loading import find_file
from .clap import load_clap, processor_from_clap, supclap_from_clap
from .open_clip import is_open_clip, load_open_clip, load_open_clip_processor

ACCEPTED = (
    "a SupCLAP model, a ClapModel, an audio model in OpenCLIP's format, or, to embed only, a model in the format of "
    "sentence-transformers, PE-AV (pe_audio), or module:function"
)


def find_kind(name: str) -> str:
    """Return the kind of a saved model: "supclap", "clap", "open_clip", "sentence_transformers" or "pe_audio".

    Args:
        name: Folder or Hub id.

    Raises:
        FileNotFoundError: The folder or repository does not exist.
        ValueError: The model is of another kind.
    """
    if is_open_clip(name):
        return "open_clip"
    is_sentence_model = find_file(name, "modules.json") is not None
    fields: dict[str, Any] = {}
    if not os.path.isdir(name) or os.path.isfile(os.path.join(name, "config.json")):
        try:
            fields, _ = PreTrainedConfig.get_config_dict(name)
        except OSError as error:
            if not is_sentence_model:
                raise FileNotFoundError(
                    f"{name} is neither a local folder nor in the cache, and the Hub has no such model or cannot be "
                    f"reached: {error}"
                ) from error
    model_type = fields.get("model_type")
    if model_type in ("supclap", "clap", "pe_audio"):
        return str(model_type)
    if is_sentence_model:
        return "sentence_transformers"

    if model_type is None:
        files = (
            f", it contains {', '.join(sorted(os.listdir(name))[:8]) or 'nothing'}"
            if os.path.isdir(name)
            else ""
        )
        raise ValueError(f"{name} has no config.json{files}; pass {ACCEPTED}")
    remote = (
        " It has code of its own (auto_map), which this package does not run." if "auto_map" in fields else ""
    )
    raise ValueError(f"{name} is a {model_type!r} model; pass {ACCEPTED}.{remote}")


def load_model(name: str) -> SupCLAPModel:
    """Load a SupCLAP model, a `ClapModel` or an audio model in OpenCLIP's format (CLAP2), from a folder or Hub id.

    Returns:
        The model in float32, in evaluation mode, with its processor as `model.processor`.

    Raises:
        FileNotFoundError: The folder or repository does not exist.
        ValueError: The model is of another kind, or its weights or settings do not fit.
    """
    match find_kind(name):
        case "open_clip":
            model, processor = load_open_clip(name)
            model.processor = processor
        case "clap":
            model = supclap_from_clap(load_clap(name))
            model.processor = load_processor(name)
        case "supclap":
            model = SupCLAPModel.from_pretrained(name)
        case other:
            raise ValueError(
                f"{name} is a {other} model, which can be evaluated and searched with, but not trained"
            )
    return model


def load_processor(name: str) -> SupCLAPProcessor:
    """Load the processor of a model that `load_model` loads, without its weights."""
    match find_kind(name):
        case "open_clip":
            return load_open_clip_processor(name)
        case "clap":
            return processor_from_clap(ClapProcessor.from_pretrained(name))
        case _:
            return SupCLAPProcessor.from_pretrained(name)
