"""Convert audio inputs to waveforms. Inputs are paths, URLs, bytes, arrays or values from `datasets.Audio` columns."""

import importlib
import io
import math
import os
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from .feature_extraction_ced import MAX_CHANNELS, as_waveform

# A path, a URL, or the bytes of a file.
_FILE = (str, os.PathLike, bytes)
_DOWNLOAD_TIMEOUT_SECONDS = 60.0
# Margin to read on both sides of a span, so that resampling has no edge effects within the span.
_MARGIN_SECONDS = 1


class Recording(NamedTuple):
    """Audio source that is read on demand.

    Attributes:
        source: A path, a URL, the bytes of a file, an array, a torchcodec decoder, or a function that returns the
            whole waveform at a given sampling rate in hertz.
        rate_hz: Sampling rate of an array; None for any other source.
        name: Name for error messages: the path, or the index in the list.
    """

    source: Any
    rate_hz: float | None
    name: str

    @property
    def is_file(self) -> bool:
        """Whether the source is a file that must be decoded."""
        return isinstance(self.source, _FILE)

    def get_seconds(self) -> float:
        """Return the duration in seconds from the file header or the array length. Returns 0 if it is unknown."""
        try:
            if _is_decoder(self.source):
                return float(self.source.metadata.duration_seconds)
            if self.is_file:
                file = io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source
                return importlib.import_module("soundfile").info(file).duration
            return max(np.shape(self.source)) / (self.rate_hz or 1)
        except Exception:
            return 0.0

    def read(self, target_hz: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read the recording, or a part of it, as a mono waveform at a given sampling rate.

        Args:
            target_hz: Sampling rate of the result in hertz.
            start: First sample at `target_hz`. Ignored if `stop` is None, unless the source is a function.
            stop: End sample at `target_hz`, exclusive; None reads the whole recording. With `stop`, only this part of a
                file and a margin of one second are decoded.

        Returns:
            Mono waveform, float32 (samples,).

        Raises:
            OSError: The file does not exist, or the download fails.
            ValueError: The recording is unusable, or the sampling rate of an array is missing.
        """
        source, rate_hz, first = self.source, self.rate_hz, 0
        if callable(source):
            return source(target_hz)[start:stop]
        if self.is_file and stop is not None:
            # Start at a whole second, because sample positions of both sampling rates coincide there.
            first = max(0, start // target_hz - _MARGIN_SECONDS)
            seconds = math.ceil(stop / target_hz) + _MARGIN_SECONDS - first
            source, rate_hz = _read_file(source, self.name, offset_seconds=first, duration_seconds=seconds)
        elif self.is_file:
            source, rate_hz = _read_file(source, self.name)
        elif _is_decoder(source):
            samples = source.get_all_samples()
            source, rate_hz = samples.data, samples.sample_rate

        if rate_hz is None:
            raise ValueError(f"{self.name} is an array without a sampling rate; pass sampling_rate=, in hertz")

        waveform = as_waveform(source, rate_hz, target_hz, self.name)

        return waveform if stop is None else waveform[start - first * target_hz : stop - first * target_hz]


def as_recordings(audio: Any, sampling_rate: Any = None) -> tuple[list[Recording], bool]:
    """Convert audio inputs to a list of recordings.

    Args:
        audio: One recording or a list, see `encode_audio`.
        sampling_rate: Sampling rate of the arrays in hertz: one value for all, or a list with one value per recording.

    Returns:
        Tuple of the recordings, and whether the input was a single recording instead of a list.

    Raises:
        ValueError: An array shape is ambiguous, a mapping lacks a required key, a file is open in text mode, or the
            number of sampling rates differs from the number of recordings.

    Example:
        >>> [recording.name for recording in as_recordings(["dog.wav", np.zeros(16000)], 16000)[0]]
        ['dog.wav', 'clip 1']
    """
    clips, is_one = _as_clips(audio)
    rates = one_for_each("sampling_rate", sampling_rate, len(clips), (int, float, np.number))

    recordings = []

    for index, (clip, rate_hz) in enumerate(zip(clips, rates, strict=True)):
        name = str(clip) if isinstance(clip, (str, os.PathLike)) else f"clip {index}"
        if _is_open_file(clip):
            name, clip = str(getattr(clip, "name", name)), clip.read()
            if isinstance(clip, str):
                raise ValueError(f"{name} is open as text; open it in binary mode, 'rb'")
        elif _is_pair(clip):  # (rate, samples) from scipy and Gradio, (samples, rate) from torchaudio and librosa
            rate_hz, clip = clip if np.ndim(clip[0]) == 0 else clip[::-1]
        elif isinstance(clip, Mapping):
            if {"array", "sampling_rate"} <= clip.keys():
                clip, rate_hz = clip["array"], clip["sampling_rate"]
            elif file := clip.get("bytes") or clip.get("path"):  # a value of `datasets.Audio(decode=False)`
                clip, rate_hz = file, None
            else:
                keys = sorted(clip)
                raise ValueError(f'{name} has the keys {keys}; it needs "array" and "sampling_rate", "bytes" or "path"')
        recordings.append(Recording(clip, rate_hz, name))

    return recordings, is_one


def one_for_each(name: str, value: Any, count: int, kind: Any) -> list[Any]:
    """Expand an option to one value per input.

    Args:
        name: Option name to show in error messages.
        value: A single value or None, which is repeated, or a list with one value per input.
        count: Number of inputs.
        kind: Allowed type, or tuple of types, as in `isinstance`.

    Returns:
        List of `count` values.

    Raises:
        ValueError: The list length is not `count`, or a value has the wrong type.
    """
    if value is None or isinstance(value, kind):
        return [value] * count

    values = list(value)
    if len(values) != count:
        raise ValueError(f"got {len(values)} values of {name} for {count} inputs; pass one, or one for each input")

    for index, single in enumerate(values):
        if not isinstance(single, kind):
            raise ValueError(f"{name}[{index}] is {single!r}, which has the wrong type; pass one value for each input")

    return values


def _as_clips(audio: Any) -> tuple[list[Any], bool]:
    if isinstance(audio, (*_FILE, Mapping)) or _is_decoder(audio) or _is_open_file(audio) or _is_pair(audio):
        return [audio], True

    if isinstance(audio, (np.ndarray, torch.Tensor)):
        shape = tuple(audio.shape)
        # A second axis of size 8 or less contains channels: (samples, channels), as in soundfile.
        if len(shape) == 1 or (len(shape) == 2 and shape[1] <= MAX_CHANNELS < shape[0]):
            return [audio], True
        if len(shape) != 2 or shape[0] == 2:
            raise ValueError(
                f"got an array of the ambiguous shape {shape}; pass [array] for one recording, list(array) for several"
            )
        return list(audio), False

    clips = list(audio)
    if clips and isinstance(clips[0], (int, float, np.number)):
        return [np.asarray(clips)], True

    return clips, False


def _is_decoder(clip: Any) -> bool:
    """Return whether the input is a torchcodec `AudioDecoder`, as returned by `datasets.Audio`."""
    return hasattr(clip, "get_all_samples")


def _is_open_file(clip: Any) -> bool:
    return callable(getattr(clip, "read", None))


def _is_pair(clip: Any) -> bool:
    """Return whether the input is a tuple of an array and its sampling rate, in either order."""
    if not isinstance(clip, tuple) or len(clip) != 2:
        return False
    arrays = sum(isinstance(part, (np.ndarray, torch.Tensor)) for part in clip)
    return arrays == 1 and any(isinstance(part, (int, float, np.number)) for part in clip)


def _read_file(file: Any, name: str, **span: float) -> tuple[np.ndarray, int]:
    """Read a file, or a part of it, at its original sampling rate. Returns the waveform and the rate.

    Uses the package's audio reader, or soundfile if the package is not installed.
    """
    if isinstance(file, str) and file.startswith(("http://", "https://")):
        try:
            with urllib.request.urlopen(file, timeout=_DOWNLOAD_TIMEOUT_SECONDS) as answer:
                file = answer.read()
        except OSError as error:
            raise OSError(f"{name} cannot be downloaded: {error}") from error

    try:
        # Import by name, because this file must also load as remote code without the package.
        audio = importlib.import_module("modeling_supclap.datasets_scripts.audio")
    except ImportError:
        return _read_with_soundfile(file, name, **span)

    return audio.read_audio(file, name=name if isinstance(file, bytes) else None, **span)


def _read_with_soundfile(
    file: Any, name: str, offset_seconds: float = 0.0, duration_seconds: float | None = None
) -> tuple[np.ndarray, int]:
    try:
        soundfile = importlib.import_module("soundfile")
    except ImportError as error:
        raise ImportError(f"cannot read {name} without soundfile: pip install soundfile") from error

    if not isinstance(file, bytes) and not os.path.isfile(file):
        raise FileNotFoundError(f"there is no audio file {name}")

    try:
        with soundfile.SoundFile(io.BytesIO(file) if isinstance(file, bytes) else file) as opened:
            opened.seek(round(offset_seconds * opened.samplerate))
            num_frames = -1 if duration_seconds is None else round(duration_seconds * opened.samplerate)
            return opened.read(num_frames, dtype="float32", always_2d=True).mean(axis=1), opened.samplerate
    except soundfile.SoundFileError as error:
        raise ValueError(f"{name} is not audio that soundfile can read: {error}") from error
