"""Smaller forms of embeddings: their first values, float16, 8-bit integers and single bits, and search in them.

An int8 vector is the embedding divided by its largest absolute value, times 127. Its norm is lost, which cosines do not
need. A binary vector contains the signs, 8 in a byte. A query stays in float32: it is compared with the stored vectors
after they are converted back to unit norm. In binary vectors, only the candidates with the fewest different bits are
compared in this way (rescoring).
"""

from __future__ import annotations

import numpy as np

PRECISIONS = {"float32": np.float32, "float16": np.float16, "int8": np.int8, "binary": np.uint8}
"""Forms of stored embeddings, and their data type."""

CANDIDATES = 20
"""Number of binary vectors to rescore for each result."""

_BLOCK_ROWS = 16_384


def shorten(embeds: np.ndarray, width: int | None) -> np.ndarray:
    """Return the first `width` values of embeddings (..., d), normalized again. None: all values, unchanged.

    >>> shorten(np.array([[0.6, 0.0, 0.8]]), 2)
    array([[1., 0.]])
    """
    if width is None or width == embeds.shape[-1]:
        return embeds
    cut = embeds[..., :width]
    norms = np.linalg.norm(cut, axis=-1, keepdims=True)
    return cut / np.maximum(norms, np.finfo(np.float32).tiny)


def require_storage(dim: int, precision: str, width: int | None) -> int:
    """Return the size of a stored vector, for embeddings of `dim` values. Raise ValueError for invalid settings."""
    values = dim if width is None else width
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if not 1 <= values <= dim:
        raise ValueError(f"width is {width}; it must be at least 1 and at most {dim}, the width of the embeddings")
    if precision == "binary" and values % 8:
        raise ValueError(f"binary vectors need a width that is a multiple of 8, not {values}; set another width")
    return values // 8 if precision == "binary" else values


def compress(embeds: np.ndarray, precision: str = "float32", width: int | None = None) -> np.ndarray:
    """Convert embeddings (n, d) of unit norm to stored vectors, (n, size).

    >>> compress(np.array([[0.6, -0.8]]), "int8")
    array([[  95, -127]], dtype=int8)
    """
    vectors = shorten(embeds, width)
    if precision == "binary":
        return np.packbits(vectors > 0, axis=-1)
    if precision == "int8":
        peaks = np.abs(vectors).max(axis=-1, keepdims=True, initial=np.finfo(np.float32).tiny)
        return np.rint(127 * vectors / peaks).astype(np.int8)
    return vectors.astype(PRECISIONS[precision])


def restore(vectors: np.ndarray, precision: str) -> np.ndarray:
    """Convert stored vectors back to float32 embeddings of unit norm."""
    if precision == "float32":
        return vectors
    if precision == "binary":
        signs = 2 * np.unpackbits(vectors, axis=-1).astype(np.float32) - 1
        return signs / np.float32(signs.shape[-1] ** 0.5)
    floats = vectors.astype(np.float32)
    return floats / np.maximum(np.linalg.norm(floats, axis=-1, keepdims=True), np.finfo(np.float32).tiny)


def score(vectors: np.ndarray, query: np.ndarray, precision: str, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices and cosines of stored vectors that may be among the `limit` nearest to a query.

    Args:
        vectors: Stored vectors, (n, size).
        query: Embedding of the stored width, (width,), unit norm.

    Returns:
        All vectors; with "binary", the `CANDIDATES * limit` vectors with the fewest different bits, and those that tie.
    """
    indices = np.arange(len(vectors))
    if precision == "float32":
        return indices, vectors @ query
    if precision == "binary" and CANDIDATES * limit < len(vectors):
        distances = np.bitwise_count(vectors ^ np.packbits(query > 0)).sum(axis=1)
        last = np.partition(distances, CANDIDATES * limit - 1)[CANDIDATES * limit - 1]
        indices = np.flatnonzero(distances <= last)
    scores = []
    for start in range(0, len(indices), _BLOCK_ROWS):
        block = vectors[indices[start : start + _BLOCK_ROWS]]
        scores.append(restore(block, precision) @ query)
    return indices, np.concatenate([np.empty(0, np.float32), *scores])
