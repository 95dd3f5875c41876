"""Waveforms put together: one clip after the other, or both at once and equally loud.

Pure functions of arrays: mono floats with full scale 1 in, the same out, and never a peak above `PEAK`.

[T] is "Temporal Enhancement of Contrastive Audio-Language Models through Self-Supervised Post-Training with Text-Audio
Pairs" (TeminAL and ZSTE).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PEAK = 0.99
FRAME_SECONDS = 0.02
GATE_DB = -10.0  # the relative gate of ITU-R BS.1770-4

ROLES = ("single", "combined", "forward", "reversed", "overlaid")


@dataclass(frozen=True)
class RenderOptions:
    """How two clips are joined; the fields are arguments of `concatenate`.

    Raises:
        ValueError: A time is negative; both a crossfade and a gap.
    """

    crossfade_seconds: float = 0.0
    gap_seconds: float = 0.0
    match_loudness: bool = False

    def __post_init__(self) -> None:
        for name in ("crossfade_seconds", "gap_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more seconds")
        if self.crossfade_seconds and self.gap_seconds:
            raise ValueError(
                f"got a crossfade of {self.crossfade_seconds} s and a gap of {self.gap_seconds} s; give one of the two"
            )


def compose(
    role: str, waveforms: Sequence[np.ndarray], sampling_rate_hz: int, options: RenderOptions | None = None
) -> np.ndarray:
    """Puts waveforms together as a role of an item or the family of a ZSTE record says.

    Args:
        role: One of `ROLES`, or "concatenated".
        waveforms: One for "single", two for everything else, in the order of sounding; each (samples,) float.
        sampling_rate_hz: Of all.
        options: Of joins.

    Returns:
        (samples,) float32, peak at most 0.99.

    Raises:
        ValueError: An unknown role, too many or too few waveforms, or what `concatenate` and `overlay` raise.

    >>> compose("reversed", [np.array([0.5]), np.array([0.25])], sampling_rate_hz=1).tolist()
    [0.5, 0.25]
    """
    if role not in (*ROLES, "concatenated"):
        raise ValueError(f"unknown role {role!r}; the roles are {', '.join(ROLES)} and concatenated")
    if len(waveforms) != (1 if role == "single" else 2):
        raise ValueError(f"got {len(waveforms)} waveforms for {role!r}; 'single' takes one, the others take two")
    if role == "single":
        return _limited(_checked(waveforms[0]))
    first, second = waveforms
    if role == "overlaid":
        return overlay(first, second, sampling_rate_hz)
    options = options or RenderOptions()
    return concatenate(
        first, second, sampling_rate_hz, options.crossfade_seconds, options.gap_seconds, options.match_loudness
    )


def active_rms(waveform: np.ndarray, sampling_rate_hz: int) -> float:
    """The level of a clip where it sounds, so that padding and pauses do not count.

    The RMS over the frames of 20 ms whose power is at most 10 dB below the mean power of the clip.

    Args:
        waveform: (samples,) float, full scale 1.
        sampling_rate_hz: Of the waveform.

    Returns:
        The level, full scale 1; 0 for digital silence.

    Raises:
        ValueError: The waveform is not mono, is empty or holds no floats, or the rate is not positive.

    >>> half_silent = np.repeat([0.5, 0.0], 8000)
    >>> active_rms(half_silent, 16000)
    0.5
    """
    power = np.square(_checked(waveform))
    starts = np.arange(0, power.size, max(1, _num_samples(FRAME_SECONDS, sampling_rate_hz)))
    energies, lengths = np.add.reduceat(power, starts), np.diff(starts, append=power.size)
    active = energies >= lengths * (energies.sum() / power.size * 10 ** (GATE_DB / 10))
    return math.sqrt(energies[active].sum() / lengths[active].sum())


def concatenate(
    first: np.ndarray,
    second: np.ndarray,
    sampling_rate_hz: int,
    crossfade_seconds: float = 0.0,
    gap_seconds: float = 0.0,
    match_loudness: bool = False,
) -> np.ndarray:
    """One clip after the other, `a_i + a_j` [T 3.1].

    Args:
        first: (samples,) float, full scale 1.
        second: The same, at the same rate.
        sampling_rate_hz: Of both.
        crossfade_seconds: How long the end of the first and the beginning of the second overlap, at equal power: the
            squares of the two gains, a cosine and a sine, sum to 1.
        gap_seconds: Digital silence between the two.
        match_loudness: Brings both to the geometric mean of their `active_rms`.

    Returns:
        (samples,) float32. Where the peak would exceed 0.99, the whole is scaled down to it, so that it never clips.

    Raises:
        ValueError: A clip is empty, not mono, holds no floats or NaN; a time is negative; both a crossfade and a gap;
            a crossfade longer than a clip; loudness to match with a silent clip.

    >>> concatenate(np.array([0.5, 0.5]), np.array([0.25]), sampling_rate_hz=1, gap_seconds=1).tolist()
    [0.5, 0.5, 0.0, 0.25]
    """
    RenderOptions(crossfade_seconds, gap_seconds, match_loudness)  # checks them
    first, second = _checked(first), _checked(second)
    fade, gap = (_num_samples(seconds, sampling_rate_hz) for seconds in (crossfade_seconds, gap_seconds))
    if fade > min(first.size, second.size):
        shortest_seconds = min(first.size, second.size) / sampling_rate_hz
        raise ValueError(f"the crossfade of {crossfade_seconds} s is longer than a clip of {shortest_seconds} s")
    if match_loudness:
        first, second = _equally_loud(first, second, sampling_rate_hz)
    kept, angle = first.size - fade, np.linspace(0, np.pi / 2, fade, dtype=np.float32)
    crossfade = first[kept:] * np.cos(angle) + second[:fade] * np.sin(angle)
    return _limited(np.concatenate([first[:kept], crossfade, np.zeros(gap, np.float32), second[fade:]]))


def overlay(first: np.ndarray, second: np.ndarray, sampling_rate_hz: int) -> np.ndarray:
    """Two clips at once and equally loud, `a_i ^ a_j` [T 3.1]; `overlay(a, b)` is `overlay(b, a)`.

    Args:
        first: (samples,) float, full scale 1.
        second: The same, at the same rate.
        sampling_rate_hz: Of both.

    Returns:
        (samples,) float32, as long as the longer one; the shorter begins with it. Both are brought to the geometric
        mean of their `active_rms`. Where the peak would exceed 0.99, the whole is scaled down to it, so that it never
        clips and the balance stays.

    Raises:
        ValueError: A clip is empty, not mono, holds no floats or NaN, or is silent; the rate is not positive.

    >>> overlay(np.array([0.2, -0.2]), np.array([0.2, 0.2, 0.2]), sampling_rate_hz=50).round(3)
    array([0.4, 0. , 0.2], dtype=float32)
    """
    first, second = _equally_loud(_checked(first), _checked(second), sampling_rate_hz)
    mixed = np.zeros(max(first.size, second.size), np.float32)
    mixed[: first.size] += first
    mixed[: second.size] += second
    return _limited(mixed)


def _checked(waveform: np.ndarray) -> np.ndarray:
    waveform = np.asarray(waveform)
    if waveform.ndim != 1 or not waveform.size or not np.issubdtype(waveform.dtype, np.floating):
        raise ValueError(
            f"got a waveform of shape {waveform.shape} and type {waveform.dtype}; "
            "give at least one sample of mono sound, as floats with full scale 1"
        )
    if not np.isfinite(waveform).all():
        raise ValueError("a waveform holds NaN or infinite samples; leave the clip out")
    return waveform.astype(np.float32, copy=False)


def _num_samples(seconds: float, sampling_rate_hz: int) -> int:
    if not sampling_rate_hz > 0:
        raise ValueError(f"sampling_rate_hz is {sampling_rate_hz}; give a positive number")
    return round(seconds * sampling_rate_hz)


def _equally_loud(first: np.ndarray, second: np.ndarray, sampling_rate_hz: int) -> tuple[np.ndarray, np.ndarray]:
    level, other = active_rms(first, sampling_rate_hz), active_rms(second, sampling_rate_hz)
    if not min(level, other) > 0:
        raise ValueError(f"the clips have levels {level:.3g} and {other:.3g}; silence cannot be made equally loud")
    return first * math.sqrt(other / level), second * math.sqrt(level / other)


def _limited(waveform: np.ndarray) -> np.ndarray:
    peak = max(waveform.max(), -waveform.min())
    return waveform * (PEAK / peak) if peak > PEAK else waveform
