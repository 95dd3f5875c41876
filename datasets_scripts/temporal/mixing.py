"""Combine two waveforms in sequence, or overlay them with equal loudness (TeminAL section 3.1).

Waveforms are mono float arrays `(samples,)` with full scale 1. Combined waveforms are float32. If their peak exceeds
`PEAK`, the whole waveform is scaled down. All functions raise ValueError if a waveform is empty, not mono, not float,
or has NaN or infinite samples.
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
    """Options for joining two clips in sequence, or overlaid.

    Attributes:
        match_loudness: Whether to scale two clips in sequence to the geometric mean of their `active_rms`.
        match_overlay_loudness: Whether to scale two overlaid clips in the same way.
    """

    match_loudness: bool = False
    match_overlay_loudness: bool = True


def compose(
    role: str, waveforms: Sequence[np.ndarray], sampling_rate_hz: int, options: RenderOptions | None = None
) -> np.ndarray:
    """Return a single waveform, join two in sequence, `a_i + a_j`, or overlay them, `a_i ^ a_j`, depending on `role`.

    Overlaid clips start together; the result is as long as the longer clip, and their order does not matter. If the
    loudness is matched, both clips are scaled to the geometric mean of their `active_rms`, and ValueError is raised if
    one is silent. The paper does not state whether it matches the loudness.

    Args:
        role: One of `ROLES`, or "concatenated". "single" returns the only waveform. "overlaid" overlays two waveforms.
            All other roles join two waveforms in sequence.
        waveforms: One waveform for "single", otherwise two in the order of playback.

    Raises ValueError if the role, the number of waveforms or a waveform is wrong.

    >>> compose("reversed", [np.array([0.5]), np.array([0.25])], sampling_rate_hz=1).tolist()
    [0.5, 0.25]
    >>> compose("overlaid", [np.array([0.2, -0.2]), np.array([0.2, 0.2, 0.2])], sampling_rate_hz=50).round(3)
    array([0.4, 0. , 0.2], dtype=float32)
    """
    if role not in (*ROLES, "concatenated"):
        raise ValueError(f"unknown role {role!r}; the roles are {', '.join(ROLES)} and concatenated")
    if len(waveforms) != (1 if role == "single" else 2):
        raise ValueError(f"got {len(waveforms)} waveforms for {role!r}; 'single' takes one, the others take two")

    clips = [_check_clip(waveform, sampling_rate_hz) for waveform in waveforms]
    options = options or RenderOptions()
    is_matched = options.match_overlay_loudness if role == "overlaid" else options.match_loudness
    if is_matched and role != "single":
        level, other = (active_rms(clip, sampling_rate_hz) for clip in clips)
        if level == 0 or other == 0:
            raise ValueError(f"the clips have levels {level:.3g} and {other:.3g}; matching requires non-silent clips")
        gains = math.sqrt(other / level), math.sqrt(level / other)
        clips = [clip * np.float32(gain) for clip, gain in zip(clips, gains, strict=True)]
    if role == "overlaid":
        shorter, longer = sorted(clips, key=len)
        mixed = longer.copy()
        mixed[: len(shorter)] += shorter
    else:
        mixed = np.concatenate(clips)
    peak = np.abs(mixed).max()
    return mixed * (PEAK / peak) if peak > PEAK else mixed


def active_rms(waveform: np.ndarray, sampling_rate_hz: int) -> float:
    """Compute the RMS level of the active parts of a clip, without padding and pauses.

    A 20 ms frame is active if its power is at least the mean power of the clip minus 10 dB. The level of digital
    silence is 0. Raises ValueError if the rate is not positive.

    >>> half_silent = np.repeat([0.5, 0.0], 8000)
    >>> active_rms(half_silent, 16000)
    0.5
    """
    waveform = _check_clip(waveform, sampling_rate_hz)
    frame = max(1, round(FRAME_SECONDS * sampling_rate_hz))
    num_whole = len(waveform) // frame

    # (samples,) -> (frames, samples per frame) -> (frames,), plus the remaining shorter frame
    frames = waveform[: num_whole * frame].reshape(num_whole, frame)
    rest = waveform[num_whole * frame :]
    energies = np.append(np.einsum("nf,nf->n", frames, frames), np.dot(rest, rest)).astype(np.float64)
    lengths = np.append(np.full(num_whole, frame), len(rest))

    threshold = energies.sum() / len(waveform) * 10 ** (GATE_DB / 10)
    is_active = energies >= lengths * threshold
    return math.sqrt(energies[is_active].sum() / lengths[is_active].sum())


def _check_clip(waveform: np.ndarray, sampling_rate_hz: int) -> np.ndarray:
    """Check a waveform and its sampling rate, and return the waveform in float32."""
    waveform = np.asarray(waveform)
    if waveform.ndim != 1 or not waveform.size or not np.issubdtype(waveform.dtype, np.floating):
        raise ValueError(
            f"got a waveform of shape {waveform.shape} and type {waveform.dtype}; give mono audio as a non-empty float "
            "array with full scale 1"
        )
    if not np.isfinite(waveform).all():
        raise ValueError("a waveform holds NaN or infinite samples; leave the clip out")
    if not sampling_rate_hz > 0:
        raise ValueError(f"sampling_rate_hz is {sampling_rate_hz}; give a positive number")
    return waveform.astype(np.float32)
