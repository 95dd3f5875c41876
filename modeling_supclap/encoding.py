"""Compute audio and text embeddings: read, split into chunks, batch and pool inputs of any length.

    audio_embeds = model.encode_audio(["dog.wav", "rain.flac"])
    text_embeds = model.encode_text(["a dog barks", "un chien aboie"], language=["eng", "fra"])
    similarity = model.similarity(audio_embeds, text_embeds)

The functions work on any model with `get_audio_features` and `get_text_features`, including transformers' `ClapModel`.
All audio embeddings in this package are computed by `chunk_embeddings`, with these rules:

- Recordings longer than `chunk_seconds` are split into chunks of that length. The default is the model's maximum (CLAP:
  10 s), or five minutes for models that accept any length (CED). The last chunk starts earlier, so that it ends with
  the recording. It is left out if it would add less than 1 % of a chunk, at most 0.1 s, to the chunk before. The
  embedding of a recording is the normalised mean of its chunk embeddings.
- The batch size and the order of the recordings do not affect the embeddings, and there is no randomness.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature
from transformers.utils import logging

from .audio_input import Recording, as_recordings, one_for_each
from .processing_supclap import SupCLAPProcessor, as_list

logger = logging.get_logger(__name__)

# A batch contains at most batch_size times this duration, so longer recordings are processed in smaller batches.
_SECONDS_PER_CLIP = 10
# Chunks are read ahead and sorted by length, so that each batch contains chunks of similar length: at least one batch,
# then until one of these limits is reached: 19 MB, 300 s at 16 kHz or 100 s at 48 kHz.
_SAMPLES_AT_ONCE = 4_800_000
_BATCHES_AT_ONCE = 8
# Maximum chunk length for any model, so that memory use does not grow with the length of a recording.
LONGEST_SECONDS = 300.0
_DAMAGED = "the weights are damaged, or the projection of this input is zero"
Texts = str | Sequence[str]
Embeds = TypeVar("Embeds", np.ndarray, Tensor)
# Models in `inference`, by id: the number of threads, and the mode of each module before the first of them.
_EVALUATING: dict[int, tuple[int, list[tuple[Any, bool]]]] = {}
_EVALUATING_LOCK = threading.Lock()


class EncodeOptions(TypedDict, total=False):
    """Options of `encode_audio` and `encode_text`, for type checkers."""

    batch_size: int
    show_progress_bar: bool
    device: str | torch.device | None


class EncodeTextOptions(EncodeOptions, total=False):
    """Options of `encode_text`, for type checkers."""

    language: Texts | None


class EncodeAudioOptions(EncodeOptions, total=False):
    """Options of `encode_audio`, for type checkers."""

    sampling_rate: float | Sequence[float] | None
    chunk_seconds: float | None
    num_workers: int | None
    on_bad_audio: Literal["error", "skip"]


class AudioChunks(NamedTuple):
    """Chunk embeddings of one recording.

    Attributes:
        embeds: Embeddings with unit norm, (chunks, d).
        onset_seconds: Start time of each chunk, (chunks,) float64.
        offset_seconds: End time of each chunk, (chunks,) float64.
        error: The exception if the recording was skipped, else None. A skipped recording has zero chunks.
    """

    embeds: Any
    onset_seconds: np.ndarray
    offset_seconds: np.ndarray
    error: Exception | None = None


class Localization(NamedTuple):
    """Text scores over time, for T windows of a recording: the result of `SupCLAPModel.localize`.

    Attributes:
        scores: Cosine similarity of each window and each text, float32 (T, n_texts).
        start_seconds: Start time of each window, (T,) float64.
        end_seconds: End time of each window, (T,) float64.
    """

    scores: np.ndarray
    start_seconds: np.ndarray
    end_seconds: np.ndarray


class _Chunk(NamedTuple):
    """Samples `start` to `stop` of recording number `recording`, or the error if reading failed."""

    recording: int
    name: str
    start: int = 0
    stop: int = 0
    content: Any = None  # the waveform (samples,), later replaced by the embedding (d,)
    error: Exception | None = None
    is_silent: bool = False


class _Task(NamedTuple):
    """Function that reads chunks from `seconds` of a file; 0 if the duration is unknown or the audio is in memory."""

    seconds: float
    read: Callable[[], list[_Chunk]]


class ChunkReader(NamedTuple):
    """Reader of recordings in chunks. The attributes are as in `chunk_embeddings`."""

    rate_hz: int
    chunk_samples: int
    hop_samples: int
    min_samples: int
    skips_bad_audio: bool
    resampling_method: str

    def make_tasks(self, recordings: Iterable[Recording]) -> Iterator[_Task]:
        """Yield tasks. Each one reads all chunks of a recording, or the chunks in a part of a long file."""
        for index, recording in enumerate(recordings):
            seconds = recording.get_seconds() if recording.is_file else 0.0
            if seconds <= LONGEST_SECONDS:
                yield _Task(seconds, partial(self.read, index, recording))
                continue
            # 1e-3 tolerates rounding
            starts = self.find_starts(math.ceil(seconds * self.rate_hz - 1e-3))
            samples_after_first = max(round(LONGEST_SECONDS * self.rate_hz) - self.chunk_samples, 0)
            count = 1 + samples_after_first // self.hop_samples
            for first in range(0, len(starts), count):
                part = starts[first : first + count]
                yield _Task(LONGEST_SECONDS, partial(self.read, index, recording, part))

    def read(self, index: int, recording: Recording, starts: Sequence[int] | None = None) -> list[_Chunk]:
        """Read the chunks that start at the given samples. If `starts` is None, read all chunks."""
        try:
            first, stop = (0, None) if starts is None else (starts[0], starts[-1] + self.chunk_samples)
            waveform = recording.read(self.rate_hz, first, stop, self.resampling_method)
            if starts is None:
                starts = self.find_starts(len(waveform))

            chunks = []
            for start in starts:
                content = waveform[start - first : start - first + self.chunk_samples]
                stop = start + len(content)
                chunks.append(_Chunk(index, recording.name, start, stop, content, is_silent=not content.any()))
            # a file may be shorter than its header states
            if len(chunks[-1].content) < self.min_samples:
                seconds = (first + len(waveform)) / self.rate_hz
                shortest = self.min_samples / self.rate_hz
                raise ValueError(f"{recording.name} ends after {seconds:.4f} s; the minimum is {shortest} s per chunk")
            return chunks
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            if not self.skips_bad_audio:
                raise
            return [_Chunk(index, recording.name, error=error)]

    def find_starts(self, num_samples: int) -> list[int]:
        """Return the start of each chunk of a recording in samples."""
        return chunk_starts(num_samples, self.chunk_samples, self.hop_samples, self.rate_hz // 10)


def chunk_embeddings(
    recordings: Iterable[Recording],
    encode: Callable[[list[np.ndarray]], Any],
    rate_hz: int,
    chunk_samples: int,
    hop_samples: int | None = None,
    min_samples: int = 1,
    batch_size: int = 32,
    num_workers: int = 0,
    on_bad_audio: str = "error",
    resampling_method: str = "kaiser_best",
    refuse_silence: bool = False,
) -> Iterator[AudioChunks]:
    """Split recordings into chunks and embed the chunks.

    Args:
        recordings: Iterable of recordings, such as a list or a generator.
        encode: Function that embeds n waveforms (samples,) at `rate_hz` as (n, d).
        chunk_samples: Chunk length in samples. A shorter recording is a single chunk.
        hop_samples: Distance between the starts of two chunks in samples. None: use `chunk_samples`.
        min_samples: Minimum chunk length in samples.
        batch_size: Number of chunks per batch. A chunk longer than 10 s counts as several chunks.
        num_workers: Number of threads that prefetch audio; 0 reads in the calling thread.
        on_bad_audio: "error" raises at the first bad recording; "skip" yields it with zero chunks and its error.
        resampling_method: Filter for recordings at other sampling rates, as in `SupCLAPProcessor`.
        refuse_silence: Whether a recording is unusable if all of its samples are zero, as in training.

    Yields:
        `AudioChunks` of each recording, in input order, with embeddings as tensors.

    Raises:
        OSError: A file is missing or unreadable, and `on_bad_audio` is "error".
        ValueError: A recording is unusable or too short, or its embedding is not finite, and `on_bad_audio` is "error".

    Example:
        >>> sound = Recording(np.ones, None, "clip")  # np.ones returns 4 samples at 4 Hz
        >>> (chunks,) = chunk_embeddings([sound], lambda waveforms: [[len(x)] for x in waveforms], 4, 3)
        >>> chunks.embeds.tolist(), chunks.onset_seconds.tolist()
        ([[3], [3]], [0.0, 0.25])
    """
    if on_bad_audio not in ("error", "skip"):
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; it must be 'error' or 'skip'")
    _require_batch_size(batch_size)
    hop_samples = hop_samples or chunk_samples
    reader = ChunkReader(rate_hz, chunk_samples, hop_samples, min_samples, on_bad_audio == "skip", resampling_method)
    tasks = reader.make_tasks(recordings)
    parts = _embed_chunks(_read_ahead(tasks, num_workers, _SAMPLES_AT_ONCE / rate_hz), encode, batch_size, rate_hz)
    for _, group in groupby(parts, key=lambda chunk: chunk.recording):
        chunks = list(group)
        error = _find_error(chunks, refuse_silence)
        if error is None:
            embeds = torch.stack([chunk.content for chunk in chunks])  # (chunks, d)
            seconds = np.array([(chunk.start, chunk.stop) for chunk in chunks]) / rate_hz
            yield AudioChunks(embeds, seconds[:, 0], seconds[:, 1])
        elif on_bad_audio == "error":
            raise error
        else:
            yield AudioChunks(torch.empty(0, 0), np.empty(0), np.empty(0), error)


def _find_error(chunks: Sequence[_Chunk], refuse_silence: bool) -> Exception | None:
    """Return why a recording is unusable, from all of its embedded chunks, or None if it is usable."""
    for chunk in chunks:
        if chunk.error is not None:
            return chunk.error
    name = chunks[0].name
    if refuse_silence and all(chunk.is_silent for chunk in chunks):
        return ValueError(f"{name} is silent: every sample is zero")
    if not all(chunk.content.isfinite().all() for chunk in chunks):
        return ValueError(f"the embedding of {name} is zero or not finite; {_DAMAGED}")
    return None


def embed_recordings(
    model: Any,
    processor: SupCLAPProcessor,
    recordings: Iterable[Recording],
    chunk_seconds: float | None = None,
    **options: Any,
) -> Iterator[AudioChunks]:
    """Split recordings into chunks and embed the chunks with a model and its processor.

    `chunk_seconds` is as in `encode_audio`; `options` are `batch_size`, `num_workers` and `on_bad_audio`.
    """
    extractor: Any = processor.feature_extractor
    rate_hz, min_samples = int(extractor.sampling_rate), min_clip_samples(extractor)
    return chunk_embeddings(
        recordings,
        partial(encode_batch, model, processor),
        rate_hz,
        get_chunk_samples(chunk_seconds, rate_hz, min_samples / rate_hz, max_chunk_seconds(extractor)),
        min_samples=min_samples,
        resampling_method=processor.resampling_method,
        **options,
    )


Processor = SupCLAPProcessor | None


@overload
def encode_audio(
    model: Any,
    audio: Any,
    processor: Processor = None,
    *,
    return_chunks: Literal[True],
    convert_to_tensor: bool = False,
    **options: Unpack[EncodeAudioOptions],
) -> Any: ...
@overload
def encode_audio(
    model: Any,
    audio: Any,
    processor: Processor = None,
    *,
    convert_to_tensor: Literal[True],
    **options: Unpack[EncodeAudioOptions],
) -> Tensor: ...
@overload
def encode_audio(
    model: Any, audio: Any, processor: Processor = None, **options: Unpack[EncodeAudioOptions]
) -> np.ndarray: ...
def encode_audio(
    model: Any,
    audio: Any,
    processor: Processor = None,
    sampling_rate: float | Sequence[float] | None = None,
    batch_size: int = 32,
    chunk_seconds: float | None = None,
    return_chunks: bool = False,
    convert_to_tensor: bool = False,
    show_progress_bar: bool = False,
    device: str | torch.device | None = None,
    num_workers: int | None = None,
    on_bad_audio: Literal["error", "skip"] = "error",
) -> Any:
    """Compute audio embeddings for recordings of any length and sampling rate.

    Args:
        model: Model with a `get_audio_features` method.
        audio: One recording or a list of recordings. A recording is a file (a path, a URL, an open file or the bytes of
            a file), a waveform (samples,), (channels, samples) or (samples, channels), or a pair of a waveform and its
            sampling rate, as in torchaudio, librosa, scipy and Gradio. It may also be a mapping with "array" and
            "sampling_rate", or a value from a `datasets.Audio` column. Other remote files, such as `s3://...`, need the
            installed package; the code in a saved model is not enough. A 2-D array outside a list is a batch (clips,
            samples), except that an array with more than eight rows and at most eight columns is one recording. An
            array with two rows is ambiguous and raises. Floats have full scale 1; int16 and int32 are PCM.
        processor: Processor of the model. None: use `model.processor`.
        sampling_rate: Sampling rate of the waveforms in hertz: one value for all, or a list with one value per input.
            Ignored for inputs that include a sampling rate.
        batch_size: Number of chunks per batch. A chunk longer than 10 s counts as several chunks.
        chunk_seconds: Chunk length in seconds. None: use the model's maximum, or five minutes if it has no maximum.
        return_chunks: Whether to return chunk embeddings instead of their mean.
        convert_to_tensor: Whether to return tensors on the model's device instead of numpy arrays.
        device: Device to move the model to. None: do not move the model.
        num_workers: Number of threads that prefetch files. None: use one per core, at most 8.
        on_bad_audio: "error" raises at the first unusable recording. "skip" logs a warning for each unusable recording
            and returns NaN as its embedding; with `return_chunks`, it returns zero chunks.

    Returns:
        Embeddings with unit norm, float32 (N, d) in input order, or (d,) for a single recording. With `return_chunks`,
        a list of N `AudioChunks`, or one `AudioChunks` for a single recording.

    Raises:
        OSError: A file is missing or unreadable.
        TypeError: `processor` is not a processor, such as a sampling rate that was passed by position.
        ValueError: A recording is unusable (the message contains its name), a sampling rate is missing, or
            `chunk_seconds` is outside the model's limits.
    """
    processor = get_processor(model, processor, device)

    recordings, is_one = as_recordings(audio, sampling_rate)
    if num_workers is None:
        num_workers = min(8, os.cpu_count() or 1) if any(recording.is_file for recording in recordings) else 0
    embedded = embed_recordings(
        model,
        processor,
        logging.tqdm(recordings, disable=not show_progress_bar, unit="recordings"),
        chunk_seconds,
        batch_size=batch_size,
        num_workers=num_workers,
        on_bad_audio=on_bad_audio,
    )

    no_embeds = torch.empty(0, model.config.projection_dim, dtype=torch.float32, device=model.device)
    results: list[Any] = []
    for recording, chunks in zip(recordings, embedded, strict=True):
        if chunks.error is not None:
            logger.warning("skipping %s: %s", recording.name, chunks.error)
            chunks = chunks._replace(embeds=no_embeds)
        if return_chunks:
            embeds = chunks.embeds if convert_to_tensor else chunks.embeds.cpu().numpy()
            results.append(chunks._replace(embeds=embeds))
        else:
            results.append(mean_embedding(chunks.embeds))

    if return_chunks:
        return results[0] if is_one else results
    embeds = torch.stack(results) if results else no_embeds
    embeds = embeds[0] if is_one else embeds
    return embeds if convert_to_tensor else embeds.cpu().numpy()


@overload
def encode_text(
    model: Any,
    texts: Texts,
    processor: Processor = None,
    *,
    convert_to_tensor: Literal[True],
    **options: Unpack[EncodeTextOptions],
) -> Tensor: ...
@overload
def encode_text(
    model: Any, texts: Texts, processor: Processor = None, **options: Unpack[EncodeTextOptions]
) -> np.ndarray: ...
def encode_text(
    model: Any,
    texts: Texts,
    processor: Processor = None,
    language: Texts | None = None,
    batch_size: int = 32,
    convert_to_tensor: bool = False,
    show_progress_bar: bool = False,
    device: str | torch.device | None = None,
) -> Any:
    """Compute text embeddings. Equal texts in the same language have bitwise equal embeddings.

    Args:
        model: Model with a `get_text_features` method.
        texts: One text or a list of texts.
        batch_size: Number of texts per batch.
        language: ISO 639-3 code: one for all texts, or a list with one per text. None: use the tokenizer's setting.
        convert_to_tensor: Whether to return a tensor. `encode_audio` describes the other arguments.

    Returns:
        Embeddings with unit norm, float32 (N, d) in input order, or (d,) for a single text.

    Raises:
        TypeError: `processor` is not a processor, such as a language that was passed by position.
        ValueError: A text is blank or not a string (the message contains it), or the tokenizer does not support a
            language.
    """
    processor = get_processor(model, processor, device)

    _require_batch_size(batch_size)

    text_list = as_list(texts)
    for index, text in enumerate(text_list):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text {index} is {text!r}; pass a string that is not blank")

    pairs = list(zip(text_list, one_for_each("language", language, len(text_list), str), strict=True))

    # Embed each distinct text once: rounding depends on the batch, and equal texts must have equal scores.
    distinct = sorted(set(pairs), key=lambda pair: (-len(pair[0]), pair[0], str(pair[1])))
    embeds = []

    with inference(model):
        for start in logging.tqdm(range(0, len(distinct), batch_size), disable=not show_progress_bar, unit="texts"):
            batch, languages = zip(*distinct[start : start + batch_size], strict=True)
            text_languages = None if languages[0] is None else list(languages)
            inputs = processor(text=list(batch), language=text_languages, return_tensors="pt")
            pooled = model.get_text_features(**inputs.to(model.device)).pooler_output.float()
            # NaN for a zero vector
            embeds.append(pooled / pooled.norm(dim=-1, keepdim=True))

    positions = dict(zip(distinct, range(len(distinct)), strict=True))
    joined = torch.cat(embeds) if embeds else torch.empty(0, model.config.projection_dim, device=model.device)
    bad = joined.isfinite().all(dim=-1).logical_not().nonzero()
    if len(bad):
        raise ValueError(f"the embedding of {distinct[int(bad[0])][0]!r} is zero or not finite; {_DAMAGED}")
    ordered = joined[torch.tensor([positions[pair] for pair in pairs], dtype=torch.long, device=joined.device)]
    ordered = ordered[0] if isinstance(texts, str) else ordered
    return ordered if convert_to_tensor else ordered.cpu().numpy()


def get_processor(model: Any, processor: Any, device: str | torch.device | None = None) -> SupCLAPProcessor:
    """Return the processor, or that of the model if it is None. Move the model to `device`, if it is given."""
    if device is not None:
        model.to(device)
    if processor is None:
        return model.processor
    if not callable(processor):
        raise TypeError(f"processor is {processor!r}; pass language and sampling_rate by name")
    return processor


def _require_batch_size(batch_size: Any) -> None:
    if not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be an integer, at least 1")


class EncodingMixin:
    """Mixin with `encode_audio`, `encode_text`, `similarity` and `processor`. List it before `PreTrainedModel`."""

    encode_audio = encode_audio
    encode_text = encode_text
    _processor: Any = None
    # arguments of `from_pretrained` with which `processor` finds its files
    _loading_options: Mapping[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and `torch.save`, without the access token."""
        state: Any = super().__getstate__()
        options = {name: value for name, value in self._loading_options.items() if name != "token"}
        return {**state, "_loading_options": options}

    @property
    def processor(self) -> SupCLAPProcessor:
        """Processor of the model.

        It is loaded on first use from the model's folder or Hub id, with the same `token`, `subfolder`, `cache_dir`,
        `local_files_only` and `proxies` as the model. It can be replaced by assignment.

        Raises:
            ValueError: The model was not loaded from a folder or the Hub, or its processor cannot be loaded.
        """
        if self._processor is not None:
            return self._processor

        name = getattr(self, "name_or_path", "")
        advice = "assign one, model.processor = SupCLAPProcessor.from_pretrained(...), or pass processor="
        if not name:
            raise ValueError(f"this model was not loaded from a folder or the Hub, so it has no processor; {advice}")

        # If this file runs as remote code, the user already trusts the repository.
        is_remote = type(self).__module__.startswith("transformers_modules")
        options = {**self._loading_options, **({"trust_remote_code": True} if is_remote else {})}
        if not os.path.isdir(name):
            options["revision"] = getattr(getattr(self, "config", None), "_commit_hash", None) or "main"
        try:
            self._processor = SupCLAPProcessor.from_pretrained(name, **options)
        except Exception as error:
            raise ValueError(f"cannot load a processor from {name}, the model's folder: {error}; {advice}") from error
        return self._processor

    @processor.setter
    def processor(self, value: Any) -> None:
        self._processor = value

    @staticmethod
    def similarity(first: Embeds, second: Embeds) -> Embeds:
        """Compute the cosine similarities (N, M) between embeddings (N, d) and (M, d) of any norm.

        The result is a numpy array if both inputs are numpy arrays, else a tensor. A single embedding may be (d,).
        Integers, such as quantised embeddings, are converted to float32.

        Raises:
            ValueError: The dimensions d of the inputs differ.

        Example:
            >>> EncodingMixin.similarity(np.eye(2, dtype=np.float32), np.array([[3.0, 4.0]], dtype=np.float32))
            array([[0.6],
                   [0.8]], dtype=float32)
        """
        to_numpy = isinstance(first, np.ndarray) and isinstance(second, np.ndarray)
        left, right = torch.atleast_2d(torch.as_tensor(first)), torch.atleast_2d(torch.as_tensor(second))
        if left.shape[-1] != right.shape[-1]:
            raise ValueError(f"got embeddings of dimensions {left.shape[-1]} and {right.shape[-1]}; use one model")
        dtype = torch.promote_types(left.dtype, right.dtype)
        dtype = dtype if dtype.is_floating_point else torch.float32
        left = torch.nn.functional.normalize(left.to(dtype), dim=-1)
        right = torch.nn.functional.normalize(right.to(left), dim=-1)
        cosines: Any = left @ right.T  # (N, d), (M, d) -> (N, M)
        return cosines.cpu().numpy() if to_numpy else cosines


def chunk_starts(
    num_samples: int, chunk_samples: int, hop_samples: int, max_tail_samples: int | None = None
) -> list[int]:
    """Return the start of each chunk in samples. The last chunk starts earlier, so that it ends with the recording.

    The last chunk is left out if it would start less than 1 % of a chunk after the chunk before, and less than
    `max_tail_samples`. Resampled and MP3 files are often a few samples longer than their nominal duration.

    >>> chunk_starts(10, 4, 2), chunk_starts(11, 4, 2), chunk_starts(3, 4, 2)
    ([0, 2, 4, 6], [0, 2, 4, 6, 7], [0])
    >>> chunk_starts(1009, 1000, 1000), chunk_starts(1010, 1000, 1000), chunk_starts(1009, 1000, 1000, 5)
    ([0], [0, 10], [0, 9])
    """
    last = max(num_samples - chunk_samples, 0)
    starts = list(range(0, last + 1, hop_samples))
    tail = last - starts[-1]
    is_repeated = tail < chunk_samples / 100 and (max_tail_samples is None or tail < max_tail_samples)
    return starts if is_repeated or not tail else [*starts, last]


def best_chunks(recordings: Sequence[AudioChunks], text_embeds: Any) -> tuple[np.ndarray, np.ndarray]:
    """Find the chunk with the highest cosine for each recording and text. If chunks tie, choose the first.

    Args:
        recordings: Chunk embeddings of N recordings.
        text_embeds: (M, d) text embeddings.

    Returns:
        Tuple of two (N, M) arrays: the highest cosine, and the start time of its chunk in seconds. Both are NaN for a
        recording without chunks.

    >>> whole = AudioChunks(np.eye(2), np.array([0.0, 10.0]), np.array([10.0, 20.0]))
    >>> best_chunks([whole], np.array([[0.0, 1.0]]))
    (array([[1.]]), array([[10.]]))
    """
    texts = np.atleast_2d(np.asarray(text_embeds))
    best, onsets = [], []
    for recording in recordings:
        cosines = np.asarray(recording.embeds) @ texts.T  # (chunks, M)
        starts = np.asarray(recording.onset_seconds)
        if not len(starts):  # a recording that `on_bad_audio="skip"` left out
            cosines, starts = np.full((1, len(texts)), np.nan), np.full(1, np.nan)
        best.append(cosines.max(axis=0))
        onsets.append(starts[cosines.argmax(axis=0)])
    return np.reshape(best, (-1, len(texts))), np.reshape(onsets, (-1, len(texts)))


def max_chunk_seconds(feature_extractor: Any) -> float | None:
    """Return the maximum input length of a feature extractor in seconds (Whisper: 30), or None if it has no maximum."""
    for name in ("max_length_s", "chunk_length"):
        if (seconds := getattr(feature_extractor, name, None)) is not None:
            return float(seconds)
    if (frames := getattr(feature_extractor, "max_length", None)) is not None:
        return frames / 100  # AST's limit is in frames of 10 ms
    return None


def min_clip_samples(feature_extractor: Any) -> int:
    """Return the minimum clip length in samples.

    It is 50 ms for transformers encoders except CLAP, because some of them (SEW, wav2vec2-BERT) need two frames of
    25 ms.
    """
    has_limit = {"audio_attention_mask", "is_longer"}.isdisjoint(feature_extractor.model_input_names)
    return getattr(feature_extractor, "min_samples", feature_extractor.sampling_rate // 20 if has_limit else 1)


def max_window_seconds(config: Any, feature_extractor: Any) -> float | None:
    """Return the maximum clip length in seconds that the encoder processes at once, or None if it has no maximum.

    The maximum is the limit of the feature extractor, or the chunk length of CED (10.12 s).
    """
    limit = max_chunk_seconds(feature_extractor)
    num_frames = getattr(getattr(config, "audio_config", None), "target_length", None)
    if limit is not None or num_frames is None:
        return limit
    return num_frames * feature_extractor.hop_size / feature_extractor.sampling_rate


def get_chunk_samples(
    chunk_seconds: float | None,
    rate_hz: int,
    min_seconds: float,
    max_seconds: float | None,
    default_seconds: float | None = None,
) -> int:
    """Return the chunk length in samples. Raise ValueError if `chunk_seconds` is outside the model's limits.

    If `chunk_seconds` is None, the length is `default_seconds` (by default `LONGEST_SECONDS`), but at most
    `max_seconds`. If `max_seconds` is None, the model accepts any length.
    """
    longest = max_seconds or math.inf
    seconds = min(default_seconds or LONGEST_SECONDS, longest) if chunk_seconds is None else chunk_seconds
    if not min_seconds <= seconds <= longest or math.isinf(seconds):
        span = f"at least {min_seconds:g} s" if max_seconds is None else f"{min_seconds:.3g} to {longest:g} s"
        raise ValueError(f"chunk_seconds is {seconds}; this model takes {span}")
    return round(seconds * rate_hz)


def _read_ahead(tasks: Iterable[_Task], num_workers: int, max_seconds: float) -> Iterator[_Chunk]:
    """Run tasks in background threads, at most `max_seconds` of sound ahead, and yield the chunks in order."""
    if not num_workers:
        for task in tasks:
            yield from task.read()
        return

    waiting: deque[tuple[float, Future[list[_Chunk]]]] = deque()
    pool = ThreadPoolExecutor(num_workers)
    try:
        for task in tasks:
            waiting.append((task.seconds, pool.submit(task.read)))
            while len(waiting) > num_workers or sum(seconds for seconds, _ in waiting) > max_seconds:
                yield from waiting.popleft()[1].result()
        while waiting:
            yield from waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _embed_chunks(
    chunks: Iterator[_Chunk], encode: Callable[[list[np.ndarray]], Any], batch_size: int, rate_hz: int
) -> Iterator[_Chunk]:
    """Embed chunks in batches of similar length, longest first. Yield each chunk with its embedding, in input order."""
    max_samples = batch_size * _SECONDS_PER_CLIP * rate_hz
    while True:
        window: list[_Chunk] = []
        num_samples = 0
        for chunk in chunks:
            window.append(chunk)
            num_samples += chunk.stop - chunk.start
            is_batch = len(window) >= batch_size or num_samples >= max_samples
            is_enough = len(window) >= _BATCHES_AT_ONCE * batch_size or num_samples >= _SAMPLES_AT_ONCE
            if is_batch and is_enough:
                break
        if not window:
            return

        pending = [index for index, chunk in enumerate(window) if chunk.error is None]
        pending.sort(key=lambda index: -len(window[index].content))
        while pending:
            longest = len(window[pending[0]].content)
            count = max(min(batch_size, max_samples // longest), 1)
            batch, pending = pending[:count], pending[count:]
            embeds = torch.as_tensor(encode([window[index].content for index in batch]))
            for index, embed in zip(batch, embeds, strict=True):
                window[index] = window[index]._replace(content=embed)
        yield from window


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """Context manager that sets evaluation mode and disables gradients, and restores each module's mode on exit.

    Several threads may encode with one model: the last of them restores the modes that the first one found.
    """
    with _EVALUATING_LOCK:
        count, modes = _EVALUATING.get(id(model)) or (0, [(module, module.training) for module in model.modules()])
        _EVALUATING[id(model)] = (count + 1, modes)
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        with _EVALUATING_LOCK:
            count, modes = _EVALUATING.pop(id(model))
            if count > 1:
                _EVALUATING[id(model)] = (count - 1, modes)
            else:
                for module, mode in modes:
                    module.training = mode


def audio_inputs(model: Any, processor: SupCLAPProcessor, waveforms: list[np.ndarray]) -> Any:
    """Compute the inputs for `get_audio_features` from waveforms (samples,), on the model's device."""
    inputs = BatchFeature(processor.extract(waveforms), tensor_type="pt")
    # SupCLAP models convert the dtype after the batch norm of CED, which is in float32.
    return inputs.to(model.device, dtype=None if hasattr(model, "run_audio_tower") else model.dtype)


def encode_batch(model: Any, processor: SupCLAPProcessor, waveforms: list[np.ndarray]) -> Tensor:
    """Embed n waveforms (samples,) at the model's sampling rate in one batch.

    Returns:
        Embeddings with unit norm, float32 (n, d). If the model returns a zero vector, the embedding is NaN.
    """
    with inference(model):
        pooled = model.get_audio_features(**audio_inputs(model, processor, waveforms)).pooler_output.float()
        return pooled / pooled.norm(dim=-1, keepdim=True)


def mean_embedding(embeds: Tensor) -> Tensor:
    """Compute the normalised mean of chunk embeddings, (chunks, d) -> (d,). It is NaN if there are no chunks."""
    return embeds[0] if len(embeds) == 1 else torch.nn.functional.normalize(embeds.mean(dim=0), dim=-1)
