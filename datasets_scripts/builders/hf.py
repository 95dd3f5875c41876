"""Any dataset that the `datasets` library reads, with a column of recordings and columns of captions.

`load_splits("hf", data_dir="user/name")` takes what `load_dataset` takes, an id of the Hub or a folder of files, or
what `save_to_disk` wrote. The recordings stay where they are: rows hold the same Arrow data under the schema's names.
Several rows of one recording, as of datasets with one row per caption, become one row with all captions.
With `streaming=True` the row groups of its Parquet files are read as they are needed: `stream.load_parquet`.
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
    """Which dataset to read, and what its columns mean.

    Attributes:
        data_dir: An id of the Hub, a folder that `load_dataset` reads, or one that `save_to_disk` wrote.
        subset: The name of the dataset's configuration, where it has several.
        revision: A branch, tag or commit of the Hub's repository.
        audio_column: The column of the recordings; by default the only one of type `Audio`, or the one called audio.
        caption_column: The column of the captions: texts, lists of texts or classes. By default `caption` or `captions`
            with `caption_1`, `caption_2` and so on, else `text`. `caption_fra` and the like are read too.
        caption_language: The language of these captions, as ISO 639-3 code.
        caption_columns: All columns of captions with their languages, such as `deu=Beschreibung eng=English`, in place
            of `caption_column` and `caption_language`; no other columns of captions are read then.
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
    caption_columns: Sequence[str] | Mapping[str, str] = ()
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

    `HubDataset(data_dir="user/name").download_and_prepare()`, then `.as_dataset()`. Rows of one recording become one
    row, and those without captions are left out.
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
            ValueError: As `Columns`.
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
        names = name_splits(splits)
        for split, rows in splits.items():
            self._splits[names[split]] = self._rows(split, rows)
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

        kept = []
        for index in first_rows.values():
            if any(described[index]["captions"].values()):
                kept.append(index)
            else:
                self._left_out.append(described[index]["clip_id"])
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
        ValueError: No column holds recordings or captions, a named column is missing, captions are not text, or
            captions of an unnamed language would join those of a named one.
    """

    def __init__(self, types: datasets.Features, config: HubDatasetConfig) -> None:
        self.audio = _find_audio(types, config.audio_column)
        self.languages = _find_captions(types, config)
        self.label = config.label_column
        self._types = types

    @property
    def described(self) -> list[str]:
        """The columns that `describe` reads."""
        return list(dict.fromkeys([*self.languages, *filter(None, [self.label])]))

    def describe(self, row: Mapping[str, Any], path: str | None, clip_id: str) -> dict[str, Any]:
        """A row of the schema, without its recording.

        Args:
            row: The values of the columns of captions and classes.
            path: The recording's name, as the dataset has it.
            clip_id: What the row will be called.
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
        found = [name for name, kind in types.items() if isinstance(kind, datasets.Audio)]
        named = found[0] if len(found) == 1 else "audio"
    if named not in types:
        raise ValueError(f"there is no column {named!r} of recordings; audio_column can name {list(types)}")
    return named


def _find_captions(types: datasets.Features, config: HubDatasetConfig) -> dict[str, str]:
    """The columns of captions, each with its language."""
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
        wanted = f"{', '.join(missing)}" if missing else "of captions"
        raise ValueError(f"there is no column {wanted}; caption_column can name {texts}")
    for name in columns:
        if not _is_text(types[name]):
            raise ValueError(f"column {name!r} holds {types[name]}; captions are text: caption_column can name {texts}")
    return columns


def _item_type(kind: Any) -> Any:
    """The type of a column's items, of lists that of theirs."""
    return kind[0] if isinstance(kind, list) else getattr(kind, "feature", kind)


def _is_text(kind: Any) -> bool:
    """Whether a column holds texts, classes with names, or lists of them."""
    item = _item_type(kind)
    is_text = isinstance(item, datasets.Value) and item.dtype in ("string", "large_string", "string_view", "null")
    return is_text or isinstance(item, datasets.ClassLabel)


def name_splits(names: Iterable[str]) -> dict[str, str]:
    """Map the names of splits to those of the schema; a name stays where another split has its new name already.

    `development` is the training split of datasets without any other, as in Clotho and DCASE, else validation.

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
    """Return a key for each row; rows that hold the same recording have equal keys.

    Args:
        stored: Structs of `bytes` and `path`. Recordings are equal by their bytes, without bytes by their path: the
            name alone is no sign, since uploads often keep only the last part of it.
    """
    paths = pc.struct_field(stored, "path").to_pylist()
    contents = pc.struct_field(stored, "bytes")
    lengths = pc.binary_length(contents).to_pylist()
    counts = Counter(lengths)

    keys: list[Hashable] = []
    for index, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        if length is not None and counts[length] > 1:  # no other recording is as long as the others
            keys.append(hashlib.blake2b(contents[index].as_buffer(), digest_size=16).digest())
        else:
            keys.append(index if length is not None or path is None else path)
    return keys


def _add_captions(row: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Adds the captions and labels of another row of the same recording, each once."""
    for language, texts in other["captions"].items():
        row["captions"][language] = list(dict.fromkeys([*row["captions"][language], *texts]))
    row["labels"] = list(dict.fromkeys([*row["labels"], *other["labels"]]))


def as_rows(rows: datasets.Dataset, **columns: Any) -> datasets.Dataset:
    """Rows of the schema from a dataset with a column of recordings and one of captions.

    Args:
        rows: The dataset.
        **columns: `audio_column`, `caption_column`, `caption_language`, `caption_columns` and `label_column`, as
            `HubDatasetConfig`.

    Raises:
        ValueError: As `Columns`.
    """
    return HubDataset(data_dir="", **columns)._rows("clip", rows)


def get_origin(data_dir: str) -> str:
    """What a dataset is called: its id on the Hub, or the name of its folder."""
    folder = Path(data_dir).expanduser()
    return folder.resolve().name if folder.is_dir() else data_dir


def _as_texts(value: Any, kind: Any) -> list[str]:
    """A text or class, or several, without the blank ones; classes by their names."""
    item, texts = _item_type(kind), []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, datasets.ClassLabel) and each is not None:
            each = item.int2str(each) if each >= 0 else None  # -1: without a class
        if each is not None and str(each).strip():
            texts.append(str(each).strip())
    return texts
