"""Disk cache for embeddings, keyed by a hash of the model, the data and the audio settings."""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import atomic_write

CACHE_VERSION = 4
"""Cache format version; increase it whenever the stored arrays change."""

Arrays = dict[str, np.ndarray]


class EmbeddingCache:
    """Embedding cache: a folder of npz files, each named by the hash of its key.

    Writes are atomic, so several processes can share the folder. Files are never removed; delete the folder to free
    the space.

    Args:
        folder: Cache folder. None: disable the cache.

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

    @classmethod
    def default(cls) -> EmbeddingCache:
        """Create a cache in the Hugging Face cache folder, `$HF_HOME/supclap/embeddings`."""
        from huggingface_hub.constants import HF_HOME  # reads environment variables that the commands set

        return cls(Path(HF_HOME) / "supclap" / "embeddings")

    def fetch(self, key: Mapping[str, Any], make: Callable[[], Arrays], keep: bool = True) -> Arrays:
        """Load the named arrays for a key from the cache, or compute them with `make` and store them.

        If `keep` is False, the cache is neither read nor written. If a cached file is unreadable, its arrays are
        computed again, with a warning.
        """
        path = None
        if self.folder is not None and keep:
            name = digest_of({"cache": CACHE_VERSION, **key})
            path = self.folder / name[:2] / f"{name}.npz"

        if path is not None and path.is_file():
            try:
                with np.load(path, allow_pickle=False) as stored:
                    arrays = dict(stored)
                self.read += 1
                return arrays
            except Exception as error:
                warnings.warn(f"{path} cannot be read ({error}); computing its embeddings again", stacklevel=3)

        arrays = make()
        self.embedded += 1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as unfinished:
                unfinished.write_bytes(pack_arrays(arrays))
        return arrays


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
