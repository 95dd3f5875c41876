"""FSD50K: 51,197 Freesound clips with one or more of 200 AudioSet classes (Fonseca et al., 2022).

The builder reads the folder of https://zenodo.org/records/4060432: `FSD50K.ground_truth/dev.csv` and `eval.csv`, and
the audio.
"""

from typing import ClassVar

from .captions import caption_classes
from .folder import Clip, Collection, FolderConfig, RowBuilder
from .metadata import read_csv, read_json

SPLIT_OF = {"train": "train", "val": "validation"}


class FSD50KConfig(FolderConfig):
    """FSD50K configuration. `data_dir` must contain `FSD50K.ground_truth/` with `dev.csv`, `eval.csv` or both."""

    DATASET = "FSD50K"
    LAYOUT = "the folder that holds FSD50K.ground_truth/, FSD50K.dev_audio/ and FSD50K.eval_audio/"
    TABLES: ClassVar = {
        "dev": ("dev.csv",),
        "eval": ("eval.csv",),
        "dev_info": ("dev_clips_info_FSD50K.json",),
        "eval_info": ("eval_clips_info_FSD50K.json",),
    }


class FSD50K(RowBuilder):
    """FSD50K builder; the captions are generated from the labels, the licences are read from `FSD50K.metadata/`."""

    BUILDER_CONFIG_CLASS = FSD50KConfig

    def collect(self) -> Collection:
        collection, tables = Collection(), self.config.tables()
        for part in filter(tables.__contains__, ("dev", "eval")):
            clips_info = read_json(tables[f"{part}_info"]) if f"{part}_info" in tables else {}
            for line in read_csv(tables[part], ("fname", "labels", "split") if part == "dev" else ("fname", "labels")):
                split = SPLIT_OF.get(line.values["split"]) if part == "dev" else "test"
                if split is None:
                    raise ValueError(f"{line.where}: the split is {line.values['split']!r}; expected train or val")
                clip_id = line.values["fname"]
                labels = [label.strip() for label in line.values["labels"].split(",") if label.strip()]
                license = clips_info.get(clip_id, {}).get("license", "unknown (Freesound)")
                clip = Clip(clip_id, caption_classes(labels), f"freesound:{clip_id}", license, labels)
                collection.add(split, clip, clip_id, self.config.recordings.named([clip_id]))
        return collection
