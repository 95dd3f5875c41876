"""Files of public checkpoints to named tensors, without running any code that a file may carry."""

from __future__ import annotations

import hashlib
import json
import pathlib
import pickle
import re
import zipfile
from _codecs import encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

# What a folder's weights are called, in the order of preference; an index lists the parts of one that was split.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Everything beside the weights: configurations, the tokenizer's files, the card with the license.
SMALL_FILES = ["*.json", "*.txt", "sentencepiece*.model", "spm.model", "tokenizer.model", "README.md"]
# What joins torch's own list of what a pickle may hold. Restoring these sets attributes and runs nothing: the embedding
# that legacy fairseq pickles as a module, numpy's numbers (LAION's optimizer), and paths (GLAP's configuration).
_NUMPY_SCALAR = np.float64(0).__reduce__()[0]
ALLOWED: list[Any] = [
    torch.nn.Embedding,
    encode,
    np.dtype,
    np.dtypes.Float32DType,
    np.dtypes.Float64DType,
    np.dtypes.Int32DType,
    np.dtypes.Int64DType,
    np.dtypes.BoolDType,
    (_NUMPY_SCALAR, "numpy.core.multiarray.scalar"),  # before numpy 2
    (_NUMPY_SCALAR, "numpy._core.multiarray.scalar"),
    (pathlib.PosixPath, "pathlib.PosixPath"),
    (pathlib.PosixPath, "pathlib._local.PosixPath"),  # Python 3.13
]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its authors laid it out.

    Args:
        origin: What it is called: a Hub id, or the name of a file or folder.
        files: The files that hold the weights.
        tensors: All of its tensors by name; containers and the prefix `module.` are taken off.
        config: The `config.json` beside the weights; empty where there is none.
        revision: The commit, of a Hub repository.
        license: What the card of the folder or repository states, in the Hub's notation; None where it states none.
        not_read: Entries of a pickle beside its tensors that were not looked at, such as the optimizer.
    """

    origin: str
    files: tuple[Path, ...]
    tensors: dict[str, torch.Tensor]
    config: Mapping[str, Any]
    revision: str | None = None
    license: str | None = None
    not_read: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the weights lie, and with them configurations and tokenizer."""
        return self.files[0].parent

    @cached_property
    def sha256(self) -> str:
        """The checksum of the file; of several parts, one after the other in the order of their names."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


def read_checkpoint(origin: str | Path, revision: str | None = None) -> Checkpoint:
    """Reads a checkpoint from wherever it is.

    Args:
        origin: A file, a folder, a Hub id (`mispeech/ced-base`), or a Hub id and a file of it
            (`lukewys/laion_clap/630k-audioset-best.pt`).
        revision: The commit, branch or tag of the Hub repository.

    Raises:
        OSError: The Hub has no such repository or file, or cannot be reached.
        ValueError: Nothing is there, no or several checkpoints are, or a file cannot be read safely.
    """
    path = Path(origin).expanduser()
    name, commit = path.resolve().name, None
    if not path.exists():
        path, name, commit = _download(str(origin), revision)

    files = _weight_files(path) if path.is_dir() else (path,)
    tensors: dict[str, torch.Tensor] = {}
    not_read: list[str] = []
    for file in files:
        part, others = get_state_dict(_load(file), file.name)
        declared, size = sum(value.numel() * value.element_size() for value in part.values()), file.stat().st_size
        if declared > 8 * size + (1 << 24):  # one number may stand for a whole tensor, or two names for one tensor
            raise ValueError(f"{file} has {size:,} bytes and declares tensors of {declared:,}; it is not read")
        if twice := sorted(part.keys() & tensors.keys()):
            raise ValueError(f"{origin}: {len(twice)} tensors stand in several files, among them {twice[:3]}")
        tensors.update(part)
        not_read += others

    if all(name.startswith("module.") for name in tensors):  # which distributed training puts before every name
        consume_prefix_in_state_dict_if_present(tensors, "module.")
    config_file, card = files[0].parent / "config.json", files[0].parent / "README.md"
    # A single file may lie beside a README of something else.
    stated = ModelCard.load(card).data.get("license") if path.is_dir() and card.is_file() else None
    return Checkpoint(
        origin=name,
        files=files,
        tensors=tensors,
        config=_read_json(config_file) if config_file.is_file() else {},
        revision=commit,
        license=stated or (known_license(name) if commit else "") or None,
        not_read=tuple(not_read),
    )


def get_state_dict(loaded: Any, name: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of what a file held: flat, or under "state_dict" or "model".

    Legacy fairseq has an `embed_tokens` module beside its state dict; its weight joins the others.

    Args:
        loaded: What was read.
        name: The name of the file, for the message of an error.

    Returns:
        The tensors by name, and the names of the other entries of the container.

    Raises:
        ValueError: There are no tensors, or not only tensors.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{name} holds a {type(loaded).__name__}; a checkpoint is a mapping of names to tensors")

    tensors, others = dict(loaded), []
    for container in ("state_dict", "model"):
        if isinstance(loaded.get(container), Mapping):
            tensors, others = dict(loaded[container]), list(map(str, loaded))
            others.remove(container)
            break

    if "embed_tokens" in others:
        others.remove("embed_tokens")
        weight: Any = getattr(loaded["embed_tokens"], "weight", loaded["embed_tokens"])
        if not torch.equal(tensors.setdefault("embed_tokens.weight", weight), weight):
            raise ValueError(f"{name} has two embeddings that differ: embed_tokens and embed_tokens.weight")

    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} holds {key!r}, a {type(value).__name__}, where only tensors should be, and neither "
                "'state_dict' nor 'model'; give a file of tensors"
            )
        tensors[key] = value.detach()
    if not tensors:
        raise ValueError(f"{name} holds no tensors")
    return tensors, others


def _download(origin: str, revision: str | None) -> tuple[Path, str, str]:
    """A Hub repository's files, or one of them; the repository's name and commit."""
    parts = origin.split("/")
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    if not is_hub_id(repository):
        raise ValueError(f"{origin} is no file, no folder and no Hub id such as mispeech/ced-base")
    try:
        if file:
            path = Path(hf_hub_download(repository, file, revision=revision))
            return path, repository, path.parents[file.count("/")].name
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=[*SMALL_FILES, "model*.safetensors"])
        )
        if not list(folder.glob("model*.safetensors")):
            snapshot_download(repository, revision=revision, allow_patterns=["pytorch_model*.bin"])
        return folder, repository, folder.name
    except (OSError, HfHubHTTPError) as error:
        raise OSError(f"{origin} is no file or folder here, and cannot be had from the Hub: {error}") from error


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The files of a folder's one checkpoint."""
    for name in WEIGHT_FILES:
        path = folder / name
        if path.is_file() and path.suffix == ".json":
            parts = sorted(set(_read_json(path, "weight_map").values()))
            if lacking := [part for part in parts if not (folder / part).is_file()]:
                raise ValueError(f"{folder} lacks {len(lacking)} of the files in {path.name}, among them {lacking[:3]}")
            return tuple(map(folder.joinpath, parts))
        if path.is_file():
            return (path,)

    found = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"{folder} must hold one checkpoint ({' or '.join(WEIGHT_FILES[::2])}, or one file); has {names}"
        )
    return (found[0],)


def _read_json(path: Path, key: str | None = None) -> dict[str, Any]:
    """The object in a JSON file, or one that it has under a key."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found = found if key is None else found[key]
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__} where an object should be")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged (an incomplete download?); get it again: {error!r}") from error
    return found


def _load(path: Path) -> Any:
    """What a file of tensors holds; pickles are read as data and run nothing."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals(ALLOWED), _memory_in_proportion(path):
            # Mapped, where the format allows it: a training checkpoint is mostly its optimizer.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except PermissionError:
        raise
    except Exception as error:  # torch's reader meets bytes that are no pickle with KeyError, OSError and others
        with path.open("rb") as file:
            # What torch saves is an archive, or before torch 1.6 a pickle of protocol 2.
            may_be_a_pickle = zipfile.is_zipfile(path) or file.read(1) == pickle.PROTO
        if isinstance(error, pickle.UnpicklingError) and may_be_a_pickle:
            raise ValueError(_explain_refusal(path, error)) from error
        if isinstance(error, MemoryError) or "alloc_cpu" in str(error):  # the second is what torch says
            size = path.stat().st_size
            raise ValueError(f"{path} has {size:,} bytes and asks for far more memory; it is not read") from error
        raise ValueError(damaged(path, error)) from error


@contextmanager
def _memory_in_proportion(path: Path) -> Iterator[None]:
    """Within it, this process can take three times the memory of a file and one GiB, and not what the file asks for."""
    pages = Path("/proc/self/statm")
    if not pages.is_file():  # elsewhere than on Linux such a limit does not hold
        yield
        return

    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(pages.read_text().split()[0]) * resource.getpagesize()
    limit = taken + 3 * path.stat().st_size + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _explain_refusal(path: Path, error: Exception) -> str:
    """What a refused pickle asks for, and what to do about it."""
    keep = "{k: c[k] for k in ('state_dict', 'model', 'embed_tokens') if k in c} or c"
    return (
        f"{path} is a pickle that {_find_reason(path, error)}. Reading it in full could run code, so it is not read. "
        "Where you trust whoever made the file, keep its tensors only, in an environment that has its classes:\n"
        "  python -c \"import sys, torch; c = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
        f'torch.save({keep}, sys.argv[2])" {path.name} tensors.pt\n'
        "and convert tensors.pt"
    )


def _find_reason(path: Path, error: Exception) -> str:
    """Why torch's reader of weights alone has refused a pickle."""
    if "Unsupported operand" in str(error):  # an instruction of a later protocol than torch writes by itself
        return "was saved with a pickle protocol above 2, which torch's reader of weights alone does not know"
    if zipfile.is_zipfile(path):
        with torch.serialization.safe_globals(ALLOWED):
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        if foreign:
            return f"holds more than tensors: {', '.join(sorted(set(foreign)))}"

    # Behind its general advice torch says in one line what it met.
    told = re.search(r"^(?!Weights only load failed|Please file|Check the doc)\S.*?(?=\.?$)", str(error), re.MULTILINE)
    return f"holds more than tensors: {told[0] if told else 'something that torch does not name'}"
