"""Where scores come from: a matrix that is there, or embeddings whose products are made in tiles and thrown away.

Both hand out the scores of a block of queries twice over: those of the relevant candidates, and all of them in tiles
of at most `TILE_CANDIDATES` columns. Whoever counts needs no more, and never holds the matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Queries by candidates of one matrix product. A BLAS library treats the columns left over beyond a multiple of its
# kernel's width with other code, which rounds differently: two equal candidates then score unequally and the tie is
# lost. Products of one width, itself a multiple of 64, keep equal candidates equal to the last bit.
TILE_QUERIES, TILE_CANDIDATES, _TILE_ALIGNMENT = 1024, 1024, 64
# Up to so many candidates a block of queries keeps all its scores, so that none is computed twice.
_HELD_CANDIDATES = 8 * TILE_CANDIDATES
# A tile of a matrix that is counted at once stays in a core's second-level cache.
_MATRIX_QUERIES = 256
# Half precision leaves the norm of a unit vector within this of 1.
_NORM_TOLERANCE = 1e-2
_NORM_ROWS = 4096

Tiles = Iterator[tuple[int, NDArray[Any]]]


class LazySimilarity:
    """`queries @ candidates.T`, computed in tiles when it is needed and thrown away: a `similarity` in bounded memory.

    It goes wherever `ranking` takes a `similarity`. Products are in the embeddings' own precision, float32 at least.
    It keeps ties, too: candidates with equal embeddings get equal scores, to the last bit, wherever they stand. One
    product of the whole matrix does not promise that.

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

    >>> lazy = LazySimilarity([[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0], [0.0, 1.0]])
    >>> [(first, tile.tolist()) for first, tile in lazy.tiles(slice(0, 2))]
    [(0, [[1.0, 0.0], [0.6, 0.8]])]
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
        self._width = min(TILE_CANDIDATES, -(-self.shape[1] // _TILE_ALIGNMENT) * _TILE_ALIGNMENT)
        self._query_scales = self._get_scales(self.queries, "queries", similarity)
        self._candidate_scales = self._get_scales(self.candidates, "candidates", similarity)

    def tiles(self, rows: slice) -> Tiles:
        """Yields (first column, scores) over all candidates; the scores stand until the next tile."""
        queries = self._get_units(self.queries, self._query_scales, rows)
        out = np.empty((len(queries), self._width), self._dtype)
        for start in range(0, self.shape[1], self._width):
            yield start, self._product(queries, slice(start, start + self._width), out)

    def scored(self, rows: slice, columns: NDArray[np.int64]) -> tuple[NDArray[Any], Tiles]:
        """The scores of each row's own columns, of any column where that is -1, and the tiles of these rows."""
        queries = self._get_units(self.queries, self._query_scales, rows)
        if self.shape[1] > _HELD_CANDIDATES:
            return self._at(queries, columns), self.tiles(rows)

        block = np.empty((len(queries), -(-self.shape[1] // self._width) * self._width), self._dtype)
        tiles = []
        for start in range(0, self.shape[1], self._width):
            held = slice(start, start + self._width)
            tiles.append((start, self._product(queries, held, block[:, held])))
        return np.take_along_axis(block, np.maximum(columns, 0), axis=1), iter(tiles)

    def _at(self, queries: NDArray[Any], columns: NDArray[np.int64]) -> NDArray[Any]:
        # Through the same product as the tiles: from a dot product of its own a score differs in the last bit.
        wanted, where = np.unique(columns, return_inverse=True)
        where = where.reshape(columns.shape)

        scores = np.empty(columns.shape, self._dtype)
        out = np.empty((len(queries), self._width), self._dtype)
        for start in range(0, len(wanted), self._width):
            tile = self._product(queries, wanted[start : start + self._width], out)
            row, item = np.nonzero((where >= start) & (where < start + self._width))
            scores[row, item] = tile[row, where[row, item] - start]

        return scores

    def _product(self, queries: NDArray[Any], columns: Any, out: NDArray[Any]) -> NDArray[Any]:
        candidates = padded = self._get_units(self.candidates, self._candidate_scales, columns)
        if len(candidates) < self._width:
            padded = np.zeros((self._width, candidates.shape[1]), self._dtype)
            padded[: len(candidates)] = candidates
        return np.matmul(queries, padded.T, out=out)[:, : len(candidates)]

    def _get_units(self, embeds: NDArray[Any], scales: NDArray[Any] | None, rows: Any) -> NDArray[Any]:
        block = embeds[rows].astype(self._dtype, copy=False)
        return block if scales is None else block * scales[rows]

    def _get_scales(self, embeds: NDArray[Any], name: str, similarity: str) -> NDArray[Any] | None:
        """(rows, 1) factors to unit norm, or None where none is needed."""
        squares = np.empty(len(embeds), self._dtype)
        for start in range(0, len(embeds), _NORM_ROWS):
            block = embeds[start : start + _NORM_ROWS].astype(self._dtype, copy=False)
            squares[start : start + _NORM_ROWS] = np.einsum("id,id->i", block, block)
        norms = np.sqrt(squares)[:, None]

        # Finite squared norms bound every product (Cauchy-Schwarz), so that no tile need be looked at.
        bad = np.flatnonzero(~np.isfinite(norms))
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


class Matrix:
    """A similarity that is there as an array.

    Args:
        scores: (Q, C), higher is closer.
    """

    chunk = _MATRIX_QUERIES

    def __init__(self, scores: ArrayLike) -> None:
        self.scores = as_matrix(scores, "similarity")
        self.shape = (len(self.scores), self.scores.shape[1])

    def scored(self, rows: slice, columns: NDArray[np.int64]) -> tuple[NDArray[Any], Tiles]:
        """The scores of each row's own columns, of any column where that is -1, and the tiles of these rows."""
        own = np.take_along_axis(self.scores[rows], np.maximum(columns, 0), axis=1)
        return own, self._tiles(rows)

    def _tiles(self, rows: slice) -> Tiles:
        for first in range(0, self.shape[1], TILE_CANDIDATES):
            tile = self.scores[rows, first : first + TILE_CANDIDATES]
            with np.errstate(all="ignore"):
                is_suspect = not np.isfinite(tile.sum())
            if is_suspect and not np.isfinite(tile).all():
                row, column = np.argwhere(~np.isfinite(tile))[0]
                raise ValueError(
                    f"similarity[{rows.start + row}, {first + column}] is {tile[row, column]}; all scores must be "
                    "finite, for a rank among NaN or inf means nothing"
                )
            yield first, tile


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
