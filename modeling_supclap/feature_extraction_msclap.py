"""Waveforms to the log-mel spectrograms that Microsoft's CLAP was trained on."""

from typing import Any

from transformers import ClapFeatureExtractor
from transformers.audio_utils import mel_filter_bank


class MSCLAPFeatureExtractor(ClapFeatureExtractor):
    """Log-mel spectrograms of 44.1 kHz audio, one length for all clips: short ones are repeated, long ones cut.

    The 2023 model has filters that were computed for audio of 32 kHz and are applied to 44.1 kHz, so that each band
    lies 1.38 times as high as its edges in hertz say. They are what the weights were trained on.

    Args:
        filter_rate_hz: The rate that the mel filters are computed for; None is the sampling rate (the 2022 model).
        sampling_rate: Rate of the audio in hertz.
        max_length_s: Seconds of a clip: 7 for the 2023 model, 5 for the 2022 model.
        hop_length: Samples between two frames.
        frequency_min: Lower edge of the mel bands in hertz.
        frequency_max: Upper edge of the mel bands in hertz.
        padding: How short clips are filled up; "repeat" is what the models were trained with.
        truncation: How `ClapFeatureExtractor` cuts long clips if it is called by itself. `SupCLAPProcessor` gives it
            their beginning, so that nothing is drawn at random.
        **kwargs: Further fields of `ClapFeatureExtractor`.

    Example:
        >>> import numpy as np
        >>> extractor = MSCLAPFeatureExtractor()
        >>> extractor(np.zeros(44100), sampling_rate=44100, return_tensors="np")["input_features"].shape
        (1, 1, 965, 64)
    """

    def __init__(
        self,
        filter_rate_hz: int | None = 32_000,
        sampling_rate: int = 44_100,
        max_length_s: int = 7,
        hop_length: int = 320,
        frequency_min: float = 50,
        frequency_max: float = 14_000,
        padding: str = "repeat",
        truncation: str = "rand_trunc",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            sampling_rate=sampling_rate,
            max_length_s=max_length_s,
            hop_length=hop_length,
            frequency_min=frequency_min,
            frequency_max=frequency_max,
            padding=padding,
            truncation=truncation,
            **kwargs,
        )
        self.filter_rate_hz = filter_rate_hz
        if filter_rate_hz is not None:
            self.mel_filters_slaney = mel_filter_bank(
                num_frequency_bins=self.nb_frequency_bins,
                num_mel_filters=self.feature_size,
                min_frequency=frequency_min,
                max_frequency=frequency_max,
                sampling_rate=filter_rate_hz,
                norm="slaney",
                mel_scale="slaney",
            )
