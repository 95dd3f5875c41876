"""Which candidates answer a query: lists of columns, checked; and where such lists come from, a qrels table."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Judgement = tuple[Any, Any, Any]
RelevantColumns = Sequence[Sequence[int]] | NDArray[Any]
"""For each query the list of its relevant columns; or, where each has as many, an array (Q, m)."""

# The names of a table's columns, here, in BEIR's files and in those of DCASE 2025, task 6.
_QUERY_COLUMNS = ("query_id", "query-id", "query")
_CANDIDATE_COLUMNS = ("candidate_id", "corpus-id", "audio_filenames")
_RELEVANCE_COLUMNS = ("relevance", "score")


def relevant_from_qrels(
    qrels: Iterable[Judgement] | Mapping[Any, Mapping[Any, float]] | str | Path,
    query_ids: Sequence[Any],
    candidate_ids: Sequence[Any],
) -> list[list[int]]:
    """The relevant columns of each query, from a table of judgements (qrels).

    Ids are compared as text, so that 7 in a list is "7" in a file. Queries of the table that are not asked are left
    out; what it says of a query that is asked must be there.

    Args:
        qrels: what was judged, one of
            - rows (query id, candidate id, relevance);
            - pytrec_eval's `{query id: {candidate id: relevance}}`;
            - TREC's text, lines of "query iteration candidate relevance", or the path of such a file;
            - the path of a .csv or .tsv file with a header: `query_id`, `candidate_id` and, if graded, `relevance`
              (or BEIR's `query-id`, `corpus-id`, `score`; or DCASE 2025's `query` and `audio_filenames`, a list).
            A relevance of 0 or less is not relevant, any other is: the scores are binary.
        query_ids: of the rows of the scores, in order.
        candidate_ids: of their columns, in order.

    Returns:
        For each query the columns of its relevant candidates, ascending, at least one.

    Raises:
        ValueError: an id repeats, a pair is judged twice, a query has no relevant candidate or one that is not among
            the candidates, or the table cannot be read.
        FileNotFoundError: there is no such file.

    >>> relevant_from_qrels([("q1", "a", 1), ("q1", "b", 0), ("q2", "c", 2)], ["q2", "q1"], ["a", "b", "c"])
    [[2], [0]]
    >>> relevant_from_qrels("q1 0 a 1\\nq1 0 b 1\\n", ["q1"], ["a", "b", "c"])
    [[0, 1]]
    """
    queries, candidates = _positions(query_ids, "query_ids"), _positions(candidate_ids, "candidate_ids")
    judged: list[dict[str, bool]] = [{} for _ in queries]
    for query, candidate, relevance in _judgements(qrels):
        if query not in queries:
            continue
        held = judged[queries[query]]
        if candidate in held:
            raise ValueError(f"qrels judges candidate {candidate!r} for query {query!r} twice; name each pair once")
        held[candidate] = relevance > 0
        if held[candidate] and candidate not in candidates:
            raise ValueError(f"candidate {candidate!r}, relevant to query {query!r}, is not among the candidate_ids")
    relevant = [sorted(candidates[name] for name, right in held.items() if right) for held in judged]
    for query, columns in zip(queries, relevant, strict=True):
        if not columns:
            raise ValueError(f"query {query!r} has no relevant candidate in qrels; leave such queries out")
    return relevant


def _positions(ids: Sequence[Any], name: str) -> dict[str, int]:
    positions = {str(each): position for position, each in enumerate(ids)}
    if not positions:
        raise ValueError(f"{name} is empty; there must be one at least")
    if len(positions) < len(ids):
        repeated = next(each for position, each in enumerate(ids) if positions[str(each)] != position)
        raise ValueError(f"{name} holds {repeated!r} twice; ids must differ, as text")
    return positions


def _judgements(qrels: Any) -> Iterator[tuple[str, str, float]]:
    for row in _rows(qrels):
        try:
            query, candidate, relevance = row
            yield str(query), str(candidate), float(relevance)
        except (TypeError, ValueError) as error:
            raise ValueError(f"qrels has {row!r}; expected query id, candidate id and a number") from error


def _rows(qrels: Any) -> Iterable[Any]:
    if isinstance(qrels, Mapping):
        return ((query, name, value) for query, judged in qrels.items() for name, value in judged.items())
    if isinstance(qrels, str) and "\n" in qrels:
        return _trec_rows(qrels)
    if not isinstance(qrels, str | Path):
        return qrels
    path = Path(qrels)
    if path.suffix in (".csv", ".tsv"):
        return _table_rows(path)
    return _trec_rows(path.read_text(encoding="utf-8"))


def _trec_rows(text: str) -> Iterator[Sequence[str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if fields and len(fields) != 4:
            raise ValueError(f"line {number} of qrels is {line!r}; expected 'query iteration candidate relevance'")
        if fields:
            yield fields[0], fields[2], fields[3]


def _table_rows(path: Path) -> Iterator[Judgement]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        header = reader.fieldnames or []
        query, candidate, relevance = (
            next((name for name in names if name in header), None)
            for names in (_QUERY_COLUMNS, _CANDIDATE_COLUMNS, _RELEVANCE_COLUMNS)
        )
        if query is None or candidate is None:
            raise ValueError(
                f"{path} has the columns {list(header)}; expected one of {_QUERY_COLUMNS}, one of {_CANDIDATE_COLUMNS}"
            )
        for row in reader:
            names = _listed(row[candidate]) if candidate == "audio_filenames" else [row[candidate]]
            yield from ((row[query], name, row[relevance] if relevance else 1) for name in names)


def _listed(text: str) -> list[Any]:
    try:
        names = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        names = None
    if not isinstance(names, list):
        raise ValueError(f"audio_filenames is {text!r}; expected a list such as ['a.wav', 'b.wav']")
    return names


@dataclass
class Relevant:
    """The relevant columns of all queries, end to end; those of query q are `columns[ends[q] - sizes[q] : ends[q]]`."""

    columns: NDArray[np.int64]
    sizes: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def parse(cls, relevant: RelevantColumns, num_queries: int, num_candidates: int) -> Relevant:
        """Check the lists against the numbers of queries and candidates."""
        if len(relevant) != num_queries:
            raise ValueError(
                f"got {len(relevant)} lists of relevant candidates for {num_queries} queries; give one each"
            )
        if not num_queries or num_candidates < 1:
            raise ValueError(f"got {num_queries} queries and {num_candidates} candidates; there must be one at least")
        if np.ndim(relevant[0]) != 1:
            raise ValueError(f"relevant[0] is {relevant[0]!r}; give a list of columns for each query, be it of one")
        sizes = np.fromiter((len(columns) for columns in relevant), np.int64, num_queries)
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
