"""A split, embedded once: what is heard of each recording, and the embeddings of its clips and texts.

Both roads end here: `embed_split` embeds rows with any model, `split_from_predictions` takes what the Trainer has
embedded in all its processes. Everything that is scored afterwards reads the one `EmbeddedSplit`.
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
# Up to so many similarities, 64 MB, are held as a matrix: ranks and best hits of both directions come from one product.
_HELD_SIMILARITIES = 1 << 24


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

    @property
    def starts(self) -> np.ndarray:
        """The row of each clip's first chunk, (N,)."""
        return np.cumsum(self.counts) - self.counts

    def chunk_rows(self, clips: np.ndarray) -> np.ndarray:
        """The rows of the chunks of some clips, one clip after the other."""
        counts = self.counts[clips]
        before = np.cumsum(counts) - counts
        return np.repeat(self.starts[clips] - before, counts) + np.arange(counts.sum())

    def select(self, clips: Sequence[int] | np.ndarray) -> ClipEmbeddings:
        """Only these clips, in this order."""
        clips = np.asarray(clips, dtype=np.int64)
        rows = self.chunk_rows(clips)
        return ClipEmbeddings(self.embeds[rows], self.counts[clips], self.onset_seconds[rows], self.pooling)

    @cached_property
    def mean(self) -> np.ndarray:
        """One vector a clip, (N, d), unit norm: what a clip of one chunk has anyway."""
        if (self.counts == 1).all():
            return self.embeds

        # (P, d) -> (N, d)
        sums = np.add.reduceat(self.embeds.astype(np.float64), self.starts, axis=0)
        means = (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)
        single = self.counts == 1
        means[single] = self.embeds[self.starts[single]]
        return means

    def similarity(self, text_embeds: np.ndarray, direction: str = "t2a") -> np.ndarray | LazySimilarity:
        """Return the cosines of texts and clips: a matrix of a small split, a `LazySimilarity` of a large one.

        With the best chunk for each text it is a matrix always. Equal embeddings get equal cosines, to the last bit.

        Args:
            text_embeds: Unit norm, (M, d).
            direction: "t2a" for texts by clips, (M, N), or "a2t" for (N, M).
        """
        if self.pooling == "best" and not (self.counts == 1).all():
            # (M, P) -> (M, N): of each clip the chunk with the highest cosine
            similarity = np.maximum.reduceat(LazySimilarity(text_embeds, self.embeds)[:], self.starts, axis=1)
            return similarity if direction == "t2a" else np.ascontiguousarray(similarity.T)

        pair = (text_embeds, self.mean) if direction == "t2a" else (self.mean, text_embeds)
        lazy = LazySimilarity(*pair)
        return lazy if math.prod(lazy.shape) > _HELD_SIMILARITIES else lazy[:]

    def pair_cosines(self, text_embeds: np.ndarray, clips: np.ndarray) -> np.ndarray:
        """The score of each text with one clip of its own.

        Args:
            text_embeds: Unit norm, (M, d).
            clips: The clip of each text, (M,).

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
    """The clips of a split that can be heard, and how to embed anything else with the same model.

    Attributes:
        rows: The clips that are there, without their audio.
        clips: Their embeddings, in the same order.
        model: The model that embeds; None where all that is scored has been embedded.
        dataset: What the rows are of, with their audio.
        missing: The ids of the clips that are not there.
        policy: What was heard of each recording.
        cache: Where embeddings are kept.
        batch_size: How much goes through the model at once.
        files: The digest of each recording, by clip id; empty where none was taken.
        held: The embedding of each text that was asked for, by language and text, so that nothing is embedded twice.
        ids: The id of each clip, (N,) strings.
        sources: The recording that each clip was cut from, (N,) strings.
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
    def _places(self) -> dict[str, int]:
        return {row["clip_id"]: place for place, row in enumerate(without_audio(self.dataset))}

    def read(self, clip_id: str, max_seconds: float | None = None) -> np.ndarray:
        """The beginning of a clip at the model's rate, or from its first sound on where that is silent."""
        assert self.model is not None
        return read_row(
            self.dataset[self._places[clip_id]],
            self.model.sampling_rate_hz,
            max_seconds,
            from_first_sound=True,
            min_seconds=self.model.min_seconds,
        )

    def texts(self, texts: Sequence[str], language: str) -> np.ndarray:
        """Embeds texts of one language, or finds them; equal texts get equal embeddings.

        Args:
            texts: M of them, repetitions allowed.
            language: ISO 639-3 code.

        Returns:
            Unit norm, (M, d).
        """
        wanted = sorted({text for text in texts if (language, text) not in self.held})
        if wanted:
            model, size = self.model, self.batch_size
            assert model is not None, f"{wanted[0]!r} was not embedded, and there is no model to embed it"
            key = {"model": model.fingerprint, "language": language, "texts": wanted}
            made = self.cache.fetch(
                key, lambda: {"embeds": model.encode_text(wanted, language, size)}, keep=model.fingerprint is not None
            )
            for text, embed in zip(wanted, made["embeds"], strict=True):
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
    """Embeds the recordings of a split, or finds them in the cache.

    Args:
        model: The model that embeds.
        rows: Rows of the schema.
        policy: What is heard of each.
        cache: Where embeddings are kept; None keeps none.
        on_bad_audio: What to do about recordings that are not there or cannot be read: "error", or "skip" them and name
            them.
        batch_size: How many clips go through the model at once.

    Raises:
        ValueError: The split is empty, two rows have one id, no recording can be read, or the policy's length is too
            long or too short for the model.
        FileNotFoundError: A recording is not there, with `on_bad_audio="error"`.
        BadAudioError: A recording holds no usable sound, with `on_bad_audio="error"`.
    """
    if on_bad_audio not in ("error", "skip"):
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; it must be error or skip")

    policy, cache = policy or AudioPolicy(), cache or EmbeddingCache(None)
    model.chunk_samples(policy.chunk_seconds)  # raises where the model takes no such chunks
    if policy.max_audio_seconds is not None and policy.max_audio_seconds < model.min_seconds:
        raise ValueError(
            f"max_audio_seconds is {policy.max_audio_seconds}; {model.name} takes {model.min_seconds:g} s or more"
        )
    policy = replace(policy, chunk_seconds=policy.chunk_seconds or model.chunk_seconds)

    listed = list(without_audio(rows))
    if not listed:
        raise ValueError("the split is empty; there is nothing to evaluate")

    files = hash_recordings(rows, cache, on_bad_audio)
    there = [place for place, row in enumerate(listed) if row["clip_id"] in files]
    if not there:
        raise ValueError(f"none of the {len(listed)} recordings is there, such as {listed[0]['audio_path']}")

    def read(place: int, rate_hz: int) -> np.ndarray:
        return read_row(rows[place], rate_hz, policy.max_audio_seconds, min_seconds=model.min_seconds)

    recordings = [Recording(partial(read, place), None, f"clip {listed[place]['clip_id']}") for place in there]
    # The digests stand in the order of the rows.
    key = {"max_audio_seconds": policy.max_audio_seconds, "files": list(files.values())}
    clips = embed_recordings(model, recordings, policy, cache, key, on_bad_audio, batch_size)
    heard = np.flatnonzero(clips.counts)
    if not len(heard):
        raise ValueError(f"none of the {len(there)} recordings can be read, such as {listed[there[0]]['audio_path']}")

    kept, missing = [], []
    heard_places = set(np.array(there)[heard].tolist())
    for place, row in enumerate(listed):
        if place in heard_places:
            kept.append(row)
        else:
            missing.append(row["clip_id"])
    return EmbeddedSplit(
        rows=kept,
        clips=clips if len(heard) == len(there) else clips.select(heard),
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
    """The split that `trainer.predict` has embedded, whichever process saw which clip.

    Args:
        prediction: The Trainer's `EvalPrediction` or `PredictionOutput`: audio (N, d) and text (N, K, d) embeddings,
            and the place of each clip as its label.
        rows: The split.
        languages: All that were embedded, in the order of `EvaluationCollator`, which lays out the K captions of a row.
        model: The model behind them, for whatever else is to be embedded.
        policy: What was heard of each recording.

    Raises:
        ValueError: A clip is missing or came twice.
    """
    audio_embeds, text_embeds = in_row_order(prediction)
    listed = list(without_audio(rows))
    held: dict[tuple[str, str], np.ndarray] = {}
    for row, embeds in zip(listed, text_embeds, strict=True):
        for caption, embed in zip(all_captions(row, languages), embeds, strict=False):  # those beyond are padding
            held.setdefault(caption, embed)
    clips = ClipEmbeddings(audio_embeds, np.ones(len(listed), np.int64), np.zeros(len(listed)))
    return EmbeddedSplit(listed, clips, model, rows, policy=policy or AudioPolicy(), held=held)


def in_row_order(prediction: Any) -> tuple[np.ndarray, np.ndarray]:
    """Undoes the order in which several processes saw a split.

    Args:
        prediction: The Trainer's `EvalPrediction` or `PredictionOutput`.

    Returns:
        The audio and the text embeddings in the order of the rows.

    Raises:
        ValueError: A clip is missing or came twice, or its embeddings are not finite.
    """
    order = np.argsort(prediction.label_ids)
    if not np.array_equal(prediction.label_ids[order], np.arange(len(order))):
        raise ValueError(f"expected each of {len(order)} clips once, got indices {prediction.label_ids[order]}")
    audio_embeds, text_embeds = prediction.predictions
    for name, embeds in (("audio", audio_embeds), ("text", text_embeds)):
        bad = ~np.isfinite(embeds[order]).reshape(len(order), -1).all(axis=1)
        if bad.any():  # no comparison with NaN holds: it would count as a wrong answer and not as none
            raise ValueError(
                f"the {name} embeddings of {bad.sum()} of {len(order)} clips are not finite, "
                f"such as clip {bad.argmax()}"
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
        policy: Length of the chunks, and how they are pooled.
        cache: Where embeddings are kept.
        key: All that the waveforms depend on, except the model's sampling rate.
        on_bad_audio: "skip" leaves bad recordings without chunks; "error" raises.
        batch_size: Chunks that go through the model at once.

    Raises:
        OSError: A recording cannot be read. With `on_bad_audio="skip"` only where it exists: the cache would keep it.
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

    made_of = {
        "model": model.fingerprint,
        "sampling_rate_hz": model.sampling_rate_hz,
        "chunk_seconds": policy.chunk_seconds,
        "audio": dict(key),
    }
    stored = cache.fetch(made_of, make, keep=model.fingerprint is not None)
    if on_bad_audio == "error" and not stored["counts"].all():
        bad = recordings[int(np.argmin(stored["counts"]))]
        bad.read(model.sampling_rate_hz)  # raises what is wrong with it
        raise ValueError(f"{bad.name} could not be embedded before, but can be read now; delete {cache.folder}")
    return ClipEmbeddings(**stored, pooling=policy.pooling)


def hash_recordings(rows: Any, cache: EmbeddingCache, on_bad_audio: str = "error") -> dict[str, str]:
    """The SHA-256 of each recording that is there, by clip id: of the audio that a row holds, or of its file.

    Args:
        rows: Rows of the schema.
        cache: Remembers the digests of files.
        on_bad_audio: See `embed_split`.

    Raises:
        ValueError: Two rows have one id.
        FileNotFoundError: A recording is not there, with `on_bad_audio="error"`.
    """
    digests: dict[str, str] = {}
    seen: set[str] = set()
    for number in range(len(rows)):
        row = rows[number]
        clip_id, audio = row["clip_id"], row.get("audio")
        if clip_id in seen:
            raise ValueError(f"two rows have the clip_id {clip_id!r}; ids must be unique")
        seen.add(clip_id)

        held = None
        path = row.get("audio_path")
        if row.get("samples") is not None:
            held = row["samples"] + str(row["sampling_rate_hz"]).encode()
        elif isinstance(audio, Mapping) and "array" not in audio:
            held, path = audio.get("bytes"), audio.get("path") or path
        elif audio is not None:
            held = np.asarray(audio["array"], np.float32).tobytes() + str(audio["sampling_rate"]).encode()

        try:
            digests[clip_id] = cache.file_digest(path) if held is None else hashlib.sha256(held).hexdigest()
        except FileNotFoundError as error:
            if on_bad_audio == "error":
                told = f"clip {clip_id}: {error}; --on_bad_audio skip goes on without it"
                raise FileNotFoundError(told) from None
    cache.save_digests()
    return digests


def hash_dataset(rows: Sequence[Row], files: Mapping[str, str]) -> str:
    """The name of a set of clips: their ids, captions, labels and recordings, in any order and in any folder.

    Args:
        rows: Rows of the schema.
        files: The digest of each recording, from `hash_recordings`.
    """
    content = []
    for row in rows:
        captions, labels = dict(row.get("captions") or {}), list(row.get("labels") or ())
        content.append([row["clip_id"], captions, labels, files[row["clip_id"]]])
    return digest_of(sorted(content, key=lambda entry: entry[0]))
