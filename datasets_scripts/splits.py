"""Draw splits by source: clips of one recording, of equal recordings or of one source are in the same split."""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
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
    files = [path for path in dict.fromkeys(paths) if os.path.isfile(path)]
    keys: dict[str, Any] = {path: os.path.getsize(path) for path in files}
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
    if test_group is not None:
        tested = {group for group, source in zip(groups, sources, strict=True) if source == test_group}
        if not tested:
            raise ValueError(f"test_group is {test_group!r}; the sources are {', '.join(sorted(set(sources))[:9])}")
        others = [row for row, group in enumerate(groups) if group not in tested]
        splits, fractions = ["test"] * len(groups), {**fractions, "test": 0.0}
        kept = [sources[row] for row in others], [groups[row] for row in others]
        for row, split in zip(others, draw_splits(*kept, fractions, seed), strict=True):
            splits[row] = split
        return splits

    names: dict[int, str] = {}  # the first source in alphabetical order, so that the order of rows has no effect
    for group, source in zip(groups, sources, strict=True):
        names[group] = min(names.get(group, source), source)
    counts = {split: max(1, round(part * len(names))) for split, part in fractions.items() if part}
    num_train = len(names) - sum(counts.values())
    if num_train < 0 or (num_train == 0 and sum(fractions.values()) < 1):
        raise ValueError(
            f"{len(names)} recordings are too few to draw {' and '.join(counts)} (copies, and recordings of one source "
            "or source_column, count as one); add a column split, or set validation_fraction=0 and test_fraction=0 or 1"
        )
    drawn = draw_sources(names.values(), counts, seed)
    return [drawn[names[group]] for group in groups]


def warn_of_shared(
    name: str, groups: Mapping[str, Sequence[int]], captions: Callable[[str], Iterable[Iterable[str]]]
) -> None:
    """Log how many clips of validation and test share their group or a caption with earlier splits.

    Args:
        name: Name of the dataset.
        groups: Group of each row by split, as from `connect`.
        captions: Function from a split to all captions of each row.
    """
    for split in SPLITS[1:]:
        earlier = [other for other in SPLITS[: SPLITS.index(split)] if other in groups]
        if split not in groups or not earlier:
            continue
        known = set(chain.from_iterable(groups[other] for other in earlier))
        own = [set(texts) for texts in captions(split)]
        wanted, found = set[str]().union(*own), set[str]()
        for texts in chain.from_iterable(map(captions, earlier)):
            found.update(wanted.intersection(texts))
        counts = {
            "a recording or a source": sum(group in known for group in groups[split]),
            "a caption": sum(not found.isdisjoint(texts) for texts in own),
        }
        for kind, count in counts.items():
            if count:
                logger.warning(
                    "%s: %d of %d %s clips share %s with %s; the splits are kept, but scores may be too high",
                    name, count, len(own), split, kind, " or ".join(earlier),
                )  # fmt: skip
