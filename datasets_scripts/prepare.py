"""Prepare a dataset: check all recordings, write Parquet files with or without the audio, and upload them if requested.

    supclap prepare esc50 --data_dir ESC-50 --out prepared/esc50 --storage int16 --workers 8
    supclap prepare esc50 --help  # lists the options of this dataset

Then `load_splits("prepared", data_dir="prepared/esc50")` returns the splits. Every recording is read completely; bad
recordings are excluded and listed in `manifest.json`. A killed run resumes where it stopped. The same data produce the
same bytes, for any number of workers.

Many machines share a dataset by ranges of its rows. Each writes one shard, without waiting for others:

    supclap prepare esc50 --data_dir ESC-50 --out prepared/esc50 --shard 17/100
    supclap prepare esc50 --data_dir ESC-50 --out prepared/esc50 --finish

From Python, the same steps are `write_shard` and `finish`; `make_entries` returns the rows to write.
"""

# `map(num_proc=...)` and `to_parquet` of `datasets` are not used: they keep a second copy of all audio in the cache,
# restart an interrupted split, hold a whole shard in memory, and their cache depends on the number of processes.
# `push_to_hub` would write different shards, which do not match the checksums in the manifest.

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from datasets.utils.py_utils import convert_file_size_to_int
from tqdm import tqdm

from modeling_supclap.datasets_scripts import builder_names, find_builder, load_builder
from modeling_supclap.datasets_scripts.atomic_files import folder_lock, read_json, write_json
from modeling_supclap.datasets_scripts.audio import BadAudioError, segment_of
from modeling_supclap.datasets_scripts.bad_audio import ON_BAD_AUDIO
from modeling_supclap.datasets_scripts.builders.options import add_builder_options
from modeling_supclap.datasets_scripts.manifest import make_manifest, summary_table, versions, write_card
from modeling_supclap.datasets_scripts.prepared import FORMAT, MANIFEST, ROOT_NOTE, STORAGES, PreparedSet
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.datasets_scripts.schema import without_audio
from modeling_supclap.datasets_scripts.shard_writer import Entry, ShardWriter, make_entries, pack, relative_path
from modeling_supclap.datasets_scripts.shards import (
    Shard,
    changed_settings,
    is_complete,
    join_records,
    read_plan,
    recording_states,
    split_ranges,
    start_plan,
    write_record,
)

__all__ = ["Entry", "Request", "Shard", "finish", "make_entries", "pack", "prepare", "push", "write_shard"]

# folder in the output folder: the plan, and the files of shards until `finish` moves them (see `shards`)
_WORK = ".prepare"


@dataclass(frozen=True)
class Request:
    """Options of a preparation.

    Attributes:
        dataset: Dataset name (see `load_splits`).
        options: Builder options of the dataset.
        storage: Storage format of the audio, a key of `prepared.STORAGES`.
        shard_bytes: Approximate maximum size of a Parquet file in bytes.
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
    nothing is written. Many machines prepare one dataset with `write_shard` and `finish`.

    Args:
        overwrite: Whether to replace a prepared dataset in the output folder.
        cache_dir: Cache folder for the rows of the builder. None: the default of `datasets`.

    Raises:
        BadAudioError: A recording is bad and `on_bad_audio` is "error", or PyAV is required but not installed.
        FileExistsError: The output folder contains a different prepared dataset and `overwrite` is not set, or it
            contains files that are not from a preparation.
        RuntimeError: Another run is writing to the folder.
        ValueError: All recordings of a split are bad, or an option is invalid.
    """
    with folder_lock(out):
        source = _Source.load(request, cache_dir)
        folder, plan = Path(out), source.plan()
        plan["recordings"] = _hash_states(source.splits)
        if _claim(folder, plan, overwrite):
            return PreparedSet(folder).manifest
        _write_shard(source, folder / _WORK, Shard(0, 1), workers, quiet)
        return _join(source, folder, 1)


def write_shard(
    request: Request,
    out: str | Path,
    shard: Shard,
    workers: int = 1,
    cache_dir: str | None = None,
    quiet: bool = False,
) -> None:
    """Write one shard of a dataset that many machines prepare: the part `shard` of its rows, in files of its own.

    Shards are written in any order and at the same time, into the same folder or into copies that are joined. A killed
    shard continues after its last file when it is written again, and nothing is written if it is complete. After the
    last one, `finish` joins them. The rows are counted through all splits. The same number of shards results in the
    same bytes.

    Args:
        cache_dir: Cache folder for the rows of the builder. If machines share it, the first one lists the recordings.

    Raises:
        BadAudioError: As in `prepare`.
        FileExistsError: The output folder contains shards of other rows, options or package versions, which the message
            names, recordings of this shard have another size than in an earlier run, or it contains other files.
        InUseError: Another process is writing this shard.
        ValueError: An option is invalid.
    """
    source, folder = _Source.load(request, cache_dir), Path(out)
    work = folder / _WORK
    with folder_lock(folder, wait_seconds=60):  # other shards may start at the same time
        _refuse_other_files(folder)
        start_plan(work, {**source.plan(), "shards": shard.count})
    with shard.lock(work):
        # Modification times differ between the copies of several machines.
        start_plan(shard.path(work), {"recordings": _hash_states(source.parts(shard), with_times=False)})
        _write_shard(source, work, shard, workers, quiet)


def finish(request: Request, out: str | Path, cache_dir: str | None = None) -> dict[str, Any]:
    """Join the shards of `write_shard` to a prepared dataset, write its manifest and card, and return the manifest.

    The arguments are those of `write_shard`. If the dataset is complete, nothing is written.

    Raises:
        FileExistsError: The shards were written with other rows, options or package versions, which the message names.
        FileNotFoundError: There are no shards, or one of their files is missing.
        ValueError: Shards are missing, or all recordings of a split are bad.
    """
    folder = Path(out)
    with folder_lock(folder, wait_seconds=60):
        stored = read_plan(folder / _WORK)
        if stored is None or "shards" not in stored:
            raise FileNotFoundError(f"{folder} contains no shards; write them first, with --shard")
        source = _Source.load(request, cache_dir)
        start_plan(folder / _WORK, {**source.plan(), "shards": stored["shards"]})
        if (folder / MANIFEST).is_file():
            return PreparedSet(folder).manifest
        return _join(source, folder, stored["shards"])


@dataclass(frozen=True)
class _Source:
    """Dataset to prepare: its request, builder, splits, and the folder of its recordings."""

    request: Request
    builder: Any
    splits: Mapping[str, datasets.Dataset]
    root: str | None

    @classmethod
    def load(cls, request: Request, cache_dir: str | None) -> _Source:
        """Check the request and load the rows of the dataset."""
        for name, valid in (("storage", STORAGES), ("on_bad_audio", ON_BAD_AUDIO)):
            if getattr(request, name) not in valid:
                raise ValueError(f"{name} is {getattr(request, name)!r}; expected one of {', '.join(valid)}")
        if request.shard_bytes < 1:
            raise ValueError(f"shard_bytes is {request.shard_bytes}; expected at least 1")

        builder = load_builder(request.dataset, cache_dir=cache_dir, **request.options)
        splits = builder.as_dataset()
        if STORAGES[request.storage].codec == "file":
            _refuse_segments(splits)
        return cls(request, builder, splits, audio_root(request, splits))

    @property
    def types(self) -> datasets.Features:
        """Features of the prepared rows."""
        rows = without_audio(next(iter(self.splits.values())))
        return datasets.Features({**rows.features, **STORAGES[self.request.storage].features()})

    def parts(self, shard: Shard) -> dict[str, datasets.Dataset]:
        """Return the rows of a shard in each split."""
        lengths = {split: len(rows) for split, rows in self.splits.items()}
        parts = {}
        for split, numbers in split_ranges(shard.rows(sum(lengths.values())), lengths).items():
            parts[split] = self.splits[split].select(numbers)
        return parts

    def plan(self) -> dict[str, Any]:
        """Return all inputs of a preparation but the recordings: the request, package versions and a hash of the rows.

        Options are hashed, because they may contain passwords.
        """
        plan = {**asdict(self.request), "format": FORMAT, "versions": versions()}
        for name, value in plan.pop("options").items():
            text = json.dumps(value, default=str, sort_keys=True)
            plan[f"options.{name}"] = hashlib.sha256(text.encode()).hexdigest()
        if self.request.on_bad_audio == "report":  # excludes the same clips as "skip"
            plan["on_bad_audio"] = "skip"

        digest = hashlib.sha256()
        for split, rows in self.splits.items():
            digest.update(split.encode())
            for batch in without_audio(rows).iter(1000):
                batch["audio_path"] = [relative_path(path, self.root) for path in batch["audio_path"]]
                digest.update(json.dumps(batch).encode())
        return {**plan, "rows": digest.hexdigest()}


def _refuse_segments(splits: Mapping[str, datasets.Dataset]) -> None:
    """Raise ValueError if rows are parts of recordings, because the original files contain more than these parts."""
    for split, rows in splits.items():
        if "end_seconds" in rows.column_names and any(
            segment_of(row)[:2] != (None, None) for row in without_audio(rows)
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


def _write_shard(source: _Source, work: Path, shard: Shard, workers: int, quiet: bool) -> None:
    """Write the rows of a shard that are not in its finished files yet, and then its record: the files of each split.

    The caller has the lock of the shard.
    """
    if is_complete(work, shard):
        return
    request, folder = source.request, shard.path(work)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = {}
    for split, rows in source.parts(shard).items():
        writer = ShardWriter(folder, split, source.types, request.shard_bytes)
        start = writer.next_row
        entries = make_entries(rows.select(range(start, len(rows))), request.storage, source.root, workers)
        bar = progress(entries, split, len(rows), "clips", quiet, start)
        records = writer.write(_checked(bar, request.on_bad_audio))
        files[split] = [f"{shard.name}/{record['file']}" for record in records]
    write_record(work, shard, files)


def _checked(entries: tqdm, on_bad_audio: str) -> Iterator[Entry]:
    """Yield all entries. Raise BadAudioError for a bad recording, or print its problem, depending on `on_bad_audio`."""
    for entry in entries:
        if entry.row is None and on_bad_audio != "skip":
            problem = f"clip {entry.note['clip_id']!r}: {entry.note['reason']}"
            if on_bad_audio == "error":
                raise BadAudioError(problem)
            entries.write(problem, file=sys.stderr)
        yield entry


def _hash_states(splits: Mapping[str, datasets.Dataset], with_times: bool = True) -> str:
    states = [recording_states(rows, with_times) for rows in splits.values()]
    return hashlib.sha256(str(states).encode()).hexdigest()


def _claim(folder: Path, plan: Mapping[str, Any], overwrite: bool) -> bool:
    """Prepare the output folder for one run; return True if it already contains the complete result.

    If an unfinished run in the folder had another plan, its files are deleted, unless they are shards.
    """
    stored, is_whole = read_plan(folder / _WORK), (folder / MANIFEST).is_file()
    changed = changed_settings(stored or {}, plan)
    if is_whole and not changed and not overwrite:
        return True
    if is_whole and not overwrite:
        what = f" with different {', '.join(changed)}" if stored else ""
        raise FileExistsError(
            f"{folder} contains another prepared set{what}; choose another folder, or set --overwrite"
        )
    if stored and "shards" in stored and not overwrite:
        raise FileExistsError(
            f"{folder} contains shards {stored['shards']}; finish them, choose another folder, or set --overwrite"
        )
    _refuse_other_files(folder)

    if changed or is_whole:
        (folder / MANIFEST).unlink(missing_ok=True)
        for part in (folder / _WORK, folder / "data"):
            shutil.rmtree(part, ignore_errors=True)
        start_plan(folder / _WORK, plan)
    return False


def _refuse_other_files(folder: Path) -> None:
    """Raise FileExistsError if a folder contains files, and neither a prepared dataset nor an unfinished one."""
    is_ours = (folder / MANIFEST).is_file() or (folder / _WORK).is_dir()
    if not is_ours and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty and not a prepared set; choose another folder")


def _join(source: _Source, folder: Path, count: int) -> dict[str, Any]:
    """Move the files of all shards to the output folder, and write the dataset card and the manifest.

    The manifest is written last, because it marks the dataset as complete.
    """
    shards, records, notes = folder / _WORK / "shards", {}, {}
    files = join_records(folder / _WORK, count)
    for split, names in files.items():
        records[split] = [read_json((shards / name).with_suffix(".json")) for name in names]
        notes[split] = list(chain.from_iterable(record.pop("notes") for record in records[split]))
        if notes[split] and all("reason" in note for note in notes[split]):
            first = notes[split][0]["reason"]
            raise ValueError(f"all {len(notes[split])} recordings of {split!r} are bad; the first: {first}")

    (folder / "data").mkdir(exist_ok=True)
    for split, of_split in records.items():
        for number, (name, record) in enumerate(zip(files[split], of_split, strict=True)):
            record["file"] = f"data/{split}-{number:05d}-of-{len(of_split):05d}.parquet"
            if (shards / name).is_file():  # otherwise an earlier run has already moved the file
                os.replace(shards / name, folder / record["file"])
            elif not (folder / record["file"]).is_file():
                raise FileNotFoundError(f"{shards / name} is missing; copy the files of all shards to one folder")

    request = source.request
    settings = {
        "dataset": getattr(source.builder, "origin", request.dataset),
        "options": dict(sorted(redact(request.options, from_anywhere=True).items())),
        "storage": request.storage,
        "shard_bytes": request.shard_bytes,
    }
    data_dir = request.options.get("data_dir")
    manifest = make_manifest(settings, source.types, notes, records, source.builder.report(), data_dir, folder)
    if request.storage == "reference":
        usable = (note for note in chain.from_iterable(notes.values()) if "reason" not in note)
        manifest["audio_example"] = next(usable)["audio_path"]
        root, here = source.root or "", folder.resolve()
        relative = relative_path(root, str(here)) if Path(root).drive == here.drive else ""
        write_json(folder / ROOT_NOTE, {"absolute": root, "relative": relative}, one_writer=True)
    write_card(folder / "README.md", manifest)
    write_json(folder / MANIFEST, manifest, one_writer=True)

    for name in chain.from_iterable(files.values()):
        (shards / name).with_suffix(".json").unlink()
    return manifest


def push(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Upload a prepared dataset to a Hub dataset repository "user/name" in one commit, and return its URL.

    Raises ValueError for the storage format "reference", because the dataset then contains no audio.
    """
    from huggingface_hub import HfApi

    if PreparedSet(folder).manifest["storage"] == "reference":
        raise ValueError("storage 'reference' contains no audio to upload; prepare the set with another storage")
    api = HfApi()
    address = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
    patterns = ["data/*.parquet", "README.md", MANIFEST]
    api.upload_folder(
        folder_path=folder, repo_id=repo_id, repo_type="dataset", allow_patterns=patterns, delete_patterns=patterns[:1],
        commit_message="Upload a prepared set",
    )  # fmt: skip
    return str(address)


@dataclass
class CommandOptions:
    """Options of the command.

    Attributes:
        out: Output folder (required).
        storage: Storage of the audio: original (the bytes of the files, the default), flac16k (FLAC at 16 kHz, mono),
            flac48k (for CLAP), int16 (samples at 16 kHz, which need no decoding) or reference (only the paths).
        workers: Number of reading processes. Default: one per CPU core, at most 8.
        shard_size: Size of a Parquet file. Default: 500MB.
        on_bad_audio: Bad recordings: stop at the first one (error), leave them out and list them in the manifest (skip,
            the default), or also print each of them (report).
        push_to_hub: Dataset repository USER/NAME to upload the set to.
        private: Make a new repository private.
        overwrite: Replace another prepared set in the output folder.
        shard: Write this part of the rows, such as 17/100 (the first is 0/100), to an output folder that many machines
            share.
        finish: Join the shards after the last one; the other options are those of the shards.
        cache_dir: Cache folder of the builder's rows.
        quiet: No progress bar.
    """

    out: str = ""
    storage: str = "original"
    workers: int = min(8, os.cpu_count() or 1)
    shard_size: str = "500MB"
    on_bad_audio: str = "skip"
    push_to_hub: str | None = None
    private: bool = False
    overwrite: bool = False
    shard: str | None = None
    finish: bool = False
    cache_dir: str | None = None
    quiet: bool = False


def parse_arguments(argv: Sequence[str]) -> tuple[CommandOptions, Request]:
    """Parse the command line. The first argument is the dataset, which determines the builder's options."""
    names = builder_names()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("dataset", metavar="DATASET", choices=names, help=f"one of {', '.join(names)}")
    add_builder_options(parser, CommandOptions, "options")
    of_builder: list[str] = []
    if argv and argv[0] in names:
        of_builder = add_builder_options(parser, find_builder(argv[0]).BUILDER_CONFIG_CLASS)

    given = vars(parser.parse_args(argv))
    dataset = given.pop("dataset")
    builder_options = {name: given.pop(name) for name in of_builder if name in given}
    options = CommandOptions(**given)
    if not options.out:
        parser.error("--out is required: the output folder")
    for name in ("finish", "overwrite", "push_to_hub"):
        if options.shard and getattr(options, name):
            parser.error(f"--{name} is not for a shard; after the last one, run the command with --finish")
    if options.finish and options.overwrite:
        parser.error("--finish does not write the shards, so --overwrite has no effect")
    try:
        shard_bytes = convert_file_size_to_int(options.shard_size)
    except ValueError:
        parser.error(f"argument --shard_size: invalid value: {options.shard_size!r}")
    return options, Request(dataset, builder_options, options.storage, shard_bytes, options.on_bad_audio)


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare a dataset as set on the command line, and upload it if requested."""
    options, request = parse_arguments(sys.argv[1:] if argv is None else argv)
    out, cache_dir = options.out, options.cache_dir
    if options.shard:
        write_shard(request, out, Shard.parse(options.shard), options.workers, cache_dir, options.quiet)
        print(f"shard {options.shard} of {out} is complete; after the last one, run the command with --finish")
        return
    if options.finish:
        manifest = finish(request, out, cache_dir)
    else:
        manifest = prepare(request, out, options.workers, options.overwrite, cache_dir, options.quiet)
    print(f"{summary_table(manifest)}\nprepared in {out}")
    if options.push_to_hub:
        print(f"uploaded to {push(out, options.push_to_hub, options.private)}")


if __name__ == "__main__":
    main()
