"""Localization: score texts over time within a recording.

    result = model.localize("dawn.wav", ["a dog barks", "un chien aboie"], language=["eng", "fra"])
    result.start_seconds[result.scores[:, 0].argmax()]

Before pooling, the output of the audio tower contains one vector per time step. A step lasts 0.16 s for CED, 0.04 s for
Dasheng, 0.31 s for CLAP's HTSAT, 0.23 s for CNN14 and 0.2 s for CLAP2 with patches of 20 frames. The tower's own
pooling is applied to the steps in each window, so overlapping windows need no additional forward passes. Class and
register tokens are left out, also with `pool_include_prefix`. Training needs no time labels, because it uses the
embeddings of whole clips. No saved model contains this folder.
"""

import math
from typing import Any

import numpy as np
import torch

from ..audio_input import as_recordings
from ..encoding import (
    AudioChunks,
    Localization,
    Processor,
    Texts,
    audio_inputs,
    chunk_embeddings,
    encode_text,
    get_chunk_samples,
    get_processor,
    inference,
    max_chunk_seconds,
    min_clip_samples,
)
from ..processing_supclap import as_list
from .time_steps import pool_steps, steps_of_time

# Default chunk length for a tower that accepts any length.
_CHUNK_SECONDS = 5.0


def localize(
    model: Any,
    audio: Any,
    texts: Texts,
    processor: Processor = None,
    language: Texts | None = None,
    sampling_rate: float | None = None,
    window_seconds: float = 1.0,
    hop_seconds: float = 0.5,
    chunk_seconds: float | None = None,
    batch_size: int = 16,
    device: str | torch.device | None = None,
) -> Localization:
    """Score texts against sliding windows over a recording, as `SupCLAPModel.localize`, also for a `ClapModel`."""
    for name, value in (("window_seconds", window_seconds), ("hop_seconds", hop_seconds)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; it must be a positive number of seconds")
    recordings, _ = as_recordings(audio, sampling_rate)
    if len(recordings) != 1:
        raise ValueError(f"localize takes one recording, got {len(recordings)}")
    processor = get_processor(model, processor, device)

    extractor: Any = processor.feature_extractor
    rate_hz, min_samples = int(extractor.sampling_rate), min_clip_samples(extractor)
    max_seconds = max_chunk_seconds(extractor)
    default_seconds = max_seconds or _CHUNK_SECONDS
    if (frames := getattr(model.audio_model.config, "target_length", None)) is not None:
        # CED uses centred frames, so n frames span n - 1 hops.
        max_seconds = (frames - 1) * extractor.hop_size / rate_hz
    chunk_samples = get_chunk_samples(chunk_seconds, rate_hz, min_samples / rate_hz, max_seconds, default_seconds)
    text_embeds = encode_text(model, as_list(texts), processor, language=language, convert_to_tensor=True)

    step_samples = 0.0

    def encode(waveforms: list[np.ndarray]) -> torch.Tensor:  # (B, samples) -> (B, steps, D)
        nonlocal step_samples
        hidden = model.get_audio_features(**audio_inputs(model, processor, waveforms)).last_hidden_state
        vectors, step_samples = steps_of_time(model, extractor, hidden, max(map(len, waveforms)))
        return vectors

    with inference(model):
        (chunks,) = chunk_embeddings(
            recordings,
            encode,
            rate_hz,
            chunk_samples,
            min_samples=min_samples,
            batch_size=batch_size,
            resampling_method=processor.resampling_method,
        )
        steps, centers = _drop_repeated_steps(chunks, step_samples, rate_hz)

        # The last window ends with the recording.
        seconds = chunks.offset_seconds[-1]
        last = max(seconds - window_seconds, 0.0)
        hops = max(math.ceil(last / hop_seconds - 1e-6), int(last > 0))
        starts_seconds = np.minimum(np.arange(hops + 1) * hop_seconds, last)
        ends_seconds = np.minimum(starts_seconds + window_seconds, seconds)
        pooled = pool_steps(model.audio_model, steps, centers, starts_seconds, ends_seconds)
        # (T, D) -> (T, d), (n_texts, d) -> (T, n_texts)
        scores = model.audio_projection(pooled).float() @ text_embeds.T

    return Localization(scores.cpu().numpy(), starts_seconds, ends_seconds)


def _drop_repeated_steps(chunks: AudioChunks, step_samples: float, rate_hz: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return the time steps of a recording, (S, D), and their centers in seconds, (S,).

    Repeated and padded steps are left out: the last chunk overlaps the previous one, and short chunks are padded.
    """
    inside = (np.arange(chunks.embeds.shape[1]) + 0.5) * step_samples / rate_hz
    times = chunks.onset_seconds[:, None] + inside  # (chunks, steps)
    ends = chunks.offset_seconds
    previous_ends = np.concatenate([[0.0], ends[:-1]])
    is_new = (times >= previous_ends[:, None]) & (times < ends[:, None])
    is_new[0, 0] = True  # a recording may be shorter than half a step
    return chunks.embeds[torch.from_numpy(is_new).to(chunks.embeds.device)], times[is_new]
