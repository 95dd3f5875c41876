"""A recording, however it is given, as one waveform: paths, bytes, arrays, and what `datasets` makes of them."""

import importlib
import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .feature_extraction_ced import as_waveform

# A path, or what is in the file.
_FILE = (str, os.PathLike, bytes)


def as_recordings(audio: Any) -> tuple[list[Any], bool]:
    """The recordings of a call, and whether it was a single one that was not in a list.

    Args:
        audio: As for `encode_audio`.

    Raises:
        ValueError: It is an array of more than two dimensions.

    Example:
        >>> as_recordings("dog.wav"), as_recordings(("dog.wav", "rain.wav"))
        ((['dog.wav'], True), (['dog.wav', 'rain.wav'], False))
    """
    if isinstance(audio, (*_FILE, Mapping)) or _is_decoder(audio):
        return [audio], True
    if isinstance(audio, (np.ndarray, torch.Tensor)):
        if audio.ndim not in (1, 2):
            raise ValueError(
                f"got an array of shape {tuple(audio.shape)}; give (samples,), (clips, samples), or a list"
            )
        return ([audio], True) if audio.ndim == 1 else (list(audio), False)
    clips = list(audio)
    if clips and isinstance(clips[0], (int, float, np.number)):
        return [np.asarray(clips)], True
    return clips, False


def read_waveform(clip: Any, rate_hz: float | None, target_hz: int, name: str) -> np.ndarray:
    """A recording, however it was given, as mono float32 at the model's rate.

    Args:
        clip: As for `encode_audio`.
        rate_hz: Of an array.
        target_hz: The rate wanted.
        name: What errors call the recording.

    Returns:
        float32, (samples,).

    Raises:
        ValueError: The recording is unusable, or the rate of an array is missing.
        ImportError: It is a file, and the package is not installed.
    """
    if isinstance(clip, Mapping):
        clip, rate_hz = _inside(clip, name)
    if isinstance(clip, _FILE):
        clip, rate_hz = _read(clip, name)
    elif _is_decoder(clip):
        samples = clip.get_all_samples()
        clip, rate_hz = samples.data, samples.sample_rate
    if rate_hz is None:
        raise ValueError(f"{name} is an array whose rate is not known; pass sampling_rate=, in hertz")
    return as_waveform(clip, rate_hz, target_hz, name)


def seconds_of(clip: Any, rate_hz: float | None) -> float:
    """How long a recording is, to sort by; 0 where that cannot be told, for whoever reads the clip raises the error.

    Args:
        clip: As for `read_waveform`.
        rate_hz: Of an array.
    """
    try:
        if isinstance(clip, Mapping):
            clip, rate_hz = _inside(clip, "the clip")
        if _is_decoder(clip):
            return float(clip.metadata.duration_seconds)
        if isinstance(clip, _FILE):
            opened = io.BytesIO(clip) if isinstance(clip, bytes) else clip
            return importlib.import_module("soundfile").info(opened).duration
        return np.shape(clip)[-1] / (rate_hz or 1)
    except Exception:
        return 0.0


def name_of(clip: Any, index: int) -> str:
    """What errors call a recording: its path, or its place in the list.

    Args:
        clip: As for `read_waveform`.
        index: Its place.
    """
    return str(clip) if isinstance(clip, (str, os.PathLike)) else f"clip {index}"


def _is_decoder(clip: Any) -> bool:
    """Whether this is torchcodec's `AudioDecoder`, which `datasets.Audio` gives."""
    return hasattr(clip, "get_all_samples")


def _inside(clip: Mapping[str, Any], name: str) -> tuple[Any, float | None]:
    """The array of a mapping with its rate, or the file as `datasets.Audio(decode=False)` gives it."""
    if {"array", "sampling_rate"} <= clip.keys():
        return clip["array"], clip["sampling_rate"]
    if file := clip.get("bytes") or clip.get("path"):
        return file, None
    raise ValueError(f'{name} has the keys {sorted(clip)}; give "array" and "sampling_rate", or a path')


def _read(file: Any, name: str) -> tuple[np.ndarray, int]:
    try:
        # By name: a folder that was uploaded with this file must load where the package is missing.
        audio = importlib.import_module("modeling_supclap.datasets_scripts.audio")
    except ImportError as error:
        raise ImportError(
            f"cannot read {name}: files are read by the supclap package, which does not import here ({error}); read "
            "it yourself, for example with soundfile, and give arrays with sampling_rate="
        ) from error
    return audio.read_audio(file, name=name if isinstance(file, bytes) else None)
