"""From a recording on disk to a mono waveform, or an error that names the file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import soundfile

from .feature_extraction_ced import resample

# A WAV written to a pipe announces one of these sizes because its length was not known yet: nothing is missing.
_STREAMED_WAV_SIZES = {0x7FFFFFFF, 0x7FFFFFFF - 36, 0xFFFFFFFF, 0xFFFFFFFF - 36}


class BadAudioError(ValueError):
    """A recording that exists but holds no usable sound; the message names the file and what is wrong with it."""


def read_audio(
    path: str | Path, offset_seconds: float = 0.0, duration_seconds: float | None = None
) -> tuple[np.ndarray, int]:
    """Reads a recording (wav, flac, ogg, mp3, ...) as the mean of its channels, at its own sampling rate.

    Args:
        path: the file.
        offset_seconds: where to begin reading.
        duration_seconds: how much to read at most; `None` reads to the end.

    Returns:
        The waveform, float32 of shape `(samples,)`, full scale 1.0, and its sampling rate in Hz.

    Raises:
        FileNotFoundError: there is no such file.
        BadAudioError: the file is no audio, is truncated or empty, or holds NaN or infinite samples.
    """
    with _open(path) as recording:
        rate_hz = recording.samplerate
        recording.seek(round(offset_seconds * rate_hz))
        remaining = recording.frames - recording.tell()
        wanted = remaining if duration_seconds is None else min(remaining, round(duration_seconds * rate_hz))
        try:
            waveform = recording.read(wanted, dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            raise BadAudioError(f"{path} stops in the middle of its data and is probably truncated: {error}") from error
    if len(waveform) < wanted:
        raise BadAudioError(f"{path} is truncated: {len(waveform)} of {wanted} samples could be read")
    return _checked(waveform.mean(axis=1), path), rate_hz


def load_clip(
    path: str | Path, sampling_rate_hz: int, max_seconds: float | None = None, crop_position: float = 0.0
) -> np.ndarray:
    """A recording at the model's rate, cropped when it is too long, and certain to hold sound.

    Args:
        path: the file.
        sampling_rate_hz: the rate wanted, usually the feature extractor's.
        max_seconds: longer recordings are cropped to this; `None` keeps everything.
        crop_position: where the crop lies, from 0 (the beginning) to 1 (the end); drawn at random in training.

    Returns:
        float32 of shape `(samples,)` at `sampling_rate_hz`.

    Raises:
        FileNotFoundError: there is no such file.
        BadAudioError: as `read_audio`; also when the whole recording is zero, since silence matches no caption.
    """
    with _open(path) as recording:
        duration_seconds = recording.frames / recording.samplerate
    excess_seconds = 0.0 if max_seconds is None else max(0.0, duration_seconds - max_seconds)
    waveform, rate_hz = read_audio(path, crop_position * excess_seconds, max_seconds)
    if not waveform.any() and not read_audio(path)[0].any():
        raise BadAudioError(f"{path} is silent: every sample is zero")
    return resample(waveform, rate_hz, sampling_rate_hz)


def _open(path: str | Path) -> soundfile.SoundFile:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no audio file {path}")
    try:
        recording = soundfile.SoundFile(path)
    except soundfile.SoundFileError as error:
        size = Path(path).stat().st_size
        raise BadAudioError(f"{path} ({size} bytes) is not audio that libsndfile can read: {error}") from error
    announced = re.search(r"data : (\d+) \(should be (\d+)\)", recording.extra_info)
    if announced and int(announced[1]) not in _STREAMED_WAV_SIZES and int(announced[1]) > int(announced[2]):
        recording.close()
        raise BadAudioError(f"{path} is truncated: its header announces {announced[1]} bytes, {announced[2]} are there")
    return recording


def _checked(waveform: np.ndarray, path: str | Path) -> np.ndarray:
    if not len(waveform):
        raise BadAudioError(f"{path} is empty: it holds no samples")
    if not np.isfinite(waveform).all():
        raise BadAudioError(f"{path} holds NaN or infinite samples, the first at {np.argmin(np.isfinite(waveform))}")
    return waveform
