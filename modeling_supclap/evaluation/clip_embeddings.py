"""What is heard of recordings, and their embeddings, of which a long recording may have several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modeling_supclap.metrics.recall.ranking import LazySimilarity

from .embedding_models import EmbeddingModel, unit_norm


@dataclass(frozen=True)
class AudioPolicy:
    """What is heard of a recording.

    Attributes:
        max_audio_seconds: Longer recordings are cut to their beginning; None keeps everything.
        chunk_seconds: Longer ones are embedded in chunks of this length, the last moved back to end with the recording;
            None leaves it to the model, which takes any length (SupCLAP) or 10 s at a time (CLAP).
        pooling: "mean", a recording's embedding is the normalised mean of its chunks'; or "best", a text is compared
            with each chunk and the highest cosine counts.
    """

    max_audio_seconds: float | None = None
    chunk_seconds: float | None = None
    pooling: str = "mean"

    def __post_init__(self) -> None:
        if self.pooling not in ("mean", "best"):
            raise ValueError(f"pooling is {self.pooling!r}; it must be mean or best")
        for name in ("max_audio_seconds", "chunk_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; give more than 0 seconds")

    def for_model(self, model: EmbeddingModel) -> AudioPolicy:
        """The same with the model's own limit in it.

        Raises:
            ValueError: The chunks are longer than the model takes.
        """
        if self.chunk_seconds is not None and model.chunk_seconds is not None:
            if self.chunk_seconds > model.chunk_seconds:
                raise ValueError(
                    f"chunk_seconds is {self.chunk_seconds}; {model.name} takes {model.chunk_seconds} s at once"
                )
            return self
        return AudioPolicy(self.max_audio_seconds, self.chunk_seconds or model.chunk_seconds, self.pooling)

    def sentence(self) -> str:
        """The policy in words."""
        kept = "all of" if self.max_audio_seconds is None else f"the first {self.max_audio_seconds:g} s of"
        if self.chunk_seconds is None:
            return f"{kept} each recording, embedded at once"
        pooled = "the normalised mean of their embeddings" if self.pooling == "mean" else "the best chunk for each text"
        return f"{kept} each recording, in chunks of {self.chunk_seconds:g} s where it is longer; {pooled}"


@dataclass
class ClipEmbeddings:
    """The embeddings of N clips, chunk by chunk.

    Attributes:
        embeds: Unit norm, (P, d), the chunks of one clip after those of another.
        counts: How many chunks each clip has, (N,); 0 where it could not be read.
        onset_seconds: Where each chunk begins, (P,).
        pooling: See `AudioPolicy`.
    """

    embeds: np.ndarray
    counts: np.ndarray
    onset_seconds: np.ndarray
    pooling: str = "mean"

    def select(self, clips: Sequence[int] | np.ndarray) -> ClipEmbeddings:
        """Only these clips, in this order."""
        starts = np.cumsum(self.counts) - self.counts
        rows = [np.arange(starts[clip], starts[clip] + self.counts[clip]) for clip in clips]
        chosen = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        counts = self.counts[np.asarray(clips, dtype=np.int64)]
        return ClipEmbeddings(self.embeds[chosen], counts, self.onset_seconds[chosen], self.pooling)

    @property
    def mean(self) -> np.ndarray:
        """One vector a clip, (N, d), unit norm: what a clip of one chunk has anyway."""
        starts = np.cumsum(self.counts) - self.counts
        sums = np.add.reduceat(self.embeds.astype(np.float64), starts, axis=0)
        means = (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)
        single = self.counts == 1
        means[single] = self.embeds[starts[single]]
        return means

    def similarity(self, text_embeds: np.ndarray, queries: str = "text") -> Any:
        """How well texts and clips match, as `modeling_supclap.metrics.recall.ranking` takes it.

        Args:
            text_embeds: Unit norm, (M, d).
            queries: "text" for (M, N) or "audio" for (N, M).
        """
        if self.pooling == "mean" or (self.counts == 1).all():
            pair = (text_embeds, self.mean) if queries == "text" else (self.mean, text_embeds)
            return LazySimilarity(*pair)
        by_chunk = matrix_of(LazySimilarity(text_embeds, self.embeds))
        best = np.maximum.reduceat(by_chunk, np.cumsum(self.counts) - self.counts, axis=1)
        return best if queries == "text" else np.ascontiguousarray(best.T)


def matrix_of(similarity: Any, rows: slice | None = None) -> np.ndarray:
    """All scores of some queries, or of all, from what `ClipEmbeddings.similarity` gives."""
    rows = slice(0, similarity.shape[0]) if rows is None else rows
    if isinstance(similarity, np.ndarray):
        return similarity[rows]
    return np.concatenate([tile.copy() for _, tile in similarity.tiles(rows)], axis=1)  # tiles share one buffer


def check_pairs(
    audio_embeds: Any, text_embeds: Any, relevant: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Checks embeddings that come from elsewhere, before they are scored.

    Args:
        audio_embeds: (N, d).
        text_embeds: (M, d).
        relevant: For each of the M texts the clips that answer it.

    Returns:
        Both, unit norm, float32.

    Raises:
        ValueError: Lengths or dimensions do not fit, a value is NaN, or a text has no clip that answers it.
    """
    audio = unit_norm(audio_embeds, len(audio_embeds), "audio_embeds")
    text = unit_norm(text_embeds, len(text_embeds), "text_embeds")
    if audio.shape[1] != text.shape[1]:
        raise ValueError(f"audio_embeds are {audio.shape} and text_embeds {text.shape}; their widths must be equal")
    if len(relevant) != len(text):
        raise ValueError(f"got {len(relevant)} lists of relevant clips for {len(text)} texts; give one each")
    for index, clips in enumerate(relevant):
        if not len(clips):
            raise ValueError(f"text {index} has no relevant clip; leave such texts out")
    return audio, text
