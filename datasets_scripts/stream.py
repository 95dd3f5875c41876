"""Rows of a prepared set as a stream: read as they are needed, in an order that any process can take up at any place.

>>> from modeling_supclap.datasets_scripts import load_splits
>>> rows = load_splits("prepared", data_dir="s3://bucket/clotho", streaming=True)["train"]  # doctest: +SKIP
>>> rows = rows.shuffle(seed=0).shard(process=0, num_processes=8)  # doctest: +SKIP

`IterableDataset.shuffle` of `datasets` fills its buffer with other rows when a run is resumed, and gives each process
other batches when their number changes. Here the order of an epoch is a function of the seed and the epoch. Row groups
are dealt in a random order to 16 lanes, the rows within each are shuffled, and the lanes give a row in turn. So any
16 successive rows come from 16 places of the set, and where 16 is a multiple of the processes times their workers, each
of these reads the row groups of its own lanes and no others.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .prepared import PreparedSet, with_absolute_paths

LANES = 16

Row = dict[str, Any]


class RowGroup(NamedTuple):
    """A part of a shard that is read at once.

    Attributes:
        path: The file or the address of the shard.
        number: Its place in the shard.
        start: The place in the split of its first row.
        rows: How many rows it has.
    """

    path: str
    number: int
    start: int
    rows: int


class RowStream(IterableDataset):
    """The rows of one split, each with its place in the split as `clip_index`.

    As it comes it gives the split in order. `shuffle`, `shard` and `map` give other streams of the same rows. Of a
    `DataLoader` with several workers, each gives a part of the process's rows, so that the composition of the batches
    depends on the number of workers, and on nothing else; a run that is resumed keeps that number.

    Args:
        prepared: The prepared set.
        split: The name of the split.
    """

    def __init__(self, prepared: PreparedSet, split: str) -> None:
        self.features = datasets.Features.from_dict(prepared.manifest["features"])
        self.features["clip_index"] = datasets.Value("int64")
        self.row_groups: list[RowGroup] = []
        self._root = prepared.audio_root()
        self._seed: int | None = None
        self._process, self._num_processes = 0, 1
        self._functions: list[Callable[[Row], Row]] = []
        # The epoch, rows given in it, and rows a batch. Shared memory, so that workers that outlive an epoch see it.
        self._state = torch.tensor([0, 0, 1]).share_memory_()

        start = 0
        shards = prepared.manifest["splits"][split]["shards"]
        for path, shard in zip(prepared.shard_paths(split), shards, strict=True):
            for number, rows in enumerate(shard["row_groups"]):
                self.row_groups.append(RowGroup(path, number, start, rows))
                start += rows
        self.num_rows = start
        """The number of rows of the whole split."""

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

    def map(self, function: Callable[[Row], Row]) -> RowStream:
        """The rows that a function makes of the rows, as they are read.

        Args:
            function: Takes a row and gives one; a function of a module, or a `functools.partial` of one, where workers
                are started anew.
        """
        return self._changed(_functions=[*self._functions, function])

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

        reader = _Reader(self._lanes(epoch), self._root, self._shuffled_group(epoch))
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
        root: The folder of the recordings of a set that holds none.
        order: Gives the order of the rows within a row group.
    """

    def __init__(self, lanes: list[list[RowGroup]], root: str | None, order: Callable[[RowGroup], np.ndarray]) -> None:
        self.lanes, self.root, self.order = lanes, root, order
        self.starts: list[list[int]] = []
        for lane in lanes:
            self.starts.append([0])
            for group in lane:
                self.starts[-1].append(self.starts[-1][-1] + group.rows)
        self.tables: dict[int, tuple[RowGroup, pyarrow.Table, np.ndarray]] = {}

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
        if lane not in self.tables or self.tables[lane][0] != group:
            self.tables.pop(lane, None)  # before the next is read: never two of a lane in memory

            with fsspec.open(group.path, "rb") as file:
                table = pyarrow.parquet.ParquetFile(file).read_row_group(group.number)
            self.tables[lane] = group, with_absolute_paths(table, self.root), self.order(group)

        _, table, order = self.tables[lane]
        number = int(order[row - self.starts[lane][place]])
        (values,) = table.slice(number, 1).to_pylist()
        return {**values, "clip_index": group.start + number}
