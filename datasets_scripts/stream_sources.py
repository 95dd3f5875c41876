"""Files that can be streamed: Parquet files of a prepared set, other Parquet files, and tar files of WebDataset.

`load_splits("prepared", ..., streaming=True)` reads sets that `prepare.py` wrote, `load_splits("hf", ...)` any other
Parquet files with a column of recordings and one of captions, `load_splits("webdataset", ...)` tar files.
"""

from __future__ import annotations

import io
import json
import logging
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
from datasets.fingerprint import Hasher

from .builders.hf import Columns, HubDatasetConfig, identify_recordings, name_splits
from .builders.recordings import SUFFIXES
from .prepared import STORAGES, PreparedSet, with_absolute_paths
from .remote_files import read_file, use_files
from .schema import FILE_SOURCE, features
from .stream import LANES, Row, RowGroup, RowStream

logger = logging.getLogger(__name__)

# At the beginning of a word: not in "latest" or "device".
_SPLIT_IN_PATH = re.compile(
    "(?<![a-z])(training|train|testing|test|validation|valid|(val|development|dev|evaluation|eval)(?![a-z]))",
    re.IGNORECASE,
)
ROWS_OF_A_GROUP = 100  # of a tar file, which says nothing of groups


def _file_features(languages: Sequence[str]) -> datasets.Features:
    """The types of rows that hold the bytes of their recordings."""
    return datasets.Features({**features(languages), **STORAGES["original"].features()})


class ParquetSplit:
    """A split of a prepared set: its row groups, as the manifest lists them.

    Args:
        prepared: The prepared set.
        split: The name of the split.
    """

    def __init__(self, prepared: PreparedSet, split: str) -> None:
        self.features = datasets.Features.from_dict(prepared.manifest["features"])
        self.licenses: dict[str, int] = prepared.manifest["licenses"]  # of all splits
        self.digest = f"{prepared.digest} {split}"
        self.row_groups: list[RowGroup] = []
        self._root = prepared.audio_root()

        shards = prepared.manifest["splits"][split]["shards"]
        for path, shard in zip(prepared.shard_paths(split), shards, strict=True):
            for number, rows in enumerate(shard["row_groups"]):
                self.row_groups.append(RowGroup(path, number, rows))

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        """Reads those columns of a row group, and gives what finds a row of it by its place."""
        table = _read_row_group(group.path, group.place, columns)
        table = with_absolute_paths(table, self._root)
        return lambda number: table.slice(number, 1).to_pylist()[0]


class HubSplit:
    """A split of a dataset that others made: Parquet files with a column of recordings and one of captions.

    Rows without captions are left out. Rows of one recording, as of sets with one row per caption, are refused: they
    would count as each other's negatives, and a stream cannot put them together.

    Args:
        row_groups: Its row groups; a `place` is the number in the file, and that of its first row in the dataset.
        split: What the ids of its rows begin with.
        types: The features of the dataset.
        config: Which columns hold what.
    """

    def __init__(
        self, row_groups: Sequence[RowGroup], split: str, types: datasets.Features, config: HubDatasetConfig
    ) -> None:
        self._columns = Columns(types, config)
        self._holds_files = isinstance(types.arrow_schema.field(self._columns.audio).type, pyarrow.StructType)
        self.features = _file_features(list(dict.fromkeys(self._columns.languages.values())))
        self.licenses: dict[str, int] = {}
        self.split = split

        with ThreadPoolExecutor(LANES) as pool:
            captioned = list(pool.map(self._find_captioned, row_groups))
        self.row_groups: list[RowGroup] = []
        for group, numbers in zip(row_groups, captioned, strict=True):
            if numbers:
                self.row_groups.append(group._replace(place=(*group.place[:2], numbers), rows=len(numbers)))
        num_rows = sum(group.rows for group in row_groups)
        num_captioned = sum(map(len, captioned))
        if num_captioned < num_rows:
            logger.warning("%s: left out %d of %d rows without a caption", split, num_rows - num_captioned, num_rows)

        paths = sorted({group.path for group in row_groups})
        versions = [use_files(path, lambda system, name: system.ukey(name)) for path in paths]
        self.digest = Hasher.hash([versions, self.row_groups, config])

    def _find_captioned(self, group: RowGroup) -> Sequence[int]:
        """The rows of a row group that have captions; its column of captions is read where some may have none."""
        number_in_file, _, may_lack = group.place
        if not may_lack.issuperset(self._columns.languages):
            return range(group.rows)
        table = _read_row_group(group.path, number_in_file, list(self._columns.languages))
        captioned = []
        for number, row in enumerate(table.to_pylist()):
            row = {self._columns.label: None, **row}
            if any(self._columns.describe(row, None, "")["captions"].values()):
                captioned.append(number)
        return captioned

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        """Reads those columns of a row group, and gives what finds a row of it by its place."""
        audio, label = self._columns.audio, self._columns.label
        wanted = [*self._columns.languages, *filter(None, [label])]
        wanted.append(f"{audio}.path" if self._holds_files and "audio" not in columns else audio)
        number_in_file, first_row, numbers = group.place
        table = _read_row_group(group.path, number_in_file, wanted)
        if self._holds_files and "audio" in columns:
            recordings = identify_recordings(table.column(audio))
            if len(set(recordings)) < len(recordings):
                raise ValueError(
                    f"{group.path}: {len(recordings)} rows from {first_row} hold {len(set(recordings))} recordings; a "
                    "stream needs one row per recording with all its captions: read the set without streaming, or "
                    "prepare it first"
                )

        def get_row(number: int) -> Row:
            number = numbers[number]
            found = table.slice(number, 1).to_pylist()[0]
            stored = found[audio] if self._holds_files else {"bytes": None, "path": found[audio]}
            row = self._columns.describe(found, stored["path"], f"{self.split}-{first_row + number:06d}")
            row["audio"] = stored
            return {name: row[name] for name in columns}

        return get_row


class TarSplit:
    """Samples of WebDataset: the members of a tar file whose names differ in the suffix only.

    A sample becomes a row by its recording (`.flac`, `.wav`, ...), and by `.txt`, a caption, or `.json`, with "text",
    "caption" or "captions" (a text or several), "tag" or "labels", "license" and "source". To know what there is, the
    headers of all tar files are read once; nothing is unpacked.

    Args:
        paths: The tar files, or their addresses.
        language: The ISO 639-3 code of the captions.
    """

    def __init__(self, paths: Sequence[str], language: str = "eng") -> None:
        self.features = _file_features([language])
        self.licenses: dict[str, int] = {}
        self.digest = ""
        self.row_groups: list[RowGroup] = []
        self.language = language

        for path in paths:
            self.digest += use_files(path, lambda system, name: system.ukey(name))
            samples = self._samples(path)
            for first in range(0, len(samples), ROWS_OF_A_GROUP):
                held = samples[first : first + ROWS_OF_A_GROUP]
                self.row_groups.append(RowGroup(path, (held[0][0], held[-1][1]), len(held)))

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        """Reads those columns of a row group, and gives what finds a row of it by its place."""
        first, last = group.place

        def read_part(file: Any) -> bytes:
            file.seek(first)
            return file.read(last - first)

        content = read_file(group.path, read_part)

        samples: dict[str, dict[str, bytes]] = {}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                key, suffix = _split_name(member.name)
                extracted = archive.extractfile(member)
                if extracted is not None:
                    samples.setdefault(key, {})[suffix] = extracted.read()

        rows = []
        for key, parts in samples.items():
            if set(parts) & set(SUFFIXES):
                try:
                    row = self._row(key, parts)
                except (AttributeError, TypeError, ValueError) as error:
                    raise ValueError(f"{group.path}: sample {key!r} cannot be read: {error}") from error
                rows.append({name: row[name] for name in columns})
        return rows.__getitem__

    def _row(self, key: str, parts: Mapping[str, bytes]) -> Row:
        suffix = next(suffix for suffix in SUFFIXES if suffix in parts)
        about = json.loads(parts.get(".json", b"{}"))
        said = about.get("captions") or about.get("caption") or about.get("text") or parts.get(".txt", b"").decode()
        captions = [said] if isinstance(said, str) else said
        labels = about.get("labels") or about.get("tag") or []

        return {
            "clip_id": key,
            "audio_path": key + suffix,
            "captions": {self.language: list(filter(str.strip, captions))},
            "labels": [labels] if isinstance(labels, str) else labels,
            "events": [],
            "source": about.get("source") or FILE_SOURCE + key,
            "license": about.get("license") or "",
            "audio": {"bytes": parts[suffix], "path": key + suffix},
        }

    def _samples(self, path: str) -> list[tuple[int, int]]:
        """The first and the last byte of each sample that has a recording.

        Raises:
            ValueError: The members of a sample are not neighbours, or a member is sparse: its header may announce any
                size.
        """
        found: list[tuple[int, int]] = []
        keys: set[str] = set()
        last_key, has_audio, first = None, False, 0
        for member in read_file(path, _read_headers):
            if member.issparse():
                raise ValueError(f"{path}: {member.name} is a sparse file; pack it without --sparse")
            key, suffix = _split_name(member.name)
            if key != last_key:
                if key in keys:
                    raise ValueError(
                        f"{path}: the members of sample {key!r} are not neighbours; pack files sorted by name, such as "
                        "by tar --sort=name"
                    )
                keys.add(key)
                last_key, has_audio, first = key, False, member.offset

            if suffix in SUFFIXES and not has_audio:
                has_audio = True
                found.append((first, 0))
            if has_audio:
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                found[-1] = first, end
        return found


def _read_headers(file: Any) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=file, mode="r:") as archive:
        return [member for member in archive if not member.isdir()]


def _read_row_group(path: str, number: int, columns: Sequence[str]) -> pyarrow.Table:
    def read(file: Any) -> pyarrow.Table:
        return pyarrow.parquet.ParquetFile(file).read_row_group(number, columns=list(columns))

    return read_file(path, read)


def _split_name(name: str) -> tuple[str, str]:
    """A member's name up to the first dot after the last slash, which its sample shares, and the rest."""
    folder, _, file = name.rpartition("/")
    stem, dot, suffix = file.partition(".")
    return f"{folder}/{stem}" if folder else stem, dot + suffix.lower()


def load_parquet(**options: Any) -> dict[str, RowStream]:
    """The splits of a dataset whose files are Parquet, on the Hub, in a folder, or at an address that fsspec can list.

    What there is is read off the ends of the files. A split for validation or testing that is missing is drawn from the
    training split, by whole row groups, which are read at once and hold neighbours.

    Args:
        **options: As `builders.hf.HubDatasetConfig`.

    Raises:
        FileNotFoundError: There are no Parquet files.
        ValueError: The columns are not there, or the training split is one row group and nothing can be held out.
    """
    config = HubDatasetConfig(**options)
    place = str(config.data_dir)
    if "://" in place:
        files: Any = _find_files(place, ".parquet")
    else:
        folder = Path(place).expanduser()
        place = str(folder) if folder.is_dir() else place
        builder = datasets.load_dataset_builder(place, config.subset, revision=config.revision)
        files = builder.config.data_files or {}

    groups: dict[str, list[RowGroup]] = {}
    origins: dict[str, str] = {}  # what the ids of each split's rows begin with
    names = name_splits(map(str, files))
    for name, paths in files.items():
        split = names[str(name)]
        origins[split] = str(name)
        if not all(path.endswith(".parquet") for path in paths):
            raise FileNotFoundError(f"{place} is to be of Parquet files to be streamed; it has {paths[0]}")
        with ThreadPoolExecutor(LANES) as pool:
            ends = list(pool.map(_read_end, paths))

        found = groups[split] = []
        first_row = 0
        for path, end in zip(paths, ends, strict=True):
            for number in range(end.num_row_groups):
                about = end.row_group(number)
                found.append(RowGroup(path, (number, first_row, _may_be_empty(about)), about.num_rows))
                first_row += about.num_rows
        types = datasets.Features.from_arrow_schema(ends[0].schema.to_arrow_schema())

    for split in ("test", "validation"):
        fraction = getattr(config, f"{split}_fraction")
        if split not in groups and "train" in groups and fraction > 0:
            groups["train"], groups[split] = _hold_out(groups["train"], fraction, config.seed)
            origins[split] = origins["train"]

    streams = {}
    for split, held in groups.items():
        streams[split] = RowStream(HubSplit(held, origins[split], types, config))
    return streams


def _read_end(path: str) -> pyarrow.parquet.FileMetaData:
    """Reads what a Parquet file says of itself."""
    return read_file(path, pyarrow.parquet.read_metadata)


def _may_be_empty(row_group: pyarrow.parquet.RowGroupMetaData) -> frozenset[str]:
    """The columns that may hold nulls, empty lists or blank texts in a row group, by its statistics."""
    columns = set()
    for number in range(row_group.num_columns):
        chunk = row_group.column(number)
        about = chunk.statistics
        is_full = about is not None and about.has_null_count and about.null_count == 0 and about.has_min_max
        if not (is_full and isinstance(about.min, str) and about.min.strip()):
            columns.add(chunk.path_in_schema.partition(".")[0])
    return frozenset(columns)


def _hold_out(groups: list[RowGroup], fraction: float, seed: int) -> tuple[list[RowGroup], list[RowGroup]]:
    """Draws row groups that hold about this fraction of the rows, one at least; gives the others first."""
    wanted = max(1, round(fraction * len(groups)))
    if wanted >= len(groups):
        raise ValueError(
            f"{len(groups)} row groups are too few to hold any out as a whole: --validation_fraction 0 and "
            "--test_fraction 0 keep the training split as it is, and so does reading it without --streaming"
        )
    drawn = sorted(np.random.default_rng(seed).permutation(len(groups)).tolist()[:wanted])
    kept = [group for number, group in enumerate(groups) if number not in drawn]
    return kept, [groups[number] for number in drawn]


def _find_files(data_dir: str, suffix: str) -> dict[str, list[str]]:
    """The files of a folder by split: the first word in their paths that names one, "train" without one."""

    def find(system: Any, folder: str) -> list[tuple[str, str]]:
        paths = sorted(system.glob(f"{folder.rstrip('/')}/**/*{suffix}"))
        return [(path[len(folder) :], system.unstrip_protocol(path)) for path in paths]

    files = use_files(str(data_dir), find)
    words = {path: match[0].lower() for path, _ in files if (match := _SPLIT_IN_PATH.search(path))}
    names = name_splits(dict.fromkeys(words.values()))
    splits: dict[str, list[str]] = {}
    for path, address in files:
        splits.setdefault(names[words[path]] if path in words else "train", []).append(address)

    if not splits:
        raise FileNotFoundError(f"data_dir {data_dir} holds no {suffix} file")
    return splits


@dataclass
class TarConfig:
    """Where WebDataset tar files are, and what their captions are in.

    Attributes:
        data_dir: The folder, or an address that fsspec can list. A tar file belongs to the split whose name its path
            holds ("train", "validation" or "valid", "test", "development", "evaluation"), and to "train" without one.
        language: The ISO 639-3 code of the captions.
    """

    data_dir: str | None = None
    language: str = "eng"

    def __post_init__(self) -> None:
        if self.data_dir is None:
            raise ValueError("webdataset needs data_dir: a folder of tar files, or its address")


def load_tars(**options: Any) -> dict[str, RowStream]:
    """The splits of a folder of WebDataset tar files; options as `TarConfig`."""
    config = TarConfig(**options)
    files = _find_files(str(config.data_dir), ".tar")
    return {split: RowStream(TarSplit(paths, config.language)) for split, paths in files.items()}
