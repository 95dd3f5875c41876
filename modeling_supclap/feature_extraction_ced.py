"""Waveforms to the log-mel spectrograms that CED was trained on, in batches, each clip as if it were alone."""

from fractions import Fraction
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
import torchaudio
from transformers import AutoFeatureExtractor, BatchFeature, SequenceFeatureExtractor

from .auto_classes import register
from .configuration_supclap import CEDConfig, SupCLAPConfig

# A spectrogram's smallest power: digital silence is 10 log10(1e-10) = -100 dB.
POWER_FLOOR = 1e-10
SILENCE_DB = -100.0
# More "channels" than a 7.1 recording has are samples.
MAX_CHANNELS = 8
# 40 dB over full scale: such floats are integers that nobody has scaled.
MAX_AMPLITUDE = 100.0
# Of the ratio of two sampling rates, as in the package's reader of recordings.
MAX_RATIO_DENOMINATOR = 2000
# Mel bands that are summed by one matrix product: neighbours need about the same bins.
BANDS_TOGETHER = 16

Audio = Any
"""One clip or several, as numpy arrays, torch tensors or lists of numbers."""


# Rates below are kilohertz by mistake (192 is the highest that recorders have), rates above are no sound.
LEAST_RATE_HZ = 200
MOST_RATE_HZ = 10_000_000


class CEDFeatureExtractor(SequenceFeatureExtractor):
    """Log-mel spectrograms for CED: 64 HTK mel bands of 16 kHz audio, a frame every 10 ms, in decibels.

    db = 10 log10(max(mel power, 1e-10)), no lower than the clip's own maximum - `top_db`.

    Everything is done clip by clip: no value depends on which clips share the batch. Nothing is cropped.
    The `preprocessor_config.json` of the `mispeech/ced-*` checkpoints loads too.

    Args:
        feature_size: Mel bands.
        sampling_rate: Rate in hertz that the spectrograms are made at; other audio is resampled to it.
        n_fft: Samples of one Fourier transform.
        win_size: Samples of the periodic Hann window.
        hop_size: Samples between two frames.
        f_min: Lower edge of the mel bands in hertz.
        f_max: Upper edge of the mel bands in hertz; None is half the sampling rate.
        center: Whether frames are centred on their time stamps, the ends of the clip mirrored.
        top_db: Dynamic range of a clip in decibels.
        padding_value: The sample value that shorter clips are filled up with, as in the published checkpoints; only
            silence is supported, and the model does not look at it.
        min_frames: Frames of one patch, 16 for CED and 4 for Dasheng; nothing shorter can be encoded.
        **kwargs: Further saved fields, as `SequenceFeatureExtractor` takes them.

    Example:
        >>> extractor = CEDFeatureExtractor()
        >>> clips = [np.zeros(16000, dtype=np.float32), np.zeros(8000, dtype=np.float32)]
        >>> batch = extractor(clips, sampling_rate=16000, return_tensors="pt")
        >>> batch["input_features"].shape, batch["audio_attention_mask"].sum(dim=1).tolist()
        (torch.Size([2, 64, 101]), [101, 51])
    """

    model_input_names = ["input_features", "audio_attention_mask"]  # noqa: RUF012, as in transformers

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
        **kwargs: Any,
    ) -> None:
        # Published files name another input, and have no mask: a clip's embedding would depend on its batch mates.
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

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The front end that an encoder was trained on, by the fields of its `CEDConfig`.

        Args:
            config: The configuration.
        """
        fields = ("n_fft", "win_size", "hop_size", "f_min", "f_max", "center")
        own = {name: getattr(config, name) for name in fields}
        return cls(feature_size=config.n_mels, min_frames=config.patch_frames, **own)

    @property
    def min_samples(self) -> int:
        """The shortest clip that makes one patch: 2400 samples, 0.15 s, for CED."""
        hops = (self.min_frames - 1) * self.hop_size
        return max(hops, self.n_fft // 2 + 1) if self.center else hops + self.n_fft  # half a window can be mirrored

    def __call__(
        self, audio: Audio, sampling_rate: float | None = None, return_tensors: str | None = None
    ) -> BatchFeature:
        """Makes one batch of one or more clips.

        Args:
            audio: One clip (1-D), or several: a list, or a 2-D array (clips, samples). In a list a clip may also be
                (channels, samples), of which the mean is taken. Floats have full scale 1; int16 and int32 are PCM.
            sampling_rate: Rate of all the clips in hertz.
            return_tensors: "pt" for torch tensors; None and "np" give numpy arrays.

        Returns:
            `input_features` (B, feature_size, T) float32 in decibels, T the frames of the longest clip, and
            `audio_attention_mask` (B, T) int64, 1 for a clip's own frames and 0 for the silence after them.

        Raises:
            ValueError: The sampling rate is missing or no rate; or a clip is empty, too short, not finite, of a
                wrong shape or of a wrong type. The message tells which clip.
        """
        spectrograms = []
        for waveform in self.as_waveforms(audio, sampling_rate):
            if self.center:
                # Half a window of the mirror image at both ends: (samples,) -> (samples + n_fft,).
                reach = self.n_fft // 2
                before, after = waveform[reach:0:-1], waveform[-2 : -reach - 2 : -1]
                waveform = np.concatenate([before, waveform, after])
            decibels = self._log_mel(torch.from_numpy(waveform))
            spectrograms.append(decibels.clamp_(min=decibels.max() - self.top_db))

        # (B, feature_size, T) and (B, T), T the frames of the longest clip
        n_frames = torch.tensor([spectrogram.shape[1] for spectrogram in spectrograms])
        features = torch.full((len(spectrograms), self.feature_size, int(n_frames.max())), SILENCE_DB)

        for row, spectrogram in zip(features, spectrograms, strict=True):
            row[:, : spectrogram.shape[1]] = spectrogram

        mask = torch.arange(features.shape[2]) < n_frames.unsqueeze(1)
        batch = {"input_features": features.numpy(), "audio_attention_mask": mask.long().numpy()}

        return BatchFeature(batch, tensor_type=return_tensors)

    def as_waveforms(self, audio: Audio, sampling_rate: float | None = None) -> list[np.ndarray]:
        """Checks clips and brings them to the rate that spectrograms are made at, the first half of a call.

        Args:
            audio: As of `__call__`.
            sampling_rate: As of `__call__`.

        Returns:
            float32 (samples,) for each clip.

        Raises:
            ValueError: As of `__call__`.
        """
        rate_hz = _check_rate(sampling_rate)
        waveforms = []
        for index, clip in enumerate(_as_clips(audio)):
            waveform = as_waveform(clip, rate_hz, self.sampling_rate, f"clip {index}")
            if len(waveform) < self.min_samples:
                raise ValueError(
                    f"clip {index} lasts {len(waveform) / self.sampling_rate:.4f} s, too short to encode; "
                    f"the minimum is {self.min_samples / self.sampling_rate} s"
                )
            waveforms.append(waveform)
        return waveforms

    def frames_of(self, samples: Any) -> Any:
        """Return the number of frames of a clip of this many samples: an integer, or a tensor of them."""
        return 1 + (samples if self.center else samples - self.n_fft) // self.hop_size

    def on_device(self, samples: torch.Tensor, sample_counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Makes the batch of a call from samples, on the device that they are on: the second half of a call.

        All clips at once, which is what a GPU wants. The values are those of a call but for rounding, on which the
        batch has an influence.

        Args:
            samples: (B, S) at `sampling_rate`, S those of the longest clip; floats of full scale 1, or int16. What
                stands after the end of a shorter clip does not matter.
            sample_counts: (B,) integers, the samples of each clip.

        Returns:
            `input_features` (B, feature_size, T) and `audio_attention_mask` (B, T), as of a call.

        Example:
            >>> batch = CEDFeatureExtractor().on_device(torch.zeros(2, 16000), torch.tensor([16000, 8000]))
            >>> batch["input_features"].shape, batch["audio_attention_mask"].sum(dim=1).tolist()
            (torch.Size([2, 64, 101]), [101, 51])
        """
        waveforms = samples / 32768 if samples.dtype == torch.int16 else samples
        counts = sample_counts.unsqueeze(1)
        n_frames = self.frames_of(counts)

        if self.center:
            # Half a window before each clip and after its own end stands its mirror image: (B, S) -> (B, S + n_fft).
            reach = self.n_fft // 2
            places = torch.arange(-reach, samples.shape[1] + reach, device=samples.device).abs()
            last = counts - 1
            waveforms = waveforms.gather(1, (last - (last - places).abs()).clamp(min=0))

        decibels = self._log_mel(waveforms)  # (B, feature_size, T)
        mask = torch.arange(decibels.shape[2], device=samples.device) < n_frames
        own = mask.unsqueeze(1)
        loudest = decibels.masked_fill(~own, SILENCE_DB).amax((1, 2), keepdim=True)
        features = decibels.clamp_(min=loudest - self.top_db).masked_fill_(~own, SILENCE_DB)
        return {"input_features": features, "audio_attention_mask": mask.long()}

    def _log_mel(self, waveforms: torch.Tensor) -> torch.Tensor:
        """(..., samples), mirrored where frames are centred, to decibels (..., feature_size, T) of any range.

        The steps of torchaudio's MelSpectrogram and amplitude_to_DB, to the same numbers: no band is multiplied with
        the bins of all others, and on a CPU a clip at a time stays in the cache.
        """
        window, bands = _front_end(
            self.n_fft, self.win_size, self.f_min, self.f_max, self.feature_size, self.sampling_rate, waveforms.device
        )

        # (..., samples) -> (..., T, n_fft) -> (..., T, n_fft / 2 + 1), complex
        spectrum = torch.fft.rfft(waveforms.unfold(-1, self.n_fft, self.hop_size) * window)

        # The squares of real and imaginary parts in turn, (..., n_fft + 2, T); each pair shares a weight.
        squares = torch.view_as_real(spectrum).flatten(-2).square_().mT
        mel = squares.new_empty(*squares.shape[:-2], self.feature_size, squares.shape[-1])

        for first, low, weights in bands:
            used = squares[..., low : low + weights.shape[1], :]
            torch.matmul(weights, used, out=mel[..., first : first + len(weights), :])

        return mel.clamp_(min=POWER_FLOOR).log10_().mul_(10)


@lru_cache(maxsize=8)
def _front_end(
    n_fft: int, win_size: int, f_min: float, f_max: float | None, n_mels: int, rate_hz: int, device: torch.device
) -> tuple[torch.Tensor, list[tuple[int, int, torch.Tensor]]]:
    """The window, (n_fft,), and the mel bands in groups: the first band, the first row of the squares, the weights."""
    window = torch.zeros(n_fft)
    start = (n_fft - win_size) // 2
    window[start : start + win_size] = torch.hann_window(win_size)

    # HTK triangles of height 1, (n_fft / 2 + 1, n_mels) -> (n_mels, n_fft + 2)
    top_hz = rate_hz / 2 if f_max is None else f_max
    bank = torchaudio.functional.melscale_fbanks(n_fft // 2 + 1, f_min, top_hz, n_mels, rate_hz)
    weights = bank.repeat_interleave(2, dim=0).T
    groups = []

    for first in range(0, n_mels, BANDS_TOGETHER):
        group = weights[first : first + BANDS_TOGETHER]
        used = group.any(dim=0).nonzero().flatten().tolist() or [0]
        groups.append((first, used[0], group[:, used[0] : used[-1] + 1].contiguous().to(device)))

    return window.to(device), groups


def as_waveform(clip: Audio, from_hz: float | None, to_hz: int, name: str = "the clip") -> np.ndarray:
    """One clip, however it was given, as mono float32 at a sampling rate.

    Args:
        clip: (samples,), (channels, samples) or (samples, channels), of which the mean is taken. Floats have full
            scale 1; int16 and int32 are PCM.
        from_hz: Its rate.
        to_hz: The rate wanted.
        name: What errors call the clip.

    Returns:
        float32, (samples,).

    Raises:
        ValueError: The rate is missing or no rate; or the clip is empty, not finite, of a wrong shape or type.

    Example:
        >>> as_waveform(np.array([[8192, 0], [0, 8192]], dtype=np.int16), 16000, 16000).tolist()
        [0.125, 0.125]
    """
    samples = _as_array(clip, name)
    if not samples.size:
        raise ValueError(f"{name} is empty: it has shape {samples.shape}")

    waveform = _mono(_as_float(samples, name), name)
    peak = max(waveform.max(), -waveform.min())  # NaN and infinity show in it
    if not np.isfinite(peak):
        raise ValueError(f"{name} holds NaN or infinite samples, the first at {np.isfinite(waveform).argmin()}")
    if peak > MAX_AMPLITUDE:
        raise ValueError(f"{name} reaches {peak:.6g}, but floats have full scale 1; divide integer samples by 32768")

    return resample(waveform, _check_rate(from_hz), to_hz)


def resample(waveform: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """A waveform at another sampling rate, by torchaudio's windowed sinc interpolation.

    Its filter has as many taps as the two rates multiplied without their common factors: gigabytes for 44,101 Hz. The
    ratio of such rates is replaced by the nearest of small whole numbers.

    Args:
        waveform: float32, (samples,).
        from_hz: Its rate.
        to_hz: The rate wanted.

    Returns:
        float32, (ceil(samples * to_hz / from_hz),); the very same array where the rates agree.

    Example:
        >>> resample(np.zeros(44100, dtype=np.float32), 44100, 16000).shape
        (16000,)
    """
    if from_hz == to_hz:
        return waveform

    ratio = Fraction(to_hz, from_hz).limit_denominator(MAX_RATIO_DENOMINATOR)
    resampled = _resampler(ratio.denominator, ratio.numerator)(torch.from_numpy(waveform.copy())).numpy()
    length = -(-len(waveform) * to_hz // from_hz)
    return np.pad(resampled[:length], (0, max(0, length - len(resampled))), mode="edge")


@lru_cache(maxsize=8)
def _resampler(from_hz: int, to_hz: int) -> torchaudio.transforms.Resample:
    return torchaudio.transforms.Resample(from_hz, to_hz)


def _check_rate(sampling_rate: float | None) -> int:
    if sampling_rate is None:
        raise ValueError("sampling_rate is missing; pass the rate of your recordings in hertz, for example 16000")
    if isinstance(sampling_rate, bool) or not isinstance(sampling_rate, (int, float, np.integer, np.floating)):
        raise ValueError(f"sampling_rate must be one number in hertz, got {sampling_rate!r}")
    if not sampling_rate > 0 or sampling_rate % 1 != 0:
        raise ValueError(f"sampling_rate must be a positive whole number of hertz, got {sampling_rate}")
    if not LEAST_RATE_HZ <= sampling_rate <= MOST_RATE_HZ:
        raise ValueError(f"sampling_rate is {sampling_rate} Hz, which no recording has; give hertz, not kilohertz")
    return int(sampling_rate)


def _as_clips(audio: Audio) -> list[Audio]:
    """The clips of a call: an array's rows, a list's entries, or the one clip that was given."""
    if isinstance(audio, (np.ndarray, torch.Tensor)):
        if audio.ndim > 2:
            raise ValueError(
                f"got an array of shape {tuple(audio.shape)}; give one clip, (clips, samples), or a list of clips"
            )
        clips = [audio] if audio.ndim < 2 else list(audio)
    elif isinstance(audio, (list, tuple)):
        clips = [audio] if audio and isinstance(audio[0], (int, float, np.number)) else list(audio)
    else:
        raise ValueError(f"audio must be arrays or lists of numbers, got {type(audio).__name__}; load files first")
    if not clips:
        raise ValueError("there is no clip to extract from; give at least one")

    return clips


def _as_array(clip: Audio, name: str) -> np.ndarray:
    if isinstance(clip, torch.Tensor):
        clip = clip.detach().cpu()
        return (clip.float() if clip.dtype == torch.bfloat16 else clip).numpy()
    try:
        return np.asarray(clip)
    except ValueError as error:
        raise ValueError(f"{name} is no array: {error}") from error


def _as_float(clip: np.ndarray, name: str) -> np.ndarray:
    """Samples as float32 of full scale 1."""
    if clip.dtype.kind == "f":
        return clip.astype(np.float32, copy=False)
    if clip.dtype in (np.int16, np.int32):
        return np.multiply(clip, np.float32(-1 / np.iinfo(clip.dtype).min), dtype=np.float32)
    raise ValueError(f"{name} has dtype {clip.dtype}; give floats of full scale 1, or int16 or int32 PCM")


def _mono(clip: np.ndarray, name: str) -> np.ndarray:
    """(samples,), or (channels, samples) or (samples, channels), of which the mean is taken."""
    if clip.ndim == 1:
        return clip
    if clip.ndim != 2 or min(clip.shape) > MAX_CHANNELS:
        raise ValueError(f"{name} has shape {clip.shape}; give (samples,), or one of at most {MAX_CHANNELS} channels")
    return clip.mean(axis=0 if clip.shape[0] <= MAX_CHANNELS else 1)


register(AutoFeatureExtractor, CEDConfig, CEDFeatureExtractor)
register(AutoFeatureExtractor, SupCLAPConfig, CEDFeatureExtractor)
