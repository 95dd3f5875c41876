"""Prepares a dataset once: files on disk to Parquet, checked, with or without the audio, in a folder or on the Hub.

    python datasets_scripts/prepare.py esc50 --data_dir ESC-50 --out prepared/esc50 --storage int16 --workers 8
    python datasets_scripts/prepare.py esc50 --help                      # with the options of that builder

Then `load_splits("prepared", data_dir="prepared/esc50")` gives the splits. Every recording is read from end to end; one
that cannot be used is left out and listed in `manifest.json`. A run that was killed goes on where it was, and the same
data give the same bytes, whatever the number of workers.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from tqdm import tqdm

from modeling_supclap.datasets_scripts import builder_names, find_builder, load_builder
from modeling_supclap.datasets_scripts.atomic_files import write_json
from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.datasets_scripts.bad_audio import ON_BAD_AUDIO
from modeling_supclap.datasets_scripts.builders.options import add_builder_options
from modeling_supclap.datasets_scripts.manifest import make_manifest, root_entry, summary_table, versions, write_card
from modeling_supclap.datasets_scripts.parallel import map_in_order
from modeling_supclap.datasets_scripts.prepared import FORMAT, MANIFEST, read_manifest
from modeling_supclap.datasets_scripts.schema import AUDIO_COLUMNS, without_audio
from modeling_supclap.datasets_scripts.shards import ShardWriter
from modeling_supclap.datasets_scripts.storage import STORAGES, Packed, audio_features, pack, source_of

_WORK = ".prepare"  # inside the output folder: finished shards of an unfinished run, and what the run was to make
_CHUNK = 8  # clips a worker takes at a time
_Records: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Request:
    """What to prepare, and how.

    Attributes:
        dataset: A name that `load_splits` knows.
        options: Of its builder.
        storage: A key of `storage.STORAGES`.
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
        workers: Processes that read the recordings.
        overwrite: Replaces another prepared set in the folder.
        cache_dir: Where `datasets` keeps the builder's rows; its own default when None.
        quiet: No progress bar.

    Returns:
        The manifest.

    Raises:
        BadAudioError: With `on_bad_audio` "error", names the recording; always, when FFmpeg is needed and missing.
        FileExistsError: The folder holds something else.
        ValueError: No recording of a split can be used, or the request names what does not exist.
    """
    _check(request)
    builder = load_builder(request.dataset, cache_dir=cache_dir, **request.options)
    splits = builder.as_dataset()
    root = audio_root(request, splits)
    plan, folder = _plan(request, splits, root), Path(out)
    if _claim(folder, plan, overwrite):
        return read_manifest(folder)
    records = {}
    for split, rows in splits.items():
        writer = ShardWriter(folder / _WORK, split, _types(rows, request.storage), request.shard_bytes)
        packed = _packed(rows, writer.next_row, root, request.storage, workers)
        with tqdm(total=len(rows), initial=writer.next_row, desc=split, unit="clip", disable=quiet) as bar:
            records[split] = writer.write(_entries(packed, writer.next_row, request.on_bad_audio, bar))
        _require_usable(split, records[split])
    manifest = _finish(request, builder, splits, records, root, folder)
    for path in (folder / _WORK).glob("*-*.json"):
        path.unlink()
    return manifest


def audio_root(request: Request, splits: Mapping[str, datasets.Dataset]) -> str | None:
    """The folder that the paths of a set are relative to: `data_dir` if it holds all recordings, else what does."""
    paths = {path for rows in splits.values() for path in rows["audio_path"] if os.path.isabs(path)}
    parents = sorted({os.path.dirname(path) for path in paths})
    data_dir = request.options.get("data_dir")
    try:
        common = os.path.commonpath(parents)
        root = os.path.abspath(os.path.expanduser(data_dir)) if data_dir else common
        return root if os.path.commonpath([root, common]) == root else common
    except ValueError:  # several drives, or no path at all
        return None


# ---- rows ----


def _entries(
    packed: Iterator[tuple[dict[str, Any], Packed]], start: int, on_bad_audio: str, bar: tqdm
) -> Iterator[tuple[int, dict[str, Any] | None, dict[str, Any]]]:
    """Row by row, what `ShardWriter.write` takes."""
    for number, (row, made) in enumerate(packed, start):
        bar.update()
        if made.problem is None:
            counts = {language: len(texts) for language, texts in row["captions"].items() if texts}
            note = {
                "audio_path": row["audio_path"],
                "captions": counts,
                "license": row["license"],
                "seconds": made.seconds,
                "source_bytes": made.source_bytes,
                "source_sha256": made.source_sha256,
            }
            yield number, {**row, **made.columns}, note
            continue
        if on_bad_audio == "error":
            raise BadAudioError(f"clip {row['clip_id']!r}: {made.problem}")
        if on_bad_audio == "report":
            bar.write(f"clip {row['clip_id']!r}: {made.problem}", file=sys.stderr)
        yield number, None, {"clip_id": row["clip_id"], "audio_path": row["audio_path"], "reason": made.problem}


def _packed(
    rows: datasets.Dataset, start: int, root: str | None, storage: str, workers: int
) -> Iterator[tuple[dict[str, Any], Packed]]:
    """Rows from `start` on, without the audio that they may hold, with their relative path; and what was made of it."""
    taken: deque[dict[str, Any]] = deque()

    def recordings() -> Iterator[tuple[str | bytes, str]]:
        for row in (rows[number] for number in range(start, len(rows))):
            described = {name: value for name, value in row.items() if name not in AUDIO_COLUMNS}
            taken.append({**described, "audio_path": _relative(row["audio_path"], root)})
            yield source_of(row), taken[-1]["audio_path"]

    for made in map_in_order(partial(_pack, storage=storage), recordings(), workers):
        yield taken.popleft(), made


def _pack(recording: tuple[str | bytes, str], storage: str) -> Packed:
    return pack(*recording, storage)


def _relative(path: str, root: str | None) -> str:
    return Path(os.path.relpath(path, root)).as_posix() if root is not None and os.path.isabs(path) else path


def _types(rows: datasets.Dataset, storage: str) -> datasets.Features:
    return datasets.Features({**without_audio(rows).features, **audio_features(storage)})


# ---- the folder ----


def _check(request: Request) -> None:
    for what, value, valid in (
        ("storage", request.storage, tuple(STORAGES)),
        ("on_bad_audio", request.on_bad_audio, ON_BAD_AUDIO),
    ):
        if value not in valid:
            raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(valid)}")
    if request.shard_bytes < 1:
        raise ValueError(f"shard_bytes is {request.shard_bytes}; give at least 1")


def _plan(request: Request, splits: Mapping[str, datasets.Dataset], root: str | None) -> str:
    """A hash of all that the bytes of a set depend on: the request, the rows and the state of their files."""
    digest = hashlib.sha256(json.dumps([FORMAT, asdict(request), versions()], default=str).encode())
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
        note.write_text(plan, encoding="utf-8")
    return False


def _require_usable(split: str, records: Sequence[Mapping[str, Any]]) -> None:
    if records and not any(record["rows"] for record in records):
        notes = [note for record in records for note in record["notes"]]
        raise ValueError(
            f"none of the {len(notes)} recordings of {split!r} can be used; the first: {notes[0]['reason']}"
        )


def _finish(
    request: Request,
    builder: Any,
    splits: Mapping[str, datasets.Dataset],
    records: _Records,
    root: str | None,
    folder: Path,
) -> dict[str, Any]:
    """Puts shards, card and manifest in their places; the manifest comes last, as the sign that all is there."""
    notes = {split: [note for record in of_split for note in record["notes"]] for split, of_split in records.items()}
    asked = {name: value for name, value in asdict(request).items() if name != "on_bad_audio"}
    asked["dataset"] = getattr(builder, "origin", request.dataset)
    types = _types(next(iter(splits.values())), request.storage)
    report = builder.report() if hasattr(builder, "report") else {}
    manifest = make_manifest(asked, types, notes, _publish(folder, records), report, folder)
    if request.storage == "reference":
        example = next(note["audio_path"] for of_split in notes.values() for note in of_split if "reason" not in note)
        manifest["audio_root"] = root_entry(root, folder, example)
    write_card(folder / "README.md", manifest)
    write_json(folder / MANIFEST, manifest, one_writer=True)
    return manifest


def _publish(folder: Path, records: _Records) -> dict[str, list[dict[str, Any]]]:
    """Moves the shards to their place under the name that tells how many there are."""
    (folder / "data").mkdir(exist_ok=True)
    shards: dict[str, list[dict[str, Any]]] = {}
    for split, of_split in records.items():
        shards[split] = []
        for number, record in enumerate(of_split):
            name = f"data/{split}-{number:05d}-of-{len(of_split):05d}.parquet"
            if (folder / _WORK / record["file"]).is_file():  # a run killed here has moved some already
                os.replace(folder / _WORK / record["file"], folder / name)
            kept = ("rows", "bytes", "payload_bytes", "sha256")
            shards[split].append({"file": name, **{key: record[key] for key in kept}})
    return shards


# ---- the command line ----


def push(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Uploads a prepared set as a dataset repository, in one commit.

    Args:
        folder: The prepared set.
        repo_id: "user/name"; made if it does not exist.
        private: Makes a new repository private.

    Returns:
        Its address.

    Raises:
        ValueError: The set does not hold its audio.
    """
    from huggingface_hub import HfApi

    if read_manifest(folder)["storage"] == "reference":
        raise ValueError("a set of storage 'reference' holds no audio to push; prepare it with another storage")
    api = HfApi()
    address = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
    ours = ["data/*.parquet", "README.md", MANIFEST]
    api.upload_folder(
        folder_path=folder, repo_id=repo_id, repo_type="dataset", allow_patterns=ours, delete_patterns=ours[:1],
        commit_message="Upload a prepared set",
    )  # fmt: skip
    return str(address)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `builder_options` holds those of the builder that were given."""
    parser = argparse.ArgumentParser(
        prog="prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("dataset", metavar="DATASET", type=_dataset, help=f"one of {', '.join(builder_names())}")
    parser.add_argument("--out", required=True, help="the folder to write")
    storages = "; ".join(f"{name}, {storage.meaning}" for name, storage in STORAGES.items())
    parser.add_argument("--storage", choices=STORAGES, default="original", help=f"how to keep the audio: {storages}")
    parser.add_argument("--workers", type=_positive, default=min(8, os.cpu_count() or 1), help="processes that read")
    parser.add_argument("--shard_size", type=_size, default="500MB", help="of a Parquet file at most (default: 500MB)")
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
    named = _named(argv)
    fields = [] if named is None else add_builder_options(parser, find_builder(named).BUILDER_CONFIG_CLASS)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        words = [word.split("=")[0] for word in unknown]
        close = [found for word in words for found in difflib.get_close_matches(word, options, n=1)]
        hint = f" (did you mean {', '.join(close)}?)" if close else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}; {named} --help lists the options")
    arguments.builder_options = {name: getattr(arguments, name) for name in fields if hasattr(arguments, name)}
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Prepares, shows a summary, uploads; what is wrong with the data or the arguments ends in one line."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    request = Request(
        arguments.dataset, arguments.builder_options, arguments.storage, arguments.shard_size, arguments.on_bad_audio
    )
    try:
        manifest = prepare(
            request, arguments.out, arguments.workers, arguments.overwrite, arguments.cache_dir, arguments.quiet
        )
        print(summary_table(manifest))
        print(f"prepared in {arguments.out}")
        if arguments.push_to_hub:
            print(f"uploaded to {push(arguments.out, arguments.push_to_hub, arguments.private)}")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"prepare.py: error: {_innermost(error)}", file=sys.stderr)
        return 1
    return 0


def _innermost(error: BaseException) -> BaseException:
    """What a builder raised, without the `DatasetGenerationError` that `datasets` wraps it in."""
    wrapped = isinstance(error, datasets.exceptions.DatasetsError) and error.__cause__ is not None
    return _innermost(error.__cause__) if wrapped and error.__cause__ else error


def _named(argv: Sequence[str]) -> str | None:
    """The builder among the words, wherever it stands, and not the value of an option before it."""
    flags = ("--private", "--overwrite", "--quiet")
    for before, word in zip(("", *argv), argv, strict=False):
        if word in builder_names() and (not before.startswith("--") or "=" in before or before in flags):
            return word
    return None


def _dataset(text: str) -> str:
    try:
        find_builder(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _size(text: str) -> int:
    """Bytes from a text such as "500MB".

    >>> _size("1.5GB")
    1500000000
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    if parts is None or float(parts[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 500MB")
    return round(float(parts[1]) * 1000 ** " KMG".index(parts[2].upper() or " "))


if __name__ == "__main__":
    sys.exit(main())
