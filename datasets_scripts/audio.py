"""Read recordings from disk or memory as mono waveforms, with errors that name the file.

libsndfile decodes wav, flac, ogg and mp3; FFmpeg (through torchcodec) decodes other formats (m4a, aac, ...).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import soundfile

from modeling_supclap.waveform import LEAST_RATE_HZ, MAX_AMPLITUDE, MOST_RATE_HZ
from modeling_supclap.waveform import resample as resample_waveform

from .audio_headers import announce_mp3_frames, ends_as_ogg
from .remote_files import read_file

Source: TypeAlias = str | Path | bytes
"""Path or fsspec address of an audio file, or the encoded bytes of the file."""


class Address(str):
    """Remote address of a recording, passed by the user. For safety, plain strings in rows are never downloaded."""


# First bytes of the formats that FFmpeg decodes: MP4 (m4a), QuickTime, Matroska, ASF (wma), raw AAC, WavPack, AMR.
_MP4 = re.compile(rb"....(?:ftyp|moov|mdat|wide)", re.DOTALL)
_FFMPEG = re.compile(
    _MP4.pattern + rb"|\x1a\x45\xdf\xa3|\x30\x26\xb2\x75|\xff[\xf0\xf1\xf8\xf9]|ADIF|wvpk|#!AMR", re.DOTALL
)
# Playlists can follow such first bytes. FFmpeg would recognise the playlist and fetch the files listed in it.
_PLAYLIST = re.compile(rb"<MPD|#EXTM3U|ffconcat|c=IN IP|://", re.IGNORECASE)

# First bytes of the formats that only libsndfile may decode. FFmpeg would decode a part of a broken file without an
# error.
_LIBSNDFILE = re.compile(rb"RIFF|RIFX|RF64|FORM|fLaC|OggS|ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]", re.DOTALL)
_MP3 = re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]", re.DOTALL)

# Allowed difference between decoded and announced length: encoders pad the last frame, and players drop the first one.
_MP4_TOLERANCE_SECONDS = 0.1

# Announced and actual size of the data chunk in the libsndfile log (WAV, AIFF, Wave64, RF64, AU). libsndfile reads a
# truncated file as if it were complete.
_ANNOUNCED = re.compile(r"^ *(?:data|SSND|riff|Riff size|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
# Placeholder sizes in a WAV or AU file that was written to a pipe with unknown length: the file is not truncated.
_STREAMED_SIZES = (0x7FFFFFFF, 0x7FFFFFFF - 36, 0xFFFFFFFF, 0xFFFFFFFF - 36)

_BLOCK_FRAMES = 2**22  # frames per read, because a header may announce more frames than fit in memory
_MOST_FRAMES = 2**40  # libsndfile reports at least this many frames for a FLAC that was written to a pipe


class BadAudioError(ValueError):
    """Error for a recording without usable audio; the message contains the file name and the problem."""


class MissingDecoderError(BadAudioError):
    """Error for a recording that requires FFmpeg if FFmpeg is not installed; the message explains how to install it."""


def read_audio(
    source: Source, offset_seconds: float = 0.0, duration_seconds: float | None = None, name: str | None = None
) -> tuple[np.ndarray, int]:
    """Read an audio file (wav, flac, ogg, mp3, m4a, ...) as a mono waveform, without resampling.

    Args:
        duration_seconds: Maximum length in seconds. None: read to the end.
        name: Name to show in error messages; defaults to the path.

    Returns:
        Mean of all channels, float32 `(samples,)` with full scale 1.0, and the sampling rate in Hz.

    Raises:
        FileNotFoundError: The file does not exist.
        BadAudioError: The file is not audio, is truncated or empty, contains samples that are NaN, infinite or far
            above full scale, or has a sampling rate below 200 Hz or above 10 MHz.
        MissingDecoderError: The file requires FFmpeg, but FFmpeg is not installed.
    """
    if name is None:
        name = f"a recording of {len(source)} bytes" if isinstance(source, bytes) else str(source)
    if isinstance(source, str) and "://" in source:
        source = Address(source)
    with closing(_open(source, name)) as recording:
        start = round(offset_seconds * recording.rate_hz)
        count = None if duration_seconds is None else round(duration_seconds * recording.rate_hz)
        return recording.read_mono(start, count), recording.rate_hz


def header_seconds(source: Source) -> float:
    """Return the length in seconds of a file that libsndfile reads, or 0.0 if its header has no length.

    The frames of an MP3 without a frame count are counted, because the estimate of libsndfile can be wrong by minutes.
    """
    if _MP3.match(_read_part(source, 0, 16)):
        source = announce_mp3_frames(_read_part(source, 0))
    info = soundfile.info(io.BytesIO(source) if isinstance(source, bytes) else source)
    return info.duration if info.frames < _MOST_FRAMES else 0.0


def measure_audio(source: Source, name: str) -> tuple[float, bool]:
    """Return the length of a recording in seconds, and whether any sample is nonzero."""
    samples, is_sound = 0, False
    with closing(_open(source, name)) as recording:
        for part in recording.parts():
            samples += len(part)
            is_sound = is_sound or bool(part.any())
        return samples / recording.rate_hz, is_sound


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
    dataset), `audio` (file bytes of a prepared dataset, or a `datasets.Audio` value), or `audio_path` (a file).

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
    name = f"{row.get('audio_path', 'the audio')} (clip {row.get('clip_id')!r})"
    audio = row.get("audio")

    recording: _Samples | _File
    if row.get("samples") is not None:
        recording = _Samples(np.frombuffer(row["samples"], dtype="<i2"), row["sampling_rate_hz"], name)
    elif audio is None:
        recording = _open(row["audio_path"], name)
    elif isinstance(audio, Mapping) and "array" not in audio:
        recording = _open(audio.get("bytes") or audio.get("path") or row["audio_path"], name)
    else:
        recording = _Samples(np.asarray(audio["array"], dtype=np.float32), audio["sampling_rate"], name)

    with closing(recording):
        frames, rate_hz = recording.frames, recording.rate_hz
        length = frames if max_seconds is None else min(frames, round(max_seconds * rate_hz))
        part = recording.read_mono(round(crop_position * (frames - length)), length)
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


def resample(waveform: np.ndarray, from_hz: int, to_hz: int, resampling_method: str = "kaiser_best") -> np.ndarray:
    """Resample a waveform with `waveform.resample`.

    The result is float32, `(ceil(samples * to_hz / from_hz),)`, or the input itself if both rates are equal. A rate
    below 200 Hz or above 10 MHz raises BadAudioError.

    >>> resample(np.zeros(44100, dtype=np.float32), 44100, 16000).shape
    (16000,)
    """
    if from_hz == to_hz:
        return waveform
    for rate_hz in (from_hz, to_hz):
        _check_rate(rate_hz, "a waveform")
    return resample_waveform(waveform, from_hz, to_hz, resampling_method)


def read_int16(source: Source, name: str, rate_hz: int) -> tuple[np.ndarray, bool]:
    """Read and resample a recording to int16 `(samples,)`, in blocks to avoid storing all of it as floats.

    Also return whether any sample was nonzero before rounding.
    """
    parts, is_sound = [], False
    # At 16 kHz, the rate of CED, as CED reads recordings, so that it gets the same samples from prepared ones.
    method = "sinc_interp_hann" if rate_hz == 16_000 else "kaiser_best"
    with closing(_open(source, name)) as recording:
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
    return np.concatenate(parts), is_sound


def to_int16(waveform: np.ndarray) -> np.ndarray:
    """Convert a float waveform to int16; samples above full scale, which resampling can produce, are clipped.

    >>> to_int16(np.array([0.5, -1.0, 1.5], dtype=np.float32))
    array([ 16384, -32768,  32767], dtype=int16)
    """
    return np.clip(np.rint(waveform * 32768.0), -32768, 32767).astype("<i2")


class _Samples:
    """Recording in memory: float samples, or int16 samples that `read_mono` converts to float."""

    def __init__(self, samples: np.ndarray, rate_hz: int, label: str) -> None:
        self.samples, self.frames, self.rate_hz, self.label = samples, len(samples), _check_rate(rate_hz, label), label

    def read_mono(self, start: int, count: int | None) -> np.ndarray:
        part = self.samples[start : None if count is None else start + count]
        if part.dtype == np.int16:
            part = part.astype(np.float32) * np.float32(1 / 32768)
        return _check_samples(part, self.label)

    def parts(self) -> Iterator[np.ndarray]:
        yield self.read_mono(0, None)

    def close(self) -> None:
        pass


class _File(soundfile.SoundFile):
    """Recording in a file that libsndfile decodes block by block."""

    def __init__(self, file: Any, label: str) -> None:
        super().__init__(file)
        self.label, self.rate_hz = label, _check_rate(self.samplerate, label)

    def seekable(self) -> bool:
        # soundfile would seek after each read, which fails at the end of a FLAC file with unknown length.
        return False

    def read_mono(self, start: int, count: int | None) -> np.ndarray:
        parts = list(self.parts(start, count))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        start, done = min(start, self.frames), 0
        num_frames = self.frames - start if count is None else min(count, self.frames - start)
        try:
            if super().seekable():
                self.seek(start)
            while done < num_frames:
                block = self.read(min(_BLOCK_FRAMES, num_frames - done), dtype="float32", always_2d=True)
                if not len(block):
                    break
                yield _check_samples(block.mean(axis=1), self.label, done)  # (frames, channels) -> (frames,)
                done += len(block)
        except soundfile.SoundFileError as error:
            problem = f"ends within its data, probably truncated: {_first_line(error)}"
            raise BadAudioError(f"{self.label} {problem}") from error

        if done < num_frames and self.frames < _MOST_FRAMES:
            raise BadAudioError(f"{self.label} is truncated: {done} of {num_frames} samples could be read")
        if not done:
            raise BadAudioError(f"{self.label} is empty: it contains no samples")


def _open(source: Source, name: str) -> _Samples | _File:
    """Open a recording with libsndfile; if libsndfile does not support the format, decode all of it with FFmpeg."""
    if isinstance(source, Address):
        source = read_file(source, lambda file: file.read())
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise FileNotFoundError(f"there is no audio file {name}")
    head = _read_part(source, 0, 16)
    if not head:
        raise BadAudioError(f"{name} is empty: 0 bytes")

    if _MP3.match(head):
        source = announce_mp3_frames(_read_part(source, 0))
    try:
        file = _File(io.BytesIO(source) if isinstance(source, bytes) else source, name)
    except soundfile.SoundFileError as error:
        if _LIBSNDFILE.match(head):
            raise _not_audio(source, name, "libsndfile", error) from error
        return _Samples(*_decode_with_ffmpeg(_read_part(source, 0), name, error), name)

    with ExitStack() as on_error:
        on_error.callback(file.close)
        for announced, actual in _ANNOUNCED.findall(file.extra_info):
            if int(actual) < int(announced) not in _STREAMED_SIZES:
                raise BadAudioError(f"{name} is truncated: its header announces {announced} bytes, but it has {actual}")
        if head.startswith(b"OggS") and not ends_as_ogg(_read_part(source, -(2**16) - 512)):
            raise BadAudioError(f"{name} is truncated: its last page is missing")
        if file.frames >= _MOST_FRAMES or not soundfile.SoundFile.seekable(file):  # unknown length, or GSM
            return _Samples(file.read_mono(0, None), file.rate_hz, name)
        on_error.pop_all()
    return file


def _decode_with_ffmpeg(content: bytes, name: str, refusal: Exception) -> tuple[np.ndarray, int]:
    """Decode a whole recording with FFmpeg. Its formats, such as m4a, do not support exact seeking."""
    # FFmpeg receives no path, only bytes of an audio file, because a playlist could make it fetch other files.
    if not _FFMPEG.match(content) or _PLAYLIST.search(content[: 2**20].split(b"\0", 1)[0]):
        raise _not_audio(content, name, "libsndfile or FFmpeg", refusal) from refusal
    try:
        from torchcodec.decoders import AudioDecoder
    except Exception as error:  # RuntimeError or OSError without FFmpeg's libraries
        raise MissingDecoderError(
            f"{name} needs FFmpeg, which torchcodec does not find ({_first_line(error)}); install FFmpeg 4 to 8 "
            "(apt-get install ffmpeg, conda install ffmpeg) and torchcodec, or convert the file to FLAC"
        ) from error

    try:
        decoder = AudioDecoder(content)
        waveform, metadata = decoder.get_all_samples().data.mean(dim=0).numpy(), decoder.metadata
    except Exception as error:
        raise _not_audio(content, name, "libsndfile or FFmpeg", error) from error

    announced_seconds, rate_hz = metadata.duration_seconds_from_header, metadata.sample_rate
    if announced_seconds is None or not _MP4.match(content):
        return waveform, rate_hz
    announced = round(announced_seconds * rate_hz)
    if len(waveform) < announced - _MP4_TOLERANCE_SECONDS * rate_hz:
        raise BadAudioError(f"{name} is truncated: {len(waveform)} of {announced} samples could be read")
    return waveform[:announced], rate_hz


def _not_audio(source: Source, name: str, readers: str, error: Exception) -> BadAudioError:
    size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
    return BadAudioError(f"{name} ({size} bytes) is not audio that {readers} can decode: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """Return the first line of a decoder error, without source file names and line numbers."""
    message = getattr(error, "error_string", None) or str(error) or type(error).__name__
    return re.sub(r"^\w+, \S+\.cpp:\d+, ", "", message.splitlines()[0])


def _read_part(source: Source, start: int, count: int | None = None) -> bytes:
    """Read `count` bytes (None: all) from `start`; a negative `start` counts from the end of the file."""
    if isinstance(source, bytes):
        return source[start:][:count]
    with open(source, "rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) + start) if start < 0 else start)
        return file.read(count)


def _check_samples(waveform: np.ndarray, name: str, start: int = 0) -> np.ndarray:
    if not len(waveform):
        raise BadAudioError(f"{name} is empty: it contains no samples")
    if not np.isfinite(waveform).all():
        first = start + int(np.argmin(np.isfinite(waveform)))
        raise BadAudioError(f"{name} contains NaN or infinite samples, the first at {first}")
    peak = max(waveform.max(), -waveform.min())
    if peak > MAX_AMPLITUDE:
        raise BadAudioError(f"{name} has a peak of {peak:.6g}, but full scale is 1; divide integer samples by 32768")
    return waveform


def _check_rate(rate_hz: int, name: str) -> int:
    if not LEAST_RATE_HZ <= rate_hz <= MOST_RATE_HZ:
        expected = f"{LEAST_RATE_HZ} to {MOST_RATE_HZ}"
        raise BadAudioError(f"{name} has a sampling rate of {rate_hz} Hz; expected {expected}: correct its header")
    return rate_hz
