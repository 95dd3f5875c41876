"""Distances between the embeddings of the same sentences in two languages."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from modeling_supclap.metrics.recall.ranking import as_matrix, get_norms

# rows per block; with 512 dimensions, the float64 copies of a block fit into the cache of a core
_BLOCK_ROWS = 128


def gap_and_distance(other_embeds: ArrayLike, english_embeds: ArrayLike) -> dict[str, float]:
    """Compute Gap and Dis between another language and English (ATRI eq. 14 and 15) from unit-norm embeddings.

    Gap = norm of (mean over i of english_i - mean over i of other_i)
    Dis = mean over i of the norm of (english_i - other_i)

    Gap <= Dis <= 2 (triangle inequality). Dis is 0 only if each sentence and its translation have the same embedding.

    Args:
        other_embeds: (N, d) embeddings of N sentences in the other language, unit norm.
        english_embeds: (N, d) embeddings of the same sentences in English, in the same order.

    Returns:
        Dict with `Gap` and `Dis`, both 0 for a perfect model. For independent random embeddings, Gap is about sqrt(2/N)
        and Dis about sqrt(2).

    Raises:
        ValueError: The shapes differ or are not (N, d), or an embedding is zero or contains NaN or inf. If a norm is
            not within 0.01 of 1, a UserWarning is shown, and the embeddings are normalised.

    >>> gap_and_distance([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]])  # equal means
    {'Gap': 0.0, 'Dis': 1.4142135623730951}
    """
    other, english = as_matrix(other_embeds, "other_embeds"), as_matrix(english_embeds, "english_embeds")
    if other.shape != english.shape:
        raise ValueError(
            f"other_embeds has shape {other.shape} and english_embeds {english.shape}; both must be (N, d), "
            "with translations in the same row"
        )

    other_norms, english_norms = get_norms(other, "other_embeds"), get_norms(english, "english_embeds")
    displacement, distance = np.zeros(other.shape[1]), 0.0
    for start in range(0, len(other), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        difference = english[rows] / english_norms[rows] - other[rows] / other_norms[rows]
        displacement += difference.sum(axis=0)
        distance += np.linalg.norm(difference, axis=1).sum()

    return {"Gap": float(np.linalg.norm(displacement)) / len(other), "Dis": float(distance) / len(other)}
