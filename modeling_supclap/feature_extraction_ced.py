"""Feature extractor for CED: computes log-mel spectrograms from waveforms, independently for each clip."""

import math
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, BatchFeature, SequenceFeatureExtractor

from .audio_input import as_waveforms, stack_clips
from .auto_classes import register
from .configuration_supclap import CEDConfig, SupCLAPConfig
from .feature_extraction_clap import POWER_FLOOR, group_bands
from .waveform import LEAST_RATE_HZ, MOST_RATE_HZ

# Digital silence: 10 log10(POWER_FLOOR).
SILENCE_DB = -100.0


class CEDFeatureExtractor(SequenceFeatureExtractor):
    """Feature extractor for CED: log-mel spectrograms in decibels (16 kHz, 64 HTK mel bands, one frame every 10 ms).

    db = max(level, peak - `top_db`), where level = 10 log10(max(mel power, 1e-10)) and peak is the clip's highest
    level.

    Clips are not cropped, and the features of a clip do not depend on the other clips in the batch. The
    `preprocessor_config.json` files of the `mispeech/ced-*` checkpoints can be loaded.

    Args:
        feature_size: Number of mel bands.
        sampling_rate: Sampling rate in hertz that audio is resampled to.
        n_fft, win_size, hop_size: FFT size, length of the periodic Hann window, and hop length in samples.
        f_min, f_max: Lowest and highest frequency of the mel bands in hertz. f_max=None: half the sampling rate.
        center: Whether to centre frame t at sample t * `hop_size`, with reflection padding at both ends of the clip.
        top_db: Dynamic range of a clip in decibels.
        padding_value: Not used, but the published `preprocessor_config.json` files contain it. Clips are padded
            with silence (-100 dB), which the model masks.
        min_frames: Minimum clip length in frames: one patch (16 for CED, 4 for Dasheng).
        pad_to_samples: Append zeros to shorter clips up to this length in samples (CLAP2: 1024, one window).

    Raises:
        ValueError: A size or the sampling rate is outside its limits.

    Example:
        >>> extractor = CEDFeatureExtractor()
        >>> clips = [np.zeros(16000, dtype=np.float32), np.zeros(8000, dtype=np.float32)]
        >>> batch = extractor(clips, sampling_rate=16000, return_tensors="pt")
        >>> batch["input_features"].shape, batch["audio_attention_mask"].sum(dim=1).tolist()
        (torch.Size([2, 64, 101]), [101, 51])
    """

    model_input_names = ["input_features", "audio_attention_mask"]  # noqa: RUF012, as in transformers
    # the default of torchaudio, with which CED and Dasheng were trained
    resampling_method = "sinc_interp_hann"
    silence_db = SILENCE_DB

    def __init__(
        self,
        feature_size: int = 64,
        sampling_rate: int = 16000,
        n_fft: int = 512,
        win_size: int = 512,
        hop_size: int = 160,
        f_min: float = 0.0,
        f_max: float | None = None,
        center: bool = True,
        top_db: float = 120.0,
        padding_value: float = 0.0,
        min_frames: int = 16,
        pad_to_samples: int = 0,
        **kwargs: Any,
    ) -> None:
        # The published files have another input name and no mask; without a mask, embeddings depend on the batch.
        kwargs["return_attention_mask"] = True
        kwargs.pop("model_input_names", None)
        super().__init__(feature_size, sampling_rate, padding_value, **kwargs)
        self.n_fft = n_fft
        self.win_size = win_size
        self.hop_size = hop_size
        self.f_min = f_min
        self.f_max = f_max
        self.center = center
        self.top_db = top_db
        self.min_frames = min_frames
        self.pad_to_samples = pad_to_samples
        limits = {
            "sampling_rate": (LEAST_RATE_HZ, MOST_RATE_HZ),
            "n_fft": (1, sampling_rate),
            "win_size": (1, n_fft),
            "hop_size": (1, n_fft),
            "feature_size": (1, n_fft),
            "pad_to_samples": (0, sampling_rate),
        }
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from {least} to {most}")

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Build a feature extractor with the spectrogram settings of a `CEDConfig`."""
        fields = {
            name: getattr(config, name) for name in ("n_fft", "win_size", "hop_size", "f_min", "f_max", "center")
        }
        return cls(feature_size=config.n_mels, min_frames=config.patch_frames, **fields)

    @property
    def min_samples(self) -> int:
        """Minimum length of a clip in samples, enough for one patch: 2400 samples (0.15 s) for CED."""
        hops = (self.min_frames - 1) * self.hop_size
        # mirroring needs n_fft / 2 + 1
        least = max(hops, self.n_fft // 2 + 1) if self.center else hops + self.n_fft
        return least if self.pad_to_samples < least else 1

    def __call__(
        self, audio: Any, sampling_rate: float | None = None, return_tensors: str | None = None
    ) -> BatchFeature:
        """Compute a batch of log-mel spectrograms from one or more clips.

        Args:
            audio: One clip (samples,), an array (clips, samples), or a list of clips. `as_waveform` describes the
                shapes and types of a clip in a list.
            sampling_rate: Sampling rate of all clips in hertz.
            return_tensors: "pt" returns torch tensors; None and "np" return numpy arrays.

        Returns:
            `BatchFeature` with `input_features` (B, feature_size, T) float32 in decibels, where T is the number of
            frames of the longest clip, and `audio_attention_mask` (B, T) int64, 1 for the clip, 0 for padding.

        Raises:
            ValueError: The sampling rate or a clip is invalid; the message contains the index of the clip.
        """
        method = self.resampling_method
        waveforms = as_waveforms(audio, sampling_rate, self.sampling_rate, self.min_samples, method)
        return BatchFeature(
            stack_clips(list(map(self.extract_clip, waveforms)), SILENCE_DB), tensor_type=return_tensors
        )

    def extract_clip(self, waveform: np.ndarray) -> dict[str, np.ndarray]:
        """Compute the inputs of one clip, a result of `as_waveforms`: those of `__call__` without the first axis."""
        waveform = self.extend(waveform)
        if self.center:
            # Mirror half a window at both ends: (samples,) -> (samples + n_fft,)
            reach = self.n_fft // 2
            before, after = waveform[reach:0:-1], waveform[-2 : -reach - 2 : -1]
            waveform = np.concatenate([before, waveform, after])
        decibels = self._log_mel(torch.from_numpy(waveform))
        features = decibels.clamp_(min=decibels.max() - self.top_db).numpy()
        return {"input_features": features, "audio_attention_mask": np.ones(features.shape[1], dtype=np.int64)}

    def extend(self, waveform: np.ndarray) -> np.ndarray:
        """Append zeros to a waveform (samples,) that is shorter than `pad_to_samples`."""
        missing = self.pad_to_samples - len(waveform)
        return np.pad(waveform, (0, missing)) if missing > 0 else waveform

    def frames_of(self, samples: Any) -> Any:
        """Convert lengths in samples (an integer or a tensor of integers) to numbers of frames."""
        return 1 + (samples if self.center else samples - self.n_fft) // self.hop_size

    def on_device(self, samples: Tensor, sample_counts: Tensor) -> dict[str, Tensor]:
        """Compute the same spectrograms as `__call__` from a batch of waveforms, on the device of the waveforms.

        Args:
            samples: Waveforms (B, S) at `sampling_rate`, where S is the length of the longest clip: floats in [-1, 1],
                or int16. Values after the end of a shorter clip are ignored.
            sample_counts: Length of each clip in samples, (B,) integers.

        Returns:
            Dict with the tensors `input_features` (B, feature_size, T) and `audio_attention_mask` (B, T).
        """
        waveforms = samples.float() / 32768 if samples.dtype == torch.int16 else samples
        counts = sample_counts.unsqueeze(1)
        n_frames = self.frames_of(counts)

        if self.center:
            # Mirror half a window before and after each clip: (B, S) -> (B, S + n_fft)
            reach = self.n_fft // 2
            indices = torch.arange(-reach, samples.shape[1] + reach, device=samples.device).abs()
            last = counts - 1
            waveforms = waveforms.gather(1, (last - (last - indices).abs()).clamp(min=0))

        decibels = self._log_mel(waveforms)  # (B, feature_size, T)
        mask = torch.arange(decibels.shape[2], device=samples.device) < n_frames
        is_clip = mask.unsqueeze(1)
        loudest = decibels.masked_fill(~is_clip, SILENCE_DB).amax((1, 2), keepdim=True)
        features = decibels.clamp_(min=loudest - self.top_db).masked_fill_(~is_clip, SILENCE_DB)
        return {"input_features": features, "audio_attention_mask": mask.long()}

    def _log_mel(self, waveforms: Tensor) -> Tensor:
        """Compute log-mel spectrograms in decibels from waveforms, (..., samples) -> (..., feature_size, T).

        With `center=True`, the caller must first pad the waveforms by reflection. The result is the same as that of
        torchaudio's MelSpectrogram and amplitude_to_DB without `top_db`. This function is faster, because it skips the
        FFT bins where the mel filters are zero.
        """
        window, bands = _front_end(
            self.n_fft, self.win_size, self.f_min, self.f_max, self.feature_size, self.sampling_rate, waveforms.device
        )

        # (..., samples) -> (..., T, n_fft) -> (..., T, n_fft / 2 + 1), complex
        spectrum = torch.fft.rfft(waveforms.unfold(-1, self.n_fft, self.hop_size) * window)

        # Alternating squares of real and imaginary parts, (..., n_fft + 2, T); both have the weight of their bin.
        squares = torch.view_as_real(spectrum).flatten(-2).square_().mT
        mel = squares.new_empty(*squares.shape[:-2], self.feature_size, squares.shape[-1])

        for first, low, weights in bands:
            used = squares[..., low : low + weights.shape[1], :]
            torch.matmul(weights, used, out=mel[..., first : first + len(weights), :])

        return mel.clamp_(min=POWER_FLOOR).log10_().mul_(10)


# These functions state the dtype, because their results are cached: the default dtype may differ at the first call.


def window_function(n_fft: int, win_size: int) -> Tensor:
    """Return a periodic Hann window in the middle of n_fft samples, (n_fft,) float32."""
    before = (n_fft - win_size) // 2
    window = torch.hann_window(win_size, dtype=torch.float32)
    return torch.nn.functional.pad(window, (before, n_fft - win_size - before))


def mel_filters(n_fft: int, f_min: float, f_max: float | None, n_mels: int, rate_hz: int) -> Tensor:
    """Return triangular filters of height 1 on the HTK mel scale, (n_fft / 2 + 1, n_mels) float32.

    They equal those of `torchaudio.functional.melscale_fbanks`, which have the default dtype. f_max=None: half the
    sampling rate.
    """
    top_hz = rate_hz / 2 if f_max is None else f_max
    first, last = (2595 * math.log10(1 + hz / 700) for hz in (f_min, top_hz))
    corners = 700 * (10 ** (torch.linspace(first, last, n_mels + 2, dtype=torch.float32) / 2595) - 1)
    bins = torch.linspace(0, rate_hz // 2, n_fft // 2 + 1, dtype=torch.float32)
    distances, widths = corners - bins[:, None], corners.diff()
    return torch.minimum(-distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]).clamp(min=0)


@lru_cache(maxsize=8)
def _front_end(
    n_fft: int, win_size: int, f_min: float, f_max: float | None, n_mels: int, rate_hz: int, device: torch.device
) -> tuple[Tensor, list[tuple[int, int, Tensor]]]:
    """Return the window (n_fft,) and the groups of mel filters (see `group_bands`), with transposed weights.

    Each FFT bin has two rows, its real and its imaginary part.
    """
    # (n_fft / 2 + 1, n_mels) -> (n_fft + 2, n_mels)
    filters = mel_filters(n_fft, f_min, f_max, n_mels, rate_hz).repeat_interleave(2, dim=0).to(device)
    groups = [(first, low, weights.T.contiguous()) for first, low, weights in group_bands(filters)]
    return window_function(n_fft, win_size).to(device), groups


register(AutoFeatureExtractor, CEDConfig, CEDFeatureExtractor)
register(AutoFeatureExtractor, SupCLAPConfig, CEDFeatureExtractor)
