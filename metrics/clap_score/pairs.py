"""Cosine similarity of the embeddings of sound-text pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from modeling_supclap.metrics.recall.ranking import as_matrix, get_norms


def pair_similarity(audio_embeds: ArrayLike, text_embeds: ArrayLike) -> NDArray[np.float64]:
    """Compute the cosine similarity of each sound and its text; the mean is the CLAP score.

    s_i = a_i . t_i / (||a_i|| ||t_i||)

    The values per pair are input for `bootstrap_intervals`, and for `paired_test` of two generators with equal texts.

    Args:
        audio_embeds: (N, d) embeddings of N sounds, of any norm.
        text_embeds: (N, d) embeddings of their texts by the same model, in the same order.

    Returns:
        Similarities in -1..1, (N,).

    Raises:
        ValueError: The shapes differ or are not (N, d), or an embedding is zero or contains NaN or inf.

    >>> pair_similarity([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [3.0, 4.0]]).tolist()
    [1.0, 0.8]
    """
    audio, text = as_matrix(audio_embeds, "audio_embeds"), as_matrix(text_embeds, "text_embeds")
    if audio.shape != text.shape:
        raise ValueError(
            f"audio_embeds has shape {audio.shape} and text_embeds {text.shape}; both must be (N, d), with a sound and "
            "its text in the same row"
        )
    norms = get_norms(audio, "audio_embeds", is_unit=False) * get_norms(text, "text_embeds", is_unit=False)
    return np.einsum("id,id->i", audio, text, dtype=np.float64) / norms[:, 0]
