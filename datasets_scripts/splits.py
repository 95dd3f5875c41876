"""Draw splits by source: clips of one recording, of equal recordings or of one source are in the same split."""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from .atomic_files import file_sha256

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
_HEAD_BYTES = 65536


def connect(*keys: Sequence[Hashable]) -> list[int]:
    """Number the groups of rows that share a key, directly or through other rows. Return the group of each row.

    Each argument is one kind of key, such as sources or contents, with one key per row. None is no key.

    >>> connect(["a", "b", "c", "d"], [1, 2, 2, None])
    [0, 1, 1, 3]
    """
    parents = list(range(len(keys[0])))

    def find(row: int) -> int:
        while parents[row] != row:
            parents[row] = row = parents[parents[row]]
        return row

    for of_rows in keys:
        first: dict[Hashable, int] = {}
        for row, key in enumerate(of_rows):
            if key is not None:
                one, other = find(row), find(first.setdefault(key, row))
                parents[max(one, other)] = min(one, other)
    return [find(row) for row in parents]


def hash_copies(paths: Sequence[str]) -> list[str | None]:
    """Return one key per file, which files of equal content share; None for a file whose content no other file has."""
    keys: dict[str, Any] = {path: os.path.getsize(path) for path in dict.fromkeys(paths) if os.path.isfile(path)}
    for hash_file in (_hash_head, file_sha256):  # the beginning is enough to tell most files of equal size apart
        counts = Counter(keys.values())
        keys = {path: (key, hash_file(path)) for path, key in keys.items() if key and counts[key] > 1}
    counts = Counter(keys.values())
    return [keys[path][1] if counts[keys.get(path)] > 1 else None for path in paths]


def _hash_head(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(_HEAD_BYTES)).digest()


def draw_sources(sources: Iterable[str], counts: Mapping[str, int], seed: int) -> dict[str, str]:
    """Sample sources for validation and test; return `{source: split}`.

    `counts` contains the numbers of validation and test sources. The order of `sources` does not affect the sample.
    Raises ValueError if there are fewer sources than requested.
    """
    order = sorted(set(sources), key=lambda source: hashlib.sha256(f"{seed}:{source}".encode()).digest())
    if sum(counts.values()) > len(order):
        raise ValueError(f"the counts {dict(counts)} exceed the {len(order)} recordings; set smaller numbers")

    splits = ["test"] * counts.get("test", 0) + ["validation"] * counts.get("validation", 0)
    return dict.fromkeys(order, "train") | dict(zip(order, splits, strict=False))


def draw_splits(
    sources: Sequence[str],
    groups: Sequence[int],
    fractions: Mapping[str, float],
    seed: int,
    test_group: str | None = None,
) -> list[str]:
    """Sample whole groups of rows (see `connect`) for validation and test; return the split of each row.

    Each split has the given fraction of the groups, at least one. With `test_group`, the test split is the rows of this
    source instead, with all rows of their groups. Raises ValueError if there are too few groups, or no such source.
    """
    tested: set[int] = set()
    if test_group is not None:
        fractions = {**fractions, "test": 0.0}
        tested = {group for group, source in zip(groups, sources, strict=True) if source == test_group}
        if not tested:
            raise ValueError(f"test_group is {test_group!r}; the sources are {', '.join(sorted(set(sources))[:9])}")
    names: dict[int, str] = {}  # the first source in alphabetical order, so that the order of rows has no effect
    for group, source in zip(groups, sources, strict=True):
        if group not in tested:
            names[group] = min(names.get(group, source), source)
    counts = {split: max(1, round(part * len(names))) for split, part in fractions.items() if part}
    num_train = len(names) - sum(counts.values())
    if num_train < 0 or (num_train == 0 and sum(fractions.values()) < 1):
        raise ValueError(
            f"{len(names)} recordings are too few to draw {' and '.join(counts)} (copies, and recordings of one source "
            "or source_column, count as one); add a column split, or set validation_fraction=0 and test_fraction=0 or 1"
        )
    drawn = draw_sources(names.values(), counts, seed)
    return ["test" if group in tested else drawn[names[group]] for group in groups]


def warn_of_shared(name: str, splits: Sequence[str], groups: Sequence[int], captions: Iterable[Iterable[str]]) -> None:
    """Log how many clips of validation and test share their group or a caption with earlier splits.

    Args:
        name: Name of the dataset.
        splits: Split of each row.
        groups: Group of each row, as from `connect`.
        captions: All captions of each row.
    """
    kinds: dict[str, list[set[Any]]] = {
        "a recording or a source": [{group} for group in groups],
        "a caption": list(map(set, captions)),
    }
    for kind, keys in kinds.items():
        known: set[Any] = set()
        earlier: list[str] = []
        for split in filter(set(splits).__contains__, SPLITS):
            of_split = [key for key, other in zip(keys, splits, strict=True) if other == split]
            count = sum(not known.isdisjoint(key) for key in of_split)
            if count:
                logger.warning(
                    "%s: %d of %d %s clips share %s with %s; the splits are kept, but scores may be too high",
                    name, count, len(of_split), split, kind, " or ".join(earlier),
                )  # fmt: skip
            known.update(*of_split)
            earlier.append(split)
