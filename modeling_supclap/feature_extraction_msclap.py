"""Feature extractor for Microsoft's CLAP: computes log-mel spectrograms from waveforms."""

from typing import Any

from transformers import AutoFeatureExtractor, ClapFeatureExtractor

from .auto_classes import register
from .configuration_supclap import CNN14Config


class MSCLAPFeatureExtractor(ClapFeatureExtractor):
    """Feature extractor for MS-CLAP: log-mel spectrograms of 44.1 kHz audio with a fixed length.

    Short clips are repeated, and long clips are cropped. The 2023 model was trained on 44.1 kHz audio with mel filters
    computed for 32 kHz. The frequencies of its mel bands are therefore 1.38 times higher than nominal.

    Args:
        filter_rate_hz: Sampling rate in hertz that the mel filters are computed for. None means the sampling rate of
            the audio, as in the 2022 model.
        **kwargs: Fields of `ClapFeatureExtractor`. The defaults are the settings of the 2023 model: 7 s (2022: 5 s) at
            44.1 kHz, 64 mel bands from 50 to 14,000 Hz, one frame every 320 samples, short clips repeated.
            `truncation` applies only to direct calls: `SupCLAPProcessor` always uses the start of a long clip.

    Example:
        >>> import numpy as np
        >>> extractor = MSCLAPFeatureExtractor()
        >>> extractor(np.zeros(44100), sampling_rate=44100, return_tensors="np")["input_features"].shape
        (1, 1, 965, 64)
    """

    resampling_method = "sinc_interp_hann"  # the default of torchaudio, which the authors use

    def __init__(self, filter_rate_hz: int | None = 32_000, **kwargs: Any) -> None:
        defaults = {"sampling_rate": 44_100, "max_length_s": 7, "hop_length": 320, "padding": "repeat"}
        defaults |= {"frequency_min": 50, "frequency_max": 14_000, "truncation": "rand_trunc"}
        fields = {**defaults, **kwargs}
        super().__init__(**fields)
        self.filter_rate_hz = filter_rate_hz
        if filter_rate_hz is not None:
            nominal = ClapFeatureExtractor(**{**fields, "sampling_rate": filter_rate_hz})
            self.mel_filters_slaney = nominal.mel_filters_slaney


register(AutoFeatureExtractor, CNN14Config, MSCLAPFeatureExtractor)
