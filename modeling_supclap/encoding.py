"""Recordings and texts of any length and number to embeddings: the loop around a model that every user would write.

    audio_embeds = model.encode_audio(["dog.wav", "rain.flac"])
    text_embeds = model.encode_text(["a dog barks", "un chien aboie"], language=["eng", "fra"])
    similarity = audio_embeds @ text_embeds.T

The functions work on any model with `get_audio_features` and `get_text_features`, transformers' `ClapModel` included;
`EncodingMixin` makes them methods of ours.

A recording is embedded whole where the model takes any length (CED does). Where it does not (CLAP: 10 s), or where
`chunk_seconds` is given, it is cut into chunks of that length, one after the other from its beginning; the last one is
moved back so that it ends with the recording. The recording's embedding is the normalised mean of its chunks'
embeddings. Nothing is drawn at random, and neither the batch size, nor the batch mates, nor their order matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.utils import logging

from .audio_chunks import AudioChunks, cut_chunks
from .audio_input import as_recordings, name_of, read_waveform, seconds_of
from .processing_supclap import SupCLAPProcessor, as_list

# A batch holds at most this much sound for each of its clips: longer recordings share a batch with fewer others.
_SECONDS_PER_CLIP = 10.0


class EncodingMixin:
    """`encode_audio`, `encode_text` and the processor they need, for a model with the two `get_..._features`."""

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

    def encode_audio(self, audio: Any, processor: SupCLAPProcessor | None = None, **kwargs: Any) -> Any:
        """Embeds recordings: `encode_audio` of this file, with its arguments.

        Args:
            audio: A path, a waveform, or a list of either.
            processor: Used in place of `model.processor`.
            **kwargs: `sampling_rate`, `batch_size`, `chunk_seconds`, `return_chunks`, `convert_to_numpy`,
                `convert_to_tensor`, `show_progress_bar`.

        Returns:
            float32 (N, d), unit norm; (d,) for one recording.
        """
        return encode_audio(self, audio, processor or self.processor, **kwargs)

    def encode_text(self, texts: str | Sequence[str], processor: SupCLAPProcessor | None = None, **kwargs: Any) -> Any:
        """Embeds texts: `encode_text` of this file, with its arguments.

        Args:
            texts: A text or a list of texts.
            processor: Used in place of `model.processor`.
            **kwargs: `language`, `batch_size`, `convert_to_numpy`, `convert_to_tensor`, `show_progress_bar`.

        Returns:
            float32 (N, d), unit norm; (d,) for one text.
        """
        return encode_text(self, texts, processor or self.processor, **kwargs)


def encode_audio(
    model: Any,
    audio: Any,
    processor: SupCLAPProcessor,
    sampling_rate: float | Sequence[float] | None = None,
    batch_size: int = 32,
    chunk_seconds: float | None = None,
    return_chunks: bool = False,
    convert_to_numpy: bool = True,
    convert_to_tensor: bool = False,
    show_progress_bar: bool = False,
) -> Any:
    """Embeds recordings of any length and rate.

    Args:
        model: Has `get_audio_features`.
        audio: One recording or a list of recordings. Each is a path, the bytes of a file, a waveform (samples,) or
            (channels, samples), a mapping with "array" and "sampling_rate", or what a column of `datasets.Audio` holds,
            decoded or not. A 2-D array on its own is (clips, samples). Floats have full scale 1; int16 and int32 are
            PCM.
        processor: The model's, or a `SupCLAPProcessor` around CLAP's parts.
        sampling_rate: Of the waveforms in hertz: one for all, or one for each. Whatever is no array knows its own.
        batch_size: Clips (or chunks) of up to 10 s that go through the model at once; longer ones count for several.
        chunk_seconds: Cuts recordings into chunks of this length, see the head of this file; None embeds them whole
            where the model takes any length, and in the longest chunks that it takes where not.
        return_chunks: Gives the chunks one by one in place of their mean.
        convert_to_numpy: Gives numpy arrays; False gives tensors on the model's device.
        convert_to_tensor: Gives tensors whatever `convert_to_numpy` says.
        show_progress_bar: Shows one, over recordings.

    Returns:
        float32 (N, d) in the order given, unit norm; (d,) for one recording. With `return_chunks` a list of N
        `AudioChunks`, or one.

    Raises:
        ValueError: A clip is unusable (the message names it), a rate is missing, or the chunks are too long or short.
        ImportError: Files were given where the package is not installed.
    """
    clips, is_one = as_recordings(audio)
    rates = _one_for_each("sampling_rate", sampling_rate, len(clips), (int, float, np.number))
    extractor = processor.feature_extractor
    target_hz = int(extractor.sampling_rate)
    chunk_samples = _chunk_samples(extractor, chunk_seconds)
    order = sorted(range(len(clips)), key=lambda index: -seconds_of(clips[index], rates[index]))
    places: list[tuple[int, int, int]] = []  # of each embedding: its clip, and its first and last sample

    def pieces() -> Iterator[np.ndarray]:
        for index in _progress(order, show_progress_bar, "recordings"):
            waveform = read_waveform(clips[index], rates[index], target_hz, name_of(clips[index], index))
            _check_length(waveform, extractor, name_of(clips[index], index))
            for start, piece in cut_chunks(waveform, chunk_samples):
                places.append((index, start, start + len(piece)))
                yield piece

    with _inference(model):
        embeds = [
            _embed_audio(model, processor, batch)
            for batch in _batches(pieces(), _positive(batch_size), round(batch_size * _SECONDS_PER_CLIP * target_hz))
        ]
    to_numpy = convert_to_numpy and not convert_to_tensor
    chunks = _sort_chunks(_joined(embeds, model), places, len(clips), target_hz)
    if return_chunks:
        converted = [chunk._replace(embeds=_converted(chunk.embeds, to_numpy)) for chunk in chunks]
        return converted[0] if is_one else converted
    means = torch.stack([_mean(chunk.embeds) for chunk in chunks]) if chunks else _joined([], model)
    return _converted(means[0] if is_one else means, to_numpy)


def encode_text(
    model: Any,
    texts: str | Sequence[str],
    processor: SupCLAPProcessor,
    language: str | Sequence[str] | None = None,
    batch_size: int = 32,
    convert_to_numpy: bool = True,
    convert_to_tensor: bool = False,
    show_progress_bar: bool = False,
) -> Any:
    """Embeds texts; equal texts of one language get equal embeddings, to the last bit.

    Args:
        model: Has `get_text_features`.
        texts: One text or a list of texts.
        processor: The model's.
        language: ISO 639-3 code of all texts, or one for each; None is the tokenizer's own setting.
        batch_size: Texts that go through the model at once.
        convert_to_numpy: Gives a numpy array; False gives a tensor on the model's device.
        convert_to_tensor: Gives a tensor whatever `convert_to_numpy` says.
        show_progress_bar: Shows one, over batches.

    Returns:
        float32 (N, d) in the order given, unit norm; (d,) for one text.

    Raises:
        ValueError: A text is blank or no string (the message names it), or the tokenizer lacks a language.
    """
    listed = as_list(texts)
    for index, text in enumerate(listed):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text {index} is {text!r}; give a string with words")
    languages = _one_for_each("language", language, len(listed), str)
    # Each text once: rounding differs with the batch mates, and equal texts must tie exactly.
    wanted = sorted(set(zip(listed, languages, strict=True)), key=lambda pair: (-len(pair[0]), pair[0], str(pair[1])))
    with _inference(model):
        embeds = [
            _embed_text(model, processor, wanted[start : start + batch_size])
            for start in _progress(range(0, len(wanted), _positive(batch_size)), show_progress_bar, "texts")
        ]
    place = {pair: row for row, pair in enumerate(wanted)}
    rows = torch.tensor([place[pair] for pair in zip(listed, languages, strict=True)], dtype=torch.long)
    joined = _joined(embeds, model)
    ordered = joined[rows.to(joined.device)]
    return _converted(ordered[0] if isinstance(texts, str) else ordered, convert_to_numpy and not convert_to_tensor)


def max_chunk_seconds(feature_extractor: Any) -> float | None:
    """The longest clip that a model's front end takes: 10 s for CLAP's; None where it takes any length."""
    return getattr(feature_extractor, "max_length_s", None)


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


def _one_for_each(name: str, value: Any, count: int, kind: Any) -> list[Any]:
    if value is None or isinstance(value, kind):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"got {len(values)} values of {name} for {count} inputs; give one, or one for each")
    for index, single in enumerate(values):
        if not isinstance(single, kind):
            raise ValueError(f"{name}[{index}] is {single!r}; give one for each input")
    return values


def _chunk_samples(extractor: Any, chunk_seconds: float | None) -> int | None:
    limit = max_chunk_seconds(extractor)
    if chunk_seconds is None:
        return getattr(extractor, "nb_max_samples", None) if limit is not None else None
    samples = round(chunk_seconds * extractor.sampling_rate)
    if limit is not None and chunk_seconds > limit:
        raise ValueError(f"chunk_seconds is {chunk_seconds}, but this model takes at most {limit} s at once")
    if samples < getattr(extractor, "min_samples", 1):
        raise ValueError(f"chunk_seconds is {chunk_seconds}, too short for this model; give a second or more")
    return samples


def _check_length(waveform: np.ndarray, extractor: Any, name: str) -> None:
    least = getattr(extractor, "min_samples", 1)
    if len(waveform) < least:
        raise ValueError(
            f"{name} lasts {len(waveform) / extractor.sampling_rate:.4f} s, too short to encode; "
            f"the minimum is {least / extractor.sampling_rate} s"
        )


def _positive(batch_size: int) -> int:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give 1 or more")
    return batch_size


def _batches(pieces: Iterable[np.ndarray], batch_size: int, most_samples: int) -> Iterator[list[np.ndarray]]:
    """Neighbours of about one length; their number falls where they are long."""
    batch: list[np.ndarray] = []
    for piece in pieces:
        longest = max(map(len, (*batch, piece)))
        if batch and (len(batch) == batch_size or (len(batch) + 1) * longest > most_samples):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; every module is then left in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _embed_audio(model: Any, processor: SupCLAPProcessor, waveforms: list[np.ndarray]) -> torch.Tensor:
    inputs = processor(audio=waveforms, sampling_rate=processor.feature_extractor.sampling_rate, return_tensors="pt")
    return _float32(model.get_audio_features(**inputs.to(model.device, dtype=_input_dtype(model))))


def _embed_text(model: Any, processor: SupCLAPProcessor, pairs: Sequence[tuple[str, str | None]]) -> torch.Tensor:
    texts, languages = zip(*pairs, strict=True)
    spoken = None if languages[0] is None else list(languages)
    inputs = processor(text=list(texts), language=spoken, return_tensors="pt")
    return _float32(model.get_text_features(**inputs.to(model.device)))


def _float32(outputs: Any) -> torch.Tensor:
    return torch.nn.functional.normalize(outputs.pooler_output.float(), dim=-1)


def _input_dtype(model: Any) -> torch.dtype:
    """Of the layer that sees the spectrogram first: CED's stays float32 in half precision."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    first = next(norms, None)
    return model.dtype if first is None or first.weight is None else first.weight.dtype


def _joined(embeds: Sequence[torch.Tensor], model: Any) -> torch.Tensor:
    """One tensor of all batches; of no row where there is no batch."""
    if embeds:
        return torch.cat(list(embeds))
    return torch.empty(0, model.config.projection_dim, device=model.device)


def _sort_chunks(
    embeds: torch.Tensor, places: Sequence[tuple[int, int, int]], num_clips: int, rate_hz: int
) -> list[AudioChunks]:
    rows: list[list[int]] = [[] for _ in range(num_clips)]
    for row, (clip, _, _) in enumerate(places):
        rows[clip].append(row)
    samples = np.array([(start, stop) for _, start, stop in places], dtype=np.float64).reshape(-1, 2) / rate_hz
    return [AudioChunks(embeds[own[0] : own[-1] + 1], samples[own, 0], samples[own, 1]) for own in rows]


def _mean(embeds: torch.Tensor) -> torch.Tensor:
    return embeds[0] if len(embeds) == 1 else torch.nn.functional.normalize(embeds.mean(dim=0), dim=-1)


def _converted(embeds: torch.Tensor, to_numpy: bool) -> Any:
    return embeds.cpu().numpy() if to_numpy else embeds


def _progress(items: Any, show: bool, unit: str) -> Any:
    return logging.tqdm(items, disable=not show, unit=unit) if show else items
