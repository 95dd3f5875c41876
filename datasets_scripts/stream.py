"""Rows as a stream: read as they are needed, in an order that any process can take up at any place.

>>> from modeling_supclap.datasets_scripts import load_splits
>>> rows = load_splits("prepared", data_dir="s3://bucket/clotho", streaming=True)["train"]  # doctest: +SKIP
>>> rows = rows.shuffle(seed=0).shard(process=0, num_processes=8)  # doctest: +SKIP

What can be streamed are sets that `prepare.py` wrote, and tar files of WebDataset: `load_splits("webdataset", ...)`.

`IterableDataset.shuffle` of `datasets` fills its buffer with other rows when a run is resumed, and gives each process
other batches when their number changes. Here the order of an epoch is a function of the seed and the epoch. Row groups
are dealt in a random order to 16 lanes, the rows within each are shuffled, and the lanes give a row in turn. So any
16 successive rows come from 16 places of the set, and where 16 is a multiple of the processes times their workers, each
of these reads the row groups of its own lanes and no others.
"""

from __future__ import annotations

import copy
import io
import json
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import datasets
import fsspec
import numpy as np
import pyarrow.parquet
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .builders.recordings import SUFFIXES
from .prepared import PreparedSet, with_absolute_paths
from .schema import FILE_SOURCE, features

LANES = 16
ROWS_OF_A_GROUP = 100  # of a tar file, which says nothing of groups

Row = dict[str, Any]


class RowGroup(NamedTuple):
    """A part of a shard that is read at once.

    Attributes:
        path: The file or the address of the shard.
        place: What finds it in the shard: its number in Parquet, the first and the last byte in a tar file.
        start: The place in the split of its first row.
        rows: How many rows it has.
    """

    path: str
    place: Any
    start: int
    rows: int


class ParquetSplit:
    """A split of a prepared set: its row groups, as the manifest lists them.

    Args:
        prepared: The prepared set.
        split: The name of the split.
    """

    def __init__(self, prepared: PreparedSet, split: str) -> None:
        self.features = datasets.Features.from_dict(prepared.manifest["features"])
        self.row_groups: list[RowGroup] = []
        self._root = prepared.audio_root()

        start = 0
        shards = prepared.manifest["splits"][split]["shards"]
        for path, shard in zip(prepared.shard_paths(split), shards, strict=True):
            for number, rows in enumerate(shard["row_groups"]):
                self.row_groups.append(RowGroup(path, number, start, rows))
                start += rows

    def read(self, group: RowGroup) -> Callable[[int], Row]:
        """Reads a row group, and gives what finds a row of it by its place."""
        with fsspec.open(group.path, "rb") as file:
            table = pyarrow.parquet.ParquetFile(file).read_row_group(group.place)
        table = with_absolute_paths(table, self._root)
        return lambda number: table.slice(number, 1).to_pylist()[0]


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
        self.features = features([language])
        self.features["audio"] = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
        self.row_groups: list[RowGroup] = []
        self.language = language

        start = 0
        for path in paths:
            samples = self._samples(path)
            for first in range(0, len(samples), ROWS_OF_A_GROUP):
                held = samples[first : first + ROWS_OF_A_GROUP]
                self.row_groups.append(RowGroup(path, (held[0][0], held[-1][1]), start, len(held)))
                start += len(held)

    def read(self, group: RowGroup) -> Callable[[int], Row]:
        """Reads a row group, and gives what finds a row of it by its place."""
        first, last = group.place
        with fsspec.open(group.path, "rb") as file:
            file.seek(first)
            content = file.read(last - first)

        samples: dict[str, dict[str, bytes]] = {}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                key, suffix = _split_name(member.name)
                extracted = archive.extractfile(member)
                if extracted is not None:
                    samples.setdefault(key, {})[suffix] = extracted.read()

        rows = [self._row(key, parts) for key, parts in samples.items() if set(parts) & set(SUFFIXES)]
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
        """The first and the last byte of each sample that has a recording."""
        found: list[tuple[int, int]] = []
        last_key, has_audio, first = None, False, 0
        with fsspec.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                key, suffix = _split_name(member.name)
                if key != last_key:
                    last_key, has_audio, first = key, False, member.offset

                if suffix in SUFFIXES and not has_audio:
                    has_audio = True
                    found.append((first, 0))
                if has_audio:
                    end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    found[-1] = first, end
        return found


def _split_name(name: str) -> tuple[str, str]:
    """A member's name up to the first dot after the last slash, which its sample shares, and the rest."""
    folder, _, file = name.rpartition("/")
    stem, dot, suffix = file.partition(".")
    return f"{folder}/{stem}" if folder else stem, dot + suffix.lower()


def load_tars(data_dir: str, language: str = "eng") -> dict[str, RowStream]:
    """The splits of a folder of WebDataset tar files.

    Args:
        data_dir: The folder, or an address that fsspec can list. A tar file belongs to the split whose name its path
            holds ("train", "validation" or "valid", "test"), and to "train" without one.
        language: The ISO 639-3 code of the captions.
    """
    system, folder = fsspec.core.url_to_fs(str(data_dir))
    splits: dict[str, list[str]] = {}
    for path in sorted(system.glob(f"{folder.rstrip('/')}/**/*.tar")):
        name = re.search("test|valid|train", path[len(folder) :])
        split = {"valid": "validation"}.get(name[0], name[0]) if name else "train"
        splits.setdefault(split, []).append(system.unstrip_protocol(path))

    if not splits:
        raise FileNotFoundError(f"data_dir {data_dir} holds no .tar file")
    return {split: RowStream(TarSplit(paths, language)) for split, paths in splits.items()}


class RowStream(IterableDataset):
    """The rows of one split, each with its place in the split as `clip_index`.

    As it comes it gives the split in order. `shuffle`, `shard` and `map` give other streams of the same rows. Of a
    `DataLoader` with several workers, each gives a part of the process's rows, so that the composition of the batches
    depends on the number of workers, and on nothing else; a run that is resumed keeps that number.

    Args:
        split: What is read: a `ParquetSplit` or a `TarSplit`.
    """

    def __init__(self, split: ParquetSplit | TarSplit) -> None:
        self.features = datasets.Features({**split.features, "clip_index": datasets.Value("int64")})
        self.row_groups = split.row_groups
        self._split = split
        self._seed: int | None = None
        self._process, self._num_processes = 0, 1
        self._functions: list[Callable[[Row], Row]] = []
        # The epoch, rows given in it, and rows a batch. Shared memory, so that workers that outlive an epoch see it.
        self._state = torch.tensor([0, 0, 1]).share_memory_()

    @property
    def num_rows(self) -> int:
        """The number of rows of the whole split."""
        return self.row_groups[-1].start + self.row_groups[-1].rows if self.row_groups else 0

    def shuffle(self, seed: int) -> RowStream:
        """The same rows in a random order, another one for each epoch.

        Args:
            seed: With the epoch, decides the order.
        """
        return self._changed(_seed=seed)

    def shard(self, process: int, num_processes: int) -> RowStream:
        """The rows of one of several processes, each row in exactly one.

        The processes take the rows in turn, so that a global batch holds the same rows whatever their number. Of a
        shuffled stream all give the same number of rows, as a step needs all of them: the last rows of the epoch, fewer
        than there are processes, are left out, other ones in each epoch.

        Args:
            process: Which process, counted from 0.
            num_processes: How many there are.
        """
        if not 0 <= process < num_processes:
            raise ValueError(f"process is {process} of {num_processes}; it must be one of 0 to {num_processes - 1}")
        return self._changed(_process=process, _num_processes=num_processes)

    def map(self, function: Callable[[Row], Row], features: datasets.Features | None = None) -> RowStream:
        """The rows that a function makes of the rows, as they are read.

        Args:
            function: Takes a row and gives one; a function of a module, or a `functools.partial` of one, where workers
                are started anew.
            features: The types of the new rows; None, the same as before.
        """
        return self._changed(_functions=[*self._functions, function], features=features or self.features)

    def _changed(self, **attributes: Any) -> RowStream:
        changed = copy.copy(self)
        changed._state = self._state.clone().share_memory_()
        for name, value in attributes.items():
            setattr(changed, name, value)
        return changed

    @property
    def rows_per_epoch(self) -> int:
        """How many rows this process gives in an epoch."""
        rest = 0 if self._seed is not None else int(self._process < self.num_rows % self._num_processes)
        return self.num_rows // self._num_processes + rest

    def set_epoch(self, epoch: int) -> None:
        """Makes the order that of this epoch, counted from 0; the next iteration starts at its beginning."""
        if epoch != int(self._state[0]):
            self._state.copy_(torch.tensor([epoch, 0, 1]))

    def state_dict(self) -> dict[str, int]:
        """The place that iterating in this process has come to.

        A `DataLoader` with workers iterates elsewhere; there the place is `{"epoch": e, "rows": batches * batch_size,
        "batch_size": batch_size}`, of the batches that it has given.
        """
        epoch, rows, batch_size = self._state.tolist()
        return {"epoch": epoch, "rows": rows, "batch_size": batch_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next iteration go on at a place, without reading what lies before it.

        Args:
            state: As `state_dict`; "batch_size" may be missing where rows are not read by workers.
        """
        self._state.copy_(torch.tensor([state["epoch"], state["rows"], state.get("batch_size", 1)]))

    def __iter__(self) -> Iterator[Row]:
        epoch, given, batch_size = self._state.tolist()
        batches = given // batch_size

        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        # `DataLoader` takes batches from its workers in turn, and begins with the first of them when it is resumed.
        worker = 0 if info is None else (info.id + batches) % workers
        skipped = given if info is None else batch_size * len(range(worker, batches, workers))

        reader = _Reader(self._lanes(epoch), self._split.read, self._shuffled_group(epoch))
        own, last = 0, self.rows_per_epoch
        for place, (lane, row) in enumerate(reader.places()):
            turn, process = divmod(place, self._num_processes)
            if turn == last:
                break
            if process != self._process or turn % workers != worker:
                continue

            own += 1
            if own > skipped:
                if info is None:
                    self._state[1] = own
                yield self._finish(reader.read(lane, row))
        if info is None:
            self._state[1] = 0  # the next iteration is another epoch, or the same again

    def _finish(self, row: Row) -> Row:
        for function in self._functions:
            row = function(row)
        return row

    def _lanes(self, epoch: int) -> list[list[RowGroup]]:
        """The row groups of an epoch, in the order of each lane."""
        if self._seed is None:
            return [self.row_groups]

        lanes: list[list[RowGroup]] = [[] for _ in range(min(LANES, len(self.row_groups)))]
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self.row_groups))
        for place, number in enumerate(order):
            lanes[place % LANES].append(self.row_groups[number])
        return lanes

    def _shuffled_group(self, epoch: int) -> Callable[[RowGroup], np.ndarray]:
        """The order of the rows within a row group."""
        if self._seed is None:
            return lambda group: np.arange(group.rows)
        return lambda group: np.random.default_rng([self._seed or 0, epoch, group.start]).permutation(group.rows)


class _Reader:
    """The lanes of one epoch; of each, the row group is in memory that was read last.

    Args:
        lanes: The row groups of each lane.
        read_group: Reads a row group, and gives what finds a row of it by its place.
        order: Gives the order of the rows within a row group.
    """

    def __init__(
        self,
        lanes: list[list[RowGroup]],
        read_group: Callable[[RowGroup], Callable[[int], Row]],
        order: Callable[[RowGroup], np.ndarray],
    ) -> None:
        self.lanes, self.read_group, self.order = lanes, read_group, order
        self.starts: list[list[int]] = []
        for lane in lanes:
            self.starts.append([0])
            for group in lane:
                self.starts[-1].append(self.starts[-1][-1] + group.rows)
        self.groups: dict[int, tuple[RowGroup, Callable[[int], Row], np.ndarray]] = {}

    def places(self) -> Iterator[tuple[int, int]]:
        """Lane and place in the lane of each row of the epoch, in the order of the epoch."""
        row, alive = 0, list(enumerate(self.starts))
        while alive:
            alive = [(lane, starts) for lane, starts in alive if row < starts[-1]]
            for lane, _ in alive:
                yield lane, row
            row += 1

    def read(self, lane: int, row: int) -> Row:
        """The row at a place of a lane."""
        place = bisect_right(self.starts[lane], row) - 1
        group = self.lanes[lane][place]
        if lane not in self.groups or self.groups[lane][0] != group:
            self.groups.pop(lane, None)  # before the next is read: never two of a lane in memory
            self.groups[lane] = group, self.read_group(group), self.order(group)

        _, get_row, order = self.groups[lane]
        number = int(order[row - self.starts[lane][place]])
        return {**get_row(number), "clip_index": group.start + number}
