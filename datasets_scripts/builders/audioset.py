"""AudioSet: ten-second clips from YouTube videos with one or more of 527 classes (Gemmeke et al., 2017).

The builder reads `balanced_train_segments.csv`, `eval_segments.csv` and `class_labels_indices.csv` of
https://research.google.com/audioset. The audio must be downloaded separately, with file names in one of the formats in
`recordings.YOUTUBE_NAMINGS`.
"""

from typing import ClassVar

from .captions import caption_classes
from .folder import Collection, FolderConfig, RowBuilder, youtube_clip
from .metadata import Line, read_csv
from .recordings import YOUTUBE_NAMINGS, Segment, find_segments

CLASSES = "class_labels_indices.csv"
COLUMNS = ("YTID", "start_seconds", "end_seconds", "positive_labels")


class AudioSetConfig(FolderConfig):
    """AudioSet configuration. `data_dir` must contain `class_labels_indices.csv` and at least one table of clips."""

    DATASET = "AudioSet"
    LAYOUT = "the folder that holds balanced_train_segments.csv, eval_segments.csv and class_labels_indices.csv"
    TABLES: ClassVar = {
        "train": ("balanced_train_segments.csv",),
        "test": ("eval_segments.csv",),
        "classes": (CLASSES,),
    }
    REQUIRED = ("classes",)


class AudioSet(RowBuilder):
    """AudioSet builder with the balanced train split and the test split; the captions are generated from the labels."""

    BUILDER_CONFIG_CLASS = AudioSetConfig
    NAMINGS = YOUTUBE_NAMINGS

    def collect(self) -> Collection:
        collection, tables = Collection(), self.config.tables()
        classes = read_csv(tables.pop("classes"), ("mid", "display_name"))
        names = {line.values["mid"]: line.values["display_name"] for line in classes}

        clips: list[tuple[str, Line, Segment]] = []
        for split, path in tables.items():
            for line in read_csv(path, COLUMNS, header=False):
                # comment lines, one of them with the column names
                if not line.values["YTID"].startswith("#"):
                    segment = line.values["YTID"], int(line.number("start_seconds", whole=True))
                    clips.append((split, line, segment))

        ends = {segment: line.number("end_seconds") for _, line, segment in clips}
        paths = find_segments(self.config.recordings, ends, ends)
        for split, line, segment in clips:
            mids = [mid.strip() for mid in line.values["positive_labels"].split(",") if mid.strip()]
            unknown = [mid for mid in mids if mid not in names]
            if unknown:
                raise ValueError(f"{line.where}: the class {unknown[0]!r} is not in {CLASSES}")
            labels = [names[mid] for mid in mids]
            clip = youtube_clip(segment, caption_classes(labels), labels)
            collection.add(split, clip, clip.clip_id, paths.get(segment))
        return collection
