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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAP_CUTOFF = 10

# A block of a matrix that is counted at once stays in a core's second-level cache.
_BLOCK_SCORES = 1 << 18
# Queries by candidates of one matrix product. A BLAS library treats the columns left over beyond a multiple of its
# kernel's width with other code, which rounds differently: two equal candidates then score unequally and the tie is
# lost. Products of one width, itself a multiple of 64, keep equal candidates equal to the last bit.
_TILE_QUERIES, _TILE_CANDIDATES, _TILE_ALIGNMENT = 1024, 1024, 64


def best_ranks(similarity: ArrayLike | LazySimilarity, relevant: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """0-based rank of each query's best relevant candidate: the number of irrelevant ones scored at least as high.

    A perfect model gives 0 everywhere, a constant one C - m (m: relevant candidates of the query), a random one
    (C - m) / (m + 1) on average.

    Args:
        similarity: (Q, C) scores, higher is closer; or a `LazySimilarity`.
        relevant: for each query the columns of its relevant candidates, at least one.

    Returns:
        (Q,) int64.

    Raises:
        ValueError: a score is NaN or infinite, or `relevant` does not fit the scores.

    >>> best_ranks([[0.9, 0.2, 0.4], [0.9, 0.2, 0.4]], [[0], [1, 2]])
    array([0, 1])
    """
    return _count_outranking(similarity, relevant, depth=1)[0][:, 0]


def ranks_from_embeddings(
    queries: ArrayLike, candidates: ArrayLike, relevant: Sequence[Sequence[int]], chunk: int = _TILE_QUERIES
) -> NDArray[np.int64]:
    """`best_ranks` of `queries @ candidates.T` without ever holding that matrix.

    Args:
        queries: (Q, d) embeddings, unit norm where the similarity is the cosine.
        candidates: (C, d) embeddings.
        relevant: for each query the rows of its relevant candidates.
        chunk: queries scored at a time; the memory beyond the embeddings is about 3000 scores for each.

    Returns:
        (Q,) int64, 0-based.

    Raises:
        ValueError: an embedding holds NaN or inf, or the shapes or `relevant` do not fit.

    >>> ranks_from_embeddings([[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [0.0, 1.0]], [[0], [0]])
    array([0, 1])
    """
    return best_ranks(LazySimilarity(queries, candidates, chunk), relevant)


def average_precision_at(
    similarity: ArrayLike | LazySimilarity, relevant: Sequence[Sequence[int]], k: int = MAP_CUTOFF
) -> float:
    """Mean average precision of the first k answers (mAP@k), a fraction.

    mAP@k = mean over queries of 1/m * sum of the precision at the rank of each relevant candidate ranked k or better

    with m relevant candidates; for m = 1 it is the mean of 1/rank, cut at k. The division is by m itself, as in
    ML-CLAP's published evaluation (arXiv 2406.07012), so the best possible value is min(m, k)/m.

    Args:
        similarity: (Q, C) scores, higher is closer; or a `LazySimilarity`.
        relevant: for each query the columns of its relevant candidates, at least one.
        k: how many answers are looked at.

    Returns:
        A fraction; what random scores get is in `chance_scores`.

    Raises:
        ValueError: as `retrieval_scores`.

    >>> average_precision_at([[0.9, 0.8, 0.7, 0.6]], [[0, 2]])  # (1/1 + 2/3) / 2
    0.8333333333333333
    """
    (cutoff,) = _check_cutoffs([k])
    return float(_average_precisions(*_count_outranking(similarity, relevant, depth=cutoff), cutoff).mean())


def retrieval_scores(
    similarity: ArrayLike | LazySimilarity, relevant: Sequence[Sequence[int]], k: int | Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """R@k, mAP@10, median and mean rank of one direction of retrieval.

    R@k = mean over queries of [the best relevant candidate is among the first k].

    For text to audio give the transpose, `similarity.T`, where `similarity[i, j]` is audio i, text j.

    Args:
        similarity: (Q, C) scores, higher is closer; or a `LazySimilarity`.
        relevant: for each query the columns of its relevant candidates, at least one.
        k: the cutoffs of R@k.

    Returns:
        `R@k` for each k and `mAP@10`, fractions in 0..1; `median_rank` (the floor of the 0-based median, plus 1) and
        `mean_rank` of the best relevant candidate, 1-based; `num_queries`. A perfect model gives 1, 1 (with at most ten
        relevant candidates), 1 and 1; what a random one gives is in `chance_scores`.

    Raises:
        ValueError: a score is NaN or infinite, `relevant` does not fit the scores, or a cutoff is not positive.

    >>> retrieval_scores([[0.9, 0.2, 0.4], [0.9, 0.2, 0.4]], [[0], [1, 2]], k=[1, 2])
    {'R@1': 0.5, 'R@2': 1.0, 'mAP@10': 0.7916666666666666, 'median_rank': 1, 'mean_rank': 1.5, 'num_queries': 2}
    """
    cutoffs = _check_cutoffs(k)
    counts, sizes = _count_outranking(similarity, relevant, depth=MAP_CUTOFF)
    ranks = counts[:, 0]
    return {
        **{f"R@{cutoff}": float((ranks < cutoff).mean()) for cutoff in cutoffs},
        f"mAP@{MAP_CUTOFF}": float(_average_precisions(counts, sizes, MAP_CUTOFF).mean()),
        "median_rank": int(np.median(ranks)) + 1,
        "mean_rank": float(ranks.mean()) + 1.0,
        "num_queries": len(ranks),
    }


def chance_scores(
    relevant: Sequence[Sequence[int]], num_candidates: int, k: int | Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Exact expectation of R@k and mAP@10 when each query's candidates stand in random order.

    With n candidates, m of them relevant, and p = (m - 1)/(n - 1), averaged over the queries:

        R@k = 1 - C(n - m, k) / C(n, k)
        AP@k = 1/n * sum over ranks r = 1..min(k, n) of (1 + (r - 1) p) / r

    For rank r is relevant with probability m/n; then each of the r - 1 ranks before it is with probability p, so that
    the precision there is (1 + (r - 1) p)/r on average; and the sum is divided by m.

    Args:
        relevant: for each query the columns of its relevant candidates.
        num_candidates: n.
        k: the cutoffs of R@k.

    Returns:
        `R@k` for each k and `mAP@10`, fractions.

    Raises:
        ValueError: `relevant` does not fit the candidates, or a cutoff is not positive.

    >>> chance_scores([[0], [1]], num_candidates=4, k=2)
    {'R@2': 0.5, 'mAP@10': 0.5208333333333333}
    """
    cutoffs = _check_cutoffs(k)
    sizes, repeats = np.unique(_Relevant.parse(relevant, len(relevant), num_candidates).sizes, return_counts=True)
    weights = repeats / repeats.sum()
    chance = {f"R@{cutoff}": [_chance_recall(m, num_candidates, cutoff) for m in sizes] for cutoff in cutoffs}
    chance[f"mAP@{MAP_CUTOFF}"] = [_chance_average_precision(m, num_candidates, MAP_CUTOFF) for m in sizes]
    return {name: float(weights @ np.array(values)) for name, values in chance.items()}


class LazySimilarity:
    """`queries @ candidates.T`, computed in tiles when it is needed and thrown away: a `similarity` in bounded memory.

    It goes wherever this module takes a `similarity`. Products are in the embeddings' own precision, float32 at least.
    It keeps ties, too: candidates with equal embeddings get equal scores, to the last bit, wherever they stand. One
    product of the whole matrix does not promise that.

    Args:
        queries: (Q, d) embeddings, unit norm where the similarity is the cosine.
        candidates: (C, d) embeddings.
        chunk: queries scored at a time.

    Raises:
        ValueError: an embedding holds NaN or inf, an array is empty or not (rows, d), or the d differ.

    >>> texts, audios = [[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [0.0, 1.0]]
    >>> retrieval_scores(LazySimilarity(texts, audios), [[0], [1]], k=1)["R@1"]
    1.0
    """

    def __init__(self, queries: ArrayLike, candidates: ArrayLike, chunk: int = _TILE_QUERIES) -> None:
        self.queries, self.candidates = _as_matrix(queries, "queries"), _as_matrix(candidates, "candidates")
        if self.queries.shape[1] != self.candidates.shape[1]:
            raise ValueError(
                f"queries are {self.queries.shape} and candidates {self.candidates.shape}; "
                "their last dimensions must be equal"
            )
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; it must be 1 or more queries")
        self.shape = (len(self.queries), len(self.candidates))
        self.chunk = chunk
        self._dtype = np.result_type(self.queries, self.candidates, np.float32)
        self._width = min(_TILE_CANDIDATES, -(-self.shape[1] // _TILE_ALIGNMENT) * _TILE_ALIGNMENT)
        self._check_finite(self.queries, "queries")
        self._check_finite(self.candidates, "candidates")

    def at(self, rows: slice, columns: NDArray[np.int64]) -> NDArray[Any]:
        """The scores of each row's own columns, (len(rows), M); -inf where the column is -1."""
        # Through the same product as `tiles`: from a dot product of its own a score differs in the last bit.
        wanted, where = np.unique(columns, return_inverse=True)
        where = where.reshape(columns.shape)
        scores = np.empty(columns.shape, self._dtype)
        for start in range(0, len(wanted), self._width):
            tile = self._product(rows, self.candidates[wanted[start : start + self._width]])
            row, item = np.nonzero((where >= start) & (where < start + self._width))
            scores[row, item] = tile[row, where[row, item] - start]
        return np.where(columns >= 0, scores, -np.inf)

    def tiles(self, rows: slice) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (first column, scores) over all candidates; the receiver may write on the scores."""
        for start in range(0, self.shape[1], self._width):
            yield start, self._product(rows, self.candidates[start : start + self._width])

    def _product(self, rows: slice, candidates: NDArray[Any]) -> NDArray[Any]:
        padded = candidates.astype(self._dtype, copy=False)
        if len(candidates) < self._width:
            padded = np.zeros((self._width, candidates.shape[1]), self._dtype)
            padded[: len(candidates)] = candidates
        return (self.queries[rows].astype(self._dtype, copy=False) @ padded.T)[:, : len(candidates)]

    def _check_finite(self, embeds: NDArray[Any], name: str) -> None:
        # Finite squared norms bound every product (Cauchy-Schwarz), so that no tile need be looked at.
        bad = np.flatnonzero(~np.isfinite(np.einsum("id,id->i", embeds, embeds, dtype=self._dtype)))
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}] has NaN, inf or huge values ({len(bad)} such rows); it must be finite")


@dataclass
class _Matrix:
    """A similarity that is there as an array, cut into blocks of rows."""

    scores: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return self.scores.shape

    @property
    def chunk(self) -> int:
        return max(1, _BLOCK_SCORES // self.shape[1])

    def at(self, rows: slice, columns: NDArray[np.int64]) -> NDArray[Any]:
        return np.where(columns >= 0, np.take_along_axis(self.scores[rows], np.maximum(columns, 0), axis=1), -np.inf)

    def tiles(self, rows: slice) -> Iterator[tuple[int, NDArray[Any]]]:
        block = np.array(self.scores[rows], order="C")
        finite = np.isfinite(block)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise ValueError(
                f"similarity[{rows.start + row}, {column}] is {block[row, column]}; all scores must be finite, "
                "for a rank among NaN or inf means nothing"
            )
        yield 0, block


class _Source(Protocol):
    """What is counted: the two classes above."""

    @property
    def chunk(self) -> int: ...
    def at(self, rows: slice, columns: NDArray[np.int64]) -> NDArray[Any]: ...
    def tiles(self, rows: slice) -> Iterator[tuple[int, NDArray[Any]]]: ...


@dataclass
class _Relevant:
    """The relevant columns of all queries, end to end; those of query q are `columns[ends[q] - sizes[q] : ends[q]]`."""

    columns: NDArray[np.int64]
    sizes: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def parse(cls, relevant: Sequence[Sequence[int]], num_queries: int, num_candidates: int) -> _Relevant:
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
        columns = np.array(list(chain.from_iterable(relevant)))
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


def _count_outranking(
    similarity: ArrayLike | LazySimilarity, relevant: Sequence[Sequence[int]], depth: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`counts` of the module's docstring, (Q, depth or less), -1 beyond a query's relevant ones; their number, (Q,)."""
    # Asking for the method and not the class: `evaluate` loads a second copy of this module.
    source: Any = similarity if hasattr(similarity, "tiles") else _Matrix(_as_matrix(similarity, "similarity"))
    parsed = _Relevant.parse(relevant, *source.shape)
    counts = np.empty((source.shape[0], min(depth, int(parsed.sizes.max()))), np.int64)
    for start in range(0, len(counts), source.chunk):
        rows = slice(start, min(start + source.chunk, len(counts)))
        counts[rows] = _count_rows(source, rows, parsed.padded(rows, counts.shape[1]), counts.shape[1])
    return counts, parsed.sizes


def _count_rows(source: _Source, rows: slice, columns: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
    best = -np.sort(-source.at(rows, columns), axis=1)[:, :depth]
    counts = np.zeros(best.shape, np.int64)
    for first, tile in source.tiles(rows):
        row, item = np.nonzero((columns >= first) & (columns < first + tile.shape[1]))
        tile[row, columns[row, item] - first] = -np.inf  # so that only irrelevant candidates are counted
        for i in range(depth):
            ahead = (tile >= best[:, i : i + 1]).view(np.uint8)  # bytes sum faster than truth values
            counts[:, i] += ahead.sum(axis=1, dtype=np.uint32)
    return np.where(np.isneginf(best), -1, counts)


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
    cutoffs = list(np.atleast_1d(np.asarray(k)))
    if not cutoffs or any(not isinstance(cutoff, np.integer) or cutoff < 1 for cutoff in cutoffs):
        raise ValueError(f"k is {k!r}; give one or more positive whole numbers, such as [1, 5, 10]")
    return [int(cutoff) for cutoff in cutoffs]


def _as_matrix(values: ArrayLike, name: str) -> NDArray[Any]:
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
