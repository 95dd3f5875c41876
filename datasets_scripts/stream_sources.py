"""Sources of row streams for `load_splits(..., streaming=True)`: prepared sets, other Parquet files, and tar files."""

from __future__ import annotations

import io
import json
import logging
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet
from datasets.fingerprint import Hasher

from .audio_files import SUFFIXES
from .builders.hf import Columns, HubDatasetConfig, as_stored_audio, identify_recordings, name_splits
from .builders.text_encodings import decode_text
from .parquet_files import open_parquet
from .prepared import STORAGES, PreparedSet, with_absolute_paths
from .public_names import public_name
from .remote_files import read_file, unpacked_name, unpacked_tar, use_files
from .schema import FILE_SOURCE, features
from .stream import ROWS_OF_A_GROUP, SHUFFLE_SHARDS, Row, RowGroup, RowStream

logger = logging.getLogger(__name__)

# Matches only at the start of a word, not in "latest" or "device".
_SPLIT_IN_PATH = re.compile(
    "(?<![a-z])(training|train|testing|test|validation|valid|(val|development|dev|evaluation|eval)(?![a-z]))",
    re.IGNORECASE,
)


def _file_features(languages: Iterable[str], with_segments: bool = False) -> datasets.Features:
    rows = features(list(dict.fromkeys(languages)), with_segments)
    return datasets.Features({**rows, **STORAGES["original"].features()})


class ParquetSplit:
    """Split of a prepared dataset, with the row groups from its manifest."""

    def __init__(self, prepared: PreparedSet, split: str) -> None:
        self.features = datasets.Features.from_dict(prepared.manifest["features"])
        self.licenses: dict[str, int] = prepared.manifest["licenses"]  # of all splits
        self._root = prepared.audio_root()
        self.digest = f"{prepared.digest} {split} {self._root}"  # cached rows contain absolute paths
        self.content = prepared.digest  # part of `RowStream.content_hash`
        self.row_groups: list[RowGroup] = []

        shards = prepared.manifest["splits"][split]["shards"]
        for path, shard in zip(prepared.shard_paths(split), shards, strict=True):
            self.row_groups += [RowGroup(path, number, rows) for number, rows in enumerate(shard["row_groups"])]

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        table = with_absolute_paths(_read_row_group(group.path, group.location, columns), self._root)
        return lambda number: table.slice(number, 1).to_pylist()[0]


class HubSplit:
    """Split of a Hub dataset in Parquet files, with an audio column and one or more caption columns.

    Rows without captions are skipped. Reading a row group raises ValueError if several of its rows have the same
    recording, because they would be negatives of each other, and a stream cannot merge them.

    Args:
        row_groups: Row groups with the `location` (index of the row group in its file, index of its first row in the
            split, columns that may contain empty values, columns that contain nulls).
        split: Prefix of the clip ids: the name of the split in the original dataset.
        types: Features of the files.
    """

    def __init__(
        self, row_groups: Sequence[RowGroup], split: str, types: datasets.Features, config: HubDatasetConfig
    ) -> None:
        self._columns = Columns(types, config)
        kind = types.arrow_schema.field(self._columns.audio).type
        self._has_path = isinstance(kind, pyarrow.StructType) and kind.get_field_index("path") >= 0
        self.features = _file_features(self._columns.languages.values(), bool(self._columns.segments))
        self.licenses: dict[str, int] = {}
        self.split = split

        with ThreadPoolExecutor(SHUFFLE_SHARDS) as pool:
            captioned = list(pool.map(self._find_captioned, row_groups))
        self.row_groups: list[RowGroup] = []
        for group, numbers in zip(row_groups, captioned, strict=True):
            if len(numbers):
                self.row_groups.append(group._replace(location=(*group.location[:2], numbers), rows=len(numbers)))
        num_rows = sum(group.rows for group in row_groups)
        num_captioned = sum(map(len, captioned))
        if num_captioned < num_rows:
            count = num_rows - num_captioned
            logger.warning("%s: left out %d of %d rows without a recording or a caption", split, count, num_rows)

        paths = sorted({group.path for group in row_groups})
        versions = [use_files(path, lambda system, name: system.ukey(name)) for path in paths]
        self.digest = Hasher.hash([versions, self.row_groups, config])

    def _find_captioned(self, group: RowGroup) -> Sequence[int]:
        """Return the indices of the rows with captions; read these only if the statistics of the file require it."""
        number_in_file, _, may_lack, with_nulls = group.location
        columns, audio = self._columns, self._columns.audio
        if not may_lack.issuperset(columns.caption_columns) and audio not in with_nulls:
            return range(group.rows)
        needed = [*columns.described, audio] if audio in with_nulls else columns.described
        table = _read_row_group(group.path, number_in_file, needed)
        is_null = [False] * len(table)
        if audio in with_nulls:
            is_null = pc.is_null(as_stored_audio(table.column(audio), audio)).to_pylist()
        captioned = []
        for number, row in enumerate(table.select(columns.described).to_pylist()):
            described = columns.describe(row, None, f"{group.path}, row {number}")
            if any(described["captions"].values()) and not is_null[number]:
                captioned.append(number)
        return captioned

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        audio = self._columns.audio
        needed = [*self._columns.described, f"{audio}.path" if self._has_path and "audio" not in columns else audio]
        number_in_file, first_row, numbers = group.location
        table = _read_row_group(group.path, number_in_file, needed)
        recordings_stored = as_stored_audio(table.column(audio), audio)
        table = table.drop_columns([audio]).append_column(audio, recordings_stored)
        if self._has_path and "audio" in columns and not self._columns.segments:
            recordings = identify_recordings(table.column(audio))
            if len(set(recordings)) < len(recordings):
                raise ValueError(
                    f"{group.path}: {len(recordings)} rows from {first_row} contain only {len(set(recordings))} "
                    "recordings, but a stream needs one row per recording; run prepare.py first, or do not stream"
                )

        def get_row(number: int) -> Row:
            number = numbers[number]
            values = table.slice(number, 1).to_pylist()[0]
            stored = values[audio]
            if stored is None:
                raise ValueError(f"{group.path}: row {first_row + number} has no recording; remove it from the table")
            row = self._columns.describe(values, stored["path"], f"{self.split}-{first_row + number:06d}")
            row["audio"] = stored
            return {name: row[name] for name in columns}

        return get_row


class TarSplit:
    """Split of WebDataset tar files. The files of one sample have the same name and different suffixes.

    Each sample with a recording (`.flac`, `.wav`, ...) becomes a row. The captions come from the keys "captions",
    "caption" or "text" (a string, a list, or a mapping from languages to these) of a `.json` file. If there are none,
    they are the lines of a `.txt` file. The `.json` file may also contain "labels" or "tag", "license" and "source".
    `TarConfig` describes other keys. The constructor reads the headers of all tar files once. Samples without a
    recording are counted and named in a warning.
    """

    def __init__(self, paths: Sequence[str], config: TarConfig) -> None:
        self.config = config
        self.features = _file_features(config.languages)
        self.licenses: dict[str, int] = {}
        self.digest = Hasher.hash(config)
        self.row_groups: list[RowGroup] = []
        self._left_out: list[str] = []
        self._known = (*SUFFIXES, config.audio_suffix.lower(), config.caption_suffix.lower(), ".json", ".txt")

        for path in paths:
            self.digest += use_files(path, lambda system, name: system.ukey(name))
            samples = self._samples(path)
            for first in range(0, len(samples), ROWS_OF_A_GROUP):
                part = samples[first : first + ROWS_OF_A_GROUP]
                self.row_groups.append(RowGroup(path, (part[0][0], part[-1][1]), len(part)))
        if self._left_out:
            logger.warning(
                "left out %d files of tars that belong to no recording, such as %s; set audio_suffix if it is one",
                len(self._left_out),
                self._left_out[0],
            )
        if not self.row_groups:
            raise ValueError(f"{paths[0]} contains no recordings; supported suffixes are {', '.join(SUFFIXES)}")

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        first, last = group.location

        def read_part(file: Any) -> bytes:
            file.seek(first)
            return file.read(last - first)

        content = read_file(group.path, read_part)

        samples: dict[str, dict[str, bytes]] = {}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                if _is_hidden(member.name):
                    continue
                key, suffix = self._split_name(member.name)
                extracted = archive.extractfile(member)
                if extracted is not None:
                    samples.setdefault(key, {})[suffix] = extracted.read()

        rows = []
        for key, parts in samples.items():
            if self._find_audio(parts) is not None:
                try:
                    row = self._row(key, parts)
                except (AttributeError, RecursionError, TypeError, ValueError) as error:
                    raise ValueError(f"{group.path}: sample {key!r} cannot be read: {error}") from error
                rows.append({name: row[name] for name in columns})
        return rows.__getitem__

    def _row(self, key: str, parts: Mapping[str, bytes]) -> Row:
        config, suffix = self.config, self._find_audio(parts)
        assert suffix is not None
        about = json.loads(parts.get(".json", b"{}"))
        if not isinstance(about, Mapping):
            raise ValueError(f"its .json file contains {about!r:.60}; expected an object with captions")
        captions: Any = None
        for name in filter(None, (config.caption_key, "captions", "caption", "text")):
            captions = captions or about.get(name)
        if not captions:
            content = parts.get(config.caption_suffix.lower(), b"")
            captions = decode_text(
                content, key + config.caption_suffix, config.languages, config.encoding
            ).splitlines()

        return {
            "clip_id": key,
            "audio_path": key + suffix,
            "captions": _captions_by_language(captions, config.language, config.languages),
            "labels": _as_texts(about.get("labels") or about.get("tag") or []),
            "events": [],
            "source": str(about.get("source") or FILE_SOURCE + key),
            "license": str(about.get("license") or ""),
            "audio": {"bytes": parts[suffix], "path": key + suffix},
        }

    def _samples(self, path: str) -> list[tuple[int, int]]:
        """Return the (start byte, end byte) of each WebDataset sample with a recording in a tar file."""
        samples: list[tuple[int, int]] = []
        keys: set[str] = set()
        headers = [member for member in read_file(path, _read_headers) if not _is_hidden(member.name)]
        for key, members in groupby(headers, lambda member: self._split_name(member.name)[0]):
            if key in keys:
                raise ValueError(f"{path}: the members of sample {key!r} are not adjacent; pack with tar --sort=name")
            keys.add(key)
            files = list(members)
            for member in files:
                if member.issparse():  # its size in the header is unreliable
                    raise ValueError(f"{path}: {member.name} is a sparse file; pack it without --sparse")
            if self._find_audio([self._split_name(member.name)[1] for member in files]) is None:
                self._left_out += [member.name for member in files]
            else:
                last_blocks = -(-files[-1].size // tarfile.BLOCKSIZE)
                samples.append((files[0].offset, files[-1].offset_data + last_blocks * tarfile.BLOCKSIZE))
        return samples

    def _find_audio(self, suffixes: Iterable[str]) -> str | None:
        """Return the suffix of the recording of a sample, or None without one."""
        present = set(suffixes)
        for suffix in filter(None, (self.config.audio_suffix.lower(), *SUFFIXES)):
            if suffix in present:
                return suffix
        return None

    def _split_name(self, name: str) -> tuple[str, str]:
        """Split a file name into sample key and lower-case suffix, the longest known one.

        A name with another suffix is split at its first dot, as in WebDataset: "a.seg.npy" belongs to the sample "a".
        """
        folder, _, file = name.rpartition("/")
        for suffix in sorted(filter(None, self._known), key=len, reverse=True):
            if file.lower().endswith(suffix) and len(file) > len(suffix):
                return name[: -len(suffix)], suffix
        stem, dot, rest = file.partition(".")
        return f"{folder}/{stem}" if folder else stem, dot + rest.lower()


def _is_hidden(name: str) -> bool:
    """Return whether a member of a tar is an entry of macOS, such as "._a.wav", or another hidden file."""
    return any(part.startswith(("._", "__MACOSX")) for part in name.split("/")) or name.rsplit("/", 1)[-1][:1] == "."


def _captions_by_language(captions: Any, language: str, languages: Sequence[str]) -> dict[str, list[str]]:
    """Return `{language: [caption, ...]}`; plain texts are in `language`."""
    by_language = captions if isinstance(captions, Mapping) else {language: captions}
    unknown = sorted(set(by_language) - set(languages))
    if unknown:
        raise ValueError(f"the captions have the languages {unknown}; add them to languages, now {list(languages)}")
    texts = {}
    for code in languages:
        stripped = [text.strip() for text in _as_texts(by_language.get(code) or [])]
        texts[code] = [text for text in stripped if text]
    return texts


def _as_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"got {value!r}; expected a text or a list of texts")
    return texts


def _read_headers(file: Any) -> list[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            return [member for member in archive if not member.isdir()]
    except tarfile.ReadError as error:
        file.seek(0)
        is_gzip = file.read(2) == b"\x1f\x8b"
        reason = "it is compressed with gzip; rename it to .tar.gz, so that it is unpacked" if is_gzip else error
        raise ValueError(f"no tar file: {reason}") from None  # `use_files` would show the cause


def _read_row_group(path: str, number: int, columns: Sequence[str]) -> pyarrow.Table:
    def read(file: Any) -> pyarrow.Table:
        with open_parquet(file, public_name(path)) as parquet:
            # Without threads: one that frees bytes of a Python file while Python exits aborts the process.
            return parquet.read_row_group(number, columns=list(columns), use_threads=False)

    return read_file(path, read)


def load_prepared(**options: Any) -> dict[str, RowStream]:
    """Stream a prepared dataset; return `{split: stream}`. `PreparedSet` describes the options."""
    prepared = PreparedSet(**options)
    return {split: RowStream(ParquetSplit(prepared, split)) for split in prepared.manifest["splits"]}


def load_parquet(**options: Any) -> dict[str, RowStream]:
    """Stream a dataset of Parquet files from the Hub, a folder, or an address that fsspec can list.

    This function reads only the file footers, and the captions if some may be missing. If there is no validation or
    test split, a random sample of the training row groups is held out. The options are the fields of
    `builders.hf.HubDatasetConfig`, the result is `{split: stream}`. Raises FileNotFoundError without Parquet files, and
    ValueError if columns are missing, or the training split has too few row groups.
    """
    config = HubDatasetConfig(**options)
    data_dir = str(config.data_dir)
    if "://" in data_dir:
        files: Any = _find_files(data_dir, ".parquet")
    else:
        folder = Path(data_dir).expanduser()
        data_dir = str(folder) if folder.is_dir() else data_dir
        builder = datasets.load_dataset_builder(data_dir, config.subset, revision=config.revision)
        files = builder.config.data_files or {}

    groups: dict[str, list[RowGroup]] = {}
    origins: dict[str, str] = {}  # split -> prefix of its clip ids
    names = name_splits(map(str, files))
    for name, paths in files.items():
        split = names[str(name)]
        origins[split] = str(name)
        if not all(path.endswith(".parquet") for path in paths):
            raise FileNotFoundError(f"streaming requires Parquet files; {data_dir} contains {paths[0]}")
        with ThreadPoolExecutor(SHUFFLE_SHARDS) as pool:
            footers = list(pool.map(partial(read_file, read=_read_footer), paths))

        groups[split] = []
        first_row = 0
        for path, footer in zip(paths, footers, strict=True):
            for number in range(footer.num_row_groups):
                about = footer.row_group(number)
                location = number, first_row, _may_be_empty(about), _columns_with_nulls(about)
                groups[split].append(RowGroup(path, location, about.num_rows))
                first_row += about.num_rows
        types = datasets.Features.from_arrow_schema(footers[0].schema.to_arrow_schema())

    for split in ("test", "validation"):
        fraction = getattr(config, f"{split}_fraction")
        if split not in groups and "train" in groups and fraction > 0:
            groups["train"], groups[split] = _hold_out(groups["train"], fraction, config.seed)
            origins[split] = origins["train"]

    return {split: RowStream(HubSplit(groups[split], origins[split], types, config)) for split in groups}


def _read_footer(file: Any) -> pyarrow.parquet.FileMetaData:
    footer = pyarrow.parquet.read_metadata(file)
    for number in range(footer.num_row_groups):
        # pyarrow aborts the process if it reads the statistics of such a file
        for column in range(footer.num_columns):
            if footer.row_group(number).column(column).physical_type != footer.schema.column(column).physical_type:
                raise ValueError(f"column {column} of row group {number} has another type than the schema")
    return footer


def _may_be_empty(row_group: pyarrow.parquet.RowGroupMetaData) -> frozenset[str]:
    """Return the columns that may contain nulls, empty lists or blank texts, according to the Parquet statistics."""
    columns = set()
    for number in range(row_group.num_columns):
        chunk = row_group.column(number)
        about = chunk.statistics
        is_full = about is not None and about.has_null_count and about.null_count == 0 and about.has_min_max
        if not (is_full and isinstance(about.min, str) and about.min.strip()):
            columns.add(chunk.path_in_schema.partition(".")[0])
    return frozenset(columns)


def _columns_with_nulls(row_group: pyarrow.parquet.RowGroupMetaData) -> frozenset[str]:
    """Return the columns with null values, according to the Parquet statistics; a struct if all of its fields have."""
    nulls: dict[str, int] = {}
    for number in range(row_group.num_columns):
        chunk = row_group.column(number)
        about, name = chunk.statistics, chunk.path_in_schema.partition(".")[0]
        if about is not None and about.has_null_count:
            nulls[name] = min(nulls.get(name, about.null_count), about.null_count)
    return frozenset(name for name, count in nulls.items() if count)


def _hold_out(groups: list[RowGroup], fraction: float, seed: int) -> tuple[list[RowGroup], list[RowGroup]]:
    """Hold out a random fraction of the row groups, at least one; return (remaining, held out)."""
    num_drawn = max(1, round(fraction * len(groups)))
    if num_drawn >= len(groups):
        advice = "set --validation_fraction 0 and --test_fraction 0, or do not stream"
        raise ValueError(f"cannot hold out {num_drawn} of {len(groups)} row groups; {advice}")
    drawn = sorted(np.random.default_rng(seed).permutation(len(groups)).tolist()[:num_drawn])
    rest = [group for number, group in enumerate(groups) if number not in drawn]
    return rest, [groups[number] for number in drawn]


def _find_files(data_dir: str, *suffixes: str) -> dict[str, list[str]]:
    """Return the files of a folder with one of the suffixes as `{split: [file, ...]}` (see `TarConfig.data_dir`)."""

    def find(system: Any, folder: str) -> list[tuple[str, str]]:
        paths: list[str] = []
        for suffix in suffixes:
            paths += sorted(system.glob(f"{folder.rstrip('/')}/**/*{suffix}"))
        return [(path[len(folder) :], system.unstrip_protocol(path)) for path in paths]

    files = use_files(str(data_dir), find)
    words = {path: match[0].lower() for path, _ in files if (match := _SPLIT_IN_PATH.search(path))}
    names = name_splits(dict.fromkeys(words.values()))
    splits: dict[str, list[str]] = {}
    for path, address in files:
        splits.setdefault(names[words[path]] if path in words else "train", []).append(address)

    if not splits:
        raise FileNotFoundError(f"data_dir {data_dir} contains no {' or '.join(suffixes)} file")
    return splits


@dataclass
class TarConfig:
    """Location and caption language of WebDataset tar files.

    Attributes:
        data_dir: Folder, or address that fsspec can list. The first split name in the path of a tar file ("train",
            "validation" or "valid", "test", "development", "evaluation") determines its split. A path with no split
            name belongs to "train".
        language: ISO 639-3 code of the captions.
        languages: Languages of captions that are stored by language, such as `{"eng": ..., "fra": ...}`; defaults to
            `language`.
        audio_suffix: Suffix of the recordings, if it is not a usual one, such as ".sound". The content decides how they
            are decoded.
        caption_suffix: Suffix of the text files with captions, such as ".caption".
        caption_key: Key of the captions in the `.json` files, if it is none of captions, caption and text.
        encoding: Encoding of the text files; by default UTF-8, UTF-16, or that of the languages if it is certain.
    """

    data_dir: str | None = None
    language: str = "eng"
    languages: Sequence[str] = ()
    audio_suffix: str = ""
    caption_suffix: str = ".txt"
    caption_key: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.data_dir is None:
            raise ValueError("webdataset requires data_dir: a folder of tar files, or its address")
        self.languages = (self.languages,) if isinstance(self.languages, str) else tuple(self.languages)
        self.languages = tuple(dict.fromkeys([self.language, *self.languages]))
        for name in ("audio_suffix", "caption_suffix"):
            suffix = getattr(self, name)
            setattr(self, name, suffix if not suffix or suffix.startswith(".") else f".{suffix}")


def load_tars(**options: Any) -> dict[str, RowStream]:
    """Stream WebDataset tar files; return `{split: stream}`. The options are the fields of `TarConfig`.

    Files with the suffixes `.tar.gz` and `.tgz` are unpacked once into the cache of `datasets`.
    """
    config = TarConfig(**options)
    streams = {}
    for split, paths in _find_files(str(config.data_dir), ".tar", ".tar.gz", ".tgz").items():
        tars = []
        for path in paths:
            name = unpacked_name(path)
            if name == path:
                tars.append(path)
            elif name not in paths:  # not unpacked beside it
                tars.append(unpacked_tar(path))
        streams[split] = RowStream(TarSplit(tars, config))
    return streams
