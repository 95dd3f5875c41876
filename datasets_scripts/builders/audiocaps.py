"""AudioCaps 1.0 and 2.0: ten-second clips of YouTube videos with human captions (Kim et al., 2019).

The builder reads `train.csv`, `val.csv` and `test.csv` from the authors' repository (folder `dataset/` or
`dataset2.0/`). The audio must be downloaded separately, with file names in one of the formats in
`recordings.YOUTUBE_NAMINGS`. Some videos are no longer available. See https://audiocaps.github.io.
"""

from typing import ClassVar

from .folder import ENGLISH, Collection, FolderConfig, RowBuilder, youtube_clip
from .metadata import read_csv
from .recordings import YOUTUBE_NAMINGS, Segment, find_segments

COLUMNS = ("audiocap_id", "youtube_id", "start_time", "caption")


class AudioCapsConfig(FolderConfig):
    """AudioCaps configuration. `data_dir` must contain at least one of `train.csv`, `val.csv` and `test.csv`."""

    DATASET = "AudioCaps"
    LAYOUT = "the folder that holds train.csv, val.csv and test.csv"
    TABLES: ClassVar = {"train": ("train.csv",), "validation": ("val.csv", "validation.csv"), "test": ("test.csv",)}


class AudioCaps(RowBuilder):
    """AudioCaps builder with train, validation and test split; one row per clip.

    A training clip has one caption, a validation or test clip has five. Identical captions are kept, because two
    annotators may write the same text.
    """

    BUILDER_CONFIG_CLASS = AudioCapsConfig
    NAMINGS = (*YOUTUBE_NAMINGS, "{audiocap_id}")

    def collect(self) -> Collection:
        """Read the metadata tables, and return their clips. A clip in two splits is kept only in the later split."""
        collection = Collection()
        splits: dict[str, dict[Segment, dict[str, str]]] = {}  # split -> clip -> caption id -> caption
        for split, path in self.config.tables().items():
            splits[split] = {}
            seen: set[str] = set()
            for line in read_csv(path, COLUMNS):
                segment = line.values["youtube_id"], int(line.number("start_time", whole=True))
                caption_id = line.values["audiocap_id"]
                captions = splits[split].setdefault(segment, {})
                if caption_id in seen:
                    collection.leave_out("duplicate", "{}_{}".format(*segment))
                else:
                    captions[caption_id] = line.values["caption"]
                seen.add(caption_id)

        recordings = self.config.recordings
        segments = set[Segment]().union(*splits.values())
        paths = find_segments(recordings, segments)
        for split, clips in splits.items():
            for segment, captions in clips.items():
                # If no file is named after its video, the files are named after their captions.
                path = paths.get(segment) if paths else recordings.named(captions)
                clip = youtube_clip(segment, {ENGLISH: list(captions.values())})
                collection.add(split, clip, clip.clip_id, path)
        return collection
