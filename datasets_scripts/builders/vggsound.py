"""VGGSound: ten-second clips of YouTube videos of 309 classes (Chen et al., 2020).

Reads the published `vggsound.csv`, without a header: YouTube id, start in seconds, label, split.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .audiocaps import start_seconds
from .captions import render_captions
from .folder import ENGLISH, Clip, Collection, FolderConfig, RowBuilder, draw_sources
from .metadata import Line, read_csv
from .recordings import YOUTUBE_NAMINGS, find_segments

COLUMNS = ("youtube_id", "start_seconds", "label", "split")


@dataclass
class VGGSoundConfig(FolderConfig):
    """Configuration of VGGSound; `data_dir` contains `vggsound.csv`. See `FolderConfig`.

    Attributes:
        num_validation: Number of training videos to hold out for validation, drawn by a hash of their ids; 0 by
            default, because the published dataset has no validation split.
        seed: Seed of the draw.
    """

    DATASET = "VGGSound"
    LAYOUT = "the folder that holds vggsound.csv"
    TABLES: ClassVar = {"clips": ("vggsound.csv",)}

    num_validation: int = 0
    seed: int = 0


class VGGSound(RowBuilder):
    """VGGSound: train, test and optionally validation, with captions from the labels."""

    BUILDER_CONFIG_CLASS = VGGSoundConfig
    HOMEPAGE = "https://www.robots.ox.ac.uk/~vgg/data/vggsound/"
    NAMINGS = YOUTUBE_NAMINGS

    def collect(self) -> Collection:
        """Collect the clips of the table."""
        collection = Collection()
        lines = read_clips(self.config.tables()["clips"])
        segments = [(line.values["youtube_id"], start_seconds(line, "start_seconds")) for line in lines]
        paths = find_segments(self.config.recordings, list(dict.fromkeys(segments)))

        trained = {line.values["youtube_id"] for line in lines if _split(line) == "train"}
        drawn = draw_sources(trained, {"validation": self.config.num_validation}, self.config.seed)

        for line, segment in zip(lines, segments, strict=True):
            split = drawn.get(segment[0], "train") if _split(line) == "train" else "test"
            label, clip_id = line.values["label"].strip(), "{}_{}".format(*segment)
            captions = render_captions({ENGLISH: label}, [ENGLISH]) if label else {}
            clip = Clip(clip_id, captions, f"youtube:{segment[0]}", "unknown (YouTube)", labels=[label])
            collection.add(split, clip, clip_id, paths.get(segment))
        return collection


def read_clips(path: Path) -> list[Line]:
    """Return the lines of `vggsound.csv` by `COLUMNS`, without the header that some copies have."""
    lines = read_csv(path, COLUMNS, header=False)
    if lines and lines[0].values["split"].strip().lower() == "split":
        lines = lines[1:]
    for line in lines:
        if _split(line) not in ("train", "test"):
            raise ValueError(f"{line.where}: the split is {line.values['split']!r}; expected train or test")
    return lines


def _split(line: Line) -> str:
    return line.values["split"].strip()
