"""Mean rank variance (MRV), a measure of retrieval consistency across languages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mean_rank_variance(ranks: Sequence[Sequence[float]] | NDArray[np.integer]) -> float:
    """Compute the mean rank variance (MRV, ATRI eq. 16) of N queries in K languages.

    MRV = 1/(N K) * sum over queries i and languages k of (Rank_ik - mean over k of Rank_ik)^2

    Rank_ik is the rank of the correct answer to query i in language k. Counting ranks from 0 or from 1 does not change
    the result. The paper's formula and text disagree on the index of the inner mean; here it is over the languages. The
    variance is divided by K, not K - 1.

    Args:
        ranks: (N, K) ranks of the correct answers. Column k contains the result of
            `modeling_supclap.metrics.recall.best_ranks` for language k.

    Returns:
        MRV. It is 0 if each query has the same rank in all languages. For random ranks among C candidates, the expected
        MRV is (1 - 1/K) (C^2 - 1)/12.

    Raises:
        ValueError: There are no queries or fewer than two languages, rows differ in length, or a rank is NaN, infinite
            or negative.

    >>> mean_rank_variance([[0, 2], [5, 5]])
    0.5
    """
    if len(ranks) == 0:
        raise ValueError("ranks has no queries; give one row of ranks per query")
    for query, row in enumerate(ranks):
        if np.ndim(row) != 1 or len(row) != len(ranks[0]) or len(row) < 2:
            raise ValueError(
                f"query {query} has the ranks {row!r}; expected one rank per language, for the same two or more "
                "languages in every query; leave out queries that are missing in a language"
            )

    table = np.asarray(ranks, np.float64)
    bad = ~np.isfinite(table) | (table < 0)
    if bad.any():
        query, language = np.argwhere(bad)[0]
        raise ValueError(f"ranks[{query}][{language}] is {table[query, language]}; ranks must be finite and 0 or more")
    return float(table.var(axis=1).mean())
