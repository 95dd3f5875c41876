"""Load any dataset that the `datasets` library supports, with an audio column and one or more caption columns.

`load_splits("hf", data_dir="user/name")` loads a Hub id or a folder, like `datasets.load_dataset`, or the output of
`save_to_disk`. The Arrow data of the recordings is not copied; only the columns are renamed.
"""

import hashlib
import io
import logging
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute as pc
import soundfile

from ..remote_files import local_folder
from ..schema import CHANNEL, FILE_SOURCE, SEGMENT_COLUMNS, SPLIT_NAMES, check_rows, features
from .captions import check_merged_languages, merge_captions, read_caption_columns
from .metadata import find_segment_columns, read_segment

logger = logging.getLogger(__name__)

_CAPTION_COLUMNS = ("caption", "captions", "text", "sentence", "raw_text")
_NUMBERED_COLUMN = re.compile(r"captions?_\d+")
_LANGUAGE = re.compile(r"[a-z]{3}")
_LANGUAGE_COLUMN = re.compile(r"captions?_[a-z]{3}")


@dataclass
class HubDatasetConfig:
    """Location and columns of a Hub dataset.

    Attributes:
        data_dir: Hub dataset id, folder for `load_dataset`, output folder of `save_to_disk`, or fsspec address of one
            of these folders, which is downloaded.
        subset: Name of the dataset configuration, if the dataset has several.
        revision: Branch, tag or commit of the Hub repository.
        audio_column: Column of `Audio`, paths, bytes, or decoded audio; defaults to the only column of type `Audio`, or
            to `audio`. With columns `start_seconds` and `end_seconds` (or `start` and `end`), a row is a part of a
            recording.
        caption_column: Caption column with texts, lists of texts, either by language, or class labels. Default:
            `caption` or `captions`, together with `caption_1`, `caption_2` and so on; if there are none, `text`,
            `sentence` or `raw_text`. Columns such as `caption_fra` are also read.
        caption_language: Language of the caption columns that have no language in their name, as ISO 639-3 code.
        caption_columns: All caption columns with their languages, such as `deu=Beschreibung eng=English`. Overrides
            `caption_column` and `caption_language`; other caption columns are ignored.
        label_column: Column with a class label, a text or a list of texts.
        validation_fraction: Fraction of the training split to hold out for validation, if there is no validation split.
        test_fraction: Fraction to hold out for testing, if there is no test split.
        seed: Random seed for the held-out splits.
        channel: Channel of each recording to use, from 0. None: the mean of all channels.
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
    channel: int | None = None

    def __post_init__(self) -> None:
        if self.data_dir is None:
            raise ValueError("hf requires data_dir: a Hub id, or a folder that load_dataset or load_from_disk reads")


_RECORDINGS: tuple[Any, ...] = (datasets.Audio, datasets.Video)


class HubDataset:
    """Builder for datasets that the `datasets` library supports.

    Rows with the same recording are merged into one row, and rows without captions are skipped. If there is no
    validation or test split, a part of the training split is held out.
    """

    BUILDER_CONFIG_CLASS = HubDatasetConfig

    def __init__(self, cache_dir: str | None = None, **config: Any) -> None:
        self.config = HubDatasetConfig(**config)
        self.cache_dir = cache_dir
        self._left_out: list[str] = []
        self._missing: list[str] = []
        self._splits: dict[str, datasets.Dataset] = {}

    @property
    def origin(self) -> str:
        """Hub id of the dataset, or name of its folder."""
        return get_origin(str(self.config.data_dir))

    def download_and_prepare(self) -> None:
        """Load the dataset, convert all splits to rows, and hold out the missing splits."""
        config, folder = self.config, local_folder(str(self.config.data_dir))
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            path = str(folder if folder.is_dir() else config.data_dir)
            with _storing_audio_as_paths():
                loaded = datasets.load_dataset(path, config.subset, revision=config.revision, cache_dir=self.cache_dir)

        splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else dict(loaded)
        for split, name in name_splits(splits).items():
            self._splits[name] = self._rows(split, splits[split])

        for split in ("test", "validation"):
            fraction = getattr(config, f"{split}_fraction")
            if split not in self._splits and "train" in self._splits and fraction > 0:
                parts = self._splits["train"].train_test_split(test_size=fraction, seed=config.seed)
                self._splits["train"], self._splits[split] = parts["train"], parts["test"]

    def as_dataset(self) -> datasets.DatasetDict:
        """Return all splits as a `DatasetDict`."""
        return datasets.DatasetDict(self._splits)

    def report(self) -> dict[str, Any]:
        """Return the ids of clips without audio or captions, in the format of `RowBuilder.report`."""
        return {"missing": self._missing, "left_out": {"no caption": self._left_out} if self._left_out else {}}

    def _rows(self, split: str, rows: datasets.Dataset) -> datasets.Dataset:
        """Convert a split to the format of `schema.Row`, without copying the recordings."""
        columns = Columns(rows.features, self.config)
        rows = rows.flatten_indices() if rows._indices is not None else rows
        stored = as_stored_audio(rows.select_columns(columns.audio).data.column(columns.audio), columns.audio)
        if self.config.data_dir:
            stored = _resolve_paths(stored, Path(self.config.data_dir).expanduser().absolute())
        # The feature of `Audio` would need FFmpeg to store a path, but not to describe one that is stored.
        kind = datasets.Features({"audio": datasets.Audio(decode=False)})
        audio = datasets.Dataset(pyarrow.table({"audio": stored}).cast(kind.arrow_schema))
        audio = datasets.Dataset(audio.data, info=datasets.DatasetInfo(features=kind))
        paths = pc.struct_field(stored, "path").to_pylist()
        is_null = pc.is_null(stored).to_pylist()

        described = []
        texts = rows.select_columns(columns.described)
        for index, (row, path) in enumerate(zip(texts, paths, strict=True)):
            described.append(columns.describe(row, path, f"{split}-{index:06d}"))

        # Merge rows with the same recording: add their captions and labels to the first such row, without repeats.
        languages = list(dict.fromkeys(columns.languages.values()))
        recordings: dict[Hashable, list[int]] = {}
        for index, recording in enumerate(identify_recordings(stored)):
            segment = tuple(described[index].get(name) for name in SEGMENT_COLUMNS)
            recordings.setdefault((recording, segment), []).append(index)
        # such as "audio.wav", which does not identify a recording
        if len(recordings) > 1 and len(set(paths)) == 1 and not columns.segments:
            for row in described:
                row["source"] = f"{FILE_SOURCE}{row['clip_id']}"
        for indices in recordings.values():
            if len(indices) > 1:
                merged = [described[index] for index in indices]
                labels = chain.from_iterable(row["labels"] for row in merged)
                merged[0]["captions"] = merge_captions([row["captions"] for row in merged], languages)
                merged[0]["labels"] = list(dict.fromkeys(labels))
        if len(recordings) < len(described):
            logger.info("%s: merged %d rows to one per recording, %d rows", split, len(described), len(recordings))

        types = features(languages, bool(columns.segments), bool(columns.channel))
        table = datasets.Dataset.from_list(described, features=types)
        joined = datasets.concatenate_datasets([table, audio], axis=1)

        captioned = []
        for index, *_ in recordings.values():
            if is_null[index]:
                self._missing.append(described[index]["clip_id"])
            elif any(described[index]["captions"].values()):
                captioned.append(index)
            else:
                self._left_out.append(described[index]["clip_id"])
        return joined if len(captioned) == len(described) else joined.select(captioned)


class Columns:
    """Names of the audio, label and caption columns of a dataset; `languages` is `{caption column: language}`.

    Names that are not set in `config` are detected. ValueError is raised if a column is missing, if a caption column
    does not contain text, or if columns such as `caption` and `caption_eng` have the same language.
    """

    def __init__(self, types: datasets.Features, config: HubDatasetConfig) -> None:
        audio = [name for name, kind in types.items() if isinstance(kind, _RECORDINGS)]
        self.audio = config.audio_column or (audio[0] if len(audio) == 1 else "audio")
        if self.audio not in types:
            raise ValueError(f"there is no column {self.audio!r} of audio; set audio_column to one of {list(types)}")
        self.languages = _find_captions(types, config)
        self.label = config.label_column or None
        if self.label is not None and self.label not in types:
            raise ValueError(f"there is no column {self.label!r} of labels; set label_column to one of {list(types)}")
        self._types = types
        self.channel = {} if config.channel is None else {CHANNEL: config.channel}
        self.segments = find_segment_columns(types)

    @property
    def described(self) -> list[str]:
        """Names of the caption, label and segment columns."""
        return list(dict.fromkeys(filter(None, [*self.caption_columns, self.label, *self.segments.values()])))

    @property
    def caption_columns(self) -> list[str]:
        """Names of the columns that contain captions."""
        return list(
            dict.fromkeys(name.partition(".")[0] if name not in self._types else name for name in self.languages)
        )

    def describe(self, row: Mapping[str, Any], path: str | None, clip_id: str) -> dict[str, Any]:
        """Convert a row to the format of `schema.Row`, without the audio. `path` is the recording's name, or None."""
        captions: dict[str, list[str]] = {language: [] for language in self.languages.values()}
        for column, language in self.languages.items():
            kind = self._types.get(column)
            if kind is None:  # "captions.fra": a key of a column of captions by language
                whole, _, key = column.partition(".")
                captions[language] += _as_texts((row[whole] or {}).get(key), self._types[whole][key])
            else:
                captions[language] += _as_texts(row[column], kind)
        path = clip_id if path is None else path
        segment = dict.fromkeys(SEGMENT_COLUMNS) if self.segments else {}
        if self.segments:
            values = {name: row[column] for name, column in self.segments.items()}
            segment = dict(zip(SEGMENT_COLUMNS, read_segment(values, clip_id), strict=True))
        return {
            "clip_id": clip_id,
            "audio_path": path,
            "captions": captions,
            "labels": [] if self.label is None else _as_texts(row[self.label], self._types.get(self.label)),
            "events": [],
            "source": f"{FILE_SOURCE}{path}",
            "license": "",
            **segment,
            **self.channel,
        }


def _find_captions(types: datasets.Features, config: HubDatasetConfig) -> dict[str, str]:
    """Return the caption columns as `{column: language}`."""
    columns = read_caption_columns(config.caption_columns)
    texts = [name for name in types if _is_text(types[name])]
    if not columns:
        if config.caption_column:
            unmarked = [config.caption_column]
        else:
            numbered = [name for name in texts if _NUMBERED_COLUMN.fullmatch(name)]
            unmarked = [name for name in _CAPTION_COLUMNS[:2] if name in types][:1] + numbered
            unmarked = unmarked or [name for name in _CAPTION_COLUMNS if name in types][:1]

        marked = {name: name[-3:] for name in texts if _LANGUAGE_COLUMN.fullmatch(name) and name not in unmarked}
        check_merged_languages(unmarked, config.caption_language, marked)
        columns = {**dict.fromkeys(unmarked, config.caption_language), **marked}
        for name in unmarked:
            if isinstance(types.get(name), dict) and all(map(_LANGUAGE.fullmatch, types[name])):
                del columns[name]
                columns |= {f"{name}.{key}": key for key, kind in types[name].items() if _is_text(kind)}
        texts += [name for name in columns if "." in name]

    missing = [name for name in columns if name not in types and name not in texts]
    if missing or not columns:
        absent = ", ".join(missing) or "of captions"
        raise ValueError(f"there is no column {absent}; set caption_column to one of {texts}")
    for name in columns:
        if name not in texts:
            advice = f"set caption_column to one of {texts}"
            if isinstance(types[name], dict):
                keys = list(types[name])
                advice = f"rename its keys {keys} to ISO 639-3 codes of languages, such as 'eng', or {advice}"
            raise ValueError(f"column {name!r} contains {types[name]}, not text; {advice}")
    return columns


def as_stored_audio(column: pyarrow.ChunkedArray, name: str) -> pyarrow.ChunkedArray:
    """Convert a column of recordings to structs of `bytes` and `path`.

    The column may contain such structs, paths, bytes, or decoded audio (structs of `array` and `sampling_rate`), which
    is encoded as WAV of 32-bit floats. Raises ValueError if it contains something else.
    """
    kind = column.type
    kind = getattr(kind, "storage_type", kind)
    stored = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    chunks = []
    for chunk in column.chunks:
        chunk = getattr(chunk, "storage", chunk)
        nulls = pyarrow.nulls(len(chunk), pyarrow.string())
        if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind):
            fields = [pyarrow.nulls(len(chunk), pyarrow.binary()), chunk.cast(pyarrow.string())]
        elif pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
            fields = [chunk.cast(pyarrow.binary()), nulls]
        elif pyarrow.types.is_struct(kind) and {"array", "sampling_rate"} <= {field.name for field in kind}:
            fields = [pyarrow.array([_encode(value) for value in chunk.to_pylist()], pyarrow.binary()), nulls]
            if kind.get_field_index("path") >= 0:
                fields[1] = pc.struct_field(chunk, "path").cast(pyarrow.string())
        elif pyarrow.types.is_struct(kind) and {"bytes", "path"} & {field.name for field in kind}:
            fields = []
            for field in stored:
                exists = kind.get_field_index(field.name) >= 0
                values = pc.struct_field(chunk, field.name) if exists else pyarrow.nulls(len(chunk))
                fields.append(values.cast(field.type))
        else:
            raise ValueError(
                f"column {name!r} contains {kind}; set audio_column to a column of Audio, paths, bytes, or decoded "
                "audio with array and sampling_rate"
            )
        empty = pc.and_(pc.is_null(fields[0]), pc.is_null(fields[1]))
        chunks.append(pyarrow.StructArray.from_arrays(fields, fields=list(stored), mask=empty))
    return pyarrow.chunked_array(chunks, stored)


def _encode(value: Mapping[str, Any] | None) -> bytes | None:
    if value is None or value["array"] is None:
        return None
    content = io.BytesIO()
    samples = np.asarray(value["array"], np.float32)
    samples = samples if samples.ndim == 1 else samples.T if len(samples) < samples.shape[1] else samples
    soundfile.write(content, samples, int(value["sampling_rate"]), format="WAV", subtype="FLOAT")
    return content.getvalue()


@contextmanager
def _storing_audio_as_paths() -> Iterator[None]:
    """Let `datasets` store the paths of a folder of recordings without FFmpeg, which only decoding needs."""
    encoders = {kind: kind.encode_example for kind in _RECORDINGS}

    def encode_example(self: Any, value: Any) -> Any:
        if isinstance(value, (str, Path)):
            return {"bytes": None, "path": str(value)}
        if isinstance(value, bytes):
            return {"bytes": value, "path": None}
        if isinstance(value, dict) and not value.keys() & {"array"}:
            return {"bytes": value.get("bytes"), "path": value.get("path")}
        return encoders[type(self)](self, value)

    for kind in _RECORDINGS:
        kind.encode_example = encode_example
    try:
        yield
    finally:
        for kind, encode in encoders.items():
            kind.encode_example = encode


def _resolve_paths(stored: pyarrow.ChunkedArray, folder: Path) -> pyarrow.ChunkedArray:
    """Replace relative paths of recordings without bytes by paths in `folder`, if such files are there."""
    has_bytes = pc.any(pc.is_valid(pc.struct_field(stored, "bytes"))).as_py()
    if has_bytes or not folder.is_dir():
        return stored
    rows = stored.to_pylist()
    for row in rows:
        if row is not None and (folder / row["path"]).is_file():
            row["path"] = str(folder / row["path"])
    return pyarrow.chunked_array([pyarrow.array(rows, stored.type)])


def _item_type(kind: Any) -> Any:
    """Return the feature type of a column, or the type of the list items if the column contains lists."""
    return kind[0] if isinstance(kind, list) else getattr(kind, "feature", kind)


def _is_text(kind: Any) -> bool:
    item = _item_type(kind)
    is_text = isinstance(item, datasets.Value) and item.dtype in ("string", "large_string", "string_view", "null")
    return is_text or isinstance(item, datasets.ClassLabel)


def name_splits(names: Iterable[str]) -> dict[str, str]:
    """Convert split names to "train", "validation" and "test"; return `{name: standard name}`.

    A split keeps its name if another split already has the standard name. If there is no other training split, as in
    Clotho and DCASE, `development` is the training split; otherwise it is the validation split.

    >>> name_splits(["development", "evaluation"]), name_splits(["train", "dev", "validation"])
    ({'development': 'train', 'evaluation': 'test'}, {'train': 'train', 'dev': 'dev', 'validation': 'validation'})
    """
    names = list(names)
    standard = {name: SPLIT_NAMES.get(name.casefold(), name) for name in names}
    if "train" not in standard.values():
        standard |= {name: "train" for name in names if name.casefold() == "development"}

    taken = set(names)
    named = {}
    for name in names:
        named[name] = name if standard[name] in taken else standard[name]
        taken.add(named[name])
    return named


def identify_recordings(stored: pyarrow.ChunkedArray) -> list[Hashable]:
    """Return one key per row of `stored` (structs of `bytes` and `path`); equal recordings have equal keys.

    Recordings are compared by their bytes, or by their path, often only a file name, if there are no bytes.
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


def as_rows(rows: datasets.Dataset, **columns: Any) -> datasets.Dataset:
    """Convert a dataset to rows in the format of `schema.Row`. `columns` are options of `HubDatasetConfig`."""
    return HubDataset(data_dir="", **columns)._rows("clip", rows)


def ensure_rows(rows: Any, caption_language: str) -> Any:
    """Convert a `datasets.Dataset` without `clip_id` to the format of `schema.Row`; check and return any other rows.

    A format of the dataset, such as "numpy", is removed, because rows contain plain Python values. ValueError is raised
    as in `schema.check_rows`.
    """
    if isinstance(rows, datasets.Dataset):
        rows = rows.with_format(None)
        if "clip_id" not in rows.column_names:
            return as_rows(rows, caption_language=caption_language)
    check_rows(rows)
    return rows


def get_origin(data_dir: str) -> str:
    """Return the Hub id of a dataset, or the name of its folder if `data_dir` is a folder."""
    folder = Path(data_dir).expanduser()
    return folder.resolve().name if folder.is_dir() else data_dir


def _as_texts(value: Any, kind: Any) -> list[str]:
    """Convert one or several texts or class labels to a list of texts, without blank texts."""
    item, texts = _item_type(kind), []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, datasets.ClassLabel) and each is not None:
            each = item.int2str(each) if each >= 0 else None  # -1: no class
        if each is not None and str(each).strip():
            texts.append(str(each).strip())
    return texts
