"""Read the tensors of public checkpoints. Code inside a checkpoint file is never executed."""

from __future__ import annotations

import hashlib
import json
import pathlib
import pickle
import zipfile
from _codecs import encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ..hub_ids import is_hub_id
from ..strict_loading import damaged
from .provenance import known_license

# OpenCLIP's configuration and weights. A repository may have them beside those of transformers.
OPEN_CLIP_CONFIG = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
)
# In order of preference; an index lists the files of a sharded checkpoint.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Files other than weights: configurations, tokenizer files, and the card with the license.
SMALL_FILES = ["*.json", "*.txt", "sentencepiece*.model", "spm.model", "tokenizer.model", "README.md"]
# Classes allowed in a pickle in addition to torch's own list. Restoring them only sets attributes and runs no code.
# Legacy fairseq files contain an embedding module, LAION's optimizer numpy numbers, and GLAP's configuration paths.
_NUMPY_SCALAR = np.float64(0).__reduce__()[0]
ALLOWED: list[Any] = [
    torch.nn.Embedding,
    encode,
    np.dtype,
    *(type(np.dtype(name)) for name in ("float32", "float64", "int32", "int64", "bool")),
    (_NUMPY_SCALAR, "numpy.core.multiarray.scalar"),  # before numpy 2
    (_NUMPY_SCALAR, "numpy._core.multiarray.scalar"),
    (pathlib.PosixPath, "pathlib.PosixPath"),
    (pathlib.PosixPath, "pathlib._local.PosixPath"),  # Python 3.13
]


@dataclass(frozen=True)
class Checkpoint:
    """Loaded checkpoint with the original tensor names.

    Args:
        origin: Hub id, or name of the file or folder.
        tensors: `{name: tensor}`, without the prefix `module.`.
        config: Content of the `open_clip_config.json` of an audio model next to the weights, else of `config.json`;
            empty if there is no such file.
        license: Hub license identifier from the model card; None if unknown.
    """

    origin: str
    files: tuple[Path, ...]
    tensors: dict[str, torch.Tensor]
    config: Mapping[str, Any]
    revision: str | None = None
    license: str | None = None

    @property
    def folder(self) -> Path:
        """Folder of the weights, configurations and tokenizer."""
        return self.files[0].parent

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the weight files, concatenated in the order of `files`."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()


def read_checkpoint(origin: str | Path, revision: str | None = None) -> Checkpoint:
    """Read a checkpoint from a file, a folder or the Hub.

    Args:
        origin: A file, a folder, a Hub id (`mispeech/ced-base`), or a file in a Hub repository
            (`lukewys/laion_clap/630k-audioset-best.pt`).
        revision: Commit, branch or tag of the Hub repository.

    Raises:
        OSError: The Hub has no such repository or file, or cannot be reached.
        ValueError: `origin` is not a path or Hub id, the folder contains none or several checkpoints, or a file is
            damaged or cannot be read safely.
    """
    path = Path(origin).expanduser()
    name, commit = path.resolve().name, None
    if not path.exists():
        path, name, commit = _download(str(origin), revision)
    files = _weight_files(path) if path.is_dir() else (path,)

    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= get_state_dict(_load(file), file.name)

    # DistributedDataParallel adds this prefix
    if all(name.startswith("module.") for name in tensors):
        consume_prefix_in_state_dict_if_present(tensors, "module.")
    folder = files[0].parent
    card = folder / "README.md"
    # A README next to a single file may describe something else.
    stated = ModelCard.load(card).data.get("license") if path.is_dir() and card.is_file() else None
    return Checkpoint(
        origin=name,
        files=files,
        tensors=tensors,
        config=read_json(folder / (OPEN_CLIP_CONFIG if is_open_clip_audio(folder) else "config.json")),
        revision=commit,
        license=stated or known_license(name) or None,
    )


def get_state_dict(loaded: Any, name: str) -> dict[str, torch.Tensor]:
    """Return the state dict of a loaded file.

    The state dict may be stored under "state_dict" or "model". If the file also contains an `embed_tokens` module
    (legacy fairseq), its weight is added to the state dict.

    Raises:
        ValueError: There are no tensors, or some values are not tensors.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{name} contains a {type(loaded).__name__}; a checkpoint is a mapping of names to tensors")

    tensors: dict[str, Any] = dict(loaded)
    for container in ("state_dict", "model"):
        if isinstance(loaded.get(container), Mapping):
            tensors = dict(loaded[container])
            if (embedding := loaded.get("embed_tokens")) is not None:
                tensors.setdefault("embed_tokens.weight", getattr(embedding, "weight", embedding))
            break

    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ValueError(f"{name} contains {key!r} of type {kind}; expected a mapping of names to tensors")
    if not tensors:
        raise ValueError(f"{name} contains no tensors")
    return {key: value.detach() for key, value in tensors.items()}


def _download(origin: str, revision: str | None) -> tuple[Path, str, str]:
    """Download a Hub repository or one of its files. Return the local path, the repository id and the commit."""
    parts = origin.split("/")
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    if not is_hub_id(repository):
        raise ValueError(f"{origin} is not a file, a folder or a Hub id such as mispeech/ced-base")
    try:
        if file:
            path = Path(hf_hub_download(repository, file, revision=revision))
            return path, repository, path.parents[file.count("/")].name
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=SMALL_FILES))
        patterns = ("model*.safetensors", "pytorch_model*.bin")  # with the parts of a sharded checkpoint
        for pattern in OPEN_CLIP_WEIGHTS if is_open_clip_audio(folder) else patterns:
            snapshot_download(repository, revision=revision, allow_patterns=[pattern])
            if list(folder.glob(pattern)):
                break
        return folder, repository, folder.name
    except (OSError, HfHubHTTPError) as error:
        raise OSError(f"{origin} is not a local path, and downloading from the Hub failed: {error}") from error


def is_open_clip_audio(folder: str | Path) -> bool:
    """Return whether a folder has an `open_clip_config.json` of an audio model."""
    return "audio_cfg" in read_json(Path(folder, OPEN_CLIP_CONFIG), "model_cfg")


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of a folder.

    The first existing file of `WEIGHTS` is used, or of `OPEN_CLIP_WEIGHTS` for an audio model of OpenCLIP. If it is an
    index, the files listed in it are returned. If none exists, the folder must contain exactly one file with a suffix
    in `WEIGHT_SUFFIXES`.
    """
    expected = OPEN_CLIP_WEIGHTS if is_open_clip_audio(folder) else WEIGHTS
    for name in expected:
        path = folder / name
        if path.is_file() and path.suffix == ".json":
            return tuple(folder / part for part in sorted(set(read_json(path, "weight_map").values())))
        if path.is_file():
            return (path,)

    paths = tuple(sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES))
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths) or "none"
        raise ValueError(f"{folder} must contain one checkpoint, such as {expected[0]}; found {names}")
    return paths


def read_json(path: Path, key: str | None = None) -> dict[str, Any]:
    """Read a JSON object from a file, or the object under `key`. Return {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content = content if key is None else content[key]
        if not isinstance(content, dict):
            raise TypeError(f"expected an object, found a {type(content).__name__}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged (incomplete download?); download it again: {error!r}") from error
    return content


def _load(path: Path) -> Any:
    """Load a weight file. Pickles are loaded with `weights_only=True`."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals(ALLOWED):
            # Memory-map if the format allows it, because most of a training checkpoint is its optimizer.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except PermissionError:
        raise
    except Exception as error:  # for bytes that are not a pickle, torch raises KeyError, OSError and others
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"GGUF":
            raise ValueError(f"{path} is a GGUF file; pass the model's safetensors or PyTorch weights") from error
        # torch.save writes a zip archive, or before torch 1.6 a pickle of protocol 2.
        may_be_a_pickle = zipfile.is_zipfile(path) or start[:1] == pickle.PROTO
        if isinstance(error, pickle.UnpicklingError) and may_be_a_pickle:
            raise ValueError(_explain_refusal(path, str(error))) from error
        raise ValueError(damaged(path, error)) from error


def _explain_refusal(path: Path, error: str) -> str:
    """Return an error message with torch's reason to refuse a pickle, and with a command that extracts the tensors."""
    # One line of torch's message is the cause; the others are advice.
    last_line = error.partition("\n\nCheck the doc")[0].strip().rpartition("\n")[2]
    reason = last_line.rpartition("WeightsUnpickler error:")[2].partition(". Please")[0].strip(" .")
    # an opcode of a later protocol than torch's default
    if "Unsupported operand" in error:
        reason = "its pickle protocol is above 2"
    keep = "{k: c[k] for k in ('state_dict', 'model', 'embed_tokens') if k in c} or c"
    return (
        f"{path} is a pickle that could run code, and torch refuses to load it: {reason}. "
        "If you trust its authors, extract the tensors in an environment that has its classes:\n"
        "  python -c \"import sys, torch; c = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
        f'torch.save({keep}, sys.argv[2])" {path.name} tensors.pt\n'
        "and convert tensors.pt"
    )
