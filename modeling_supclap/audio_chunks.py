"""Long recordings in parts of one length: cutting them, and finding the part that answers a text best."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class AudioChunks(NamedTuple):
    """The parts of one recording.

    Attributes:
        embeds: Unit norm, (chunks, d).
        onset_seconds: Where each begins, (chunks,) float64.
        offset_seconds: Where each ends.
    """

    embeds: Any
    onset_seconds: np.ndarray
    offset_seconds: np.ndarray


def cut_chunks(waveform: np.ndarray, chunk_samples: int | None) -> list[tuple[int, np.ndarray]]:
    """Cuts a waveform into chunks of one length; the last one is moved back to end with the waveform.

    Args:
        waveform: (samples,).
        chunk_samples: Their length; None leaves the waveform whole, as does one that it does not reach.

    Returns:
        The first sample of each chunk, and the chunk.

    >>> [(start, chunk.tolist()) for start, chunk in cut_chunks(np.arange(5), 2)]
    [(0, [0, 1]), (2, [2, 3]), (3, [3, 4])]
    """
    if chunk_samples is None or len(waveform) <= chunk_samples:
        return [(0, waveform)]
    last = len(waveform) - chunk_samples
    starts = [*range(0, last, chunk_samples), last]
    return [(start, waveform[start : start + chunk_samples]) for start in starts]


def best_chunks(recordings: Sequence[AudioChunks], text_embeds: Any) -> tuple[np.ndarray, np.ndarray]:
    """Finds for each text the chunk of each recording that answers it best.

    Args:
        recordings: N of them, from `encode_audio(..., return_chunks=True)`.
        text_embeds: Unit norm, (M, d).

    Returns:
        The cosine of the best chunk, (N, M), and where that chunk begins, in seconds, (N, M). Of equal ones the first.

    >>> whole = AudioChunks(np.eye(2), np.array([0.0, 10.0]), np.array([10.0, 20.0]))
    >>> best_chunks([whole], np.array([[0.0, 1.0]]))
    (array([[1.]]), array([[10.]]))
    """
    texts = np.atleast_2d(np.asarray(text_embeds))
    cosines = [np.asarray(recording.embeds) @ texts.T for recording in recordings]
    places = [cosine.argmax(axis=0) for cosine in cosines]
    onsets = [recording.onset_seconds[place] for recording, place in zip(recordings, places, strict=True)]
    return np.stack([cosine.max(axis=0) for cosine in cosines]), np.stack(onsets)
