"""Retrieval scores by counting: how many wrong candidates does a query prefer to its right ones?

Every score here follows from one table, `counts[q, i]`: the number of candidates irrelevant to query q that score at
least as high as its i-th best relevant one (i from 0). The 1-based rank of that item is then `counts[q, i] + i + 1`.
Counting takes one comparison per candidate where sorting a row takes log(C) of them, needs no second matrix, can be
done tile by tile, and says what a tie means: a wrong candidate that ties counts as ahead, so that a model which answers
the same to everything scores as the worst model and not as a perfect one.

A `similarity` below is either an array (Q, C), queries by candidates, or a `LazySimilarity` made from embeddings, which
never holds that array. `relevant` has one list of candidate columns for each query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .relevance import relevant_from_qrels
from .similarity import TILE_CANDIDATES, LazySimilarity, Matrix

__all__ = [
    "LazySimilarity",
    "best_ranks",
    "chance_scores",
    "relevant_from_qrels",
    "retrieval_outcomes",
    "retrieval_scores",
]

MAP_CUTOFF = 10

RelevantColumns = Sequence[Sequence[int]] | NDArray[Any]
"""For each query the list of its relevant columns; or, where each has as many, an array (Q, m)."""


def best_ranks(similarity: ArrayLike | LazySimilarity, relevant: RelevantColumns) -> NDArray[np.int64]:
    """0-based rank of each query's best relevant candidate: the number of irrelevant ones scored at least as high.

    A perfect model gives 0 everywhere, a constant one C - m (m: relevant candidates of the query), a random one
    (C - m) / (m + 1) on average.

    Args:
        similarity: (Q, C) scores, higher is closer; or a `LazySimilarity`.
        relevant: The columns of each query's relevant candidates, at least one.

    Returns:
        (Q,) int64.

    Raises:
        ValueError: A score is NaN or infinite, or `relevant` does not fit the scores.

    >>> best_ranks([[0.9, 0.2, 0.4], [0.9, 0.2, 0.4]], [[0], [1, 2]])
    array([0, 1])
    """
    return _count_outranking(similarity, relevant, depth=1)[0][:, 0]


def retrieval_outcomes(
    scores: ArrayLike | LazySimilarity,
    relevant: RelevantColumns,
    k: int | Sequence[int] = (1, 5, 10),
    map_cutoff: int = MAP_CUTOFF,
) -> dict[str, NDArray[Any]]:
    """What each query contributes to `retrieval_scores`: what a bootstrap resamples and a paired test compares.

    Args:
        scores: (Q, C) scores, higher is closer; or a `LazySimilarity`.
        relevant: The columns of each query's relevant candidates, at least one.
        k: The cutoffs of R@k.
        map_cutoff: The cutoff of mAP; DCASE 2025 takes 16.

    Returns:
        (Q,) each: `R@k` for each k, 0 or 1; `mAP@10`, the query's average precision in 0..1; `rank`, that of its best
        relevant candidate, from 0. The means of the first two are those of `retrieval_scores`.

    Raises:
        ValueError: As in `retrieval_scores`.

    >>> outcomes = retrieval_outcomes([[0.9, 0.2, 0.4], [0.9, 0.2, 0.4]], [[0], [1, 2]], k=[1, 2])
    >>> {name: values.tolist() for name, values in outcomes.items()}
    {'R@1': [1.0, 0.0], 'R@2': [1.0, 1.0], 'mAP@10': [1.0, 0.5833333333333333], 'rank': [0, 1]}
    """
    cutoffs, (last,) = _check_cutoffs(k), _check_cutoffs([map_cutoff])
    counts, sizes = _count_outranking(scores, relevant, depth=last)
    ranks = counts[:, 0]

    outcomes: dict[str, NDArray[Any]] = {}
    for cutoff in cutoffs:
        outcomes[f"R@{cutoff}"] = (ranks < cutoff).astype(np.float64)

    # Of each query the mean of the precisions at its relevant candidates' ranks, those from 1 to `last`.
    order = np.arange(1, counts.shape[1] + 1)
    is_found = (counts >= 0) & (counts + order <= last)
    outcomes[f"mAP@{last}"] = (is_found * order / np.maximum(counts + order, 1)).sum(axis=1) / sizes
    return {**outcomes, "rank": ranks.copy()}


def retrieval_scores(
    similarity: ArrayLike | LazySimilarity,
    relevant: RelevantColumns,
    k: int | Sequence[int] = (1, 5, 10),
    map_cutoff: int = MAP_CUTOFF,
) -> dict[str, float]:
    """R@k, mAP@10, median and mean rank of one direction of retrieval.

    R@k = mean over queries of [the best relevant candidate is among the first k].

    For text to audio give the transpose, `similarity.T`, where `similarity[i, j]` is audio i, text j.

    Args:
        similarity: (Q, C) scores, higher is closer; or a `LazySimilarity`.
        relevant: The columns of each query's relevant candidates, at least one.
        k: The cutoffs of R@k.
        map_cutoff: The cutoff of mAP; DCASE 2025 takes 16.

    Returns:
        `R@k` for each k and `mAP@10`, fractions in 0..1; `median_rank` (the floor of the 0-based median, plus 1) and
        `mean_rank` of the best relevant candidate, 1-based; `num_queries`. A perfect model gives 1, 1 (with at most ten
        relevant candidates), 1 and 1; what a random one gives is in `chance_scores`.

    Raises:
        ValueError: A score is NaN or infinite, `relevant` does not fit the scores, or a cutoff is not positive.

    >>> retrieval_scores([[0.9, 0.2, 0.4], [0.9, 0.2, 0.4]], [[0], [1, 2]], k=[1, 2])
    {'R@1': 0.5, 'R@2': 1.0, 'mAP@10': 0.7916666666666666, 'median_rank': 1, 'mean_rank': 1.5, 'num_queries': 2}
    """
    outcomes = retrieval_outcomes(similarity, relevant, k, map_cutoff)
    ranks = outcomes.pop("rank")

    scores: dict[str, float] = {}
    for name, outcome in outcomes.items():
        scores[name] = float(outcome.mean())
    scores["median_rank"] = int(np.median(ranks)) + 1
    scores["mean_rank"] = float(ranks.mean()) + 1.0
    scores["num_queries"] = len(ranks)
    return scores


def chance_scores(
    relevant: RelevantColumns,
    num_candidates: int,
    k: int | Sequence[int] = (1, 5, 10),
    map_cutoff: int = MAP_CUTOFF,
) -> dict[str, float]:
    """Exact expectation of R@k and mAP@10 when each query's candidates stand in random order.

    With n candidates, m of them relevant, and p = (m - 1)/(n - 1), averaged over the queries:

        R@k = 1 - C(n - m, k) / C(n, k)
        AP@k = 1/n * sum over ranks r = 1..min(k, n) of (1 + (r - 1) p) / r

    For rank r is relevant with probability m/n; then each of the r - 1 ranks before it is with probability p, so that
    the precision there is (1 + (r - 1) p)/r on average; and the sum is divided by m.

    Args:
        relevant: The columns of each query's relevant candidates.
        num_candidates: The number of candidates, n.
        k: The cutoffs of R@k.
        map_cutoff: The cutoff of mAP.

    Returns:
        `R@k` for each k and `mAP@10`, fractions.

    Raises:
        ValueError: `relevant` does not fit the candidates, or a cutoff is not positive.

    >>> chance_scores([[0], [1]], num_candidates=4, k=2)
    {'R@2': 0.5, 'mAP@10': 0.5208333333333333}
    """
    cutoffs, (last,) = _check_cutoffs(k), _check_cutoffs([map_cutoff])
    n = num_candidates
    sizes, repeats = np.unique(Relevant.parse(relevant, len(relevant), n).sizes, return_counts=True)
    ranks = np.arange(1, min(last, n) + 1)

    chance = dict.fromkeys([*(f"R@{cutoff}" for cutoff in cutoffs), f"mAP@{last}"], 0.0)
    for m, share in zip(sizes, repeats / repeats.sum(), strict=True):
        for cutoff in cutoffs:  # k > n - m: there are too few wrong ones to fill the first k
            recall = 1.0 if cutoff > n - m else -np.expm1(np.log1p(-cutoff / (n - np.arange(m))).sum())
            chance[f"R@{cutoff}"] += float(share * recall)
        again = (m - 1) / (n - 1) if n > 1 else 0.0
        chance[f"mAP@{last}"] += float(share * ((1 + (ranks - 1) * again) / ranks).sum() / n)
    return chance


def _count_outranking(
    similarity: ArrayLike | LazySimilarity, relevant: RelevantColumns, depth: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`counts` of the module's docstring, (Q, depth or less), and the number of relevant candidates, (Q,).

    A count is -1 beyond a query's relevant candidates. But for the first, it may be too low where the rank is beyond
    `depth` all the same.
    """
    # Asking for the method and not the class: `evaluate` loads a second copy of this module.
    source: Any = similarity if hasattr(similarity, "scored") else Matrix(similarity)
    parsed = Relevant.parse(relevant, *source.shape)
    counts = np.empty((source.shape[0], min(depth, int(parsed.sizes.max()))), np.int64)

    for start in range(0, len(counts), source.chunk):
        rows = slice(start, min(start + source.chunk, len(counts)))
        columns = parsed.padded(rows, counts.shape[1])
        scores, tiles = source.scored(rows, columns)  # (n, M), and (n, 1024) at a time
        scores = np.where(columns >= 0, scores, -np.inf)
        best = -np.sort(-scores, axis=1)[:, : counts.shape[1]]

        # Every candidate is counted that scores as high, the relevant ones too, which are therefore taken off first.
        own = np.empty(best.shape, np.int64)
        for i in range(best.shape[1]):
            own[:, i] = -(scores >= best[:, i : i + 1]).sum(axis=1)

        ahead = np.zeros((len(best), TILE_CANDIDATES), bool)
        for _, tile in tiles:
            ahead[:, tile.shape[1] :] = False
            for i in range(best.shape[1]):
                # A rank that is beyond the cutoff already need not be known further, nor those after it.
                if i and not (own[:, i] + i < depth).any():
                    break
                np.greater_equal(tile, best[:, i : i + 1], out=ahead[:, : tile.shape[1]])
                # Eight bytes are added at a time; each holds at most TILE_CANDIDATES / 8 = 128 and does not overflow.
                lanes = ahead.view(np.uint64).sum(axis=1)
                own[:, i] += lanes.view(np.uint8).reshape(-1, 8).sum(axis=1, dtype=np.int64)
        counts[rows] = np.where(np.isneginf(best), -1, own)
    return counts, parsed.sizes


def _check_cutoffs(k: int | Sequence[int]) -> list[int]:
    cutoffs = np.atleast_1d(np.asarray(k))
    if cutoffs.dtype.kind not in "iu" or not cutoffs.size or cutoffs.min() < 1:
        raise ValueError(f"k is {k!r}; give one or more positive whole numbers, such as [1, 5, 10]")
    return cutoffs.tolist()


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

        columns = columns.astype(np.int64)
        owner = np.repeat(np.arange(num_queries), sizes)
        outside = np.flatnonzero((columns < 0) | (columns >= num_candidates))
        if len(outside):
            raise ValueError(
                f"query {owner[outside[0]]} names column {columns[outside[0]]} as relevant; columns run from 0 to "
                f"{num_candidates - 1}"
            )

        pairs, repeats = np.unique(owner * num_candidates + columns, return_counts=True)
        if repeats.max() > 1:
            query, column = divmod(int(pairs[np.argmax(repeats)]), num_candidates)
            raise ValueError(f"query {query} names column {column} as relevant {repeats.max()} times; name it once")
        return cls(columns, sizes, sizes.cumsum())

    def padded(self, rows: slice, least: int) -> NDArray[np.int64]:
        """(len(rows), M) the columns of these queries, filled up with -1; M is `least` or more."""
        sizes, ends = self.sizes[rows], self.ends[rows]
        held = np.arange(max(least, sizes.max())) < sizes[:, None]
        table = np.full(held.shape, -1, np.int64)
        table[held] = self.columns[ends[0] - sizes[0] : ends[-1]]
        return table
