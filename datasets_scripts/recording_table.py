"""Rows of a table of recordings, read one part at a time."""

import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from .atomic_files import file_sha256
from .audio import Address
from .builders.columns import ColumnOptions, Columns
from .builders.metadata import read_table
from .builders.recordings import Recordings
from .remote_files import refuse_pointer
from .schema import SEGMENT_COLUMNS


class RecordingTable(Sequence[dict[str, Any]]):
    """Rows `{"clip_id", "audio_path"}` of a table with one recording, or one part of a recording, per row.

    Parts have `schema.SEGMENT_COLUMNS` too. Of a Parquet file, one row group is in memory at a time, so that a table of
    any length can be read. Other tables (see `metadata.read_table`) are loaded completely.

    Args:
        path: The table.
        path_column: Column with paths or fsspec addresses (s3://...). Relative paths start at the folder of the table.
            If there is no column "path", another usual name is found.
        id_column: Column with unique ids. None: the path in the table, relative to its folder if it is inside, and the
            part.

    Raises:
        FileNotFoundError: The table does not exist.
        ValueError: The suffix is unknown, a column is missing, or ids of a Parquet row group or another table repeat.
    """

    def __init__(self, path: str | Path, path_column: str = "path", id_column: str | None = None) -> None:
        self.path = Path(path)
        self._parquet: pq.ParquetFile | None = None
        if self.path.suffix.lower() == ".parquet":
            refuse_pointer(self.path.open("rb").read(100), str(path))
            self._parquet = pq.ParquetFile(self.path)
            names, footer = self._parquet.schema_arrow.names, self._parquet.metadata
            lengths = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        else:
            lines = read_table(self.path)
            names, lengths = list(lines[0].values) if lines else [], [len(lines)]

        chosen = None if path_column == "path" and "path" not in names else path_column
        self._columns = Columns(names, ColumnOptions(chosen, columns={"clip_id": id_column or ""}), captioned=False)
        if "file_name" not in self._columns.of_field:
            raise ValueError(f"the table {path} has no column {path_column!r}; set --path_column to one of {names}")
        self._starts = list(accumulate(lengths, initial=0))
        self._loaded: tuple[int, list[dict[str, Any]]] | None = None
        if self._parquet is None:
            self._loaded = 0, self._convert([line.values for line in lines])

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        """Return one row, or a list of rows for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # raises IndexError, and counts negative indices from the end
        group = bisect.bisect_right(self._starts, number) - 1
        if self._loaded is None or self._loaded[0] != group:
            assert self._parquet is not None
            names = [*self._columns.read_names, self._columns.of_field["file_name"]]
            self._loaded = group, self._convert(self._parquet.read_row_group(group, names).to_pylist())
        return self._loaded[1][number - self._starts[group]]

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return file_sha256(self.path)

    def _convert(self, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        folder, column = self.path.resolve().parent, self._columns.of_field["file_name"]
        names = ["" if cells[column] is None else str(cells[column]).strip() for cells in values]
        names = [name if "://" in name else name.replace("\\", "/") for name in names]
        found: Mapping[Any, Any] = {}
        if self._parquet is None:  # in a long table, paths are taken as they are
            missing = {("", name) for name in names if "://" not in name and not (folder / name).exists()}
            found = Recordings(folder).locate(missing) if missing else {}

        rows: list[dict[str, Any]] = []
        ids: set[str] = set()
        for number, (name, cells) in enumerate(zip(names, values, strict=True)):
            record = self._columns.read(cells, f"{self.path}, row {number}")
            part = {field: record[field] for field in SEGMENT_COLUMNS if self._columns.has_parts}
            path = found.get(("", name), ("", None))[1] or folder / name
            key = path.relative_to(folder).as_posix() if folder in path.parents and "://" not in name else name
            clip_id = record["clip_id"] or ":".join([key, *map(str, part.values())])
            if name and clip_id in ids:
                raise ValueError(
                    f"{self.path} has the id {clip_id!r} twice; set --id_column to a column of unique ids"
                )
            ids.add(clip_id)
            source = Address(name) if "://" in name else str(path) if name else None
            rows.append({"clip_id": clip_id or None, "audio_path": source, **part})
        return rows
