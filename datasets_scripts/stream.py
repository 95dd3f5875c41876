"""Stream rows from Parquet or tar files in a shuffled order that can resume at any position.

>>> from modeling_supclap.datasets_scripts import load_splits
>>> rows = load_splits("prepared", data_dir="s3://bucket/clotho", streaming=True)["train"]  # doctest: +SKIP
>>> rows = rows.shuffle(seed=0).shard(process=0, num_processes=8)  # doctest: +SKIP

A file consists of row groups, which are read as a whole. The row groups are distributed in random order over 16 shuffle
shards, and the rows of each row group are shuffled. The stream takes one row from each shard in turn. Therefore the
row order depends only on the seed and the epoch, not on the number of processes or the position of a resumed run. If 16
is a multiple of (number of processes x number of workers), each row group is read by only one worker.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from operator import itemgetter
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from datasets.fingerprint import Hasher
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

SHUFFLE_SHARDS = 16
ROWS_OF_A_GROUP = 100  # rows that are read at once from a source without row groups, such as a tar file

Row = dict[str, Any]


class RowGroup(NamedTuple):
    """Part of a file that is always read as a whole."""

    path: str
    location: Any  # Parquet: number of the row group (`HubSplit` adds more fields); tar: start and end byte
    rows: int
    start: int = 0  # index of the first row in the split, set by `RowStream`
    repetition: int = 0  # number of the copy in an epoch
    of_rows: int | None = None  # if only a random part is used: number of rows of the whole group


class RowStream(IterableDataset[Row]):
    """Iterable dataset that reads the rows of one split on demand, in file order unless it is shuffled.

    Each row has the additional column `clip_index`, its index in the split. The rows of a process are divided among the
    workers of its `DataLoader`. The batches therefore depend on the number of workers, and a resumed run must use the
    same number.

    Args:
        split: Source of the rows, such as `stream_sources.ParquetSplit`, with the attributes `features`, `licenses`,
            `digest` and `row_groups` and a method `read` like that of this class.

    Attributes:
        num_rows: Number of rows of all processes per epoch.
        licenses: Number of clips per licence in the whole dataset; empty if unknown.
    """

    def __init__(self, split: Any) -> None:
        self.features = datasets.Features({**split.features, "clip_index": datasets.Value("int64")})
        self.licenses = split.licenses
        self.row_groups: list[RowGroup] = []
        self.num_rows = 0
        for group in split.row_groups:
            self.row_groups.append(group._replace(start=self.num_rows))
            self.num_rows += group.rows
        self._split = split
        self._columns = list(split.features)
        self._seed: int | None = None
        self._process, self._num_processes = 0, 1
        self._counts: np.ndarray | None = None  # expected number of copies of each row group in an epoch
        self._functions: list[Callable[[Row], Row]] = []
        # Epoch, number of rows yielded in it, batch size. Shared memory, so that persistent workers get a new epoch.
        self._state = torch.tensor([0, 0, 1]).share_memory_()

    @property
    def column_names(self) -> list[str]:
        """Column names, as in `datasets.Dataset`."""
        return list(self.features)

    @property
    def content_hash(self) -> str:
        """Hash of the names and row groups of the files, and of the numbers of copies, without folders."""
        parts: list[Any] = [None if self._counts is None else self._counts.tolist()]
        if not hasattr(self._split, "streams"):  # the content of a mixture includes its row groups
            parts += [[os.path.basename(group.path), str(group.location), group.rows] for group in self.row_groups]
        digest = hashlib.sha256(json.dumps([getattr(self._split, "content", ""), parts]).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of rows of this process per epoch."""
        rest = 0 if self._seed is not None else int(self._process < self.num_rows % self._num_processes)
        return self.num_rows // self._num_processes + rest

    def shuffle(self, seed: int) -> RowStream:
        """Return a stream in random order, which depends on the seed and the epoch."""
        return self._changed(_seed=seed)

    def shard(self, process: int, num_processes: int) -> RowStream:
        """Return a stream with the rows of one process. Each row belongs to only one process.

        Successive rows go to successive processes, so that a global batch contains the same rows for any number of
        processes. In a shuffled stream all processes have the same number of rows, because every training step needs
        all processes. If the number of rows is not divisible by `num_processes`, the remaining rows are dropped.
        """
        if not 0 <= process < num_processes:
            raise ValueError(f"process is {process} of {num_processes}; expected 0 to {num_processes - 1}")
        return self._changed(_process=process, _num_processes=num_processes)

    def repeat(self, counts: Sequence[float]) -> RowStream:
        """Return a stream that repeats each row group; `counts` are the mean numbers of copies per epoch.

        Every epoch has the same length. With a count of 2.5, an epoch contains two or three copies of each row. The
        column `repetition` contains the number of the copy.
        """
        num_rows = round(sum(group.rows * count for group, count in zip(self.row_groups, counts, strict=True)))
        return self._changed(_counts=np.array(counts, np.float64), num_rows=num_rows)

    def map(self, function: Callable[[Row], Row], features: datasets.Features | None = None) -> RowStream:
        """Return a stream that applies a function to each row when it is read. `features` describe the new rows."""
        return self._changed(_functions=[*self._functions, function], features=features or self.features)

    def remove_columns(self, names: Sequence[str]) -> RowStream:
        """Return a stream without the given columns. Removed Parquet columns are not downloaded."""
        rest = {name: kind for name, kind in self.features.items() if name not in names}
        columns = [name for name in self._columns if name not in names]
        return self._changed(_columns=columns, features=datasets.Features(rest))

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        """Read columns of a row group. Return a function that maps the index of a row in the group to the row."""
        get_row = self._split.read(group, [column for column in self._columns if column in columns])

        def get_mapped(number: int) -> Row:
            row = {**get_row(number), "clip_index": group.start + number}
            for function in self._functions:
                row = function(row)
            return row

        return get_mapped

    def to_dataset(self, cache_dir: str | None = None) -> datasets.Dataset:
        """Read all rows in file order into a memory-mapped `datasets.Dataset`, from the cache if they are unchanged."""
        num_rows = sum(group.rows for group in self.row_groups)
        whole = self._changed(_seed=None, _process=0, _num_processes=1, _counts=None, num_rows=num_rows)
        whole.load_state_dict({"epoch": 0, "rows": 0})
        fingerprint = Hasher.hash([self._split.digest, self._columns, self._functions])
        return datasets.Dataset.from_generator(
            whole.__iter__, features=self.features, cache_dir=cache_dir, fingerprint=fingerprint
        )

    def _changed(self, **attributes: Any) -> RowStream:
        changed = copy.copy(self)
        changed._state = self._state.clone().share_memory_()
        for name, value in attributes.items():
            setattr(changed, name, value)
        return changed

    def set_epoch(self, epoch: int) -> None:
        """Set the current epoch, counted from 0. Another epoch starts at its first row, the same one is continued."""
        if epoch != int(self._state[0]):
            self._state.copy_(torch.tensor([epoch, 0, 1]))

    def state_dict(self) -> dict[str, int]:
        """Return the position of the iteration in this process, as a dict with "epoch", "rows" and "batch_size".

        The progress of `DataLoader` workers is not included. With workers, construct the position from the number of
        yielded batches: `{"epoch": epoch, "rows": batches * batch_size, "batch_size": batch_size}`.
        """
        epoch, rows, batch_size = self._state.tolist()
        return {"epoch": epoch, "rows": rows, "batch_size": batch_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the position of the next iteration (see `state_dict`). Rows before this position are not read."""
        self._state.copy_(torch.tensor([state["epoch"], state["rows"], state.get("batch_size", 1)]))

    def __iter__(self) -> Iterator[Row]:
        epoch, num_yielded, batch_size = self._state.tolist()
        batches = num_yielded // batch_size

        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        # `DataLoader` takes batches from its workers in turn. A resumed loader starts with the first worker again.
        worker = 0 if info is None else (info.id + batches) % workers
        skipped = num_yielded if info is None else batch_size * len(range(worker, batches, workers))

        rows = EpochReader(self, epoch)
        for index in range(worker, len(self), workers)[skipped:]:
            if info is None:
                self._state[1] = index + 1
            yield rows[index]
        if info is None:
            self._state[1] = 0  # the next iteration starts from the beginning


class EpochReader:
    """Random access to the rows of one process in one epoch, with one row group per shuffle shard in memory."""

    def __init__(self, stream: RowStream, epoch: int) -> None:
        self.stream, self.epoch, self.shards = stream, epoch, [stream.row_groups]
        if stream._seed is not None or stream._counts is not None:
            random, groups = np.random.default_rng([stream._seed or 0, epoch]), stream.row_groups
            if stream._counts is not None:
                sizes = [group.rows for group in groups]
                groups = _repeat(groups, draw_copies(np.multiply(sizes, stream._counts), stream.num_rows, random))
            shuffled = [groups[number] for number in random.permutation(len(groups))]
            self.shards = [shuffled[shard::SHUFFLE_SHARDS] for shard in range(SHUFFLE_SHARDS)]
        self._groups: dict[int, tuple[RowGroup, Callable[[int], Row], np.ndarray]] = {}
        self._starts: list[list[int]] = []  # for each shard, the number of rows before each of its row groups
        for shard in self.shards:
            self._starts.append(list(accumulate((group.rows for group in shard), initial=0)))

        # The shards yield one row each in turn. When the shortest shards end, a new segment continues with the others.
        lengths = [starts[-1] for starts in self._starts]
        # first position, first row of each shard, shards
        self._segments: list[tuple[int, int, list[int]]] = []
        position = first_row = 0
        for length in sorted(set(lengths)):
            remaining = [shard for shard, of_shard in enumerate(lengths) if of_shard > first_row]
            self._segments.append((position, first_row, remaining))
            position += (length - first_row) * len(remaining)
            first_row = length

    def __getitem__(self, index: int) -> Row:
        stream = self.stream
        position = index * stream._num_processes + stream._process
        start, first_row, shards = self._segments[bisect_right(self._segments, position, key=itemgetter(0)) - 1]
        row, number = divmod(position - start, len(shards))
        shard, row = shards[number], first_row + row

        index = bisect_right(self._starts[shard], row) - 1
        group = self.shards[shard][index]
        if shard not in self._groups or self._groups[shard][0] != group:
            # free it before reading the next: one row group per shard is in memory
            self._groups.pop(shard, None)
            order = np.arange(group.of_rows or group.rows)
            if stream._seed is not None:
                key = [stream._seed, self.epoch, group.start, group.repetition]
                order = np.random.default_rng(key).permutation(order)
            self._groups[shard] = group, stream.read(group, stream._columns), order

        _, get_row, order = self._groups[shard]
        values = get_row(int(order[row - self._starts[shard][index]]))
        return values if stream._counts is None else {**values, "repetition": group.repetition}


def draw_copies(expected: np.ndarray, total: int, random: np.random.Generator) -> np.ndarray:
    """Draw the number of copies of each item in an epoch, int `(items,)`. Their sum is `total`.

    The `expected` numbers are first scaled to the sum `total`. Each number is then rounded up or down at random, by
    systematic resampling in random order.
    """
    order = random.permutation(len(expected))
    ends = np.cumsum(expected[order])
    ends *= total / ends[-1]
    ends[-1] = total  # without rounding error
    copies = np.empty(len(expected), np.int64)
    copies[order] = np.diff(np.floor(ends + random.random()), prepend=0)
    return copies


def _repeat(groups: Sequence[RowGroup], num_rows: np.ndarray) -> list[RowGroup]:
    """Repeat each row group until it has the given number of rows; its last copy may have fewer rows."""
    copies = []
    for group, total in zip(groups, num_rows.tolist(), strict=True):
        for repetition, first in enumerate(range(0, total, group.rows)):
            rows = min(group.rows, total - first)
            copies.append(group._replace(rows=rows, repetition=repetition, of_rows=group.rows))
    return copies


class EpochRows(Dataset[Row]):
    """Map-style dataset over a stream, with keys `(epoch, index)` from `EpochBatches`."""

    def __init__(self, stream: RowStream) -> None:
        self.stream = stream
        self._reader: EpochReader | None = None

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, key: tuple[int, int]) -> Row:
        epoch, index = key
        if self._reader is None or self._reader.epoch != epoch:
            self._reader = EpochReader(self.stream, epoch)
        return self._reader[index]


class EpochBatches(Sampler[list[tuple[int, int]]]):
    """Batch sampler for `EpochRows` that yields lists of keys `(epoch, index)` for the batches of one process.

    A batch depends only on its number, so a run can resume at any batch without a saved state. The `DataLoader` workers
    take batches in turn, and each worker reads the rows of its own shuffle shards. The last rows of an epoch that do
    not fill a batch are dropped.
    """

    def __init__(self, stream: RowStream, batch_size: int, workers: int = 0) -> None:
        self.num_rows, self.batch_size, self.workers = len(stream), batch_size, max(1, workers)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        rows_of_workers = [len(range(worker, self.num_rows, self.workers)) for worker in range(self.workers)]
        return sum(num_rows // self.batch_size for num_rows in rows_of_workers)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for number in range(len(self)):
            batch, worker = divmod(number, self.workers)
            indices = range(worker, self.num_rows, self.workers)[batch * self.batch_size :][: self.batch_size]
            yield list(zip(repeat(self.epoch), indices))
