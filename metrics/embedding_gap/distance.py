"""Distances between the embeddings of the same sentences in two languages."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BLOCK_ROWS = 128  # with 512 dimensions, the float64 copies of a block fit into the cache of a core
# In half precision, the norm of a unit vector differs from 1 by less than this.
_NORM_TOLERANCE = 1e-2


def gap_and_distance(other_embeds: ArrayLike, english_embeds: ArrayLike) -> dict[str, float]:
    """Compute Gap and Dis between another language and English (ATRI eq. 14 and 15) from unit-norm embeddings.

    Gap = norm of (mean over i of english_i - mean over i of other_i)
    Dis = mean over i of the norm of (english_i - other_i)

    Gap is the distance between the mean embeddings of the two languages. Dis is the mean distance between a sentence
    and its translation; it is 0 only if both have the same embedding everywhere. Gap <= Dis <= 2 (triangle inequality).

    Args:
        other_embeds: (N, d) embeddings of N sentences in the other language, unit norm.
        english_embeds: (N, d) embeddings of the same sentences in English, in the same order.

    Returns:
        Dict with `Gap` and `Dis`, both 0 for a perfect model. For independent random embeddings, Gap is about sqrt(2/N)
        and Dis about sqrt(2).

    Raises:
        ValueError: The shapes differ or are not (N, d), or an embedding is zero or contains NaN or inf.

    Warns:
        UserWarning: A norm is not within 0.01 of 1. The embeddings are normalised.

    >>> gap_and_distance([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]])  # a permutation: one centre
    {'Gap': 0.0, 'Dis': 1.4142135623730951}
    """
    other, english = _as_array(other_embeds, "other_embeds"), _as_array(english_embeds, "english_embeds")
    if other.shape != english.shape or other.ndim != 2 or not other.size:
        raise ValueError(
            f"other_embeds has shape {other.shape} and english_embeds {english.shape}; both must be (N, d), "
            "with translations in the same row"
        )

    other_norms, english_norms = _norms(other, "other_embeds"), _norms(english, "english_embeds")
    displacement, distance = np.zeros(other.shape[1]), 0.0
    for start in range(0, len(other), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        difference = english[rows] / english_norms[rows] - other[rows] / other_norms[rows]
        displacement += difference.sum(axis=0)
        distance += np.linalg.norm(difference, axis=1).sum()

    return {"Gap": float(np.linalg.norm(displacement)) / len(other), "Dis": float(distance) / len(other)}


def _as_array(embeds: ArrayLike, name: str) -> NDArray[Any]:
    try:
        return np.asarray(embeds)
    except ValueError as error:
        raise ValueError(f"the rows of {name} differ in length; all embeddings must have the same dimension") from error


def _norms(embeds: NDArray[Any], name: str) -> NDArray[np.float64]:
    """Return the norms, (N, 1) in float64; raise if one is zero or not finite."""
    norms = np.sqrt(np.einsum("id,id->i", embeds, embeds, dtype=np.float64))[:, None]
    bad = np.flatnonzero(~np.isfinite(norms) | (norms == 0))
    if len(bad):
        raise ValueError(f"{name}[{bad[0]}] has norm {norms[bad[0], 0]}; an embedding must be finite and not zero")

    furthest = norms[np.argmax(np.abs(norms - 1)), 0]
    if abs(furthest - 1) > _NORM_TOLERANCE:
        warnings.warn(
            f"{name} has rows of norm {furthest:.4g}, expected 1; they are normalised",
            stacklevel=3,
        )
    return norms
