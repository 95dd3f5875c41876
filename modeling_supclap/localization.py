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
from .encoding import audio_inputs, cut_chunks, encode_text, get_chunk_samples, inference, read_spans
from .processing_supclap import SupCLAPProcessor, as_list

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

    steps: list[torch.Tensor] = []
    centres: list[np.ndarray] = []
    heard = 0.0  # the samples whose steps are there
    with inference(model):
        for first, waveform in read_spans(recordings[0], extractor, chunk_samples):
            chunks = cut_chunks(waveform, chunk_samples)

            for place in range(0, len(chunks), batch_size):
                starts, batch = zip(*chunks[place : place + batch_size], strict=True)
                outputs = model.get_audio_features(**audio_inputs(model, processor, list(batch)))
                vectors, step_samples = _steps_of_time(model.audio_model.config, extractor, outputs.last_hidden_state)
                inside = (np.arange(vectors.shape[1]) + 0.5) * step_samples

                # The last chunk is moved back over what was heard, and a front end may fill a short one up.
                for start, chunk, own in zip(starts, batch, vectors, strict=True):
                    times = first + start + inside
                    is_new = (times >= heard) & (inside < len(chunk))
                    heard = first + start + len(chunk)
                    centres.append(times[is_new] / rate_hz)
                    steps.append(own[torch.from_numpy(is_new).to(own.device)])

        starts_seconds, ends_seconds = _windows(heard / rate_hz, window_seconds, hop_seconds)
        pooled = _pool(model.audio_model, torch.cat(steps), np.concatenate(centres), starts_seconds, ends_seconds)
        # (T, D) -> (T, d), (n_texts, d) -> (T, n_texts)
        embeds = torch.nn.functional.normalize(model.audio_projection(pooled).float(), dim=-1)
        scores = embeds @ text_embeds.T

    return Localization(scores.cpu().numpy(), starts_seconds, ends_seconds)


def _steps_of_time(config: Any, extractor: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A tower's output of chunks as steps of time, (B, steps, D), and the samples of a step."""
    match config.model_type:
        case "ced":  # (B, rows * steps, D): time runs fastest
            by_row = hidden.unflatten(1, (config.n_mels // config.patch_mels, -1))
            return by_row.mean(dim=1), config.patch_frames * extractor.hop_size
        case "clap_audio_model":  # (B, D, rows, steps) of the whole length, to which short clips are filled up
            return hidden.mean(dim=2).transpose(1, 2), extractor.nb_max_samples / hidden.shape[3]
        case "cnn14":  # (B, steps, channels); all blocks but the last halve the frames
            return hidden, extractor.hop_length * 2 ** (len(config.channels) - 1)
        case unknown:
            raise ValueError(f"where the output of a tower of type {unknown!r} lies in time is not known here")


def _windows(seconds: float, window_seconds: float, hop_seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Where the windows begin and end in seconds, both (T,); the last one ends with the recording.

    >>> _windows(2.2, 1.0, 0.5)
    (array([0. , 0.5, 1. , 1.2]), array([1. , 1.5, 2. , 2.2]))
    """
    last = max(seconds - window_seconds, 0.0)
    number = math.ceil(last / hop_seconds - 1e-6) + 1
    starts = np.minimum(np.arange(number) * hop_seconds, last)
    return starts, np.minimum(starts + window_seconds, seconds)


def _pool(tower: Any, steps: torch.Tensor, centres: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> torch.Tensor:
    """Pools the steps whose centres lie in each window as the tower pools a clip: (steps, D) -> (T, D)."""
    firsts = np.minimum(np.searchsorted(centres, starts), len(centres) - 1)
    stops = np.maximum(np.searchsorted(centres, ends), firsts + 1)  # a window shorter than a step takes one

    pooled = []
    for first, stop in zip(firsts, stops, strict=True):
        pooled.append(steps[first:stop].mean(dim=0))
    means = torch.stack(pooled)
    if tower.config.model_type != "cnn14":
        return means

    largest = [steps[first:stop].amax(dim=0) for first, stop in zip(firsts, stops, strict=True)]
    return tower.fc1(means + torch.stack(largest)).relu()
