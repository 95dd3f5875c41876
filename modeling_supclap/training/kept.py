"""Features of clips and outputs of frozen towers, kept between epochs, evaluations and runs.

A value has a hash of everything that it depends on as its key, so a value that is found is never outdated: for a clip
its recording, its part and its front end, for a text its tokens, and for the output of a tower also the weights of the
tower. An output is stored before the projection, so that the projection can still be trained.
"""

from __future__ import annotations

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
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast_object_list
from safetensors.torch import load, save
from torch import Tensor

from modeling_supclap.datasets_scripts.audio import content_of, segment_of

from .. import __version__
from .grad_cache import Rows
from .training_args import SupCLAPTrainingArguments

PAGE_BYTES = 16_384
FILE = "supclap-features.sqlite"

Values = dict[bytes, dict[str, Tensor]]


class KeptValues:
    """Store of named tensors in one SQLite file, for all processes of a run and for several runs.

    A full store keeps what it has and adds nothing. Damaged values are not found, and are replaced.

    Args:
        folder: Folder of the file.
        limit_bytes: Maximum size of the file.
        is_temporary: Whether to delete the folder when this object is deleted, or at exit.

    Attributes:
        towers: Keys of the frozen towers whose outputs are kept, `{"audio": key, "text": key}`.
        versions: Versions of the weights of these towers (see `ContrastiveModule.get_version`).

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept = KeptValues(folder)
        ...     kept.add({b"rain": {"output": torch.ones(2)}})
        ...     kept.find([b"rain", b"wind"])
        {b'rain': {'output': tensor([1., 1.])}}
    """

    def __init__(self, folder: str, limit_bytes: int = 2 << 30, is_temporary: bool = False) -> None:
        self.path, self.limit_bytes = os.path.join(folder, FILE), limit_bytes
        self.towers: dict[str, bytes] = {}
        self.versions: dict[str, int] = {}
        self._is_full = False
        # one for each process, because a forked process must not use the connection of its parent
        self._connections: dict[int, sqlite3.Connection] = {}
        # ends with this object or this process, and does nothing in forked ones
        Finalize(self, _close, (self._connections, folder if is_temporary else None), exitpriority=0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned process, which opens its own connection."""
        return {**vars(self), "_connections": {}}

    def find(self, keys: Iterable[bytes]) -> Values:
        """Load the values that are stored under these keys and are whole."""
        found = {}
        try:
            for key in keys:
                row = self._connect().execute("SELECT checksum, value FROM kept WHERE key = ?", (key,)).fetchone()
                if row is not None and row[0] == zlib.crc32(row[1]):
                    found[key] = load(row[1])
        except sqlite3.Error as error:
            self._warn(error)
        return found

    def add(self, values: Mapping[Any, Mapping[str, Tensor]]) -> None:
        """Store values, except those whose key is no bytes."""
        rows = []
        for key, value in values.items():
            if isinstance(key, bytes) and not self._is_full:
                content = save({name: tensor.contiguous() for name, tensor in value.items()})
                rows.append((key, zlib.crc32(content), content))
        try:
            with self._connect() as connection:
                connection.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            self._is_full = "full" in str(error)
            if not self._is_full:
                self._warn(error)

    def _connect(self) -> sqlite3.Connection:
        """Return the connection of this process."""
        connection = self._connections.get(os.getpid())
        if connection is None:
            connection = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
            pages = self.limit_bytes // PAGE_BYTES
            for setting in (f"page_size = {PAGE_BYTES}", "journal_mode = WAL", "synchronous = OFF"):
                connection.execute(f"PRAGMA {setting}")
            connection.execute(f"PRAGMA max_page_count = {pages}")
            connection.execute("CREATE TABLE IF NOT EXISTS kept (key BLOB PRIMARY KEY, checksum INTEGER, value BLOB)")
            self._connections[os.getpid()] = connection
        return connection

    def _warn(self, error: sqlite3.Error) -> None:
        warnings.warn(f"{self.path}: {error}; its values are computed again, delete the file", stacklevel=3)

    def set_tower(self, kind: str, version: int | None, weights: Mapping[str, Tensor], *settings: Any) -> None:
        """Set the key of a frozen tower, if its version has changed. None: its outputs are not kept."""
        if version is None:
            self.towers.pop(kind, None)
            self.versions.pop(kind, None)
        elif self.versions.get(kind) != version:
            self.versions[kind] = version
            self.towers[kind] = hash_of(hash_weights(weights), settings)


def open_kept(args: SupCLAPTrainingArguments) -> KeptValues | None:
    """Open the store of a run: in `args.feature_cache`, or in a temporary folder that all its processes share."""
    if not args.feature_cache_gib:
        return None
    folders = [args.feature_cache]
    if folders[0] is None:
        folders = [tempfile.mkdtemp(prefix="supclap-") if args.process_index == 0 else None]
        if args.world_size > 1:
            broadcast_object_list(folders)
    folder = str(folders[0])
    os.makedirs(folder, mode=0o700, exist_ok=True)
    is_temporary = args.feature_cache is None and args.local_process_index == 0
    return KeptValues(folder, round(args.feature_cache_gib * 2**30), is_temporary)


def _close(connections: dict[int, sqlite3.Connection], folder: str | None) -> None:
    """Close the connection of this process, and delete a temporary folder."""
    if os.getpid() in connections:
        connections.pop(os.getpid()).close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def hash_of(*parts: Any) -> bytes:
    """Return a hash of bytes and of other values, by their `repr`."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors: names, shapes, types and values."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    """Return a hash of the settings of a processor and of the versions that compute its features."""
    settings = processor.to_dict()
    for part in (settings, settings["feature_extractor"]):
        part.pop("auto_map", None)  # of a saved processor
    versions = __version__, transformers.__version__, torch.__version__
    return hash_of(json.dumps(settings, sort_keys=True, default=str), options, versions)


def content_keys(inputs: Rows, mask: str) -> list[bytes]:
    """Compute a hash of each input row, without its padding, where the input `mask` is 0."""
    arrays = {name: tensor.cpu().numpy() for name, tensor in sorted(inputs.items())}
    keys = []
    for row, used in enumerate(arrays[mask].astype(bool)):
        keys.append(hash_of(*(array[row][used].tobytes() for array in arrays.values())))
    return keys
