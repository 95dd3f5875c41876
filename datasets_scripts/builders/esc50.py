"""ESC-50 and its subset ESC-10: 5-second recordings of 50 (10) everyday sounds in five folds (Piczak, 2015).

The builder reads the folder of https://github.com/karolpiczak/ESC-50. To use ESC-10, remove the lines of all other
clips from the table.
"""

from typing import ClassVar

from .folds import FoldBuilder, FoldClip, FoldConfig
from .metadata import read_csv

COLUMNS = ("filename", "fold", "category", "esc10", "src_file")


class ESC50Config(FoldConfig):
    """ESC-50 configuration; `data_dir` must contain `meta/esc50.csv` and `audio/`. See `FoldConfig`."""

    DATASET = "ESC-50"
    LAYOUT = "the folder that holds meta/esc50.csv and audio/"
    TABLES: ClassVar = {"clips": ("esc50.csv",)}
    PHRASES = "esc50"


class ESC50(FoldBuilder):
    """ESC-50 builder with train, validation and test split."""

    BUILDER_CONFIG_CLASS = ESC50Config

    def read(self) -> list[FoldClip]:
        lines = read_csv(self.config.tables()["clips"], COLUMNS)

        # Licences in the ESC-50 README: CC BY for the ESC-10 subset, CC BY-NC for the whole dataset.
        in_esc10 = {line.values["esc10"].lower() for line in lines}
        license = "CC BY 3.0" if in_esc10 == {"true"} else "CC BY-NC 3.0"

        clips = []
        for line in lines:
            values, fold = line.values, int(line.number("fold", whole=True))
            clips.append(FoldClip(values["filename"], fold, values["category"], values["src_file"], license))
        return clips
