"""Mixing to mono, checks and resampling. torch is imported only to resample, so that listing rows stays fast.

Every waveform passes `to_mono` once, where it enters: a file in `datasets_scripts.decoders`, an array in `audio_input`.
"""

import logging
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

# 40 dB above full scale; larger floats are probably integer samples without scaling.
MAX_AMPLITUDE = 100.0
# Range of valid sampling rates. A lower rate is probably in kilohertz; recorders reach 192 kHz.
LEAST_RATE_HZ = 200
MOST_RATE_HZ = 10_000_000
# Power of the mean of all channels, relative to the first channel, below which the channels cancel each other: -40 dB.
CANCELLED_POWER = 1e-4
# Largest denominator of the resampling ratio.
MAX_RATIO_DENOMINATOR = 2000
# Input samples that are resampled at a time, because torchaudio needs several copies of its input.
PIECE_SAMPLES = 2**20
# Options of `torchaudio.transforms.Resample`, by the name of a resampling method. The first has the filter of librosa's
# method of the same name: images and aliases are more than 100 dB below the signal, as in soxr. The second is the
# default of torchaudio, which leaves them about 30 dB below the signal.
RESAMPLING_METHODS: dict[str, dict[str, Any]] = {
    "kaiser_best": {
        "resampling_method": "sinc_interp_kaiser",
        "lowpass_filter_width": 64,
        "rolloff": 0.9475937167399596,
        "beta": 14.769656459379492,
    },
    "sinc_interp_hann": {},
}


class BadAudioError(ValueError):
    """Error for a recording without usable audio; the message contains the file name and the problem."""


def to_mono(samples: np.ndarray, rate_hz: int, name: str, channel: int | None = None, position: int = 0) -> np.ndarray:
    """Mix samples to mono, and check them and their sampling rate.

    If the channels cancel each other, as in a recording with one inverted channel, the first one is returned, with a
    warning.

    Args:
        samples: Array (samples, channels): floats of full scale 1, or int16 or int32 PCM.
        channel: Index of the channel to return. None: the mean of all channels.
        position: Number of samples before these, for messages.

    Returns:
        Waveform (samples,) in float32.

    Raises:
        BadAudioError: The channel does not exist, a sample is not finite or exceeds full scale by 40 dB, or the rate is
            below 200 Hz or above 10 MHz.

    Example:
        >>> to_mono(np.array([[8192, 0], [0, 8192]], dtype=np.int16), 16000, "the clip").tolist()
        [0.125, 0.125]
    """
    if not LEAST_RATE_HZ <= rate_hz <= MOST_RATE_HZ:
        raise _impossible_rate(rate_hz, name)
    if samples.dtype.kind == "i":  # in either byte order
        samples = np.multiply(samples, np.float32(-1 / np.iinfo(samples.dtype).min), dtype=np.float32)
    num_channels = samples.shape[1]
    if channel is not None and not 0 <= channel < num_channels:
        raise BadAudioError(f"{name} has no channel {channel}; expected 0 to {num_channels - 1}")

    waveform = samples[:, channel or 0].astype(np.float32)
    if channel is None and num_channels > 1:  # up to 20 times as fast as numpy's `mean`
        power = waveform @ waveform
        for other in samples.T[1:]:
            waveform += other
        waveform /= np.float32(num_channels)
        if waveform @ waveform < CANCELLED_POWER * power:
            _warn_of_cancelled(name)
            waveform = samples[:, 0].astype(np.float32)

    peak = max(waveform.max(), -waveform.min())  # NaN or infinite if any sample is
    if not np.isfinite(peak):
        first = position + int(np.isfinite(waveform).argmin())
        raise BadAudioError(f"{name} contains NaN or infinite samples, the first at {first}")
    if peak > MAX_AMPLITUDE:
        raise BadAudioError(
            f"{name} has a peak of {peak:.6g}, but full scale is 1; divide integer samples by 32768, or replace a "
            "damaged file"
        )
    return waveform


def _impossible_rate(rate_hz: int, name: str) -> BadAudioError:
    expected = f"{LEAST_RATE_HZ} to {MOST_RATE_HZ}, in hertz and not in kilohertz"
    return BadAudioError(f"{name} has a sampling rate of {rate_hz} Hz; expected {expected}")


@lru_cache(maxsize=1000)
def _warn_of_cancelled(name: str) -> None:
    logger.warning("%s: its channels cancel each other; only the first one is used", name)


def resample(waveform: np.ndarray, from_hz: int, to_hz: int, resampling_method: str = "kaiser_best") -> np.ndarray:
    """Resample a waveform (samples,) with torchaudio's windowed sinc interpolation.

    The ratio to_hz / from_hz is rounded to a fraction with a denominator of at most 2000. Without rounding, a rate such
    as 44,101 Hz would need a filter of gigabytes, because the size grows with from_hz * to_hz / gcd(from_hz, to_hz)^2.

    Args:
        resampling_method: Key of `RESAMPLING_METHODS`: "kaiser_best" (the quality of soxr and librosa) or
            "sinc_interp_hann" (the default of torchaudio).

    Raises:
        BadAudioError: `from_hz` is below 200 Hz or above 10 MHz.

    Returns:
        Float32 waveform of ceil(samples * to_hz / from_hz) samples. If the rates are equal, this is the input array.

    Example:
        >>> resample(np.zeros(44100, dtype=np.float32), 44100, 16000).shape
        (16000,)
    """
    if from_hz == to_hz:
        return waveform
    if not LEAST_RATE_HZ <= from_hz <= MOST_RATE_HZ:
        raise _impossible_rate(from_hz, "the waveform")
    import torch

    ratio = Fraction(to_hz, from_hz).limit_denominator(MAX_RATIO_DENOMINATOR)
    resampler = _resampler(ratio.denominator, ratio.numerator, **RESAMPLING_METHODS[resampling_method])
    # Pieces start where samples of both rates coincide, and overlap by the width of the filter.
    step = PIECE_SAMPLES // ratio.denominator * ratio.denominator
    margin = -(-resampler.width // ratio.denominator) * ratio.denominator
    pieces = []
    for start in range(0, len(waveform), step):
        first = max(0, start - margin)
        piece = np.require(waveform[first : start + step + margin], requirements=["C", "W"])
        skipped = (start - first) * ratio
        pieces.append(resampler(torch.from_numpy(piece))[int(skipped) : int(skipped + step * ratio)].numpy())
    resampled = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    length = -(-len(waveform) * to_hz // from_hz)
    if len(resampled) < length:
        return np.pad(resampled, (0, length - len(resampled)), mode="edge")
    return resampled[:length]


@lru_cache(maxsize=8)
def _resampler(from_hz: int, to_hz: int, **options: Any) -> Any:
    import torchaudio

    return torchaudio.transforms.Resample(from_hz, to_hz, **options)
