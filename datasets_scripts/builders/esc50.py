"""ESC-50 and its subset ESC-10: 5-second recordings of 50 (10) everyday sounds in five folds (Piczak, 2015).

Reads the published folder with `meta/esc50.csv` and `audio/`. If the table contains only the lines of ESC-10, the
dataset is ESC-10.
"""

from typing import ClassVar

from .folds import FoldBuilder, FoldClip, FoldConfig, read_fold
from .metadata import read_csv

COLUMNS = ("filename", "fold", "category", "esc10", "src_file")


class ESC50Config(FoldConfig):
    """Configuration of ESC-50; `data_dir` contains `meta/esc50.csv` and `audio/`. See `FoldConfig`."""

    DATASET = "ESC-50"
    LAYOUT = "the folder that holds meta/esc50.csv and audio/"
    TABLES: ClassVar = {"clips": ("esc50.csv",)}
    PHRASES = "esc50"
    READS_HEADERS = True


class ESC50(FoldBuilder):
    """ESC-50: train, validation and test."""

    BUILDER_CONFIG_CLASS = ESC50Config
    HOMEPAGE = "https://github.com/karolpiczak/ESC-50"

    def read(self) -> list[FoldClip]:
        """Read `meta/esc50.csv`."""
        lines = read_csv(self.config.tables()["clips"], COLUMNS)

        # README of ESC-50: CC BY for the subset ESC-10, CC BY-NC for the whole dataset.
        in_esc10 = {line.values["esc10"].strip().lower() for line in lines}
        license = "CC BY 3.0" if in_esc10 == {"true"} else "CC BY-NC 3.0"

        clips = []
        for line in lines:
            values = line.values
            clips.append(FoldClip(values["filename"], read_fold(line), values["category"], values["src_file"], license))
        return clips
