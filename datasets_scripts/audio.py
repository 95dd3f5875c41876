"""From a recording, on disk or in memory, to a mono waveform, or an error that names it.

libsndfile decodes (wav, flac, ogg, mp3); FFmpeg, by way of torchcodec, what libsndfile does not know (m4a, aac, ...).
Whatever decoded it, one resampler changes the rate, so that numbers do not depend on the format of the files.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import soundfile
import torch
import torchaudio

Source: TypeAlias = str | Path | bytes
"""A file, or the encoded bytes of one."""

# A WAV written to a pipe announces one of these sizes because its length was not known yet: nothing is missing.
_STREAMED_WAV_SIZES = {0x7FFFFFFF, 0x7FFFFFFF - 36, 0xFFFFFFFF, 0xFFFFFFFF - 36}

# How files begin: MP4 (m4a); all that FFmpeg surely reads, also Matroska and WebM, ASF (wma), raw AAC; and those that
# libsndfile knows best, so that a broken one is not read in part after all.
_MP4 = re.compile(rb"....ftyp", re.DOTALL)
_FFMPEG = re.compile(rb"....ftyp|\x1a\x45\xdf\xa3|\x30\x26\xb2\x75|\xff[\xf0\xf1\xf8\xf9]|ADIF", re.DOTALL)
_LIBSNDFILE = re.compile(rb"RIFF|RIFX|RF64|FORM|fLaC|OggS|ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]", re.DOTALL)

# Encoders pad the last frame and players drop a first one; more than this much sound is not lost by either.
_MP4_TOLERANCE_SECONDS = 0.1


class BadAudioError(ValueError):
    """A recording that exists but holds no usable sound; the message names the file and what is wrong with it."""


class MissingDecoderError(BadAudioError):
    """A recording that this machine cannot read for want of FFmpeg's libraries; the message says what to install."""


def read_audio(
    source: Source, offset_seconds: float = 0.0, duration_seconds: float | None = None, name: str | None = None
) -> tuple[np.ndarray, int]:
    """Reads a recording (wav, flac, ogg, mp3, m4a, ...) as the mean of its channels, at its own sampling rate.

    Args:
        source: the file, or its bytes.
        offset_seconds: where to begin reading.
        duration_seconds: how much to read at most; `None` reads to the end.
        name: what errors call the recording; default, its path.

    Returns:
        The waveform, float32 of shape `(samples,)`, full scale 1.0, and its sampling rate in Hz.

    Raises:
        FileNotFoundError: there is no such file.
        BadAudioError: the file is no audio, is truncated or empty, or holds NaN or infinite samples; a
            `MissingDecoderError` where FFmpeg would read it but is not installed.
    """
    name = _name_of(source) if name is None else name
    recording = _open(source, name)
    if isinstance(recording, soundfile.SoundFileError):
        waveform, rate_hz = _decode_with_ffmpeg(source, name, recording)
        start = round(offset_seconds * rate_hz)
        stop = None if duration_seconds is None else start + round(duration_seconds * rate_hz)
        return _checked(waveform[start:stop], name), rate_hz
    with recording:
        rate_hz = recording.samplerate
        recording.seek(min(round(offset_seconds * rate_hz), recording.frames))
        remaining = recording.frames - recording.tell()
        wanted = remaining if duration_seconds is None else min(remaining, round(duration_seconds * rate_hz))
        try:
            samples = recording.read(wanted, dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            raise BadAudioError(
                f"{name} stops in the middle of its data and is probably truncated: {_first_line(error)}"
            ) from error
    if len(samples) < wanted:
        raise BadAudioError(f"{name} is truncated: {len(samples)} of {wanted} samples could be read")
    return _checked(samples.mean(axis=1), name), rate_hz


def load_clip(
    source: Source,
    sampling_rate_hz: int,
    max_seconds: float | None = None,
    crop_position: float = 0.0,
    name: str | None = None,
) -> np.ndarray:
    """A recording at the model's rate, cropped when it is too long, and certain to hold sound.

    Args:
        source: the file, or its bytes.
        sampling_rate_hz: the rate wanted, usually the feature extractor's.
        max_seconds: longer recordings are cropped to this; `None` keeps everything.
        crop_position: where the crop lies, from 0 (the beginning) to 1 (the end); drawn at random in training.
        name: what errors call the recording; default, its path.

    Returns:
        float32 of shape `(samples,)` at `sampling_rate_hz`.

    Raises:
        FileNotFoundError: there is no such file.
        BadAudioError: as `read_audio`; also when the whole recording is zero, since silence matches no caption.
    """
    name = _name_of(source) if name is None else name
    if max_seconds is None:
        waveform, rate_hz = read_audio(source, name=name)
        silent = not waveform.any()
    else:
        excess_seconds = max(0.0, _duration_seconds(source, name) - max_seconds) if crop_position else 0.0
        waveform, rate_hz = read_audio(source, crop_position * excess_seconds, max_seconds, name)
        silent = not waveform.any() and not read_audio(source, name=name)[0].any()
    if silent:
        raise BadAudioError(f"{name} is silent: every sample is zero")
    return resample(waveform, rate_hz, sampling_rate_hz)


def read_row(
    row: Mapping[str, Any], sampling_rate_hz: int, max_seconds: float | None = None, crop_position: float = 0.0
) -> np.ndarray:
    """The sound of a row, from wherever the row has it.

    That is `samples` with `sampling_rate_hz` (int16, as prepared sets store it), or `audio` (the bytes of a file, as
    prepared sets embed it, or what `datasets.Audio` makes of them), or else the file `audio_path`.

    Args:
        row: a row of the schema.
        sampling_rate_hz: as `load_clip`.
        max_seconds: as `load_clip`.
        crop_position: as `load_clip`.

    Returns:
        float32 of shape `(samples,)` at `sampling_rate_hz`.

    Raises:
        FileNotFoundError: there is no such file.
        BadAudioError: as `load_clip`; the message names the clip too.

    >>> row = {"clip_id": "a", "samples": np.array([16384, -32768], "<i2").tobytes(), "sampling_rate_hz": 16000}
    >>> read_row(row, 16000)
    array([ 0.5, -1. ], dtype=float32)
    """
    name = f"{row.get('audio_path', 'the audio')} (clip {row.get('clip_id')!r})"
    crop: dict[str, Any] = {"max_seconds": max_seconds, "crop_position": crop_position}
    if row.get("samples") is not None:
        stored = np.frombuffer(row["samples"], dtype="<i2")
        return _from_samples(stored, row["sampling_rate_hz"], sampling_rate_hz, name, **crop)
    audio = row.get("audio")
    if audio is None:
        return load_clip(row["audio_path"], sampling_rate_hz, name=name, **crop)
    if isinstance(audio, Mapping) and "array" not in audio:
        source = audio.get("bytes") or audio.get("path") or row["audio_path"]
        return load_clip(source, sampling_rate_hz, name=name, **crop)
    waveform = np.asarray(audio["array"], dtype=np.float32)
    return _from_samples(waveform, audio["sampling_rate"], sampling_rate_hz, name, **crop)


def resample(waveform: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """A waveform at another rate, by the same torchaudio interpolation as `CEDFeatureExtractor`: one for all numbers.

    Args:
        waveform: float32, `(samples,)`.
        from_hz: its rate.
        to_hz: the rate wanted.

    Returns:
        float32, `(ceil(samples * to_hz / from_hz),)`; the very same array where the rates agree.

    >>> resample(np.zeros(44100, dtype=np.float32), 44100, 16000).shape
    (16000,)
    """
    if from_hz == to_hz:
        return waveform
    return _resampler(from_hz, to_hz)(torch.from_numpy(waveform)).numpy()


def to_int16(waveform: np.ndarray) -> np.ndarray:
    """Rounds a waveform to 16 bits; what exceeds full scale, as resampling may, is clipped.

    >>> to_int16(np.array([0.5, -1.0, 1.5], dtype=np.float32))
    array([ 16384, -32768,  32767], dtype=int16)
    """
    return np.clip(np.rint(waveform * 32768.0), -32768, 32767).astype("<i2")


def use_threads(count: int = 1) -> int:
    """Sets torch's threads in this process: one is fastest for clips one by one, and gives the same bits everywhere.

    Returns:
        The number before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    return before


@lru_cache(maxsize=8)
def _resampler(from_hz: int, to_hz: int) -> torchaudio.transforms.Resample:
    return torchaudio.transforms.Resample(from_hz, to_hz)


def _from_samples(
    samples: np.ndarray, from_hz: int, to_hz: int, name: str, max_seconds: float | None, crop_position: float
) -> np.ndarray:
    """As `load_clip`, from samples in memory; int16 ones are scaled to floats after the crop."""
    length = len(samples) if max_seconds is None else min(len(samples), round(max_seconds * from_hz))
    start = round(crop_position * (len(samples) - length))
    part = samples[start : start + length]
    if part.dtype == np.int16:
        part = part.astype(np.float32) * np.float32(1 / 32768)
    if not _checked(part, name).any() and not samples.any():
        raise BadAudioError(f"{name} is silent: every sample is zero")
    return resample(part, from_hz, to_hz)


def _name_of(source: Source) -> str:
    return f"a recording of {len(source)} bytes" if isinstance(source, bytes) else str(source)


def _duration_seconds(source: Source, name: str) -> float:
    recording = _open(source, name)
    if isinstance(recording, soundfile.SoundFileError):
        waveform, rate_hz = _decode_with_ffmpeg(source, name, recording)
        return len(waveform) / rate_hz
    with recording:
        return recording.frames / recording.samplerate


def _open(source: Source, name: str) -> soundfile.SoundFile | soundfile.SoundFileError:
    """The recording as libsndfile opens it, or why it does not; the latter only where FFmpeg is worth a try."""
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise FileNotFoundError(f"there is no audio file {name}")
    if not _size(source):
        raise BadAudioError(f"{name} is empty: 0 bytes")
    try:
        recording = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source)
    except soundfile.SoundFileError as error:
        if _LIBSNDFILE.match(_head(source)):
            raise _not_audio(source, name, "libsndfile", error) from error
        return error
    announced = re.search(r"data : (\d+) \(should be (\d+)\)", recording.extra_info)
    if announced and int(announced[1]) not in _STREAMED_WAV_SIZES and int(announced[1]) > int(announced[2]):
        recording.close()
        raise BadAudioError(f"{name} is truncated: its header announces {announced[1]} bytes, {announced[2]} are there")
    return recording


def _decode_with_ffmpeg(source: Source, name: str, refusal: Exception) -> tuple[np.ndarray, int]:
    """Decodes all of a recording: these formats seek to frames of their own, so that a part would not be exact."""
    try:
        from torchcodec.decoders import AudioDecoder
    except Exception as error:  # without FFmpeg's libraries it is a RuntimeError or an OSError
        if not _FFMPEG.match(_head(source)):
            raise _not_audio(source, name, "libsndfile", refusal) from refusal
        raise MissingDecoderError(
            f"{name} needs FFmpeg, which torchcodec does not find here ({_first_line(error)}); install FFmpeg 4 to 8 "
            "(apt-get install ffmpeg, conda install ffmpeg) and torchcodec, or convert the file to FLAC"
        ) from error
    try:
        decoder = AudioDecoder(source if isinstance(source, bytes) else str(source))
        announced_seconds, rate_hz = decoder.metadata.duration_seconds_from_header, decoder.metadata.sample_rate
        waveform = decoder.get_all_samples().data.mean(dim=0).numpy()
    except Exception as error:
        raise _not_audio(source, name, "libsndfile or FFmpeg", error) from error
    if announced_seconds is None or not _MP4.match(_head(source)):
        return waveform, rate_hz
    announced = round(announced_seconds * rate_hz)
    if len(waveform) < announced - _MP4_TOLERANCE_SECONDS * rate_hz:
        raise BadAudioError(f"{name} is truncated: {len(waveform)} of {announced} samples could be read")
    return waveform[:announced], rate_hz


def _not_audio(source: Source, name: str, readers: str, error: Exception) -> BadAudioError:
    return BadAudioError(f"{name} ({_size(source)} bytes) is not audio that {readers} can read: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """What a decoder says, without the address of the bytes or the line of its own source."""
    said = getattr(error, "error_string", None) or str(error) or type(error).__name__
    return re.sub(r"^\w+, \S+\.cpp:\d+, ", "", said.splitlines()[0])


def _size(source: Source) -> int:
    return len(source) if isinstance(source, bytes) else Path(source).stat().st_size


def _head(source: Source) -> bytes:
    if isinstance(source, bytes):
        return source[:16]
    with open(source, "rb") as file:
        return file.read(16)


def _checked(waveform: np.ndarray, name: str) -> np.ndarray:
    if not len(waveform):
        raise BadAudioError(f"{name} is empty: it holds no samples")
    if not np.isfinite(waveform).all():
        raise BadAudioError(f"{name} holds NaN or infinite samples, the first at {np.argmin(np.isfinite(waveform))}")
    return waveform
