"""A folder of recordings to a store of embeddings with time stamps.

Recordings are cut into overlapping windows, and each window is embedded. The store is LanceDB (the extra `search`): a
folder of Arrow files, local or in object storage. A small store is searched exactly in memory; a large one has an
approximate index. Beside the windows it holds a table of files: when it was read, what it looked like then, and what
was wrong with it. That table makes building resumable and incremental: a file is written there after its windows, so
whatever a kill left half done is done again, and a file that has not changed is not read again.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from modeling_supclap.datasets_scripts.atomic_files import folder_lock
from modeling_supclap.datasets_scripts.builders.recordings import SUFFIXES, Recordings
from modeling_supclap.datasets_scripts.manifest import file_sha256
from modeling_supclap.datasets_scripts.progress import progress

from ..audio_input import Recording
from ..evaluation import EmbeddingModel

# Below this many windows all embeddings are held in memory and compared; beyond, an approximate index pays.
APPROXIMATE_FROM_ROWS = 100_000
# The share of new windows from which the approximate index is made anew: its partitions no longer fit.
_NEW_SHARE = 0.1
# What of the approximate index stays in memory between queries.
_CACHE_BYTES = 2**29
# Recordings whose windows are written together.
_FILES_AT_ONCE = 64

# What every index says of itself.
_ABOUT = ("model", "fingerprint", "window_seconds", "hop_seconds", "folder")

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
    """What a call of `build_index` did.

    Attributes:
        added: Files that were not there before.
        changed: Files whose content has changed.
        removed: Files that are gone.
        unchanged: Files that were left as they were.
        windows: Windows that the store holds now.
        unreadable: What is wrong with each file that could not be read, by its path.
        seconds: How long it took.
        recall: The share of exact search's ten best that the approximate index finds; None where search is exact, or
            the index is as it was.
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
            lines.append(f"approximate search finds {100 * self.recall:.1f} % of the ten best of exact search")
        for file, problem in self.unreadable.items():
            lines.append(f"cannot be read: {file}: {problem}")
        return "\n".join(lines)


class Stamp(NamedTuple):
    """What a file looks like from outside; another stamp means that its content may be another.

    Attributes:
        size: Its bytes.
        modified_ns: When its content was last written.
        changed_ns: When its content or its name was last changed, which a copied time stamp cannot hide.
    """

    size: int
    modified_ns: int
    changed_ns: int


# The stamp of a file that vanished, changed while it was read or could not be read: it is read again next time.
_UNKNOWN = Stamp(0, 0, 0)


class _Loaded(NamedTuple):
    """All windows of one version of a store, in memory."""

    version: int
    files: np.ndarray
    starts_seconds: np.ndarray
    ends_seconds: np.ndarray
    vectors: np.ndarray


class SoundIndex:
    """The store. Every read sees what other processes have written.

    Args:
        folder: A local folder, or an address of object storage that LanceDB knows (`s3://...`).
        dim: The width of the embeddings, to make a new store; None opens the one that is there.
        about: What the store says of itself, such as the model's name; kept with the windows when it is made.

    Raises:
        FileNotFoundError: There is no store, and `dim` is None.
        ImportError: LanceDB is not installed.
    """

    def __init__(self, folder: str | Path, dim: int | None = None, about: dict[str, str] | None = None) -> None:
        self.folder = str(folder)
        missing = f"{folder} holds no index of sounds; make one with `supclap search index`"
        if dim is None and "://" not in self.folder and not Path(folder).is_dir():
            raise FileNotFoundError(missing)  # LanceDB would make the folder

        self._loaded: _Loaded | None = None
        lancedb = _import_lancedb()
        session = lancedb.Session(index_cache_size_bytes=_CACHE_BYTES)
        database = lancedb.connect(self.folder, session=session, read_consistency_interval=timedelta(0))
        names = self._read(lambda: database.list_tables().tables)
        if "windows" in names and "files" in names:
            self.windows = self._read(lambda: database.open_table("windows"))
            self.files = self._read(lambda: database.open_table("files"))
        elif dim is None:
            raise FileNotFoundError(missing)
        else:
            vector = pa.list_(pa.float32(), dim)
            columns = {
                "file": pa.string(),
                "start_seconds": pa.float64(),
                "end_seconds": pa.float64(),
                "vector": vector,
            }
            schema = pa.schema(columns, metadata=about)
            self.windows = database.create_table("windows", schema=schema, exist_ok=True)
            self.files = database.create_table("files", schema=FILES_SCHEMA, exist_ok=True)

    @property
    def dim(self) -> int:
        """The width of the embeddings."""
        return self.windows.schema.field("vector").type.list_size

    @property
    def about(self) -> dict[str, str]:
        """What the store says of itself: the model, the length of a window and the hop, the folder of recordings.

        Raises:
            ValueError: It says none of this: another program made the store.
        """
        metadata = self.windows.schema.metadata or {}
        about = {key.decode(): value.decode() for key, value in metadata.items()}
        if missing := [key for key in _ABOUT if key not in about]:
            lacks = ", ".join(missing)
            raise ValueError(f"{self.folder} was not made by `supclap search index`: it lacks {lacks}; name another")
        return about

    def known_files(self) -> dict[str, dict[str, Any]]:
        """The rows of the table of files, by path."""
        return {row["file"]: row for row in self._read(lambda: self.files.to_arrow()).to_pylist()}

    def holds(self, file: str) -> bool:
        """Whether a recording is indexed, by its path below the folder."""
        query = self.files.search().where(f"file = {quoted(file)}").limit(1)
        return bool(self._read(query.to_list))

    def replace(self, entries: Sequence[IndexedFile]) -> None:
        """Puts the windows of some files in the place of those that are there, then notes the files as done."""
        self.remove([entry.file for entry in entries])

        tables = [entry.as_windows(self.windows.schema) for entry in entries if len(entry.embeds)]
        if tables:
            self.windows.add(pa.concat_tables(tables))
        self.files.add(pa.Table.from_pylist([entry.as_row() for entry in entries], schema=FILES_SCHEMA))

    def remove(self, files: Sequence[str]) -> None:
        """Takes files out, first from the table of files: a kill in between leaves them to be read again."""
        for start in range(0, len(files), 500):
            listed = ", ".join(quoted(name) for name in files[start : start + 500])
            self.files.delete(f"file IN ({listed})")
            self.windows.delete(f"file IN ({listed})")

    def update_stamps(self, rows: Sequence[dict[str, Any]]) -> None:
        """Notes new stamps of files whose content is the same."""
        if rows:
            table = pa.Table.from_pylist(list(rows), schema=FILES_SCHEMA)
            self.files.merge_insert("file").when_matched_update_all().execute(table)

    def optimize(self) -> float | None:
        """Joins small fragments, and beyond `APPROXIMATE_FROM_ROWS` sees to the approximate index.

        New windows are put into the partitions that are there; the index is made anew when they are a tenth of all.

        Returns:
            The index's recall of the ten best windows against exact search, over windows of the store as queries; None
            where search is exact, or no window is new.
        """
        rows = self.windows.count_rows()
        new_rows = self.windows.index_stats("vector_idx").num_unindexed_rows if self.is_approximate else rows

        recall = None
        if new_rows:
            self.windows.optimize()
        if new_rows and rows >= APPROXIMATE_FROM_ROWS:
            if new_rows > _NEW_SHARE * rows:
                partitions = 2 ** round(math.log2(math.sqrt(rows)))
                # Whole vectors: several times as fast as those quantised to 8 bits, for as much disk as the windows.
                config = _import_lancedb().index.IvfFlat(
                    distance_type="dot", num_partitions=partitions, sample_rate=64, max_iterations=20
                )
                self.windows.create_index("vector", config=config, replace=True)
            recall = self.measure_recall(self.draw_vectors(20))

        # Old versions go at once, or the store would hold its windows twice. A reader of one of them reads again.
        for table in (self.files, self.windows, self.windows):  # once more: the first time may write a new index
            table.optimize(cleanup_older_than=timedelta(milliseconds=1))
        return recall

    @property
    def is_approximate(self) -> bool:
        """Whether there is an approximate index."""
        return bool(self.windows.list_indices())

    def draw_vectors(self, count: int, seed: int = 0) -> list[list[float]]:
        """The embeddings of some windows, to ask with."""
        places = np.random.default_rng(seed).choice(self.windows.count_rows(), size=count, replace=False)
        return self.windows.take_offsets(sorted(places.tolist())).select(["vector"]).to_arrow()["vector"].to_pylist()

    def measure_recall(self, vectors: Sequence[Any]) -> float:
        """The share of exact search's ten best windows that the approximate index finds, for some embeddings."""
        found = 0
        for vector in vectors:
            exact = {(row["file"], row["start_seconds"]) for row in self.nearest(vector, 10, exact=True)}
            found += len(exact & {(row["file"], row["start_seconds"]) for row in self.nearest(vector, 10)})
        return found / (10 * len(vectors))

    def nearest(self, vector: Any, limit: int, within: str | None = None, exact: bool = False) -> list[dict[str, Any]]:
        """The windows with the highest cosine to an embedding.

        Args:
            vector: Unit norm, (d,).
            limit: How many.
            within: Only windows of this file.
            exact: Whether every window is compared, also where there is an approximate index.

        Returns:
            Rows with `file`, `start_seconds`, `end_seconds` and `score`, best first; of equal scores by file and time.
        """
        rows = self._read(self.windows.count_rows)
        limit = min(limit, rows)
        if not limit:
            return []
        if rows < APPROXIMATE_FROM_ROWS and not self.is_approximate:
            found = self._nearest_in_memory(np.asarray(vector, np.float32), limit, within)
        else:
            found = self._nearest_in_store(np.asarray(vector, np.float32), limit, within, exact)
        return sorted(found, key=lambda row: (-row["score"], row["file"], row["start_seconds"]))[:limit]

    def _nearest_in_memory(self, vector: np.ndarray, limit: int, within: str | None) -> list[dict[str, Any]]:
        loaded = self._load()
        places = np.arange(len(loaded.files)) if within is None else np.flatnonzero(loaded.files == within)
        scores = (loaded.vectors if within is None else loaded.vectors[places]) @ vector
        if limit < len(places):  # and whatever ties with the last
            kept = np.flatnonzero(scores >= np.partition(scores, -limit)[-limit])
            places, scores = places[kept], scores[kept]

        rows = []
        for place, score in zip(places.tolist(), scores.tolist(), strict=True):
            start, end = float(loaded.starts_seconds[place]), float(loaded.ends_seconds[place])
            rows.append({"file": loaded.files[place], "start_seconds": start, "end_seconds": end, "score": score})
        return rows

    def _nearest_in_store(
        self, vector: np.ndarray, limit: int, within: str | None, exact: bool
    ) -> list[dict[str, Any]]:
        query = self.windows.search(vector, vector_column_name="vector")
        query = query.distance_type("dot").select(["file", "start_seconds", "end_seconds", "_distance"]).limit(limit)
        if within is not None:
            query = query.where(f"file = {quoted(within)}", prefilter=True)
        if exact:
            query = query.bypass_vector_index()
        elif self.is_approximate:
            query = query.nprobes(32)

        rows = []
        for row in self._read(query.to_list):
            rows.append({**row, "score": 1.0 - row.pop("_distance")})  # LanceDB's distance is 1 - dot product
        return rows

    def _load(self) -> _Loaded:
        """All windows; loaded again when another process has written."""
        version = self.windows.version
        if self._loaded is None or self._loaded.version != version:
            table = self._read(lambda: self.windows.to_arrow()).combine_chunks()
            files, starts, ends = (table[name].to_numpy() for name in ("file", "start_seconds", "end_seconds"))
            vectors = table["vector"].chunk(0).flatten().to_numpy().reshape(len(table), -1)
            self._loaded = _Loaded(version, files, starts, ends, vectors)
        return self._loaded

    def _read(self, read: Callable[[], Any]) -> Any:
        """Read, once more where `index` has just removed the version that was open.

        Raises:
            ValueError: The store is damaged.
        """
        for is_last in (False, True):
            try:
                return read()
            except (RuntimeError, OSError, ValueError, pa.ArrowException) as error:
                if is_last:
                    reason = str(error).splitlines()[0]
                    raise ValueError(
                        f"the index {self.folder} is damaged: {reason}; delete it and index again"
                    ) from error


class IndexedFile(NamedTuple):
    """One file, read and embedded, or what was wrong with it.

    Attributes:
        file: Its path below the folder, with slashes.
        stamp: What it looked like when it was read.
        digest: Names its content.
        duration_seconds: How long it is.
        starts_seconds: Where each window begins, (windows,).
        ends_seconds: Where each ends, (windows,).
        embeds: Unit norm, (windows, d).
        problem: Why there are none; empty if there are.
    """

    file: str
    stamp: Stamp
    digest: str
    duration_seconds: float
    starts_seconds: np.ndarray
    ends_seconds: np.ndarray
    embeds: np.ndarray
    problem: str = ""

    def as_row(self) -> dict[str, Any]:
        """The file's row of the table of files."""
        named = {"file": self.file, "digest": self.digest, "duration_seconds": self.duration_seconds}
        return {**named, **self.stamp._asdict(), "problem": self.problem}

    def as_windows(self, schema: pa.Schema) -> pa.Table:
        """The file's rows of the table of windows."""
        dim = schema.field("vector").type.list_size
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(self.embeds.astype(np.float32).ravel()), dim)
        names = pa.array([self.file] * len(self.embeds))
        return pa.table([names, pa.array(self.starts_seconds), pa.array(self.ends_seconds), vectors], schema=schema)


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
) -> IndexReport:
    """Brings the index of a folder up to date: new and changed files are embedded, those that are gone are taken out.

    Args:
        model: What embeds, from `evaluation.load_embedding_model`.
        folder: Recordings, in any sub-folders, of every format that is read elsewhere.
        index: The store; made where there is none.
        window_seconds: The length of a window; at most what the model takes at once.
        hop_seconds: From the beginning of one window to that of the next.
        batch_size: Windows that go through the model at once.
        num_workers: Threads that read files ahead of the model; None, one for each core, at most 8.
        show_progress_bar: Shows one, over files.
        process: The number of this process and how many there are: each takes its share of the files.
        barrier: Waits for the other processes.

    Returns:
        What was done. In several processes each reports its share, and the first the state of the store.

    Raises:
        InUseError: Another run writes to the store.
        FileNotFoundError: The folder is not there or holds no recordings.
        ValueError: The window does not suit the model, or the store was made with another model, window or hop, or
            of another folder, none of whose files are in this one.
    """
    model.chunk_samples(window_seconds)  # raises where the model takes no such windows
    if not 0 < hop_seconds <= window_seconds:
        raise ValueError(f"hop_seconds is {hop_seconds}; give more than 0 and at most window_seconds, {window_seconds}")

    started = time.perf_counter()
    root, (rank, processes) = Path(folder), process
    is_locked = rank == 0 and "://" not in str(index)
    with folder_lock(index) if is_locked else nullcontext():
        files = list_recordings(root)
        about = {
            "model": model.name,
            "fingerprint": model.fingerprint or "",
            "window_seconds": str(float(window_seconds)),
            "hop_seconds": str(float(hop_seconds)),
        }
        if rank == 0:
            dim = model.encode_text(["sound"], "eng").shape[1]
            _check_about(SoundIndex(index, dim, {**about, "folder": str(root.resolve())}), about)
        barrier()

        store = SoundIndex(index)
        known = store.known_files()
        indexed = store.about["folder"]
        if known and not known.keys() & files.keys() and indexed != str(root.resolve()):
            raise ValueError(
                f"{index} is an index of {indexed}, of whose files {root} holds none: they would all be taken out; "
                "name another index"
            )
        barrier()
        report = IndexReport()
        if rank == 0:
            gone = sorted(known.keys() - files.keys())
            store.remove(gone)
            report.removed = len(gone)
        barrier()

        todo, moved = [], []
        for name in sorted(files)[rank::processes]:
            row, stamp = known.get(name), _stamp(files[name])
            if row is not None and stamp == (row["size"], row["modified_ns"], row["changed_ns"]) != _UNKNOWN:
                report.unchanged += 1
            elif row is not None and row["digest"] and _digest(files[name]) == row["digest"]:
                moved.append({**row, **stamp._asdict()})
                report.unchanged += 1
            else:
                report.changed += row is not None
                report.added += row is None
                todo.append(name)
        store.update_stamps(moved)

        workers = min(8, os.cpu_count() or 1) if num_workers is None else max(1, num_workers)
        entries = iter(_embed_files(model, files, todo, window_seconds, hop_seconds, batch_size, workers))
        entries = iter(progress(entries, "indexing", len(todo), "files", not show_progress_bar or rank > 0))
        while done := list(itertools.islice(entries, _FILES_AT_ONCE)):
            store.replace(done)
        barrier()

        if rank == 0:
            report.recall = store.optimize()
            report.windows = store.windows.count_rows()
            for row in store.known_files().values():
                if row["problem"]:
                    report.unreadable[row["file"]] = row["problem"]
        report.seconds = time.perf_counter() - started
        return report


def list_recordings(folder: str | Path) -> dict[str, Path]:
    """The recordings of a folder and its sub-folders: their paths, by the path below the folder.

    Raises:
        FileNotFoundError: There is no such folder, or no recording in it.
    """
    found = {name: Path(folder, name) for name in Recordings(folder).files}
    if not found:
        raise FileNotFoundError(f"{folder} holds no recordings: no file ends in one of {', '.join(SUFFIXES)}")
    return found


def quoted(text: str) -> str:
    """A text as a literal of a filter."""
    return "'" + text.replace("'", "''") + "'"


def _embed_files(
    model: EmbeddingModel,
    files: Mapping[str, Path],
    names: Sequence[str],
    window_seconds: float,
    hop_seconds: float,
    batch_size: int,
    num_workers: int,
) -> Iterator[IndexedFile]:
    """Yield the files in their order, as they are done."""
    before: deque[tuple[Stamp, str]] = deque()

    def recordings() -> Iterator[Recording]:
        for name in names:
            before.append((_stamp(files[name]), _digest(files[name])))
            yield Recording(str(files[name]), None, name)

    found = model.chunk_embeddings(recordings(), window_seconds, hop_seconds, batch_size, num_workers, "skip")
    for name, chunks in zip(names, found, strict=True):
        stamp, digest = before.popleft()
        # Stamp and digest are those of the bytes that were embedded, or the file is read again next time.
        if _stamp(files[name]) != stamp or isinstance(chunks.error, OSError):
            stamp, digest = _UNKNOWN, ""
        starts, ends = chunks.onset_seconds, chunks.offset_seconds
        problem = "" if chunks.error is None else str(chunks.error) or repr(chunks.error)
        yield IndexedFile(name, stamp, digest, ends.max(initial=0.0), starts, ends, np.asarray(chunks.embeds), problem)


def _check_about(store: SoundIndex, about: dict[str, str]) -> None:
    """Refuses to mix windows that cannot be compared."""
    for key, value in about.items():
        found = store.about.get(key, "")
        if found != value and not (key == "model" and store.about.get("fingerprint") == about["fingerprint"] != ""):
            raise ValueError(
                f"the index {store.folder} was made with {key} {found!r}, and now it is {value!r}; windows of both "
                "cannot be compared: name another folder for the index, or delete this one"
            )


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return _UNKNOWN
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError:
        return ""


def _import_lancedb() -> Any:
    try:
        import lancedb
        import lancedb.index
    except ImportError as error:
        raise ImportError("searching needs LanceDB: pip install 'supclap[search]'") from error
    return lancedb
