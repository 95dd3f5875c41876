"""Search index for a folder of recordings: embeddings of overlapping windows, with start and end times.

The index is a LanceDB database in a local folder or in object storage. The window table contains the embeddings.
From 200,000 windows, it has an approximate nearest-neighbour index. The file table contains the size, times, SHA-256
and read error of each file, so that a new run skips unchanged files and continues after a crash.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modeling_supclap.datasets_scripts.atomic_files import file_sha256, folder_lock
from modeling_supclap.datasets_scripts.audio import MissingDecoderError
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.remote_files import local_folder

from ..audio_input import Recording
from ..encoding import AudioChunks
from ..evaluation import EmbeddingModel
from ..evaluation.vectors import PRECISIONS, require_storage, score, shorten
from ..evaluation.windows import list_recordings, window_table

# Minimum number of windows for approximate search. With fewer windows, search is exact, in memory, and faster.
APPROXIMATE_FROM_ROWS = 200_000
# If the share of new windows exceeds this, the partitions of the approximate index no longer fit, and it is rebuilt.
_NEW_SHARE = 0.1
_CACHE_BYTES = 2**29  # memory cache for the approximate index
_FILES_AT_ONCE = 64  # recordings per write
_COLUMNS = ["file", "start_seconds", "end_seconds"]  # of the window table, besides the vectors
_ABOUT = ("model", "fingerprint", "window_seconds", "hop_seconds", "folder")  # required metadata of an index

FILES_SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("size", pa.int64()),
        ("modified_ns", pa.int64()),
        ("changed_ns", pa.int64()),
        ("digest", pa.string()),
        ("duration_seconds", pa.float64()),
        ("problem", pa.string()),
    ]
)


@dataclass
class IndexReport:
    """Summary of a `build_index` call: numbers of files and windows, and the duration of the call.

    Attributes:
        added: Number of new files. Unreadable files are not counted as added, changed or unchanged.
        changed: Number of files with changed content, or that were unreadable before.
        removed: Number of files that no longer exist.
        unreadable: Unreadable files, `{path: error message}`.
        recall: Recall@10 of the approximate index compared with exact search. None if search is exact or no windows
            were added.
    """

    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    windows: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    recall: float | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.added} files added, {self.changed} changed, {self.removed} removed, {self.unchanged} unchanged",
            f"{self.windows} windows in the index ({self.seconds:.1f} s)",
        ]
        if self.recall is not None:
            lines.append(f"the approximate index finds {100 * self.recall:.1f} % of the ten best windows")
        for file, problem in self.unreadable.items():
            lines.append(f"cannot read {file}: {problem}")
        return "\n".join(lines)


class Stamp(NamedTuple):
    """Size (bytes), modification time and change time (ns) of a file, used to detect files that may have changed.

    The modification time alone is not reliable, because programs can set it.
    """

    size: int
    modified_ns: int
    changed_ns: int


# Stamp for a file that was deleted or changed during reading, or was unreadable. The next run reads the file again.
_UNKNOWN = Stamp(0, 0, 0)


class SoundIndex:
    """Search index of audio windows in LanceDB. Reads always include the latest writes of other processes.

    Args:
        folder: Local folder of the index, or a URL of object storage that LanceDB supports (`s3://...`).
        dim: Embedding dimension. The index is created if it does not exist. None: open an existing index only.

    Raises:
        FileNotFoundError: The index does not exist, and `dim` is None.
        ImportError: LanceDB is not installed.
        ValueError: The index is damaged.
    """

    def __init__(self, folder: str | Path, dim: int | None = None, about: dict[str, str] | None = None) -> None:
        self.folder = str(folder)
        missing = f"there is no index in {folder}; create one with `supclap search index`"
        if dim is None and "://" not in self.folder and not Path(folder).is_dir():
            raise FileNotFoundError(missing)  # LanceDB would create the folder

        self._loaded: tuple[int, pa.Table, np.ndarray] | None = None  # version, windows, and their vectors
        try:
            import lancedb
        except ImportError as error:
            raise ImportError("search needs LanceDB: pip install 'supclap[search]'") from error
        session = lancedb.Session(index_cache_size_bytes=_CACHE_BYTES)
        database = lancedb.connect(self.folder, session=session, read_consistency_interval=timedelta(0))
        names = self._read(lambda: database.list_tables().tables)
        # A kill or a full disk can leave the folder of a table without a version.
        versions = Path(self.folder, "files.lance", "_versions")
        if "files" in names and ("://" in self.folder or list(versions.glob("*.manifest"))):
            self.windows = self._read(lambda: database.open_table("windows"))
            self.files = self._read(lambda: database.open_table("files"))
        elif dim is None:
            raise FileNotFoundError(missing)
        else:
            columns = {"file": pa.string(), "start_seconds": pa.float64(), "end_seconds": pa.float64()}
            precision, width = _storage(about or {})
            kind = pa.from_numpy_dtype(PRECISIONS[precision])
            size = require_storage(dim, precision, width)
            schema = pa.schema({**columns, "vector": pa.list_(kind, size)}, metadata=about)
            self.windows = database.create_table("windows", schema=schema, exist_ok=True)
            self.files = database.create_table("files", schema=FILES_SCHEMA, exist_ok=True)

    @property
    def dim(self) -> int:
        """Dimension of the embeddings, which may be stored in a smaller form."""
        return int(self._metadata().get("dim", self._stored_size))

    @property
    def _stored_size(self) -> int:
        return self.windows.schema.field("vector").type.list_size

    @property
    def precision(self) -> str:
        """Form of the stored vectors: float32, int8 or binary."""
        return _storage(self._metadata())[0]

    @property
    def about(self) -> dict[str, str]:
        """Metadata of the index. Raises ValueError if a key is missing, as in a database of another program."""
        about = self._metadata()
        if missing := ", ".join(key for key in _ABOUT if key not in about):
            raise ValueError(f"{self.folder} has no metadata {missing}; use an index made by `supclap search index`")
        return about

    def _metadata(self) -> dict[str, str]:
        metadata = {}
        for key, value in (self.windows.schema.metadata or {}).items():
            metadata[key.decode()] = value.decode()
        return metadata

    def known_files(self) -> dict[str, dict[str, Any]]:
        """Return the file table as `{file path: row}`."""
        return {row["file"]: row for row in self._read(lambda: self.files.to_arrow()).to_pylist()}

    def holds(self, file: str) -> bool:
        """Return whether the index contains a recording. `file` is its path relative to the indexed folder."""
        query = self.files.search().where(f"file = {quoted(file)}").limit(1)
        return bool(self._read(query.to_list))

    def replace(self, entries: Sequence[IndexedFile]) -> None:
        """Replace the entries of files. Write the file table last, so that the next run repeats an interrupted call."""
        self._delete([entry.file for entry in entries], (self.files, self.windows))

        rows, tables = [], []
        dim, (precision, width) = self.dim, _storage(self._metadata())
        for entry in entries:
            rows.append(entry.as_row())
            tables.append(window_table(entry.windows, dim, "vector", precision, width, file=entry.file))
        windows = pa.concat_tables(tables)
        if len(windows):
            self.windows.add(windows.cast(self.windows.schema))
        self.files.add(pa.Table.from_pylist(rows, schema=FILES_SCHEMA))

    def remove(self, files: Sequence[str]) -> None:
        """Remove files and windows. Change the file table last, so that the next run repeats an interrupted call."""
        self._delete(files, (self.windows, self.files))

    def _delete(self, files: Sequence[str], tables: Sequence[Any]) -> None:
        for start in range(0, len(files), 500):
            listed = ", ".join(quoted(name) for name in files[start : start + 500])
            for table in tables:
                table.delete(f"file IN ({listed})")

    def optimize(self) -> float | None:
        """Merge fragments of the tables. With at least `APPROXIMATE_FROM_ROWS` windows, update the approximate index.

        Return the recall@10 of the approximate index, measured with 20 random windows as queries. Return None if search
        is exact or no windows were added.
        """
        rows = self.windows.count_rows()
        new_rows = self.windows.index_stats("vector_idx").num_unindexed_rows if self.is_approximate else rows

        if new_rows:
            self.windows.optimize()
        is_large = rows >= APPROXIMATE_FROM_ROWS and self.precision == "float32"
        if is_large and new_rows > _NEW_SHARE * rows:
            # With 5 bits per number, the index is a sixth of the vectors and fits into memory. The scores of hits
            # are computed from the vectors. LanceDB can quantise only multiples of 8 numbers. With a number of
            # partitions instead of their size, `optimize` would join them, which lowers the recall.
            from lancedb.index import IvfFlat, IvfRq

            kind = IvfFlat if self._stored_size % 8 else partial(IvfRq, num_bits=5)
            size = math.isqrt(rows)
            config = kind(distance_type="dot", target_partition_size=size, sample_rate=64, max_iterations=20)
            self.windows.create_index("vector", config=config, replace=True)

        # Delete old versions now, because they double the size on disk. Processes that read them retry in `_read`.
        # twice, because the first call may write a new index
        for table in (self.files, self.windows, self.windows):
            table.optimize(cleanup_older_than=timedelta(milliseconds=1))
        if new_rows and is_large:
            # last, because the calls above may change the index
            return self.measure_recall(self.draw_vectors(20))
        return None

    @property
    def is_approximate(self) -> bool:
        """Whether there is an approximate index for the windows."""
        return bool(self.windows.list_indices())

    def draw_vectors(self, count: int, seed: int = 0) -> list[list[float]]:
        """Sample the embeddings of random windows, as queries for `measure_recall`."""
        indices = np.random.default_rng(seed).choice(self.windows.count_rows(), size=count, replace=False)
        return self.windows.take_offsets(sorted(indices.tolist())).select(["vector"]).to_arrow()["vector"].to_pylist()

    def measure_recall(self, vectors: Sequence[Any]) -> float:
        """Compute the recall@10 of the approximate index compared with exact search, for query embeddings (d,)."""
        num_matches = 0
        for vector in vectors:
            exact = self.nearest(vector, 10, exact=True)
            for row in self.nearest(vector, 10):
                num_matches += _place(row) in map(_place, exact)
        return num_matches / (10 * len(vectors))

    def nearest(self, vector: Any, limit: int, within: str | None = None, exact: bool = False) -> list[dict[str, Any]]:
        """Return the windows with the highest cosine to an embedding.

        `within` limits the search to one file. `exact` scores all windows even if there is an approximate index.

        Returns:
            Dicts with `file`, `start_seconds`, `end_seconds` and `score`, best first. Equal scores are sorted by file
            and time.
        """
        rows = self._read(self.windows.count_rows)
        limit = min(limit, rows)
        if not limit:
            return []
        precision, width = _storage(self._metadata())
        query = np.asarray(vector, np.float32)
        if len(query) == self.dim:  # not the vector of a window
            query = shorten(query, width)
        if precision != "float32" or (rows < APPROXIMATE_FROM_ROWS and not self.is_approximate):
            hits = self._nearest_in_memory(query, limit, within, exact)
        else:
            hits = self._nearest_in_store(query, limit, within, exact)
        return sorted(hits, key=lambda row: (-row["score"], row["file"], row["start_seconds"]))[:limit]

    def _nearest_in_memory(
        self, vector: np.ndarray, limit: int, within: str | None, exact: bool = False
    ) -> list[dict[str, Any]]:
        version = self.windows.version
        if self._loaded is None or self._loaded[0] != version:  # another process may have changed the table
            table = self._read(self.windows.to_arrow)
            vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(len(table), self._stored_size)
            self._loaded = version, table.select(_COLUMNS), vectors
        _, table, vectors = self._loaded
        chosen = np.arange(len(table)) if within is None else np.flatnonzero(pc.equal(table["file"], within))
        among = vectors if within is None else vectors[chosen]
        found, scores = score(among, vector, self.precision, len(among) if exact else limit)
        indices = chosen[found]
        if limit < len(indices):  # keep all windows that tie with the last one
            best = np.flatnonzero(scores >= np.partition(scores, -limit)[-limit])
            indices, scores = indices[best], scores[best]

        return table.take(indices).append_column("score", pa.array(scores)).to_pylist()

    def _nearest_in_store(
        self, vector: np.ndarray, limit: int, within: str | None, exact: bool
    ) -> list[dict[str, Any]]:
        query = self.windows.search(vector, vector_column_name="vector")
        query = query.distance_type("dot").select([*_COLUMNS, "_distance"]).limit(limit)
        if within is not None:
            query = query.where(f"file = {quoted(within)}", prefilter=True)
        if exact:
            query = query.bypass_vector_index()
        elif self.is_approximate:
            query = query.nprobes(256).refine_factor(30)

        # LanceDB's distance is 1 - dot product.
        rows = self._read(query.to_list)
        for row in rows:
            row["score"] = 1.0 - row["_distance"]
        return rows

    def _read(self, read: Callable[[], Any]) -> Any:
        """Call `read`. If it fails, retry once, because another process may have replaced the table."""
        failures = (RuntimeError, OSError, ValueError, pa.ArrowException)
        with suppress(*failures):
            return read()
        try:
            return read()
        except failures as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"the index {self.folder} is damaged: {reason}; delete it and index again") from error


class IndexedFile(NamedTuple):
    """Windows of one file, or the error if the file is unreadable.

    The digest is "" if it is unknown. `stamp` is taken before the file is read, so that a change during reading is
    found by the next run.
    """

    file: str  # path relative to the indexed folder, with forward slashes
    stamp: Stamp
    digest: str  # SHA-256 of the content
    windows: AudioChunks

    def as_row(self) -> dict[str, Any]:
        """Return the row of this file in the file table."""
        error = self.windows.error
        return {
            "file": self.file,
            **self.stamp._asdict(),
            "digest": self.digest,
            "duration_seconds": self.windows.offset_seconds.max(initial=0.0),
            "problem": "" if error is None else str(error) or repr(error),
        }


def build_index(
    model: EmbeddingModel,
    folder: str | Path,
    index: str | Path,
    window_seconds: float = 5.0,
    hop_seconds: float = 2.5,
    batch_size: int = 32,
    num_workers: int | None = None,
    show_progress_bar: bool = True,
    process: tuple[int, int] = (0, 1),
    barrier: Callable[[], None] = lambda: None,
    precision: str = "float32",
    width: int | None = None,
    channel: int | None = None,
) -> IndexReport:
    """Build or update a search index: embed new and changed files, and remove deleted files.

    Args:
        folder: Folder with recordings, including its subfolders. A folder at an fsspec address, such as
            "s3://bucket/sounds", is downloaded into the cache of `datasets`.
        index: Folder or URL of the index. It is created if it does not exist.
        window_seconds: Window length in seconds, at most the model's maximum.
        hop_seconds: Time between the starts of consecutive windows in seconds, at most `window_seconds`.
        num_workers: Number of threads that prefetch files. None: use one per core, at most 8.
        process: Tuple of the rank and the number of processes. Each process embeds a part of the files.
        barrier: Function that waits for all processes.
        precision: Form of the stored vectors: "float32", "int8" or "binary" (see `evaluation.vectors`). int8 and binary
            vectors are searched in memory, in indexes of any size.
        width: Number of first values of the embeddings to store, for models with `matryoshka_widths`. None: all.
        channel: Channel of each recording to embed, from 0. None: the mean of all channels.

    Returns:
        Summary of the changes by all processes, in rank 0. In other processes, only `seconds` is set.

    Raises:
        InUseError: Another process is writing to the index.
        FileNotFoundError: The folder does not exist or contains no recordings.
        ValueError: The window or hop is invalid, or the index was built with another model, window or hop. Or the index
            was built from another folder, and this folder contains none of its files.
    """
    model.chunk_samples(window_seconds)  # raises if the model does not support this length
    if not 0 < hop_seconds <= window_seconds:
        raise ValueError(f"hop_seconds is {hop_seconds}; it must be positive and at most {window_seconds=}")

    report, started = IndexReport(), time.perf_counter()
    rank, processes = process
    if rank:
        barrier()
    root = local_folder(folder)
    if not rank:
        barrier()
    is_locked = rank == 0 and "://" not in str(index)
    with folder_lock(index) if is_locked else nullcontext():
        _, files = list_recordings(root)
        if rank == 0:
            settings = {"window_seconds": str(float(window_seconds)), "hop_seconds": str(float(hop_seconds))}
            settings["channel"] = str(channel)
            _create_or_check(model, index, str(root.resolve()), settings, precision, width)
        barrier()

        store = SoundIndex(index)
        known = store.known_files()
        indexed = store.about["folder"]
        if known and not known.keys() & files.keys() and indexed != str(root.resolve()):
            raise ValueError(
                f"{index} is an index of {indexed}, and {root} has none of its files, so all would be removed; use "
                "another index"
            )
        barrier()
        if rank == 0:
            deleted = sorted(known.keys() - files.keys())
            store.remove(deleted)
            report.removed = len(deleted)
        barrier()

        own = sorted(files)[rank::processes]
        todo = _find_changed(store, known, {name: files[name] for name in own})
        workers = min(8, os.cpu_count() or 1) if num_workers is None else max(1, num_workers)
        entries = _embed_files(model, files, todo, window_seconds, hop_seconds, batch_size, workers, channel)
        bar = progress(entries, "indexing", len(todo), "files", not show_progress_bar or rank > 0)
        for entries_done in _batched(bar, _FILES_AT_ONCE):
            store.replace(entries_done)
        barrier()

        if rank == 0:
            report.recall = store.optimize()
            _count_changes(report, store, known)
        report.seconds = time.perf_counter() - started
        return report


def _storage(about: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the precision and the width of stored vectors. Indexes without these settings store whole embeddings."""
    return about.get("precision", "float32"), int(about["width"]) if "width" in about else None


def _create_or_check(
    model: EmbeddingModel, index: str | Path, root: str, settings: dict[str, str], precision: str, width: int | None
) -> None:
    """Create the index, or raise ValueError if it was built with another model or other settings."""
    about = {"model": model.name, "fingerprint": model.fingerprint or "", **settings}
    dim = model.dim
    require_storage(dim, precision, width)
    if precision != "float32" or width is not None:
        about |= {"precision": precision, "width": str(width or dim), "dim": str(dim)}
    stored = SoundIndex(index, dim, {**about, "folder": root}).about
    if stored["fingerprint"] == about["fingerprint"] != "":
        about["model"] = stored["model"]  # the same model under another name
    if "precision" in stored or "precision" in about:
        whole = {"precision": "float32", "width": str(dim), "dim": str(dim)}
        stored, about = {**whole, **stored}, {**whole, **about}
    for key, value in about.items():
        if stored.get(key, "None") != value:
            raise ValueError(f"{index} has {key} {stored.get(key)!r}, not {value!r}; use another, or delete it")


def _find_changed(store: SoundIndex, known: Mapping[str, dict[str, Any]], files: Mapping[str, Path]) -> list[str]:
    """Return the names of new and changed files. Store the times of files that have only new times."""
    changed, moved = [], []
    for name, path in files.items():
        row, stamp = known.get(name), _stamp(path)
        if row is not None and stamp == (row["size"], row["modified_ns"], row["changed_ns"]) != _UNKNOWN:
            continue
        if row is not None and row["digest"] and _digest(path) == row["digest"]:
            moved.append({**row, **stamp._asdict()})
        else:
            changed.append(name)
    if moved:
        table = pa.Table.from_pylist(moved, schema=FILES_SCHEMA)
        store.files.merge_insert("file").when_matched_update_all().execute(table)
    return changed


def _count_changes(report: IndexReport, store: SoundIndex, known: Mapping[str, dict[str, Any]]) -> None:
    """Set the numbers of windows, and of files that are added, changed, unchanged and unreadable."""
    report.windows = store.windows.count_rows()
    for name, row in store.known_files().items():
        if row["problem"]:
            report.unreadable[name] = row["problem"]
        elif name not in known:
            report.added += 1
        elif known[name]["digest"] == row["digest"]:
            report.unchanged += 1
        else:
            report.changed += 1


def _batched(entries: Iterable[IndexedFile], count: int) -> Iterator[list[IndexedFile]]:
    """Yield lists of `count` entries; the last one may have fewer."""
    iterator = iter(entries)
    while batch := list(itertools.islice(iterator, count)):
        yield batch


def _place(row: Mapping[str, Any]) -> tuple[str, float]:
    return row["file"], row["start_seconds"]


def quoted(text: str) -> str:
    """Quote a string for an SQL filter expression."""
    return "'" + text.replace("'", "''") + "'"


def _embed_files(
    model: EmbeddingModel,
    files: Mapping[str, Path],
    names: Sequence[str],
    window_seconds: float,
    hop_seconds: float,
    batch_size: int,
    num_workers: int,
    channel: int | None = None,
) -> Iterator[IndexedFile]:
    """Embed files and yield one `IndexedFile` per name, in order."""
    before: deque[tuple[Stamp, str]] = deque()

    def recordings() -> Iterator[Recording]:
        for name in names:
            before.append((_stamp(files[name]), _digest(files[name])))
            yield Recording(str(files[name]), None, name, channel)

    embedded = model.chunk_embeddings(
        recordings(), window_seconds, hop_seconds, batch_size, num_workers, "skip", refuse_silence=True
    )
    for name, windows in zip(names, embedded, strict=True):
        stamp, digest = before.popleft()
        # If the file changed during reading, or FFmpeg is missing, do not store its stamp and digest, so that the next
        # run reads it again.
        if _stamp(files[name]) != stamp or isinstance(windows.error, (OSError, MissingDecoderError)):
            stamp, digest = _UNKNOWN, ""
        yield IndexedFile(name, stamp, digest, windows)


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError:
        return _UNKNOWN
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _digest(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError:
        return ""
