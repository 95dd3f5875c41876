"""Sources of row streams for `load_splits(..., streaming=True)`: prepared sets, other Parquet files, and tar files.

Files that others wrote are indexed once: a table of their rows without the recordings is in the cache of `datasets`.
"""

import json
import logging
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc
import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from .audio_files import SUFFIXES
from .builders import hf
from .builders.columns import ColumnOptions, Columns
from .builders.metadata import code_fingerprint
from .builders.text_encodings import decode_text
from .parquet_files import open_parquet
from .prepared import STORAGES, PreparedSet, with_absolute_paths
from .public_names import public_name
from .remote_files import read_file, unpacked_name, unpacked_tar, use_files
from .schema import SEGMENT_COLUMNS, SPLIT_NAMES, features
from .stream import ROWS_OF_A_GROUP, SHUFFLE_SHARDS, Row, RowGroup, RowStream

logger = logging.getLogger(__name__)

_LOCATION = {"file": datasets.Value("string"), "part": datasets.Value("string")}
_LOCATION |= {"start": datasets.Value("int64"), "size": datasets.Value("int64")}
"""Columns of the index of files: the file, its part that is read at once, and the place of a recording in it."""

_HIDDEN = re.compile(r"(^|/)(\._|__MACOSX|\.[^/]+$)")  # members of a tar that macOS adds, and other hidden files


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


class FileSplit:
    """Split of files that others wrote.

    Args:
        rows: Rows without audio, with the columns of `_LOCATION`.
        fetch: Function (file, part, starts, sizes) -> the recordings of these rows.
    """

    def __init__(self, rows: datasets.Dataset, fetch: Callable[..., list[Any]]) -> None:
        self.rows, self.fetch, self.digest = rows, fetch, rows._fingerprint
        types = {name: kind for name, kind in rows.features.items() if name not in _LOCATION}
        self.features = datasets.Features({**types, **STORAGES["original"].features()})
        self.licenses: dict[str, int] = {}
        self.row_groups: list[RowGroup] = []
        first = 0
        for (file, part), members in groupby(zip(rows["file"], rows["part"], strict=True)):
            count = len(list(members))
            self.row_groups.append(RowGroup(file, (part, first), count))
            first += count

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        part, first = group.location
        rows = self.rows.select(range(first, first + (group.of_rows or group.rows)))
        texts = rows.select_columns([name for name in columns if name != "audio"])
        if "audio" not in columns:
            return lambda number: texts[number]
        audio = self.fetch(group.path, part, rows["start"][:], rows["size"][:])
        return lambda number: {**texts[number], "audio": audio[number]}


def _index(paths: Sequence[str], split: str, read: Any, types: datasets.Features, key: Any) -> datasets.Dataset:
    """Return the rows with captions in files, without audio, from the cache if the files and `key` have not changed.

    `split` is the prefix of the ids of rows without an id. `read` is a function from a path to rows with these types.
    """
    types = datasets.Features({**types, **hf.EXTRA_COLUMNS, **_LOCATION})

    def generate() -> Iterator[Row]:
        count, left_out = 0, []
        with ThreadPoolExecutor(SHUFFLE_SHARDS) as pool:
            for path, rows in zip(paths, pool.map(read, paths), strict=True):
                for number, row in enumerate(rows, count):
                    row["clip_id"] = row["clip_id"] or f"{split}-{number:06d}"
                    named = {**hf.name_row(row, types["captions"]), "file": path}
                    if any(named["captions"].values()):
                        yield {name: named[name] for name in types}
                    else:
                        left_out.append(row["clip_id"])
                count += len(rows)
        languages = list(types["captions"])
        if len(left_out) == count:
            raise ValueError(
                f"{paths[0]} contains no recordings with captions in {languages}; recordings are {', '.join(SUFFIXES)}"
            )
        if left_out:
            counts = f"{len(left_out)} of {count} rows without a recording or a caption in {languages}"
            logger.warning("%s: left out %s, such as %s", split, counts, left_out[0])

    versions = [use_files(path, lambda system, name: system.ukey(name)) for path in paths]
    fingerprint = Hasher.hash([paths, versions, split, key, code_fingerprint()])
    try:
        return datasets.Dataset.from_generator(generate, types, fingerprint=fingerprint)
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


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

    The first call reads all columns but the recordings. The splits are those of the loaded dataset, but equal
    recordings are not found. The options are the fields of `builders.hf.HubDatasetConfig`, the result is
    `{split: stream}`. Raises FileNotFoundError without Parquet files, and ValueError if columns are missing.
    """
    config = hf.HubDatasetConfig(**options)
    data_dir = str(config.data_dir)
    if "://" in data_dir:
        files: Any = _find_files(data_dir, ".parquet")
    else:
        folder = Path(data_dir).expanduser()
        data_dir = str(folder) if folder.is_dir() else data_dir
        builder = datasets.load_dataset_builder(data_dir, config.subset, revision=config.revision)
        files = builder.config.data_files or {}

    rows = {}
    for name, split in hf.name_splits(map(str, files)).items():
        paths = list(files[name])
        if not all(path.endswith(".parquet") for path in paths):
            raise FileNotFoundError(f"streaming requires Parquet files; {data_dir} contains {paths[0]}")
        types = hf.find_columns(read_file(paths[0], pyarrow.parquet.read_schema), config).features
        rows[split] = _index(paths, name, partial(_index_parquet, config=config), types, config)
    splits = hf.finish_splits(rows, hf.get_origin(data_dir), config)
    return {split: RowStream(FileSplit(of_split, _fetch_parquet)) for split, of_split in splits.items()}


def _index_parquet(path: str, config: hf.HubDatasetConfig) -> list[Row]:
    """Read the rows of a file, without captions where a recording is missing. Unnamed recordings are read for this."""

    def read(file: Any) -> tuple[hf.HubColumns, list[pyarrow.Table], list[Row]]:
        parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        columns, texts, places = hf.find_columns(parquet.schema_arrow, config), [], []
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number, [*columns.read_names, columns.light], use_threads=False)
            texts.append(table.select(columns.read_names))
            part = f"{number} {int(columns.has_parts)} {columns.audio}"
            names = pc.struct_field(hf.as_stored_audio(table[columns.audio], columns.audio), "path").to_pylist()
            for start, is_null in enumerate(pc.is_null(table[columns.audio]).to_pylist()):
                place = {"audio_path": names[start], "part": part, "start": start, "size": 0}
                places.append(place | ({"captions": {}} if is_null else {}))
        return columns, texts, places

    columns, texts, places = read_file(path, read)
    rows = columns.describe(pyarrow.concat_tables(texts), [place["audio_path"] for place in places], path)
    columns.warn_of_placeholders(path)
    return [{**row, **place} for row, place in zip(rows, places, strict=True)]


def _fetch_parquet(path: str, part: str, starts: Sequence[int], sizes: Any) -> list[Any]:
    """Read recordings of a row group; raise ValueError if some are equal or missing."""
    number, has_parts, audio = part.split(" ", 2)
    stored = hf.as_stored_audio(_read_row_group(path, int(number), [audio])[0], audio).take(pyarrow.array(starts))
    distinct = len(set(hf.identify_recordings(stored))) - (stored.null_count > 0)
    if stored.null_count or (has_parts == "0" and distinct < len(stored)):
        raise ValueError(
            f"{path}: {len(stored)} rows of row group {number} contain only {distinct} recordings, but a stream needs "
            "one row per recording; run prepare.py first, or do not stream"
        )
    return stored.to_pylist()


def _find_files(data_dir: str, *suffixes: str) -> dict[str, dict[str, str]]:
    """Return the files of a folder with one of the suffixes as `{split: {address: relative path without suffix}}`.

    `TarConfig.data_dir` describes the splits.
    """

    def find(system: Any, folder: str) -> dict[str, str]:
        found = {}
        for suffix in suffixes:
            for path in sorted(system.glob(f"{folder.rstrip('/')}/**/*{suffix}")):
                found[system.unstrip_protocol(path)] = path[len(folder) :].strip("/").removesuffix(suffix)
        return found

    files = use_files(str(data_dir), find)
    words = {}
    for address, path in files.items():
        words[address] = next((word for word in re.split("[^a-z]+", path.casefold()) if word in SPLIT_NAMES), "")
    names = {"": "train", **hf.name_splits(dict.fromkeys(filter(None, words.values())))}
    splits: dict[str, dict[str, str]] = {}
    for address, path in files.items():
        splits.setdefault(names[words[address]], {})[address] = path
    if not splits:
        raise FileNotFoundError(f"data_dir {data_dir} is not a folder that contains {' or '.join(suffixes)} files")
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

    The files of one sample have the same name and different suffixes. Each sample with a recording (`.flac`, `.wav`,
    ...) becomes a row, with an id from the names of the tar file and the sample. The captions come from the keys
    "captions", "caption" or "text" (a string, a list, or a mapping from languages to these) of a `.json` file. If there
    are none, they are the lines of a `.txt` file. The `.json` file may also contain "labels", "license" and "source".

    Files with the suffixes `.tar.gz` and `.tgz` are unpacked once into the cache of `datasets`.
    """
    config = TarConfig(**options)
    rows = {}
    for split, paths in _find_files(str(config.data_dir), ".tar", ".tar.gz", ".tgz").items():
        names = {}
        for address, name in paths.items():
            if unpacked_name(address) == address:
                names[address] = name
            elif unpacked_name(address) not in paths:  # otherwise unpacked beside it
                names[unpacked_tar(address)] = name
        read = partial(_index_tar, config=config, names=names)
        rows[split] = _index(list(names), split, read, features(config.languages), config)
    splits = hf.finish_splits(rows, hf.get_origin(str(config.data_dir)))
    return {split: RowStream(FileSplit(of_split, _fetch_members)) for split, of_split in splits.items()}


def _index_tar(path: str, config: TarConfig, names: Mapping[str, str]) -> list[Row]:
    """Read the samples of a tar file, without captions where a recording is missing.

    Raises ValueError if a sample cannot be read, or if a member is sparse or repeated.
    """
    audio = tuple(filter(None, (config.audio_suffix.lower(), *SUFFIXES)))
    texts = (config.caption_suffix.lower(), ".json", ".txt")

    def read(file: Any) -> list[tuple[tarfile.TarInfo, bytes]]:
        if file.read(2) == b"\x1f\x8b":
            raise ValueError("it is compressed with gzip; rename it to .tar.gz, so that it is unpacked")
        file.seek(0)
        members = []
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if not member.isdir() and not _HIDDEN.search(member.name):
                    text = archive.extractfile(member) if member.name.lower().endswith(texts) else None
                    members.append((member, b"" if text is None else text.read()))
        return members

    samples: dict[str, dict[str, tuple[tarfile.TarInfo, bytes]]] = {}
    for member, text in read_file(path, read):
        key, suffix = _split_name(member.name, (*audio, *texts))
        if suffix in samples.setdefault(key, {}) or member.issparse():  # the size of a sparse file is unreliable
            raise ValueError(f"{path}: {member.name} is a sparse file, or there twice; pack each file once, as it is")
        samples[key][suffix] = member, text

    rows = []
    for number, (key, members) in enumerate(samples.items()):
        suffix = next((each for each in audio if each in members), "")
        try:
            row = _read_sample({each: text for each, (_, text) in members.items()}, config)
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: sample {key!r} cannot be read: {error}") from error
        row |= {"clip_id": f"{names[path]}/{key}", "audio_path": key + suffix, "part": str(number // ROWS_OF_A_GROUP)}
        if suffix:
            row |= {"start": members[suffix][0].offset_data, "size": members[suffix][0].size}
        rows.append(row if suffix else {**row, "captions": {}})
    return rows


def _split_name(name: str, suffixes: Sequence[str]) -> tuple[str, str]:
    """Split the name of a member of a tar file into sample key and lower-case suffix, the longest known one.

    A name with another suffix is split at its first dot, as in WebDataset: "a.seg.npy" belongs to the sample "a".
    """
    folder, slash, file = name.rpartition("/")
    known = [suffix for suffix in suffixes if file.lower().endswith(suffix)]
    stem = file[: -max(map(len, known))] if known else file.partition(".")[0]
    return folder + slash + stem, file[len(stem) :].lower()


def _read_sample(texts: Mapping[str, bytes], config: TarConfig) -> Row:
    about = json.loads(texts.get(".json", b"{}"))
    if not isinstance(about, Mapping):
        raise ValueError(f"its .json file contains {about!r:.60}; expected an object with captions")
    names = [name for name in (config.caption_key, "captions", "caption", "text") if name]
    captions = next((about[name] for name in names if about.get(name)), None)
    if captions is None:
        content = texts.get(config.caption_suffix.lower(), b"")
        captions = decode_text(content, f"its {config.caption_suffix} file", config.languages, config.encoding)
        captions = captions.splitlines()
    values = {name: value for name, value in about.items() if name not in names} | {"caption": captions}
    # A start and an end are usually those of the sample in another recording.
    options = ColumnOptions(caption_language=config.language, columns=dict.fromkeys(SEGMENT_COLUMNS, ""))
    return Columns(values, options, config.languages).read(values, "its .json file")


def _fetch_members(path: str, part: str, starts: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Read recordings of a tar file, with everything between them."""
    first, last = min(starts), max(map(sum, zip(starts, sizes, strict=True)))

    def read(file: Any) -> bytes:
        file.seek(first)
        return file.read(last - first)

    content = read_file(path, read)
    return [{"bytes": content[start - first :][:size]} for start, size in zip(starts, sizes, strict=True)]
