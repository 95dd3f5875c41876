"""UrbanSound8K: 8,732 excerpts from Freesound recordings with ten urban classes in ten folds (Salamon et al., 2014).

The builder reads the folder of https://urbansounddataset.weebly.com/urbansound8k.html.
"""

from dataclasses import dataclass
from typing import ClassVar

from .folds import FoldBuilder, FoldClip, FoldConfig
from .metadata import Line, read_csv

COLUMNS = ("slice_file_name", "fsID", "start", "end", "salience", "fold", "classID", "class")


@dataclass
class UrbanSound8KConfig(FoldConfig):
    """UrbanSound8K configuration; `data_dir` must contain `metadata/UrbanSound8K.csv` and `audio/`. See `FoldConfig`.

    Attributes:
        foreground_only: Whether to exclude clips with the sound in the background (salience 2).
    """

    DATASET = "UrbanSound8K"
    LAYOUT = "the folder that holds metadata/UrbanSound8K.csv and audio/"
    TABLES: ClassVar = {"clips": ("UrbanSound8K.csv",)}
    PHRASES = "urbansound8k"

    foreground_only: bool = False


class UrbanSound8K(FoldBuilder):
    """UrbanSound8K builder with train, validation and test split."""

    BUILDER_CONFIG_CLASS = UrbanSound8KConfig

    def read(self) -> list[FoldClip]:
        return [self._read_slice(line) for line in read_csv(self.config.tables()["clips"], COLUMNS)]

    def _read_slice(self, line: Line) -> FoldClip:
        values = line.values
        in_background = line.number("salience", whole=True) != 1 and self.config.foreground_only
        return FoldClip(
            file_name=values["slice_file_name"].strip(),
            fold=int(line.number("fold", whole=True)),
            label=values["class"].strip(),
            freesound_id=values["fsID"].strip(),
            license="CC BY-NC 3.0",  # from the dataset's README
            seconds=round(line.number("end") - line.number("start"), 6),  # precision of the table
            left_out="in the background" if in_background else "",
        )
