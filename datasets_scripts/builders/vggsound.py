"""VGGSound: ten-second clips from YouTube videos with 309 classes (Chen et al., 2020).

The builder reads `vggsound.csv` of https://www.robots.ox.ac.uk/~vgg/data/vggsound; this file has no header.
"""

from dataclasses import dataclass
from typing import ClassVar

from .audiocaps import start_seconds
from .captions import render_captions
from .folder import ENGLISH, Clip, Collection, FolderConfig, RowBuilder, draw_sources
from .metadata import read_csv
from .recordings import YOUTUBE_NAMINGS, find_segments

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
        lines = read_csv(self.config.tables()["clips"], COLUMNS, header=False)
        splits = [line.values["split"].strip() for line in lines]
        if splits and splits[0].lower() == "split":  # the header line of some copies
            lines, splits = lines[1:], splits[1:]
        for line, split in zip(lines, splits, strict=True):
            if split not in ("train", "test"):
                raise ValueError(f"{line.where}: the split is {split!r}; expected train or test")

        segments = [(line.values["youtube_id"], start_seconds(line, "start_seconds")) for line in lines]
        paths = find_segments(self.config.recordings, list(dict.fromkeys(segments)))
        trained = {youtube_id for (youtube_id, _), split in zip(segments, splits, strict=True) if split == "train"}
        drawn = draw_sources(trained, {"validation": self.config.num_validation}, self.config.seed)

        for line, segment, given_split in zip(lines, segments, splits, strict=True):
            split = drawn[segment[0]] if given_split == "train" else "test"
            label, clip_id = line.values["label"].strip(), "{}_{}".format(*segment)
            captions = render_captions({ENGLISH: label}, [ENGLISH]) if label else {}
            clip = Clip(clip_id, captions, f"youtube:{segment[0]}", "unknown (YouTube)", labels=[label])
            collection.add(split, clip, clip_id, paths.get(segment))
        return collection
