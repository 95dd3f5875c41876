"""Log-mel spectrograms of CED, CLAP and CLAP2 as a module that `torch.onnx` can export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import ClapFeatureExtractor

from ..feature_extraction_ced import CEDFeatureExtractor, mel_filters, window_function
from ..feature_extraction_clap import POWER_FLOOR, fill_batch


class Spectrogram(nn.Module):
    """Compute the `input_features` of the feature extractor of CED or CLAP from waveforms of equal length.

    All steps are in float64. This avoids rounding errors in silent bands, and onnxruntime's `quantize_dynamic` leaves
    float64 weights unchanged, so that a quantised graph has exact spectrograms.

    Raises:
        ValueError: The spectrogram of the feature extractor is not supported.
    """

    window: Tensor
    bank: Tensor  # (bins, mels)

    def __init__(self, extractor: Any) -> None:
        super().__init__()
        self.extractor = extractor
        if type(extractor) is CEDFeatureExtractor:
            self.n_fft, self.hop, self.center = extractor.n_fft, extractor.hop_size, extractor.center
            window = window_function(self.n_fft, extractor.win_size)
            bands = extractor.f_min, extractor.f_max, extractor.feature_size, extractor.sampling_rate
            bank = mel_filters(self.n_fft, *bands)
        elif type(extractor) is ClapFeatureExtractor and extractor.truncation != "fusion":
            self.n_fft, self.hop, self.center = extractor.fft_window_size, extractor.hop_length, True
            window = torch.hann_window(self.n_fft, dtype=torch.float64)
            bank = torch.from_numpy(extractor.mel_filters_slaney)
        else:
            name = type(extractor).__name__
            raise ValueError(f"the spectrogram of {name} cannot be part of a graph; export without waveforms")
        self.register_buffer("window", window.double(), persistent=False)
        self.register_buffer("bank", bank.double(), persistent=False)

    def forward(self, waveform: Tensor) -> Tensor:
        """Convert waveforms (B, samples) at the extractor's sampling rate to features in decibels.

        The features are (B, mels, T) for CED. For CLAP, the first 10 s are used, and the features are (B, 1, T, mels).
        """
        is_clap = isinstance(self.extractor, ClapFeatureExtractor)
        if is_clap:
            lengths = torch.ones_like(waveform, dtype=torch.int64).sum(dim=1)  # tensors, which may vary in a graph
            waveform = fill_batch(waveform, lengths, self.extractor)
        elif self.extractor.pad_to_samples:
            missing = torch.sym_max(self.extractor.pad_to_samples - waveform.shape[1], 0)
            waveform = nn.functional.pad(waveform, (0, missing))
        samples = waveform.double()
        if self.center:
            samples = nn.functional.pad(samples, (self.n_fft // 2,) * 2, mode="reflect")
        spectrum = torch.stft(samples, self.n_fft, self.hop, window=self.window, center=False, return_complex=True)
        power = torch.view_as_real(spectrum).square().sum(dim=-1)  # (B, bins, T)
        decibels = 10 * (power.mT @ self.bank).clamp(min=POWER_FLOOR).log10()  # (B, T, mels)
        if is_clap:
            return decibels.float().unsqueeze(1)
        loudest = decibels.amax((1, 2), keepdim=True)
        return decibels.maximum(loudest - self.extractor.top_db).float().mT
