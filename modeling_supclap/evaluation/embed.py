"""Embed the clips and texts of a dataset split once, for use by all evaluation tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import file_sha256
from modeling_supclap.datasets_scripts.audio import WHOLE, content_of, read_row, segment_of
from modeling_supclap.datasets_scripts.schema import all_captions, without_audio
from modeling_supclap.metrics.recall.ranking import LazySimilarity

from ..audio_input import Recording
from .cache import EmbeddingCache, digest_of
from .options import AudioPolicy as AudioPolicy

if TYPE_CHECKING:
    from .models import EmbeddingModel

Row = Mapping[str, Any]

# Number of threads that prefetch audio.
_READERS = 4
_STORED_SIMILARITIES = 2**24  # 64 MiB


@dataclass
class ClipEmbeddings:
    """Chunk embeddings of N clips, P chunks in total.

    Attributes:
        embeds: Chunk embeddings with unit norm, (P, d), sorted by clip.
        counts: Number of chunks per clip, (N,). It is 0 if the clip could not be read.
        pooling: "mean" or "best" (see `AudioPolicy`).
    """

    embeds: np.ndarray
    counts: np.ndarray
    pooling: str = "mean"

    @property
    def starts(self) -> np.ndarray:
        """Index of each clip's first chunk, (N,)."""
        return np.cumsum(self.counts) - self.counts

    def select(self, clips: Sequence[int] | np.ndarray) -> ClipEmbeddings:
        """Return the embeddings of the given clips, in the given order."""
        starts, counts = self.starts[clips], self.counts[clips]
        rows = np.concatenate(list(map(np.arange, starts, starts + counts)))
        return ClipEmbeddings(self.embeds[rows], counts, self.pooling)

    @cached_property
    def mean(self) -> np.ndarray:
        """Clip embeddings (N, d): the chunk embedding if a clip has one chunk, else the normalised mean over chunks."""
        if (self.counts == 1).all():
            return self.embeds

        # (P, d) -> (N, d)
        sums = np.add.reduceat(self.embeds.astype(np.float64), self.starts, axis=0)
        means = (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)
        single = self.counts == 1
        means[single] = self.embeds[self.starts[single]]
        return means

    def similarity(self, text_embeds: np.ndarray) -> np.ndarray | LazySimilarity:
        """Compute the cosine similarity matrix (M, N) between M text embeddings (M, d) and the N clips.

        Clips with equal embeddings have exactly equal cosines, so that metrics detect ties. If the chunks of a clip are
        averaged and the matrix has more than `_STORED_SIMILARITIES` values, the result is a `LazySimilarity`, which is
        computed in tiles to save memory.
        """
        if self.pooling == "best" and not (self.counts == 1).all():
            # (M, P) -> (M, N): maximum over the chunks of each clip
            return np.maximum.reduceat(LazySimilarity(text_embeds, self.embeds)[:], self.starts, axis=1)
        similarity = LazySimilarity(text_embeds, self.mean)
        return similarity if np.prod(similarity.shape) > _STORED_SIMILARITIES else similarity[:]


@dataclass
class EmbeddedSplit:
    """Embedded clips of a dataset split, with the model to embed texts.

    Attributes:
        rows: Dataset rows of the embedded clips, without audio.
        clips: Clip embeddings, in the order of `rows`.
        model: Model for text embeddings, or None if `held` contains all required texts.
        missing: Ids of clips with missing or unusable audio.
        cache: Cache for the embeddings of texts, and of the combined clips of ZSTE (zero-shot temporal evaluation).
        files: SHA-256 of the recordings, `{clip id: SHA-256}`. Empty if not computed.
        held: Text embeddings that are already computed, `{(language, text): embedding}`.
        ids: Clip ids, (N,) strings.
        sources: Id of the source recording for each clip, (N,) strings.
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
    train: EmbeddedSplit | None = None

    def __post_init__(self) -> None:
        ids, sources = [], []
        for row in self.rows:
            ids.append(row["clip_id"])
            sources.append(str(row.get("source") or row["clip_id"]))
        self.ids, self.sources = np.array(ids), np.array(sources)

    @property
    def unit(self) -> str:
        """Name of the units of bootstrap intervals: "clips" if each clip is a recording, else "recordings"."""
        return "clips" if len(np.unique(self.sources)) == len(self.ids) else "recordings"

    def select(self, chosen: Sequence[int]) -> EmbeddedSplit:
        """Return the split of the clips with these indices. A list of rows is not kept as its `dataset`."""
        rows = [self.rows[index] for index in chosen]
        dataset = self.dataset.select(chosen) if hasattr(self.dataset, "select") else None
        return replace(self, rows=rows, clips=self.clips.select(chosen), dataset=dataset)

    def group_by(self, column: str) -> dict[str, EmbeddedSplit]:
        """Return the split of the clips with each value of a column of the rows, or "no value", sorted by value."""
        indices: dict[str, list[int]] = {}
        for index, row in enumerate(self.rows):
            value = row.get(column)
            indices.setdefault("no value" if value in (None, "") else str(value), []).append(index)
        return {value: self.select(chosen) for value, chosen in sorted(indices.items())}

    def by_dataset(self) -> dict[str, EmbeddedSplit]:
        """Return `{dataset name: split}` if the rows are from several datasets (`mixture.mix`), else an empty dict."""
        parts = self.group_by("dataset")
        return parts if len(parts) > 1 else {}

    def languages(self, among: Sequence[str]) -> list[str]:
        """Return the languages in `among` in which at least one row has a caption."""
        present: set[str] = set()
        for row in self.rows:
            present.update(filter(row["captions"].get, among))
        return list(filter(present.__contains__, among))

    def texts(self, texts: Sequence[str], language: str) -> np.ndarray:
        """Embed M texts in one language as unit vectors (M, d). Each distinct text is embedded once."""
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
        rows: Dataset rows (see `datasets_scripts.schema` for the columns).
        policy: Truncation, chunking and pooling settings. None: use the defaults.
        cache: Embedding cache. None: disable caching.
        on_bad_audio: Action for missing or unusable recordings. "error" raises. "skip" leaves them out of the split and
            lists them in `EmbeddedSplit.missing`.

    Raises:
        ValueError: The split is empty, two rows have the same id, no recording is readable, or a length in `policy` is
            outside the model's limits.
        FileNotFoundError: A recording is missing, with `on_bad_audio="error"`.
        BadAudioError: A recording is unusable, with `on_bad_audio="error"`.
    """
    if on_bad_audio not in ("error", "skip"):
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; it must be error or skip")

    policy, cache = policy or AudioPolicy(), cache or EmbeddingCache(None)
    # raises if the model does not support this length
    model.chunk_samples(policy.chunk_seconds)
    if policy.max_audio_seconds is not None and policy.max_audio_seconds < model.min_seconds:
        raise ValueError(
            f"max_audio_seconds is {policy.max_audio_seconds}; {model.name} needs at least {model.min_seconds:g} s"
        )
    policy = replace(policy, chunk_seconds=policy.chunk_seconds or model.chunk_seconds)

    all_rows = list(without_audio(rows))
    if not all_rows:
        raise ValueError("the split is empty; there is nothing to evaluate")
    files = hash_recordings(rows, on_bad_audio)
    existing = [index for index, row in enumerate(all_rows) if row["clip_id"] in files]

    def read(index: int, rate_hz: int) -> np.ndarray:
        return read_row(
            rows[index],
            rate_hz,
            policy.max_audio_seconds,
            min_seconds=model.min_seconds,
            pad_short_clips=policy.pad_short_clips,
            resampling_method=model.resampling_method,
        )

    recordings = []
    for index in existing:
        recordings.append(Recording(partial(read, index), None, f"clip {all_rows[index]['clip_id']}"))
    # The digests are in row order.
    key = {"max_audio_seconds": policy.max_audio_seconds, "files": list(files.values())}
    clips = embed_recordings(model, recordings, policy, cache, key, on_bad_audio, batch_size)
    readable = np.flatnonzero(clips.counts)
    if not len(readable):
        raise ValueError(f"none of the {len(all_rows)} recordings can be read: {all_rows[0]['audio_path']}, ...")

    valid = [existing[number] for number in readable]
    return EmbeddedSplit(
        rows=[all_rows[index] for index in valid],
        clips=clips if len(readable) == len(existing) else clips.select(readable),
        model=model,
        dataset=rows,
        missing=np.delete([row["clip_id"] for row in all_rows], valid).tolist(),
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
    """Build an `EmbeddedSplit`, in the order of `rows`, from the output of `trainer.predict`.

    Args:
        prediction: The Trainer's `EvalPrediction` or `PredictionOutput`: audio (N, d) and text (N, K, d) embeddings,
            with the row index of each clip as its label.
        languages: Languages of the K captions per row, in the same order as in `EvaluationCollator`.
        policy: Truncation, chunking and pooling settings of the predictions. None: the defaults.

    Raises:
        ValueError: A clip is missing or repeated, or an embedding is not finite.
    """
    audio_embeds, text_embeds = in_row_order(prediction)
    all_rows = list(without_audio(rows))
    held: dict[tuple[str, str], np.ndarray] = {}
    for row, embeds in zip(all_rows, text_embeds, strict=True):
        # embeddings after those of the captions are padding
        for caption, embed in zip(all_captions(row, languages), embeds, strict=False):
            held.setdefault(caption, embed)
    clips = ClipEmbeddings(audio_embeds, np.ones(len(all_rows), np.int64))
    return EmbeddedSplit(all_rows, clips, model, rows, policy=policy or AudioPolicy(), held=held)


def in_row_order(prediction: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the audio and text embeddings of a Trainer prediction, sorted by row index.

    Raises:
        ValueError: A clip is missing or repeated, or an embedding is not finite.
    """
    order = np.argsort(prediction.label_ids)
    if not np.array_equal(prediction.label_ids[order], np.arange(len(order))):
        raise ValueError(f"expected each of {len(order)} clips once, got indices {prediction.label_ids[order]}")
    audio_embeds, text_embeds = prediction.predictions
    for name, embeds in (("audio", audio_embeds), ("text", text_embeds)):
        bad = ~np.isfinite(embeds[order]).reshape(len(order), -1).all(axis=1)
        # comparisons with NaN are False: the clip would count as a wrong answer
        if bad.any():
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
    """Split recordings into chunks and embed the chunks, or load their embeddings from the cache.

    Args:
        key: JSON-serialisable values that identify the recordings. The model and the chunk length are added to the
            cache key.
        on_bad_audio: "skip" returns zero chunks for bad recordings; "error" raises.

    Raises:
        OSError: A recording cannot be read. With `on_bad_audio="skip"`, only missing files are skipped. Other read
            errors are raised, because they may be temporary and the cache would store the result.
        ValueError: A recording is unusable, with `on_bad_audio="error"`.
    """

    def make() -> dict[str, np.ndarray]:
        # imported here, because the trainer does not need it
        from modeling_supclap.datasets_scripts.progress import progress

        counts, embeds = [], []
        chunked = model.chunk_embeddings(recordings, policy.chunk_seconds, None, batch_size, _READERS, on_bad_audio)
        for chunks in progress(chunked, "embedding", len(recordings), "recordings"):
            if isinstance(chunks.error, OSError) and not isinstance(chunks.error, FileNotFoundError):
                raise chunks.error
            counts.append(len(chunks.onset_seconds))
            if chunks.error is None:
                embeds.append(np.asarray(chunks.embeds))
        joined = np.concatenate(embeds or [np.empty((0, 1), np.float32)])
        return {"embeds": joined, "counts": np.array(counts, np.int64)}

    full_key = {
        "model": model.fingerprint,
        "sampling_rate_hz": model.sampling_rate_hz,
        "resampling_method": model.resampling_method,
        "chunk_seconds": policy.chunk_seconds,
        "audio": dict(key),
    }
    if policy.pad_short_clips:
        full_key["padded_to_seconds"] = model.min_seconds
    stored = cache.fetch(full_key, make, keep=model.fingerprint is not None)
    if on_bad_audio == "error" and not stored["counts"].all():
        bad = recordings[int(np.argmin(stored["counts"]))]
        bad.read(
            model.sampling_rate_hz, resampling_method=model.resampling_method
        )  # raises the error of this recording
        raise ValueError(f"the cache lists {bad.name} as unreadable, but it can be read now; delete {cache.folder}")
    return ClipEmbeddings(stored["embeds"], stored["counts"], policy.pooling)


def hash_recordings(rows: Any, on_bad_audio: str = "error") -> dict[str, str]:
    """Hash each recording, from the audio in its row or from its file.

    Return `{clip id: SHA-256}` with hex strings, in row order. With `on_bad_audio="skip"`, exclude missing files.

    Raises:
        ValueError: Two rows have the same id.
        FileNotFoundError: A recording is missing, with `on_bad_audio="error"`.
    """
    digests: dict[str, str] = {}
    of_files: dict[str, str] = {}  # several rows may be parts of one file
    seen: set[str] = set()
    for index in range(len(rows)):
        row = rows[index]
        clip_id, content = row["clip_id"], content_of(row)
        if clip_id in seen:
            raise ValueError(f"two rows have the clip_id {clip_id!r}; ids must be unique")
        seen.add(clip_id)

        try:
            if isinstance(content, bytes):
                digests[clip_id] = hashlib.sha256(content).hexdigest()
            else:
                of_files[content] = of_files.get(content) or file_sha256(content)
                digests[clip_id] = of_files[content]
            if (segment := segment_of(row)) != WHOLE:
                digests[clip_id] = hashlib.sha256(f"{digests[clip_id]} {segment}".encode()).hexdigest()
        except FileNotFoundError as error:
            if on_bad_audio == "error":
                raise FileNotFoundError(f"clip {clip_id}: {error}; --on_bad_audio skip leaves it out") from None
    return digests


def hash_dataset(rows: Sequence[Row], files: Mapping[str, str]) -> str:
    """Hash the ids, captions, labels and recordings (from `hash_recordings`) of a split, independent of row order."""
    content = []
    for row in rows:
        captions, labels = dict(row.get("captions") or {}), list(row.get("labels") or ())
        content.append([row["clip_id"], captions, labels, files[row["clip_id"]]])
    return digest_of(sorted(content, key=lambda entry: entry[0]))
