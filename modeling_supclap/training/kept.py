"""Features of clips and outputs of frozen towers, kept between epochs, evaluations and runs.

A value has a hash of everything that it depends on as its key, so a value that is found is never outdated: for a clip
its recording, its part and its front end, for a text its tokens, and for the output of a tower also the weights of the
tower. An output is stored before the projection, so that the projection can still be trained.
"""

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Mapping
from multiprocessing.util import Finalize
from typing import Any, Self

import numpy as np
import torch
import transformers
from accelerate.utils import broadcast_object_list
from safetensors.numpy import load, save
from torch import Tensor

from modeling_supclap.datasets_scripts.audio import content_of, segment_of

from .. import __version__
from .grad_cache import Rows
from .training_args import SupCLAPTrainingArguments

FILE = "supclap-features.sqlite"
PAGE_BYTES = 16_384
VERSIONS = __version__, transformers.__version__, torch.__version__
"""Versions of what computes the values; they are part of all keys."""
SETTINGS = (
    f"PRAGMA page_size = {PAGE_BYTES}",
    "PRAGMA journal_mode = WAL",  # readers do not wait for writers
    "PRAGMA synchronous = OFF",  # checksums find what a crash of the machine damages
    "PRAGMA max_page_count = {}",
    "CREATE TABLE IF NOT EXISTS kept (key BLOB PRIMARY KEY, checksum INTEGER, value BLOB)",
)

Key = bytes | int
"""Hash of a clip or a text, or a number for a clip whose values are not kept."""

Values = dict[Key, dict[str, np.ndarray]]


class KeptValues:
    """Store of named arrays in one SQLite file, for all processes of a run and for several runs.

    A full store keeps what it has and adds nothing. Damaged values are not found, and are replaced.

    Args:
        folder: Folder of the file. None: nothing is kept.
        limit_bytes: Maximum size of the file.
        is_temporary: Whether to delete the folder with this object, or at exit.

    Attributes:
        towers: Keys of the frozen towers whose outputs are kept, `{"audio": key, "text": key}`.
        versions: Versions of the weights of these towers (see `ContrastiveModule.get_version`).

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept = KeptValues(folder)
        ...     kept.add({b"rain": {"output": np.ones(2)}})
        ...     kept.find([b"rain", b"wind"])
        {b'rain': {'output': array([1., 1.])}}
    """

    def __init__(self, folder: str | None = None, limit_bytes: int = 2 << 30, is_temporary: bool = False) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.towers: dict[str, bytes] = {}
        self.versions: dict[str, int] = {}
        # one for each process, because a forked process must not use the connection of its parent
        self._connections: dict[int, sqlite3.Connection] = {}
        # with this object or at the end of its process, not in forked ones
        Finalize(self, _close, (self._connections, folder if is_temporary else None), exitpriority=0)

    @classmethod
    def open(cls, args: SupCLAPTrainingArguments) -> Self:
        """Open the store of a run: in `args.feature_cache`, or in a temporary folder that all its processes share."""
        if not args.feature_cache_gib:
            return cls()
        folders = [args.feature_cache]
        if args.feature_cache is None:
            folders = [tempfile.mkdtemp(prefix="supclap-features-") if args.process_index == 0 else None]
            broadcast_object_list(folders)
        is_temporary = args.feature_cache is None and args.local_process_index == 0
        return cls(folders[0], round(args.feature_cache_gib * 2**30), is_temporary)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned process, which opens its own connection."""
        return {**vars(self), "_connections": {}}

    def find(self, keys: Iterable[Key], tower: bytes | None = None) -> Values:
        """Load those values that are stored and whole: features, or outputs of the tower with this key."""
        found: Values = {}
        for key in keys:
            rows = self._execute("SELECT checksum, value FROM kept WHERE key = ?", hash_of(tower, key))
            if rows and rows[0][0] == zlib.crc32(rows[0][1]):
                found[key] = load(rows[0][1])
        return found

    def add(self, values: Values, tower: bytes | None = None) -> None:
        """Store features, or outputs of the tower with this key."""
        for key, value in values.items():
            if isinstance(key, bytes):
                content = save({name: np.ascontiguousarray(array) for name, array in value.items()})
                row = hash_of(tower, key), zlib.crc32(content), content
                self._execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", *row)

    def _execute(self, command: str, *values: Any) -> list[Any]:
        """Execute a command in the connection of this process. Without a folder, or after an error, return no rows."""
        if self.folder is None:
            return []
        try:
            if os.getpid() not in self._connections:
                os.makedirs(self.folder, mode=0o700, exist_ok=True)
                path = os.path.join(self.folder, FILE)
                connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
                for setting in SETTINGS:
                    connection.execute(setting.format(max(1, self.limit_bytes // PAGE_BYTES)))
                self._connections[os.getpid()] = connection
            return self._connections[os.getpid()].execute(command, values).fetchall()
        except sqlite3.Error as error:
            if "full" not in str(error):
                advice = "it is not used; delete it if it is damaged"
                warnings.warn(f"{os.path.join(self.folder, FILE)}: {error}; {advice}", stacklevel=3)
            return []

    def set_tower(self, kind: str, version: int | None, weights: Mapping[str, Tensor], *settings: Any) -> None:
        """Set the key of a frozen tower, if its version has changed. None: its outputs are not kept."""
        if version is None:
            self.towers.pop(kind, None)
        elif kind not in self.towers or self.versions[kind] != version:
            self.towers[kind] = hash_of(hash_weights(weights), settings, VERSIONS)
            self.versions[kind] = version


def _close(connections: dict[int, sqlite3.Connection], folder: str | None) -> None:
    """Close the connection of this process, and delete a temporary folder."""
    if os.getpid() in connections:
        connections.pop(os.getpid()).close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def hash_of(*parts: Any) -> bytes:
    """Return a hash of bytes, and of other values by their `repr`."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes | memoryview) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.digest()


def hash_weights(weights: Mapping[str, Tensor]) -> bytes:
    """Return a hash of named tensors: names, shapes, types and values."""
    digest = b""
    for name, weight in sorted(weights.items()):
        content = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        digest = hash_of(digest, name, weight.dtype, tuple(weight.shape), content)
    return digest


def hash_recording(row: Mapping[str, Any]) -> bytes | None:
    """Return a hash of a row's recording and its segment, or None for a file that is not local.

    Audio in the row is hashed by its bytes, and a file by its path, size and modification time.
    """
    content = content_of(row)
    if isinstance(content, bytes):
        return hash_of(content, segment_of(row))
    try:
        state = os.stat(content)
    except OSError:
        return None
    return hash_of(os.path.abspath(content), state.st_size, state.st_mtime_ns, segment_of(row))


def hash_front_end(processor: Any, *options: Any) -> bytes:
    """Return a hash of the settings of a processor, of the options, and of `VERSIONS`."""
    settings = processor.to_dict()
    for part in (settings, settings["feature_extractor"]):
        part.pop("auto_map", None)  # of a saved processor
    return hash_of(json.dumps(settings, sort_keys=True, default=str), options, VERSIONS)


def content_keys(inputs: Rows, mask: str) -> list[bytes]:
    """Compute a hash of each input row, without its padding, where the input `mask` is 0."""
    names = sorted(inputs)
    keys = []
    for row, used in enumerate(inputs[mask].bool()):
        keys.append(hash_of(*(inputs[name][row][used].numpy().tobytes() for name in names)))
    return keys
