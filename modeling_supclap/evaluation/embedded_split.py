"""A split, embedded once: which clips are there, what was heard of each, and the embeddings of clips and texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.audio import BadAudioError, read_row
from modeling_supclap.datasets_scripts.schema import without_audio

from ..encoding import cut_chunks
from .clip_embeddings import AudioPolicy, ClipEmbeddings
from .embedding_cache import EmbeddingCache, digest_of
from .embedding_models import EmbeddingModel

Row = Mapping[str, Any]

# Clips that are in memory at a time, and the threads that read the next ones meanwhile.
_WINDOW_CLIPS = 256
_READERS = 4


@dataclass
class EmbeddedSplit:
    """The clips of a split that can be heard, and how to embed anything else with the same model.

    Attributes:
        model: What embeds.
        rows: The clips that are there.
        clips: Their embeddings, in the same order.
        missing: The ids of those that are not.
        dataset_hash: Names the data: ids, captions, labels and the bytes of the recordings, wherever they are.
        policy: What was heard of each recording.
        cache: Where embeddings are kept.
        batch_size: Of the model.
        files: The digest of each recording, by clip id.
        dataset: What the rows are of; where they hold their audio, `rows` leaves it out.
        numbers: The place of each clip in it, by clip id.
        held: Embeddings of texts that were asked for, so that a model whose embeddings are not cached embeds them once.
    """

    model: EmbeddingModel
    rows: list[Row]
    clips: ClipEmbeddings
    missing: list[str]
    dataset_hash: str
    policy: AudioPolicy
    cache: EmbeddingCache
    batch_size: int = 32
    files: dict[str, str] = field(default_factory=dict)
    dataset: Any = None
    numbers: dict[str, int] = field(default_factory=dict)
    held: dict[str, np.ndarray] = field(default_factory=dict)

    def read(self, clip_id: str, max_seconds: float | None = None) -> np.ndarray:
        """The beginning of a clip at the model's rate; see `read_clip`."""
        return read_clip(self.model, self.dataset[self.numbers[clip_id]], max_seconds)

    @property
    def sources(self) -> np.ndarray:
        """The recording that each clip was cut from, (N,) strings."""
        return np.array([str(row.get("source") or row["clip_id"]) for row in self.rows])

    def texts(self, texts: Sequence[str], language: str) -> np.ndarray:
        """Embeds texts of one language, or finds them in the cache; equal texts get equal embeddings.

        Args:
            texts: M of them, repetitions allowed.
            language: ISO 639-3 code.

        Returns:
            Unit norm, (M, d).
        """
        different = sorted(set(texts))
        key = {"model": self.model.fingerprint, "language": language, "texts": different}
        name = digest_of(key)
        if name not in self.held:
            self.held[name] = self.cache.fetch(
                key,
                lambda: {"embeds": self.model.encode_text(different, language, self.batch_size)},
                keep=self.model.fingerprint is not None,
            )["embeds"]
        embeds = self.held[name]
        place = {text: row for row, text in enumerate(different)}
        return embeds[[place[text] for text in texts]]


def embed_split(
    model: EmbeddingModel,
    rows: Any,
    policy: AudioPolicy | None = None,
    cache: EmbeddingCache | None = None,
    missing: str = "error",
    batch_size: int = 32,
) -> EmbeddedSplit:
    """Embeds the recordings of a split, or finds them in the cache.

    Args:
        model: What embeds.
        rows: Rows of the schema.
        policy: What is heard of each.
        cache: Where embeddings are kept; None keeps none.
        missing: What to do about recordings that are not there or cannot be read: "error", or "skip" them and say so.
        batch_size: Of the model.

    Raises:
        ValueError: The split is empty, two rows have one id, or no recording can be read.
        FileNotFoundError: A recording is not there, with `missing="error"`.
        BadAudioError: A recording holds no usable sound, with `missing="error"`.
    """
    if missing not in ("error", "skip"):
        raise ValueError(f"missing is {missing!r}; it must be error or skip")
    policy, cache = (policy or AudioPolicy()).for_model(model), cache or EmbeddingCache(None)
    listed = _checked_rows(rows)
    numbers = {row["clip_id"]: number for number, row in enumerate(listed)}
    digests = _digests(rows, listed, cache, missing)
    there = [row for row in listed if row["clip_id"] in digests]
    if not there:
        raise ValueError(f"none of the {len(listed)} recordings is there, such as {listed[0]['audio_path']}")

    def read(row: Row) -> np.ndarray:
        return read_clip(model, rows[numbers[row["clip_id"]]], policy.max_audio_seconds)

    key = {"max_audio_seconds": policy.max_audio_seconds, "files": [digests[row["clip_id"]] for row in there]}
    embedded = embed_waveforms(model, there, read, policy, cache, key, missing, batch_size)
    heard = np.flatnonzero(embedded.counts)
    if not len(heard):
        raise ValueError(f"none of the {len(there)} recordings can be read, such as {there[0]['audio_path']}")
    kept = [there[index] for index in heard]
    ids = {row["clip_id"] for row in kept}
    return EmbeddedSplit(
        model=model,
        rows=kept,
        clips=embedded.select(heard),
        missing=[row["clip_id"] for row in listed if row["clip_id"] not in ids],
        dataset_hash=dataset_hash(kept, digests),
        policy=policy,
        cache=cache,
        batch_size=batch_size,
        files=digests,
        dataset=rows,
        numbers=numbers,
    )


def read_clip(model: EmbeddingModel, row: Row, max_seconds: float | None) -> np.ndarray:
    """The beginning of a row's recording at the model's rate.

    Raises:
        FileNotFoundError: It is not there.
        BadAudioError: It holds no usable sound, or less than the model needs.
    """
    waveform = read_row(row, model.sampling_rate_hz, max_seconds)
    if len(waveform) < model.min_seconds * model.sampling_rate_hz:
        raise BadAudioError(
            f"clip {row['clip_id']} lasts {len(waveform) / model.sampling_rate_hz:.4f} s; "
            f"{model.name} needs {model.min_seconds} s"
        )
    return waveform


def embed_waveforms(
    model: EmbeddingModel,
    items: Sequence[Any],
    read: Callable[[Any], np.ndarray],
    policy: AudioPolicy,
    cache: EmbeddingCache,
    key: Mapping[str, Any],
    missing: str = "error",
    batch_size: int = 32,
) -> ClipEmbeddings:
    """Embeds whatever sounds, chunk by chunk, a few hundred at a time, or finds it in the cache.

    Args:
        model: What embeds.
        items: N of them.
        read: Gives the waveform of an item at the model's rate.
        policy: What is heard of each.
        cache: Where embeddings are kept.
        key: All that the waveforms depend on, beside the model's rate.
        missing: "skip" leaves items without chunks that cannot be read; "error" raises.
        batch_size: Of the model.
    """

    def make() -> dict[str, np.ndarray]:
        embeds, counts, onsets = [], [], []
        for waveforms in _windows(items, read, missing):
            pieces = _pieces(waveforms, policy.chunk_seconds, model.sampling_rate_hz)
            counts += [len(chunks) for chunks in pieces]
            flat = [piece for chunks in pieces for _, piece in chunks]
            onsets += [start / model.sampling_rate_hz for chunks in pieces for start, _ in chunks]
            if flat:
                embeds.append(model.encode_audio(flat, batch_size))
        joined = np.concatenate(embeds) if embeds else np.empty((0, 1), np.float32)
        return {"embeds": joined, "counts": np.array(counts, np.int64), "onset_seconds": np.array(onsets, np.float64)}

    made_of = {
        "model": model.fingerprint,
        "sampling_rate_hz": model.sampling_rate_hz,
        "chunk_seconds": policy.chunk_seconds,
        "audio": dict(key),
    }
    stored = cache.fetch(made_of, make, keep=model.fingerprint is not None)
    if missing == "error" and not stored["counts"].all():
        item = items[int(np.argmin(stored["counts"]))]
        read(item)  # raises what is wrong with it
        raise ValueError(f"{item!r} could not be read when it was embedded, but can be now; delete {cache.folder}")
    return ClipEmbeddings(**stored, pooling=policy.pooling)


def dataset_hash(rows: Sequence[Row], digests: Mapping[str, str]) -> str:
    """The name of a set of clips: their ids, captions, labels and bytes, in any order and in any folder.

    Args:
        rows: Rows of the schema.
        digests: The digest of each recording, by clip id.
    """
    content = [
        [row["clip_id"], dict(row.get("captions") or {}), list(row.get("labels") or ()), digests[row["clip_id"]]]
        for row in rows
    ]
    return digest_of(sorted(content, key=lambda entry: entry[0]))


def _checked_rows(rows: Any) -> list[Row]:
    light = without_audio(rows)
    listed = [light[index] for index in range(len(light))]
    if not listed:
        raise ValueError("the split is empty; there is nothing to evaluate")
    seen: set[str] = set()
    for row in listed:
        if row["clip_id"] in seen:
            raise ValueError(f"two rows have the clip_id {row['clip_id']!r}; ids must be unique")
        seen.add(row["clip_id"])
    return listed


def _digests(rows: Any, listed: Sequence[Row], cache: EmbeddingCache, missing: str) -> dict[str, str]:
    """The digest of each recording that is there, by clip id."""
    digests = {}
    for number, row in enumerate(listed):
        try:
            digests[row["clip_id"]] = _digest(rows[number], cache)
        except FileNotFoundError as error:
            if missing == "error":
                told = f"clip {row['clip_id']}: {error}; pass missing='skip' to go on without it"
                raise FileNotFoundError(told) from None
    cache.save_digests()
    return digests


def _digest(row: Row, cache: EmbeddingCache) -> str:
    """Of the audio that a row holds, or of its file."""
    if row.get("samples") is not None:
        return hashlib.sha256(row["samples"] + str(row["sampling_rate_hz"]).encode()).hexdigest()
    audio = row.get("audio")
    if audio is None:
        return cache.file_digest(row["audio_path"])
    if isinstance(audio, Mapping) and "array" not in audio:
        held = audio.get("bytes")
        path = audio.get("path") or row["audio_path"]
        return cache.file_digest(path) if held is None else hashlib.sha256(held).hexdigest()
    samples = np.asarray(audio["array"], dtype=np.float32)
    return hashlib.sha256(samples.tobytes() + str(audio["sampling_rate"]).encode()).hexdigest()


def _windows(
    items: Sequence[Any], read: Callable[[Any], np.ndarray], missing: str
) -> Iterator[list[np.ndarray | None]]:
    """Waveforms, a window at a time, the next being read while this one is embedded; None for unreadable ones."""

    def attempt(item: Any) -> np.ndarray | None:
        try:
            return read(item)
        except (BadAudioError, FileNotFoundError):
            if missing == "error":
                raise
            return None

    starts = range(0, len(items), _WINDOW_CLIPS)
    with ThreadPoolExecutor(_READERS) as readers:
        submitted = [readers.submit(attempt, item) for item in items[:_WINDOW_CLIPS]]
        for start in starts:
            current = submitted
            following = items[start + _WINDOW_CLIPS : start + 2 * _WINDOW_CLIPS]
            waveforms = [future.result() for future in current]
            submitted = [readers.submit(attempt, item) for item in following]
            yield waveforms


def _pieces(
    waveforms: Sequence[np.ndarray | None], chunk_seconds: float | None, rate_hz: int
) -> list[list[tuple[int, np.ndarray]]]:
    samples = None if chunk_seconds is None else round(chunk_seconds * rate_hz)
    return [[] if waveform is None else cut_chunks(waveform, samples) for waveform in waveforms]
