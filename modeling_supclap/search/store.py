"""Storage of a search index in LanceDB: a table of windows with their embeddings, and a table of files."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..evaluation.vectors import PRECISIONS, require_storage, score, shorten

if TYPE_CHECKING:
    from ..encoding import AudioChunks

# Minimum number of windows for approximate search. With fewer windows, search is exact, in memory, and faster.
APPROXIMATE_FROM_ROWS = 200_000
# If the share of new windows exceeds this, the partitions of the approximate index no longer fit, and it is rebuilt.
_NEW_SHARE = 0.1
_CACHE_BYTES = 2**29  # memory cache for the approximate index
_NAMES_AT_ONCE = 10_000  # file names in one filter
_COLUMNS = ["file", "start_seconds", "end_seconds"]  # of the window table, besides the vectors and checksums
# required metadata of an index
_ABOUT = ("model", "fingerprint", "window_seconds", "hop_seconds", "folder", "precision", "width", "dim")

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


class Stamp(NamedTuple):
    """Size (bytes), modification time and change time (ns) of a file, used to detect files that may have changed.

    The modification time alone is not reliable, because programs can set it.
    """

    size: int
    modified_ns: int
    changed_ns: int


class IndexedFile(NamedTuple):
    """Windows of one file, or the reason why it is unreadable.

    The digest is "" if it is unknown. `stamp` is taken before the file is read, so that a change during reading is
    found by the next run.
    """

    file: str  # path relative to the indexed folder, with forward slashes
    stamp: Stamp
    digest: str  # SHA-256 of the content
    windows: AudioChunks
    problem: str = ""  # why the file is unreadable

    def as_row(self) -> dict[str, Any]:
        """Return the row of this file in the file table."""
        seconds = self.windows.offset_seconds.max(initial=0.0)
        row = {"file": self.file, **self.stamp._asdict(), "digest": self.digest}
        return {**row, "duration_seconds": seconds, "problem": self.problem}


def names_index(method: Callable[..., Any]) -> Callable[..., Any]:
    """Name the index in the errors of a method that writes to it."""

    @wraps(method)
    def run(self: SoundIndex, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            if self.folder in str(error):
                raise
            reason = f"{error}; if it is damaged, delete it and index again"
            raise ValueError(f"cannot write the index {self.folder}: {reason}") from error

    return run


class SoundIndex:
    """Search index of audio windows in LanceDB. Reads always include the latest writes of other processes.

    Each window has a checksum of its file name, times and vector. It is compared whenever the vector is read: in memory
    when the index is loaded, and in the store for the windows that a search returns.

    Args:
        folder: Local folder of the index, or a URL of object storage that LanceDB supports (`s3://...`).
        dim: Embedding dimension. The index is created if it does not exist. None: open an existing index only.

    Attributes:
        dim: Dimension of the embeddings, which may be stored in a smaller form.
        precision: Form of the stored vectors: float32, int8 or binary.
        width: Number of first values that are stored, or None for all.

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
            precision, width = find_storage(about or {})
            kind = pa.from_numpy_dtype(PRECISIONS[precision])
            vector = pa.list_(kind, require_storage(dim, precision, width))
            schema = pa.schema({**columns, "vector": vector, "checksum": pa.uint32()}, metadata=about)
            self.windows = database.create_table("windows", schema=schema, exist_ok=True)
            self.files = database.create_table("files", schema=FILES_SCHEMA, exist_ok=True)

        metadata = self._read(self._metadata)
        self.precision, self.width = self._read(lambda: find_storage(metadata))
        self._stored_size = self.windows.schema.field("vector").type.list_size
        self.dim = int(metadata.get("dim", self._stored_size))

    @property
    def about(self) -> dict[str, str]:
        """Metadata of the index. Raises ValueError if a key is missing, as in a database of another program."""
        about = self._read(self._metadata)
        if missing := ", ".join(key for key in _ABOUT if key not in about):
            raise ValueError(f"{self.folder} has no metadata {missing}; use an index made by `supclap search index`")
        return about

    def _metadata(self) -> dict[str, str]:
        schema = self.windows.schema
        # only the metadata of a column can be changed; see `move`
        stored = {**(schema.metadata or {}), **(schema.field("file").metadata or {})}
        return {key.decode(): value.decode() for key, value in stored.items()}

    def move(self, root: str) -> None:
        """Store the new place of the indexed folder."""
        if self.about["folder"] != root:
            self.windows.update_field_metadata({"path": "file", "metadata": {"folder": root}})

    @cached_property
    def names(self) -> set[str]:
        """Files with rows in either table: an interrupted run leaves windows of files that are not in the file table.

        Read once, and kept up to date by `replace` for the only writer.
        """
        names: set[str] = set()
        for table in (self.files, self.windows):
            column = self._read(table.search().select(["file"]).to_arrow)["file"]
            names.update(pc.unique(column).to_pylist())
        return names

    def known_files(self) -> dict[str, dict[str, Any]]:
        """Return the file table as `{file path: row}`."""
        return {row["file"]: row for row in self._list_files()}

    def unreadable_files(self) -> dict[str, str]:
        """Return the files that cannot be searched, `{file path: reason}`."""
        return {row["file"]: row["problem"] for row in self._list_files("problem != ''")}

    def _list_files(self, where: str = "true") -> list[dict[str, Any]]:
        return self._read(self.files.search().where(where).to_arrow).to_pylist()

    def holds(self, file: str) -> bool:
        """Return whether the index contains a recording. `file` is its path relative to the indexed folder."""
        return bool(self._list_files(f"file = {quoted(file)}"))

    def select_files(
        self, within: str | None = None, lengths: tuple[float, float] = (0.0, math.inf)
    ) -> list[str] | None:
        """Return the files in a folder whose length in seconds is in a range. None: all files.

        `within` is a folder or a file, relative to the indexed folder.
        """
        if not within and lengths == (0.0, math.inf):
            return None
        where = f"duration_seconds >= {lengths[0]} AND duration_seconds <= {min(lengths[1], 1e9)}"
        if within:
            where += f" AND (file = {quoted(within)} OR starts_with(file, {quoted(within.rstrip('/') + '/')}))"
        return [row["file"] for row in self._list_files(where)]

    @names_index
    def replace(self, entries: Sequence[IndexedFile]) -> None:
        """Replace the entries of files. Write the file table last, so that the next run repeats an interrupted call."""
        from ..evaluation.windows import window_table

        names = [entry.file for entry in entries]
        self._delete([name for name in names if name in self.names], (self.files, self.windows))

        chunks = [entry.windows for entry in entries]
        windows = window_table(chunks, self.dim, "vector", self.precision, self.width, file=names)
        if len(windows):
            windows = windows.append_column("checksum", pa.array(_checksums(windows), pa.uint32()))
            self.windows.add(windows.cast(self.windows.schema))
        self.files.add(pa.Table.from_pylist([entry.as_row() for entry in entries], schema=FILES_SCHEMA))
        self.names.update(names)

    @names_index
    def remove(self, files: Sequence[str]) -> None:
        """Remove files and windows. Change the file table last, so that the next run repeats an interrupted call."""
        self._delete(files, (self.windows, self.files))

    def _delete(self, files: Sequence[str], tables: Sequence[Any]) -> None:
        for start in range(0, len(files), _NAMES_AT_ONCE):
            for table in tables:
                table.delete(_is_among(files[start : start + _NAMES_AT_ONCE]))

    @names_index
    def compact(self) -> None:
        """Merge the fragments of the tables, and delete old versions, which double the size on disk.

        Processes that read an old version retry in `_read`.
        """
        for table in (self.files, self.windows):
            table.optimize(cleanup_older_than=timedelta(milliseconds=1))

    @names_index
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

        # twice, because the first call may write a new index
        self.compact()
        self.compact()
        if new_rows and is_large:
            # last, because the calls above may change the index
            return self.measure_recall(self.draw_vectors(20))
        return None

    @property
    def is_approximate(self) -> bool:
        """Whether there is an approximate index for the windows."""
        return bool(self._read(self.windows.list_indices))

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

    def nearest(
        self, vector: Any, limit: int, within: str | Collection[str] | None = None, exact: bool = False
    ) -> list[dict[str, Any]]:
        """Return the windows with the highest cosine to an embedding.

        `within` limits the search to one file, or to several. `exact` scores all windows even if there is an
        approximate index.

        Returns:
            Dicts with `file`, `start_seconds`, `end_seconds` and `score`, best first. Equal scores are sorted by file
            and time.
        """
        rows = self._read(self.windows.count_rows)
        limit = min(limit, rows)
        files = [within] if isinstance(within, str) else within
        if not limit or (files is not None and not files):
            return []
        query = shorten(np.asarray(vector, np.float32), self.width)
        if self.precision != "float32" or (rows < APPROXIMATE_FROM_ROWS and not self.is_approximate):
            hits = self._nearest_in_memory(query, limit, files, exact)
        else:
            hits = self._nearest_in_store(query, limit, files, exact)
        return sorted(hits, key=lambda row: (-row["score"], row["file"], row["start_seconds"]))[:limit]

    def _nearest_in_memory(
        self, vector: np.ndarray, limit: int, files: Collection[str] | None, exact: bool
    ) -> list[dict[str, Any]]:
        version = self._read(lambda: self.windows.version)
        if self._loaded is None or self._loaded[0] != version:  # another process may have changed the table
            table = self._read(lambda: _check(self.windows.to_arrow()))
            self._loaded = version, table.select(_COLUMNS), _vectors(table)
        _, table, vectors = self._loaded
        if files is not None:
            chosen = pc.is_in(table["file"], pa.array(list(files), pa.string()))
            table, vectors = table.filter(chosen), vectors[chosen.to_numpy()]
        indices, scores = score(vectors, vector, self.precision, len(vectors) if exact else limit)
        if limit < len(indices):  # keep all windows that tie with the last one
            best = np.flatnonzero(scores >= np.partition(scores, -limit)[-limit])
            indices, scores = indices[best], scores[best]

        return table.take(indices).append_column("score", pa.array(scores)).to_pylist()

    def _nearest_in_store(
        self, vector: np.ndarray, limit: int, files: Collection[str] | None, exact: bool
    ) -> list[dict[str, Any]]:
        query = self.windows.search(vector, vector_column_name="vector")
        query = query.distance_type("dot").limit(limit)
        if files is not None:
            query = query.where(_is_among(files), prefilter=True)
        if exact:
            query = query.bypass_vector_index()
        elif self.is_approximate:
            query = query.nprobes(256).refine_factor(30)

        # LanceDB's distance is 1 - dot product.
        table = self._read(lambda: _check(query.to_arrow()))
        rows = table.select([*_COLUMNS, "_distance"]).to_pylist()
        for row in rows:
            row["score"] = 1.0 - row.pop("_distance")
        return rows

    def _read(self, read: Callable[[], Any]) -> Any:
        """Call `read`. If it fails, retry once, because another process may have replaced the table."""
        for _ in range(2):
            try:
                return read()
            except BaseException as error:  # a panic of LanceDB's Rust code is no Exception
                is_panic = type(error).__name__ == "PanicException"
                if isinstance(error, MemoryError) or not (is_panic or isinstance(error, Exception)):
                    raise
                failure = error
        reason = (str(failure) or repr(failure)).splitlines()[0]
        raise ValueError(f"the index {self.folder} is damaged: {reason}; delete it and index again") from failure


def find_storage(about: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the precision and the width of stored vectors. Indexes without these settings store whole embeddings."""
    return about.get("precision", "float32"), int(about["width"]) if "width" in about else None


def find_inside(folder: Path, name: str) -> Path:
    """Return the path of a recording in a resolved folder. An index from elsewhere may contain any name.

    Raises FileNotFoundError if the path is outside of the folder, also after links.
    """
    path = Path(os.path.realpath(folder / name))  # Path.resolve raises RuntimeError for a loop of links
    if not path.is_relative_to(folder):
        raise FileNotFoundError(f"{name} is not in the folder {folder.name}; use an index of this folder")
    return path


def quoted(text: str) -> str:
    """Quote a string for an SQL filter expression."""
    return "'" + text.replace("'", "''") + "'"


def _is_among(files: Collection[str]) -> str:
    return f"file IN ({', '.join(map(quoted, files))})"


def _place(row: Mapping[str, Any]) -> tuple[str, float]:
    return row["file"], row["start_seconds"]


def _vectors(windows: pa.Table) -> np.ndarray:
    """Return the stored vectors of a table of windows, (n, size)."""
    size = windows.schema.field("vector").type.list_size
    return windows["vector"].combine_chunks().flatten().to_numpy().reshape(len(windows), size)


def _checksums(windows: pa.Table) -> list[int]:
    """Compute the CRC-32 of each window: of its file name, times and vector."""
    spans = np.stack([windows["start_seconds"].to_numpy(), windows["end_seconds"].to_numpy()], axis=1)  # (n, 2)
    checksums = []
    for file, span, vector in zip(windows["file"].to_pylist(), spans, _vectors(windows), strict=True):
        checksums.append(zlib.crc32(vector, zlib.crc32(span, zlib.crc32(file.encode()))))
    return checksums


def _check(windows: pa.Table) -> pa.Table:
    """Raise ValueError if a window differs from its checksum. Return the table."""
    if windows["checksum"].to_pylist() != _checksums(windows):
        raise ValueError("the checksum of a window is wrong")
    return windows
