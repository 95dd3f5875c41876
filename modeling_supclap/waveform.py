"""Limits of valid audio, and resampling. torch is imported only to resample, so that listing rows stays fast."""

from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

# 40 dB above full scale; larger floats are probably integer samples without scaling.
MAX_AMPLITUDE = 100.0
# Range of valid sampling rates. A lower rate is probably in kilohertz; recorders reach 192 kHz.
LEAST_RATE_HZ = 200
MOST_RATE_HZ = 10_000_000
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


def resample(waveform: np.ndarray, from_hz: int, to_hz: int, resampling_method: str = "kaiser_best") -> np.ndarray:
    """Resample a waveform (samples,) with torchaudio's windowed sinc interpolation.

    The ratio to_hz / from_hz is rounded to a fraction with a denominator of at most 2000. Without rounding, a rate such
    as 44,101 Hz would need a filter of gigabytes, because the size grows with from_hz * to_hz / gcd(from_hz, to_hz)^2.

    Args:
        resampling_method: Key of `RESAMPLING_METHODS`: "kaiser_best" (the quality of soxr and librosa) or
            "sinc_interp_hann" (the default of torchaudio).

    Returns:
        Float32 waveform of ceil(samples * to_hz / from_hz) samples. If the rates are equal, this is the input array.

    Example:
        >>> resample(np.zeros(44100, dtype=np.float32), 44100, 16000).shape
        (16000,)
    """
    if from_hz == to_hz:
        return waveform
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
