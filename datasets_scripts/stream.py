"""Rows as a stream: read as they are needed, in an order that any process can take up at any place.

>>> from modeling_supclap.datasets_scripts import load_splits
>>> rows = load_splits("prepared", data_dir="s3://bucket/clotho", streaming=True)["train"]  # doctest: +SKIP
>>> rows = rows.shuffle(seed=0).shard(process=0, num_processes=8)  # doctest: +SKIP

`stream_sources` reads the files.

`IterableDataset.shuffle` of `datasets` fills its buffer with other rows when a run is resumed, and gives each process
other batches when their number changes. Here the order of an epoch is a function of the seed and the epoch. Row groups
are dealt in a random order to 16 lanes, the rows within each are shuffled, and the lanes give a row in turn. So any
16 successive rows come from 16 places of the set, and where 16 is a multiple of the processes times their workers, each
of these reads the row groups of its own lanes and no others.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import datasets
import numpy as np
import torch
from datasets.fingerprint import Hasher
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

if TYPE_CHECKING:
    from .stream_sources import HubSplit, ParquetSplit, TarSplit

LANES = 16

Row = dict[str, Any]


class RowGroup(NamedTuple):
    """A part of a shard that is read at once.

    Attributes:
        path: The file or the address of the shard.
        place: What finds it in the shard: its number in Parquet, the first and the last byte in a tar file.
        rows: How many rows it has.
        start: The place in the split of its first row, which `RowStream` counts.
    """

    path: str
    place: Any
    rows: int
    start: int = 0


class RowStream(IterableDataset):
    """The rows of one split, each with its place in the split as `clip_index`.

    As it comes it gives the split in order. `shuffle`, `shard`, `map` and `remove_columns` give other streams of the
    same rows. Of a `DataLoader` with several workers, each gives a part of the process's rows, so that the composition
    of the batches depends on the number of workers, and on nothing else; a run that is resumed keeps that number.

    Args:
        split: What is read: a `ParquetSplit`, a `HubSplit` or a `TarSplit`.

    Attributes:
        num_rows: The number of rows of the whole split.
        licenses: How many clips have which licence, of the whole set, as far as its maker says so.
    """

    def __init__(self, split: ParquetSplit | HubSplit | TarSplit) -> None:
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
        self._functions: list[Callable[[Row], Row]] = []
        # The epoch, rows given in it, and rows a batch. Shared memory, so that workers that outlive an epoch see it.
        self._state = torch.tensor([0, 0, 1]).share_memory_()

    @property
    def column_names(self) -> list[str]:
        """The names of the columns, as of a `datasets.Dataset`."""
        return list(self.features)

    def __len__(self) -> int:
        """How many rows this process gives in an epoch."""
        rest = 0 if self._seed is not None else int(self._process < self.num_rows % self._num_processes)
        return self.num_rows // self._num_processes + rest

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

    def remove_columns(self, names: Sequence[str]) -> RowStream:
        """The same rows without some columns of the split, which are not read; of Parquet, not even fetched.

        Args:
            names: The columns.
        """
        kept = {name: kind for name, kind in self.features.items() if name not in names}
        columns = [name for name in self._columns if name not in names]
        return self._changed(_columns=columns, features=datasets.Features(kept))

    def to_dataset(self, cache_dir: str | None = None) -> datasets.Dataset:
        """All rows in order, on this machine: for a split that is walked through several times, to evaluate on.

        Args:
            cache_dir: Where `datasets` keeps the memory-mapped rows; its own default when None. What is there of the
                same files is not read again.
        """
        whole = self._changed(_seed=None, _process=0, _num_processes=1)
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

        rows = self.read_epoch(epoch)
        for turn in range(worker, len(self), workers)[skipped:]:
            if info is None:
                self._state[1] = turn + 1
            yield rows[turn]
        if info is None:
            self._state[1] = 0  # the next iteration is another epoch, or the same again

    def read_epoch(self, epoch: int) -> EpochReader:
        """The rows of this process in an epoch, by their turn; those of one turn after the other are read fast."""
        lanes = [self.row_groups]
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self.row_groups))
            dealt = [self.row_groups[number] for number in order]
            lanes = [dealt[lane::LANES] for lane in range(min(LANES, len(dealt)))]
        return EpochReader(self, epoch, lanes)


class EpochReader:
    """The rows of a process in one epoch; of each lane, the row group is in memory that was read last.

    Args:
        stream: Whose rows they are.
        epoch: Which epoch.
        lanes: The row groups of each lane, in their order.
    """

    def __init__(self, stream: RowStream, epoch: int, lanes: list[list[RowGroup]]) -> None:
        self.stream, self.epoch, self.lanes = stream, epoch, lanes
        self._groups: dict[int, tuple[RowGroup, Callable[[int], Row], np.ndarray]] = {}
        self._starts: list[list[int]] = []
        for lane in lanes:
            self._starts.append(list(accumulate((group.rows for group in lane), initial=0)))

        # Lanes give a row in turn. Where the shortest ones are at their end, the others go on: a new stretch.
        lengths = [starts[-1] for starts in self._starts]
        self._stretches: list[tuple[int, int, list[int]]] = []  # first place, first row of each lane, lanes
        place = first_row = 0
        for length in sorted(set(lengths)):
            alive = [lane for lane, own in enumerate(lengths) if own > first_row]
            self._stretches.append((place, first_row, alive))
            place += (length - first_row) * len(alive)
            first_row = length

    def __getitem__(self, turn: int) -> Row:
        stream = self.stream
        place = turn * stream._num_processes + stream._process
        start, first_row, alive = self._stretches[bisect_right(self._stretches, place, key=itemgetter(0)) - 1]
        row, number = divmod(place - start, len(alive))
        return self._read(alive[number], first_row + row)

    def _read(self, lane: int, row: int) -> Row:
        """The row at a place of a lane."""
        stream = self.stream
        place = bisect_right(self._starts[lane], row) - 1
        group = self.lanes[lane][place]
        if lane not in self._groups or self._groups[lane][0] != group:
            self._groups.pop(lane, None)  # before the next is read: never two of a lane in memory
            order = np.arange(group.rows)
            if stream._seed is not None:
                order = np.random.default_rng([stream._seed, self.epoch, group.start]).permutation(group.rows)
            self._groups[lane] = group, stream._split.read(group, stream._columns), order

        _, get_row, order = self._groups[lane]
        number = int(order[row - self._starts[lane][place]])
        found = {**get_row(number), "clip_index": group.start + number}
        for function in stream._functions:
            found = function(found)
        return found


class EpochRows(Dataset):
    """The rows of a stream by (epoch, turn), as `EpochBatches` names them, so that no skipped row need be read."""

    def __init__(self, stream: RowStream) -> None:
        self.stream = stream
        self._reader: EpochReader | None = None

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, place: tuple[int, int]) -> Row:
        epoch, turn = place
        if self._reader is None or self._reader.epoch != epoch:
            self._reader = self.stream.read_epoch(epoch)
        return self._reader[turn]


class EpochBatches(Sampler):
    """The batches of a process in one epoch, as places in `EpochRows`: the batch sampler of a `DataLoader`.

    `accelerate` and `torchdata` resume a stream by the states of its workers, `skip_first_batches` by reading what it
    skips. Here a batch is a function of its number, and whoever goes on with batch n needs no state.

    Each worker of the loader takes the batches in turn, and the rows of its own lanes. The last rows of an epoch, which
    fill no batch, are left out.

    Args:
        stream: The rows of this process.
        batch_size: How many of them a batch has.
        workers: The processes that read.
    """

    def __init__(self, stream: RowStream, batch_size: int, workers: int = 0) -> None:
        self.num_rows, self.batch_size, self.workers = len(stream), batch_size, max(1, workers)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the batches those of this epoch, counted from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        count = 0
        for worker in range(self.workers):
            count += len(range(worker, self.num_rows, self.workers)) // self.batch_size
        return count

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for number in range(len(self)):
            own, worker = divmod(number, self.workers)
            turns = range(worker, self.num_rows, self.workers)[own * self.batch_size :][: self.batch_size]
            yield list(zip(repeat(self.epoch), turns))
