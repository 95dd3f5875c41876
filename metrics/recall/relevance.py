"""Read the relevant candidates of each query from relevance judgements (qrels)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def relevant_from_qrels(
    qrels: Iterable[tuple[Any, Any, Any]] | Mapping[Any, Mapping[Any, float]],
    query_ids: Sequence[Any],
    candidate_ids: Sequence[Any],
) -> list[list[int]]:
    """Convert relevance judgements (qrels) to one sorted list of relevant columns per query in `query_ids`.

    Ids are compared as strings, so 7 in a list equals "7" in a file. Judgements of other queries are ignored.

    Args:
        qrels: Rows (query id, candidate id, relevance), or pytrec_eval's `{query id: {candidate id: relevance}}`. A
            candidate is relevant if its relevance is above 0.
        query_ids, candidate_ids: Ids in the row and column order of the score matrix.

    Raises:
        ValueError: An id is duplicated, a pair is judged twice, a query has no relevant candidate, a relevant candidate
            is not in `candidate_ids`, or a row cannot be parsed.

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
            raise ValueError(f"qrels has candidate {candidate!r} of query {query!r} twice; list each pair once")
        judged.add((query, candidate))

        if relevance > 0:
            if candidate not in candidates:
                raise ValueError(f"candidate {candidate!r}, relevant to query {query!r}, is not in candidate_ids")
            relevant[queries[query]].append(candidates[candidate])

    for query, columns in zip(queries, relevant, strict=True):
        if not columns:
            raise ValueError(f"query {query!r} has no relevant candidate in qrels; leave out such queries")
        columns.sort()
    return relevant


def _positions(ids: Sequence[Any], name: str) -> dict[str, int]:
    positions: dict[str, int] = {}
    for position, each in enumerate(ids):
        if str(each) in positions:
            raise ValueError(f"{name} contains {each!r} twice; ids must be unique as text")
        positions[str(each)] = position

    if not positions:
        raise ValueError(f"{name} is empty; give one or more ids")
    return positions


def _judged_pairs(qrels: Mapping[Any, Mapping[Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    for query, judged in qrels.items():
        for candidate, relevance in judged.items():
            yield query, candidate, relevance


def _judgements(qrels: Any) -> Iterator[tuple[str, str, float]]:
    for row in _judged_pairs(qrels) if isinstance(qrels, Mapping) else qrels:
        try:
            query, candidate, relevance = row
            yield str(query), str(candidate), float(relevance)
        except (TypeError, ValueError) as error:
            raise ValueError(f"qrels has {row!r}; expected query id, candidate id and a number") from error
