"""Rows of a table of recordings, a Parquet or CSV file, read one part at a time."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from .atomic_files import file_sha256
from .audio import Address


class RecordingTable(Sequence[dict[str, Any]]):
    """Rows `{"clip_id", "audio_path"}` of a Parquet or CSV file with one recording per row.

    Of a Parquet file, one row group is in memory at a time, so that a table of any length can be read. A CSV file is
    loaded completely.

    Args:
        path: The table. Its suffix is .parquet or .csv.
        path_column: Column with paths or fsspec addresses (s3://...). Relative paths start at the folder of the table.
        id_column: Column with unique ids. None: the path in the table, relative to its folder if it is inside.

    Raises:
        FileNotFoundError: The table does not exist.
        ValueError: The suffix is unknown, or a column is missing.
    """

    def __init__(self, path: str | Path, path_column: str = "path", id_column: str | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"the table {path} does not exist; pass a Parquet or CSV file with a column of paths"
            )
        self.columns = [path_column] if id_column is None else [path_column, id_column]
        self._loaded: tuple[int, list[dict[str, Any]]] | None = None
        if self.path.suffix.lower() == ".parquet":
            self._parquet: pq.ParquetFile | None = pq.ParquetFile(self.path)
            metadata = self._parquet.metadata
            names, lengths = self._parquet.schema_arrow.names, []
            for group in range(metadata.num_row_groups):
                lengths.append(metadata.row_group(group).num_rows)
        elif self.path.suffix.lower() == ".csv":
            self._parquet, self._csv = None, pa.csv.read_csv(self.path)
            names, lengths = self._csv.column_names, [len(self._csv)]
        else:
            raise ValueError(f"the table {path} has the suffix {self.path.suffix!r}; pass a .parquet or .csv file")

        if missing := [name for name in self.columns if name not in names]:
            raise ValueError(f"the table {path} has no column {missing[0]!r}, it has {', '.join(names)}")
        self._starts = [0]
        for length in lengths:
            self._starts.append(self._starts[-1] + length)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        """Return one row, or a list of rows for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # raises IndexError, and counts negative indices from the end
        group = bisect.bisect_right(self._starts, number) - 1
        if self._loaded is None or self._loaded[0] != group:
            self._loaded = (group, self._read(group))
        return self._loaded[1][number - self._starts[group]]

    @property
    def digest(self) -> str:
        """SHA-256 of a CSV file, or of the size and the footer of a Parquet file, which has its statistics."""
        if self._parquet is None:
            return file_sha256(self.path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(size - 8)
            length = int.from_bytes(file.read(4), "little")
            file.seek(size - 8 - length)
            return hashlib.sha256(f"{size} ".encode() + file.read(length)).hexdigest()

    def _read(self, group: int) -> list[dict[str, Any]]:
        table = self._csv if self._parquet is None else self._parquet.read_row_group(group, columns=self.columns)
        paths = table[self.columns[0]].cast(pa.string()).to_pylist()
        ids = table[self.columns[-1]].cast(pa.string()).to_pylist()
        folder = self.path.resolve().parent
        rows = []
        for path, name in zip(paths, ids, strict=True):
            source: Any = path
            if path is not None:
                source = Address(path) if "://" in path else str(folder / path)
            if len(self.columns) == 1 and path is not None and "://" not in path:
                name = Path(source).relative_to(folder).as_posix() if folder in Path(source).parents else path
            rows.append({"clip_id": name, "audio_path": source})
        return rows
