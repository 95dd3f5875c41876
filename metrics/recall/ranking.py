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
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .relevance import Relevant, RelevantColumns, relevant_from_qrels
from .similarity import TILE_CANDIDATES, TILE_QUERIES, LazySimilarity, Matrix, Source

__all__ = [
    "LazySimilarity",
    "best_ranks",
    "chance_scores",
    "ranks_from_embeddings",
    "relevant_from_qrels",
    "retrieval_outcomes",
    "retrieval_scores",
]

MAP_CUTOFF = 10


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


def ranks_from_embeddings(
    queries: ArrayLike,
    candidates: ArrayLike,
    relevant: RelevantColumns,
    chunk: int = TILE_QUERIES,
    similarity: Literal["cosine", "dot"] = "cosine",
) -> NDArray[np.int64]:
    """`best_ranks` of `queries @ candidates.T` without ever holding that matrix.

    Args:
        queries: (Q, d) embeddings, unit norm.
        candidates: (C, d) embeddings, unit norm.
        relevant: The rows of each query's relevant candidates.
        chunk: How many queries are scored at a time; the memory beyond the embeddings is about 10 000 scores for each.
        similarity: "cosine", for which embeddings that are not of unit norm to within 0.01 are normalised with a
            warning, or "dot", which takes them as they are.

    Returns:
        (Q,) int64, 0-based.

    Raises:
        ValueError: An embedding holds NaN or inf or is zero, or the shapes or `relevant` do not fit.

    Warns:
        UserWarning: The embeddings are not of unit norm; they are normalised.

    >>> ranks_from_embeddings([[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [0.0, 1.0]], [[0], [0]])
    array([0, 1])
    """
    return best_ranks(LazySimilarity(queries, candidates, chunk, similarity), relevant)


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
    return {**outcomes, f"mAP@{last}": _average_precisions(counts, sizes, last), "rank": ranks.copy()}


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
    sizes, repeats = np.unique(Relevant.parse(relevant, len(relevant), num_candidates).sizes, return_counts=True)

    chance = dict.fromkeys([*(f"R@{cutoff}" for cutoff in cutoffs), f"mAP@{last}"], 0.0)
    for m, share in zip(sizes, repeats / repeats.sum(), strict=True):
        for cutoff in cutoffs:
            chance[f"R@{cutoff}"] += float(share) * _chance_recall(m, num_candidates, cutoff)
        chance[f"mAP@{last}"] += float(share) * _chance_average_precision(m, num_candidates, last)
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
        columns = parsed.padded(rows, counts.shape[1])  # (n, M)
        counts[rows] = _count_rows(source, rows, columns, counts.shape[1], depth)
    return counts, parsed.sizes


def _count_rows(source: Source, rows: slice, columns: NDArray[np.int64], width: int, depth: int) -> NDArray[np.int64]:
    scores, tiles = source.scored(rows, columns)  # (n, M), and (n, 1024) at a time
    best = -np.sort(-scores, axis=1)[:, :width]
    ahead = np.zeros((len(best), TILE_CANDIDATES), bool)

    # Every candidate is counted that scores as high, the relevant ones too, which are therefore taken off beforehand.
    counts = np.empty(best.shape, np.int64)
    for i in range(width):
        counts[:, i] = -(scores >= best[:, i : i + 1]).sum(axis=1)

    for _, tile in tiles:
        held = ahead[:, : tile.shape[1]]
        ahead[:, tile.shape[1] :] = False
        for i in range(width):
            # A rank that is beyond the cutoff already need not be known further, nor those after it.
            if i and not (counts[:, i] + i < depth).any():
                break
            np.greater_equal(tile, best[:, i : i + 1], out=held)
            counts[:, i] += _row_sums(ahead)
    return np.where(np.isneginf(best), -1, counts)


def _row_sums(truths: NDArray[np.bool_]) -> NDArray[np.int64]:
    # Eight bytes are added at a time; each holds at most TILE_CANDIDATES / 8 = 128 and so does not overflow.
    lanes = truths.view(np.uint64).sum(axis=1)
    return lanes.view(np.uint8).reshape(-1, 8).sum(axis=1, dtype=np.int64)


def _average_precisions(counts: NDArray[np.int64], sizes: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    order = np.arange(1, counts.shape[1] + 1)
    ranks = counts + order
    found = (counts >= 0) & (ranks <= k)
    return (found * order / np.maximum(ranks, 1)).sum(axis=1) / sizes


def _chance_recall(m: int, n: int, k: int) -> float:
    if k > n - m:
        return 1.0
    return float(-np.expm1(np.log1p(-k / (n - np.arange(m))).sum()))


def _chance_average_precision(m: int, n: int, k: int) -> float:
    ranks = np.arange(1, min(k, n) + 1)
    again = (m - 1) / (n - 1) if n > 1 else 0.0
    return float(((1 + (ranks - 1) * again) / ranks).sum() / n)


def _check_cutoffs(k: int | Sequence[int]) -> list[int]:
    cutoffs = np.atleast_1d(np.asarray(k))
    if cutoffs.dtype.kind not in "iu" or not cutoffs.size or cutoffs.min() < 1:
        raise ValueError(f"k is {k!r}; give one or more positive whole numbers, such as [1, 5, 10]")
    return cutoffs.tolist()
