"""Embeddings on disk, found again by what they were made of: the same model, data and policy embed only once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import constants

from modeling_supclap.datasets_scripts.atomic_files import atomic_write, write_json

CACHE_VERSION = 4
"""Raise it with any change to what is stored under a key."""

Arrays = dict[str, np.ndarray]

_MOST_HELD = 32


class EmbeddingCache:
    """A folder of npz files, each named by the hash of its key.

    Files appear whole or not at all, so several processes may share the folder. Nothing is ever removed: delete the
    folder to be rid of it.

    Args:
        folder: Where the files are; None keeps nothing beyond the last few sets, in memory.

    Attributes:
        read: How many sets of embeddings were read from the disk.
        embedded: How many had to be made.

    Example:
        >>> cache = EmbeddingCache(None)
        >>> cache.fetch({"texts": ["rain"]}, lambda: {"embeds": np.ones((1, 2))})["embeds"].shape, cache.embedded
        ((1, 2), 1)
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self.read = 0
        self.embedded = 0
        self._digests: dict[str, str] | None = None
        self._held: dict[str, Arrays] = {}

    @classmethod
    def default(cls) -> EmbeddingCache:
        """The one in Hugging Face's own cache folder, `$HF_HOME/supclap/embeddings`."""
        return cls(Path(constants.HF_HOME) / "supclap" / "embeddings")

    def fetch(self, key: Mapping[str, Any], make: Callable[[], Arrays], keep: bool = True) -> Arrays:
        """Gives what was made of this key before, or makes it now.

        Args:
            key: All that the arrays depend on, in types of JSON.
            make: Makes them.
            keep: False neither looks on the disk nor writes, as where the key does not name the model.

        Returns:
            The arrays by name.
        """
        if not keep:
            self.embedded += 1
            return make()

        name = digest_of({"cache": CACHE_VERSION, **key})
        path = None if self.folder is None else self.folder / name[:2] / f"{name}.npz"
        arrays = self._held.pop(name, None)
        if arrays is None and path is not None and path.is_file():
            try:
                with np.load(path, allow_pickle=False) as stored:
                    arrays = dict(stored)
                self.read += 1
            except Exception as error:
                warnings.warn(f"{path} cannot be read ({error}); its embeddings are made again", stacklevel=3)
        if arrays is None:
            arrays = make()
            self.embedded += 1
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as unfinished:
                    unfinished.write_bytes(pack_arrays(arrays))

        self._held[name] = arrays  # the youngest last
        if len(self._held) > _MOST_HELD:
            del self._held[next(iter(self._held))]
        return arrays

    def file_digest(self, path: str | Path) -> str:
        """The SHA-256 of a file's bytes; read again only when the file system says that it may be another file.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: There is no such file.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no audio file {path}")

        remembered = None if self.folder is None else self.folder / "digests.json"
        if self._digests is None:
            self._digests = {}
            if remembered is not None and remembered.is_file():
                self._digests = _load_digests(remembered)

        # Size and time of change alone do not tell two files apart that have exchanged their names.
        found = os.stat(path)
        known = f"{os.path.abspath(path)}|{found.st_size}|{found.st_mtime_ns}|{found.st_ino}|{found.st_ctime_ns}"
        if known not in self._digests:
            with open(path, "rb") as file:
                self._digests[known] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digests[known]

    def save_digests(self) -> None:
        """Keeps what `file_digest` has found for the next run."""
        if self.folder is None or not self._digests:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "digests.json", self._digests)


def digest_of(value: Any) -> str:
    """The SHA-256 of a value of JSON's types, in hex; the same on every machine.

    >>> digest_of({"b": 1, "a": 2}) == digest_of({"a": 2, "b": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays by name, which may hold slashes, as the bytes of an npz; the same bytes for the same arrays."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    return packed.getvalue()


def _load_digests(path: Path) -> dict[str, str]:
    try:
        digests = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise ValueError("it is no object of strings")
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read ({error}); the recordings are read again", stacklevel=3)
        return {}

    return digests
