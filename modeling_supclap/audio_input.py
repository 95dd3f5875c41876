"""Convert audio inputs to waveforms. Inputs are paths, URLs, bytes, arrays or values from `datasets.Audio` columns."""

import importlib
import io
import math
import os
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .waveform import resample, to_mono

# A path, a URL, or the bytes of a file.
_FILE = (str, os.PathLike, bytes)
_NUMBER = (int, float, np.integer, np.floating)
_DOWNLOAD_TIMEOUT_SECONDS = 60.0
# Margin to read on both sides of a span, so that resampling has no edge effects within the span.
_MARGIN_SECONDS = 1
# Maximum number of channels (7.1 surround); an axis longer than this contains samples.
MAX_CHANNELS = 8


class Recording(NamedTuple):
    """Audio source that is read on demand.

    Attributes:
        source: A path, a URL, the bytes of a file, an array, a torchcodec decoder, or a function that returns the
            whole waveform at a given sampling rate in hertz.
        rate_hz: Sampling rate of an array in hertz, or None for any other source.
        name: Name for error messages, such as the path or "clip 1".
        channel: Channel of a file to read, from 0. None: the mean of all channels.
    """

    source: Any
    rate_hz: float | None
    name: str
    channel: int | None = None

    @property
    def is_file(self) -> bool:
        """Whether the source is a file that must be decoded."""
        return isinstance(self.source, _FILE)

    def get_seconds(self) -> float:
        """Return the duration in seconds from the file header or the array length, or 0 if it is unknown."""
        try:
            if _is_decoder(self.source):
                return float(self.source.metadata.duration_seconds)
            if self.is_file:
                if (audio := _import_audio()) is not None:
                    return audio.header_seconds(self.source)
                file = io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source
                return importlib.import_module("soundfile").info(file).duration
            return max(np.shape(self.source)) / self.rate_hz
        except Exception:
            return 0.0

    def read(
        self, target_hz: int, start: int = 0, stop: int | None = None, resampling_method: str = "kaiser_best"
    ) -> np.ndarray:
        """Read the samples `start` to `stop` of the recording as a mono waveform (samples,) in float32.

        `start` and `stop` are in samples at `target_hz`. If `stop` is None, the recording is read to its end. Otherwise
        only this part of a file is decoded. `resampling_method` is a key of `RESAMPLING_METHODS`.

        Raises:
            OSError: The file does not exist, or the download fails.
            ValueError: The recording cannot be decoded, is not valid audio, or is an array without a sampling rate.
        """
        source, rate_hz, first = self.source, self.rate_hz, 0
        if callable(source):
            return source(target_hz)[start:stop]
        if self.is_file:
            part: dict[str, Any] = {"channel": self.channel}
            if stop is not None:
                # Start at a whole second, because sample positions of both sampling rates coincide there.
                first = max(0, start // target_hz - _MARGIN_SECONDS)
                seconds = math.ceil(stop / target_hz) + _MARGIN_SECONDS - first
                part |= {"offset_seconds": first, "duration_seconds": seconds}
            waveform, from_hz = _read_file(source, self.name, **part)
            waveform = resample(waveform, from_hz, target_hz, resampling_method)
        else:
            if _is_decoder(source):
                samples = source.get_all_samples()
                source, rate_hz = samples.data, samples.sample_rate
            if source is None:
                raise ValueError(f"{self.name} has no audio: it is None")
            if rate_hz is None:
                raise ValueError(f"{self.name} is an array without a sampling rate; pass sampling_rate=, in hertz")
            waveform = as_waveform(source, rate_hz, target_hz, self.name, resampling_method)
        offset = first * target_hz
        return waveform[start - offset : None if stop is None else stop - offset]


def as_recordings(audio: Any, sampling_rate: Any = None) -> tuple[list[Recording], bool]:
    """Convert audio inputs to a list of recordings.

    Args:
        audio: One recording or a list of recordings, in any format that `encode_audio` accepts.
        sampling_rate: Sampling rate of the arrays in hertz: one value for all, or a list with one value per recording.

    Returns:
        Tuple `(recordings, is_one)`. `is_one` is True if the input was a single recording, not a list.

    Raises:
        ValueError: An array shape is ambiguous, a mapping lacks a required key, a file is open in text mode, or the
            number of sampling rates differs from the number of recordings.

    Example:
        >>> [recording.name for recording in as_recordings(["dog.wav", np.zeros(16000)], 16000)[0]]
        ['dog.wav', 'clip 1']
    """
    clips, is_one = _as_clips(audio)
    rates = one_for_each("sampling_rate", sampling_rate, len(clips), _NUMBER)

    recordings = []
    for index, (clip, rate_hz) in enumerate(zip(clips, rates, strict=True)):
        name = str(clip) if isinstance(clip, (str, os.PathLike)) else f"clip {index}"
        if _is_decoded(clip):
            clip, rate_hz = clip.data, clip.sample_rate
        elif hasattr(clip, "read"):  # an open file
            name, clip = str(getattr(clip, "name", name)), clip.read()
            if isinstance(clip, str):
                raise ValueError(f"{name} is open as text; open it in binary mode, 'rb'")
        elif _is_pair(clip):
            # (rate, samples) from scipy and Gradio, (samples, rate) from torchaudio and librosa
            rate_hz, clip = clip if np.ndim(clip[0]) == 0 else clip[::-1]
        elif isinstance(clip, Mapping):
            # "raw" in the pipelines of transformers
            array = "raw" if "raw" in clip else "array"
            if {array, "sampling_rate"} <= clip.keys():
                clip, rate_hz = clip[array], clip["sampling_rate"]
            elif not clip.keys().isdisjoint(("bytes", "path")):  # a value of `datasets.Audio(decode=False)`
                clip, rate_hz = clip.get("bytes") or clip.get("path"), None
            else:
                keys = sorted(clip)
                raise ValueError(
                    f'{name} has the keys {keys}; it needs "array" and "sampling_rate", "bytes" or "path"'
                )
        recordings.append(Recording(clip, rate_hz, name))

    return recordings, is_one


def one_for_each(name: str, value: Any, count: int, kind: Any) -> list[Any]:
    """Return a list of `count` values: a single value or None is repeated, and a list is returned unchanged.

    Raises:
        ValueError: The list does not have length `count`, or a value is not an instance of `kind`.
    """
    if value is None or isinstance(value, kind):
        return [value] * count
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} is {value!r}, which has the wrong type; pass one value, or a list of them")

    values = list(value)
    if len(values) != count:
        raise ValueError(f"got {len(values)} values of {name} for {count} inputs; pass one, or one for each input")
    for index, single in enumerate(values):
        if not isinstance(single, kind):
            raise ValueError(f"{name}[{index}] is {single!r}, which has the wrong type; pass one value for each input")
    return values


def stack_clips(clips: Sequence[Mapping[str, np.ndarray]], silence: float = 0.0) -> dict[str, np.ndarray]:
    """Stack the model inputs of single clips, `{name: array}`, along a new first axis.

    Inputs of shorter clips are padded at their end: features with `silence`, and masks with 0.

    Example:
        >>> clips = [{"input_features": np.ones(n), "audio_attention_mask": np.ones(n, int)} for n in (1, 2)]
        >>> {name: array.tolist() for name, array in stack_clips(clips, -100.0).items()}
        {'input_features': [[1.0, -100.0], [1.0, 1.0]], 'audio_attention_mask': [[1, 0], [1, 1]]}
    """
    batch = {}
    for name in clips[0]:
        arrays = [clip[name] for clip in clips]
        shape = np.max([array.shape for array in arrays], axis=0)
        padding = silence if name == "input_features" else 0
        batch[name] = np.full((len(arrays), *shape), padding, arrays[0].dtype)
        for row, array in zip(batch[name], arrays, strict=True):
            row[tuple(map(slice, array.shape))] = array
    return batch


def as_waveforms(
    audio: Any, from_hz: float | None, to_hz: int, min_samples: int = 1, resampling_method: str = "kaiser_best"
) -> list[np.ndarray]:
    """Convert one or more clips with `as_waveform`.

    Args:
        audio: One clip (samples,), an array (clips, samples), or a list of clips.
        min_samples: Minimum length of a clip at `to_hz`, in samples.

    Raises:
        ValueError: There are no clips, or a clip is invalid or too short; the message contains the index of the clip.
    """
    is_array = isinstance(audio, (np.ndarray, Tensor))
    if is_array and audio.ndim not in (1, 2):
        shape = tuple(audio.shape)
        raise ValueError(f"audio has shape {shape}; pass one clip (samples,), an array (clips, samples) or a list")
    if not is_array and not isinstance(audio, (list, tuple)):
        kind = type(audio).__name__
        raise ValueError(f"audio must be arrays or lists of numbers, got {kind}; for files, call model.encode_audio")
    if not len(audio):
        raise ValueError("audio contains no clip; pass at least one")
    is_one = audio.ndim == 1 if is_array else isinstance(audio[0], _NUMBER)

    waveforms = []
    for index, clip in enumerate([audio] if is_one else audio):
        waveform = as_waveform(clip, from_hz, to_hz, f"clip {index}", resampling_method)
        if len(waveform) < min_samples:
            seconds, shortest = len(waveform) / to_hz, min_samples / to_hz
            raise ValueError(f"clip {index} lasts {seconds:.4f} s; the minimum is {shortest} s")
        waveforms.append(waveform)
    return waveforms


def as_waveform(
    clip: Any, from_hz: float | None, to_hz: int, name: str = "the clip", resampling_method: str = "kaiser_best"
) -> np.ndarray:
    """Convert a clip to mono float32 at another sampling rate.

    Args:
        clip: (samples,), (channels, samples) or (samples, channels); channels are averaged. Float samples are in
            [-1, 1]; int16 and int32 samples are PCM.
        from_hz: Sampling rate of the clip.
        to_hz: Sampling rate to convert to.
        resampling_method: Key of `RESAMPLING_METHODS`.

    Returns:
        Waveform (samples,) in float32.

    Raises:
        ValueError: The sampling rate is missing or invalid, or the clip is empty, has a wrong shape or type, or
            contains values that are not finite or exceed full scale by 40 dB.

    Example:
        >>> as_waveform(np.array([[8192, 0], [0, 8192]], dtype=np.int16), 16000, 16000).tolist()
        [0.125, 0.125]
    """
    if isinstance(clip, Tensor):
        clip = clip.detach().cpu()
        clip = clip.float() if clip.dtype == torch.bfloat16 else clip
    try:
        samples = np.asarray(clip)
    except ValueError as error:
        raise ValueError(f"{name} cannot be converted to an array: {error}") from error

    if not samples.size:
        raise ValueError(f"{name} is empty, with shape {samples.shape}")
    if samples.dtype.kind in "US":
        raise ValueError(f"{name} has dtype {samples.dtype}, as a path has; read the file, or call model.encode_audio")
    if samples.dtype.kind != "f" and not (samples.dtype.kind == "i" and samples.dtype.itemsize in (2, 4)):
        raise ValueError(f"{name} has dtype {samples.dtype}; pass floats of full scale 1, or int16 or int32 PCM")

    if samples.ndim == 1:
        samples = samples[:, np.newaxis]
    elif samples.ndim != 2 or min(samples.shape) > MAX_CHANNELS:
        raise ValueError(f"{name} has shape {samples.shape}; pass (samples,) or at most {MAX_CHANNELS} channels")
    elif samples.shape[0] <= MAX_CHANNELS:
        samples = samples.T
    if not isinstance(from_hz, _NUMBER) or isinstance(from_hz, bool) or from_hz % 1 != 0:
        raise ValueError(f"sampling_rate is {from_hz!r}; pass one whole number in hertz, for example 16000")
    return resample(to_mono(samples, int(from_hz), name), int(from_hz), to_hz, resampling_method)


def _as_clips(audio: Any) -> tuple[list[Any], bool]:
    """Convert the `audio` argument of `encode_audio` to a list, and return whether it was a single recording."""
    is_object = hasattr(audio, "read") or _is_decoder(audio) or _is_decoded(audio)
    if isinstance(audio, (*_FILE, Mapping)) or is_object or _is_pair(audio):
        return [audio], True

    # other than an array of paths or of arrays
    if isinstance(audio, Tensor) or (isinstance(audio, np.ndarray) and audio.dtype.kind not in "OU"):
        shape = tuple(audio.shape)
        # A second axis of size 8 or less contains channels: (samples, channels), as in soundfile.
        if len(shape) == 1 or (len(shape) == 2 and shape[1] <= MAX_CHANNELS < shape[0]):
            return [audio], True
        if len(shape) != 2 or shape[0] == 2:
            raise ValueError(
                f"got an array of the ambiguous shape {shape}; pass [array] for one recording, list(array) for several"
            )

    clips = list(audio)
    if clips and isinstance(clips[0], _NUMBER):
        return [np.asarray(clips)], True
    return clips, False


def _is_decoder(clip: Any) -> bool:
    """Return whether the input is a torchcodec `AudioDecoder`, as returned by `datasets.Audio`."""
    return hasattr(clip, "get_all_samples")


def _is_decoded(clip: Any) -> bool:
    """Return whether the input is torchcodec's `AudioSamples`, as returned by `get_all_samples` of a decoder."""
    return hasattr(clip, "data") and hasattr(clip, "sample_rate")


def _is_pair(clip: Any) -> bool:
    """Return whether the input is a tuple of an array and its sampling rate, in either order."""
    if not isinstance(clip, tuple) or len(clip) != 2:
        return False
    arrays = sum(isinstance(part, (np.ndarray, Tensor)) for part in clip)
    return arrays == 1 and any(isinstance(part, _NUMBER) for part in clip)


def _import_audio() -> Any:
    """Import the module of the package that reads recordings. Return None if the package is not installed.

    It is imported by name, because a saved model contains a copy of this file as remote code. Without the package, the
    copy reads files with soundfile.
    """
    try:
        return importlib.import_module("modeling_supclap.datasets_scripts.audio")
    except ImportError:
        return None


def _read_file(
    file: Any,
    name: str,
    offset_seconds: float = 0.0,
    duration_seconds: float | None = None,
    channel: int | None = None,
) -> tuple[np.ndarray, int]:
    """Read a file, or a part of it, at its original sampling rate. Return the waveform and the rate."""
    if isinstance(file, str) and file.startswith(("http://", "https://")):
        try:
            with urllib.request.urlopen(file, timeout=_DOWNLOAD_TIMEOUT_SECONDS) as answer:
                file = answer.read()
        except OSError as error:
            raise OSError(f"{name} cannot be downloaded: {error}") from error

    if (audio := _import_audio()) is not None:
        shown = name if isinstance(file, bytes) else None
        return audio.read_audio(file, offset_seconds, duration_seconds, shown, channel)

    soundfile = importlib.import_module("soundfile")
    if not isinstance(file, bytes) and not os.path.isfile(file):
        raise FileNotFoundError(f"there is no audio file {name}")
    try:
        with soundfile.SoundFile(io.BytesIO(file) if isinstance(file, bytes) else file) as opened:
            opened.seek(round(offset_seconds * opened.samplerate))
            num_frames = -1 if duration_seconds is None else round(duration_seconds * opened.samplerate)
            samples = opened.read(num_frames, dtype="float32", always_2d=True)
            return to_mono(samples, opened.samplerate, name, channel), opened.samplerate
    except soundfile.SoundFileError as error:
        advice = 'pip install "supclap[ffmpeg]" reads m4a, mp4, webm and other formats'
        raise ValueError(f"{name} is not audio that soundfile can read: {error}; {advice}") from error
