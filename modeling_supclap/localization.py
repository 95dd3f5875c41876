"""At which second of a recording a text is heard: the score of texts over time, in about one pass over the recording.

    found = model.localize("dawn.wav", ["a dog barks", "un chien aboie"], language=["eng", "fra"])
    found.start_seconds[found.scores[:, 0].argmax()]

The audio tower hears the recording once, in chunks that follow one another. Before it pools a chunk, its output has a
vector for each short step of time: 0.16 s of CED, 0.04 s of Dasheng, 0.31 s of CLAP's HTSAT, 0.23 s of CNN14. Short
windows are pooled from these as the tower pools a whole clip, and then projected. So windows may overlap as they like
at no cost, and a window as long as a chunk has that chunk's embedding.

Training compares the vectors of whole clips only; that a step tells what sounds at its own time is a by-product of it.
A tower with random weights has not learned it, and its scores mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .audio_input import as_recordings
from .encoding import (
    audio_inputs,
    chunk_embeddings,
    encode_text,
    get_chunk_samples,
    inference,
    max_chunk_seconds,
)
from .processing_supclap import SupCLAPProcessor, as_list
from .towers import has_pooler

# What a tower that takes any length hears at once.
_CHUNK_SECONDS = 5.0


class Localization(NamedTuple):
    """The score of texts over time.

    Attributes:
        scores: The cosine of each window with each text, float32 (T, n_texts).
        start_seconds: Where each window begins, (T,) float64.
        end_seconds: Where each window ends, (T,) float64.
    """

    scores: np.ndarray
    start_seconds: np.ndarray
    end_seconds: np.ndarray


def localize(
    model: Any,
    audio: Any,
    texts: str | Sequence[str],
    processor: SupCLAPProcessor | None = None,
    language: str | Sequence[str] | None = None,
    sampling_rate: float | None = None,
    window_seconds: float = 1.0,
    hop_seconds: float = 0.5,
    chunk_seconds: float | None = None,
    batch_size: int = 16,
    device: str | torch.device | None = None,
) -> Localization:
    """Scores texts at each moment of a recording.

    Args:
        model: A `SupCLAPModel`.
        audio: One recording, of any length and rate, as for `encode_audio`.
        texts: One text or a list of texts.
        processor: The model's; None takes `model.processor`.
        language: ISO 639-3 code of all texts, or one for each; None is the tokenizer's own setting.
        sampling_rate: Of a waveform in hertz; whatever is no array knows its own.
        window_seconds: How much of the sound a score stands for.
        hop_seconds: From the beginning of one window to that of the next.
        chunk_seconds: What the tower hears at once, best as long as the clips that the model was trained on; None is
            5 s, or the one length that the model's front end makes of all clips (CLAP: 10 s).
        batch_size: Chunks that go through the model at once.
        device: Where the model is moved to, and stays; None leaves it where it is.

    Returns:
        The scores, (T, n_texts), with the times of their windows. The last window is moved back to end with the
        recording; a recording that is shorter than a window is one window.

    Raises:
        OSError: The file is not there.
        ValueError: There is not one recording, it is unusable, a text is blank, or a length is not possible.

    Example:
        >>> import pytest
        >>> with pytest.raises(ValueError, match="hop_seconds is 0"):
        ...     localize(None, np.zeros(16000), "rain", SupCLAPProcessor, sampling_rate=16000, hop_seconds=0)
    """
    for name, value in (("window_seconds", window_seconds), ("hop_seconds", hop_seconds)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; give a number of seconds above 0")
    recordings, _ = as_recordings(audio, sampling_rate)
    if len(recordings) != 1:
        raise ValueError(f"localize takes one recording, got {len(recordings)}")
    processor = processor or model.processor
    if device is not None:
        model.to(device)

    extractor: Any = processor.feature_extractor
    rate_hz = int(extractor.sampling_rate)
    longest_seconds = math.inf
    if (frames := getattr(model.audio_model.config, "target_length", None)) is not None:
        # CED's frames are centred: there is one more of them than steps between them.
        longest_seconds = (frames - 1) * extractor.hop_size / rate_hz
    chunk_samples = get_chunk_samples(extractor, chunk_seconds, _CHUNK_SECONDS, longest_seconds)
    text_embeds = encode_text(model, as_list(texts), processor, language, convert_to_tensor=True)

    step_samples = 0.0

    def encode(waveforms: list[np.ndarray]) -> torch.Tensor:  # (B, samples) -> (B, steps, D)
        nonlocal step_samples
        hidden = model.get_audio_features(**audio_inputs(model, processor, waveforms)).last_hidden_state
        vectors, step_samples = _steps_of_time(model, extractor, hidden, max(map(len, waveforms)))
        return vectors

    with inference(model):
        least = getattr(extractor, "min_samples", 1)
        (chunks,) = chunk_embeddings(
            recordings, encode, rate_hz, chunk_samples, min_samples=least, batch_size=batch_size
        )
        # The last chunk overlaps the one before, and a front end may pad a short one: every moment counts once.
        inside = (np.arange(chunks.embeds.shape[1]) + 0.5) * step_samples / rate_hz
        times = chunks.onset_seconds[:, None] + inside  # (chunks, steps)
        heard_seconds = np.concatenate([[0.0], chunks.offset_seconds[:-1]])
        is_new = (times >= heard_seconds[:, None]) & (times < chunks.offset_seconds[:, None])
        steps, centers = chunks.embeds[torch.from_numpy(is_new).to(chunks.embeds.device)], times[is_new]

        starts_seconds, ends_seconds = _windows(chunks.offset_seconds[-1], window_seconds, hop_seconds)
        pooled = _pool(model.audio_model, steps, centers, starts_seconds, ends_seconds)
        # (T, D) -> (T, d), (n_texts, d) -> (T, n_texts)
        embeds = torch.nn.functional.normalize(model.audio_projection(pooled).float(), dim=-1)
        scores = embeds @ text_embeds.T

    return Localization(scores.cpu().numpy(), starts_seconds, ends_seconds)


def _steps_of_time(model: Any, extractor: Any, hidden: torch.Tensor, chunk_samples: int) -> tuple[torch.Tensor, float]:
    """A tower's output of chunks as steps of time, (B, steps, D), and the samples of a step."""
    config = model.audio_model.config
    match config.model_type:
        case "ced":  # (B, rows * steps, D): time runs fastest
            by_row = hidden.unflatten(1, (config.n_mels // config.patch_mels, -1))
            return by_row.mean(dim=1), config.patch_frames * extractor.hop_size
        case "clap_audio_model":  # (B, D, rows, steps) of the whole length, to which short clips are filled up
            return hidden.mean(dim=2).transpose(1, 2), extractor.nb_max_samples / hidden.shape[3]
        case "cnn14":  # (B, steps, channels); all blocks but the last halve the frames
            return hidden, extractor.hop_length * 2 ** (len(config.channels) - 1)
        case other:  # (B, steps, D) of a clip, or of the one length to which clips are padded
            pooling, tower = model.config.audio_pooling, model.audio_model
            has_times = hasattr(tower, "_get_feat_extract_output_lengths")
            if not has_times or pooling == "pooler" or (pooling is None and has_pooler(tower)):
                raise ValueError(
                    f"localize needs a tower whose output is a mean over steps of time; that of {other!r} is not"
                )
            seconds = max_chunk_seconds(extractor)
            samples = chunk_samples if seconds is None else seconds * extractor.sampling_rate
            return hidden, samples / hidden.shape[1]


def _windows(seconds: float, window_seconds: float, hop_seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Where the windows begin and end in seconds, both (T,); the last one ends with the recording.

    >>> _windows(2.2, 1.0, 0.5)
    (array([0. , 0.5, 1. , 1.2]), array([1. , 1.5, 2. , 2.2]))
    """
    last = max(seconds - window_seconds, 0.0)
    number = math.ceil(last / hop_seconds - 1e-6) + 1
    starts = np.minimum(np.arange(number) * hop_seconds, last)
    return starts, np.minimum(starts + window_seconds, seconds)


def _pool(tower: Any, steps: torch.Tensor, centers: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> torch.Tensor:
    """Pools the steps whose centers lie in each window as the tower pools a clip: (steps, D) -> (T, D)."""
    firsts = np.minimum(np.searchsorted(centers, starts), len(centers) - 1)
    stops = np.maximum(np.searchsorted(centers, ends), firsts + 1)  # a window shorter than a step takes one

    pooled = []
    for first, stop in zip(firsts, stops, strict=True):
        pooled.append(steps[first:stop].mean(dim=0))
    means = torch.stack(pooled)
    if tower.config.model_type != "cnn14":
        return means

    largest = [steps[first:stop].amax(dim=0) for first, stop in zip(firsts, stops, strict=True)]
    return tower.fc1(means + torch.stack(largest)).relu()
