"""Waveforms to the log-mel spectrograms that Microsoft's CLAP was trained on."""

from typing import Any

from transformers import AutoFeatureExtractor, ClapFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from .auto_classes import register
from .configuration_supclap import CNN14Config


class MSCLAPFeatureExtractor(ClapFeatureExtractor):
    """Log-mel spectrograms of 44.1 kHz audio, one length for all clips: short ones are repeated, long ones cut.

    The 2023 model has filters that were computed for audio of 32 kHz and are applied to 44.1 kHz, so that each band
    lies 1.38 times as high as its edges in hertz say. They are what the weights were trained on.

    Args:
        filter_rate_hz: The rate that the mel filters are computed for; None is the sampling rate (the 2022 model).
        **kwargs: Fields of `ClapFeatureExtractor`, in place of what the 2023 model was trained with: 7 s (2022: 5 s) at
            44.1 kHz, 64 mel bands from 50 to 14,000 Hz, a frame every 320 samples, short clips repeated. Its
            `truncation` counts where the extractor is called by itself: `SupCLAPProcessor` gives it the beginning of a
            long clip, so that nothing is drawn at random.

    Example:
        >>> import numpy as np
        >>> extractor = MSCLAPFeatureExtractor()
        >>> extractor(np.zeros(44100), sampling_rate=44100, return_tensors="np")["input_features"].shape
        (1, 1, 965, 64)
    """

    def __init__(self, filter_rate_hz: int | None = 32_000, **kwargs: Any) -> None:
        published = {"sampling_rate": 44_100, "max_length_s": 7, "hop_length": 320, "padding": "repeat"}
        published |= {"frequency_min": 50, "frequency_max": 14_000, "truncation": "rand_trunc"}
        super().__init__(**{**published, **kwargs})
        self.filter_rate_hz = filter_rate_hz
        if filter_rate_hz is not None:
            self.mel_filters_slaney = mel_filter_bank(
                num_frequency_bins=self.nb_frequency_bins,
                num_mel_filters=self.feature_size,
                min_frequency=self.frequency_min,
                max_frequency=self.frequency_max,
                sampling_rate=filter_rate_hz,
                norm="slaney",
                mel_scale="slaney",
            )


register(AutoFeatureExtractor, CNN14Config, MSCLAPFeatureExtractor)
