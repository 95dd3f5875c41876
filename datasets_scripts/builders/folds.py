"""Base classes for datasets with folds and one class per clip, such as ESC-50."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, NamedTuple

import numpy as np

from ..schema import Event
from .captions import label_phrases, render_captions
from .folder import Clip, Collection, FolderConfig, RowBuilder
from .metadata import Line
from .recordings import duration_seconds, stem_of


class FoldClip(NamedTuple):
    """A clip of a dataset in folds.

    Attributes:
        file_name: Name of the audio file; its stem is the clip id.
        fold: Number of the fold.
        label: Class.
        freesound_id: Freesound id of the source recording.
        license: Licence of the audio.
        seconds: Length in seconds; None if the table does not contain it.
        left_out: Reason for leaving the clip out; empty for clips that get a row.
    """

    file_name: str
    fold: int
    label: str
    freesound_id: str
    license: str
    seconds: float | None = None
    left_out: str = ""


@dataclass
class FoldConfig(FolderConfig):
    """Location and splits of a dataset with folds; see also `FolderConfig`.

    Attributes:
        test_fold: Fold of the test split, from 1. The published protocol averages over all folds as test fold.
        validation_fraction: Fraction of the remaining recordings of each class for validation; 0 creates no
            validation split.
        seed: Seed for drawing validation recordings.
    """

    ENGLISH_ONLY = False
    PHRASES: ClassVar[str] = ""
    """Dataset name for `captions.label_phrases`."""

    test_fold: int = 1
    validation_fraction: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; expected at least 0 and less than 1")


class FoldBuilder(RowBuilder):
    """Rows with captions from class names and one event as long as the clip; no two splits share a recording."""

    BUILDER_CONFIG_CLASS = FoldConfig

    def read(self) -> list[FoldClip]:
        """Read the clips of the table, in its order."""
        raise NotImplementedError

    def collect(self) -> Collection:
        """Collect the clips of the table, split by fold and recording."""
        collection, config = Collection(), self.config
        clips = self.read()

        phrases = label_phrases(config.PHRASES)
        unknown = sorted(set(map(attrgetter("label"), clips)) - phrases.keys())
        if unknown:
            raise ValueError(f"unknown classes {unknown}; the classes of {config.DATASET} are {', '.join(phrases)}")

        splits = split_by_fold(clips, config.test_fold, config.validation_fraction, config.seed)
        unplaced = set(clips).difference(*splits.values())
        for clip in clips:
            if clip in unplaced:
                collection.leave_out("source in another split", stem_of(clip.file_name))

        for split, members in splits.items():
            for clip in members:
                clip_id = stem_of(clip.file_name)
                if clip.left_out:
                    collection.leave_out(clip.left_out, clip_id)
                    continue

                path = config.recordings.named([clip_id])
                seconds = duration_seconds(path) if clip.seconds is None and path is not None else clip.seconds
                events: list[Event] = []
                if seconds:
                    events.append({"label": clip.label, "onset_seconds": 0.0, "offset_seconds": seconds})
                captions = render_captions(phrases[clip.label], config.languages)
                row = Clip(clip_id, captions, f"freesound:{clip.freesound_id}", clip.license, [clip.label], events)
                collection.add(split, row, clip.file_name, path)
        return collection


def read_fold(line: Line) -> int:
    """Return the fold of a line; raise a ValueError with the line number if it is not a number."""
    text = line.values["fold"].strip()
    if not text.isdecimal():
        raise ValueError(f"{line.where}: fold is {text!r}; expected a number")
    return int(text)


def split_by_fold(
    clips: Sequence[FoldClip], test_fold: int, validation_fraction: float, seed: int
) -> dict[str, list[FoldClip]]:
    """Split clips by fold, then by recording; for the arguments see `FoldConfig`.

    In each class, a fraction of the other folds' recordings becomes validation: rounded, at least one, but never all of
    them. No recording is in two splits: clips of other folds that share a recording with the test fold are left out.
    The published folds share none, but modified copies of a dataset may.

    Returns:
        Clips by split, in their given order.

    Raises:
        ValueError: The test fold has no clips.
    """
    folds = sorted(set(map(attrgetter("fold"), clips)))
    if test_fold not in folds:
        raise ValueError(
            f"fold {test_fold!r} has no clips; folds with clips: {folds}; set test_fold={folds[0] if folds else 1} "
            "(in the evaluation recipe: --folds)"
        )

    tested = {clip.freesound_id for clip in clips if clip.fold == test_fold}
    rest = [clip for clip in clips if clip.freesound_id not in tested]
    held_out = _draw_validation(rest, validation_fraction, seed)

    splits: dict[str, list[FoldClip]] = {"train": [], "validation": [], "test": []}
    for clip in clips:
        if clip.fold == test_fold:
            splits["test"].append(clip)
        elif clip.freesound_id not in tested:
            splits["validation" if clip.freesound_id in held_out else "train"].append(clip)
    return splits


def _draw_validation(clips: Sequence[FoldClip], fraction: float, seed: int) -> set[str]:
    """Draw recordings class by class; a recording with clips of several classes counts for the first one."""
    if fraction == 0:
        return set()

    label_of: dict[str, str] = {}
    for clip in clips:
        label_of.setdefault(clip.freesound_id, clip.label)
    recordings_of: dict[str, list[str]] = {}
    for recording, label in sorted(label_of.items()):
        recordings_of.setdefault(label, []).append(recording)

    rng = np.random.default_rng(seed)
    held_out: set[str] = set()
    for _, recordings in sorted(recordings_of.items()):
        count = min(max(1, round(fraction * len(recordings))), len(recordings) - 1)
        held_out.update(rng.permutation(recordings)[:count].tolist())
    return held_out
