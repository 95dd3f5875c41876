"""Load any dataset that the `datasets` library supports, with an audio column and one or more caption columns.

`load_splits("hf", data_dir="user/name")` loads a Hub id or a folder, like `datasets.load_dataset`, or the output of
`save_to_disk`. The Arrow data of the recordings is not copied; only the columns are renamed.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet
import soundfile

from modeling_supclap.languages import LANGUAGES

from ..remote_files import local_folder, refuse_pointer
from ..schema import CHANNEL, FILE_SOURCE, SEGMENT_COLUMNS, SPLIT_NAMES, check_rows, features
from ..splits import SPLITS, connect, draw_splits, warn_of_shared
from .columns import ColumnOptions, Columns, language_code, merge_captions, warn_once


@dataclass
class HubDatasetConfig(ColumnOptions):
    """Location and splits of a Hub dataset, in addition to `ColumnOptions`.

    Attributes:
        data_dir: Hub dataset id, folder for `load_dataset`, output folder of `save_to_disk`, or fsspec address of one
            of these folders, which is downloaded.
        subset: Name of the dataset configuration, if the dataset has several.
        revision: Branch, tag or commit of the Hub repository.
        validation_fraction: Fraction of the sources in the training split to hold out for validation, if there is no
            validation split.
        test_fraction: Fraction to hold out for testing, if there is no test split.
        seed: Random seed for the held-out splits.
        channel: Channel of each recording to use, from 0. None: the mean of all channels.
    """

    data_dir: str | None = None
    subset: str | None = None
    revision: str | None = None
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0
    channel: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None:
            raise ValueError("hf requires data_dir: a Hub id, or a folder that load_dataset or load_from_disk reads")


_RECORDINGS: tuple[Any, ...] = (datasets.Audio, datasets.Video)
_TEXTS = ("string", "large_string", "string_view")
EXTRA_COLUMNS = {"split": datasets.Value("string"), "recording": datasets.Value("string")}
"""Columns of rows before the splits are final: the split in a column of the dataset, and a key that equal recordings
share. Both are "" if unknown."""


class HubColumns(Columns):
    """Columns of a dataset with these features; `audio` is the column of the recordings, `found` are the languages.

    `light` is the part of `audio` that contains their names, if there is one. Raises ValueError as `Columns`, or
    without a column of recordings.
    """

    def __init__(self, types: datasets.Features, config: HubDatasetConfig) -> None:
        texts = [name for name, kind in types.items() if _is_text(kind) or isinstance(kind, dict)]
        super().__init__(types, config, not_text=types.keys() - texts)
        audio = [name for name, kind in types.items() if isinstance(kind, _RECORDINGS)]
        self.audio = config.audio_column or (audio[0] if len(audio) == 1 else self.of_field.get("file_name", ""))
        if not self.audio:
            raise ValueError(f"there is no column of recordings; set audio_column to one of {list(types)}")
        kind = types[self.audio]
        has_paths = isinstance(kind, _RECORDINGS) or (isinstance(kind, dict) and "path" in kind)
        self.channel = config.channel
        self.light = f"{self.audio}.path" if has_paths else self.audio
        for name in ("clip_id", "events"):
            self.of_field.pop(name, None)
        self.types = {name: types[name] for name in self.read_names}
        self.found: dict[str, None] = {}
        for name, language in self.captions.items():
            keys = map(language_code, types[name]) if isinstance(types[name], dict) else [language or self.language]
            self.found |= dict.fromkeys(keys)
        if "language" in self.of_field:  # which languages the rows have is not known yet
            self.found |= dict.fromkeys(LANGUAGES)

    @property
    def features(self) -> datasets.Features:
        """Features of described rows, with `EXTRA_COLUMNS`."""
        has_channel = self.channel is not None
        return datasets.Features({**features(list(self.found), self.has_parts, has_channel), **EXTRA_COLUMNS})

    def describe(self, table: pyarrow.Table, paths: Sequence[str | None], where: str) -> list[dict[str, Any]]:
        """Convert rows to the format of `schema.Row` without ids, which `name_row` adds.

        Args:
            table: Rows with the columns `read_names`.
            paths: Names of the recordings, or None.
            where: Name of the table, for error messages.
        """
        # A name such as "audio.wav" for all rows does not identify a recording.
        has_names = self.has_parts or len(paths) == 1 or len(set(paths)) > 1
        rows = []
        for number, (values, path) in enumerate(zip(table.select(self.read_names).to_pylist(), paths, strict=True)):
            for name, kind in self.types.items():
                values[name] = _name_classes(values[name], kind)
            row = self.read(values, f"{where}, row {number}")
            source = row["source"] or (f"{FILE_SOURCE}{path}" if path and has_names else "")
            rows.append({**row, "audio_path": path, "source": source, CHANNEL: self.channel})
            self.found |= dict.fromkeys(row["captions"])
        return rows


def find_columns(schema: pyarrow.Schema, config: HubDatasetConfig) -> HubColumns:
    """Return the columns of a Parquet file. Raise ValueError as `HubColumns` and `as_stored_audio`."""
    columns = HubColumns(datasets.Features.from_arrow_schema(schema), config)
    as_stored_audio(schema.empty_table()[columns.audio], columns.audio)
    return columns


def name_row(row: Mapping[str, Any], languages: Iterable[str]) -> dict[str, Any]:
    """Return a row with lists for all languages. Without a name or a source, its id is used."""
    path, source = row["audio_path"] or row["clip_id"], row["source"] or FILE_SOURCE + row["clip_id"]
    captions = {language: row["captions"].get(language, []) for language in languages}
    return {"recording": "", **row, "audio_path": path, "source": source, "captions": captions}


def finish_splits(
    splits: Mapping[str, datasets.Dataset], name: str, config: HubDatasetConfig | None = None
) -> dict[str, datasets.Dataset]:
    """Hold out the missing splits by source, and warn of recordings, sources and captions that splits share.

    Args:
        splits: Rows as in `schema.Row`, with `EXTRA_COLUMNS`, which are removed.
        name: Name of the dataset, for the warnings.
        config: Fractions to hold out. None: nothing is held out.
    """
    splits = dict(splits)
    if config is not None and "train" in splits:
        rows = splits.pop("train")
        sources, drawn = rows["source"][:], rows["split"][:]
        fractions = {split: getattr(config, f"{split}_fraction") for split in SPLITS[1:] if split not in splits}
        if splits and config.test_group is not None:
            raise ValueError(f"{name} has the splits {', '.join(splits)}; test_group requires a dataset without them")
        if splits or config.test_group is not None or not set(drawn) <= set(SPLITS):
            if any(drawn):
                warn_once(f"{name}: the column split is not used, because of its values or of other splits")
            recordings = [key or None for key in rows["recording"]]
            found = connect(sources, recordings)
            drawn = draw_splits(sources, found, fractions, config.seed, config.test_group)
        for split in dict.fromkeys(drawn):
            splits[split] = rows.select([number for number, other in enumerate(drawn) if other == split])

    names, sources, keys, captions = [], [], [], []
    for split, rows in splits.items():
        names += [split] * len(rows)
        sources += [None if source.startswith(FILE_SOURCE) else source for source in rows["source"]]
        keys += [key or None for key in rows["recording"]]
        captions.append(rows.select_columns("captions"))
    warn_of_shared(name, names, connect(sources, keys), (chain(*row["captions"].values()) for row in chain(*captions)))
    return {split: rows.remove_columns(list(EXTRA_COLUMNS)) for split, rows in splits.items()}


class HubDataset:
    """Builder for datasets that the `datasets` library supports.

    Rows with the same recording are merged into one row, and rows without captions are skipped. If there is no
    validation or test split, sources of the training split are held out.
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
            options: dict[str, Any] = {"revision": config.revision, "cache_dir": self.cache_dir}
            with _storing_audio_as_paths():
                try:
                    loaded = datasets.load_dataset(path, config.subset, **options)
                except Exception:
                    if (types := _unify_files(folder)) is None:
                        raise
                    loaded = datasets.load_dataset(path, config.subset, features=types, **options)
        self.convert({"train": loaded} if isinstance(loaded, datasets.Dataset) else loaded)

    def as_dataset(self) -> datasets.DatasetDict:
        """Return all splits as a `DatasetDict`."""
        return datasets.DatasetDict(self._splits)

    def report(self) -> dict[str, Any]:
        """Return the ids of clips without audio or captions, in the format of `RowBuilder.report`."""
        return {"missing": self._missing, "left_out": {"no caption": self._left_out} if self._left_out else {}}

    def convert(self, splits: Mapping[str, datasets.Dataset]) -> None:
        """Convert splits to rows with their recordings, which are not copied, and hold out the missing splits."""
        tables, chunks = {}, []
        for split, rows in splits.items():
            rows = rows.flatten_indices() if rows._indices is not None else rows
            columns = HubColumns(rows.features, self.config)
            stored = as_stored_audio(rows.data.column(columns.audio), columns.audio)
            if self.config.data_dir:
                stored = _resolve_paths(stored, Path(self.config.data_dir).expanduser().absolute())
            tables[split] = rows.data, columns, stored
            chunks += stored.chunks
        keys = iter(identify_recordings(pyarrow.chunked_array(chunks, _STORED)))
        names = name_splits(splits)
        converted = {}
        for split, table in tables.items():
            converted[names[split]] = self._rows(split, *table, list(islice(keys, len(table[0]))))
        self._splits = finish_splits(converted, self.origin, self.config)

    def _rows(
        self, split: str, table: Any, columns: HubColumns, stored: pyarrow.ChunkedArray, keys: Sequence[Hashable]
    ) -> datasets.Dataset:
        """Convert a split. Its recordings are `stored`, and equal for equal `keys`."""
        described = columns.describe(table, pc.struct_field(stored, "path").to_pylist(), split)
        columns.warn_of_placeholders(f"{self.origin}, {split}")

        languages, types, usable = list(columns.found), columns.features, []
        recordings: dict[Hashable, list[int]] = {}
        for index, (key, row) in enumerate(zip(keys, described, strict=True)):
            row |= {"clip_id": f"{split}-{index:06d}", "recording": str(key)}
            recordings.setdefault((key, *(row[name] for name in SEGMENT_COLUMNS)), []).append(index)

        # Merge rows with the same recording: add their captions and labels to the first such row, without repeats.
        is_null = pc.is_null(stored).to_pylist()
        for first, *others in recordings.values():
            row, merged = described[first], [described[index] for index in (first, *others)]
            if others:
                row["captions"] = merge_captions([each["captions"] for each in merged], languages)
                row["labels"] = list(dict.fromkeys(chain(*(each["labels"] for each in merged))))
            if is_null[first]:
                self._missing.append(row["clip_id"])
            elif any(row["captions"].values()):
                usable.append(first)
            else:
                self._left_out.append(row["clip_id"])

        rows = []
        for row in described:
            named = name_row(row, languages)
            rows.append({name: named[name] for name in types})
        # The feature of `Audio` would need FFmpeg to store a path, but not to describe one that is stored.
        kind = datasets.Features({"audio": datasets.Audio(decode=False)})
        audio = datasets.Dataset(pyarrow.table({"audio": stored}).cast(kind.arrow_schema))
        joined = datasets.concatenate_datasets([datasets.Dataset.from_list(rows, features=types), audio], axis=1)
        return joined.select(usable)


def _unify_files(folder: Path) -> datasets.Features | None:
    """Return the common types of the Parquet files in a folder; raise ValueError if a column has none."""
    schema = None
    for path in sorted(folder.rglob("*.parquet")):
        refuse_pointer(path.open("rb").read(100), path)
        types = pyarrow.parquet.read_schema(path).remove_metadata()
        try:
            schema = pyarrow.unify_schemas([schema or types, types], promote_options="permissive")
        except pyarrow.ArrowTypeError as error:
            raise ValueError(f"{path} has other types than the files before it: {error}; convert it") from error
    return None if schema is None else datasets.Features.from_arrow_schema(schema)


_STORED = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def as_stored_audio(column: pyarrow.ChunkedArray, name: str) -> pyarrow.ChunkedArray:
    """Convert a column of recordings to structs of `bytes` and `path`.

    The column may contain such structs, paths, bytes, or decoded audio (structs of `array` and `sampling_rate`), which
    is encoded as WAV of 32-bit floats. Raises ValueError if it contains something else.
    """
    kind, chunks = column.type, []
    for chunk in column.chunks:
        fields: dict[str, Any] = {}
        if str(kind) in _TEXTS:
            fields["path"] = chunk
        elif str(kind) in ("binary", "large_binary"):
            fields["bytes"] = chunk
        elif pyarrow.types.is_struct(kind):
            fields = {field.name: pc.struct_field(chunk, field.name) for field in kind}
        if {"array", "sampling_rate"} <= fields.keys():
            fields["bytes"] = pyarrow.array(map(_encode, chunk.to_pylist()), pyarrow.binary())
        if not fields.keys() & {"bytes", "path"}:
            raise ValueError(
                f"column {name!r} contains {kind}; set audio_column to a column of Audio, paths, bytes, or decoded "
                "audio with array and sampling_rate"
            )
        values = [fields.get(field.name, pyarrow.nulls(len(chunk))).cast(field.type) for field in _STORED]
        empty = pc.and_(pc.is_null(values[0]), pc.is_null(values[1]))
        chunks.append(pyarrow.StructArray.from_arrays(values, fields=list(_STORED), mask=empty))
    return pyarrow.chunked_array(chunks, _STORED)


def _encode(value: Mapping[str, Any] | None) -> bytes | None:
    if value is None or value["array"] is None:
        return None
    content = io.BytesIO()
    samples = np.asarray(value["array"], np.float32)
    if samples.ndim > 1 and len(samples) < samples.shape[1]:
        samples = samples.T
    soundfile.write(content, samples, int(value["sampling_rate"]), format="WAV", subtype="FLOAT")
    return content.getvalue()


@contextmanager
def _storing_audio_as_paths() -> Iterator[None]:
    """Let `datasets` store the paths of a folder of recordings without FFmpeg, which only decoding needs."""
    encoders = [kind.encode_example for kind in _RECORDINGS]

    def encode_example(self: Any, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    for kind in _RECORDINGS:
        kind.encode_example = encode_example
    try:
        yield
    finally:
        for kind, encode in zip(_RECORDINGS, encoders, strict=True):
            kind.encode_example = encode


def _resolve_paths(stored: pyarrow.ChunkedArray, folder: Path) -> pyarrow.ChunkedArray:
    """Replace relative paths of recordings without bytes by paths in `folder`, if such files are there."""
    has_bytes = pc.any(pc.is_valid(pc.struct_field(stored, "bytes"))).as_py()
    if has_bytes or not folder.is_dir():  # an id of the Hub
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
    is_text = isinstance(item, datasets.Value) and item.dtype in (*_TEXTS, "null")
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
    dataset = HubDataset(data_dir="", validation_fraction=0, test_fraction=0, **columns)
    dataset.convert({"clip": rows})
    return dataset.as_dataset()["clip"]


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


def _name_classes(value: Any, kind: Any) -> Any:
    """Replace the numbers of classes in a value of a column by their names; -1 is no class."""
    label = _item_type(kind)
    if not isinstance(label, datasets.ClassLabel) or value is None:
        return value
    if isinstance(value, list):
        return [_name_classes(each, label) for each in value]
    return label.int2str(value) if value >= 0 else None
