"""Read recordings from disk or memory as mono waveforms, with errors that name the file."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from modeling_supclap.waveform import BadAudioError, resample

from .decoders import WHOLE, Address, MissingDecoderError, Samples, Segment, Sound, Source, naming, open_recording

__all__ = [
    "WHOLE",
    "Address",
    "BadAudioError",
    "MissingDecoderError",
    "Segment",
    "Source",
    "content_of",
    "header_seconds",
    "naming",
    "open_recording",
    "open_row",
    "read_audio",
    "read_recording",
    "read_row",
    "resample",
    "segment_of",
    "to_int16",
]


def read_audio(
    source: Source,
    offset_seconds: float = 0.0,
    duration_seconds: float | None = None,
    name: str | None = None,
    channel: int | None = None,
) -> tuple[np.ndarray, int]:
    """Read an audio file (wav, flac, ogg, mp3, m4a, ...) as a mono waveform, without resampling.

    Args:
        duration_seconds: Maximum length in seconds. None: read to the end.
        name: Name to show in error messages; defaults to the path.
        channel: Channel to read, from 0. None: the mean of all channels.

    Returns:
        Mean of all channels or one of them, float32 `(samples,)` with full scale 1.0, and the sampling rate in Hz.

    Raises:
        FileNotFoundError: The file does not exist.
        BadAudioError: The file is not audio, is truncated or empty, contains samples that are NaN, infinite or far
            above full scale, or has a sampling rate below 200 Hz or above 10 MHz.
        MissingDecoderError: The file requires FFmpeg, but PyAV is not installed.
    """
    name = _name_of(source) if name is None else name
    if isinstance(source, str) and "://" in source:
        source = Address(source)
    recording = open_recording(source, name, (None, None, channel))
    start = round(offset_seconds * recording.rate_hz)
    count = None if duration_seconds is None else round(duration_seconds * recording.rate_hz)
    return recording.read_mono(start, count), recording.rate_hz


def header_seconds(source: Source) -> float:
    """Return the length of a recording in seconds by its header, or by counting samples if it has no length there."""
    recording = open_recording(source, _name_of(source))
    return recording.frames / recording.rate_hz


def _name_of(source: Source) -> str:
    return f"a recording of {len(source)} bytes" if isinstance(source, bytes) else str(source)


def segment_of(row: Mapping[str, Any]) -> Segment:
    """Return the start, the end and the channel of a row's part of a recording; `WHOLE` for a whole recording."""
    return row.get("start_seconds"), row.get("end_seconds"), row.get("channel")


def content_of(row: Mapping[str, Any]) -> bytes | str:
    """Return the audio in a row as bytes, or the path of its file. The bytes of samples include how to read them."""
    audio = row.get("audio")
    if row.get("samples") is not None:
        return bytes(row["samples"]) + str(row["sampling_rate_hz"]).encode()
    if audio is None or (isinstance(audio, Mapping) and "array" not in audio):
        source: bytes | str = (audio or {}).get("bytes") or (audio or {}).get("path") or row["audio_path"]
        return source
    array = np.asarray(audio["array"])
    return array.tobytes() + f"{array.dtype} {array.shape} {audio['sampling_rate']}".encode()


def open_row(row: Mapping[str, Any]) -> Sound:
    """Open the recording of a row, or its segment. `read_row` describes the columns."""
    name = f"{row.get('audio_path', 'the audio')} (clip {row.get('clip_id')!r})"
    if row.get("samples") is not None:
        samples = np.frombuffer(row["samples"], dtype="<i2")
        return Sound(partial(Samples, samples, row["sampling_rate_hz"]), name)
    audio, segment = row.get("audio"), segment_of(row)
    if audio is not None and (not isinstance(audio, Mapping) or "array" in audio):
        return Sound(partial(Samples, np.asarray(audio["array"]), audio["sampling_rate"]), name, segment)
    return open_recording(content_of(row), name, segment)


def find_crop(frames: int, rate_hz: int, max_seconds: float | None) -> tuple[int, int]:
    """Return the length of a recording's crop, and the largest start of a crop, in samples.

    The start is 0 if the recording is at most a hundredth longer: an encoder adds some samples to a clip of 5 s, and
    all epochs should contain the same part of it.

    >>> find_crop(220_544, 44_100, 5.0), find_crop(250_500, 44_100, 5.0), find_crop(9, 44_100, None)
    ((220500, 0), (220500, 30000), (9, 0))
    """
    length = frames if max_seconds is None else min(frames, round(max_seconds * rate_hz))
    excess = frames - length
    return length, excess if excess > 0.01 * length else 0


def read_row(
    row: Mapping[str, Any],
    sampling_rate_hz: int,
    max_seconds: float | None = None,
    crop_position: float = 0.0,
    from_first_sound: bool = False,
    min_seconds: float = 0.0,
    pad_short_clips: bool = False,
    resampling_method: str = "kaiser_best",
) -> np.ndarray:
    """Load the waveform of a row, float32 `(samples,)`, cropped to the maximum length and resampled.

    The waveform comes from the first available column: `samples` with `sampling_rate_hz` (int16 samples of a prepared
    dataset), `audio` (file bytes of a prepared dataset, or a `datasets.Audio` value), or `audio_path` (a file). If the
    row has a start and an end (`schema.SEGMENT_COLUMNS`), only this part of a file or of its bytes is read. If it has a
    `channel`, only this channel is.

    Args:
        max_seconds: Maximum length in seconds; longer recordings are cropped. None: no cropping.
        crop_position: Position of the crop, from 0 (beginning) to 1 (end); training uses random positions.
        from_first_sound: Whether to replace a silent crop with one that starts at the first nonzero sample.
        min_seconds: Minimum length that the model accepts, such as 0.15 s for CED.
        pad_short_clips: Whether to append zeros to a shorter clip, instead of raising an error.
        resampling_method: As in `SupCLAPProcessor`.

    Raises:
        FileNotFoundError: The file does not exist.
        BadAudioError: `read_audio` raises, all samples are zero, or the clip is shorter than `min_seconds` and is not
            padded. The message contains the file name and the clip id.

    >>> row = {"clip_id": "a", "samples": np.array([16384, -32768], "<i2").tobytes(), "sampling_rate_hz": 16000}
    >>> read_row(row, 16000)
    array([ 0.5, -1. ], dtype=float32)
    """
    recording = open_row(row)
    rate_hz, name = recording.rate_hz, recording.label
    length, last_start = find_crop(recording.frames, rate_hz, max_seconds)
    part = recording.read_mono(round(crop_position * last_start), length)
    if not part.any():
        whole = recording.read_mono(0, None)
        if not whole.any():
            raise BadAudioError(f"{name} is silent: every sample is zero")
        if from_first_sound:
            part = whole[np.argmax(whole != 0) :][:length]

    clip = resample(part, rate_hz, sampling_rate_hz, resampling_method)
    if len(clip) < min_seconds * sampling_rate_hz:
        if pad_short_clips:
            return np.pad(clip, (0, math.ceil(min_seconds * sampling_rate_hz) - len(clip)))
        seconds = len(clip) / sampling_rate_hz
        raise BadAudioError(f"{name} lasts {seconds:.4f} s; the model requires at least {min_seconds} s")
    return clip


def read_recording(source: Source, name: str, rate_hz: int, segment: Segment = WHOLE) -> np.ndarray:
    """Read and check a recording or its segment, in blocks to save memory; return int16 `(samples,)` at `rate_hz`.

    Raises:
        BadAudioError: The recording is missing, corrupt, empty or silent, or decoding fails for another reason.
        MissingDecoderError: FFmpeg is required but PyAV is not installed, so the recording may be fine.
    """
    parts, is_sound = [], False
    # At 16 kHz, the rate of CED, as CED reads recordings, so that it gets the same samples from prepared ones.
    method = "sinc_interp_hann" if rate_hz == 16_000 else "kaiser_best"
    with naming(name):
        recording = open_recording(source, name, segment)
        from_hz = recording.rate_hz
        # Samples that are not resampled yet. The first `margin` seconds are only context for the resampling filter.
        pending, margin = np.zeros(0, np.float32), 0

        for part in recording.parts():
            is_sound = is_sound or bool(part.any())
            # Resample all whole seconds except the last one, because samples of both rates coincide at whole seconds.
            seconds = len(pending) // from_hz - 1
            if seconds > margin:
                resampled = resample(pending[: (seconds + 1) * from_hz], from_hz, rate_hz, method)
                parts.append(to_int16(resampled[margin * rate_hz : seconds * rate_hz]))
                pending, margin = pending[(seconds - 1) * from_hz :], 1
            pending = np.concatenate([pending, part])
        parts.append(to_int16(resample(pending, from_hz, rate_hz, method)[margin * rate_hz :]))

    samples = np.concatenate(parts)
    if not samples.any():
        why = "it is too quiet for 16 bits" if is_sound else "every sample is zero"
        raise BadAudioError(f"{name} is silent: {why}")
    return samples


def to_int16(waveform: np.ndarray) -> np.ndarray:
    """Convert a float waveform to int16; samples above full scale, which resampling can produce, are clipped.

    >>> to_int16(np.array([0.5, -1.0, 1.5], dtype=np.float32))
    array([ 16384, -32768,  32767], dtype=int16)
    """
    return np.clip(np.rint(waveform * 32768.0), -32768, 32767).astype("<i2")
