"""Rows of a prepared dataset with their audio, and the Parquet files that contain them."""

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import datasets
import pyarrow
import soundfile

from .atomic_files import file_sha256, read_json, write_json
from .audio import WHOLE, BadAudioError, MissingDecoderError, Segment, naming, read_recording, segment_of
from .bad_audio import check_recording, map_in_order, measure_content, source_of
from .parquet_files import parquet_writer
from .prepared import STORAGES
from .schema import AUDIO_COLUMNS, CHANNEL, SEGMENT_COLUMNS

ROW_GROUP_ROWS = 100  # recommended for the Hub viewer, which reads a whole row group to show one row
ROW_GROUP_BYTES = 64 * 1024**2
CELL_BYTES = 2**31 - 2  # maximum size of one value in Arrow


def pack(
    source: str | bytes, name: str, storage: str, segment: Segment = WHOLE
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check a recording (a path or its bytes) or its segment, and encode it in a storage format of `prepared.STORAGES`.

    Return the audio columns of the row, and the statistics "seconds", "source_bytes" and "source_sha256" for the
    manifest. A bad recording raises BadAudioError with `name`.
    """
    codec, stored_hz, _ = STORAGES[storage]
    columns: dict[str, Any] = {}
    file_name = PurePosixPath(name)

    # Recordings are decoded in blocks, so that only the encoded result is in memory as a whole.
    if stored_hz is None:
        if codec == "file":
            with naming(name):
                source = source if isinstance(source, bytes) else Path(source).read_bytes()
            columns = {"audio": {"bytes": source, "path": file_name.name}}
        seconds = check_recording(source, name, segment=segment)
    else:
        samples = read_recording(source, name, stored_hz, segment)
        seconds = len(samples) / stored_hz
        if codec == "int16":
            columns = {"samples": samples.tobytes(), "sampling_rate_hz": stored_hz}
        else:
            encoded = io.BytesIO()
            soundfile.write(encoded, samples, stored_hz, format="FLAC")
            columns = {"audio": {"bytes": encoded.getvalue(), "path": file_name.with_suffix(".flac").name}}

    source_bytes, digest = measure_content(source, name)
    return columns, {"seconds": seconds, "source_bytes": source_bytes, "source_sha256": digest}


class Entry(NamedTuple):
    """Row to write (None if the recording is bad), and its note for the manifest."""

    row: dict[str, Any] | None
    note: dict[str, Any]


def make_entries(
    rows: Sequence[Mapping[str, Any]], storage: str, root: str | None = None, workers: int = 1
) -> Iterator[Entry]:
    """Read the recordings of rows, and yield what a prepared dataset contains of each row, in order.

    Any range of rows returns the same entries as within the whole dataset, so that a range can be read anywhere.

    Args:
        rows: Rows in the format of `schema.Row`.
        storage: Storage format of the audio, a key of `prepared.STORAGES`.
        root: Folder to which the paths in the entries are relative (see `audio_root`). None: paths are unchanged.
        workers: Number of reading processes.
    """
    yield from map_in_order(partial(_make_entry, root=root, storage=storage), rows, workers)


def _make_entry(row: Mapping[str, Any], root: str | None, storage: str) -> Entry:
    stored = {name: value for name, value in row.items() if name not in AUDIO_COLUMNS}
    stored["audio_path"] = relative_path(row["audio_path"], root)
    try:
        segment = segment_of(row)
        columns, note = pack(source_of(row), stored["audio_path"], storage, segment)
        if STORAGES[storage].codec not in ("none", "file"):  # the stored audio is the segment
            stored |= {name: None for name in (*SEGMENT_COLUMNS, CHANNEL) if name in stored}
        if payload_bytes(columns) > CELL_BYTES:
            size = f"{payload_bytes(columns)} bytes as {storage}, more than the {CELL_BYTES} of a Parquet cell"
            raise BadAudioError(f"{stored['audio_path']} takes {size}; cut it, or choose another storage")
    except MissingDecoderError:
        raise
    except BadAudioError as error:
        return Entry(None, {"clip_id": row["clip_id"], "audio_path": stored["audio_path"], "reason": str(error)})

    captions = {language: len(texts) for language, texts in row["captions"].items() if texts}
    about = {"audio_path": stored["audio_path"], "captions": captions, "license": row["license"]}
    return Entry({**stored, **columns}, {**about, **note})


def relative_path(path: str, root: str | None) -> str:
    return Path(os.path.relpath(path, root)).as_posix() if root is not None and os.path.isabs(path) else path


class ShardWriter:
    """Writer of Parquet files of limited size that can resume after an interruption.

    The folder contains each finished file and a JSON record of its content. The division into files depends only on
    the rows. A new run therefore continues after the last record, and writes the same bytes. A file with a single row
    may exceed `shard_bytes`.
    """

    def __init__(self, folder: str | Path, split: str, types: datasets.Features, shard_bytes: int) -> None:
        self.folder, self.split = Path(folder), split
        self.schema, self.shard_bytes = types.arrow_schema, shard_bytes
        self.records: list[dict[str, Any]] = []
        while (path := self._record_path()).is_file():
            self.records.append(read_json(path))

    @property
    def next_row(self) -> int:
        """Index of the first row of the split that is not in a finished file."""
        return sum(len(record["notes"]) for record in self.records)

    def write(self, entries: Iterable[Entry]) -> list[dict[str, Any]]:
        """Write the rows of the split that are not in a finished file, and return the records of all its files.

        The keys of a record are "file", "rows", "row_groups", "bytes", "payload_bytes", "sha256" and "notes".
        """
        rest = iter(entries)
        pending = list(islice(rest, 1))  # a list, so that `_write_shard` can free a row with hours of audio
        while pending:
            self._write_shard(pending, rest)
        return self.records

    def _write_shard(self, pending: list[Entry], rest: Iterator[Entry]) -> None:
        """Write one shard with the entry in `pending` and entries of `rest`.

        The first entry that exceeds the size limit is put in `pending`, for the next shard.
        """
        path = self._record_path().with_suffix(".parquet")
        notes: list[dict[str, Any]] = []
        group: list[dict[str, Any]] = []
        groups: list[int] = []
        payload = group_bytes = 0
        entry: Entry | None = pending.pop()

        # No compression, because the audio is already compressed or faster to read without it, and the text is small.
        # Without compression the bytes of a shard depend only on the rows.
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with parquet_writer(path, self.schema, one_writer=True, **options) as parquet:

            def flush() -> None:
                if group:
                    table = pyarrow.Table.from_pylist(group, self.schema)
                    groups.append(len(group))
                    group.clear()  # frees memory before writing; the table contains a copy
                    parquet.write_table(table)
                    del table
                    pyarrow.default_memory_pool().release_unused()

            while entry is not None:
                size = 0 if entry.row is None else payload_bytes(entry.row)
                if payload and payload + size > self.shard_bytes:
                    break

                notes.append(entry.note)
                if entry.row is not None:
                    if group_bytes + size > ROW_GROUP_BYTES or len(group) == ROW_GROUP_ROWS:
                        flush()
                        group_bytes = 0
                    group.append(entry.row)
                    group_bytes += size
                    payload += size
                entry = next(rest, None)
            flush()

        if entry is not None:
            pending.append(entry)
        record = {
            "file": path.name,
            "rows": sum(groups),
            "row_groups": groups,
            "bytes": path.stat().st_size,
            "payload_bytes": payload,
            "sha256": file_sha256(path),
            "notes": notes,
        }
        write_json(self._record_path(), record, one_writer=True)
        self.records.append(record)

    def _record_path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.records):05d}.json"


def payload_bytes(value: Any) -> int:
    """Estimate the size of a value in bytes: 1 per byte or character, 8 per number, 0 for None.

    >>> payload_bytes({"clip_id": "a1", "audio": {"bytes": b"1234", "path": None}, "labels": ["dog"]})
    9
    """
    if isinstance(value, Mapping):
        return sum(map(payload_bytes, value.values()))
    if isinstance(value, list):
        return sum(map(payload_bytes, value))
    if isinstance(value, (str, bytes)):
        return len(value)
    return 0 if value is None else 8
