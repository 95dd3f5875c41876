"""The embeddings of a split's clips and texts, computed once and scored by every task.

`embed_split` embeds rows with any model. `split_from_predictions` takes embeddings that the Trainer has computed in all
its processes. Both return an `EmbeddedSplit`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.schema import all_captions, without_audio
from modeling_supclap.metrics.recall.ranking import LazySimilarity

from ..audio_input import Recording
from .cache import EmbeddingCache, digest_of

if TYPE_CHECKING:
    from .models import EmbeddingModel

Row = Mapping[str, Any]

# Threads that read ahead of the model.
_READERS = 4
# Largest similarity matrix kept in memory (64 MB); both directions then share one matrix product.
_MAX_SIMILARITIES = 1 << 24


@dataclass(frozen=True)
class AudioPolicy:
    """How recordings are truncated, split into chunks and pooled.

    Attributes:
        max_audio_seconds: Longer recordings are truncated to this length; None uses all of them.
        chunk_seconds: Longer recordings are embedded in chunks of this length. The last chunk starts earlier, so that
            it ends with the recording. None uses the model's maximum: any length (SupCLAP) or 10 s (CLAP).
        pooling: "mean" averages the chunk embeddings of a recording and normalises the mean; "best" scores a text by
            its highest cosine with any chunk.
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
                raise ValueError(f"{name} is {value}; it must be more than 0 seconds")

    def sentence(self) -> str:
        """Describe the policy in one sentence."""
        part = "all of" if self.max_audio_seconds is None else f"the first {self.max_audio_seconds:g} s of"
        if self.chunk_seconds is None:
            return f"{part} each recording, embedded at once"
        pooled = "the normalised mean of their embeddings" if self.pooling == "mean" else "the best chunk for each text"
        return f"{part} each recording, in chunks of {self.chunk_seconds:g} s if it is longer; {pooled}"


@dataclass
class ClipEmbeddings:
    """The embeddings of N clips, chunk by chunk.

    Attributes:
        embeds: Chunk embeddings of unit norm, (P, d), in the order of the clips.
        counts: Number of chunks per clip, (N,); 0 if the clip could not be read.
        onset_seconds: Start of each chunk in its recording, (P,).
        pooling: "mean" or "best", see `AudioPolicy`.
    """

    embeds: np.ndarray
    counts: np.ndarray
    onset_seconds: np.ndarray
    pooling: str = "mean"

    @property
    def starts(self) -> np.ndarray:
        """Index of each clip's first chunk, (N,)."""
        return np.cumsum(self.counts) - self.counts

    def chunk_rows(self, clips: np.ndarray) -> np.ndarray:
        """Return the chunk indices of the given clips, clip by clip."""
        counts = self.counts[clips]
        before = np.cumsum(counts) - counts
        return np.repeat(self.starts[clips] - before, counts) + np.arange(counts.sum())

    def select(self, clips: Sequence[int] | np.ndarray) -> ClipEmbeddings:
        """Return the embeddings of these clips, in this order."""
        clips = np.asarray(clips, dtype=np.int64)
        rows = self.chunk_rows(clips)
        return ClipEmbeddings(self.embeds[rows], self.counts[clips], self.onset_seconds[rows], self.pooling)

    @cached_property
    def mean(self) -> np.ndarray:
        """Normalised mean of each clip's chunk embeddings, (N, d); a single chunk is unchanged."""
        if (self.counts == 1).all():
            return self.embeds

        # (P, d) -> (N, d)
        sums = np.add.reduceat(self.embeds.astype(np.float64), self.starts, axis=0)
        means = (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)
        single = self.counts == 1
        means[single] = self.embeds[self.starts[single]]
        return means

    def similarity(self, text_embeds: np.ndarray, direction: str = "t2a") -> np.ndarray | LazySimilarity:
        """Return the cosines of texts and clips: an array for a small split, a `LazySimilarity` for a large one.

        Pooling "best" of several chunks always returns an array. Equal embeddings have bitwise equal cosines.

        Args:
            text_embeds: Unit norm, (M, d).
            direction: "t2a" returns texts by clips, (M, N); "a2t" returns (N, M).
        """
        if self.pooling == "best" and not (self.counts == 1).all():
            # (M, P) -> (M, N): maximum over the chunks of each clip
            similarity = np.maximum.reduceat(LazySimilarity(text_embeds, self.embeds)[:], self.starts, axis=1)
            return similarity if direction == "t2a" else np.ascontiguousarray(similarity.T)

        pair = (text_embeds, self.mean) if direction == "t2a" else (self.mean, text_embeds)
        lazy = LazySimilarity(*pair)
        return lazy if math.prod(lazy.shape) > _MAX_SIMILARITIES else lazy[:]

    def pair_cosines(self, text_embeds: np.ndarray, clips: np.ndarray) -> np.ndarray:
        """Compute the cosine of each text with one clip.

        Args:
            text_embeds: Unit norm, (M, d).
            clips: Index of the clip for each text, (M,).

        Returns:
            (M,) float32.
        """
        if self.pooling == "mean" or (self.counts == 1).all():
            return np.einsum("md,md->m", text_embeds, self.mean[clips])
        counts = self.counts[clips]
        chunks = self.embeds[self.chunk_rows(clips)]
        cosines = np.einsum("pd,pd->p", np.repeat(text_embeds, counts, axis=0), chunks)
        return np.maximum.reduceat(cosines, np.cumsum(counts) - counts)


@dataclass
class EmbeddedSplit:
    """The embedded clips of a split, and the model that embeds its texts.

    Attributes:
        rows: Rows of the embedded clips, without audio.
        clips: Their embeddings, in the same order.
        model: The model; None if every text to score is already embedded.
        dataset: The dataset of the rows, with audio.
        missing: Ids of the clips that are missing or unreadable.
        policy: How recordings were truncated, split and pooled.
        cache: Cache of text embeddings and of the composed clips of ZSTE.
        batch_size: Clips or texts per batch.
        files: SHA-256 of each recording by clip id; empty if not computed.
        held: Embeddings computed so far, by (language, text).
        ids: Clip ids, (N,) strings.
        sources: Id of the source recording of each clip, (N,) strings.
    """

    rows: list[Row]
    clips: ClipEmbeddings
    model: EmbeddingModel | None = None
    dataset: Any = None
    missing: list[str] = field(default_factory=list)
    policy: AudioPolicy = field(default_factory=AudioPolicy)
    cache: EmbeddingCache = field(default_factory=lambda: EmbeddingCache(None))
    batch_size: int = 32
    files: dict[str, str] = field(default_factory=dict)
    held: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids, sources = [], []
        for row in self.rows:
            ids.append(row["clip_id"])
            sources.append(str(row.get("source") or row["clip_id"]))
        self.ids, self.sources = np.array(ids), np.array(sources)

    @cached_property
    def _row_indices(self) -> dict[str, int]:
        return {row["clip_id"]: index for index, row in enumerate(without_audio(self.dataset))}

    def read(self, clip_id: str, max_seconds: float | None = None) -> np.ndarray:
        """Read the start of a clip at the model's sampling rate; if it is silent, read from the first sound."""
        assert self.model is not None
        return read_row(
            self.dataset[self._row_indices[clip_id]],
            self.model.sampling_rate_hz,
            max_seconds,
            from_first_sound=True,
            min_seconds=self.model.min_seconds,
        )

    def texts(self, texts: Sequence[str], language: str) -> np.ndarray:
        """Embed texts of one language, each distinct text once.

        Args:
            texts: M texts; repetitions are allowed.
            language: ISO 639-3 code.

        Returns:
            Unit norm, (M, d).
        """
        missing = sorted({text for text in texts if (language, text) not in self.held})
        if missing:
            model, size = self.model, self.batch_size
            assert model is not None, f"{missing[0]!r} has no embedding, and there is no model to compute it"
            key = {"model": model.fingerprint, "language": language, "texts": missing}
            arrays = self.cache.fetch(
                key, lambda: {"embeds": model.encode_text(missing, language, size)}, keep=model.fingerprint is not None
            )
            for text, embed in zip(missing, arrays["embeds"], strict=True):
                self.held[language, text] = embed
        return np.stack([self.held[language, text] for text in texts])


def embed_split(
    model: EmbeddingModel,
    rows: Any,
    policy: AudioPolicy | None = None,
    cache: EmbeddingCache | None = None,
    on_bad_audio: str = "error",
    batch_size: int = 32,
) -> EmbeddedSplit:
    """Embed the recordings of a split, or load their embeddings from the cache.

    Args:
        model: The model that embeds.
        rows: Rows of the schema.
        policy: How recordings are truncated, split and pooled.
        cache: Cache of embeddings; None caches in memory only.
        on_bad_audio: Missing or unreadable recordings: "error" raises; "skip" leaves them out and lists them in
            `EmbeddedSplit.missing`.
        batch_size: Clips per batch.

    Raises:
        ValueError: The split is empty, two rows have the same id, no recording is readable, or the policy's lengths are
            outside the model's limits.
        FileNotFoundError: A recording is missing, with `on_bad_audio="error"`.
        BadAudioError: A recording is unusable, with `on_bad_audio="error"`.
    """
    if on_bad_audio not in ("error", "skip"):
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; it must be error or skip")

    policy, cache = policy or AudioPolicy(), cache or EmbeddingCache(None)
    model.chunk_samples(policy.chunk_seconds)  # raises if the model does not support this length
    if policy.max_audio_seconds is not None and policy.max_audio_seconds < model.min_seconds:
        raise ValueError(
            f"max_audio_seconds is {policy.max_audio_seconds}; {model.name} needs at least {model.min_seconds:g} s"
        )
    policy = replace(policy, chunk_seconds=policy.chunk_seconds or model.chunk_seconds)

    listed_rows = list(without_audio(rows))
    if not listed_rows:
        raise ValueError("the split is empty; there is nothing to evaluate")

    files = hash_recordings(rows, cache, on_bad_audio)
    existing = [index for index, row in enumerate(listed_rows) if row["clip_id"] in files]
    if not existing:
        raise ValueError(
            f"none of the {len(listed_rows)} recordings exists, for example {listed_rows[0]['audio_path']}"
        )

    def read(index: int, rate_hz: int) -> np.ndarray:
        return read_row(rows[index], rate_hz, policy.max_audio_seconds, min_seconds=model.min_seconds)

    recordings = [Recording(partial(read, index), None, f"clip {listed_rows[index]['clip_id']}") for index in existing]
    # The digests are in the order of the rows.
    key = {"max_audio_seconds": policy.max_audio_seconds, "files": list(files.values())}
    clips = embed_recordings(model, recordings, policy, cache, key, on_bad_audio, batch_size)
    readable = np.flatnonzero(clips.counts)
    if not len(readable):
        path = listed_rows[existing[0]]["audio_path"]
        raise ValueError(f"none of the {len(existing)} recordings can be read, for example {path}")

    valid_rows, missing = [], []
    readable_indices = set(np.array(existing)[readable].tolist())
    for index, row in enumerate(listed_rows):
        if index in readable_indices:
            valid_rows.append(row)
        else:
            missing.append(row["clip_id"])
    return EmbeddedSplit(
        rows=valid_rows,
        clips=clips if len(readable) == len(existing) else clips.select(readable),
        model=model,
        dataset=rows,
        missing=missing,
        policy=policy,
        cache=cache,
        batch_size=batch_size,
        files=files,
    )


def split_from_predictions(
    prediction: Any,
    rows: Any,
    languages: Sequence[str],
    model: EmbeddingModel | None = None,
    policy: AudioPolicy | None = None,
) -> EmbeddedSplit:
    """Build the embedded split from the predictions of `trainer.predict`, in row order.

    Args:
        prediction: The Trainer's `EvalPrediction` or `PredictionOutput`: audio (N, d) and text (N, K, d) embeddings,
            and the row index of each clip as its label.
        rows: The split.
        languages: The embedded languages, in the order of `EvaluationCollator`, which lays out the K captions of a row.
        model: The model, to embed further texts and clips.
        policy: How recordings were truncated, split and pooled.

    Raises:
        ValueError: A clip is missing or repeated, or an embedding is not finite.
    """
    audio_embeds, text_embeds = in_row_order(prediction)
    listed = list(without_audio(rows))
    held: dict[tuple[str, str], np.ndarray] = {}
    for row, embeds in zip(listed, text_embeds, strict=True):
        for caption, embed in zip(all_captions(row, languages), embeds, strict=False):  # the rest is padding
            held.setdefault(caption, embed)
    clips = ClipEmbeddings(audio_embeds, np.ones(len(listed), np.int64), np.zeros(len(listed)))
    return EmbeddedSplit(listed, clips, model, rows, policy=policy or AudioPolicy(), held=held)


def in_row_order(prediction: Any) -> tuple[np.ndarray, np.ndarray]:
    """Sort the gathered predictions of all processes by row index.

    Args:
        prediction: The Trainer's `EvalPrediction` or `PredictionOutput`.

    Returns:
        The audio and the text embeddings in the order of the rows.

    Raises:
        ValueError: A clip is missing or repeated, or an embedding is not finite.
    """
    order = np.argsort(prediction.label_ids)
    if not np.array_equal(prediction.label_ids[order], np.arange(len(order))):
        raise ValueError(f"expected each of {len(order)} clips once, got indices {prediction.label_ids[order]}")
    audio_embeds, text_embeds = prediction.predictions
    for name, embeds in (("audio", audio_embeds), ("text", text_embeds)):
        bad = ~np.isfinite(embeds[order]).reshape(len(order), -1).all(axis=1)
        if bad.any():  # comparisons with NaN are False: the clip would count as a wrong answer
            raise ValueError(
                f"the {name} embeddings of {bad.sum()} of {len(order)} clips are not finite, "
                f"for example clip {bad.argmax()}"
            )
    return audio_embeds[order], text_embeds[order]


def embed_recordings(
    model: EmbeddingModel,
    recordings: Sequence[Recording],
    policy: AudioPolicy,
    cache: EmbeddingCache,
    key: Mapping[str, Any],
    on_bad_audio: str = "error",
    batch_size: int = 32,
) -> ClipEmbeddings:
    """Embed recordings chunk by chunk, or load their embeddings from the cache.

    Args:
        model: The model that embeds.
        recordings: N recordings.
        policy: Length of the chunks, and pooling.
        cache: Cache of embeddings.
        key: Everything that determines the waveforms, except the model's sampling rate.
        on_bad_audio: "skip" returns no chunks for bad recordings; "error" raises.
        batch_size: Chunks per batch.

    Raises:
        OSError: A recording cannot be read. `on_bad_audio="skip"` skips only missing files, because the cache would
            store other read errors for good.
        ValueError: A recording is unusable, with `on_bad_audio="error"`.
    """

    def make() -> dict[str, np.ndarray]:
        counts, embeds, onsets = [], [np.empty((0, 1), np.float32)], [np.empty(0)]
        for chunks in model.chunk_embeddings(
            recordings, policy.chunk_seconds, None, batch_size, _READERS, on_bad_audio
        ):
            if isinstance(chunks.error, OSError) and not isinstance(chunks.error, FileNotFoundError):
                raise chunks.error
            counts.append(len(chunks.onset_seconds))
            if chunks.error is None:
                embeds.append(np.asarray(chunks.embeds))
                onsets.append(chunks.onset_seconds)
        joined = np.concatenate(embeds[1:] or embeds)
        return {"embeds": joined, "counts": np.array(counts, np.int64), "onset_seconds": np.concatenate(onsets)}

    full_key = {
        "model": model.fingerprint,
        "sampling_rate_hz": model.sampling_rate_hz,
        "chunk_seconds": policy.chunk_seconds,
        "audio": dict(key),
    }
    stored = cache.fetch(full_key, make, keep=model.fingerprint is not None)
    if on_bad_audio == "error" and not stored["counts"].all():
        bad = recordings[int(np.argmin(stored["counts"]))]
        bad.read(model.sampling_rate_hz)  # raises the error of this recording
        raise ValueError(f"the cache lists {bad.name} as unreadable, but it can be read now; delete {cache.folder}")
    return ClipEmbeddings(**stored, pooling=policy.pooling)


def hash_recordings(rows: Any, cache: EmbeddingCache, on_bad_audio: str = "error") -> dict[str, str]:
    """Return the SHA-256 of each existing recording by clip id, computed from the row's audio or from its file.

    Args:
        rows: Rows of the schema.
        cache: Stores the digests of files.
        on_bad_audio: Missing files: "error" raises, "skip" leaves them out.

    Raises:
        ValueError: Two rows have the same id.
        FileNotFoundError: A recording is missing, with `on_bad_audio="error"`.
    """
    digests: dict[str, str] = {}
    seen: set[str] = set()
    for index in range(len(rows)):
        row = rows[index]
        clip_id, audio = row["clip_id"], row.get("audio")
        if clip_id in seen:
            raise ValueError(f"two rows have the clip_id {clip_id!r}; ids must be unique")
        seen.add(clip_id)

        content = None
        path = row.get("audio_path")
        if row.get("samples") is not None:
            content = row["samples"] + str(row["sampling_rate_hz"]).encode()
        elif isinstance(audio, Mapping) and "array" not in audio:
            content, path = audio.get("bytes"), audio.get("path") or path
        elif audio is not None:
            content = np.asarray(audio["array"], np.float32).tobytes() + str(audio["sampling_rate"]).encode()

        try:
            digests[clip_id] = cache.file_digest(path) if content is None else hashlib.sha256(content).hexdigest()
        except FileNotFoundError as error:
            if on_bad_audio == "error":
                raise FileNotFoundError(f"clip {clip_id}: {error}; --on_bad_audio skip leaves it out") from None
    cache.save_digests()
    return digests


def hash_dataset(rows: Sequence[Row], files: Mapping[str, str]) -> str:
    """Hash the ids, captions, labels and recordings of a split; row order and folders do not change the hash.

    Args:
        rows: Rows of the schema.
        files: SHA-256 of each recording, from `hash_recordings`.
    """
    content = []
    for row in rows:
        captions, labels = dict(row.get("captions") or {}), list(row.get("labels") or ())
        content.append([row["clip_id"], captions, labels, files[row["clip_id"]]])
    return digest_of(sorted(content, key=lambda entry: entry[0]))
