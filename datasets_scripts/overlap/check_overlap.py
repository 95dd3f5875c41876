"""Find recordings that two prepared sets share: with the same source id, or with the same sound under two names.

    supclap overlap prepared/wavcaps prepared/audiocaps --json overlap.json
    supclap overlap prepared/esc50:train prepared/esc50:test

Training data that overlaps with test data makes scores too high. Clips are compared by `source` and by audio
fingerprint (`fingerprint.py`). Fingerprints find copies that were re-encoded, resampled, cut or amplified. They do not
find copies that were time-stretched, transposed or mixed with other sounds of the same loudness. A source that is only
a file name, as in `audio_folder` without a column `source`, is not compared.

In a test with 320 recordings of ESC-10, at least 319 copies were found after each of these changes: MP3 or Vorbis
coding, resampling to 16 kHz, scaling to a quarter of the level, and added noise at -20 dB. Of copies cut to 3 s, 303
were found. Pairs of unrelated recordings had scores of at most 3.8; the threshold is 6.

The exit status is 2 if a set cannot be read, 1 if --fail_on_overlap is set and the sets share recordings, else 0.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.atomic_files import write_json
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError, read_row
from modeling_supclap.datasets_scripts.bad_audio import map_in_order
from modeling_supclap.datasets_scripts.builders.recordings import listing
from modeling_supclap.datasets_scripts.overlap.fingerprint import RATE_HZ, THRESHOLD, FingerprintIndex, fingerprint
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.schema import (
    AUDIO_COLUMNS,
    CHANNEL,
    FILE_SOURCE,
    SEGMENT_COLUMNS,
    without_audio,
)

_NEEDED = ("clip_id", "audio_path", *SEGMENT_COLUMNS, CHANNEL, *AUDIO_COLUMNS)
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

    clips: list[list[Clip]] = [[], []]
    prints: list[list[Any]] = [[], []]  # fingerprint of each clip, or None
    loaded = _load(first, cache_dir), _load(second, cache_dir)
    for side, name in enumerate((first, second)):
        for split, rows in loaded[side].items():
            named = without_audio(rows)
            for clip_id, source in zip(named["clip_id"], named["source"], strict=True):
                clips[side].append({"split": split, "clip_id": clip_id, "source": source})
            needed = rows.select_columns([name for name in rows.column_names if name in _NEEDED])
            computed = map_in_order(_fingerprint, needed, workers)
            prints[side] += progress(computed, f"{name} {split}", len(rows), "clips", quiet)

    not_compared: list[list[Clip]] = [[], []]
    by_source: dict[str, list[list[Clip]]] = defaultdict(lambda: [[], []])
    for side in (0, 1):
        for clip, computed_print in zip(clips[side], prints[side], strict=True):
            if computed_print is None:
                not_compared[side].append(clip)
            if not clip["source"].startswith(FILE_SOURCE):
                by_source[clip["source"]][side].append(clip)

    shared = {}
    for source in sorted(by_source):
        if all(by_source[source]):
            shared[source] = by_source[source]
    return {
        "sets": [{"name": first, "clips": len(clips[0])}, {"name": second, "clips": len(clips[1])}],
        "threshold": THRESHOLD,
        "shared_sources": shared,
        "copies": _copies(clips, prints, quiet),
        "not_compared": not_compared,
    }


def overlap_table(report: Mapping[str, Any]) -> str:
    """Format a report of `compare` as text: the counts, and the first shared sources and copies."""
    first, second = report["sets"]
    sources, copies = report["shared_sources"], report["copies"]
    lines = [
        f"{first['name']} ({first['clips']} clips) and {second['name']} ({second['clips']} clips)",
        f"shared sources: {len(sources)}",
        f"copies by sound: {len(copies)}",
    ]
    if any(report["not_compared"]):
        counts = map(len, report["not_compared"])
        lines.append("without fingerprint, too short, silent or unreadable: {} and {}".format(*counts))

    for source, of_both in list(sources.items())[:_MOST_SHOWN]:
        lines.append(f"  {source}: {_names(of_both[0])} | {_names(of_both[1])}")
    if copies:
        lines.append(f"{'score':>7}{'bit errors':>12}{'offset s':>10}{'overlap s':>11}  clips")
    for pair in copies[:_MOST_SHOWN]:
        numbers = f"{pair['score']:7.1f}{100 * pair['bit_error_rate']:11.1f}%{pair['offset_seconds']:10.2f}"
        both = f"{_names([pair['first']])} | {_names([pair['second']])}"
        lines.append(f"{numbers}{pair['overlap_seconds']:11.2f}  {both}")

    hidden = max(0, len(sources) - _MOST_SHOWN) + max(0, len(copies) - _MOST_SHOWN)
    if hidden:
        lines.append(f"... and {hidden} more; --json FILE saves all")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two sets, print the table and optionally write the report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", metavar="A[:split]", help="Folder or Hub id of a prepared set; default: all splits.")
    parser.add_argument("second", metavar="B[:split]", help="Prepared set to compare with A, or another split of A.")
    parser.add_argument("--json", metavar="FILE", help="Write the whole report to this file.")
    parser.add_argument("--fail_on_overlap", action="store_true", help="Exit with status 1 if any clip is shared.")
    parser.add_argument("--workers", type=int, default=1, help="Number of processes that compute fingerprints.")
    parser.add_argument("--cache_dir", help="Cache folder of `datasets`.")
    parser.add_argument("--quiet", action="store_true", help="Hide progress bars.")
    arguments = parser.parse_args(argv)

    try:
        report = compare(arguments.first, arguments.second, arguments.workers, arguments.cache_dir, arguments.quiet)
        if arguments.json:
            write_json(arguments.json, report)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2

    print(overlap_table(report))
    return 1 if arguments.fail_on_overlap and (report["shared_sources"] or report["copies"]) else 0


def _load(name: str, cache_dir: str | None) -> dict[str, datasets.Dataset]:
    """Load all splits of a prepared set. If `name` ends with ":" and a split name, load only this split."""
    folder, colon, split = name.rpartition(":")
    if not colon or Path(name).is_dir() or "/" in split or "\\" in split:
        return load_splits("prepared", cache_dir, data_dir=name)

    splits = load_splits("prepared", cache_dir, data_dir=folder)
    if split not in splits:
        raise ValueError(f"{folder} has no split {split!r}; its splits are {', '.join(splits)}")
    return {split: splits[split]}


def _fingerprint(row: Mapping[str, Any]) -> Any:
    try:
        return fingerprint(read_row(row, RATE_HZ))
    except MissingDecoderError:
        raise
    except (BadAudioError, FileNotFoundError):
        return None


def _copies(clips: list[list[Clip]], prints: list[list[Any]], quiet: bool) -> list[dict[str, Any]]:
    """Return pairs of clips with matching fingerprints, highest score first."""
    index = FingerprintIndex(prints[0])
    pairs = []
    for query, clip in zip(progress(prints[1], "comparing", len(prints[1]), "clips", quiet), clips[1], strict=True):
        for match in [] if query is None else index.search(query):
            other = clips[0][match.clip]
            same_source = other["source"] == clip["source"]
            pair = {"first": other, "second": clip, "same_source": same_source}
            for name, value in match._asdict().items():
                if name != "clip":
                    pair[name] = round(value, 4)
            pairs.append(pair)
    return sorted(pairs, key=lambda pair: (-pair["score"], pair["first"]["clip_id"], pair["second"]["clip_id"]))


def _names(clips: Sequence[Clip]) -> str:
    return listing([f"{clip['split']}/{clip['clip_id']}" for clip in clips], 3)


if __name__ == "__main__":
    sys.exit(main())
