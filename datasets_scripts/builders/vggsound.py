"""VGGSound: ten-second clips from YouTube videos with 309 classes (Chen et al., 2020).

The builder reads `vggsound.csv` of https://www.robots.ox.ac.uk/~vgg/data/vggsound; this file has no header.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..splits import draw_sources
from .captions import render_captions
from .folder import ENGLISH, Collection, FolderConfig, RowBuilder, youtube_clip
from .metadata import read_csv
from .recordings import YOUTUBE_NAMINGS, Segment, find_segments

COLUMNS = ("youtube_id", "start_seconds", "label", "split")


@dataclass
class VGGSoundConfig(FolderConfig):
    """VGGSound configuration; `data_dir` must contain `vggsound.csv`. See `FolderConfig`.

    Attributes:
        num_validation: Number of training videos to hold out for validation, sampled at random. Defaults to 0, because
            the published dataset has no validation split.
        seed: Random seed for the sampling.
    """

    DATASET = "VGGSound"
    LAYOUT = "the folder that holds vggsound.csv"
    TABLES: ClassVar = {"clips": ("vggsound.csv",)}

    num_validation: int = 0
    seed: int = 0


class VGGSound(RowBuilder):
    """VGGSound builder with train, test and optional validation split; the captions are generated from the labels."""

    BUILDER_CONFIG_CLASS = VGGSoundConfig
    NAMINGS = YOUTUBE_NAMINGS

    def collect(self) -> Collection:
        collection = Collection()
        clips: list[tuple[Segment, str, str]] = []  # with label and split
        for number, line in enumerate(read_csv(self.config.tables()["clips"], COLUMNS, header=False)):
            label, split = line.values["label"], line.values["split"]
            if number == 0 and split.lower() == "split":  # the header line of some copies
                continue
            if split not in ("train", "test"):
                raise ValueError(f"{line.where}: the split is {split!r}; expected train or test")
            segment = line.values["youtube_id"], int(line.number("start_seconds", whole=True))
            clips.append((segment, label, split))

        paths = find_segments(self.config.recordings, {segment for segment, _, _ in clips})
        trained = {segment[0] for segment, _, split in clips if split == "train"}
        drawn = draw_sources(trained, {"validation": self.config.num_validation}, self.config.seed)
        for segment, label, split in clips:
            captions = render_captions({ENGLISH: label}, [ENGLISH]) if label else {}
            clip = youtube_clip(segment, captions, [label])
            collection.add(drawn[segment[0]] if split == "train" else split, clip, clip.clip_id, paths.get(segment))
        return collection
