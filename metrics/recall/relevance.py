"""Which candidates answer a query: lists of columns, checked; and where such lists come from, a table of judgements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

RelevantColumns = Sequence[Sequence[int]] | NDArray[Any]
"""For each query the list of its relevant columns; or, where each has as many, an array (Q, m)."""


def relevant_from_qrels(
    qrels: Iterable[tuple[Any, Any, Any]] | Mapping[Any, Mapping[Any, float]],
    query_ids: Sequence[Any],
    candidate_ids: Sequence[Any],
) -> list[list[int]]:
    """The relevant columns of each query, from a table of judgements (qrels).

    Ids are compared as text, so that 7 in a list is "7" in a file. Queries of the table that are not asked are left
    out; what it says of a query that is asked must be there.

    Args:
        qrels: Rows (query id, candidate id, relevance), or pytrec_eval's `{query id: {candidate id: relevance}}`. A
            relevance of 0 or less is not relevant, any other is: the scores are binary.
        query_ids: The ids of the rows of the scores, in order.
        candidate_ids: The ids of their columns, in order.

    Returns:
        For each query the columns of its relevant candidates, ascending, at least one.

    Raises:
        ValueError: An id repeats, a pair is judged twice, a query has no relevant candidate or one that is not among
            the candidates, or a row cannot be read.

    >>> relevant_from_qrels([("q1", "a", 1), ("q1", "b", 0), ("q2", "c", 2)], ["q2", "q1"], ["a", "b", "c"])
    [[2], [0]]
    """
    queries, candidates = _positions(query_ids, "query_ids"), _positions(candidate_ids, "candidate_ids")
    relevant: list[list[int]] = [[] for _ in queries]
    judged = set()

    for query, candidate, relevance in _judgements(qrels):
        if query not in queries:
            continue
        if (query, candidate) in judged:
            raise ValueError(f"qrels judges candidate {candidate!r} for query {query!r} twice; name each pair once")
        judged.add((query, candidate))

        if relevance > 0:
            if candidate not in candidates:
                raise ValueError(
                    f"candidate {candidate!r}, relevant to query {query!r}, is not among the candidate_ids"
                )
            relevant[queries[query]].append(candidates[candidate])

    for query, columns in zip(queries, relevant, strict=True):
        if not columns:
            raise ValueError(f"query {query!r} has no relevant candidate in qrels; leave such queries out")
        columns.sort()
    return relevant


def _positions(ids: Sequence[Any], name: str) -> dict[str, int]:
    positions: dict[str, int] = {}
    for position, each in enumerate(ids):
        if str(each) in positions:
            raise ValueError(f"{name} holds {each!r} twice; ids must differ, as text")
        positions[str(each)] = position

    if not positions:
        raise ValueError(f"{name} is empty; there must be one at least")
    return positions


def _judgements(qrels: Any) -> Iterator[tuple[str, str, float]]:
    if isinstance(qrels, Mapping):
        for query, judged in qrels.items():
            for candidate, relevance in judged.items():
                yield str(query), str(candidate), float(relevance)
        return

    for row in qrels:
        try:
            query, candidate, relevance = row
            yield str(query), str(candidate), float(relevance)
        except (TypeError, ValueError) as error:
            raise ValueError(f"qrels has {row!r}; expected query id, candidate id and a number") from error


@dataclass
class Relevant:
    """The relevant columns of all queries, end to end; those of query q are `columns[ends[q] - sizes[q] : ends[q]]`."""

    columns: NDArray[np.int64]
    sizes: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def parse(cls, relevant: RelevantColumns, num_queries: int, num_candidates: int) -> Relevant:
        """Checks the lists against the numbers of queries and candidates."""
        if len(relevant) != num_queries:
            raise ValueError(
                f"got {len(relevant)} lists of relevant candidates for {num_queries} queries; give one each"
            )
        if not num_queries or num_candidates < 1:
            raise ValueError(f"got {num_queries} queries and {num_candidates} candidates; there must be one at least")
        if np.ndim(relevant[0]) != 1:
            raise ValueError(f"relevant[0] is {relevant[0]!r}; give a list of columns for each query, be it of one")

        sizes = np.fromiter(map(len, relevant), np.int64, num_queries)
        if not sizes.all():
            raise ValueError(f"query {np.argmin(sizes)} has no relevant candidate; leave such queries out")

        whole = isinstance(relevant, np.ndarray)
        columns = np.ravel(relevant) if whole else np.array(list(chain.from_iterable(relevant)))
        if columns.dtype.kind not in "iu":
            raise ValueError(f"relevant columns are of type {columns.dtype}; they must be integers")

        parsed = cls(columns.astype(np.int64), sizes, sizes.cumsum())
        parsed._check_range(num_candidates)
        return parsed

    def _check_range(self, num_candidates: int) -> None:
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        outside = np.flatnonzero((self.columns < 0) | (self.columns >= num_candidates))
        if len(outside):
            raise ValueError(
                f"query {owner[outside[0]]} names column {self.columns[outside[0]]} as relevant; columns run from 0 to "
                f"{num_candidates - 1}"
            )

        pairs, repeats = np.unique(owner * num_candidates + self.columns, return_counts=True)
        if repeats.max() > 1:
            query, column = divmod(int(pairs[np.argmax(repeats)]), num_candidates)
            raise ValueError(f"query {query} names column {column} as relevant {repeats.max()} times; name it once")

    def padded(self, rows: slice, least: int) -> NDArray[np.int64]:
        """(len(rows), M) the columns of these queries, filled up with -1; M is `least` or more."""
        sizes, ends = self.sizes[rows], self.ends[rows]
        held = np.arange(max(least, sizes.max())) < sizes[:, None]
        table = np.full(held.shape, -1, np.int64)
        table[held] = self.columns[ends[0] - sizes[0] : ends[-1]]
        return table
