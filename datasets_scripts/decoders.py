"""Open a recording, decode it in blocks, and refuse an incomplete one. No other module selects a decoder.

libsndfile decodes WAV, AIFF, FLAC, MP3, Ogg Vorbis, Opus and others; FFmpeg (`ffmpeg.py`) decodes the rest. The content
selects the decoder, not the suffix. A file is whole if all sound that its header announces can be decoded, except for
at most 0.1 s. Header sizes that are no sizes, as programs write them to a pipe, announce nothing.
"""

import io
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import soundfile

from modeling_supclap.waveform import BadAudioError, to_mono

from .audio_headers import (
    MP3_SYNC,
    Content,
    Link,
    count_mp3_frames,
    find_sound,
    is_whole_ogg,
    mark_end,
    read_links,
    skip_id3,
)
from .remote_files import read_file, refuse_pointer

Source: TypeAlias = str | Path | bytes
"""Path or fsspec address of an audio file, or the encoded bytes of the file."""

Segment: TypeAlias = tuple[float | None, float | None, int | None]
"""Part of a recording: start and end in seconds, and a channel. None: the beginning, the end, the mean of channels."""

WHOLE: Segment = (None, None, None)

logger = logging.getLogger(__name__)
_noted: set[int] = set()  # levels of the notes so far


class Address(str):
    """Remote address of a recording, passed by the user. For safety, plain strings in rows are never downloaded."""


class MissingDecoderError(BadAudioError):
    """Error for a recording that FFmpeg may decode if PyAV is not installed; the message explains how to install it."""


_TOLERANCE_SECONDS = 0.1  # encoders pad the last frame, and some headers announce a few bytes too many
_SIZE_TOLERANCE_BYTES = 1000  # 0.1 s at 80 kbit/s
_BLOCK_FRAMES = 2**20  # frames per read, because a header may announce more frames than fit in memory
_MP3_PREROLL_FRAMES = 2**14  # decoded before a part, because a frame of MP3 needs data of earlier ones
_GRANULE_SAMPLES = 576  # part of an MP3 frame that is decoded at a time
_MOST_FADED = 1e-6  # sample beside encoded silence; measured: 2e-8, beside a damaged granule 3e-3 and more
_MOST_FRAMES = 2**40  # libsndfile reports at least this many frames for a FLAC that was written to a pipe

# Announced and actual size of the data chunk in the libsndfile log (WAV, AIFF, Wave64, RF64, AU). libsndfile reads a
# truncated file as if it were complete.
_ANNOUNCED = re.compile(r"^ *(?:data|SSND|riff|Riff size|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
_OF_LIBSNDFILE = re.compile(rb"RIF[FX]....WAVE|RF64|FORM|fLaC|\.snd|riff|caff", re.DOTALL)
# First frame of an MP3 that announces the number of its frames and, if a flag is set, of its bytes.
_MP3_TAG = re.compile(
    rb"\xff[\xe2-\xff].{11,34}(?:Xing|Info)\0\0\0([\x01\x03\x05\x07\x09\x0b\x0d\x0f])(.{4})(.{4})", re.DOTALL
)
_MP3_TAG_REACH = 2**16  # bytes before it, such as the end of another frame
_MP3_MOST_RATIO = 64  # of the bit rates of two frames
_ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")  # before the size of the packets
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]+")
_ADVICE = "install PyAV (pip install 'supclap[ffmpeg]'), or convert it to FLAC"


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Context manager that converts every error to a `BadAudioError` with the name of the recording."""
    try:
        yield
    except BadAudioError:
        raise
    except Exception as error:  # for example MemoryError, if a header announces 2^36 samples
        problem = _problem(error)
        raise BadAudioError(problem if name in problem else f"{name} cannot be decoded: {problem}") from error


class _TolerantFile:
    """Mixin for files without a name: a seek to an impossible position, as in damaged files, has no effect."""

    def seek(self, position: int, whence: int = io.SEEK_SET) -> Any:
        with suppress(ValueError, OverflowError):
            super().seek(position, whence)  # type: ignore[misc]
        return self.tell()  # type: ignore[attr-defined]


class _Bytes(_TolerantFile, io.BytesIO):
    """File of bytes in memory."""


class _Longer(_Bytes):
    """MP3 that pretends to be longer, because libsndfile stops at the length that it estimates by the first frame."""

    def tell(self) -> int:
        position, size = super().tell(), len(self.getbuffer())
        return _MP3_MOST_RATIO * size if position == size else position


class _Map(_TolerantFile, mmap.mmap):
    """File on disk, as bytes and as a file object."""

    def readable(self) -> bool:
        return True

    seekable = readable


def _as_file(content: Content) -> Any:
    """Return a file at its beginning."""
    if not isinstance(content, _Map):
        return _Bytes(content)
    content.seek(0)
    return content


class Sound:
    """Recording, or a part of it, that is decoded block by block.

    Args:
        open_reader: Function that opens the recording. It returns a reader, which is read once, with `rate_hz`,
            `length` (samples per channel by the header, or None), optionally `slack` (how many may be missing),
            `close()`, and `blocks(start, count)`. This yields arrays (samples, channels) from the sample `start` on, at
            least `count` samples in total.
        label: Name for messages.
        segment: Part of the recording.

    Raises:
        BadAudioError: The segment is empty, or ends after the recording by more than 0.1 s.
    """

    def __init__(self, open_reader: Callable[[], Any], label: str, segment: Segment = WHOLE) -> None:
        self._open, self.label = open_reader, label
        start_seconds, end_seconds, self._channel = segment
        with naming(label):
            self._reader = open_reader()
        self.rate_hz, whole = self._reader.rate_hz, self._reader.length
        self._slack = getattr(self._reader, "slack", 0)
        self._start = round((start_seconds or 0) * self.rate_hz)
        self._has_end = end_seconds is not None
        stop = whole if end_seconds is None else round(end_seconds * self.rate_hz)
        # If the length of the recording is unknown, reading shows whether the part exists.
        self._announced = stop if stop is None else min(stop, stop if whole is None else whole) - self._start
        is_late = whole is not None and stop - whole > _TOLERANCE_SECONDS * self.rate_hz
        if segment[:2] != (None, None) and (is_late or (self._announced is not None and self._announced <= 0)):
            span = f"from {self._start / self.rate_hz:g} s to {f'{end_seconds:g} s' if self._has_end else 'its end'}"
            length = "" if whole is None else f": it lasts {whole / self.rate_hz:.4f} s"
            raise BadAudioError(f"{label} has no part {span}{length}; correct start_seconds")

    @cached_property
    def frames(self) -> int:
        """Number of samples: announced by the header, or counted by decoding the recording."""
        return sum(map(len, self.parts())) if self._announced is None else self._announced

    def parts(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        """Yield blocks of float32 `(samples,)` from the sample `start` on, checked by `to_mono`.

        BadAudioError is raised if samples are missing, invalid, or none.
        """
        expected = None if self._announced is None else max(0, self._announced - start)
        if expected is not None and (self._has_end or count is not None):
            expected = count = expected if count is None else min(count, expected)
        done = 0
        with naming(self.label):
            reader, self._reader = self._reader or self._open(), None
            with closing(reader):
                for block in reader.blocks(self._start + start, count):
                    block = block[: None if count is None else count - done]
                    if len(block):
                        yield to_mono(block, self.rate_hz, self.label, self._channel, start + done)
                    done += len(block)
                    if done == count:
                        break
        if not done:
            raise BadAudioError(f"{self.label} is empty: it contains no samples")
        num_missing = 0 if expected is None else expected - self._slack - done
        if num_missing > 0:
            problem = f"{done} of {done + num_missing} samples could be read"
            if num_missing > _TOLERANCE_SECONDS * self.rate_hz:
                raise BadAudioError(f"{self.label} is truncated: {problem}")
            _note(self.label, problem)

    def read_mono(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return `count` samples from `start` on, or all samples to the end."""
        waveforms = list(self.parts(start, count))
        return waveforms[0] if len(waveforms) == 1 else np.concatenate(waveforms)


class Samples:
    """Reader of samples in memory, `(samples,)` or `(samples, channels)`: floats, or int16 PCM."""

    def __init__(self, samples: np.ndarray, rate_hz: int) -> None:
        self._samples, self.length, self.rate_hz = np.atleast_2d(samples.T).T, len(samples), rate_hz

    def blocks(self, start: int, count: int | None) -> Iterator[np.ndarray]:
        yield self._samples[start:]

    def close(self) -> None:
        """Do nothing."""


class _Chain:
    """Reader of successive parts with headers of their own, such as two joined files."""

    def __init__(self, links: Sequence[Any]) -> None:
        self._links, self.rate_hz = links, links[0].rate_hz
        lengths = [link.length for link in links]
        self.length = None if None in lengths else sum(lengths)
        rates = [link.rate_hz for link in links]
        if len(set(rates)) > 1:
            raise ValueError(f"it has several sampling rates, {rates[:4]} Hz; convert it to FLAC")

    def blocks(self, start: int, count: int | None) -> Iterator[np.ndarray]:
        for link in self._links:
            if link.length is None or start < link.length:
                yield from link.blocks(start, count)
            start = max(0, start - (link.length or 0))

    def close(self) -> None:
        """Close all parts."""
        for link in self._links:
            link.close()


class _SndFile(soundfile.SoundFile):
    """Reader of a file that libsndfile decodes."""

    def __init__(self, content: Content, name: str, estimated: bool = False, **raw: Any) -> None:
        self._bytes = _Longer(content) if estimated else _as_file(content)
        super().__init__(self._bytes, **raw)
        self._label, self.rate_hz = name, self.samplerate
        # None: a FLAC without a length, or an MP3 with a length that libsndfile estimates
        self.length = None if estimated or self.frames >= _MOST_FRAMES else self.frames

    def seekable(self) -> bool:
        # soundfile would seek after each read, which fails at the end of a FLAC file with unknown length.
        return False

    def blocks(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        is_estimated, is_mp3 = isinstance(self._bytes, _Longer), self.format == "MP3"
        skipped, num_lost = start, 0
        left = _MOST_FRAMES if count is None else start + count
        if self.length is not None and super().seekable():  # GSM is not
            skipped = min(start, _MP3_PREROLL_FRAMES if is_mp3 else 0)
            first = min(start, self.length) - skipped
            self.seek(first)
            left = min(left, self.length) - first
        try:
            while left and len(block := self.read(min(_BLOCK_FRAMES, left), dtype="float32", always_2d=True)):
                num_lost += _count_lost_granules(block) if is_mp3 else 0
                left -= len(block)
                if len(block) > skipped:
                    yield block[skipped:]
                skipped = max(0, skipped - len(block))
            if left and is_estimated and self._bytes.tell() < len(self._bytes.getbuffer()):
                raise soundfile.SoundFileError
        except soundfile.SoundFileError as error:
            if not is_estimated:
                raise
            raise ValueError(f"libsndfile cannot read this MP3 to its end; {_ADVICE}") from error
        finally:
            if num_lost:  # libmpg123 prints messages about the damage, without the name of the file
                seconds = num_lost * _GRANULE_SAMPLES / self.rate_hz
                logger.warning("%s: %.3f s in damaged frames cannot be decoded and are silent", self._label, seconds)


def open_recording(source: Source, name: str, segment: Segment = WHOLE) -> Sound:
    """Open a recording or a part of it; raise the errors of `audio.read_audio`."""
    content: Content
    if isinstance(source, Address):
        source = read_file(source, lambda file: file.read())
    if isinstance(source, bytes):
        content = source
    elif not Path(source).is_file():
        raise FileNotFoundError(f"there is no audio file {name}")
    else:
        with open(source, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = _Map(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    if not len(content):
        raise BadAudioError(f"{name} is empty: 0 bytes")
    start = skip_id3(content) if content[:3] == b"ID3" else 0
    return Sound(partial(_open_reader, content[start:] if start else content, name), name, segment)


def _open_reader(content: Content, name: str) -> Any:
    """Open a recording with libsndfile or, if that cannot read it correctly, with FFmpeg."""
    if content[:4] == b"OggS":
        return _open_ogg(content, name)
    if MP3_SYNC.match(content):
        return _open_mp3(content, name)
    try:
        file = _SndFile(content, name)
    except soundfile.SoundFileError as error:
        return _open_with_ffmpeg(content, name, _problem(error))
    if "MPEG" in file.subtype:  # in another container
        return _open_mp3(content, name)
    if "Ambiguous" in file.extra_info:
        problem = "samples of 24 bits in 4 bytes, which decoders read incorrectly"
        raise BadAudioError(f"{name} has {problem}; convert it to FLAC")
    if "IEEE float" in file.extra_info and "PCM" in file.subtype:  # of Wave64, read as integers
        return _open_with_ffmpeg(content, name, "it reads these floats as integers")
    if file.length == 0:
        file = _open_unfinished(content, file, name)
    for numbers in _ANNOUNCED.findall(file.extra_info):
        announced, actual = map(int, numbers)
        slack = _TOLERANCE_SECONDS * file.rate_hz * actual / (file.length or 1)
        _refuse_truncated(name, announced, actual, "bytes", slack)
    return file


def _open_mp3(content: Content, name: str) -> Any:
    """Open an MP3 with libsndfile if its tag announces its frames correctly; raise BadAudioError if it is truncated.

    Without a correct tag, FFmpeg decodes it or, if that is missing or fails, libsndfile to the end.
    """
    num_frames, stop, is_cut = count_mp3_frames(content)
    is_whole = is_cut or MP3_SYNC.search(content, stop) is None  # other frames may follow
    tag = _MP3_TAG.match(content[:64])
    if tag is not None:
        announced, size = int.from_bytes(tag[2], "big"), int.from_bytes(tag[3], "big")
        if announced and tag[1][0] & 2:
            _refuse_truncated(name, size, len(content), "bytes of MP3")
        if is_whole and announced in (num_frames - 1, num_frames):  # some encoders count the frame of the tag, too
            return _SndFile(content, name)
        if is_cut:
            _refuse_truncated(name, announced, num_frames, "frames")
    try:
        return _open_with_ffmpeg(content, name, "this MP3 does not announce its length")
    except BadAudioError as error:  # PyAV is missing, or the free format
        with suppress(soundfile.SoundFileError):
            return _SndFile(_without_number(content[:stop] if is_whole else content), name, estimated=True)
        raise error


def _without_number(content: Content) -> Content:
    """Return an MP3 without the number in its tag, because decoders drop padding where the sound should end."""
    tag = _MP3_TAG.search(content, 0, _MP3_TAG_REACH)
    return content if tag is None else content[: tag.start(2)] + bytes(4) + content[tag.end(2) :]


def _open_ogg(content: Content, name: str) -> Any:
    if not is_whole_ogg(content):
        raise BadAudioError(f"{name} is truncated: it ends within a page")
    readers = [_open_link(link, name) for link in read_links(content) or [Link(content, [])]]
    return readers[0] if len(readers) == 1 else _Chain(readers)


def _open_link(link: Link, name: str) -> Any:
    if len(link.streams) == 1 and link.streams[0].startswith((b"\x01vorbis", b"OpusHead")):
        with suppress(soundfile.SoundFileError):
            return _SndFile(mark_end(link.content), name)
    return _open_with_ffmpeg(link.content, name, f"Ogg with {link.streams}")


def _open_unfinished(content: Content, file: _SndFile, name: str) -> _SndFile:
    """Open a file with a header that announces no data; raise BadAudioError if it has none."""
    start = find_sound(content)
    file.close()
    if start is None:
        raise BadAudioError(f"{name} is empty: it contains no samples")
    form = {"samplerate": file.samplerate, "channels": file.channels, "subtype": file.subtype, "endian": file.endian}
    if file.endian == "FILE":
        form["endian"] = "BIG" if content[:4] in (b"FORM", b".snd") else "LITTLE"
    file = _SndFile(content[start:], name, format="RAW", **form)
    _note(name, f"its header announces no data; all {file.length} samples to the end of the file are read")
    return file


def _open_with_ffmpeg(content: Content, name: str, problem: str) -> Any:
    about, head = f"{name} ({len(content)} bytes)", content[:100]
    refuse_pointer(head, name)
    if _TEXT.fullmatch(head):
        raise BadAudioError(f"{about} is not audio, but a text: {head[:40]!r}")
    try:
        from .ffmpeg import Track
    except ImportError as error:
        if _OF_LIBSNDFILE.match(head):
            raise BadAudioError(f"{about} is damaged, or of a rare kind: {problem}; convert it to FLAC") from error
        raise MissingDecoderError(
            f"{about} needs FFmpeg, because libsndfile cannot read it: {problem}; {_ADVICE}"
        ) from error
    announced = 0
    if head[:4] == b"RIFF":  # AVI, and WAV with a rare codec
        announced = 8 + int.from_bytes(head[4:8], "little")
    elif head[:4] == b"0&\xb2u":  # Windows Media
        start = max(0, content.find(_ASF_DATA))
        announced = start + int.from_bytes(content[start + 16 : start + 24], "little")
    _refuse_truncated(name, announced, len(content), "bytes", _SIZE_TOLERANCE_BYTES)
    try:
        return Track(partial(_as_file, _without_number(content)), name)
    except Exception as error:
        reasons = f"libsndfile ({problem}) or FFmpeg ({_problem(error)})"
        raise BadAudioError(f"{about} is not audio that can be decoded by {reasons}") from error


def _refuse_truncated(name: str, announced: int, actual: int, unit: str, slack: float = 0.0) -> None:
    """Raise BadAudioError if more is announced than the file contains, by more than `slack`; note less than this.

    Sizes near 2^31 or 2^32, or absurdly larger than the actual one, announce nothing.
    """
    is_placeholder = abs(announced - 2**31) <= 2**24 or announced >= 2**32 - 2**24
    if announced <= actual or is_placeholder or announced > max(100 * actual, 2**24):
        return
    problem = f"it announces {announced} {unit}, but it has {actual}"
    if announced - actual > slack:
        raise BadAudioError(f"{name} is truncated: {problem}")
    _note(name, problem)


def _problem(error: Exception) -> str:
    """Return the first line of the message of an error, without the name of a file object."""
    message = getattr(error, "error_string", None) or getattr(error, "strerror", None)
    if not message:
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return message.splitlines()[0]


def _note(name: str, deviation: str) -> None:
    """Log a deviation that loses no sound: a warning for the first file of a process, then information."""
    level = logging.INFO if _noted else logging.WARNING
    _noted.add(level)
    logger.log(level, "%s: %s", name, deviation)


def _count_lost_granules(block: np.ndarray) -> int:
    """Return how many granules of an MP3 libmpg123 has replaced by zeros, because they are damaged.

    The sound breaks off at their zeros. Before and after silence that was encoded, the filter bank lets it fade.
    """
    waveform = np.abs(block).max(axis=1)
    sampled = waveform[:: _GRANULE_SAMPLES // 2] == 0
    if not (sampled[1:] & sampled[:-1]).any():
        return 0
    loud = np.flatnonzero(waveform)
    afters = np.append(loud, len(waveform))[1:]
    edges = np.maximum(waveform[loud], waveform[np.minimum(afters, len(waveform) - 1)])
    lengths = (afters - loud - 1)[edges > _MOST_FADED]
    return int((lengths // _GRANULE_SAMPLES).sum())
