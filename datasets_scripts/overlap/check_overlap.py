"""Find copies of recordings within a folder, or recordings that two prepared sets share under two names or sources.

    supclap overlap my_sounds --csv copies.csv
    supclap overlap prepared/wavcaps prepared/audiocaps --json overlap.json
    supclap overlap prepared/esc50:train prepared/esc50:test

With one argument, copies within it are found: in a folder of recordings, a search index or a prepared set. Each copy is
named once, with an earlier recording that it equals. Files with the same bytes are found whatever their length.

Training data that overlaps with test data makes scores too high. Clips are compared by `source` and by audio
fingerprint (`fingerprint.py`). Fingerprints find copies that were re-encoded, resampled, cut or amplified. They do not
find copies that were time-stretched, transposed or mixed with other sounds of the same loudness. A source that is only
a file name, as in `audio_folder` without a column `source`, is not compared.

In a test with 320 recordings of ESC-10, at least 319 copies were found after each of these changes: MP3 or Vorbis
coding, resampling to 16 kHz, scaling to a quarter of the level, and added noise at -20 dB. Of copies cut to 3 s, 303
were found. Pairs of unrelated recordings had scores of at most 3.8; the threshold is 6. Recordings of less than half a
second have no fingerprint.

The exit status is 2 if a set cannot be read, 1 if --fail_on_overlap is set and there are copies or shared sources, else
0.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.atomic_files import write_json, write_text
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError, read_row
from modeling_supclap.datasets_scripts.audio_files import list_recordings
from modeling_supclap.datasets_scripts.bad_audio import map_in_order
from modeling_supclap.datasets_scripts.builders.recordings import listing
from modeling_supclap.datasets_scripts.csv_text import to_csv
from modeling_supclap.datasets_scripts.overlap.fingerprint import RATE_HZ, THRESHOLD, FingerprintIndex, fingerprint
from modeling_supclap.datasets_scripts.prepared import MANIFEST
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.schema import (
    AUDIO_COLUMNS,
    CHANNEL,
    FILE_SOURCE,
    SEGMENT_COLUMNS,
    without_audio,
)
from modeling_supclap.datasets_scripts.splits import hash_copies

_NEEDED = ("clip_id", "audio_path", *SEGMENT_COLUMNS, CHANNEL, *AUDIO_COLUMNS)
_FILES = ""  # split of the recordings of a folder
_NO_MATCH = dict.fromkeys(
    ("score", "bit_error_rate", "offset_seconds", "overlap_seconds")
)  # of files with equal bytes
_MOST_SHOWN = 20  # maximum number of shared sources, and of copies, in the printed table
Clip = dict[str, str]  # "split", "clip_id" and "source"


def compare(
    first: str, second: str, workers: int = 1, cache_dir: str | None = None, quiet: bool = True
) -> dict[str, Any]:
    """Find clips that two prepared sets share, by source and by audio fingerprint.

    `first` and `second` are folders or Hub ids. Append `:split` to select one split. The result is a JSON-compatible
    dict with the following entries:

    - "shared_sources": for each shared source, its clips in both sets.
    - "copies": pairs of clips with score, bit error rate, offset, overlap, and whether their sources are equal.
    - "not_compared": for each set, the clips without a fingerprint, because they are too short, silent or unreadable.
    - "sets": name and number of clips of each set.
    - "threshold": minimum score of a copy.

    Raises FileNotFoundError for a missing set, and ValueError for an unknown split or if both sets are the same.
    """
    if first == second:
        raise ValueError(f"both sets are {first}; to compare splits of one set, pass {first}:train {first}:test")

    sets = [_fingerprint_all(name, cache_dir, workers, quiet) for name in (first, second)]
    by_source: dict[str, list[list[Clip]]] = defaultdict(lambda: [[], []])
    for side, of_set in enumerate(sets):
        for clip in of_set.clips:
            if not clip["source"].startswith(FILE_SOURCE):
                by_source[clip["source"]][side].append(clip)
    shared = {source: of_both for source, of_both in sorted(by_source.items()) if all(of_both)}

    copies = [pair for _, _, pair in _search(sets[0], sets[1], quiet)]
    copies.sort(key=lambda pair: (-pair["score"], pair["first"]["clip_id"], pair["second"]["clip_id"]))
    return _report(sets, copies, shared)


def find_copies(name: str, workers: int = 1, cache_dir: str | None = None, quiet: bool = True) -> dict[str, Any]:
    """Find copies within a folder of recordings, a search index, or a prepared set.

    The result has the entries of `compare`, without shared sources. Each copy is the second clip of one pair; the first
    is an earlier clip, in the order of names. "same_file" is whether both have the same bytes; then there is no score.

    Raises FileNotFoundError for a missing set or a folder without recordings, and ValueError for an unknown split.
    """
    of_set = _fingerprint_all(name, cache_dir, workers, quiet)
    copies: dict[int, dict[str, Any]] = {}
    for number, other, pair in _search(of_set, of_set, quiet):
        if other < number:  # the first of these matches is the best
            copies.setdefault(number, {**pair, "same_file": False})
    for number, original in of_set.originals.items():
        pair = {"first": of_set.clips[original], "second": of_set.clips[number]}
        copies[number] = {**pair, "same_file": True, **_NO_MATCH}
    ordered = sorted(copies.values(), key=lambda pair: (pair["first"]["clip_id"], pair["second"]["clip_id"]))
    return _report([of_set], ordered, {})


def _report(
    sets: Sequence[_Fingerprints], copies: Sequence[dict[str, Any]], shared_sources: Mapping[str, Any]
) -> dict[str, Any]:
    not_compared = []
    for of_set in sets:
        numbers = [number for number, each in enumerate(of_set.prints) if each is None]
        not_compared.append([of_set.clips[number] for number in numbers if number not in of_set.originals])
    return {
        "sets": [{"name": of_set.name, "clips": len(of_set.clips)} for of_set in sets],
        "threshold": THRESHOLD,
        "shared_sources": shared_sources,
        "copies": copies,
        "not_compared": not_compared,
    }


def overlap_table(report: Mapping[str, Any]) -> str:
    """Format a report of `compare` or `find_copies` as text: the counts, and the first shared sources and copies."""
    sources, copies = report["shared_sources"], report["copies"]
    lines = [" and ".join(f"{each['name']} ({each['clips']} clips)" for each in report["sets"])]
    if len(report["sets"]) == 2:
        lines.append(f"shared sources: {len(sources)}")
    lines.append(f"copies by sound: {sum(not pair.get('same_file') for pair in copies)}")
    if len(report["sets"]) == 1:
        lines.append(f"copies with the same bytes: {sum(pair['same_file'] for pair in copies)}")
    if any(report["not_compared"]):
        counts = " and ".join(str(len(clips)) for clips in report["not_compared"])
        lines.append(f"without fingerprint, too short, silent or unreadable: {counts}")

    for source, of_both in list(sources.items())[:_MOST_SHOWN]:
        lines.append(f"  {source}: {_names(of_both[0])} | {_names(of_both[1])}")
    if copies:
        lines.append(f"{'score':>7}{'bit errors':>12}{'offset s':>10}{'overlap s':>11}  clips")
    for pair in copies[:_MOST_SHOWN]:
        both = f"{_names([pair['first']])} | {_names([pair['second']])}"
        if pair["score"] is None:
            lines.append(f"{'the same bytes':<40}  {both}")
            continue
        numbers = f"{pair['score']:7.1f}{100 * pair['bit_error_rate']:11.1f}%{pair['offset_seconds']:10.2f}"
        lines.append(f"{numbers}{pair['overlap_seconds']:11.2f}  {both}")

    hidden = max(0, len(sources) - _MOST_SHOWN) + max(0, len(copies) - _MOST_SHOWN)
    if hidden:
        lines.append(f"... and {hidden} more; --json FILE or --csv FILE saves all")
    return "\n".join(lines)


def copies_as_csv(report: Mapping[str, Any]) -> str:
    """Format the copies of a report as CSV, one line each."""
    rows = []
    for pair in report["copies"]:
        names = {"first": _names([pair["first"]]), "second": _names([pair["second"]])}
        rows.append({"same_file": False, **pair, **names})
    return to_csv(rows, ("first", "second", "same_file", *_NO_MATCH))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two sets, print the table and optionally write the report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", metavar="A[:split]", help="Folder of recordings, index, or prepared set.")
    parser.add_argument(
        "second", metavar="B[:split]", nargs="?", help="Set to compare with A (default: find copies within A)."
    )
    parser.add_argument("--csv", metavar="FILE", help="Write all copies to this file.")
    parser.add_argument("--json", metavar="FILE", help="Write the whole report to this file.")
    parser.add_argument("--fail_on_overlap", action="store_true", help="Exit with status 1 if any clip is shared.")
    parser.add_argument("--workers", type=int, default=1, help="Number of processes that compute fingerprints.")
    parser.add_argument("--cache_dir", help="Cache folder of `datasets`.")
    parser.add_argument("--quiet", action="store_true", help="Hide progress bars.")
    arguments = parser.parse_args(argv)

    try:
        options = arguments.workers, arguments.cache_dir, arguments.quiet
        if arguments.second is None:
            report = find_copies(arguments.first, *options)
        else:
            report = compare(arguments.first, arguments.second, *options)
        if arguments.json:
            write_json(arguments.json, report)
        if arguments.csv:
            write_text(arguments.csv, copies_as_csv(report))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2

    print(overlap_table(report))
    return 1 if arguments.fail_on_overlap and (report["shared_sources"] or report["copies"]) else 0


def _load(name: str, cache_dir: str | None) -> dict[str, datasets.Dataset]:
    """Load all splits of a prepared set, or the recordings of a folder or of a search index, as the split `_FILES`.

    If `name` ends with ":" and a split name, load only this split.
    """
    folder, colon, split = name.rpartition(":")
    if Path(name).is_dir() and not Path(name, MANIFEST).is_file():
        return {_FILES: _list_files(_indexed_folder(name) if Path(name, "windows.lance").is_dir() else name)}
    if not colon or Path(name).is_dir() or "/" in split or "\\" in split:
        return load_splits("prepared", cache_dir, data_dir=name)

    splits = load_splits("prepared", cache_dir, data_dir=folder)
    if split not in splits:
        raise ValueError(f"{folder} has no split {split!r}; its splits are {', '.join(splits)}")
    return {split: splits[split]}


def _indexed_folder(index: str) -> str:
    """Return the folder of recordings of a search index."""
    import lancedb

    schema = lancedb.connect(index).open_table("windows").schema
    stored = {**(schema.metadata or {}), **(schema.field("file").metadata or {})}
    return stored[b"folder"].decode()


def _list_files(folder: str) -> datasets.Dataset:
    """List the recordings of a folder as rows."""
    paths = list_recordings(folder)
    if not paths:
        raise FileNotFoundError(f"{folder} is neither a prepared set nor a folder of recordings")
    names = [Path(path).relative_to(Path(folder).resolve()).as_posix() for path in paths]
    sources = [FILE_SOURCE + name for name in names]
    return datasets.Dataset.from_dict({"clip_id": names, "source": sources, "audio_path": paths})


class _Fingerprints(NamedTuple):
    """Clips of all splits of a set, and the fingerprint of each, or None.

    In a folder, later files with equal bytes have none. `originals` is the number of the first one for each of them.
    """

    name: str
    clips: list[Clip]
    prints: list[Any]
    originals: dict[int, int]


def _fingerprint_all(name: str, cache_dir: str | None, workers: int, quiet: bool) -> _Fingerprints:
    of_set = _Fingerprints(name, [], [], {})
    for split, rows in _load(name, cache_dir).items():
        for row in without_audio(rows):
            of_set.clips.append({"split": split, "clip_id": row["clip_id"], "source": row["source"]})
        if split == _FILES:
            first: dict[str, int] = {}
            for number, key in enumerate(hash_copies(rows["audio_path"])):
                if key is not None and first.setdefault(key, number) != number:
                    of_set.originals[number] = first[key]
        needed = rows.select_columns([name for name in rows.column_names if name in _NEEDED])
        needed = needed.select([number for number in range(len(rows)) if number not in of_set.originals])
        computed = map_in_order(_fingerprint, needed, workers)
        of_set.prints.extend(progress(computed, f"{name} {split}".rstrip(), len(needed), "clips", quiet))
    for number in of_set.originals:
        of_set.prints.insert(number, None)
    return of_set


def _fingerprint(row: Mapping[str, Any]) -> Any:
    try:
        return fingerprint(read_row(row, RATE_HZ))
    except MissingDecoderError:
        raise
    except (BadAudioError, FileNotFoundError):
        return None


def _search(first: _Fingerprints, second: _Fingerprints, quiet: bool) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the matches of each clip in `second`, best first: its number, that of the other clip, and the pair."""
    index = FingerprintIndex(first.prints)
    for number, query in enumerate(progress(second.prints, "comparing", len(second.prints), "clips", quiet)):
        for match in index.search(query) if query is not None else ():
            other, clip = first.clips[match.clip], second.clips[number]
            pair = {"first": other, "second": clip, "same_source": other["source"] == clip["source"]}
            numbers = {name: round(value, 4) for name, value in match._asdict().items() if name != "clip"}
            yield number, match.clip, pair | numbers


def _names(clips: Sequence[Clip]) -> str:
    return listing([f"{clip['split']}/{clip['clip_id']}".lstrip("/") for clip in clips], 3)


if __name__ == "__main__":
    sys.exit(main())
