"""From a recording, on disk or in memory, to a mono waveform, or an error that names it.

libsndfile decodes (wav, flac, ogg, mp3); FFmpeg, by way of torchcodec, what libsndfile does not know (m4a, aac, ...).
Whatever decoded it, one resampler changes the rate, so that numbers do not depend on the format of the files.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import soundfile

from .audio_headers import announce_mp3_frames, ends_as_ogg

Source: TypeAlias = str | Path | bytes
"""A file, or the encoded bytes of one."""

# How files begin that FFmpeg is asked for: MP4 (m4a), QuickTime, Matroska and WebM, ASF (wma), raw AAC, WavPack, AMR.
_MP4 = re.compile(rb"....(?:ftyp|moov|mdat|wide)", re.DOTALL)
_FFMPEG = re.compile(
    rb"....(?:ftyp|moov|mdat|wide)|\x1a\x45\xdf\xa3|\x30\x26\xb2\x75|\xff[\xf0\xf1\xf8\xf9]|ADIF|wvpk|#!AMR", re.DOTALL
)
# Playlists, which FFmpeg would take for what they are behind such a beginning, and fetch what they name.
_PLAYLIST = re.compile(rb"<MPD|#EXTM3U|ffconcat|c=IN IP|://", re.IGNORECASE)

# How files begin that libsndfile knows best, so that a broken one is not read in part after all.
_LIBSNDFILE = re.compile(rb"RIFF|RIFX|RF64|FORM|fLaC|OggS|ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]", re.DOTALL)
_MP3 = re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]", re.DOTALL)

# Encoders pad the last frame and players drop a first one; more than this much sound is not lost by either.
_MP4_TOLERANCE_SECONDS = 0.1

# In the log of libsndfile, the chunk that tells of missing sound: WAV, AIFF, Wave64, RF64 and AU in this order. It
# reads what is left of a cut file as if that were the whole.
_ANNOUNCED = re.compile(r"^ *(?:data|SSND|riff|Riff size|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
# Sizes of a WAV or AU that was written to a pipe, whose length was not known yet: nothing is missing.
_STREAMED_SIZES = (0x7FFFFFFF, 0x7FFFFFFF - 36, 0xFFFFFFFF, 0xFFFFFFFF - 36)

_FFMPEG_SECONDS = 120  # no recording of a dataset takes that long, a file that was made to do so does
_BLOCK_FRAMES = 2**22  # read at a time, since a header may announce more than any memory holds
_MOST_FRAMES = 2**40  # what a FLAC "has" that was written to a pipe is more

# As of the feature extractors, which know nothing of files: 40 dB over full scale are integers that nobody has scaled,
# and rates outside are no rates of recordings, but kilohertz or damage.
_MAX_AMPLITUDE = 100.0
_LEAST_RATE_HZ, _MOST_RATE_HZ = 200, 10_000_000


class BadAudioError(ValueError):
    """A recording that exists but holds no usable sound; the message names the file and what is wrong with it."""


class MissingDecoderError(BadAudioError):
    """A recording that this machine cannot read for want of FFmpeg's libraries; the message says what to install."""


def read_audio(
    source: Source, offset_seconds: float = 0.0, duration_seconds: float | None = None, name: str | None = None
) -> tuple[np.ndarray, int]:
    """Reads a recording (wav, flac, ogg, mp3, m4a, ...) as the mean of its channels, at its own sampling rate.

    Args:
        source: The file, or its bytes.
        offset_seconds: Where to begin reading.
        duration_seconds: How much to read at most; None reads to the end.
        name: What errors call the recording; by default its path.

    Returns:
        The waveform, float32 of shape `(samples,)`, full scale 1.0, and its sampling rate in Hz.

    Raises:
        FileNotFoundError: There is no such file.
        BadAudioError: The file is no audio, is truncated or empty, holds NaN or infinite samples or floats in the scale
            of integers, or has a sampling rate below 200 Hz or above 10 MHz; a `MissingDecoderError` where FFmpeg would
            read it but is not installed.
    """
    if name is None:
        name = f"a recording of {len(source)} bytes" if isinstance(source, bytes) else str(source)
    with closing(_open(source, name)) as recording:
        start = round(offset_seconds * recording.rate_hz)
        count = None if duration_seconds is None else round(duration_seconds * recording.rate_hz)
        return recording.read_mono(start, count), recording.rate_hz


def measure_audio(source: Source, name: str) -> tuple[float, bool]:
    """The seconds of a recording, and whether there is any sound in it; errors as of `read_audio`.

    It is read from end to end, a part at a time: memory does not grow with it.
    """
    samples, is_sound = 0, False
    with closing(_open(source, name)) as recording:
        for part in recording.parts(0, None):
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
) -> np.ndarray:
    """The sound of a row, from wherever the row has it.

    That is `samples` with `sampling_rate_hz` (int16, as prepared sets store it), or `audio` (the bytes of a file, as
    prepared sets embed it, or what `datasets.Audio` makes of them), or else the file `audio_path`. It is brought to the
    model's rate, cropped where it is too long, and certain to hold sound.

    Args:
        row: A row of the schema.
        sampling_rate_hz: The rate wanted, usually the feature extractor's.
        max_seconds: Longer recordings are cropped to this; None keeps everything.
        crop_position: Where the crop lies, from 0 (the beginning) to 1 (the end); drawn at random in training.
        from_first_sound: Whether a crop that is silent is taken from the first sound on: silence has no level to bring
            another clip's to, and no caption fits it.
        min_seconds: The shortest clip that the model takes, 0.15 s for CED; a shorter one is refused.

    Returns:
        float32 of shape `(samples,)` at `sampling_rate_hz`.

    Raises:
        FileNotFoundError: There is no such file.
        BadAudioError: As for `read_audio`; also when the whole recording is zero, since silence matches no caption. The
            message names the clip too.

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

    clip = resample(part, rate_hz, sampling_rate_hz)
    if len(clip) < min_seconds * sampling_rate_hz:
        seconds = len(clip) / sampling_rate_hz
        raise BadAudioError(f"{name} lasts {seconds:.4f} s; the model needs {min_seconds} s")
    return clip


def resample(waveform: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """A waveform at another rate, by the same torchaudio interpolation as `CEDFeatureExtractor`: one for all numbers.

    torchaudio's filter is as large as the two rates multiplied, without their common factors: gigabytes for 44,101 Hz.
    The ratio of such rates is replaced by a simpler one, a four-thousandth away at most and far less for most.

    Args:
        waveform: float32, `(samples,)`.
        from_hz: The rate that it has.
        to_hz: The rate wanted.

    Returns:
        float32, `(ceil(samples * to_hz / from_hz),)`; the very same array where the rates agree.

    Raises:
        BadAudioError: A rate is below 200 Hz or above 10 MHz.

    >>> resample(np.zeros(44100, dtype=np.float32), 44100, 16000).shape
    (16000,)
    """
    if from_hz == to_hz:
        return waveform
    for rate_hz in (from_hz, to_hz):
        _check_rate(rate_hz, "a waveform")

    import torch  # takes seconds, which a help and what only lists rows need not wait for

    ratio = Fraction(to_hz, from_hz).limit_denominator(2000)
    resampled = _get_resampler(ratio.denominator, ratio.numerator)(torch.from_numpy(waveform)).numpy()

    length = -(-len(waveform) * to_hz // from_hz)
    return np.pad(resampled[:length], (0, max(0, length - len(resampled))), mode="edge")


def read_int16(source: Source, name: str, rate_hz: int) -> tuple[np.ndarray, bool]:
    """Reads a recording as 16-bit samples at another rate, a part at a time: no more than the samples is held at once.

    Returns:
        int16, `(samples,)`, and whether there was any sound before it was rounded; errors as of `read_audio`.
    """
    parts, is_sound = [], False
    with closing(_open(source, name)) as recording:
        from_hz = recording.rate_hz
        waiting, margin = np.zeros(0, np.float32), 0  # of what waits, the seconds that the filter needs and has had

        for part in recording.parts(0, None):
            is_sound = is_sound or bool(part.any())
            # All whole seconds but one, where samples of both rates coincide, once more sound than those is there.
            seconds = len(waiting) // from_hz - 1
            if seconds > margin:
                resampled = resample(waiting[: (seconds + 1) * from_hz], from_hz, rate_hz)
                parts.append(to_int16(resampled[margin * rate_hz : seconds * rate_hz]))
                waiting, margin = waiting[(seconds - 1) * from_hz :], 1
            waiting = np.concatenate([waiting, part])

        parts.append(to_int16(resample(waiting, from_hz, rate_hz)[margin * rate_hz :]))
    return np.concatenate(parts), is_sound


def to_int16(waveform: np.ndarray) -> np.ndarray:
    """Rounds a waveform to 16 bits; what exceeds full scale, as resampling may, is clipped.

    >>> to_int16(np.array([0.5, -1.0, 1.5], dtype=np.float32))
    array([ 16384, -32768,  32767], dtype=int16)
    """
    return np.clip(np.rint(waveform * 32768.0), -32768, 32767).astype("<i2")


def use_threads(count: int = 1) -> int:
    """Sets torch's threads in this process, and gives their number before.

    One is fastest for clips one by one, and gives the same bits everywhere.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    return before


@lru_cache(maxsize=8)
def _get_resampler(from_hz: int, to_hz: int) -> Any:
    import torchaudio

    return torchaudio.transforms.Resample(from_hz, to_hz)


class _Samples:
    """A recording in memory: floats, or int16 that become floats when they are read."""

    def __init__(self, samples: np.ndarray, rate_hz: int, label: str) -> None:
        self.samples, self.frames, self.rate_hz, self.label = samples, len(samples), _check_rate(rate_hz, label), label

    def read_mono(self, start: int, count: int | None) -> np.ndarray:
        part = self.samples[start : None if count is None else start + count]
        if part.dtype == np.int16:
            part = part.astype(np.float32) * np.float32(1 / 32768)
        return _check_samples(part, self.label)

    def parts(self, start: int, count: int | None) -> Iterator[np.ndarray]:
        yield self.read_mono(start, count)

    def close(self) -> None:
        pass


class _File(soundfile.SoundFile):
    """A recording that libsndfile decodes, part by part."""

    def __init__(self, file: Any, label: str) -> None:
        super().__init__(file)
        self.label, self.rate_hz = label, _check_rate(self.samplerate, label)

    def seekable(self) -> bool:
        """No, or soundfile seeks after each read: at the end of a FLAC without a length that fails."""
        return False

    def read_mono(self, start: int, count: int | None) -> np.ndarray:
        parts = list(self.parts(start, count))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self, start: int, count: int | None) -> Iterator[np.ndarray]:
        start, done = min(start, self.frames), 0
        wanted = self.frames - start if count is None else min(count, self.frames - start)
        try:
            if super().seekable():
                self.seek(start)
            while done < wanted:
                block = self.read(min(_BLOCK_FRAMES, wanted - done), dtype="float32", always_2d=True)
                if not len(block):
                    break
                yield _check_samples(block.mean(axis=1), self.label, done)  # (frames, channels) -> (frames,)
                done += len(block)
        except soundfile.SoundFileError as error:
            raise BadAudioError(
                f"{self.label} stops in the middle of its data and is probably truncated: {_first_line(error)}"
            ) from error

        if done < wanted and self.frames < _MOST_FRAMES:
            raise BadAudioError(f"{self.label} is truncated: {done} of {wanted} samples could be read")
        if not done:
            raise BadAudioError(f"{self.label} is empty: it holds no samples")


def _open(source: Source, name: str) -> _Samples | _File:
    """Opens a recording with libsndfile, or decodes all of it with FFmpeg where libsndfile does not know the format."""
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

    with ExitStack() as unless_it_is_whole:
        unless_it_is_whole.callback(file.close)
        for announced, there in _ANNOUNCED.findall(file.extra_info):
            if int(there) < int(announced) not in _STREAMED_SIZES:
                raise BadAudioError(f"{name} is truncated: its header announces {announced} bytes, {there} are there")
        if head.startswith(b"OggS") and not ends_as_ogg(_read_part(source, -(2**16) - 512)):
            raise BadAudioError(f"{name} is truncated: its last page is not there")
        if file.frames >= _MOST_FRAMES or not soundfile.SoundFile.seekable(file):  # of unknown length, or GSM
            return _Samples(file.read_mono(0, None), file.rate_hz, name)
        unless_it_is_whole.pop_all()
    return file


def _decode_with_ffmpeg(content: bytes, name: str, refusal: Exception) -> tuple[np.ndarray, int]:
    """Decodes all of a recording: these formats seek to frames of their own, so that a part would not be exact.

    FFmpeg gets the bytes and no path, and only those that begin like audio: a playlist could make it fetch other files.
    """
    if not _FFMPEG.match(content) or _PLAYLIST.search(content[: 2**20].split(b"\0", 1)[0]):
        raise _not_audio(content, name, "libsndfile or FFmpeg", refusal) from refusal
    try:
        from torchcodec.decoders import AudioDecoder
    except Exception as error:  # without FFmpeg's libraries it is a RuntimeError or an OSError
        raise MissingDecoderError(
            f"{name} needs FFmpeg, which torchcodec does not find here ({_first_line(error)}); install FFmpeg 4 to 8 "
            "(apt-get install ffmpeg, conda install ffmpeg) and torchcodec, or convert the file to FLAC"
        ) from error

    decoded: list[Any] = []

    def decode() -> None:
        try:
            decoder = AudioDecoder(content)
            samples = decoder.get_all_samples().data.mean(dim=0).numpy()
            decoded[:] = samples, decoder.metadata
        except Exception as error:
            decoded[:] = [error]

    thread = threading.Thread(target=decode, daemon=True)
    thread.start()
    thread.join(_FFMPEG_SECONDS)
    if not decoded:
        raise BadAudioError(f"{name} ({len(content)} bytes) took FFmpeg more than {_FFMPEG_SECONDS} seconds")
    if isinstance(decoded[0], Exception):
        raise _not_audio(content, name, "libsndfile or FFmpeg", decoded[0]) from decoded[0]

    waveform, metadata = decoded
    announced_seconds, rate_hz = metadata.duration_seconds_from_header, metadata.sample_rate
    if announced_seconds is None or not _MP4.match(content):
        return waveform, rate_hz
    announced = round(announced_seconds * rate_hz)
    if len(waveform) < announced - _MP4_TOLERANCE_SECONDS * rate_hz:
        raise BadAudioError(f"{name} is truncated: {len(waveform)} of {announced} samples could be read")
    return waveform[:announced], rate_hz


def _not_audio(source: Source, name: str, readers: str, error: Exception) -> BadAudioError:
    size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
    return BadAudioError(f"{name} ({size} bytes) is not audio that {readers} can read: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """What a decoder says, without the address of the bytes or the line of its own source."""
    said = getattr(error, "error_string", None) or str(error) or type(error).__name__
    return re.sub(r"^\w+, \S+\.cpp:\d+, ", "", said.splitlines()[0])


def _read_part(source: Source, start: int, count: int | None = None) -> bytes:
    """Some bytes of a file; a negative start counts from its end."""
    if isinstance(source, bytes):
        return source[start:][:count]
    with open(source, "rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) + start) if start < 0 else start)
        return file.read(count)


def _check_samples(waveform: np.ndarray, name: str, start: int = 0) -> np.ndarray:
    if not len(waveform):
        raise BadAudioError(f"{name} is empty: it holds no samples")
    if not np.isfinite(waveform).all():
        first = start + int(np.argmin(np.isfinite(waveform)))
        raise BadAudioError(f"{name} holds NaN or infinite samples, the first at {first}")
    peak = max(waveform.max(), -waveform.min())
    if peak > _MAX_AMPLITUDE:
        raise BadAudioError(f"{name} reaches {peak:.6g}, but floats have full scale 1; divide integer samples by 32768")
    return waveform


def _check_rate(rate_hz: int, name: str) -> int:
    if not _LEAST_RATE_HZ <= rate_hz <= _MOST_RATE_HZ:
        raise BadAudioError(
            f"{name} has a sampling rate of {rate_hz} Hz; a recording has {_LEAST_RATE_HZ} to {_MOST_RATE_HZ}: correct "
            "its header, or resample it"
        )
    return rate_hz
