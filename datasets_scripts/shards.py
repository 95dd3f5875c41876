"""Divide a job among machines: shards of the rows, one plan for all of them, and a record of each complete shard.

plan.json                     settings of the job, which all shards must share
shards/00017-of-00100.json    record of a complete shard
shards/00017-of-00100.lock    while a process writes this shard
"""

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .atomic_files import folder_lock, read_json, write_json

PLAN = "plan.json"


@dataclass(frozen=True)
class Shard:
    """Part `number` (from 0) of `count` equal parts of a job, by ranges of rows.

    >>> Shard(1, 4).rows(10)
    range(2, 5)
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise ValueError(
                f"shard is {self.number}/{self.count}; expected a number from 0 and a count, from 0/100 to 99/100"
            )

    @classmethod
    def parse(cls, text: str | None) -> "Shard":
        """Parse "17/100"; None is the whole job. Raise ValueError if it is not a number from 0 and a count."""
        match = re.fullmatch(r"(\d+)/(\d+)", "0/1" if text is None else text)
        if match is None:
            raise ValueError(f"shard is {text!r}; expected a number from 0 and a count, from 0/100 to 99/100")
        return cls(int(match[1]), int(match[2]))

    @property
    def name(self) -> str:
        return f"{self.number:05d}-of-{self.count:05d}"

    def rows(self, total: int) -> range:
        """Return the rows of this part of `total` rows."""
        return range(total * self.number // self.count, total * (self.number + 1) // self.count)

    def path(self, folder: Path) -> Path:
        """Return the path of this shard in the folder of a job, without a suffix."""
        return folder / "shards" / self.name

    def record(self, folder: Path) -> Path:
        """Return the path of the record, which exists if the shard is complete."""
        return self.path(folder).with_suffix(".json")

    def lock(self, folder: Path) -> AbstractContextManager[None]:
        """Return the exclusive lock of this shard. Raise InUseError if another process is writing the shard."""
        return folder_lock(self.path(folder))


def split_ranges(rows: range, lengths: Mapping[str, int]) -> dict[str, range]:
    """Divide a range of rows, counted through all splits of these lengths, into one range of each split.

    >>> split_ranges(range(2, 6), {"train": 4, "test": 3})
    {'train': range(2, 4), 'test': range(0, 2)}
    """
    ranges, offset = {}, 0
    for split, length in lengths.items():
        start, stop = max(rows.start - offset, 0), min(rows.stop - offset, length)
        ranges[split] = range(start, stop) if start < stop else range(0)
        offset += length
    return ranges


def recording_states(rows: Any, with_times: bool = True) -> list[str]:
    """Return the size and optionally the modification time of each row's file, and the length of its stored audio.

    A repaired or exchanged recording has another state. Remote addresses and missing files have none.
    """
    import pyarrow.compute as pc
    from datasets import Dataset

    from .schema import without_audio

    states = []
    for row in without_audio(rows):
        about = os.stat(row["audio_path"]) if os.path.exists(row["audio_path"] or "") else None
        states.append("" if about is None else f"{about.st_size} {about.st_mtime_ns if with_times else ''}")
    for name in {"audio", "samples"}.intersection(rows.column_names if isinstance(rows, Dataset) else ()):
        column = rows.data.column(name)
        lengths = pc.binary_length(pc.struct_field(column, "bytes") if name == "audio" else column)
        lengths = lengths if rows._indices is None else lengths.take(rows._indices.column(0))
        states = [f"{state} {length}" for state, length in zip(states, lengths.to_pylist(), strict=True)]
    return states


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Read the plan of a job; return None if the folder has none."""
    path = folder / PLAN
    return read_json(path) if path.is_file() else None


def changed_settings(stored: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ between two plans."""
    names = sorted(stored.keys() | plan.keys())
    return [name for name in names if stored.get(name) != plan.get(name)]


def start_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a job, or compare it with the existing one. The caller has the lock of the folder.

    Raises FileExistsError with the names of the settings in which the existing plan differs.
    """
    stored = read_plan(folder)
    if stored is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PLAN, plan, one_writer=True)
    elif changed := changed_settings(stored, plan):
        raise FileExistsError(f"{folder} was started with different {', '.join(changed)}; choose another output")


def write_record(folder: Path, shard: Shard, record: Mapping[str, Any]) -> None:
    """Write the record of a complete shard: lists, which `join_records` concatenates, and numbers, which it adds."""
    write_json(shard.record(folder), record, one_writer=True)


def is_complete(folder: Path, shard: Shard) -> bool:
    """Return whether a shard has its record."""
    return shard.record(folder).is_file()


def join_records(folder: Path, count: int) -> dict[str, Any]:
    """Join the records of all shards in order. Raise ValueError with the names of missing shards."""
    shards = [Shard(number, count) for number in range(count)]
    missing = [f"{shard.number}/{count}" for shard in shards if not is_complete(folder, shard)]
    if missing:
        named = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
        raise ValueError(f"{folder} lacks {len(missing)} of {count} shards: {named}; run them, then finish")
    joined: dict[str, Any] = {}
    for shard in shards:
        for name, value in read_json(shard.record(folder)).items():
            joined[name] = joined[name] + value if name in joined else value
    return joined
