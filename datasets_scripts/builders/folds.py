"""Datasets in folds with one class a clip, such as ESC-50: the fold that is tested on, and captions of the classes."""

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
        file_name: The name of its file, whose stem is its id.
        fold: The fold that it is in.
        label: Its class.
        freesound_id: The recording on Freesound that it was cut from.
        license: The licence of its audio.
        seconds: Its length; None where only the audio says it.
        left_out: The reason why it gets no row; empty for a clip that does.
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
    """What to read and how to split it; see also `FolderConfig`.

    Attributes:
        test_fold: The fold that is the test split, from 1. The published protocol is the mean over all folds, each
            tested on once; the default is the first.
        validation_fraction: The part of the remaining recordings of each class that is the validation split; 0 gives
            no validation split.
        seed: The seed of the draw of validation recordings.
    """

    ENGLISH_ONLY = False
    PHRASES: ClassVar[str] = ""
    """The name of the phrases of its classes, as `captions.label_phrases` knows them."""

    test_fold: int = 1
    validation_fraction: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; give at least 0 and less than 1")


class FoldBuilder(RowBuilder):
    """Rows with captions made of the classes and an event as long as the clip; no two splits share a recording."""

    BUILDER_CONFIG_CLASS = FoldConfig

    def read(self) -> list[FoldClip]:
        """The clips of the table, in its order."""
        raise NotImplementedError

    def collect(self) -> Collection:
        """The clips of the table by fold and recording."""
        collection, config = Collection(), self.config
        clips = self.read()

        phrases = label_phrases(config.PHRASES)
        unknown = sorted(set(map(attrgetter("label"), clips)) - phrases.keys())
        if unknown:
            raise ValueError(f"the classes {unknown} are none of {config.DATASET}'s: {', '.join(phrases)}")

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
    """The fold of a line; a ValueError that names the line where it is not a number."""
    text = line.values["fold"].strip()
    if not text.isdecimal():
        raise ValueError(f"{line.where}: fold is {text!r}; give a number")
    return int(text)


def split_by_fold(
    clips: Sequence[FoldClip], test_fold: int, validation_fraction: float, seed: int
) -> dict[str, list[FoldClip]]:
    """Splits by fold, then by recording; arguments as of `FoldConfig`.

    Of each class a fraction of the other folds' recordings becomes validation: rounded, but at least one, and never a
    class's last one. No recording is in two splits: the folds promise to share none, and where a changed copy breaks
    that, clips of other folds that share a recording with the test fold are left out.

    Returns:
        Clips by split, in their given order.

    Raises:
        ValueError: The test fold has no clips.
    """
    folds = sorted(set(map(attrgetter("fold"), clips)))
    if test_fold not in folds:
        raise ValueError(
            f"fold {test_fold!r} has no clips; the folds with clips are {folds}: test_fold={folds[0] if folds else 1} "
            "chooses one (in the evaluation recipe, --folds)"
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
    """Draws recordings class by class; one with clips of several classes counts for its first."""
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
