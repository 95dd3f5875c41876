"""Clotho v2.1: Freesound recordings of 15 to 30 seconds with five captions each (Drossos et al., 2020).

The builder reads the published `clotho_captions_<split>.csv`, `clotho_metadata_<split>.csv` (optional), and the audio
files in the folders "development", "validation" and "evaluation". See https://zenodo.org/records/4783391.
"""

from pathlib import Path
from typing import ClassVar

from .folder import ENGLISH, Clip, Collection, FolderConfig, RowBuilder
from .metadata import read_csv

PARTS = {"train": "development", "validation": "validation", "test": "evaluation"}
"""Dict from our split names to the Clotho split names."""


class ClothoConfig(FolderConfig):
    """Clotho configuration; `data_dir` must contain the caption tables. See `FolderConfig`."""

    DATASET = "Clotho"
    LAYOUT = "the folder that holds clotho_captions_development.csv and the like"
    TABLES: ClassVar = {split: (f"clotho_captions_{part}.csv",) for split, part in PARTS.items()}
    TABLES |= {f"{split}_origins": (f"clotho_metadata_{part}.csv",) for split, part in PARTS.items()}


class Clotho(RowBuilder):
    """Clotho builder with the splits train (development), validation and test (evaluation).

    Some file names occur in several splits, so a clip id contains the split: "development/Distorted AM Radio
    noise.wav". The source is the Freesound id if `clotho_metadata_<split>.csv` contains it, and otherwise the clip id.
    """

    BUILDER_CONFIG_CLASS = ClothoConfig
    NAMINGS = ("the file names of the caption tables, unchanged, with decoded HTML entities, or without punctuation",)

    def collect(self) -> Collection:
        collection, tables = Collection(), self.config.tables()
        for split in filter(tables.__contains__, PARTS):
            part, lines = PARTS[split], read_csv(tables[split], ("file_name",))
            recordings = self.config.recordings.within(part, PARTS.values())
            paths = recordings.matching([line.values["file_name"] for line in lines])
            origins = read_origins(tables[f"{split}_origins"]) if f"{split}_origins" in tables else {}
            for line in lines:
                name, clip_id = line.values["file_name"], f"{part}/{line.values['file_name']}"
                captions = [text for column, text in line.values.items() if column.startswith("caption")]
                source, license = origins.get(name, (f"clotho:{clip_id}", "Creative Commons, clip by clip"))
                collection.add(split, Clip(clip_id, {ENGLISH: captions}, source, license), clip_id, paths.get(name))
        return collection


def read_origins(path: Path) -> dict[str, tuple[str, str]]:
    """Read `{file name: (source, licence)}` from a metadata table; skip clips without a Freesound id."""
    origins = {}
    for line in read_csv(path, ("file_name", "sound_id", "license")):
        sound_id = line.values["sound_id"]
        if sound_id.isdecimal():
            origins[line.values["file_name"]] = (f"freesound:{sound_id}", line.values["license"])
    return origins
