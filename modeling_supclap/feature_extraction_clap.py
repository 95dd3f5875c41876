"""Log-mel spectrograms of CLAP, computed by torch with the values of transformers' `ClapFeatureExtractor`.

The functions accept any `ClapFeatureExtractor`, so that saved folders name the class of transformers. Clips are cropped
to their beginning, whereas that class crops at random. The Fourier transform is in float32, in transformers in float64.
Values within 80 dB of the clip's peak differ by less than 0.01 dB. Below them, rounding errors of the transform can
exceed -100 dB in silent bands beside a loud tone.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import ClapFeatureExtractor

# Smallest mel power: -100 dB.
POWER_FLOOR = 1e-10
# Mel bands per matrix product; neighbouring bands use almost the same frequencies.
BANDS_TOGETHER = 16
# Frames per Fourier transform. On the CPU, a block fits into its cache.
FRAMES_TOGETHER = {"cpu": 128}
FRAMES_TOGETHER_ELSEWHERE = 2**15


def extract_clap(extractor: ClapFeatureExtractor, clip: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the input features of CLAP from one clip (samples,) in float32 at the extractor's rate.

    Returns:
        Dict with `input_features`, (1, T, mels) float32 in decibels, or (4, T, mels) for a fused CLAP, and `is_longer`,
        (1,), False.
    """
    waveform = torch.from_numpy(_fill(clip, extractor))
    features = _stack_views(_log_mel(waveform.unsqueeze(0), extractor), extractor)
    return {"input_features": features[0].numpy(), "is_longer": np.zeros(1, dtype=bool)}


def extract_clap_on_device(
    extractor: ClapFeatureExtractor, samples: Tensor, sample_counts: Tensor
) -> dict[str, Tensor]:
    """Compute the same features as `extract_clap` from a batch of waveforms, on the device of the waveforms.

    Args:
        samples: Waveforms (B, S), where S is the length of the longest clip: floats in [-1, 1], or int16. Values after
            the end of a shorter clip are ignored.
        sample_counts: Length of each clip in samples, (B,) integers.
    """
    waveforms = samples.float() / 32768 if samples.dtype == torch.int16 else samples
    filled = fill_batch(waveforms, sample_counts, extractor)
    features = _stack_views(_log_mel(filled, extractor), extractor)
    is_longer = torch.zeros(len(samples), 1, dtype=torch.bool, device=samples.device)
    return {"input_features": features, "is_longer": is_longer}


def fill_batch(waveforms: Tensor, sample_counts: Tensor, extractor: ClapFeatureExtractor) -> Tensor:
    """Crop clips to their beginning, or extend them by `extractor.padding`: (B, S) -> (B, nb_max_samples).

    A short clip is repeated, or followed by silence. `sample_counts` (B,) are the lengths of the clips.
    """
    counts, most = sample_counts.unsqueeze(1), extractor.nb_max_samples
    positions = torch.arange(most, device=waveforms.device)
    whole = (most / counts.double()).floor().long().clamp(min=1)  # torch.onnx cannot export most // counts
    copies = {"repeat": most, "repeatpad": whole}.get(extractor.padding, 1)
    return waveforms.gather(1, positions % counts) * (positions < counts * copies)


def _fill(clip: np.ndarray, extractor: ClapFeatureExtractor) -> np.ndarray:
    """Crop a clip to its beginning, or extend it by `extractor.padding`: (samples,) -> (nb_max_samples,)."""
    most = extractor.nb_max_samples
    clip = clip[:most]
    length = {"repeat": most, "repeatpad": most // len(clip) * len(clip)}.get(extractor.padding, len(clip))
    repeated = np.resize(clip, length)
    return repeated if length == most else np.pad(repeated, (0, most - length))


def _log_mel(waveforms: Tensor, extractor: ClapFeatureExtractor) -> Tensor:
    """Compute log-mel spectrograms in decibels, (B, samples) -> (B, T, mels) float32, with centred frames."""
    device, size = waveforms.device, extractor.fft_window_size
    padded = torch.nn.functional.pad(waveforms, (size // 2, size // 2), mode="reflect")
    frames = padded.unfold(-1, size, extractor.hop_length)  # (B, T, size)
    # in float64, then rounded, as in transformers
    window = torch.hann_window(size, dtype=torch.float64).to(device, torch.float32)

    bank = extractor.mel_filters if extractor.truncation == "fusion" else extractor.mel_filters_slaney
    groups = group_bands(torch.from_numpy(bank.astype(np.float32)).to(device))
    top = max(low + len(weights) for _, low, weights in groups)  # above it, all filters are zero
    together = FRAMES_TOGETHER.get(device.type, FRAMES_TOGETHER_ELSEWHERE)
    mel = torch.empty(*frames.shape[:2], extractor.feature_size, dtype=torch.float32, device=device)

    step = max(1, together // len(frames))
    for start in range(0, frames.shape[1], step):
        block = slice(start, start + step)
        squares = torch.view_as_real(torch.fft.rfft(frames[:, block] * window)[..., :top]).square_()
        power = squares[..., 0].add_(squares[..., 1])  # (B, block, bins)
        for band, low, weights in groups:
            mel[:, block, band : band + weights.shape[1]] = power[..., low : low + len(weights)] @ weights
    return mel.clamp_(min=POWER_FLOOR).log10_().mul_(10)


def group_bands(filters: Tensor) -> list[tuple[int, int, Tensor]]:
    """Split mel filters (rows, bands) into groups of up to 16 adjacent bands, `(first band, first row, weights)`.

    `weights` (rows, bands) starts at `first row` and ends with the last row where a filter of the group is not zero.
    """
    groups = []
    for first in range(0, filters.shape[1], BANDS_TOGETHER):
        group = filters[:, first : first + BANDS_TOGETHER]
        used = group.any(dim=1).nonzero().flatten().tolist() or [0]
        groups.append((first, used[0], group[used[0] : used[-1] + 1].contiguous()))
    return groups


def _stack_views(mel: Tensor, extractor: ClapFeatureExtractor) -> Tensor:
    """Add the axis of views, (B, T, mels) -> (B, views, T, mels). A fused CLAP needs four equal views of a clip."""
    return mel.unsqueeze(1).repeat(1, 4 if extractor.truncation == "fusion" else 1, 1, 1)
