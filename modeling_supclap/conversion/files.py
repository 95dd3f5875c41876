"""Files of public checkpoints to named tensors, without running any code that a file may carry."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file

from ..strict_loading import damaged, is_hub_id

# What a folder's weights are called, in the order of preference; an index lists the parts of one that was split.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Everything beside the weights: configurations, the tokenizer's files, the card with the licence.
SMALL_FILES = ["*.json", "*.txt", "sentencepiece*.model", "spm.model", "tokenizer.model", "README.md"]
# Legacy fairseq pickles the embedding as a module beside the state dict. Restoring one sets attributes and runs
# nothing, so this class joins torch's own list of what a pickle may hold.
ALLOWED_CLASSES: list[Any] = [torch.nn.Embedding]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its authors laid it out.

    Args:
        source: what it is called: a Hub id, or the name of a file or folder.
        files: the files that hold the weights.
        tensors: all of its tensors by name; containers and the prefix `module.` are taken off.
        config: the `config.json` beside the weights; empty where there is none.
        revision: the commit, of a Hub repository.
        license: what the README of the folder or repository states, in the Hub's notation; None where it states none.
        set_aside: entries of a pickle beside its tensors that were not looked at, such as the optimizer.
    """

    source: str
    files: tuple[Path, ...]
    tensors: dict[str, torch.Tensor]
    config: Mapping[str, Any]
    revision: str | None = None
    license: str | None = None
    set_aside: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the weights lie, and with them configurations and tokenizer."""
        return self.files[0].parent

    @cached_property
    def sha256(self) -> str:
        """Of the file; of several parts, one after the other in the order of their names."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


def read_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Reads a checkpoint from wherever it is.

    Args:
        source: a file, a folder, a Hub id (`mispeech/ced-base`), or a Hub id and a file of it
            (`lukewys/laion_clap/630k-audioset-best.pt`).
        revision: commit, branch or tag of the Hub repository.

    Raises:
        OSError: the Hub has no such repository or file, or cannot be reached.
        ValueError: nothing is there, no or several checkpoints are, or a file cannot be read safely.
    """
    path = Path(source).expanduser()
    name, commit = path.resolve().name, None
    if not path.exists():
        path, name, commit = _download(str(source), revision)
    files = _weight_files(path) if path.is_dir() else (path,)
    tensors: dict[str, torch.Tensor] = {}
    set_aside: list[str] = []
    for file in files:
        part, others = state_dict_of(_load(file), file.name)
        if twice := sorted(part.keys() & tensors.keys()):
            raise ValueError(f"{source}: {len(twice)} tensors stand in several files, among them {twice[:3]}")
        tensors.update(part)
        set_aside += others
    config_file, card = (files[0].parent / other for other in ("config.json", "README.md"))
    return Checkpoint(
        source=name,
        files=files,
        tensors=_without_module_prefix(tensors),
        config=_read_json(config_file) if config_file.is_file() else {},
        revision=commit,
        # A single file may lie beside a README of something else.
        license=ModelCard.load(card).data.get("license") if path.is_dir() and card.is_file() else None,
        set_aside=tuple(set_aside),
    )


def state_dict_of(loaded: Any, name: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of what a file held: flat, or under "state_dict" or "model".

    Legacy fairseq has an `embed_tokens` module beside its state dict; its weight joins the others.

    Args:
        loaded: what was read.
        name: of the file, for the message of an error.

    Returns:
        The tensors by name, and the names of the other entries of the container.

    Raises:
        ValueError: there are no tensors, or not only tensors.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{name} holds a {type(loaded).__name__}; a checkpoint is a mapping of names to tensors")
    container = next((key for key in ("state_dict", "model") if isinstance(loaded.get(key), Mapping)), None)
    tensors = dict(loaded if container is None else loaded[container])
    others = [] if container is None else [str(key) for key in loaded if key != container]
    if "embed_tokens" in others:
        others.remove("embed_tokens")
        tensors["embed_tokens.weight"] = _legacy_embedding(loaded["embed_tokens"], tensors, name)
    if strangers := [str(key) for key, value in tensors.items() if not isinstance(value, torch.Tensor)]:
        raise ValueError(
            f"{name} holds {len(strangers)} entries that are no tensors, the first {strangers[0]!r}, and neither "
            "'state_dict' nor 'model'; give a file of tensors"
        )
    if not tensors:
        raise ValueError(f"{name} holds no tensors")
    return {key: value.detach() for key, value in tensors.items()}, others


def _legacy_embedding(module: Any, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    weight = getattr(module, "weight", module)
    if not isinstance(weight, torch.Tensor):
        raise ValueError(f"{name}: embed_tokens is a {type(module).__name__} without a tensor as its weight")
    other = tensors.get("embed_tokens.weight")
    if other is not None and not torch.equal(other, weight):
        raise ValueError(f"{name} has two embeddings that differ: embed_tokens and state_dict['embed_tokens.weight']")
    return weight


def _without_module_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names without the `module.` that distributed training puts before every one."""
    if not all(name.startswith("module.") for name in tensors):
        return tensors
    return {name.removeprefix("module."): value for name, value in tensors.items()}


def _download(source: str, revision: str | None) -> tuple[Path, str, str]:
    """A Hub repository's files, or one of them; the repository's name and commit."""
    if not is_hub_id("/".join(source.split("/")[:2])):
        raise ValueError(f"{source} is no file, no folder and no Hub id such as mispeech/ced-base")
    try:
        return _fetch(source, revision)
    except (OSError, HfHubHTTPError) as error:
        raise OSError(f"{source} is no file or folder here, and cannot be had from the Hub: {error}") from error


def _fetch(source: str, revision: str | None) -> tuple[Path, str, str]:
    owner, repository, *rest = source.split("/")
    name = f"{owner}/{repository}"
    if rest:
        path = Path(hf_hub_download(name, "/".join(rest), revision=revision))
        return path, name, path.parents[len(rest) - 1].name
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES, "model*.safetensors"]))
    if not any((folder / file).is_file() for file in WEIGHT_FILES[:2]):
        snapshot_download(name, revision=revision, allow_patterns=["pytorch_model*.bin"])
    return folder, name, folder.name


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The files of a folder's one checkpoint."""
    for path in (folder / name for name in WEIGHT_FILES):
        if path.is_file() and path.suffix == ".json":
            parts = set(_read_json(path, "weight_map").values())
            if lacking := sorted(part for part in parts if not (folder / part).is_file()):
                raise ValueError(f"{folder} lacks {len(lacking)} of the files in {path.name}, among them {lacking[:3]}")
            return tuple(folder / part for part in sorted(parts))
        if path.is_file():
            return (path,)
    found = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"{folder} must hold one checkpoint ({' or '.join(WEIGHT_FILES[::2])}, or one file); has {names}"
        )
    return (found[0],)


def _load(path: Path) -> Any:
    """What a file of tensors holds; pickles are read as data and run nothing."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals(ALLOWED_CLASSES):
            # Mapped, where the format allows it: a training checkpoint is mostly its optimizer.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except PermissionError:
        raise
    except Exception as error:  # torch's reader meets bytes that are no pickle with KeyError, OSError and others
        if isinstance(error, pickle.UnpicklingError) and _may_be_a_pickle(path):
            raise ValueError(_unsafe(path, error)) from error
        raise ValueError(damaged(path, error)) from error


def _may_be_a_pickle(path: Path) -> bool:
    """Whether it begins as what torch saves: an archive, or before torch 1.6 a pickle of protocol 2."""
    with path.open("rb") as file:
        return zipfile.is_zipfile(path) or file.read(1) == pickle.PROTO


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


def _unsafe(path: Path, error: Exception) -> str:
    """What a refused pickle asks for, and what to do about it."""
    wanted = ", ".join(_foreign_globals(path)) or _cause(error)
    keep = "{k: c[k] for k in ('state_dict', 'model', 'embed_tokens') if k in c} or c"
    return (
        f"{path} is a pickle that holds more than tensors: {wanted}. Reading it could run code, so it is not read. "
        "Where you trust whoever made the file, keep its tensors only, in an environment that has those classes:\n"
        "  python -c \"import sys, torch; c = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
        f'torch.save({keep}, sys.argv[2])" {path.name} tensors.pt\n'
        "and convert tensors.pt"
    )


def _cause(error: Exception) -> str:
    """The one line of torch's explanation that is about this file."""
    general = ("Weights only load failed", "Please file an issue", "Check the documentation")
    told = [line for line in str(error).splitlines() if line.strip() and not line.startswith(general)]
    return told[0].rstrip(".") if told else "something that torch does not name"


def _foreign_globals(path: Path) -> Iterator[str]:
    if zipfile.is_zipfile(path):
        allowed = {f"{each.__module__}.{each.__qualname__}" for each in ALLOWED_CLASSES}
        yield from sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path))) - allowed)
