"""AudioCaps 1.0 and 2.0: ten-second clips of YouTube videos with human captions (Kim et al., 2019).

Takes the tables of the authors' repository, `train.csv`, `val.csv` and `test.csv` (of `dataset/` or `dataset2.0/`), and
audio under whatever of the usual names: everybody downloads it for themselves, and some videos are gone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from .folder import ENGLISH, Clip, Collection, FolderConfig, RowBuilder
from .metadata import Line, read_csv
from .recordings import YOUTUBE_NAMINGS, Recordings, Segment, find_segments

COLUMNS = ("audiocap_id", "youtube_id", "start_time", "caption")


class Captioned(NamedTuple):
    """A clip in a table: all its lines.

    Attributes:
        segment: The YouTube id and the start in seconds.
        captions: One in train, five in validation and test; the same text twice is two captions, as annotators
            sometimes agree.
        caption_ids: The `audiocap_id` of each.
    """

    segment: Segment
    captions: list[str]
    caption_ids: list[str]

    @property
    def clip_id(self) -> str:
        """Such as "7fmOlUlwoNg_20"."""
        youtube_id, start = self.segment
        return f"{youtube_id}_{start}"


class AudioCapsConfig(FolderConfig):
    """`data_dir` holds the three tables or some of them; see `FolderConfig`."""

    DATASET = "AudioCaps"
    LAYOUT = "the folder that holds train.csv, val.csv and test.csv"
    TABLES: ClassVar = {"train": ("train.csv",), "validation": ("val.csv", "validation.csv"), "test": ("test.csv",)}


class AudioCaps(RowBuilder):
    """AudioCaps as rows: train, validation and test, a row a clip."""

    BUILDER_CONFIG_CLASS = AudioCapsConfig
    HOMEPAGE = "https://audiocaps.github.io"
    NAMINGS = (*YOUTUBE_NAMINGS, "{audiocap_id}")

    def collect(self) -> Collection:
        """The clips of the tables; those that two splits share stay in the later one."""
        collection = Collection()
        splits, every = {}, []
        for split, path in self.config.tables().items():
            splits[split] = read_captioned(path, collection)
            every += splits[split]
        paths = find_clips(self.config.recordings, every)

        for split, clips in splits.items():
            for clip in clips:
                youtube_id, _ = clip.segment
                # Of AudioSet's clips nobody knows the licence: it is the uploader's choice, video by video.
                row = Clip(clip.clip_id, {ENGLISH: clip.captions}, f"youtube:{youtube_id}", "unknown (YouTube)")
                collection.add(split, row, clip.clip_id, paths.get(clip.segment))
        return collection


def read_captioned(path: Path, collection: Collection) -> list[Captioned]:
    """The clips of a table, in the order in which each comes first; the collection notes those of doubled lines."""
    clips: dict[Segment, Captioned] = {}
    seen: set[str] = set()

    for line in read_csv(path, COLUMNS):
        segment = line.values["youtube_id"].strip(), start_seconds(line, "start_time")
        clip = clips.setdefault(segment, Captioned(segment, [], []))
        if line.values["audiocap_id"] in seen:
            collection.leave_out("duplicate", clip.clip_id)
            continue

        seen.add(line.values["audiocap_id"])
        clip.captions.append(line.values["caption"])
        clip.caption_ids.append(line.values["audiocap_id"].strip())
    return list(clips.values())


def find_clips(recordings: Recordings, clips: Sequence[Captioned]) -> dict[Segment, Path]:
    """The path by segment, of the clips that are there.

    Under any of `YOUTUBE_NAMINGS`, and only where no file of all splits is named so, under an id of their captions.
    """
    found = find_segments(recordings, list({clip.segment for clip in clips}))
    if found:
        return found

    for clip in clips:
        path = recordings.named(clip.caption_ids)
        if path is not None:
            found[clip.segment] = path
    return found


def start_seconds(line: Line, column: str) -> int:
    """A clip's start in whole seconds; a ValueError that names the line where it is anything else."""
    text = line.values[column].strip()
    whole = text.removesuffix(".0")
    if not whole.isdecimal():
        raise ValueError(f"{line.where}: {column} is {text!r}; give whole seconds")
    return int(whole)
