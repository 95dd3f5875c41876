"""Compute retrieval metrics by counting the irrelevant candidates that rank ahead of each relevant candidate.

`counts[q, i]` is the number of irrelevant candidates that score at least as high as the i-th best relevant candidate of
query q (i from 0). The 1-based rank of this candidate is `counts[q, i] + i + 1`. Ties count against the model, so a
model with constant scores gets the worst ranks. Counting works on tiles of scores and needs no sorted copy of them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAP_CUTOFF = 10

# Queries and candidates per tile of the similarity matrix.
TILE_QUERIES, TILE_CANDIDATES = 1024, 1024
# Queries per tile if the similarity matrix is given. Such a tile fits into the level-2 cache of a core.
_MATRIX_QUERIES = 256
# In half precision, the norm of a unit vector differs from 1 by less than this.
_NORM_TOLERANCE = 1e-2
# Cosines computed in float32 tie if they differ by less: some ten times the rounding error.
_TIE = np.float32(1e-6)

Tiles = Iterator[tuple[int, NDArray[Any]]]

RelevantColumns = Sequence[Sequence[int]] | NDArray[Any]


def best_ranks(similarity: ArrayLike | LazySimilarity, relevant: RelevantColumns) -> NDArray[np.int64]:
    """Compute the 0-based rank of each query's best relevant candidate.

    The rank is the number of irrelevant candidates that score at least as high. The result is int64 (Q,). With m
    relevant candidates among C, a rank is 0 for a perfect model, C - m for constant scores, and (C - m) / (m + 1) on
    average for random scores. The arguments and errors are the same as in `retrieval_scores`.

    >>> best_ranks([[0.9, 0.2, 0.4], [0.9, 0.2, 0.4]], [[0], [1, 2]])
    array([0, 1])
    """
    return _count_outranking(similarity, relevant, depth=1)[0][:, 0]


def retrieval_outcomes(
    scores: ArrayLike | LazySimilarity,
    relevant: RelevantColumns,
    k: int | Sequence[int] = (1, 5, 10),
    map_cutoff: int = MAP_CUTOFF,
    metrics: Sequence[str] = (),
) -> dict[str, NDArray[Any]]:
    """Compute the retrieval metrics of each query, as input for `bootstrap_intervals` and `paired_test`.

    The arguments and errors are the same as in `retrieval_scores`.

    Returns:
        Dict of arrays (Q,): `R@k` for each k, 0 or 1; `mAP@10`, the average precision in 0..1; each name in `metrics`;
        and `rank`, the 0-based rank of the best relevant candidate.

    >>> outcomes = retrieval_outcomes([[0.9, 0.2, 0.4], [0.9, 0.2, 0.4]], [[0], [1, 2]], k=[1, 2], metrics=["MRR"])
    >>> {name: values.tolist() for name, values in outcomes.items()}
    {'R@1': [1.0, 0.0], 'R@2': [1.0, 1.0], 'mAP@10': [1.0, 0.5833333333333333], 'MRR': [1.0, 0.5], 'rank': [0, 1]}
    """
    parsed = _parse_metrics(k, map_cutoff, metrics)
    depth = max(cutoff for kind, cutoff in parsed.values() if kind in ("mAP", "nDCG"))
    counts, sizes = _count_outranking(scores, relevant, depth)
    order = np.arange(1, counts.shape[1] + 1)
    ranks = np.where(counts < 0, np.inf, counts + order)  # (Q, M), from 1

    outcomes: dict[str, NDArray[Any]] = {}
    for name, (kind, cutoff) in parsed.items():
        is_within = ranks <= cutoff
        if kind == "R":
            outcomes[name] = is_within[:, 0].astype(np.float64)
        elif kind == "MRR":
            outcomes[name] = 1 / ranks[:, 0]
        elif kind == "mAP":
            # the precisions at the relevant ranks, divided by the number of relevant candidates
            outcomes[name] = (is_within * order / ranks).sum(axis=1) / sizes
        else:
            ideal = _discounts(cutoff).cumsum()[np.minimum(sizes, cutoff) - 1]
            outcomes[name] = (is_within / np.log2(ranks + 1)).sum(axis=1) / ideal
    return {**outcomes, "rank": counts[:, 0].copy()}


def retrieval_scores(
    similarity: ArrayLike | LazySimilarity,
    relevant: RelevantColumns,
    k: int | Sequence[int] = (1, 5, 10),
    map_cutoff: int = MAP_CUTOFF,
    metrics: Sequence[str] = (),
) -> dict[str, float]:
    """Compute R@k, mAP@10, median and mean rank for one retrieval direction.

    R@k = mean over queries of [the best relevant candidate is among the first k].

    Args:
        similarity: (Q, C) scores, higher is closer; or a `LazySimilarity`. Rows are queries: if `similarity[i, j]`
            scores audio i with text j, pass `similarity.T` for text-to-audio retrieval.
        relevant: For each query, the columns of its relevant candidates, at least one.
        k: Cutoffs of R@k.
        map_cutoff: Cutoff of mAP, default 10. DCASE 2025 uses 16.
        metrics: Names of further metrics: "R@k", "mAP@k" and "nDCG@k" with any cutoff, and "MRR" (the mean of
            1 / rank of the best relevant candidate). nDCG has gains of 0 and 1, and discounts of 1 / log2(rank + 1).

    Returns:
        Dict with `R@k` for each k, `mAP@10` and `metrics` as fractions in 0..1; `median_rank` (the floor of the 0-based
        median, plus 1) and `mean_rank` of the best relevant candidate, 1-based; and `num_queries`. For a perfect model
        all metrics are 1, except `mAP@10` if a query has more than ten relevant candidates.

    Raises:
        ValueError: A score is NaN or infinite, `relevant` does not fit the scores, a cutoff is not positive, or a
            metric is unknown.

    >>> retrieval_scores([[0.9, 0.2, 0.4], [0.9, 0.2, 0.4]], [[0], [1, 2]], k=[1, 2])
    {'R@1': 0.5, 'R@2': 1.0, 'mAP@10': 0.7916666666666666, 'median_rank': 1, 'mean_rank': 1.5, 'num_queries': 2}
    """
    outcomes = retrieval_outcomes(similarity, relevant, k, map_cutoff, metrics)
    ranks = outcomes.pop("rank")

    scores: dict[str, float] = {name: float(outcome.mean()) for name, outcome in outcomes.items()}
    scores["median_rank"] = int(np.median(ranks)) + 1
    scores["mean_rank"] = float(ranks.mean()) + 1.0
    scores["num_queries"] = len(ranks)
    return scores


def average_precision(scores: NDArray[Any], is_relevant: NDArray[np.bool_]) -> float:
    """Compute the average precision of one ranking, without interpolation, as scikit-learn does.

    The precision at a relevant candidate is the fraction of relevant candidates among all candidates with at least the
    same score. The result is the mean of these precisions over the relevant candidates, at least one. `scores` and
    `is_relevant` have one entry per candidate, (C,).

    >>> round(average_precision(np.array([0.9, 0.8, 0.7]), np.array([True, False, True])), 4)
    0.8333
    """
    ordered, hits = np.sort(scores), np.sort(scores[is_relevant])
    num_above = len(ordered) - np.searchsorted(ordered, hits)
    num_hits_above = len(hits) - np.searchsorted(hits, hits)
    return float((num_hits_above / num_above).mean())


def chance_scores(
    relevant: RelevantColumns,
    num_candidates: int,
    k: int | Sequence[int] = (1, 5, 10),
    map_cutoff: int = MAP_CUTOFF,
    metrics: Sequence[str] = (),
) -> dict[str, float]:
    """Compute the expected scores of a random ranking: R@k, mAP@10 and `metrics` (exact, without sampling).

    For a query with m relevant candidates among n = `num_candidates`, and p = (m - 1)/(n - 1):

        R@k = 1 - C(n - m, k) / C(n, k)
        AP@k = 1/n * sum over ranks r = 1..min(k, n) of (1 + (r - 1) p) / r
        nDCG@k = m/n * (sum over r = 1..min(k, n) of 1/log2(r + 1)) / (the same sum over r = 1..min(k, m))
        MRR = sum over r = 1..n - m + 1 of (R@r - R@(r - 1)) / r

    The results are averaged over queries. Derivation of AP@k: the candidate at rank r is relevant with probability m/n.
    In that case, each of the r - 1 candidates before it is relevant with probability p, so the expected precision at r
    is (1 + (r - 1) p)/r. The sum over r is divided by m. The other arguments and the errors are the same as in
    `retrieval_scores`.

    >>> chance_scores([[0], [1]], num_candidates=4, k=2)
    {'R@2': 0.5, 'mAP@10': 0.5208333333333333}
    """
    parsed, n = _parse_metrics(k, map_cutoff, metrics), num_candidates
    sizes, repeats = np.unique(_parse_relevant(relevant, len(relevant), n)[1], return_counts=True)
    chance = dict.fromkeys(parsed, 0.0)
    for m, share in zip(sizes.tolist(), repeats / repeats.sum(), strict=True):
        for name, (kind, cutoff) in parsed.items():
            ranks = np.arange(1, min(cutoff, n) + 1)
            if kind == "R":
                # cutoff > n - m: too few irrelevant candidates to fill the first ranks
                value = 1.0 if cutoff > n - m else -np.expm1(np.log1p(-cutoff / (n - np.arange(m))).sum())
            elif kind == "MRR":
                # (n - m + 2,): the probability that none of the first r candidates is relevant, r = 0..n - m + 1
                missed = np.concatenate([[1.0], np.cumprod(1 - m / (n - np.arange(n - m + 1)))])
                value = (-np.diff(missed) / np.arange(1, len(missed))).sum()
            elif kind == "mAP":
                value = ((1 + (ranks - 1) * ((m - 1) / max(n - 1, 1))) / ranks).sum() / n
            else:
                value = m / n * _discounts(min(cutoff, n)).sum() / _discounts(min(cutoff, m)).sum()
            chance[name] += float(share * value)
    return chance


def _parse_metrics(k: int | Sequence[int], map_cutoff: int, metrics: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the kind ("R", "mAP", "nDCG" or "MRR") and the cutoff of each metric; that of MRR is 1."""
    parsed: dict[str, tuple[str, int]] = {}
    for cutoff in _check_cutoffs(k):
        parsed[f"R@{cutoff}"] = ("R", cutoff)
    for cutoff in _check_cutoffs([map_cutoff]):
        parsed[f"mAP@{cutoff}"] = ("mAP", cutoff)
    for name in [metrics] if isinstance(metrics, str) else metrics:
        match = re.fullmatch(r"(R|mAP|nDCG)@([1-9]\d*)|MRR", name)
        if match is None:
            raise ValueError(f"unknown metric {name!r}; give R@k, mAP@k, nDCG@k or MRR")
        parsed[name] = (match[1] or "MRR", int(match[2] or 1))
    return parsed


def _discounts(count: int) -> NDArray[np.float64]:
    """Return the discounts of nDCG at the ranks 1 to `count`, (count,)."""
    return 1 / np.log2(np.arange(2, count + 2))


def _count_outranking(
    similarity: ArrayLike | LazySimilarity, relevant: RelevantColumns, depth: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compute `counts` (see the module docstring), and the number of relevant candidates of each query, (Q,).

    `counts` has one column per relevant candidate, at most `depth`. A count is -1 if the query has fewer relevant
    candidates. In all columns except the first, a count may be too low if the candidate's rank is beyond `depth`.
    """
    # Check for the method, not the class, because `evaluate` loads a second copy of this module.
    source: Any = similarity
    is_lazy = hasattr(source, "at")
    if not is_lazy:
        source = as_matrix(source, "similarity")
    num_queries, _ = source.shape
    answers, sizes = _parse_relevant(relevant, *source.shape)
    ends = sizes.cumsum()
    counts = np.empty((num_queries, min(depth, int(sizes.max()))), np.int64)

    chunk = source.chunk if is_lazy else _MATRIX_QUERIES
    for start in range(0, num_queries, chunk):
        rows = slice(start, min(start + chunk, num_queries))
        # The relevant columns of these queries, (n, M), padded with -1, and their scores, (n, M).
        is_filled = np.arange(max(counts.shape[1], sizes[rows].max())) < sizes[rows, None]
        columns = np.full(is_filled.shape, -1, np.int64)
        columns[is_filled] = answers[ends[start] - sizes[start] : ends[rows.stop - 1]]
        if is_lazy:
            scores, tiles = source.at(rows, columns), source.tiles(rows)
        else:
            scores = np.take_along_axis(source[rows], np.maximum(columns, 0), axis=1)
            tiles = _finite_tiles(source, rows)
        best = -np.sort(-np.where(is_filled, scores, -np.inf), axis=1)[:, : counts.shape[1]]
        thresholds = best - _TIE if is_lazy else best

        # The relevant candidates are in the tiles, too, but are not counted.
        owners, own_columns = is_filled.nonzero()[0], columns[is_filled]
        order = own_columns.argsort(kind="stable")
        owners, own_columns = owners[order], own_columns[order]

        block_counts = np.zeros(best.shape, np.int64)
        for first, tile in tiles:
            own = slice(*np.searchsorted(own_columns, (first, first + tile.shape[1])))
            for i in range(best.shape[1]):
                # Ranks beyond the cutoff, and all later ones, need no exact count.
                if i and not (block_counts[:, i] + i < depth).any():
                    break
                is_ahead = tile >= thresholds[:, i : i + 1]
                is_ahead[owners[own], own_columns[own] - first] = False
                # Bytes are summed to int16, because count_nonzero is twice as slow along an axis.
                block_counts[:, i] += is_ahead.view(np.int8).sum(axis=1, dtype=np.int16)
        counts[rows] = np.where(np.isneginf(best), -1, block_counts)
    return counts, sizes


def _check_cutoffs(k: int | Sequence[int]) -> list[int]:
    cutoffs = np.atleast_1d(np.asarray(k))
    if cutoffs.dtype.kind not in "iu" or not cutoffs.size or cutoffs.min() < 1:
        raise ValueError(f"k is {k!r}; give one or more positive integers, such as [1, 5, 10]")
    return cutoffs.tolist()


def _parse_relevant(
    relevant: RelevantColumns, num_queries: int, num_candidates: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Check the relevant columns; return them concatenated over all queries, and their number per query, (Q,)."""
    if len(relevant) != num_queries:
        raise ValueError(f"got {len(relevant)} lists of relevant candidates for {num_queries} queries; give one each")
    if not num_queries or num_candidates < 1:
        raise ValueError(f"got {num_queries} queries and {num_candidates} candidates; give one or more of each")
    if np.ndim(relevant[0]) != 1:
        raise ValueError(f"relevant[0] is {relevant[0]!r}; give a list of columns for each query")

    sizes = np.fromiter(map(len, relevant), np.int64, num_queries)
    if not sizes.all():
        raise ValueError(f"query {np.argmin(sizes)} has no relevant candidate; leave out such queries")

    whole = isinstance(relevant, np.ndarray)
    columns = np.ravel(relevant) if whole else np.array(list(chain.from_iterable(relevant)))
    if columns.dtype.kind not in "iu":
        raise ValueError(f"relevant columns are of type {columns.dtype}; they must be integers")

    columns = columns.astype(np.int64)
    owner = np.repeat(np.arange(num_queries), sizes)
    outside = (columns < 0) | (columns >= num_candidates)
    if outside.any():
        query, column = owner[outside][0], columns[outside][0]
        raise ValueError(f"query {query} has the relevant column {column}; it must be in 0..{num_candidates - 1}")

    pairs, repeats = np.unique(owner * num_candidates + columns, return_counts=True)
    if repeats.max() > 1:
        query, column = divmod(int(pairs[np.argmax(repeats)]), num_candidates)
        raise ValueError(f"query {query} has the relevant column {column} {repeats.max()} times; list it once")
    return columns, sizes


def as_matrix(values: ArrayLike, name: str) -> NDArray[Any]:
    """Convert rows of numbers to a float matrix, without copying float arrays; raise ValueError if this fails."""
    try:
        matrix = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"the rows of {name} differ in length; each must have one value per column") from error
    if matrix.dtype.kind in "biu":
        matrix = matrix.astype(np.float64)
    if matrix.ndim != 2 or not matrix.size or matrix.dtype.kind != "f":
        raise ValueError(f"{name} has shape {matrix.shape} and type {matrix.dtype}; give a matrix of real numbers")
    return matrix


def _finite_tiles(scores: NDArray[Any], rows: slice) -> Tiles:
    """Yield score tiles of the queries in `rows`, as (first column, tile). Raise ValueError for a NaN or inf."""
    for first in range(0, scores.shape[1], TILE_CANDIDATES):
        tile = scores[rows, first : first + TILE_CANDIDATES]
        if not np.isfinite(tile).all():
            row, column = np.argwhere(~np.isfinite(tile))[0]
            raise ValueError(
                f"similarity[{rows.start + row}, {first + column}] is {tile[row, column]}; all scores must be finite"
            )
        yield first, tile


class LazySimilarity:
    """Similarity matrix `queries @ candidates.T`, computed in tiles on demand to save memory.

    Rankings use float32 products, in which equal embeddings may differ in the last bit, depending on their position.
    Therefore, a candidate ties with a relevant one if its score is at most 1e-6 lower. `lazy[rows]` returns scores
    computed in float64 and rounded to float32, where equal embeddings have equal scores.

    Args:
        queries, candidates: (Q, d) and (C, d) embeddings, unit norm. If the norm of any query is not within 0.01 of 1,
            all queries are normalised with a UserWarning, and the candidates likewise.
        chunk: Number of queries per tile. Each query needs memory for about 2,000 scores.

    Raises:
        ValueError: An embedding contains NaN or inf, or it is zero. An array is empty or not (rows, d), or the
            dimensions d differ.

    >>> lazy = LazySimilarity([[0.5, 0.5, 0.5, 0.5]], [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, -0.5, -0.5]])
    >>> lazy[:].tolist()
    [[0.5, 0.0]]
    """

    def __init__(self, queries: ArrayLike, candidates: ArrayLike, chunk: int = TILE_QUERIES) -> None:
        self.queries, self.candidates = _unit_rows(queries, "queries"), _unit_rows(candidates, "candidates")
        if self.queries.shape[1] != self.candidates.shape[1]:
            shapes = f"{self.queries.shape} and {self.candidates.shape}"
            raise ValueError(f"queries and candidates have the shapes {shapes}; the last dimensions must be equal")
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; give 1 or more queries")
        self.shape = (len(self.queries), len(self.candidates))
        self.chunk = chunk

    @property
    def T(self) -> LazySimilarity:
        """Similarity with queries and candidates exchanged."""
        return LazySimilarity(self.candidates, self.queries, self.chunk)

    def __getitem__(self, rows: slice) -> NDArray[np.float32]:
        """Return the score matrix of a slice of queries; `lazy[:]` returns all scores."""
        queries = self.queries[rows].astype(np.float64)
        matrix = np.empty((*queries.shape[:-1], self.shape[1]), np.float32)
        for start in range(0, self.shape[1], TILE_CANDIDATES):
            block = slice(start, start + TILE_CANDIDATES)
            matrix[..., block] = queries @ self.candidates[block].astype(np.float64).T
        return matrix

    def tiles(self, rows: slice) -> Tiles:
        """Yield score tiles of 1024 candidates for the queries in `rows`, as (index of the first column, tile)."""
        queries = self.queries[rows].astype(np.float32, copy=False)
        for start in range(0, self.shape[1], TILE_CANDIDATES):
            candidates = self.candidates[start : start + TILE_CANDIDATES]
            yield start, queries @ candidates.astype(np.float32, copy=False).T

    def at(self, rows: slice, columns: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the scores of n queries at `columns` (n, M). A column of -1 is the last one."""
        scores = np.empty(columns.shape, np.float32)
        for i in range(columns.shape[1]):
            candidates = self.candidates[columns[:, i]]
            scores[:, i] = np.einsum("qd,qd->q", self.queries[rows], candidates, dtype=np.float64)
        return scores


def _unit_rows(embeds: ArrayLike, name: str) -> NDArray[Any]:
    """Check embeddings, and normalise all of them if the norm of one is not close to 1."""
    matrix = as_matrix(embeds, name)
    norms = get_norms(matrix, name)
    return matrix if np.abs(norms - 1).max() <= _NORM_TOLERANCE else matrix / norms


def get_norms(embeds: NDArray[Any], name: str, is_unit: bool = True) -> NDArray[np.float64]:
    """Compute the norms (N, 1) of embeddings (N, d); raise ValueError if a norm is NaN, infinite or zero.

    If `is_unit` is set, and a norm differs from 1 by more than 0.01, warn that the embeddings are normalised.
    """
    norms = np.sqrt(np.einsum("id,id->i", embeds, embeds, dtype=np.float64))[:, None]
    bad = np.flatnonzero(~np.isfinite(norms) | (norms == 0))
    if len(bad):
        raise ValueError(f"{name}[{bad[0]}] has norm {norms[bad[0], 0]}; it must be finite, and not zero")

    furthest = norms[np.argmax(np.abs(norms - 1)), 0]
    if is_unit and abs(furthest - 1) > _NORM_TOLERANCE:
        warnings.warn(f"{name} has rows of norm {furthest:.4g}, expected 1; they are normalised", stacklevel=3)
    return norms
