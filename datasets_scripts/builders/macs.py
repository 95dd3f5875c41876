"""MACS: 3,930 ten-second street and indoor scenes with two to five captions each (Martín-Morató and Mesaros, 2021).

The builder reads `MACS.yaml` of https://zenodo.org/records/5114771, and the audio of TAU Urban Acoustic Scenes 2019
(development, https://zenodo.org/records/2589280).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ..splits import draw_sources
from .folder import ENGLISH, Clip, Collection, FolderConfig, RowBuilder
from .recordings import stem_of

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C takes seconds instead of a minute


@dataclass
class MACSConfig(FolderConfig):
    """MACS configuration; `data_dir` must contain `MACS.yaml`. See `FolderConfig`.

    Attributes:
        num_test: Number of places to hold out for the test split, sampled at random. Defaults to 0, because the
            published dataset has only one split.
        num_validation: Number of places in the validation split, sampled in the same way.
        seed: Random seed for the sampling.
    """

    DATASET = "MACS"
    LAYOUT = "the folder that holds MACS.yaml and the audio of TAU Urban Acoustic Scenes 2019"
    TABLES: ClassVar = {"clips": ("MACS.yaml",)}

    num_test: int = 0
    num_validation: int = 0
    seed: int = 0


class MACS(RowBuilder):
    """MACS builder. The label of a clip is its scene, such as "public_square", and its source is the place."""

    BUILDER_CONFIG_CLASS = MACSConfig

    def collect(self) -> Collection:
        collection, config = Collection(), self.config
        clips = []
        for clip_id, captions in read_captions(config.tables()["clips"]):
            scene, city, place = (*clip_id.split("-"), "", "")[:3]  # "airport-barcelona-0-12-a"
            source = f"tau2019:{scene}-{city}-{place}"
            clips.append(Clip(clip_id, {ENGLISH: captions}, source, "academic use only", [scene]))

        counts = {"test": config.num_test, "validation": config.num_validation}
        splits = draw_sources((clip.source for clip in clips), counts, config.seed)
        for clip in clips:
            path = config.recordings.named([clip.clip_id])
            collection.add(splits[clip.source], clip, clip.clip_id, path)
        return collection


def read_captions(path: Path) -> list[tuple[str, list[str]]]:
    """Read the id and the captions of each clip; raise ValueError with the path if the file is not MACS.yaml."""
    try:
        table = yaml.load(path.read_text(encoding="utf-8"), LOADER)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    entries: Any = table.get("files") if isinstance(table, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f'{path} has no list "files"; expected MACS.yaml')

    clips = []
    for index, entry in enumerate(entries):
        try:
            captions = [annotation["sentence"] for annotation in entry["annotations"]]
            clips.append((stem_of(entry["filename"]), captions))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: entry {index} of files lacks filename, annotations or a sentence; expected MACS.yaml"
            ) from error
    return clips
