"""Disk cache for embeddings, keyed by a hash of the model, the data and the audio settings."""

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
"""Cache format version; increase it whenever the stored arrays change."""

Arrays = dict[str, np.ndarray]

_MAX_IN_MEMORY = 32


class EmbeddingCache:
    """Embedding cache: a folder of npz files, each named by the hash of its key.

    Writes are atomic, so several processes can share the folder. Files are never removed; delete the folder to free
    the space. The last 32 entries also stay in memory.

    Args:
        folder: Cache folder; None caches in memory only.

    Attributes:
        read: Number of entries read from disk.
        embedded: Number of entries computed.

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
        self._recent: dict[str, Arrays] = {}

    @classmethod
    def default(cls) -> EmbeddingCache:
        """Create a cache in the Hugging Face cache folder, `$HF_HOME/supclap/embeddings`."""
        return cls(Path(constants.HF_HOME) / "supclap" / "embeddings")

    def fetch(self, key: Mapping[str, Any], make: Callable[[], Arrays], keep: bool = True) -> Arrays:
        """Load the arrays for a key from the cache, or compute and store them.

        Args:
            key: JSON-serialisable values that determine the arrays.
            make: Function that computes the arrays if they are not cached.
            keep: Whether to use the cache. False always computes the arrays and does not store them; needed if the key
                does not identify the model.

        Returns:
            Dict from array name to array.

        Warns:
            UserWarning: A cached file is unreadable; its arrays are computed again.
        """
        if not keep:
            self.embedded += 1
            return make()

        name = digest_of({"cache": CACHE_VERSION, **key})
        path = None if self.folder is None else self.folder / name[:2] / f"{name}.npz"
        arrays = self._recent.pop(name, None)
        if arrays is None and path is not None and path.is_file():
            try:
                with np.load(path, allow_pickle=False) as stored:
                    arrays = dict(stored)
                self.read += 1
            except Exception as error:
                warnings.warn(f"{path} cannot be read ({error}); computing its embeddings again", stacklevel=3)
        if arrays is None:
            arrays = make()
            self.embedded += 1
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as unfinished:
                    unfinished.write_bytes(pack_arrays(arrays))

        self._recent[name] = arrays  # the newest entry is last
        if len(self._recent) > _MAX_IN_MEMORY:
            del self._recent[next(iter(self._recent))]
        return arrays

    def file_digest(self, path: str | Path) -> str:
        """Return the SHA-256 of a file's content as a hex string.

        The digest is cached; the file is read again only if its path, size, inode, mtime or ctime has changed.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no audio file {path}")

        stored = None if self.folder is None else self.folder / "digests.json"
        if self._digests is None:
            self._digests = {}
            if stored is not None and stored.is_file():
                self._digests = _load_digests(stored)

        # Size and mtime alone cannot detect that two files have swapped their names.
        stat = os.stat(path)
        key = f"{os.path.abspath(path)}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}|{stat.st_ctime_ns}"
        if key not in self._digests:
            with open(path, "rb") as file:
                self._digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digests[key]

    def save_digests(self) -> None:
        """Write the digests from `file_digest` to disk, so that the next run does not hash the files again."""
        if self.folder is None or not self._digests:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "digests.json", self._digests)


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON-serialisable value as a hex string, independent of key order and machine.

    >>> digest_of({"b": 1, "a": 2}) == digest_of({"a": 2, "b": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialise named arrays to npz bytes. Equal arrays produce equal bytes; names may contain slashes."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    return packed.getvalue()


def _load_digests(path: Path) -> dict[str, str]:
    try:
        digests = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise ValueError("expected a JSON object of strings")
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read ({error}); hashing the recordings again", stacklevel=3)
        return {}

    return digests
