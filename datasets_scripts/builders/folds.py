"""Base classes of the builders for datasets with folds and one label per clip, such as ESC-50."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..schema import Event
from .captions import label_phrases, render_captions
from .folder import Clip, Collection, FolderConfig, RowBuilder
from .recordings import duration_seconds, stem_of


class FoldClip(NamedTuple):
    """Clip of a dataset with folds; the clip id is the file name without suffix."""

    file_name: str
    fold: int
    label: str
    freesound_id: str
    license: str
    seconds: float | None = None  # None if the table does not contain the length


@dataclass
class FoldConfig(FolderConfig):
    """Location and splits of a dataset with folds, in addition to `FolderConfig`.

    Attributes:
        test_fold: Number of the fold to use as the test split; the first is 1. Published results are averages over all
            folds.
        test_fraction: Fraction of the recordings of each class to use as the test split, instead of a fold. TeminAL
            (B.5) splits ESC-50 by 0.7: 0.3 for the test, and a `validation_fraction` of 0.
        validation_fraction: Fraction of the recordings of each class outside the test split to use for validation. 0:
            no validation split.
        seed: Random seed for sampling the validation recordings, and those of `test_fraction`.
    """

    ENGLISH_ONLY = False
    PHRASES: ClassVar[str] = ""
    """Dataset name for `captions.label_phrases`."""

    test_fold: int = 1
    test_fraction: float | None = None
    validation_fraction: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; expected at least 0 and less than 1")
        if self.test_fraction is not None and not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction is {self.test_fraction}; expected more than 0 and less than 1")


class FoldBuilder(RowBuilder):
    """Base class of builders for datasets with folds.

    The captions are generated from the class names, and each clip has one event over its whole length. All clips of a
    recording are in the same split.
    """

    def read(self) -> list[FoldClip]:
        """Read the metadata table, and return its clips in the same order."""
        raise NotImplementedError

    def collect(self) -> Collection:
        """Read the metadata table, and split its clips by fold and recording."""
        collection, config = Collection(), self.config
        clips = self.read()

        phrases = label_phrases(config.PHRASES)
        unknown = sorted({clip.label for clip in clips} - phrases.keys())
        if unknown:
            raise ValueError(f"unknown classes {unknown}; the classes of {config.DATASET} are {', '.join(phrases)}")

        splits = split_clips(clips, config.test_fold, config.validation_fraction, config.seed, config.test_fraction)
        unplaced = set(clips).difference(*splits.values())
        for clip in clips:
            if clip in unplaced:
                collection.leave_out("source in another split", stem_of(clip.file_name))

        for split, members in splits.items():
            for clip in members:
                clip_id = stem_of(clip.file_name)
                path = config.recordings.named([clip_id])
                seconds = duration_seconds(path) if clip.seconds is None and path is not None else clip.seconds
                events = [Event(label=clip.label, onset_seconds=0.0, offset_seconds=seconds)] if seconds else []
                captions = render_captions(phrases[clip.label], config.languages)
                row = Clip(clip_id, captions, f"freesound:{clip.freesound_id}", clip.license, [clip.label], events)
                collection.add(split, row, clip.file_name, path)
        return collection


def split_clips(
    clips: Sequence[FoldClip],
    test_fold: int,
    validation_fraction: float,
    seed: int,
    test_fraction: float | None = None,
) -> dict[str, list[FoldClip]]:
    """Split clips into train, validation and test; `FoldConfig` describes the arguments.

    Clips in other folds are excluded if they are from a recording in the test fold. For validation, a rounded fraction
    of the remaining recordings of each class is sampled; of two or more, at least one is used for validation and one
    for training. Raises ValueError if the test fold contains no clips.
    """
    folds = sorted({clip.fold for clip in clips})
    if test_fraction is None and test_fold not in folds:
        raise ValueError(
            f"fold {test_fold!r} has no clips; folds with clips: {folds}; set test_fold={folds[0] if folds else 1} (in "
            "the evaluation recipe: --folds)"
        )

    if test_fraction is None:
        tested = {clip.freesound_id for clip in clips if clip.fold == test_fold}
    else:
        tested = _draw_recordings(clips, test_fraction, seed)
    rest = [clip for clip in clips if clip.freesound_id not in tested]
    held_out = _draw_recordings(rest, validation_fraction, seed)

    splits: dict[str, list[FoldClip]] = {"train": [], "validation": [], "test": []}
    for clip in clips:
        if clip.freesound_id not in tested:
            splits["validation" if clip.freesound_id in held_out else "train"].append(clip)
        elif test_fraction is not None or clip.fold == test_fold:
            splits["test"].append(clip)
    return splits


def _draw_recordings(clips: Sequence[FoldClip], fraction: float, seed: int) -> set[str]:
    """Sample a fraction of the recordings of each class; the first clip of a recording determines its class."""
    if fraction == 0:
        return set()

    label_of = {clip.freesound_id: clip.label for clip in reversed(clips)}
    recordings_of: dict[str, list[str]] = {}
    for recording, label in sorted(label_of.items()):
        recordings_of.setdefault(label, []).append(recording)

    rng = np.random.default_rng(seed)
    held_out: set[str] = set()
    for _, recordings in sorted(recordings_of.items()):
        count = min(max(1, round(fraction * len(recordings))), len(recordings) - 1)
        held_out.update(rng.permutation(recordings)[:count])
    return held_out
