"""Consistency of retrieval across languages, from the ranks of the right answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mean_rank_variance(ranks: Sequence[Sequence[float]] | NDArray[np.integer]) -> float:
    """Mean over queries of the variance, over languages, of the rank of the right answer (ATRI, eq. 16).

    MRV = 1/(N K) * sum over queries i and languages k of (Rank_ik - mean over k of Rank_ik)^2

    (the paper's formula has the mean's index as j, its text as i). The variance is divided by K, not K - 1. Whether
    ranks start at 0 or 1 makes no difference.

    Args:
        ranks: (N, K), the rank of query i's right answer when asked in language k; the N queries are parallel, the same
            in all K languages. `modeling_supclap.metrics.recall.best_ranks` of each language makes one column.

    Returns:
        0 when each query gets one rank in all languages, the better the lower. With every rank drawn at random among C
        candidates, (1 - 1/K) (C^2 - 1)/12 on average.

    Raises:
        ValueError: There are no queries, rows of different length, fewer than two languages, or a NaN, infinite or
            negative rank.

    >>> mean_rank_variance([[0, 2], [5, 5]])
    0.5
    """
    table = _as_table(ranks)
    bad = ~np.isfinite(table) | (table < 0)
    if bad.any():
        query, language = np.argwhere(bad)[0]
        raise ValueError(f"ranks[{query}][{language}] is {table[query, language]}; a rank is 0 or more, and finite")
    return float(table.var(axis=1).mean())


def _as_table(ranks: Sequence[Sequence[float]] | NDArray[np.integer]) -> NDArray[np.float64]:
    if len(ranks) == 0:
        raise ValueError("got no queries; give one row of ranks for each")
    if np.ndim(ranks[0]) != 1:
        raise ValueError(f"ranks[0] is {ranks[0]!r}; give one row of ranks, one for each language, for each query")

    num_languages = len(ranks[0])
    for query, row in enumerate(ranks):
        if len(row) != num_languages:
            raise ValueError(
                f"query {query} has ranks in {len(row)} languages, query 0 in {num_languages}; "
                "leave out queries that are not in every language"
            )
    if num_languages < 2:
        raise ValueError(f"got ranks in {num_languages} language; a variance over languages needs two or more")
    return np.asarray(ranks, np.float64)
