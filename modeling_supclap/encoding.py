"""Recordings and texts of any length and number to embeddings: the loop around a model that every user would write.

    audio_embeds = model.encode_audio(["dog.wav", "rain.flac"])
    text_embeds = model.encode_text(["a dog barks", "un chien aboie"], language=["eng", "fra"])
    similarity = model.similarity(audio_embeds, text_embeds)

The functions work on any model with `get_audio_features` and `get_text_features`, transformers' `ClapModel` included;
`EncodingMixin` makes them methods of ours.

A recording of up to five minutes is embedded whole where the model takes any length (CED does). A longer one, and one
that is longer than the model takes (CLAP: 10 s) or than `chunk_seconds`, is cut into chunks of that length, one after
the other from its beginning; the last one is moved back so that it ends with the recording. The recording's embedding
is the normalised mean of its chunks' embeddings. Nothing is drawn at random, and neither the batch size, nor the batch
mates, nor their order matter. Of a long file no more than a few chunks are in memory at a time.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
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
# Longer recordings are cut into chunks of this length, whatever the model takes: memory does not grow with them.
LONGEST_SECONDS = 300.0


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


class _Part(NamedTuple):
    """A chunk of a recording, or all of it: which recording, its first sample, its samples."""

    clip: int
    start: int
    waveform: np.ndarray


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
    if on_bad_audio not in ("error", "skip"):
        raise ValueError(f"on_bad_audio is {on_bad_audio!r}; give 'error' or 'skip'")
    if device is not None:
        model.to(device)

    recordings, is_one = as_recordings(audio, sampling_rate)
    extractor = processor.feature_extractor
    target_hz = int(extractor.sampling_rate)
    chunk_samples = get_chunk_samples(extractor, chunk_seconds, LONGEST_SECONDS)
    seconds = list(map(Recording.get_seconds, recordings))
    order = sorted(range(len(recordings)), key=lambda index: -seconds[index])
    bad: dict[int, Exception] = {}

    def blocks() -> Iterator[Callable[[], list[_Part]]]:
        """What is to be read, longest first: a recording, or as much of a long file as fits into memory."""
        for index in logging.tqdm(order, disable=not show_progress_bar, unit="recordings"):
            for start, stop in _blocks(recordings[index], seconds[index], target_hz, chunk_samples):
                yield partial(read, index, start, stop)

    def read(index: int, start: int, stop: int | None) -> list[_Part]:
        """The chunks of a block; none of a recording that is to be skipped."""
        if index in bad:
            return []

        recording = recordings[index]
        try:
            waveform = recording.read(target_hz, start, stop)
            _check_length(waveform, extractor, recording.name)
        except (OSError, ValueError) as error:
            if on_bad_audio == "error":
                raise
            bad[index] = error
            return []

        return [_Part(index, start + first, part) for first, part in cut_chunks(waveform, chunk_samples)]

    if num_workers is None:
        num_workers = min(8, os.cpu_count() or 1) if any(recording.is_file for recording in recordings) else 0

    places: list[tuple[int, int, int]] = []  # of each embedding: its recording, its first sample, and where it ends
    embeds = []

    with inference(model):
        most_samples = round(batch_size * _SECONDS_PER_CLIP * target_hz)
        for batch in _batches(_read_ahead(blocks(), num_workers), _positive(batch_size), most_samples):
            waveforms = []
            for part in batch:
                waveforms.append(part.waveform)
                places.append((part.clip, part.start, part.start + len(part.waveform)))
            embeds.append(_float32(model.get_audio_features(**audio_inputs(model, processor, waveforms))))

    for index, error in bad.items():
        logger.warning("%s is skipped: %s", recordings[index].name, error)

    to_numpy = convert_to_numpy and not convert_to_tensor
    rows = _joined(embeds, model)
    _check_embeds(rows, lambda row: recordings[places[row][0]].name)

    chunks = _sort_chunks(rows, places, len(recordings), target_hz, set(bad))
    if return_chunks:
        converted = [chunk._replace(embeds=_converted(chunk.embeds, to_numpy)) for chunk in chunks]
        return converted[0] if is_one else converted

    means = torch.stack([_mean(chunk.embeds) for chunk in chunks]) if chunks else rows

    return _converted(means[0] if is_one else means, to_numpy)


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

    listed = as_list(texts)

    for index, text in enumerate(listed):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text {index} is {text!r}; give a string with words")

    pairs = list(zip(listed, one_for_each("language", language, len(listed), str), strict=True))

    # Each text once: rounding differs with the batch mates, and equal texts must tie exactly.
    wanted = sorted(set(pairs), key=lambda pair: (-len(pair[0]), pair[0], str(pair[1])))
    embeds = []

    with inference(model):
        starts = range(0, len(wanted), _positive(batch_size))
        for start in logging.tqdm(starts, disable=not show_progress_bar, unit="texts"):
            batch, languages = zip(*wanted[start : start + batch_size], strict=True)
            spoken = None if languages[0] is None else list(languages)
            inputs = processor(text=list(batch), language=spoken, return_tensors="pt")
            embeds.append(_float32(model.get_text_features(**inputs.to(model.device))))

    place = dict(zip(wanted, range(len(wanted)), strict=True))
    joined = _joined(embeds, model)
    _check_embeds(joined, lambda row: repr(wanted[row][0]))
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
    best, onsets = [], []
    for recording in recordings:
        cosines = np.asarray(recording.embeds) @ texts.T  # (chunks, M)
        best.append(cosines.max(axis=0))
        onsets.append(recording.onset_seconds[cosines.argmax(axis=0)])
    return np.stack(best), np.stack(onsets)


def max_chunk_seconds(feature_extractor: Any) -> float | None:
    """The longest clip that a model's front end takes: 10 s for CLAP's; None where it takes any length."""
    return getattr(feature_extractor, "max_length_s", None)


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
        return extractor.nb_max_samples

    least = getattr(extractor, "min_samples", 1) / extractor.sampling_rate
    longest = own_seconds or longest_seconds
    seconds = min(usual_seconds, longest) if chunk_seconds is None else chunk_seconds
    if not least <= seconds <= longest:
        span = f"{least:g} s or more" if longest == math.inf else f"{least:.3g} to {longest:g} s"
        raise ValueError(f"chunk_seconds is {seconds}; this model takes {span} at once")

    return round(seconds * extractor.sampling_rate)


def _blocks(
    recording: Recording, seconds: float, target_hz: int, chunk_samples: int
) -> Iterator[tuple[int, int | None]]:
    """The first and last sample of each part of a recording that is read at once; (0, None) is all of it."""
    longest = round(LONGEST_SECONDS * target_hz)
    if not recording.is_file or seconds * target_hz <= longest:
        yield 0, None
        return

    # Whole chunks, as many as make a block; the last chunk, which is moved back, is a block of its own.
    total = math.ceil(seconds * target_hz - 1e-3)  # but for rounding
    block = max(longest // chunk_samples, 1) * chunk_samples
    end = total // chunk_samples * chunk_samples

    for start in range(0, end, block):
        yield start, min(start + block, end)

    if end < total:
        yield total - chunk_samples, total


def read_spans(recording: Recording, extractor: Any, chunk_samples: int) -> Iterator[tuple[int, np.ndarray]]:
    """Reads a recording bit by bit, however long it is.

    Args:
        recording: The recording.
        extractor: The model's front end.
        chunk_samples: The length of the chunks that it will be cut into: a bit holds whole ones.

    Yields:
        The first sample of a bit at the front end's rate, and its waveform, (samples,). The last is moved back to end
        with the recording.
    """
    rate_hz = int(extractor.sampling_rate)
    for start, stop in _blocks(recording, recording.get_seconds(), rate_hz, chunk_samples):
        waveform = recording.read(rate_hz, start, stop)
        _check_length(waveform, extractor, recording.name)
        yield start, waveform


def _check_length(waveform: np.ndarray, extractor: Any, name: str) -> None:
    least = getattr(extractor, "min_samples", 1)
    if len(waveform) < least:
        raise ValueError(
            f"{name} lasts {len(waveform) / extractor.sampling_rate:.4f} s, too short to encode; "
            f"the minimum is {least / extractor.sampling_rate} s"
        )


def _check_embeds(embeds: torch.Tensor, get_name: Callable[[int], str]) -> None:
    norms = embeds.norm(dim=-1)
    is_unit = (norms - 1).abs() < 0.5  # not so for NaN
    if not is_unit.all():
        index = int(is_unit.logical_not().nonzero()[0])
        raise ValueError(
            f"{get_name(index)} has an embedding of norm {norms[index].item()}, which has no direction: the model's "
            "weights are damaged, or its projection gives zero"
        )


def _positive(batch_size: int) -> int:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give 1 or more")
    return batch_size


def _read_ahead(blocks: Iterable[Callable[[], list[_Part]]], num_workers: int) -> Iterator[_Part]:
    """Reads blocks in their order, in threads that stay a few ahead of the model."""
    if not num_workers:
        for block in blocks:
            yield from block()
        return

    waiting: deque[Future[list[_Part]]] = deque()
    pool = ThreadPoolExecutor(num_workers)

    try:
        for block in blocks:
            waiting.append(pool.submit(block))
            if len(waiting) > num_workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(parts: Iterable[_Part], batch_size: int, most_samples: int) -> Iterator[list[_Part]]:
    """Neighbours of about one length; their number falls where they are long."""
    batch: list[_Part] = []
    for part in parts:
        longest = max(len(other.waveform) for other in (*batch, part))
        if batch and (len(batch) == batch_size or (len(batch) + 1) * longest > most_samples):
            yield batch
            batch = []
        batch.append(part)

    if batch:
        yield batch


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


def _float32(outputs: Any) -> torch.Tensor:
    return torch.nn.functional.normalize(outputs.pooler_output.float(), dim=-1)


def _joined(embeds: Sequence[torch.Tensor], model: Any) -> torch.Tensor:
    """One tensor of all batches; of no row where there is no batch."""
    if embeds:
        return torch.cat(list(embeds))
    return torch.empty(0, model.config.projection_dim, device=model.device)


def _sort_chunks(
    embeds: torch.Tensor, places: Sequence[tuple[int, int, int]], num_clips: int, rate_hz: int, bad: set[int]
) -> list[AudioChunks]:
    """The chunks of each recording, whose rows stand together; none of a bad one, part of which may have been read."""
    rows: list[list[int]] = [[] for _ in range(num_clips)]
    for row, (clip, _, _) in enumerate(places):
        if clip not in bad:
            rows[clip].append(row)

    seconds = np.array(places, dtype=np.float64).reshape(-1, 3)[:, 1:] / rate_hz  # where each begins and ends
    chunks = []

    for own in rows:
        span = slice(own[0], own[-1] + 1) if own else slice(0)
        chunks.append(AudioChunks(embeds[span], seconds[span, 0], seconds[span, 1]))

    return chunks


def _mean(embeds: torch.Tensor) -> torch.Tensor:
    return embeds[0] if len(embeds) == 1 else torch.nn.functional.normalize(embeds.mean(dim=0), dim=-1)


def _converted(embeds: torch.Tensor, to_numpy: bool) -> Any:
    return embeds.cpu().numpy() if to_numpy else embeds
