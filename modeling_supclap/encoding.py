"""Recordings and texts of any length and number to embeddings: the loop around a model that every user would write.

    audio_embeds = model.encode_audio(["dog.wav", "rain.flac"])
    text_embeds = model.encode_text(["a dog barks", "un chien aboie"], language=["eng", "fra"])
    similarity = model.similarity(audio_embeds, text_embeds)

The functions work on any model with `get_audio_features` and `get_text_features`, transformers' `ClapModel` included;
`EncodingMixin` makes them methods of ours.

Every embedding of a recording in this package comes from `chunk_embeddings`, with these rules:

- A recording of up to five minutes is embedded whole where the model takes any length (CED does). A longer one, and one
  that is longer than the model takes (CLAP: 10 s) or than `chunk_seconds`, is cut into chunks of that length. The last
  chunk is moved back so that it ends with the recording.
- The embedding of a recording is the normalised mean of its chunks.
- A recording that cannot be read, is too short, or has no direction is an error, or skipped with its error kept.
- Batches hold chunks of about one length. Neither the batch size, nor the batch mates, nor their order matter, and
  nothing is random. Long files are read in parts: memory does not grow with them.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.utils import logging

from .audio_input import Recording, as_recordings, one_for_each
from .processing_supclap import SupCLAPProcessor, as_list

logger = logging.get_logger(__name__)

# A batch holds at most this much sound for each of its clips: longer recordings share a batch with fewer others.
_SECONDS_PER_CLIP = 10.0
# Batches that are read together, so that chunks of about one length can share one.
_BATCHES_AT_ONCE = 8
# Longer recordings are cut into chunks of this length, whatever the model takes: memory does not grow with them.
LONGEST_SECONDS = 300.0
_DAMAGED = "the weights are damaged, or the projection of this input is zero"


class AudioChunks(NamedTuple):
    """The chunks of one recording.

    Attributes:
        embeds: Unit norm, (chunks, d).
        onset_seconds: Where each chunk begins, (chunks,) float64.
        offset_seconds: Where each chunk ends, (chunks,) float64.
        error: Why there are none; None if there are.
    """

    embeds: Any
    onset_seconds: np.ndarray
    offset_seconds: np.ndarray
    error: Exception | None = None


class _Chunk(NamedTuple):
    """A chunk on its way through the model: its recording, first sample and end, its waveform and later its embedding.

    In place of a chunk that could not be read, the error.
    """

    number: int
    start: int
    stop: int
    content: Any
    error: Exception | None = None


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
) -> Iterator[AudioChunks]:
    """Embed recordings chunk by chunk: the one road from sound to embeddings.

    Args:
        recordings: N recordings, read one after the other. They may come from a generator.
        encode: Computes embeddings (n, d) of n waveforms (samples,) at `rate_hz`.
        rate_hz: Sampling rate of the model.
        chunk_samples: Length of a chunk; shorter recordings are one chunk.
        hop_samples: Distance of two chunks; None is `chunk_samples`.
        min_samples: Shortest chunk that the model takes.
        batch_size: Chunks of up to 10 s that go through the model at once; longer ones count for several.
        num_workers: Threads that read ahead of the model; 0 reads in the calling thread.
        on_bad_audio: "error" raises the error of the first bad recording; "skip" yields it without chunks.

    Yields:
        The chunks of each recording, in order; embeddings are tensors.

    Raises:
        OSError: A file is not there or cannot be read, with `on_bad_audio="error"`.
        ValueError: A recording is unusable or too short, or its embedding is not finite, with `on_bad_audio="error"`.

    Example:
        >>> sound = Recording(np.ones, None, "clip")  # a function that returns 4 samples at 4 Hz
        >>> (chunks,) = chunk_embeddings([sound], lambda waveforms: [[len(x)] for x in waveforms], 4, 3)
        >>> chunks.embeds.tolist(), chunks.onset_seconds.tolist()
        ([[3], [3]], [0.0, 0.25])
    """
    if on_bad_audio not in ("error", "skip"):
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; give 'error' or 'skip'")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give 1 or more")
    hop_samples = hop_samples or chunk_samples
    names: dict[int, str] = {}

    def tasks() -> Iterator[Callable[[], list[_Chunk]]]:
        """What threads read: a recording, or a part of a long file."""
        for index, recording in enumerate(recordings):
            names[index] = recording.name
            for starts in _blocks(recording, rate_hz, chunk_samples, hop_samples):
                yield partial(read, index, recording, starts)

    def read(index: int, recording: Recording, starts: Sequence[int] | None) -> list[_Chunk]:
        """The chunks that begin at these samples, or all."""
        try:
            if starts is None:
                first, waveform = 0, recording.read(rate_hz)
                starts = chunk_starts(len(waveform), chunk_samples, hop_samples)
            else:
                first = starts[0]
                waveform = recording.read(rate_hz, first, starts[-1] + chunk_samples)

            chunks = []
            for start in starts:
                content = waveform[start - first : start - first + chunk_samples]
                chunks.append(_Chunk(index, start, start + len(content), content))
            if len(chunks[-1].content) < min_samples:  # also where a file ends before its header says
                seconds = (first + len(waveform)) / rate_hz
                raise ValueError(
                    f"{recording.name} ends after {seconds:.4f} s, which leaves a chunk too short to encode; "
                    f"the minimum is {min_samples / rate_hz} s"
                )
            return chunks
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            if on_bad_audio == "error":
                raise
            return [_Chunk(index, 0, 0, None, error)]

    parts = _embed_chunks(_read_ahead(tasks(), num_workers), encode, batch_size, rate_hz)
    for index, group in groupby(parts, key=lambda chunk: chunk.number):
        chunks, name = list(group), names.pop(index)
        errors = [chunk.error for chunk in chunks if chunk.error is not None]
        if not errors:
            embeds = torch.stack([chunk.content for chunk in chunks])  # (chunks, d)
            if embeds.isfinite().all():
                seconds = np.array([(chunk.start, chunk.stop) for chunk in chunks]) / rate_hz
                yield AudioChunks(embeds, seconds[:, 0], seconds[:, 1])
                continue
            errors = [ValueError(f"{name} has an embedding with NaN, inf or no direction; {_DAMAGED}")]
            if on_bad_audio == "error":
                raise errors[0]
        yield AudioChunks(torch.empty(0, 0), np.empty(0), np.empty(0), errors[0])


def encode_audio(
    model: Any,
    audio: Any,
    processor: SupCLAPProcessor | None = None,
    sampling_rate: float | Sequence[float] | None = None,
    batch_size: int = 32,
    chunk_seconds: float | None = None,
    return_chunks: bool = False,
    convert_to_numpy: bool = True,
    convert_to_tensor: bool = False,
    show_progress_bar: bool = False,
    device: str | torch.device | None = None,
    num_workers: int | None = None,
    on_bad_audio: str = "error",
) -> Any:
    """Embeds recordings of any length and rate.

    Args:
        model: Has `get_audio_features`.
        audio: One recording or a list of recordings. Each is a path, a web address, an open file or the bytes of one;
            a waveform (samples,), (channels, samples) or (samples, channels), alone or in a pair with its rate, as
            torchaudio, librosa, scipy and Gradio give it; a mapping with "array" and "sampling_rate"; or what a column
            of `datasets.Audio` holds, decoded or not. A 2-D array on its own is (clips, samples), of three clips or
            more. Floats have full scale 1; int16 and int32 are PCM.
        processor: The model's, or a `SupCLAPProcessor` around CLAP's parts; None takes `model.processor`.
        sampling_rate: Of the waveforms in hertz: one for all, or one for each. Whatever is no array knows its own.
        batch_size: Clips (or chunks) of up to 10 s that go through the model at once; longer ones count for several.
        chunk_seconds: Cuts recordings into chunks of this length, see the head of this file; None cuts only those
            that are longer than five minutes, or than the model takes.
        return_chunks: Gives the chunks one by one in place of their mean.
        convert_to_numpy: Gives numpy arrays; False gives tensors on the model's device.
        convert_to_tensor: Gives tensors whatever `convert_to_numpy` says.
        show_progress_bar: Shows one, over recordings.
        device: Where the model is moved to, and stays; None leaves it where it is.
        num_workers: Threads that read files ahead of the model; None is one for each core, at most 8.
        on_bad_audio: "error" stops at the first recording that cannot be used; "skip" warns of each by name and gives
            it an embedding of NaN (with `return_chunks`, no chunks).

    Returns:
        float32 (N, d) in the order given, unit norm; (d,) for one recording. With `return_chunks` a list of N
        `AudioChunks`, or one.

    Raises:
        OSError: A file is not there.
        ValueError: A clip is unusable (the message names it), a rate is missing, or the chunks are too long or short.
    """
    processor = processor or model.processor
    if device is not None:
        model.to(device)

    recordings, is_one = as_recordings(audio, sampling_rate)
    extractor: Any = processor.feature_extractor
    if num_workers is None:
        num_workers = min(8, os.cpu_count() or 1) if any(recording.is_file for recording in recordings) else 0
    found = chunk_embeddings(
        logging.tqdm(recordings, disable=not show_progress_bar, unit="recordings"),
        partial(encode_batch, model, processor),
        int(extractor.sampling_rate),
        get_chunk_samples(extractor, chunk_seconds, LONGEST_SECONDS),
        min_samples=getattr(extractor, "min_samples", 1),
        batch_size=batch_size,
        num_workers=num_workers,
        on_bad_audio=on_bad_audio,
    )

    nothing = torch.empty(0, model.config.projection_dim, device=model.device)
    to_numpy = convert_to_numpy and not convert_to_tensor
    results, means = [], []
    for recording, chunks in zip(recordings, found, strict=True):
        if chunks.error is not None:
            logger.warning("%s is skipped: %s", recording.name, chunks.error)
            chunks = chunks._replace(embeds=nothing)
        results.append(chunks._replace(embeds=_converted(chunks.embeds, to_numpy)))
        means.append(mean_embedding(chunks.embeds))

    if return_chunks:
        return results[0] if is_one else results
    if is_one:
        return _converted(means[0], to_numpy)
    return _converted(torch.stack(means) if means else nothing, to_numpy)


def encode_text(
    model: Any,
    texts: str | Sequence[str],
    processor: SupCLAPProcessor | None = None,
    language: str | Sequence[str] | None = None,
    batch_size: int = 32,
    convert_to_numpy: bool = True,
    convert_to_tensor: bool = False,
    show_progress_bar: bool = False,
    device: str | torch.device | None = None,
) -> Any:
    """Embeds texts; equal texts of one language get equal embeddings, to the last bit.

    Args:
        model: Has `get_text_features`.
        texts: One text or a list of texts.
        processor: The model's; None takes `model.processor`.
        language: ISO 639-3 code of all texts, or one for each; None is the tokenizer's own setting.
        batch_size: Texts that go through the model at once.
        convert_to_numpy: Gives a numpy array; False gives a tensor on the model's device.
        convert_to_tensor: Gives a tensor whatever `convert_to_numpy` says.
        show_progress_bar: Shows one, over batches.
        device: Where the model is moved to, and stays; None leaves it where it is.

    Returns:
        float32 (N, d) in the order given, unit norm; (d,) for one text.

    Raises:
        ValueError: A text is blank or no string (the message names it), or the tokenizer lacks a language.
    """
    processor = processor or model.processor
    if device is not None:
        model.to(device)

    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give 1 or more")

    listed = as_list(texts)
    for index, text in enumerate(listed):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text {index} is {text!r}; give a string with words")

    pairs = list(zip(listed, one_for_each("language", language, len(listed), str), strict=True))

    # Each text once: rounding differs with the batch mates, and equal texts must tie exactly.
    wanted = sorted(set(pairs), key=lambda pair: (-len(pair[0]), pair[0], str(pair[1])))
    embeds = []

    with inference(model):
        for start in logging.tqdm(range(0, len(wanted), batch_size), disable=not show_progress_bar, unit="texts"):
            batch, languages = zip(*wanted[start : start + batch_size], strict=True)
            spoken = None if languages[0] is None else list(languages)
            inputs = processor(text=list(batch), language=spoken, return_tensors="pt")
            embeds.append(_unit_norm(model.get_text_features(**inputs.to(model.device))))

    place = dict(zip(wanted, range(len(wanted)), strict=True))
    joined = torch.cat(embeds) if embeds else torch.empty(0, model.config.projection_dim, device=model.device)
    bad = joined.isfinite().all(dim=-1).logical_not().nonzero()
    if len(bad):
        raise ValueError(f"{wanted[int(bad[0])][0]!r} has an embedding with NaN, inf or no direction; {_DAMAGED}")
    ordered = joined[torch.tensor([place[pair] for pair in pairs], dtype=torch.long, device=joined.device)]

    return _converted(ordered[0] if isinstance(texts, str) else ordered, convert_to_numpy and not convert_to_tensor)


class EncodingMixin:
    """`encode_audio`, `encode_text` and the processor they need, for a model with the two `get_..._features`."""

    encode_audio = encode_audio
    encode_text = encode_text

    @property
    def processor(self) -> Any:
        """Makes the model's inputs; loaded from where the model came from when it is first needed. Assign your own.

        Raises:
            ValueError: The model was not loaded from anywhere, or no processor is there.
        """
        if self.__dict__.get("_processor") is None:
            self._processor = _load_processor(self)
        return self._processor

    @processor.setter
    def processor(self, value: Any) -> None:
        self._processor = value

    @staticmethod
    def similarity(first: Any, second: Any) -> Any:
        """The cosine of every embedding with every other, as in sentence-transformers.

        Args:
            first: (N, d) or (d,), of any norm; an array or a tensor.
            second: (M, d) or (d,).

        Returns:
            (N, M), usually audio by text; a numpy array if both are.

        Example:
            >>> EncodingMixin.similarity(np.eye(2, dtype=np.float32), np.array([[3.0, 4.0]], dtype=np.float32))
            array([[0.6],
                   [0.8]], dtype=float32)
        """
        to_numpy = isinstance(first, np.ndarray) and isinstance(second, np.ndarray)
        left, right = torch.atleast_2d(torch.as_tensor(first)), torch.atleast_2d(torch.as_tensor(second))
        dtype = torch.promote_types(left.dtype, right.dtype)
        left = torch.nn.functional.normalize(left.to(dtype), dim=-1)
        right = torch.nn.functional.normalize(right.to(left), dim=-1)
        # (N, d), (M, d) -> (N, M)
        return _converted(left @ right.T, to_numpy)


def chunk_starts(num_samples: int, chunk_samples: int, hop_samples: int) -> list[int]:
    """Return where the chunks of a recording begin; the last one is moved back so that it ends with the recording.

    >>> chunk_starts(10, 4, 2), chunk_starts(11, 4, 2), chunk_starts(3, 4, 2)
    ([0, 2, 4, 6], [0, 2, 4, 6, 7], [0])
    """
    last = max(num_samples - chunk_samples, 0)
    starts = list(range(0, last + 1, hop_samples))
    return starts if starts[-1] == last else [*starts, last]


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
    best, onsets = [], []
    for recording in recordings:
        cosines = np.asarray(recording.embeds) @ texts.T  # (chunks, M)
        best.append(cosines.max(axis=0))
        onsets.append(recording.onset_seconds[cosines.argmax(axis=0)])
    return np.stack(best), np.stack(onsets)


def max_chunk_seconds(feature_extractor: Any) -> float | None:
    """Return the longest clip that a front end takes: CLAP 10 s, Whisper 30 s, AST 10.24 s; None for any length."""
    for name in ("max_length_s", "chunk_length"):
        if (seconds := getattr(feature_extractor, name, None)) is not None:
            return float(seconds)
    if (frames := getattr(feature_extractor, "max_length", None)) is not None:
        return frames / 100  # AST counts frames, of 10 ms
    return None


def max_window_seconds(config: Any, feature_extractor: Any) -> float | None:
    """The longest clip whose parts a model hears in relation to each other; None where that is any length.

    Args:
        config: The model's. CED hears each of its chunks, of 10.12 s, for itself.
        feature_extractor: The model's front end, which may take less at once.
    """
    limit = max_chunk_seconds(feature_extractor)
    num_frames = getattr(getattr(config, "audio_config", None), "target_length", None)
    if limit is not None or num_frames is None:
        return limit
    return num_frames * feature_extractor.hop_size / feature_extractor.sampling_rate


def _load_processor(model: Any) -> SupCLAPProcessor:
    name = getattr(model, "name_or_path", "")
    advice = "assign one, model.processor = SupCLAPProcessor.from_pretrained(...), or pass processor="
    if not name:
        raise ValueError(f"this model was not loaded from a folder or the Hub, so it has no processor; {advice}")

    # Whoever runs this file as remote code has already decided to trust that folder.
    is_remote = type(model).__module__.startswith("transformers_modules")
    options: dict[str, Any] = {"trust_remote_code": True} if is_remote else {}
    revision = getattr(model.config, "_commit_hash", None)
    if revision and not os.path.isdir(name):
        options["revision"] = revision

    try:
        return SupCLAPProcessor.from_pretrained(name, **options)
    except Exception as error:
        raise ValueError(
            f"no processor can be loaded from {name}, where the model is from: {error}; {advice}"
        ) from error


def get_chunk_samples(
    extractor: Any, chunk_seconds: float | None, usual_seconds: float, longest_seconds: float = math.inf
) -> int:
    """The length of the chunks that a recording is cut into.

    Args:
        extractor: The model's front end, which may make one length of all clips, and take no longer ones.
        chunk_seconds: What was asked for; None takes that length, or else the usual one.
        usual_seconds: Of a front end that takes any length.
        longest_seconds: What a model hears at once.

    Raises:
        ValueError: The model takes only longer, or only shorter, chunks than were asked for.
    """
    own_seconds = max_chunk_seconds(extractor)
    if own_seconds is not None and chunk_seconds is None:
        return round(own_seconds * extractor.sampling_rate)

    least = getattr(extractor, "min_samples", 1) / extractor.sampling_rate
    longest = own_seconds or longest_seconds
    seconds = min(usual_seconds, longest) if chunk_seconds is None else chunk_seconds
    if not least <= seconds <= longest:
        span = f"{least:g} s or more" if longest == math.inf else f"{least:.3g} to {longest:g} s"
        raise ValueError(f"chunk_seconds is {seconds}; this model takes {span} at once")

    return round(seconds * extractor.sampling_rate)


def _blocks(recording: Recording, rate_hz: int, chunk_samples: int, hop_samples: int) -> list[list[int] | None]:
    """The first samples of the chunks that are read together; None is the whole recording, which serves most."""
    seconds = recording.get_seconds() if recording.is_file else 0.0
    if seconds <= LONGEST_SECONDS:
        return [None]
    starts = chunk_starts(math.ceil(seconds * rate_hz - 1e-3), chunk_samples, hop_samples)  # but for rounding
    count = 1 + max(round(LONGEST_SECONDS * rate_hz) - chunk_samples, 0) // hop_samples
    return [starts[first : first + count] for first in range(0, len(starts), count)]


def _read_ahead(tasks: Iterable[Callable[[], list[_Chunk]]], num_workers: int) -> Iterator[_Chunk]:
    """Run tasks in their order, in threads that stay a few ahead of the model."""
    if not num_workers:
        for task in tasks:
            yield from task()
        return

    waiting: deque[Future[list[_Chunk]]] = deque()
    pool = ThreadPoolExecutor(num_workers)
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) > num_workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _embed_chunks(
    chunks: Iterator[_Chunk], encode: Callable[[list[np.ndarray]], Any], batch_size: int, rate_hz: int
) -> Iterator[_Chunk]:
    """Replace waveforms by embeddings; of some batches that are read together, the longest chunks come first."""
    most_samples = round(batch_size * _SECONDS_PER_CLIP * rate_hz)
    for window in _windows(chunks, _BATCHES_AT_ONCE * batch_size, _BATCHES_AT_ONCE * most_samples):
        heard = [place for place, chunk in enumerate(window) if chunk.error is None]
        heard.sort(key=lambda place: -len(window[place].content))

        while heard:
            longest = len(window[heard[0]].content)
            count = max(min(batch_size, most_samples // longest), 1)
            batch, heard = heard[:count], heard[count:]
            embeds = torch.as_tensor(encode([window[place].content for place in batch]))
            for place, embed in zip(batch, embeds, strict=True):
                window[place] = window[place]._replace(content=embed)
        yield from window


def _windows(chunks: Iterator[_Chunk], most_chunks: int, most_samples: int) -> Iterator[list[_Chunk]]:
    """Lists of neighbours, of so many chunks or samples."""
    window: list[_Chunk] = []
    samples = 0
    for chunk in chunks:
        window.append(chunk)
        samples += chunk.stop - chunk.start
        if len(window) >= most_chunks or samples >= most_samples:
            yield window
            window, samples = [], 0
    if window:
        yield window


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; every module is then left in the mode that it was in."""
    modes = []
    for module in model.modules():
        modes.append((module, module.training))
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def audio_inputs(model: Any, processor: SupCLAPProcessor, waveforms: list[np.ndarray]) -> Any:
    """The inputs of `get_audio_features` for waveforms of the model's rate, where the model is and in its type."""
    inputs = processor(audio=waveforms, sampling_rate=processor.feature_extractor.sampling_rate, return_tensors="pt")
    # In the type of the layer that sees the spectrogram first: CED's stays float32 in half precision.
    dtype = model.dtype
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            dtype = dtype if module.weight is None else module.weight.dtype
            break
    return inputs.to(model.device, dtype=dtype)


def encode_batch(model: Any, processor: SupCLAPProcessor, waveforms: list[np.ndarray]) -> torch.Tensor:
    """Embed waveforms of the model's rate as one batch: float32 (n, d), unit norm; NaN where there is no direction."""
    with inference(model):
        return _unit_norm(model.get_audio_features(**audio_inputs(model, processor, waveforms)))


def mean_embedding(embeds: torch.Tensor) -> torch.Tensor:
    """Return the normalised mean of chunks, (chunks, d) -> (d,); a lone chunk as it is, NaN of none."""
    return embeds[0] if len(embeds) == 1 else torch.nn.functional.normalize(embeds.mean(dim=0), dim=-1)


def _unit_norm(outputs: Any) -> torch.Tensor:
    embeds = outputs.pooler_output.float()
    return embeds / embeds.norm(dim=-1, keepdim=True)


def _converted(embeds: torch.Tensor, to_numpy: bool) -> Any:
    return embeds.cpu().numpy() if to_numpy else embeds
