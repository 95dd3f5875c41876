"""Prepare a dataset: check all recordings, write Parquet files with or without the audio, and upload them if requested.

    supclap prepare esc50 --data_dir ESC-50 --out prepared/esc50 --storage int16 --workers 8
    supclap prepare esc50 --help  # lists the options of this dataset

Then `load_splits("prepared", data_dir="prepared/esc50")` returns the splits. Every recording is read completely; bad
recordings are excluded and listed in `manifest.json`. A killed run resumes where it stopped. The same data produce the
same bytes, for any number of workers.
"""

# `map(num_proc=...)` and `to_parquet` of `datasets` are not used: they keep a second copy of all audio in the cache,
# restart an interrupted split, hold a whole shard in memory, and their cache depends on the number of processes.
# `push_to_hub` would write different shards, which do not match the checksums in the manifest.

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.parquet
import soundfile
from datasets.utils.py_utils import convert_file_size_to_int
from tqdm import tqdm

from modeling_supclap.datasets_scripts import builder_names, find_builder, load_builder
from modeling_supclap.datasets_scripts.atomic_files import file_sha256, folder_lock, write_json, write_text
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError, Segment, segment_of
from modeling_supclap.datasets_scripts.bad_audio import (
    ON_BAD_AUDIO,
    check_recording,
    map_in_order,
    measure_content,
    naming,
    read_recording,
    source_of,
)
from modeling_supclap.datasets_scripts.builders.options import add_builder_options
from modeling_supclap.datasets_scripts.manifest import make_manifest, summary_table, versions, write_card
from modeling_supclap.datasets_scripts.prepared import FORMAT, MANIFEST, ROOT_NOTE, STORAGES, PreparedSet
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.datasets_scripts.schema import AUDIO_COLUMNS, without_audio

ROW_GROUP_ROWS = 100  # recommended for the Hub viewer, which reads a whole row group to show one row
ROW_GROUP_BYTES = 64 * 1024**2
CELL_BYTES = 2**31 - 2  # maximum size of one value in Arrow
# folder in the output folder: shards of an unfinished run, and a hash of its options and data
_WORK = ".prepare"


@dataclass(frozen=True)
class Request:
    """Options of a preparation.

    Attributes:
        dataset: Dataset name (see `load_splits`).
        options: Builder options of the dataset.
        storage: Storage format of the audio, a key of `prepared.STORAGES`.
        shard_bytes: Approximate maximum size of a shard in bytes.
        on_bad_audio: "error" stops at the first bad recording; "skip" excludes bad recordings and lists them in the
            manifest; "report" does the same and prints each of them.
    """

    dataset: str
    options: Mapping[str, Any] = field(default_factory=dict)
    storage: str = "original"
    shard_bytes: int = 500 * 10**6
    on_bad_audio: str = "skip"


def prepare(
    request: Request,
    out: str | Path,
    workers: int = 1,
    overwrite: bool = False,
    cache_dir: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Check all recordings of a dataset, and write Parquet files, a manifest and a dataset card; return the manifest.

    An interrupted run with the same options is resumed. If the output is already complete and `overwrite` is not set,
    nothing is written.

    Args:
        overwrite: Whether to replace a prepared dataset in the output folder.
        cache_dir: Cache folder for the rows of the builder. None: the default of `datasets`.

    Raises:
        BadAudioError: A recording is bad and `on_bad_audio` is "error", or FFmpeg is required but not installed.
        FileExistsError: The output folder contains a different prepared dataset and `overwrite` is not set, or it
            contains files that are not from a preparation.
        RuntimeError: Another run is writing to the folder.
        ValueError: All recordings of a split are bad, or an option is invalid.
    """
    for name, valid in (("storage", STORAGES), ("on_bad_audio", ON_BAD_AUDIO)):
        if getattr(request, name) not in valid:
            raise ValueError(f"{name} is {getattr(request, name)!r}; expected one of {', '.join(valid)}")
    if request.shard_bytes < 1:
        raise ValueError(f"shard_bytes is {request.shard_bytes}; expected at least 1")

    with folder_lock(out):
        builder = load_builder(request.dataset, cache_dir=cache_dir, **request.options)
        splits = builder.as_dataset()
        if STORAGES[request.storage].codec == "file":
            _refuse_segments(splits)
        root = audio_root(request, splits)
        folder, plan = Path(out), _plan(request, splits, root)
        if _claim(folder, plan, overwrite):
            return PreparedSet(folder).manifest

        records = {}
        for split, rows in splits.items():
            records[split] = _write_split(folder / _WORK, split, rows, request, root, workers, quiet)
        return _finish(request, builder, splits, records, root, folder)


def _refuse_segments(splits: Mapping[str, datasets.Dataset]) -> None:
    """Raise ValueError if rows are parts of recordings, because the original files contain more than these parts."""
    for split, rows in splits.items():
        if "end_seconds" in rows.column_names and any(
            segment_of(row) != (None, None) for row in without_audio(rows)
        ):
            raise ValueError(
                f"rows of {split!r} are parts of recordings, and storage 'original' keeps whole files; choose flac16k, "
                "flac48k, int16 or reference"
            )


def audio_root(request: Request, splits: Mapping[str, datasets.Dataset]) -> str | None:
    """Return `data_dir` if it contains all recordings, otherwise their common parent folder, or None without one."""
    parents: set[str] = set()
    for rows in splits.values():
        parents.update(os.path.dirname(path) for path in rows["audio_path"] if os.path.isabs(path))
    data_dir = request.options.get("data_dir")
    try:
        common = os.path.commonpath(parents)
        root = os.path.abspath(os.path.expanduser(data_dir)) if data_dir else common
        return root if os.path.commonpath([root, common]) == root else common
    except ValueError:  # several drives, or no path at all
        return None


def pack(
    source: str | bytes, name: str, storage: str, segment: Segment = (None, None)
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
            soundfile.write(encoded, samples, stored_hz, format="FLAC", subtype="PCM_16")
            columns = {"audio": {"bytes": encoded.getvalue(), "path": file_name.with_suffix(".flac").name}}

    source_bytes, digest = measure_content(source, name)
    return columns, {"seconds": seconds, "source_bytes": source_bytes, "source_sha256": digest}


class Entry(NamedTuple):
    """Row to write (None if the recording is bad), and its note for the manifest."""

    row: dict[str, Any] | None
    note: dict[str, Any]


def _make_entry(row: Mapping[str, Any], root: str | None, storage: str) -> Entry:
    stored = {name: value for name, value in row.items() if name not in AUDIO_COLUMNS}
    stored["audio_path"] = _relative(row["audio_path"], root)
    try:
        segment = segment_of(row)
        columns, note = pack(source_of(row), stored["audio_path"], storage, segment)
        if STORAGES[storage].codec != "none" and segment != (None, None):
            stored |= {"start_seconds": None, "end_seconds": None}  # the stored audio is the segment
        if payload_bytes(columns) > CELL_BYTES:
            size = (
                f"{payload_bytes(columns)} bytes as {storage}, more than the {CELL_BYTES} of a Parquet cell"
            )
            raise BadAudioError(f"{stored['audio_path']} takes {size}; cut it, or choose another storage")
    except MissingDecoderError:
        raise
    except BadAudioError as error:
        return Entry(
            None, {"clip_id": row["clip_id"], "audio_path": stored["audio_path"], "reason": str(error)}
        )

    captions = {language: len(texts) for language, texts in row["captions"].items() if texts}
    about = {"audio_path": stored["audio_path"], "captions": captions, "license": row["license"]}
    return Entry({**stored, **columns}, {**about, **note})


def _relative(path: str, root: str | None) -> str:
    return Path(os.path.relpath(path, root)).as_posix() if root is not None and os.path.isabs(path) else path


def _write_split(
    folder: Path,
    split: str,
    rows: datasets.Dataset,
    request: Request,
    root: str | None,
    workers: int,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Write the rows of a split that are not in finished shards yet; return the records of all its shards."""
    types = datasets.Features({**without_audio(rows).features, **STORAGES[request.storage].features()})
    writer = ShardWriter(folder, split, types, request.shard_bytes)

    start = writer.next_row
    unread: Sequence[Any] = rows.select(range(start, len(rows))) if start < len(rows) else []
    entries = map_in_order(partial(_make_entry, root=root, storage=request.storage), unread, workers)
    bar = progress(entries, split, len(rows), "clips", quiet, start)
    records = writer.write(_checked(bar, request.on_bad_audio))

    notes = list(chain.from_iterable(record["notes"] for record in records))
    if notes and all("reason" in note for note in notes):
        raise ValueError(f"all {len(notes)} recordings of {split!r} are bad; the first: {notes[0]['reason']}")
    return records


def _checked(entries: tqdm, on_bad_audio: str) -> Iterator[Entry]:
    """Yield all entries. Raise BadAudioError for a bad recording, or print its problem, depending on `on_bad_audio`."""
    for entry in entries:
        if entry.row is None and on_bad_audio != "skip":
            problem = f"clip {entry.note['clip_id']!r}: {entry.note['reason']}"
            if on_bad_audio == "error":
                raise BadAudioError(problem)
            entries.write(problem, file=sys.stderr)
        yield entry


class ShardWriter:
    """Writer of Parquet shards of limited size that can resume after an interruption.

    The working folder contains each finished shard and a JSON record of its content. The division into shards depends
    only on the rows. A new run therefore continues after the last record, and writes the same bytes. A shard with a
    single row may exceed `shard_bytes`.
    """

    def __init__(self, folder: str | Path, split: str, types: datasets.Features, shard_bytes: int) -> None:
        self.folder, self.split = Path(folder), split
        self.schema, self.shard_bytes = types.arrow_schema, shard_bytes
        self.records: list[dict[str, Any]] = []
        while (path := self._record_path()).is_file():
            self.records.append(json.loads(path.read_text(encoding="utf-8")))

    @property
    def next_row(self) -> int:
        """Index of the first row of the split that is not in a finished shard."""
        return sum(len(record["notes"]) for record in self.records)

    def write(self, entries: Iterable[Entry]) -> list[dict[str, Any]]:
        """Write the rows of the split that are not in a finished shard, and return the records of all its shards.

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
        unfinished = self.folder / f"{self.split}.part"
        notes: list[dict[str, Any]] = []
        group: list[dict[str, Any]] = []
        groups: list[int] = []
        payload = group_bytes = 0
        entry: Entry | None = pending.pop()

        # No compression, because the audio is already compressed or faster to read without it, and the text is small.
        # Without compression the bytes of a shard depend only on the rows.
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with pyarrow.parquet.ParquetWriter(unfinished, self.schema, version="2.6", **options) as parquet:

            def flush() -> None:
                if group:
                    table = pyarrow.Table.from_pylist(group, self.schema)
                    groups.append(len(group))
                    group.clear()  # frees memory before writing; the table contains a copy
                    parquet.write_table(table, row_group_size=len(table))
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
        os.replace(unfinished, path)
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
    if isinstance(value, (list, tuple)):
        return sum(map(payload_bytes, value))
    if isinstance(value, (str, bytes)):
        return len(value)
    return 0 if value is None else 8


def _plan(request: Request, splits: Mapping[str, datasets.Dataset], root: str | None) -> str:
    """Hash all inputs of a preparation: options, package versions, rows, and the size and mtime of the audio files."""
    options = asdict(request)
    if request.on_bad_audio == "report":  # excludes the same clips as "skip"
        options["on_bad_audio"] = "skip"
    digest = hashlib.sha256(json.dumps([FORMAT, options, versions()], default=str, sort_keys=True).encode())
    for split, rows in splits.items():
        digest.update(split.encode())
        for row in without_audio(rows):
            digest.update(json.dumps({**row, "audio_path": _relative(row["audio_path"], root)}).encode())
            if os.path.exists(row["audio_path"]):
                state = os.stat(row["audio_path"])
                digest.update(f"{state.st_size}:{state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _claim(folder: Path, plan: str, overwrite: bool) -> bool:
    """Prepare the output folder; return True if it already contains the complete result.

    `plan` is a hash of all inputs. If an unfinished run in the folder had other inputs, its files are deleted.
    """
    note, manifest = folder / _WORK / "plan", folder / MANIFEST
    last_plan = note.read_text(encoding="utf-8") if note.is_file() else None
    if manifest.is_file() and last_plan == plan and not overwrite:
        return True
    if manifest.is_file() and not overwrite:
        raise FileExistsError(
            f"{folder} contains another prepared set; choose another folder, or set --overwrite"
        )
    if last_plan is None and not manifest.is_file() and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty and not a prepared set; choose another folder")

    if last_plan != plan or manifest.is_file():
        manifest.unlink(missing_ok=True)
        for part in (folder / _WORK, folder / "data"):
            shutil.rmtree(part, ignore_errors=True)
        note.parent.mkdir(parents=True)
        write_text(note, plan, one_writer=True)
    return False


def _finish(
    request: Request,
    builder: Any,
    splits: Mapping[str, datasets.Dataset],
    records: Mapping[str, Sequence[dict[str, Any]]],
    root: str | None,
    folder: Path,
) -> dict[str, Any]:
    """Move the shards to the output folder, and write the dataset card and the manifest.

    The manifest is written last, because it marks the dataset as complete.
    """
    (folder / "data").mkdir(exist_ok=True)
    notes: dict[str, list[dict[str, Any]]] = {}
    for split, shards in records.items():
        notes[split] = []
        for number, shard in enumerate(shards):
            notes[split] += shard.pop("notes")
            finished, shard["file"] = shard["file"], f"data/{split}-{number:05d}-of-{len(shards):05d}.parquet"
            if (folder / _WORK / finished).is_file():  # otherwise an earlier run has already moved the shard
                os.replace(folder / _WORK / finished, folder / shard["file"])

    settings = {
        "dataset": getattr(builder, "origin", request.dataset),
        "options": dict(sorted(redact(request.options, from_anywhere=True).items())),
        "storage": request.storage,
        "shard_bytes": request.shard_bytes,
    }

    types = {**without_audio(next(iter(splits.values()))).features, **STORAGES[request.storage].features()}
    data_dir = request.options.get("data_dir")
    manifest = make_manifest(
        settings, datasets.Features(types), notes, records, builder.report(), data_dir, folder
    )

    if request.storage == "reference":
        all_notes = chain.from_iterable(notes.values())
        manifest["audio_example"] = next(note["audio_path"] for note in all_notes if "reason" not in note)
        same_drive = root is not None and Path(root).drive == folder.resolve().drive
        relative = os.path.relpath(root, folder.resolve()) if same_drive and root else None
        write_json(folder / ROOT_NOTE, {"absolute": root, "relative": relative}, one_writer=True)
    write_card(folder / "README.md", manifest)
    write_json(folder / MANIFEST, manifest, one_writer=True)

    for path in (folder / _WORK).glob("*-*.json"):
        path.unlink()
    return manifest


def push(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Upload a prepared dataset to a Hub dataset repository "user/name" in one commit, and return its URL.

    Raises ValueError for the storage format "reference", because the dataset then contains no audio.
    """
    from huggingface_hub import HfApi

    if PreparedSet(folder).manifest["storage"] == "reference":
        raise ValueError(
            "storage 'reference' contains no audio to upload; prepare the set with another storage"
        )
    api = HfApi()
    address = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
    patterns = ["data/*.parquet", "README.md", MANIFEST]
    api.upload_folder(
        folder_path=folder, repo_id=repo_id, repo_type="dataset", allow_patterns=patterns, delete_patterns=patterns[:1],
        commit_message="Upload a prepared set",
    )  # fmt: skip
    return str(address)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; the attribute `builder_options` is a dict of the builder options that were set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = builder_names()
    parser.add_argument("dataset", metavar="DATASET", choices=names, help=f"one of {', '.join(names)}")
    parser.add_argument("--out", required=True, help="output folder")
    storages = "; ".join(f"{name}: {storage.meaning}" for name, storage in STORAGES.items())

    parser.add_argument(
        "--storage", choices=STORAGES, default="original", help=f"storage of the audio; {storages}"
    )
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="number of reading processes"
    )
    parser.add_argument(
        "--shard_size", type=convert_file_size_to_int, default="500MB", help="size of a Parquet file"
    )
    parser.add_argument(
        "--on_bad_audio", choices=ON_BAD_AUDIO, default="skip",
        help="bad recordings: stop at the first one (error), leave them out and list them in the manifest (skip, the "
        "default), or also print each of them (report)",
    )  # fmt: skip

    parser.add_argument(
        "--push_to_hub", metavar="USER/NAME", help="upload the set to this dataset repository"
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace another prepared set in the output folder"
    )
    parser.add_argument("--cache_dir", help="cache folder of the builder's rows")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")

    # The first argument is the dataset, which determines the builder's options.
    named = argv[0] if argv and argv[0] in names else None
    fields = [] if named is None else add_builder_options(parser, find_builder(named).BUILDER_CONFIG_CLASS)
    arguments = parser.parse_args(argv)
    arguments.builder_options = {
        name: getattr(arguments, name) for name in fields if hasattr(arguments, name)
    }
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare a dataset as set on the command line, and upload it if requested."""
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    request = Request(args.dataset, args.builder_options, args.storage, args.shard_size, args.on_bad_audio)
    manifest = prepare(request, args.out, args.workers, args.overwrite, args.cache_dir, args.quiet)
    print(f"{summary_table(manifest)}\nprepared in {args.out}")
    if args.push_to_hub:
        print(f"uploaded to {push(args.out, args.push_to_hub, args.private)}")


if __name__ == "__main__":
    main()
