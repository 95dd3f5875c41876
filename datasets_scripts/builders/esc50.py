"""ESC-50 and its subset ESC-10: 5-second recordings of 50 (10) everyday sounds in five folds (Piczak, 2015).

Takes the folder as its author publishes it, `meta/esc50.csv` and `audio/`. A csv with only the lines of ESC-10 makes
it ESC-10.
"""

from typing import ClassVar

from .folds import FoldBuilder, FoldClip, FoldConfig, read_fold
from .metadata import read_csv

COLUMNS = ("filename", "fold", "category", "esc10", "src_file")


class ESC50Config(FoldConfig):
    """`data_dir` holds `meta/esc50.csv` and `audio/`; see `FoldConfig`."""

    DATASET = "ESC-50"
    LAYOUT = "the folder that holds meta/esc50.csv and audio/"
    TABLES: ClassVar = {"clips": ("esc50.csv",)}
    PHRASES = "esc50"
    READS_HEADERS = True


class ESC50(FoldBuilder):
    """ESC-50 as rows: train, validation and test."""

    BUILDER_CONFIG_CLASS = ESC50Config
    HOMEPAGE = "https://github.com/karolpiczak/ESC-50"

    def read(self) -> list[FoldClip]:
        """Reads `meta/esc50.csv`."""
        lines = read_csv(self.config.tables()["clips"], COLUMNS)

        # ESC-50's README: the ESC-10 subset is CC BY, the whole CC BY-NC.
        in_esc10 = {line.values["esc10"].strip().lower() for line in lines}
        license = "CC BY 3.0" if in_esc10 == {"true"} else "CC BY-NC 3.0"

        clips = []
        for line in lines:
            values = line.values
            clips.append(FoldClip(values["filename"], read_fold(line), values["category"], values["src_file"], license))
        return clips
