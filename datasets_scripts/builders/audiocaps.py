"""AudioCaps 1.0 and 2.0: ten-second clips of YouTube videos with human captions (Kim et al., 2019).

Reads `train.csv`, `val.csv` and `test.csv` from the authors' repository (folder `dataset/` or `dataset2.0/`). The audio
must be downloaded separately; the files may have any of the usual names, see `recordings.YOUTUBE_NAMINGS`. Some videos
are no longer available.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from .folder import ENGLISH, Clip, Collection, FolderConfig, RowBuilder
from .metadata import Line, read_csv
from .recordings import YOUTUBE_NAMINGS, Recordings, Segment, find_segments

COLUMNS = ("audiocap_id", "youtube_id", "start_time", "caption")


class Captioned(NamedTuple):
    """AudioCaps clip with all its captions.

    Attributes:
        segment: YouTube id and start in seconds.
        captions: One caption in train, five in validation and test. Identical captions are kept, because two annotators
            may write the same text.
        caption_ids: `audiocap_id` of each caption.
    """

    segment: Segment
    captions: list[str]
    caption_ids: list[str]

    @property
    def clip_id(self) -> str:
        """Clip id from the YouTube id and the start, such as "7fmOlUlwoNg_20"."""
        youtube_id, start = self.segment
        return f"{youtube_id}_{start}"


class AudioCapsConfig(FolderConfig):
    """AudioCaps configuration; `data_dir` must contain at least one of the tables. See `FolderConfig`."""

    DATASET = "AudioCaps"
    LAYOUT = "the folder that holds train.csv, val.csv and test.csv"
    TABLES: ClassVar = {"train": ("train.csv",), "validation": ("val.csv", "validation.csv"), "test": ("test.csv",)}


class AudioCaps(RowBuilder):
    """AudioCaps builder with train, validation and test split; one row per clip."""

    BUILDER_CONFIG_CLASS = AudioCapsConfig
    HOMEPAGE = "https://audiocaps.github.io"
    NAMINGS = (*YOUTUBE_NAMINGS, "{audiocap_id}")

    def collect(self) -> Collection:
        """Return the clips in the tables; a clip in two splits is kept only in the later split."""
        collection = Collection()
        splits, every = {}, []
        for split, path in self.config.tables().items():
            splits[split] = read_captioned(path, collection)
            every += splits[split]
        paths = find_clips(self.config.recordings, every)

        for split, clips in splits.items():
            for clip in clips:
                youtube_id, _ = clip.segment
                # AudioSet does not list licences: each uploader chooses a licence per video.
                row = Clip(clip.clip_id, {ENGLISH: clip.captions}, f"youtube:{youtube_id}", "unknown (YouTube)")
                collection.add(split, row, clip.clip_id, paths.get(clip.segment))
        return collection


def read_captioned(path: Path, collection: Collection) -> list[Captioned]:
    """Read a table; lines with the same clip are merged.

    Args:
        path: Table to read.
        collection: Clips with a repeated `audiocap_id` are recorded here as "duplicate".

    Returns:
        Clips in the order of their first line.
    """
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
    """Return a dict from segment to path, for all clips with an audio file.

    Searches for file names in the formats of `YOUTUBE_NAMINGS`. If there are none, searches for caption ids instead.
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
    """Parse the start of a clip in whole seconds; any other value raises a ValueError with the line number."""
    text = line.values[column].strip()
    whole = text.removesuffix(".0")
    if not whole.isdecimal():
        raise ValueError(f"{line.where}: {column} is {text!r}; expected whole seconds")
    return int(whole)
