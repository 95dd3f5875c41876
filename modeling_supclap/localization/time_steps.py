"""Time steps in the output of each audio tower, and the pooling of the steps in a window."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..encoding import max_chunk_seconds
from ..towers import has_pooler


def steps_of_time(model: Any, extractor: Any, hidden: Tensor, chunk_samples: int) -> tuple[Tensor, float]:
    """Convert the tower output to time steps, (B, steps, D). Return them and the length of a step in samples."""
    config = model.audio_model.config
    match config.model_type:
        case "ced":  # (B, rows * steps, D): time is the fastest axis
            by_row = hidden.unflatten(1, (config.n_mels // config.patch_mels, -1))
            return by_row.mean(dim=1), config.patch_frames * extractor.hop_size
        case "clap_audio_model":  # (B, D, rows, steps); short clips are padded to the full length
            return hidden.mean(dim=2).transpose(1, 2), extractor.nb_max_samples / hidden.shape[3]
        case "cnn14":  # (B, steps, channels); every block except the last halves the number of frames
            return hidden, extractor.hop_length * 2 ** (len(config.channels) - 1)
        # (B, rows * steps, D): time is the fastest axis; each step keeps its rows for the pooling
        case "naflex":
            by_row = hidden.unflatten(1, (config.n_mels // config.patch_freq, -1))
            return by_row.transpose(1, 2).flatten(2), config.patch_time * extractor.hop_size
        case other:  # (B, steps, D), for the clip or for the fixed length that clips are padded to
            pooling, tower = model.config.audio_pooling, model.audio_model
            has_times = hasattr(tower, "_get_feat_extract_output_lengths")
            if not has_times or pooling == "pooler" or (pooling is None and has_pooler(tower)):
                raise ValueError(
                    f"localize needs a tower that averages its output over time, which {other!r} does not"
                )
            seconds = max_chunk_seconds(extractor)
            samples = chunk_samples if seconds is None else seconds * extractor.sampling_rate
            return hidden, samples / hidden.shape[1]


def pool_steps(tower: Any, steps: Tensor, centers: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Tensor:
    """Pool the time steps in each window with the tower's pooling, (steps, D) -> (T, D).

    A step belongs to a window if the window contains its center.
    """
    firsts = np.minimum(np.searchsorted(centers, starts), len(centers) - 1)
    stops = np.maximum(np.searchsorted(centers, ends), firsts + 1)  # at least one step per window
    windows = [steps[first:stop] for first, stop in zip(firsts, stops, strict=True)]

    if tower.config.model_type == "naflex":  # (n, rows * D) -> (1, n * rows, D)
        pooled = [tower.pool_tokens(window.reshape(1, -1, tower.config.embed_dim)) for window in windows]
        return torch.cat(pooled)
    means = torch.stack([window.mean(dim=0) for window in windows])
    if tower.config.model_type != "cnn14":
        return means
    return tower.fc1(means + torch.stack([window.amax(dim=0) for window in windows])).relu()
