"""Any dataset that the `datasets` library reads, with a column of recordings and columns of captions.

`load_splits("hf", data_dir="user/name")` reads a Hub id or a folder of files, as `load_dataset` does, or the output of
`save_to_disk`. The recordings are not copied: rows contain the same Arrow data under the names of the schema. Several
rows of one recording, as in datasets with one row per caption, become one row with all captions. With `streaming=True`,
`stream_sources.load_parquet` reads the row groups of Parquet files on demand.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.compute as pc

from ..schema import FILE_SOURCE, SPLIT_NAMES, features
from .captions import check_merged_languages, read_caption_columns

logger = logging.getLogger(__name__)

_CAPTION_COLUMNS = ("caption", "captions", "text", "sentence", "raw_text")
_NUMBERED_COLUMN = re.compile(r"captions?_\d+")
_LANGUAGE_OF_COLUMN = re.compile(r"captions?_([a-z]{3})")


@dataclass
class HubDatasetConfig:
    """Location of a dataset, and the content of its columns.

    Attributes:
        data_dir: Hub id, folder that `load_dataset` reads, or output folder of `save_to_disk`.
        subset: Name of the dataset's configuration, if it has several.
        revision: Branch, tag or commit of the Hub repository.
        audio_column: Column of recordings; by default the only column of type `Audio`, or the column `audio`.
        caption_column: Column of captions: texts, lists of texts, or classes. By default `caption` or `captions` with
            `caption_1`, `caption_2` and so on, else `text`, `sentence` or `raw_text`. Columns such as `caption_fra` are
            also read.
        caption_language: ISO 639-3 code of these captions.
        caption_columns: All columns of captions with their languages, such as `deu=Beschreibung eng=English`. Replaces
            `caption_column` and `caption_language`; other columns of captions are ignored.
        label_column: Column of classes: a class, a text or a list of texts.
        validation_fraction: Fraction of the training split to draw for validation if there is no such split.
        test_fraction: Fraction to draw for testing, in the same way.
        seed: Seed of the draw.
    """

    data_dir: str | None = None
    subset: str | None = None
    revision: str | None = None
    audio_column: str | None = None
    caption_column: str | None = None
    caption_language: str = "eng"
    caption_columns: Sequence[str] | Mapping[str, str] = ()
    label_column: str | None = None
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.data_dir is None:
            raise ValueError("hf requires data_dir: a Hub id, or a folder that load_dataset or load_from_disk reads")


class HubDataset:
    """Dataset of the `datasets` library as rows: its splits, and missing ones drawn from its training split.

    `HubDataset(data_dir="user/name").download_and_prepare()`, then `.as_dataset()`. Rows of one recording become one
    row; rows without captions are left out.
    """

    BUILDER_CONFIG_CLASS = HubDatasetConfig

    def __init__(self, cache_dir: str | None = None, **config: Any) -> None:
        self.config = HubDatasetConfig(**config)
        self.cache_dir = cache_dir
        self._left_out: list[str] = []
        self._splits: dict[str, datasets.Dataset] = {}

    @property
    def origin(self) -> str:
        """Id of the dataset, or name of its folder."""
        return get_origin(str(self.config.data_dir))

    def download_and_prepare(self) -> None:
        """Read the dataset.

        Raises:
            ValueError: See `Columns`.
        """
        name = str(self.config.data_dir)
        folder = Path(name).expanduser()
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            path = str(folder) if folder.is_dir() else name
            loaded = datasets.load_dataset(
                path, self.config.subset, revision=self.config.revision, cache_dir=self.cache_dir
            )

        splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else dict(loaded)
        names = name_splits(splits)
        for split, rows in splits.items():
            self._splits[names[split]] = self._rows(split, rows)
        self._draw()

    def as_dataset(self) -> datasets.DatasetDict:
        """Return all splits."""
        return datasets.DatasetDict(self._splits)

    def report(self) -> dict[str, Any]:
        """Return the ids of the rows without captions as "left_out"; "missing" is empty."""
        return {"missing": [], "left_out": {"no caption": self._left_out} if self._left_out else {}}

    def _draw(self) -> None:
        """Draw missing splits from the training split."""
        for split in ("test", "validation"):
            fraction = getattr(self.config, f"{split}_fraction")
            if split not in self._splits and "train" in self._splits and fraction > 0:
                parts = self._splits["train"].train_test_split(test_size=fraction, seed=self.config.seed)
                self._splits["train"], self._splits[split] = parts["train"], parts["test"]

    def _rows(self, split: str, rows: datasets.Dataset) -> datasets.Dataset:
        """Convert the rows of a split to the schema, without copying the recordings."""
        columns = Columns(rows.features, self.config)
        rows = rows.flatten_indices() if rows._indices is not None else rows
        try:
            audio = rows.select_columns(columns.audio).cast_column(columns.audio, datasets.Audio(decode=False))
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"column {columns.audio!r} holds {rows.features[columns.audio]}, not recordings; "
                "audio_column can name one of datasets.Audio, paths or bytes"
            ) from error
        audio = audio if columns.audio == "audio" else audio.rename_column(columns.audio, "audio")
        stored = audio.data.column("audio")
        paths = pc.struct_field(stored, "path").to_pylist()

        described = []
        texts = rows.select_columns(columns.described)
        for index, (row, path) in enumerate(zip(texts, paths, strict=True)):
            described.append(columns.describe(row, path, f"{split}-{index:06d}"))

        first_rows: dict[Hashable, int] = {}
        for index, recording in enumerate(identify_recordings(stored)):
            first = first_rows.setdefault(recording, index)
            if first != index:
                _add_captions(described[first], described[index])
        if len(first_rows) < len(described):
            logger.info("%s: %d rows hold the captions of %d recordings", split, len(described), len(first_rows))

        languages = list(dict.fromkeys(columns.languages.values()))
        table = datasets.Dataset.from_list(described, features=features(languages))
        joined = datasets.concatenate_datasets([table, audio], axis=1)

        captioned = []
        for index in first_rows.values():
            if any(described[index]["captions"].values()):
                captioned.append(index)
            else:
                self._left_out.append(described[index]["clip_id"])
        return joined if len(captioned) == len(described) else joined.select(captioned)


class Columns:
    """Names of the columns with recordings, captions and classes.

    Args:
        types: Features of the dataset.
        config: Names of columns, if they are not the usual ones.

    Attributes:
        audio: Column of recordings.
        languages: Language of each column of captions.
        label: Column of classes, or None.

    Raises:
        ValueError: There is no column of recordings or captions, a named column is missing, captions are not text, or
            captions of columns with and without a language would merge.
    """

    def __init__(self, types: datasets.Features, config: HubDatasetConfig) -> None:
        self.audio = _find_audio(types, config.audio_column)
        self.languages = _find_captions(types, config)
        self.label = config.label_column or None
        self._types = types

    @property
    def described(self) -> list[str]:
        """Columns that `describe` reads."""
        return list(dict.fromkeys([*self.languages, *filter(None, [self.label])]))

    def describe(self, row: Mapping[str, Any], path: str | None, clip_id: str) -> dict[str, Any]:
        """Convert the texts of a row to the schema, without its recording.

        Args:
            row: Values of the columns of captions and classes.
            path: Name of the recording in the dataset.
            clip_id: Id of the clip.
        """
        captions: dict[str, list[str]] = {language: [] for language in self.languages.values()}
        for column, language in self.languages.items():
            captions[language] += _as_texts(row[column], self._types[column])
        return {
            "clip_id": clip_id,
            "audio_path": path or clip_id,
            "captions": captions,
            "labels": [] if self.label is None else _as_texts(row[self.label], self._types.get(self.label)),
            "events": [],
            "source": f"{FILE_SOURCE}{path or clip_id}",
            "license": "",
        }


def _find_audio(types: datasets.Features, named: str | None) -> str:
    if named is None:
        audio = [name for name, kind in types.items() if isinstance(kind, datasets.Audio)]
        named = audio[0] if len(audio) == 1 else "audio"
    if named not in types:
        raise ValueError(f"there is no column {named!r} of recordings; set audio_column to one of {list(types)}")
    return named


def _find_captions(types: datasets.Features, config: HubDatasetConfig) -> dict[str, str]:
    """Return the columns of captions with their languages."""
    columns = read_caption_columns(config.caption_columns)
    if not columns:
        if config.caption_column:
            unmarked = [config.caption_column]
        else:
            numbered = [name for name in types if _NUMBERED_COLUMN.fullmatch(name) and _is_text(types[name])]
            unmarked = [name for name in _CAPTION_COLUMNS[:2] if name in types][:1] + numbered
            unmarked = unmarked or [name for name in _CAPTION_COLUMNS if name in types][:1]

        marked = {}
        for name in types:
            match = _LANGUAGE_OF_COLUMN.fullmatch(name)
            if match and name not in unmarked and _is_text(types[name]):
                marked[name] = match[1]
        check_merged_languages(unmarked, config.caption_language, marked)
        columns = {**dict.fromkeys(unmarked, config.caption_language), **marked}

    texts = [name for name in types if _is_text(types[name])]
    missing = [name for name in columns if name not in types]
    if missing or not columns:
        absent = f"{', '.join(missing)}" if missing else "of captions"
        raise ValueError(f"there is no column {absent}; set caption_column to one of {texts}")
    for name in columns:
        if not _is_text(types[name]):
            raise ValueError(
                f"column {name!r} contains {types[name]}; captions must be text: set caption_column to one of {texts}"
            )
    return columns


def _item_type(kind: Any) -> Any:
    """Return the type of a column, or of its items if it contains lists."""
    return kind[0] if isinstance(kind, list) else getattr(kind, "feature", kind)


def _is_text(kind: Any) -> bool:
    """Return whether a column contains texts, classes with names, or lists of them."""
    item = _item_type(kind)
    is_text = isinstance(item, datasets.Value) and item.dtype in ("string", "large_string", "string_view", "null")
    return is_text or isinstance(item, datasets.ClassLabel)


def name_splits(names: Iterable[str]) -> dict[str, str]:
    """Map split names to those of the schema; a name stays if another split already has its new name.

    `development` becomes train if there is no other training split, as in Clotho and DCASE, else validation.

    >>> name_splits(["development", "evaluation"]), name_splits(["train", "dev", "validation"])
    ({'development': 'train', 'evaluation': 'test'}, {'train': 'train', 'dev': 'dev', 'validation': 'validation'})
    """
    names = list(names)
    standard = {name: SPLIT_NAMES.get(name.casefold(), name) for name in names}
    if "train" not in standard.values():
        for name in names:
            if name.casefold() == "development":
                standard[name] = "train"

    taken = set(names)
    named = {}
    for name in names:
        named[name] = name if standard[name] in taken else standard[name]
        taken.add(named[name])
    return named


def identify_recordings(stored: pyarrow.ChunkedArray) -> list[Hashable]:
    """Return a key for each row; rows with the same recording have equal keys.

    Args:
        stored: Structs of `bytes` and `path`. Recordings are compared by their bytes, or without bytes by their path.
            Names alone are not reliable, because uploads often store only the last part of a path.
    """
    paths = pc.struct_field(stored, "path").to_pylist()
    contents = pc.struct_field(stored, "bytes")
    lengths = pc.binary_length(contents).to_pylist()
    counts = Counter(lengths)

    keys: list[Hashable] = []
    for index, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        if length is not None and counts[length] > 1:  # a unique length needs no hash
            keys.append(hashlib.blake2b(contents[index].as_buffer(), digest_size=16).digest())
        else:
            keys.append(index if length is not None or path is None else path)
    return keys


def _add_captions(row: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add the captions and labels of another row with the same recording, without repeats."""
    for language, texts in other["captions"].items():
        row["captions"][language] = list(dict.fromkeys([*row["captions"][language], *texts]))
    row["labels"] = list(dict.fromkeys([*row["labels"], *other["labels"]]))


def as_rows(rows: datasets.Dataset, **columns: Any) -> datasets.Dataset:
    """Convert a dataset with a column of recordings and one of captions to rows of the schema.

    Args:
        rows: The dataset.
        **columns: `audio_column`, `caption_column`, `caption_language`, `caption_columns` and `label_column`, see
            `HubDatasetConfig`.

    Raises:
        ValueError: See `Columns`.
    """
    return HubDataset(data_dir="", **columns)._rows("clip", rows)


def get_origin(data_dir: str) -> str:
    """Return the name of a dataset: its Hub id, or the name of its folder."""
    folder = Path(data_dir).expanduser()
    return folder.resolve().name if folder.is_dir() else data_dir


def _as_texts(value: Any, kind: Any) -> list[str]:
    """Return one or several texts or class names as a list, without blank ones."""
    item, texts = _item_type(kind), []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, datasets.ClassLabel) and each is not None:
            each = item.int2str(each) if each >= 0 else None  # -1: no class
        if each is not None and str(each).strip():
            texts.append(str(each).strip())
    return texts
