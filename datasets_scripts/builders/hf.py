"""Any dataset that the `datasets` library reads, with a column of recordings and one of captions.

`load_splits("hf", data_dir="user/name")` takes what `load_dataset` takes, an id of the Hub or a folder of files, or
what `save_to_disk` wrote. The recordings stay where they are: rows hold the same Arrow data under the schema's names.
With `streaming=True` the row groups of its Parquet files are read as they are needed: `stream.load_parquet`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc

from ..schema import FILE_SOURCE, features

_CAPTION_COLUMNS = ("caption", "captions", "text", "sentence", "raw_text")
_LANGUAGE_OF_COLUMN = re.compile(r"captions?_([a-z]{3})")
SPLITS = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation", "testing": "test"}
"""The schema's names of splits that are called something else."""


@dataclass
class HubDatasetConfig:
    """Which dataset to read, and what its columns mean.

    Attributes:
        data_dir: An id of the Hub, a folder that `load_dataset` reads, or one that `save_to_disk` wrote.
        subset: The name of the dataset's configuration, where it has several.
        revision: A branch, tag or commit of the Hub's repository.
        audio_column: The column of the recordings; by default the only one of type `Audio`, or the one called audio.
        caption_column: The column of the captions, a text or a list of texts; `caption_fra` and the like are read too.
        caption_language: The language of `caption_column`, as ISO 639-3 code.
        label_column: The column of the classes, a class, a text or a list of texts.
        validation_fraction: The part of the training split that is drawn for validation where there is no such split.
        test_fraction: The part that is drawn for testing, likewise.
        seed: The seed of the draw.
    """

    data_dir: str | None = None
    subset: str | None = None
    revision: str | None = None
    audio_column: str | None = None
    caption_column: str | None = None
    caption_language: str = "eng"
    label_column: str | None = None
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.data_dir is None:
            raise ValueError(
                "hf needs data_dir: an id of the Hub, or a folder that load_dataset or load_from_disk reads"
            )


class HubDataset:
    """A dataset of the `datasets` library as rows: the splits that it has, and those drawn from its training split.

    `HubDataset(data_dir="user/name").download_and_prepare()`, then `.as_dataset()`. Rows without captions are left out.
    """

    BUILDER_CONFIG_CLASS = HubDatasetConfig

    def __init__(self, cache_dir: str | None = None, **config: Any) -> None:
        self.config = HubDatasetConfig(**config)
        self.cache_dir = cache_dir
        self._left_out: list[str] = []
        self._splits: dict[str, datasets.Dataset] = {}

    @property
    def origin(self) -> str:
        """The id of the dataset, or the name of its folder."""
        return get_origin(str(self.config.data_dir))

    def download_and_prepare(self) -> None:
        """Reads the dataset.

        Raises:
            ValueError: No column holds recordings, none captions, or the one that is named is not there.
        """
        name = str(self.config.data_dir)
        folder = Path(name).expanduser()
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = datasets.load_from_disk(str(folder))
        else:
            place = str(folder) if folder.is_dir() else name
            found = datasets.load_dataset(
                place, self.config.subset, revision=self.config.revision, cache_dir=self.cache_dir
            )

        splits = {"train": found} if isinstance(found, datasets.Dataset) else dict(found)
        for split, rows in splits.items():
            self._splits[SPLITS.get(split, split)] = self._rows(split, rows)
        self._draw()

    def as_dataset(self) -> datasets.DatasetDict:
        """All splits."""
        return datasets.DatasetDict(self._splits)

    def report(self) -> dict[str, Any]:
        """Nothing is missing; "left_out" names the rows without a caption."""
        return {"missing": [], "left_out": {"no caption": self._left_out} if self._left_out else {}}

    def _draw(self) -> None:
        """Draws the splits that are missing from the training split."""
        for split in ("test", "validation"):
            fraction = getattr(self.config, f"{split}_fraction")
            if split not in self._splits and "train" in self._splits and fraction > 0:
                parts = self._splits["train"].train_test_split(test_size=fraction, seed=self.config.seed)
                self._splits["train"], self._splits[split] = parts["train"], parts["test"]

    def _rows(self, split: str, rows: datasets.Dataset) -> datasets.Dataset:
        """The rows of a split under the names of the schema, with the recordings as they are stored."""
        columns = Columns(rows.features, self.config)
        rows = rows.flatten_indices() if rows._indices is not None else rows
        audio = rows.select_columns(columns.audio).cast_column(columns.audio, datasets.Audio(decode=False))
        audio = audio if columns.audio == "audio" else audio.rename_column(columns.audio, "audio")
        paths = pc.struct_field(audio.data.column("audio"), "path").to_pylist()

        described = []
        for index, (row, path) in enumerate(zip(rows.remove_columns(columns.audio), paths, strict=True)):
            described.append(columns.describe(row, path, f"{split}-{index:06d}"))
        languages = list(dict.fromkeys(columns.languages.values()))
        table = datasets.Dataset.from_list(described, features=features(languages))
        joined = datasets.concatenate_datasets([table, audio], axis=1)

        kept = []
        for index, row in enumerate(described):
            if any(row["captions"].values()):
                kept.append(index)
            else:
                self._left_out.append(row["clip_id"])
        return joined if len(kept) == len(described) else joined.select(kept)


class Columns:
    """Which columns of a dataset hold recordings, captions and classes.

    Args:
        types: The features of the dataset.
        config: Names those that have other names than usual.

    Attributes:
        audio: The column of the recordings.
        languages: The language of each column of captions.
        label: The column of the classes, if any.

    Raises:
        ValueError: No column holds recordings, none captions, or the one that is named is not there.
    """

    def __init__(self, types: datasets.Features, config: HubDatasetConfig) -> None:
        self.audio = _find_audio(types, config.audio_column)
        self.languages = _find_captions(types, config)
        self.label = config.label_column
        self._label_type = types.get(config.label_column)

    def describe(self, row: Mapping[str, Any], path: str | None, clip_id: str) -> dict[str, Any]:
        """A row of the schema, without its recording.

        Args:
            row: The values of the columns of captions and classes.
            path: The recording's name, as the dataset has it.
            clip_id: What the row will be called.
        """
        captions: dict[str, list[str]] = {language: [] for language in self.languages.values()}
        for column, language in self.languages.items():
            captions[language] += _as_texts(row[column])

        labels = None if self.label is None else row[self.label]
        kind = getattr(self._label_type, "feature", self._label_type)  # of a list, that of its items
        if isinstance(kind, datasets.ClassLabel) and labels is not None:
            labels = kind.int2str(labels)
        return {
            "clip_id": clip_id,
            "audio_path": path or clip_id,
            "captions": captions,
            "labels": _as_texts(labels),
            "events": [],
            "source": f"{FILE_SOURCE}{path or clip_id}",
            "license": "",
        }


def _find_audio(types: datasets.Features, named: str | None) -> str:
    if named is None:
        found = [name for name, kind in types.items() if isinstance(kind, datasets.Audio)]
        named = found[0] if len(found) == 1 else "audio"
    if named not in types:
        raise ValueError(f"there is no column {named!r} of recordings; audio_column can name {list(types)}")
    return named


def _find_captions(types: datasets.Features, config: HubDatasetConfig) -> dict[str, str]:
    """The columns of captions, each with its language."""
    columns = {}
    named = config.caption_column or next((name for name in _CAPTION_COLUMNS if name in types), None)
    if named is not None:
        columns[named] = config.caption_language
    for name in types:
        match = _LANGUAGE_OF_COLUMN.fullmatch(name)
        if match and name not in columns:
            columns[name] = match[1]

    if not columns or not columns.keys() <= types.keys():
        raise ValueError(f"there is no column {named or 'of captions'}; caption_column can name {list(types)}")
    return columns


def as_rows(rows: datasets.Dataset, **columns: Any) -> datasets.Dataset:
    """Rows of the schema from a dataset with a column of recordings and one of captions.

    Args:
        rows: The dataset.
        **columns: `audio_column`, `caption_column`, `caption_language` and `label_column`, as `HubDatasetConfig`.

    Raises:
        ValueError: No column holds recordings, none captions, or the one that is named is not there.
    """
    return HubDataset(data_dir="", **columns)._rows("clip", rows)


def get_origin(data_dir: str) -> str:
    """What a dataset is called: its id on the Hub, or the name of its folder."""
    folder = Path(data_dir).expanduser()
    return folder.resolve().name if folder.is_dir() else data_dir


def _as_texts(value: Any) -> list[str]:
    """A text, or several, without the blank ones."""
    texts = value if isinstance(value, (list, tuple)) else [value]
    return [str(text).strip() for text in texts if text is not None and str(text).strip()]
