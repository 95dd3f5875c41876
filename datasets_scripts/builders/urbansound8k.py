"""UrbanSound8K: 8,732 excerpts from Freesound recordings with ten urban classes in ten folds (Salamon et al., 2014).

The builder reads the folder of https://urbansounddataset.weebly.com/urbansound8k.html.
"""

from typing import ClassVar

from .folds import FoldBuilder, FoldClip, FoldConfig
from .metadata import Line, read_csv

COLUMNS = ("slice_file_name", "fsID", "start", "end", "salience", "fold", "classID", "class")


class UrbanSound8KConfig(FoldConfig):
    """Configuration of UrbanSound8K; `data_dir` contains `metadata/UrbanSound8K.csv` and `audio/`. See `FoldConfig`."""

    DATASET = "UrbanSound8K"
    LAYOUT = "the folder that holds metadata/UrbanSound8K.csv and audio/"
    TABLES: ClassVar = {"clips": ("UrbanSound8K.csv",)}
    PHRASES = "urbansound8k"


class UrbanSound8K(FoldBuilder):
    """UrbanSound8K builder with train, validation and test split."""

    BUILDER_CONFIG_CLASS = UrbanSound8KConfig

    def read(self) -> list[FoldClip]:
        return [self._read_slice(line) for line in read_csv(self.config.tables()["clips"], COLUMNS)]

    def _read_slice(self, line: Line) -> FoldClip:
        values = line.values
        return FoldClip(
            file_name=values["slice_file_name"],
            fold=int(line.number("fold", whole=True)),
            label=values["class"],
            freesound_id=values["fsID"],
            license="CC BY-NC 3.0",  # from the dataset's README
            seconds=round(line.number("end") - line.number("start"), 6),  # precision of the table
        )
