"""Retrieval scores by counting: how many wrong candidates does a query prefer to its right ones?

Every score here follows from one table, `counts[q, i]`: the number of candidates irrelevant to query q that score at
least as high as its i-th best relevant one (i from 0). The 1-based rank of that item is then `counts[q, i] + i + 1`.
Counting takes one comparison per candidate where sorting a row takes log(C) of them, needs no second matrix, can be
done tile by tile, and says what a tie means: a wrong candidate that ties counts as ahead, so that a model which answers
the same to everything scores as the worst model and not as a perfect one.

A `similarity` below is either an array (Q, C), queries by candidates, or a `LazySimilarity` made from embeddings, which
never holds that array. Both are read a block of queries at a time: the scores of the relevant candidates, and all of
them in tiles. `relevant` has one list of candidate columns for each query.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAP_CUTOFF = 10

# Queries by candidates of one matrix product.
TILE_QUERIES, TILE_CANDIDATES = 1024, 1024
# Up to so many candidates a block of queries keeps all its scores, so that none is computed twice.
_HELD_CANDIDATES = 8 * TILE_CANDIDATES
# A tile of a matrix that is counted at once stays in a core's second-level cache.
_MATRIX_QUERIES = 256
# Half precision leaves the norm of a unit vector within this of 1.
_NORM_TOLERANCE = 1e-2
_NORM_ROWS = 4096

Tiles = Iterator[tuple[int, NDArray[Any]]]

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
    relevant: RelevantColumns, num_candidates: int, k: int | Sequence[int] = (1, 5, 10), map_cutoff: int = MAP_CUTOFF
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
    sizes, repeats = np.unique(_parse_relevant(relevant, len(relevant), n)[1], return_counts=True)
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
    source: Any = similarity
    is_lazy = hasattr(source, "scored")
    if not is_lazy:
        source = as_matrix(source, "similarity")
    num_queries, num_candidates = source.shape
    answers, sizes = _parse_relevant(relevant, num_queries, num_candidates)
    ends = sizes.cumsum()
    counts = np.empty((num_queries, min(depth, int(sizes.max()))), np.int64)

    chunk = source.chunk if is_lazy else _MATRIX_QUERIES
    for start in range(0, num_queries, chunk):
        rows = slice(start, min(start + chunk, num_queries))
        # The relevant columns of these queries, (n, M), filled up with -1.
        held = np.arange(max(counts.shape[1], sizes[rows].max())) < sizes[rows, None]
        columns = np.full(held.shape, -1, np.int64)
        columns[held] = answers[ends[start] - sizes[start] : ends[rows.stop - 1]]

        # Their scores, (n, M), and those of all candidates, (n, 1024) at a time.
        if is_lazy:
            scores, tiles = source.scored(rows, columns)
        else:
            scores = np.take_along_axis(source[rows], np.maximum(columns, 0), axis=1)
            tiles = _finite_tiles(source, rows)
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
    return counts, sizes


def _check_cutoffs(k: int | Sequence[int]) -> list[int]:
    cutoffs = np.atleast_1d(np.asarray(k))
    if cutoffs.dtype.kind not in "iu" or not cutoffs.size or cutoffs.min() < 1:
        raise ValueError(f"k is {k!r}; give one or more positive whole numbers, such as [1, 5, 10]")
    return cutoffs.tolist()


def _parse_relevant(
    relevant: RelevantColumns, num_queries: int, num_candidates: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The relevant columns of all queries, end to end, and how many each has; checked against both numbers."""
    if len(relevant) != num_queries:
        raise ValueError(f"got {len(relevant)} lists of relevant candidates for {num_queries} queries; give one each")
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
    return columns, sizes


def as_matrix(values: ArrayLike, name: str) -> NDArray[Any]:
    """The values as a matrix of floats, not copied where they are one.

    Args:
        values: Rows of numbers.
        name: The name of the values in errors.

    Returns:
        Two-dimensional, not empty; of float64 where the values are integers.

    Raises:
        ValueError: Rows differ in length, there are none, or a value is no real number.
    """
    try:
        matrix = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"the rows of {name} differ in length; each must have one value per column") from error
    if matrix.dtype.kind in "biu":
        matrix = matrix.astype(np.float64)
    if matrix.ndim != 2 or not matrix.size or matrix.dtype.kind != "f":
        raise ValueError(
            f"{name} has shape {matrix.shape}, type {matrix.dtype}; give a non-empty matrix of real numbers"
        )
    return matrix


def _finite_tiles(scores: NDArray[Any], rows: slice) -> Tiles:
    """(first column, scores) of some rows of a matrix.

    Raises:
        ValueError: A score is NaN or infinite.
    """
    for first in range(0, scores.shape[1], TILE_CANDIDATES):
        tile = scores[rows, first : first + TILE_CANDIDATES]
        with np.errstate(all="ignore"):
            is_suspect = not np.isfinite(tile.sum())
        if is_suspect and not np.isfinite(tile).all():
            row, column = np.argwhere(~np.isfinite(tile))[0]
            raise ValueError(
                f"similarity[{rows.start + row}, {first + column}] is {tile[row, column]}; all scores must be "
                "finite, for a rank among NaN or inf means nothing"
            )
        yield first, tile


class LazySimilarity:
    """`queries @ candidates.T`, computed in tiles when it is needed and thrown away: a `similarity` in bounded memory.

    It goes wherever a `similarity` is taken. Scores have the embeddings' own precision, float32 at least, but are not
    more exact than about 1e-8. Equal embeddings get equal scores, to the last bit, wherever they stand and whatever
    BLAS computes the product. A product of the embeddings themselves does not: its rounding differs by position.

    Args:
        queries: (Q, d) embeddings, unit norm.
        candidates: (C, d) embeddings, unit norm.
        chunk: How many queries are scored at a time; the memory beyond the embeddings is about 10 000 scores for each.
        similarity: "cosine", for which embeddings that are not of unit norm to within 0.01 are normalised, tile by
            tile, with a warning; or "dot", which takes them as they are.

    Raises:
        ValueError: An embedding holds NaN or inf, or is zero where a cosine is asked for; an array is empty or not
            (rows, d), or the d differ.

    Warns:
        UserWarning: The embeddings are not of unit norm; they are normalised.

    >>> lazy = LazySimilarity([[1.0, 0.0], [0.5, 0.25]], [[1.0, 0.0], [0.0, 1.0]], similarity="dot")
    >>> [(first, tile.tolist()) for first, tile in lazy.tiles(slice(0, 2))]
    [(0, [[1.0, 0.0], [0.5, 0.25]])]
    """

    def __init__(
        self,
        queries: ArrayLike,
        candidates: ArrayLike,
        chunk: int = TILE_QUERIES,
        similarity: Literal["cosine", "dot"] = "cosine",
    ) -> None:
        self.queries, self.candidates = as_matrix(queries, "queries"), as_matrix(candidates, "candidates")
        if self.queries.shape[1] != self.candidates.shape[1]:
            raise ValueError(
                f"queries are {self.queries.shape} and candidates {self.candidates.shape}; "
                "their last dimensions must be equal"
            )
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be 1 or more queries")
        if similarity not in ("cosine", "dot"):
            raise ValueError(f"similarity is {similarity!r}; give 'cosine' or 'dot'")

        self.shape = (len(self.queries), len(self.candidates))
        self.chunk = chunk
        self._dtype = np.result_type(self.queries, self.candidates, np.float32)
        self._query_scales = self._get_scales(self.queries, "queries", similarity)
        self._candidate_scales = self._get_scales(self.candidates, "candidates", similarity)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """All scores of some queries, a slice without a step, as a matrix; `lazy[:]` those of all."""
        if rows.step not in (None, 1):
            raise ValueError(f"rows is {rows}; give a slice without a step")
        rows = slice(*rows.indices(self.shape[0])[:2])
        matrix = np.empty((max(rows.stop - rows.start, 0), self.shape[1]), self._dtype)
        for start in range(0, len(matrix), self.chunk):
            block = slice(rows.start + start, min(rows.start + start + self.chunk, rows.stop))
            for first, tile in self.tiles(block):
                matrix[start : start + self.chunk, first : first + tile.shape[1]] = tile
        return matrix

    def tiles(self, rows: slice) -> Tiles:
        """Yield (first column, scores) over all candidates, 1024 at a time."""
        queries = self._get_units(self.queries, self._query_scales, rows)
        for start in range(0, self.shape[1], TILE_CANDIDATES):
            columns = slice(start, start + TILE_CANDIDATES)
            candidates = self._get_units(self.candidates, self._candidate_scales, columns)
            yield start, (queries @ candidates.T).astype(self._dtype, copy=False)

    def scored(self, rows: slice, columns: NDArray[np.int64]) -> tuple[NDArray[Any], Tiles]:
        """Scores at `columns` (undefined where -1), and the tiles of `rows`."""
        if self.shape[1] <= _HELD_CANDIDATES:
            tiles = list(self.tiles(rows))
            block = np.concatenate([tile for _, tile in tiles], axis=1)
            return np.take_along_axis(block, np.maximum(columns, 0), axis=1), iter(tiles)

        # The same numbers as in the tiles, since sums of rounded products are exact.
        queries = self._get_units(self.queries, self._query_scales, rows)
        scores = np.empty(columns.shape, self._dtype)
        for i in range(columns.shape[1]):
            candidates = self._get_units(self.candidates, self._candidate_scales, columns[:, i])
            scores[:, i] = np.einsum("qd,qd->q", queries, candidates)
        return scores, self.tiles(rows)

    def _get_units(self, embeds: NDArray[Any], scales: NDArray[Any] | None, rows: Any) -> NDArray[np.float64]:
        block = embeds[rows].astype(np.float64)
        return _round_rows(block if scales is None else block * scales[rows])

    def _get_scales(self, embeds: NDArray[Any], name: str, similarity: str) -> NDArray[Any] | None:
        """(rows, 1) factors to unit norm, or None where none is needed."""
        squares = np.empty(len(embeds), np.float64)
        for start in range(0, len(embeds), _NORM_ROWS):
            block = embeds[start : start + _NORM_ROWS].astype(np.float64)
            squares[start : start + _NORM_ROWS] = np.einsum("id,id->i", block, block)
        norms = np.sqrt(squares)[:, None]

        # Squared norms that the scores' type holds bound every product (Cauchy-Schwarz): no tile need be checked.
        bad = np.flatnonzero(~(squares <= np.finfo(self._dtype).max))
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}] has NaN, inf or huge values ({len(bad)} such rows); it must be finite")
        if similarity == "dot":
            return None

        if not norms.all():
            raise ValueError(f"{name}[{np.argmin(norms)}] is zero and has no cosine; leave it out")
        furthest = norms[np.argmax(np.abs(norms - 1)), 0]
        if abs(furthest - 1) <= _NORM_TOLERANCE:
            return None

        warnings.warn(
            f"{name} has rows of norm {furthest:.4g} where 1 is expected; the scores are cosines, after normalising "
            "them (similarity='dot' takes embeddings as they are)",
            stacklevel=3,
        )
        return 1 / norms


def _round_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round each row to multiples of a power of two, so coarse that products with other rounded rows are exact.

    With b bits a row the sum of d products stays below 2^(2b) d steps. For 2b + log2(d) <= 53 float64 holds it exactly,
    in whatever order it is added. The rounding error is 2^-b of the row's largest value: 2^-22 at d = 512.

    >>> bool(_round_rows(np.array([[0.5, 0.1]]))[0, 0] == 0.5)
    True
    """
    bits = (53 - (rows.shape[1] - 1).bit_length()) // 2
    exponents = np.frexp(np.abs(rows).max(axis=1, keepdims=True))[1]
    steps = np.ldexp(1.0, exponents - bits)
    rows /= steps
    np.rint(rows, out=rows)
    rows *= steps
    return rows
