"""Recordings that cannot be used, found before they are needed: a training run must not stop in the middle of a night.

They are looked for once, ahead of the run, and their rows leave the split. Another clip in the place of a bad one, as
batches are made, would count twice, and evaluation, which ranks every clip once, could not do it at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .atomic_files import write_json
from .audio import BadAudioError
from .parallel import map_in_order
from .storage import pack, source_of

ON_BAD_AUDIO = ("error", "skip", "report")
"""What to do with recordings that cannot be used: stop at the first; leave them out; also name each."""

logger = logging.getLogger(__name__)


class BadClip(NamedTuple):
    """A row whose recording cannot be used; `place` is that of the row."""

    place: int
    clip_id: str
    reason: str


def find_bad_audio(rows: Sequence[Any], workers: int = 1) -> list[BadClip]:
    """Reads every recording from end to end.

    Args:
        rows: Rows of the schema. Those stored as samples were checked when they were prepared, and are passed over.
        workers: Processes that read.

    Returns:
        The clips that cannot be used: missing, corrupt, truncated, empty or silent. The same for any number of workers.

    Raises:
        MissingDecoderError: FFmpeg is needed and missing, which is no fault of the recordings.
    """
    if _are_samples(rows):
        return []
    problems = _problems_of(rows, range(len(rows)), workers)
    return [BadClip(place, rows[place]["clip_id"], problem) for place, problem in problems.items() if problem]


def usable_rows(rows: Any, on_bad_audio: str, workers: int = 1, memo: str | Path | None = None) -> Any:
    """The rows whose recordings can be used, in their order.

    Args:
        rows: Rows of the schema, a `datasets.Dataset` or a list.
        on_bad_audio: "error" gives all rows back unread, since reading one raises; "skip" leaves bad ones out and says
            how many; "report" also names each of them in the log.
        workers: Processes that read.
        memo: A JSON file of what was found, so that the next process or run need not look again, but for files that
            have changed.

    Returns:
        The same rows, or fewer.

    Raises:
        BadAudioError: No row is left.
        ValueError: `on_bad_audio` is none of the three.
    """
    if on_bad_audio not in ON_BAD_AUDIO:
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; it must be one of {', '.join(ON_BAD_AUDIO)}")
    if on_bad_audio == "error" or _are_samples(rows):
        return rows
    bad = find_bad_audio(rows, workers) if memo is None else _remembered(rows, workers, Path(memo))
    if not bad:
        return rows
    if len(bad) == len(rows):
        raise BadAudioError(f"none of {len(rows)} recordings can be used; the first: {bad[0].reason}")
    logger.warning("left out %d of %d clips whose recordings cannot be used", len(bad), len(rows))
    for clip in bad if on_bad_audio == "report" else ():
        logger.warning("clip %r: %s", clip.clip_id, clip.reason)
    left_out = {clip.place for clip in bad}
    kept = [index for index in range(len(rows)) if index not in left_out]
    return rows.select(kept) if hasattr(rows, "select") else [rows[index] for index in kept]


def _are_samples(rows: Any) -> bool:
    return len(rows) > 0 and rows[0].get("samples") is not None


def _problems_of(rows: Any, places: Sequence[int], workers: int) -> dict[int, str | None]:
    """What is wrong with the recordings of the rows in these places, if anything."""
    recordings = ((source_of(row), row["audio_path"]) for row in (rows[place] for place in places))
    return dict(zip(places, map_in_order(_problem, recordings, workers), strict=True))


def _problem(recording: tuple[str | bytes, str]) -> str | None:
    return pack(*recording, "reference").problem


def _remembered(rows: Any, workers: int, memo: Path) -> list[BadClip]:
    """As `find_bad_audio`, but reads only the recordings that the memo does not know in their present state."""
    known: dict[str, str | None] = json.loads(memo.read_text(encoding="utf-8")) if memo.is_file() else {}
    states = [_state(row) for row in rows]
    new = [place for place, state in enumerate(states) if state not in known]
    if new:
        known |= {states[place]: problem for place, problem in _problems_of(rows, new, workers).items()}
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_json(memo, known)
    problems = [(place, known[state]) for place, state in enumerate(states)]
    return [BadClip(place, rows[place]["clip_id"], problem) for place, problem in problems if problem]


def _state(row: Mapping[str, Any]) -> str:
    """A hash of which recording a row has, and of the state of its file."""
    digest = hashlib.blake2b(f"{row['clip_id']}\0{row['audio_path']}".encode(), digest_size=12)
    source = source_of(row)
    if isinstance(source, bytes):
        digest.update(source)
    elif os.path.exists(source):
        state = os.stat(source)
        digest.update(f"{state.st_size}:{state.st_mtime_ns}".encode())
    return digest.hexdigest()
