"""Rows to Parquet shards of bounded size: in order, the same bytes every time, and continued where a run was killed.

A shard that is complete lies in the working folder with a record of what went into it. Where it ends depends on the
rows alone, so a run that finds the records of an earlier one goes on after the last of them, and workers only change
how fast the rows come.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from .atomic_files import write_json

ROW_GROUP_ROWS = 100  # as the Hub's viewer likes it: a row is read by reading its row group
ROW_GROUP_BYTES = 64 * 1024**2

_AUDIO_LEAVES = ("audio.bytes", "samples")  # compressed already, or faster to read as they are


class ShardWriter:
    """Writes the rows of one split.

    Args:
        folder: The working folder, which holds finished shards and their records.
        split: The name of the split.
        types: Of the rows.
        shard_bytes: A shard is closed before it exceeds this; one that a single row fills may.
    """

    def __init__(self, folder: str | Path, split: str, types: datasets.Features, shard_bytes: int) -> None:
        self.folder, self.split, self.types, self.shard_bytes = Path(folder), split, types, shard_bytes
        self.records = self._finished()
        self._open_shard()

    @property
    def next_row(self) -> int:
        """The first row of the split that no finished shard has taken in."""
        return self.records[-1]["next_row"] if self.records else 0

    def write(self, entries: Iterable[tuple[int, dict[str, Any] | None, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Writes all that is left of the split.

        Args:
            entries: For each row from `next_row` on: its number, the row to write or `None` where it is left out, and
                a note on it, plain JSON, that its shard's record keeps.

        Returns:
            The records of all shards of the split, those of earlier runs too: "file", "rows", "next_row", "bytes",
            "payload_bytes", "sha256" and "notes".
        """
        for number, row, note in entries:
            size = 0 if row is None else payload_bytes(row)
            if self._rows and self._payload_bytes + size > self.shard_bytes:
                self._close_shard(number)
            self._notes.append(note)
            if row is not None:
                self._add(row, size)
            self._last = number
        if self._notes:
            self._close_shard(self._last + 1)
        self._unfinished.unlink(missing_ok=True)
        return self.records

    def _finished(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        while (path := self._record_path(len(records))).is_file():
            records.append(json.loads(path.read_text(encoding="utf-8")))
        return records

    def _record_path(self, number: int) -> Path:
        return self.folder / f"{self.split}-{number:05d}.json"

    @property
    def _unfinished(self) -> Path:
        return self.folder / f"{self.split}.part"

    def _open_shard(self) -> None:
        self._rows = self._payload_bytes = self._group_bytes = 0
        self._notes: list[dict[str, Any]] = []
        self._group: list[dict[str, Any]] = []
        self._parquet: pyarrow.parquet.ParquetWriter | None = None

    def _add(self, row: dict[str, Any], size: int) -> None:
        if self._group and self._group_bytes + size > ROW_GROUP_BYTES:
            self._flush()
        self._group.append(row)
        self._rows += 1
        self._payload_bytes += size
        self._group_bytes += size
        if len(self._group) == ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        schema = self.types.arrow_schema
        if self._parquet is None:
            self._parquet = pyarrow.parquet.ParquetWriter(self._unfinished, schema, **_settings(schema))
        if self._group:
            self._parquet.write_table(pyarrow.Table.from_pylist(self._group, schema), row_group_size=ROW_GROUP_ROWS)
        self._group, self._group_bytes = [], 0

    def _close_shard(self, next_row: int) -> None:
        self._flush()
        assert self._parquet is not None
        self._parquet.close()
        path = self._record_path(len(self.records)).with_suffix(".parquet")
        os.replace(self._unfinished, path)
        record = {
            "file": path.name,
            "rows": self._rows,
            "next_row": next_row,
            "bytes": path.stat().st_size,
            "payload_bytes": self._payload_bytes,
            "sha256": file_sha256(path),
            "notes": self._notes,
        }
        write_json(self._record_path(len(self.records)), record, one_writer=True)
        self.records.append(record)
        self._open_shard()


def payload_bytes(value: Any) -> int:
    """About what a value takes in a file: its bytes and its letters.

    >>> payload_bytes({"clip_id": "a1", "audio": {"bytes": b"1234", "path": None}, "labels": ["dog"]})
    9
    """
    if isinstance(value, Mapping):
        return sum(map(payload_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(payload_bytes, value))
    if isinstance(value, (str, bytes)):
        return len(value)
    return 0 if value is None else 8


def file_sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _settings(schema: pyarrow.Schema) -> dict[str, Any]:
    """Settings of Parquet that are fixed here, whatever the defaults of another pyarrow may be."""
    leaves = list(_leaves(schema))
    return {
        "version": "2.6",
        "data_page_version": "1.0",
        "compression": {leaf: "none" if leaf in _AUDIO_LEAVES else "zstd" for leaf in leaves},
        "use_dictionary": [leaf for leaf in leaves if leaf not in _AUDIO_LEAVES],
        "write_statistics": [leaf for leaf in leaves if leaf not in _AUDIO_LEAVES],
    }


def _leaves(schema: pyarrow.Schema) -> Iterator[str]:
    """The columns of Parquet that a schema becomes, by dotted path."""
    empty = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(schema.empty_table(), empty)
    columns = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(empty.getvalue())).schema
    for number in range(len(columns)):
        yield columns.column(number).path
