"""Prepares a dataset once: files on disk to Parquet, checked, with or without the audio, in a folder or on the Hub.

    supclap prepare esc50 --data_dir ESC-50 --out prepared/esc50 --storage int16 --workers 8
    supclap prepare esc50 --help  # with the options of that builder

Then `load_splits("prepared", data_dir="prepared/esc50")` gives the splits. Every recording is read from end to end; one
that cannot be used is left out and listed in `manifest.json`. A run that was killed goes on where it was, and the same
data give the same bytes, whatever the number of workers.
"""

# `datasets` could write a set by `map(num_proc=...)` and `to_parquet`. It would keep a second copy of all audio in its
# cache, begin a split anew after a kill in its middle, hold a whole shard in memory, and change its cache with the
# number of processes. `push_to_hub` would cut other shards than those whose checksums the manifest states.

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
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.parquet
import soundfile
from datasets.utils.py_utils import convert_file_size_to_int
from tqdm import tqdm

from modeling_supclap.datasets_scripts import builder_names, find_builder, load_builder
from modeling_supclap.datasets_scripts.atomic_files import folder_lock, write_json, write_text
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError
from modeling_supclap.datasets_scripts.bad_audio import (
    ON_BAD_AUDIO,
    check_recording,
    map_in_order,
    measure_content,
    read_content,
    read_recording,
    source_of,
)
from modeling_supclap.datasets_scripts.builders.options import add_builder_options
from modeling_supclap.datasets_scripts.manifest import (
    file_sha256,
    make_manifest,
    summary_table,
    versions,
    write_card,
)
from modeling_supclap.datasets_scripts.prepared import FORMAT, MANIFEST, ROOT_NOTE, STORAGES, PreparedSet
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.datasets_scripts.schema import AUDIO_COLUMNS, without_audio

ROW_GROUP_ROWS = 100  # as the Hub's viewer likes it: a row is read by reading its row group
ROW_GROUP_BYTES = 64 * 1024**2
CELL_BYTES = 2**31 - 2  # the most that Arrow puts into a cell
_WORK = ".prepare"  # inside the output folder: finished shards of an unfinished run, and what the run was to make


@dataclass(frozen=True)
class Request:
    """What to prepare, and how.

    Attributes:
        dataset: A name that `load_splits` knows.
        options: The options of its builder.
        storage: A key of `prepared.STORAGES`.
        shard_bytes: About how large a shard may become.
        on_bad_audio: "error" stops at the first recording that cannot be used, "skip" leaves such ones out, "report"
            also names each on the way. All but the first list them in the manifest.
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
    """Writes a prepared set, or goes on writing it, or finds that it is there already.

    Args:
        request: What to prepare, and how.
        out: The folder to write.
        workers: The number of processes that read the recordings.
        overwrite: Replaces another prepared set in the folder.
        cache_dir: Where `datasets` keeps the builder's rows; its own default when None.
        quiet: Shows no progress bar.

    Returns:
        The manifest.

    Raises:
        BadAudioError: With `on_bad_audio` "error", names the recording; always, when FFmpeg is needed and missing.
        FileExistsError: The folder holds something else.
        RuntimeError: Another run writes to the folder.
        ValueError: No recording of a split can be used, or the request names what does not exist.
    """
    for name, value, valid in (
        ("storage", request.storage, tuple(STORAGES)),
        ("on_bad_audio", request.on_bad_audio, ON_BAD_AUDIO),
    ):
        if value not in valid:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(valid)}")
    if request.shard_bytes < 1:
        raise ValueError(f"shard_bytes is {request.shard_bytes}; give at least 1")

    with folder_lock(out):
        builder = load_builder(request.dataset, cache_dir=cache_dir, **request.options)
        splits = builder.as_dataset()
        root = audio_root(request, splits)
        folder, plan = Path(out), _plan(request, splits, root)
        if _claim(folder, plan, overwrite):
            return PreparedSet(folder).manifest

        records = {}
        for split, rows in splits.items():
            records[split] = _write_split(folder / _WORK, split, rows, request, root, workers, quiet)
        return _finish(request, builder, splits, records, root, folder)


def audio_root(request: Request, splits: Mapping[str, datasets.Dataset]) -> str | None:
    """The folder that the paths of a set are relative to: `data_dir` if it holds all recordings, else what does."""
    parents: set[str] = set()
    for rows in splits.values():
        parents.update(map(os.path.dirname, filter(os.path.isabs, rows["audio_path"])))

    data_dir = request.options.get("data_dir")
    try:
        common = os.path.commonpath(sorted(parents))
        root = os.path.abspath(os.path.expanduser(data_dir)) if data_dir else common
        return root if os.path.commonpath([root, common]) == root else common
    except ValueError:  # several drives, or no path at all
        return None


# ---- a row ----


def pack(source: str | bytes, name: str, storage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a recording, a file or the bytes of one, all of it, and makes what is to be stored of it.

    Returns:
        The columns to add to its row, as `Storage.features` names them, and what the manifest counts: "seconds",
        "source_bytes" and "source_sha256".

    Raises:
        BadAudioError: The recording cannot be used; the message calls it by the name, the path that its row is to have.
    """
    codec, stored_hz, _ = STORAGES[storage]
    columns: dict[str, Any] = {}
    file_name = PurePosixPath(name)

    # In memory as a whole is only what is stored, however long the recording is.
    if stored_hz is None:
        if codec == "file":
            source = read_content(source, name)
            columns = {"audio": {"bytes": source, "path": file_name.name}}
        seconds = check_recording(source, name)
    else:
        samples = read_recording(source, name, stored_hz)
        seconds = len(samples) / stored_hz

    source_bytes, digest = measure_content(source, name)
    note = {"seconds": seconds, "source_bytes": source_bytes, "source_sha256": digest}
    if stored_hz is None:
        return columns, note
    if codec == "int16":
        return {"samples": samples.tobytes(), "sampling_rate_hz": stored_hz}, note

    encoded = io.BytesIO()
    soundfile.write(encoded, samples, stored_hz, format="FLAC", subtype="PCM_16")
    return {"audio": {"bytes": encoded.getvalue(), "path": file_name.with_suffix(".flac").name}}, note


class Entry(NamedTuple):
    """What became of a row: the row to write, or None where it is left out, and a note for the manifest."""

    row: dict[str, Any] | None
    note: dict[str, Any]


def _entry(row: Mapping[str, Any], root: str | None, storage: str) -> Entry:
    kept = {name: value for name, value in row.items() if name not in AUDIO_COLUMNS}
    kept["audio_path"] = _relative(row["audio_path"], root)
    try:
        columns, note = pack(source_of(row), kept["audio_path"], storage)
        if payload_bytes(columns) > CELL_BYTES:
            raise BadAudioError(
                f"{kept['audio_path']} takes {payload_bytes(columns)} bytes as {storage}, more than a cell of Parquet "
                "holds; cut it, or choose another storage, such as int16 or reference"
            )
    except MissingDecoderError:
        raise
    except BadAudioError as error:
        return Entry(None, {"clip_id": row["clip_id"], "audio_path": kept["audio_path"], "reason": str(error)})

    captions = {language: len(texts) for language, texts in row["captions"].items() if texts}
    about = {"audio_path": kept["audio_path"], "captions": captions, "license": row["license"]}
    return Entry({**kept, **columns}, {**about, **note})


def _relative(path: str, root: str | None) -> str:
    return Path(os.path.relpath(path, root)).as_posix() if root is not None and os.path.isabs(path) else path


# ---- shards ----


def _write_split(
    folder: Path, split: str, rows: datasets.Dataset, request: Request, root: str | None, workers: int, quiet: bool
) -> list[dict[str, Any]]:
    """Writes the rest of a split and gives the records of all its shards."""
    types = datasets.Features({**without_audio(rows).features, **STORAGES[request.storage].features()})
    writer = ShardWriter(folder, split, types, request.shard_bytes)

    start = writer.next_row
    unread: Sequence[Any] = rows.select(range(start, len(rows))) if start < len(rows) else []
    entries = map_in_order(partial(_entry, root=root, storage=request.storage), unread, workers)
    bar = progress(entries, split, len(rows), "clips", quiet, start)
    records = writer.write(_checked(bar, request.on_bad_audio))

    notes = [note for record in records for note in record["notes"]]
    if notes and all("reason" in note for note in notes):
        raise ValueError(
            f"none of the {len(notes)} recordings of {split!r} can be used; the first: {notes[0]['reason']}"
        )
    return records


def _checked(entries: tqdm, on_bad_audio: str) -> Iterator[Entry]:
    """Stops at a recording that cannot be used, or names it, where that is asked for."""
    for entry in entries:
        if entry.row is None and on_bad_audio != "skip":
            problem = f"clip {entry.note['clip_id']!r}: {entry.note['reason']}"
            if on_bad_audio == "error":
                raise BadAudioError(problem)
            entries.write(problem, file=sys.stderr)
        yield entry


class ShardWriter:
    """Rows to Parquet shards of bounded size: in order, the same bytes every time, and continued after a kill.

    A shard that is complete lies in the working folder with a record of what went into it. Where it ends depends on
    the rows alone, so a run that finds the records of an earlier one goes on after the last of them.

    Args:
        folder: The working folder, which holds finished shards and their records.
        split: The name of the split.
        types: The features of the rows.
        shard_bytes: A shard is closed before it exceeds this; one that a single row fills may.
    """

    def __init__(self, folder: str | Path, split: str, types: datasets.Features, shard_bytes: int) -> None:
        self.folder, self.split = Path(folder), split
        self.schema, self.shard_bytes = types.arrow_schema, shard_bytes
        self.records: list[dict[str, Any]] = []
        while (path := self._record_path()).is_file():
            self.records.append(json.loads(path.read_text(encoding="utf-8")))

    @property
    def next_row(self) -> int:
        """The first row of the split that no finished shard has taken in."""
        return sum(len(record["notes"]) for record in self.records)

    def write(self, entries: Iterable[Entry]) -> list[dict[str, Any]]:
        """Writes all that is left of the split, from `next_row` on.

        Returns:
            The records of all shards of the split, those of earlier runs too: "file", "rows", "row_groups", "bytes",
            "payload_bytes", "sha256" and "notes".
        """
        rest = iter(entries)
        waiting = list(islice(rest, 1))  # in a list, which can be emptied: a row may be a recording of hours
        while waiting:
            self._write_shard(waiting, rest)
        return self.records

    def _write_shard(self, waiting: list[Entry], rest: Iterator[Entry]) -> None:
        """Writes one shard from the entry that waits on, and leaves there the one that did not fit any more."""
        path = self._record_path().with_suffix(".parquet")
        unfinished = self.folder / f"{self.split}.part"
        notes: list[dict[str, Any]] = []
        group: list[dict[str, Any]] = []
        groups: list[int] = []
        payload = group_bytes = 0
        entry: Entry | None = waiting.pop()

        # Nothing but the rows decides about the bytes: the audio is compressed already, or faster to read as it is, and
        # text is little beside it.
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with pyarrow.parquet.ParquetWriter(unfinished, self.schema, version="2.6", **options) as parquet:

            def flush() -> None:
                if group:
                    table = pyarrow.Table.from_pylist(group, self.schema)
                    groups.append(len(group))
                    group.clear()  # first: the table has a copy
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
            waiting.append(entry)
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


# ---- the folder ----


def _plan(request: Request, splits: Mapping[str, datasets.Dataset], root: str | None) -> str:
    """A hash of all that the bytes of a set depend on: the request, the rows and the state of their files."""
    asked = asdict(request)
    if request.on_bad_audio == "report":  # which leaves out the same
        asked["on_bad_audio"] = "skip"
    digest = hashlib.sha256(json.dumps([FORMAT, asked, versions()], default=str, sort_keys=True).encode())
    for split, rows in splits.items():
        digest.update(split.encode())
        for row in without_audio(rows):
            digest.update(json.dumps({**row, "audio_path": _relative(row["audio_path"], root)}).encode())
            if os.path.exists(row["audio_path"]):
                state = os.stat(row["audio_path"])
                digest.update(f"{state.st_size}:{state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _claim(folder: Path, plan: str, overwrite: bool) -> bool:
    """Makes the folder ours; true when the set is complete already. An unfinished run of another plan is discarded."""
    note, manifest = folder / _WORK / "plan", folder / MANIFEST
    found = note.read_text(encoding="utf-8") if note.is_file() else None
    if manifest.is_file() and found == plan and not overwrite:
        return True
    if manifest.is_file() and not overwrite:
        raise FileExistsError(f"{folder} holds another prepared set; choose another folder, or replace it: --overwrite")
    if found is None and not manifest.is_file() and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty and holds no prepared set; choose another folder")

    if found != plan or manifest.is_file():
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
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    root: str | None,
    folder: Path,
) -> dict[str, Any]:
    """Puts shards, card and manifest in their places; the manifest comes last, as the sign that all is there."""
    (folder / "data").mkdir(exist_ok=True)
    shards: dict[str, list[dict[str, Any]]] = {}
    notes: dict[str, list[dict[str, Any]]] = {}
    for split, of_split in records.items():
        shards[split], notes[split] = [], []
        for number, record in enumerate(of_split):
            name = f"data/{split}-{number:05d}-of-{len(of_split):05d}.parquet"
            if (folder / _WORK / record["file"]).is_file():  # a run killed here has moved some already
                os.replace(folder / _WORK / record["file"], folder / name)
            about = {key: record[key] for key in ("rows", "row_groups", "bytes", "payload_bytes", "sha256")}
            shards[split].append({"file": name, **about})
            notes[split] += record["notes"]

    asked = {
        "dataset": getattr(builder, "origin", request.dataset),
        "options": dict(sorted(redact(request.options, from_anywhere=True).items())),
        "storage": request.storage,
        "shard_bytes": request.shard_bytes,
    }

    types = {**without_audio(next(iter(splits.values()))).features, **STORAGES[request.storage].features()}
    report = builder.report() if hasattr(builder, "report") else {}
    data_dir = request.options.get("data_dir")
    manifest = make_manifest(asked, datasets.Features(types), notes, shards, report, data_dir, folder)

    if request.storage == "reference":
        manifest["audio_example"] = next(
            note["audio_path"] for of_split in notes.values() for note in of_split if "reason" not in note
        )
        same_drive = root is not None and Path(root).drive == folder.resolve().drive
        relative = os.path.relpath(root, folder.resolve()) if same_drive and root else None
        write_json(folder / ROOT_NOTE, {"absolute": root, "relative": relative}, one_writer=True)
    write_card(folder / "README.md", manifest)
    write_json(folder / MANIFEST, manifest, one_writer=True)

    for path in (folder / _WORK).glob("*-*.json"):
        path.unlink()
    return manifest


def push(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Uploads a prepared set that holds its audio as a dataset repository "user/name", in one commit; its address.

    A repository that does not exist is made, on request a private one.
    """
    from huggingface_hub import HfApi

    if PreparedSet(folder).manifest["storage"] == "reference":
        raise ValueError("a set of storage 'reference' holds no audio to push; prepare it with another storage")
    api = HfApi()
    address = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
    ours = ["data/*.parquet", "README.md", MANIFEST]
    api.upload_folder(
        folder_path=folder, repo_id=repo_id, repo_type="dataset", allow_patterns=ours, delete_patterns=ours[:1],
        commit_message="Upload a prepared set",
    )  # fmt: skip
    return str(address)


# ---- the command line ----


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `builder_options` holds those of the builder that were given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = builder_names()
    parser.add_argument("dataset", metavar="DATASET", choices=names, help=f"one of {', '.join(names)}")
    parser.add_argument("--out", required=True, help="the folder to write")
    storages = "; ".join(f"{name}, {storage.meaning}" for name, storage in STORAGES.items())

    parser.add_argument("--storage", choices=STORAGES, default="original", help=f"how to keep the audio: {storages}")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that read")
    parser.add_argument("--shard_size", type=convert_file_size_to_int, default="500MB", help="bytes of a Parquet file")
    parser.add_argument(
        "--on_bad_audio", choices=ON_BAD_AUDIO, default="skip",
        help="recordings that cannot be used: stop at the first, leave them out and list them in the manifest "
        "(default), or also name each on the way",
    )  # fmt: skip

    parser.add_argument("--push_to_hub", metavar="USER/NAME", help="then upload the folder as this dataset repository")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--overwrite", action="store_true", help="replace another prepared set in the folder")
    parser.add_argument("--cache_dir", help="where `datasets` keeps the rows of the builder")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")

    # The dataset comes first: its builder says which further options there are.
    named = argv[0] if argv and argv[0] in names else None
    fields = [] if named is None else add_builder_options(parser, find_builder(named).BUILDER_CONFIG_CLASS)
    arguments = parser.parse_args(argv)
    arguments.builder_options = {name: getattr(arguments, name) for name in fields if hasattr(arguments, name)}
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Prepares, shows a summary, uploads; what is wrong with the data or the arguments ends in one line."""
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    request = Request(args.dataset, args.builder_options, args.storage, args.shard_size, args.on_bad_audio)

    try:
        manifest = prepare(request, args.out, args.workers, args.overwrite, args.cache_dir, args.quiet)
        print(summary_table(manifest))
        print(f"prepared in {args.out}")
        if args.push_to_hub:
            print(f"uploaded to {push(args.out, args.push_to_hub, args.private)}")
    except (ValueError, OSError, RuntimeError) as error:
        cause: BaseException = error
        while isinstance(cause, datasets.exceptions.DatasetsError) and cause.__cause__ is not None:
            cause = cause.__cause__  # what the builder raised
        print(f"{Path(sys.argv[0]).name}: error: {cause}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
