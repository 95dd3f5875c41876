"""Looks for recordings that two prepared sets share: the same source, or the same sound under another name.

    supclap overlap prepared/wavcaps prepared/audiocaps --json overlap.json
    supclap overlap prepared/esc50:train prepared/esc50:test

Training on what one evaluates on is the commonest way to a number that is too good. Clips are compared by `source` and
by audio fingerprint (`fingerprint.py`), which finds copies that were encoded anew, resampled, cut to a part or
amplified, but not ones that were stretched, transposed or mixed with other sounds of the same loudness. A source that
is only the name of a file, as those of `audio_folder` without a column `source`, says nothing of another set.

Measured on 320 recordings of ESC-10: copies as MP3, Vorbis, at 16 kHz, at a quarter of the level or with noise 20 dB
below are found in 319 or 320 of 320 cases, parts of 3 s in 303; the loudest moment of each of the other 17 is 28 dB
or more below the recording's. Three pairs of different sources pass the threshold of 6, and all three are copies, as
their names on Freesound say; unrelated ones reach 3.8.

Exit status: 0; 1 with --fail_on_overlap when something is shared; 2 when a set cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.atomic_files import write_json
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError, read_row
from modeling_supclap.datasets_scripts.bad_audio import map_in_order
from modeling_supclap.datasets_scripts.overlap.fingerprint import (
    RATE_HZ,
    THRESHOLD,
    Fingerprint,
    FingerprintIndex,
    fingerprint,
)
from modeling_supclap.datasets_scripts.progress import progress
from modeling_supclap.datasets_scripts.schema import AUDIO_COLUMNS, FILE_SOURCE, without_audio

_NEEDED = ("clip_id", "audio_path", *AUDIO_COLUMNS)
# Pairs of either kind in the table; the report has all.
_MOST_SHOWN = 20


class Clip(NamedTuple):
    """A clip of a set: its split, its id and the recording that it was cut from."""

    split: str
    clip_id: str
    source: str


def compare(
    first: str, second: str, workers: int = 1, cache_dir: str | None = None, quiet: bool = True
) -> dict[str, Any]:
    """Compares two prepared sets.

    Args:
        first: The folder or Hub id of a set, for one of its splits followed by `:split`.
        second: Another one; of the same set, another split.
        workers: The number of processes that compute fingerprints.
        cache_dir: Where `datasets` keeps the rows; its own default when None.
        quiet: Shows no progress bars.

    Returns:
        Plain JSON. "shared_sources": for each, the clips of both. "copies": pairs of clips with their score, bit error
        rate, offset and overlap, and whether they have the same source. "not_compared": clips too short or unreadable.

    Raises:
        FileNotFoundError: A set is missing.
        ValueError: A split is unknown, or both are the same.
    """
    if first == second:
        raise ValueError(f"both sets are {first}; to compare the splits of one, write {first}:train {first}:test")

    clips: list[list[Clip]] = []
    prints: list[list[Fingerprint | None]] = []
    loaded = [(name, _load(name, cache_dir)) for name in (first, second)]
    for name, splits in loaded:
        clips.append([])
        prints.append([])
        for split, rows in splits.items():
            named = without_audio(rows)
            clips[-1] += map(Clip, [split] * len(rows), named["clip_id"], named["source"])
            needed = rows.select_columns(list(filter(_NEEDED.__contains__, rows.column_names)))
            computed = map_in_order(_fingerprint, needed, workers)
            prints[-1] += progress(computed, f"{name} {split}", len(rows), "clips", quiet)

    not_compared: list[list[dict[str, str]]] = [[], []]
    for side in (0, 1):
        for clip, found in zip(clips[side], prints[side], strict=True):
            if found is None:
                not_compared[side].append(clip._asdict())

    return {
        "sets": [{"name": first, "clips": len(clips[0])}, {"name": second, "clips": len(clips[1])}],
        "threshold": THRESHOLD,
        "shared_sources": _shared_sources(*clips),
        "copies": _copies(clips, prints, quiet),
        "not_compared": not_compared,
    }


def overlap_table(report: Mapping[str, Any]) -> str:
    """A report for a terminal: the counts, and the first pairs of either kind."""
    first, second = report["sets"]
    sources, copies = report["shared_sources"], report["copies"]
    lines = [
        f"{first['name']} ({first['clips']} clips) and {second['name']} ({second['clips']} clips)",
        f"shared sources: {len(sources)}",
        f"copies by sound: {len(copies)}",
    ]
    short = list(map(len, report["not_compared"]))
    if any(short):
        lines.append(f"not compared by sound, too short or unreadable: {short[0]} and {short[1]}")

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
        lines.append(f"... and {hidden} more; --json FILE writes all")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares two sets, prints and writes what they share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", metavar="A[:split]", help="a prepared set, folder or Hub id; all splits by default")
    parser.add_argument("second", metavar="B[:split]", help="another")
    parser.add_argument("--json", metavar="FILE", help="write the whole report here")
    parser.add_argument("--fail_on_overlap", action="store_true", help="exit with 1 when something is shared")
    parser.add_argument("--workers", type=int, default=1, help="processes that compute fingerprints")
    parser.add_argument("--cache_dir", help="where `datasets` keeps the rows")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
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
    """The splits of a set, or the one that is named after a colon."""
    folder, colon, split = name.rpartition(":")
    if not colon or Path(name).is_dir() or "/" in split or "\\" in split:
        return load_splits("prepared", cache_dir, data_dir=name)

    splits = load_splits("prepared", cache_dir, data_dir=folder)
    if split not in splits:
        raise ValueError(f"{folder} has no split {split!r}; its splits are {', '.join(splits)}")
    return {split: splits[split]}


def _fingerprint(row: Mapping[str, Any]) -> Fingerprint | None:
    try:
        return fingerprint(read_row(row, RATE_HZ))
    except MissingDecoderError:
        raise
    except (BadAudioError, FileNotFoundError):
        return None


def _shared_sources(first: Sequence[Clip], second: Sequence[Clip]) -> dict[str, list[list[dict[str, str]]]]:
    """The clips of both sets by the source that they share."""
    found: dict[str, list[list[dict[str, str]]]] = defaultdict(lambda: [[], []])
    for side, clips in enumerate((first, second)):
        for clip in clips:
            if not clip.source.startswith(FILE_SOURCE):
                found[clip.source][side].append(clip._asdict())
    return {source: found[source] for source in sorted(found) if all(found[source])}


def _copies(
    clips: Sequence[Sequence[Clip]], prints: Sequence[Sequence[Fingerprint | None]], quiet: bool
) -> list[dict[str, Any]]:
    """Pairs of clips that share sound, the surest first."""
    index = FingerprintIndex(prints[0])
    found = []
    for query, clip in zip(progress(prints[1], "comparing", len(prints[1]), "clips", quiet), clips[1], strict=True):
        for match in [] if query is None else index.search(query):
            other = clips[0][match.clip]
            found.append(
                {
                    "first": other._asdict(),
                    "second": clip._asdict(),
                    "same_source": other.source == clip.source,
                    "score": round(match.score, 4),
                    "bit_error_rate": round(match.bit_error_rate, 4),
                    "offset_seconds": round(match.offset_seconds, 4),
                    "overlap_seconds": round(match.overlap_seconds, 4),
                }
            )
    return sorted(found, key=lambda pair: (-pair["score"], pair["first"]["clip_id"], pair["second"]["clip_id"]))


def _names(clips: Sequence[Mapping[str, str]]) -> str:
    shown = [f"{clip['split']}/{clip['clip_id']}" for clip in clips[:3]]
    if len(clips) > 3:
        shown.append(f"and {len(clips) - 3} more")
    return ", ".join(shown)


if __name__ == "__main__":
    sys.exit(main())
