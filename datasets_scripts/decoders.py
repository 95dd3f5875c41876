"""Decode recordings in blocks as mono waveforms. This module identifies the format of a file, and finds truncated ones.

`open_recording` identifies the format by the content. libsndfile decodes WAV, FLAC, Ogg, MP3 and others; FFmpeg
(through torchcodec) decodes the rest (m4a, webm, ...). A file is whole if all sound that its header announces can be
decoded, except for at most 0.1 s. Header sizes that are no sizes, as programs write them to a pipe, announce nothing.
"""

from __future__ import annotations

import io
import logging
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import soundfile

from modeling_supclap.waveform import LEAST_RATE_HZ, MAX_AMPLITUDE, MOST_RATE_HZ

from .audio_headers import Format, correct_sizes, count_aac_seconds, identify, read_links
from .mp3_frames import Content, Part, read_parts
from .remote_files import read_file

Source: TypeAlias = str | Path | bytes
"""Path or fsspec address of an audio file, or the encoded bytes of the file."""

logger = logging.getLogger(__name__)
_noted: set[int] = set()  # levels of the notes so far


class Address(str):
    """Remote address of a recording, passed by the user. For safety, plain strings in rows are never downloaded."""


class BadAudioError(ValueError):
    """Error for a recording without usable audio; the message contains the file name and the problem."""


class MissingDecoderError(BadAudioError):
    """Error for a recording that requires FFmpeg if FFmpeg is not installed; the message explains how to install it."""


_TOLERANCE_SECONDS = 0.1  # encoders pad the last frame, and some headers announce a few bytes too many
_AVI_TOLERANCE_BYTES = 1000  # 0.1 s at 80 kbit/s
_BLOCK_FRAMES = 2**20  # frames per read, because a header may announce more frames than fit in memory
_MP3_PREROLL_FRAMES = 2**14  # decoded before a part, because a frame of MP3 needs data of earlier ones
_GRANULE_SAMPLES = 576  # part of an MP3 frame that is decoded at a time
_MOST_FADED = 1e-6  # sample beside encoded silence; measured: 2e-8, beside a damaged granule 3e-3 and more
_MOST_FRAMES = 2**40  # libsndfile reports at least this many frames for a FLAC that was written to a pipe
_BLOCK_SECONDS = 10.0  # sound that FFmpeg decodes at a time
_WHOLE_SECONDS = 300.0  # shorter recordings of FFmpeg are decoded at once
_WHOLE_BYTES = 2**23  # the same if their length is unknown

# Announced and actual size of the data chunk in the libsndfile log (WAV, AIFF, Wave64, RF64, AU). libsndfile reads a
# truncated file as if it were complete.
_ANNOUNCED = re.compile(r"^ *(?:data|SSND|riff|Riff size|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
# Playlists can follow the first bytes of a format. FFmpeg would recognise them and fetch the files listed there.
_PLAYLIST = re.compile(rb"<MPD|#EXTM3U|ffconcat|c=IN IP|://", re.IGNORECASE)
# FFmpeg only estimates the length of these formats, from their bit rate.
_ESTIMATED = ("AAC", "AC-3", "DTS", "AMR", "MPEG video")
_MOST_BEGIN_SECONDS = 0.5  # a later first sample is a time of day or of a broadcast, not part of the length
_HEADERLESS = (".gsm", ".vox")  # libsndfile takes other files for raw samples by their suffix


class Sound:
    """Recording that is decoded block by block.

    Attributes:
        frames: Number of samples per channel.
        rate_hz: Sampling rate.
        label: Name for messages.
    """

    frames: int
    rate_hz: int
    label: str

    def parts(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        """Yield blocks of float32 `(samples,)`, the mean of all channels, from the sample `start` on.

        BadAudioError is raised if samples are missing, invalid, or none.
        """
        raise NotImplementedError

    def read_mono(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return `count` samples from `start` on, or all samples to the end."""
        blocks = list(self.parts(start, count))
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def close(self) -> None:
        """Close the file."""


class Samples(Sound):
    """Recording in memory: float samples, or int16 samples that `parts` converts to float."""

    def __init__(self, samples: np.ndarray, rate_hz: int, label: str) -> None:
        self.samples, self.frames, self.rate_hz, self.label = (
            samples,
            len(samples),
            check_rate(rate_hz, label),
            label,
        )

    def parts(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        part = self.samples[start : None if count is None else start + count]
        if part.dtype == np.int16:
            part = part.astype(np.float32) * np.float32(1 / 32768)
        yield _check_samples(part, self.label)


class _Bytes(io.BytesIO):
    """Content of a file. A seek to an impossible position, as in damaged files, has no effect instead of raising."""

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        try:
            return super().seek(position, whence)
        except (ValueError, OverflowError):
            return self.tell()


class _File(soundfile.SoundFile, Sound):
    """Recording in a file that libsndfile decodes."""

    def __init__(self, file: Any, label: str) -> None:
        super().__init__(file)
        self.label, self.rate_hz = label, check_rate(self.samplerate, label)

    @property
    def is_seekable(self) -> bool:
        """Whether reading can start anywhere. GSM cannot, and a FLAC without a length neither."""
        return self.frames < _MOST_FRAMES and super().seekable()

    def seekable(self) -> bool:
        # soundfile would seek after each read, which fails at the end of a FLAC file with unknown length.
        return False

    def parts(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        start, done = min(start, self.frames), 0
        num_frames = self.frames - start if count is None else min(count, self.frames - start)
        is_mp3, num_lost = self.format == "MP3", 0
        try:
            if super().seekable():
                skipped = min(start, _MP3_PREROLL_FRAMES if is_mp3 else 0)
                self.seek(start - skipped)
                before = self.read(skipped, dtype="float32", always_2d=True)
                num_lost = _count_lost_granules(_mean_of_channels(before)) if skipped else 0
            while done < num_frames:
                block = self.read(min(_BLOCK_FRAMES, num_frames - done), dtype="float32", always_2d=True)
                if not len(block):
                    break
                waveform = _mean_of_channels(block)
                num_lost += _count_lost_granules(waveform) if is_mp3 else 0
                yield _check_samples(waveform, self.label, done)
                done += len(block)
        except soundfile.SoundFileError as error:
            problem = f"ends within its data, probably truncated: {_first_line(error)}"
            raise BadAudioError(f"{self.label} {problem}") from error

        if num_lost:  # libmpg123 prints messages about the damage, without the name of the file
            seconds = num_lost * _GRANULE_SAMPLES / self.rate_hz
            logger.warning("%s: %.3f s in damaged MP3 frames cannot be decoded and are silent", self.label, seconds)
        if self.frames < _MOST_FRAMES:
            _check_length(done, num_frames, self.rate_hz, self.label)
        if not done:
            raise BadAudioError(f"{self.label} is empty: it contains no samples")


class _Forward(Sound):
    """Recording that is decoded from its beginning for each read, because its format does not support exact seeking.

    Args:
        blocks: Function that yields all samples.
        announced: Number of samples in the header. None: `frames` decodes the recording to count them.
        keep: Whether to decode the recording once and to keep its samples, because it is short.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterator[np.ndarray]],
        rate_hz: int,
        label: str,
        announced: int | None = None,
        keep: bool = False,
    ) -> None:
        self._blocks, self._announced, self._keep = blocks, announced, keep
        self._kept: list[np.ndarray] = []
        self.rate_hz, self.label = check_rate(rate_hz, label), label

    @cached_property
    def frames(self) -> int:  # type: ignore[override]
        return sum(map(len, self._decode())) if self._announced is None else self._announced

    def _decode(self) -> Iterator[np.ndarray]:
        if not self._keep:
            return self._blocks()
        self._kept = self._kept or list(self._blocks())
        return iter(self._kept)

    def parts(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        position, stop = 0, None if count is None else start + count
        for block in self._decode():
            part = block[max(0, start - position) : None if stop is None else max(0, stop - position)]
            if len(part):
                yield _check_samples(part, self.label, position)
            position += len(block)
            if stop is not None and position >= stop:
                return
        if not position:
            raise BadAudioError(f"{self.label} is empty: it contains no samples")
        if self._announced is not None:
            _check_length(position, self._announced, self.rate_hz, self.label)


class _Chain(Sound):
    """Recording of successive parts with headers of their own, such as two joined files."""

    def __init__(self, links: list[_File], label: str) -> None:
        self._links, self.rate_hz, self.label = links, links[0].rate_hz, label
        self.frames = sum(link.frames for link in links)
        rates = [link.rate_hz for link in links]
        if len(set(rates)) > 1:
            self.close()
            raise BadAudioError(f"{label} has several sampling rates, {rates[:4]} Hz; convert it to FLAC")

    def parts(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        stop = self.frames if count is None else start + count
        for link in self._links:
            if start < link.frames and stop > max(start, 0):
                yield from link.parts(max(start, 0), min(stop, link.frames) - max(start, 0))
            start, stop = start - link.frames, stop - link.frames

    def close(self) -> None:
        for link in self._links:
            link.close()


class _Cut(Sound):
    """Part of a recording; the rest is not decoded, if its format supports seeking."""

    def __init__(self, whole: Sound, start_seconds: float, end_seconds: float | None) -> None:
        self._whole, self.rate_hz, self.label = whole, whole.rate_hz, whole.label
        self._start = round(start_seconds * self.rate_hz)
        stop = whole.frames if end_seconds is None else round(end_seconds * self.rate_hz)
        self.frames = min(stop, whole.frames) - self._start
        if self.frames <= 0 or stop - whole.frames > _TOLERANCE_SECONDS * self.rate_hz:
            self.close()
            span = f"from {start_seconds:g} s to {'its end' if end_seconds is None else f'{end_seconds:g} s'}"
            seconds = whole.frames / self.rate_hz
            raise BadAudioError(f"{self.label} has no part {span}: it lasts {seconds:.4f} s; correct start_seconds")

    def parts(self, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        left = max(0, self.frames - start)
        yield from self._whole.parts(self._start + start, left if count is None else min(count, left))

    def close(self) -> None:
        self._whole.close()


def cut(whole: Sound, start_seconds: float | None, end_seconds: float | None) -> Sound:
    """Return the part of a recording between two times; None is its beginning or its end.

    BadAudioError is raised if the part is empty, or ends after the recording by more than 0.1 s.
    """
    return whole if start_seconds is None and end_seconds is None else _Cut(whole, start_seconds or 0.0, end_seconds)


def open_recording(source: Source, name: str) -> Sound:
    """Open a recording; raise the errors of `audio.read_audio`."""
    if isinstance(source, Address):
        source = read_file(source, lambda file: file.read())
    if isinstance(source, bytes):
        return _open_content(source, source, name)
    if not Path(source).is_file():
        raise FileNotFoundError(f"there is no audio file {name}")
    with open(source, "rb") as file:
        if not file.seek(0, io.SEEK_END):
            raise BadAudioError(f"{name} is empty: 0 bytes")
        # A private copy of changed pages, so that headers can be corrected.
        return _open_content(source, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), name)


def _open_content(source: Source, content: Content, name: str) -> Sound:
    if not len(content):
        raise BadAudioError(f"{name} is empty: 0 bytes")
    form = identify(content)
    if form is not None and form.decoder == "mp3":
        parts = read_parts(content if form.stop is None else content[: form.stop], form.start)
        if parts:  # none in the free format
            return _open_mp3(parts, name)
    if form is not None and form.start and form.decoder == "libsndfile" and isinstance(source, bytes):
        # libsndfile skips a tag, but loses as many bytes at the end of data in memory.
        rest = source[form.start :]
        return _open_content(rest, rest, name)
    if form is not None and form.decoder == "ffmpeg":
        _check_container(content, form, name)
        return _open_with_ffmpeg(source, content, form, name)
    try:
        if form is not None and form.decoder == "ogg":
            _check_container(content, form, name)
            return _open_ogg(source, content, form.start, name)
        file = _File(_as_file(source), name)
    except soundfile.SoundFileError as error:
        if form is not None and _import_ffmpeg()[0] is not None:
            return _open_with_ffmpeg(source, content, form, name)
        raise _not_audio(content, form, name, "libsndfile or FFmpeg", error) from error

    is_raw = file.format == "RAW" and not str(source).lower().endswith(_HEADERLESS)
    if is_raw or file.frames == 0:
        file.close()
        if is_raw:
            raise BadAudioError(f"{name} ({len(content)} bytes) has no header of an audio format")
        file = _open_unfinished(content, name)
    _check_announced_size(file)
    if file.is_seekable:
        return file
    file.close()
    blocks = partial(_file_blocks, source, name)
    return _Forward(blocks, file.rate_hz, name, keep=len(content) <= _WHOLE_BYTES)


def _as_file(source: Source) -> Any:
    return _Bytes(source) if isinstance(source, bytes) else source


def _file_blocks(source: Source, name: str) -> Iterator[np.ndarray]:
    with closing(_File(_as_file(source), name)) as file:
        yield from file.parts()


def _open_mp3(parts: list[Part], name: str) -> Sound:
    for part in parts:
        kind = part.kind
        if part.announced is not None and not _is_placeholder(part.announced, part.num_frames):
            _check_length(
                part.num_frames * kind.frame_samples, part.announced * kind.frame_samples, kind.rate_hz, name
            )
    if not any(part.num_frames for part in parts):
        raise BadAudioError(f"{name} is empty: it contains no samples")
    files = [_File(_Bytes(part.content), name) for part in parts if part.num_frames]
    return files[0] if len(files) == 1 else _Chain(files, name)


def _check_container(content: Content, form: Format, name: str) -> None:
    """Raise BadAudioError if an Ogg or AVI file is truncated; decoders read it as if it were complete."""
    if form.name.startswith("Ogg") and not read_links(content, form.start)[1]:
        raise BadAudioError(f"{name} is truncated: it ends within a page")
    if form.name == "AVI":
        actual = len(content) - form.start
        announced = 8 + int.from_bytes(content[form.start + 4 : form.start + 8], "little")
        if announced > actual + _AVI_TOLERANCE_BYTES and not _is_placeholder(announced, actual):
            raise BadAudioError(f"{name} is truncated: it announces {announced} bytes, but it has {actual}")


def _open_ogg(source: Source, content: Content, start: int, name: str) -> Sound:
    links, _ = read_links(content, start)
    if len(links) == 1 and links[0].has_end_mark:
        return _File(_as_file(source), name)
    files = [_File(_Bytes(link.read(content)), name) for link in links]
    return files[0] if len(files) == 1 else _Chain(files, name)


def _open_unfinished(content: Content, name: str) -> _File:
    """Open a file with a header that announces no data; raise BadAudioError if it has none."""
    corrections = correct_sizes(content)
    if not corrections:
        raise BadAudioError(f"{name} is empty: it contains no samples")
    corrected: Any = bytearray(content) if isinstance(content, bytes) else content
    for position, value in corrections:
        corrected[position : position + len(value)] = value
    file = _File(_Bytes(corrected) if isinstance(content, bytes) else corrected, name)
    _note(name, f"its header announces no data; all {file.frames} samples to the end of the file are read")
    return file


def _check_announced_size(file: _File) -> None:
    """Raise BadAudioError if more data are announced than the file contains, by more than 0.1 s of sound."""
    for number in _ANNOUNCED.findall(file.extra_info):
        announced, actual = map(int, number)
        if announced <= actual or _is_placeholder(announced, actual):
            continue
        seconds = file.frames / file.rate_hz * (announced - actual) / max(1, actual)
        if seconds > _TOLERANCE_SECONDS or not actual:
            file.close()
            raise BadAudioError(
                f"{file.label} is truncated: its header announces {announced} bytes, but it has {actual}"
            )
        _note(file.label, f"its header announces {announced} bytes, but it has {actual}")


def _is_placeholder(announced: int, actual: int) -> bool:
    """Return whether an announced size is none: zero, near 2^31 or 2^32, or absurdly larger than the actual size."""
    is_near = abs(announced - 2**31) <= 2**24 or announced >= 2**32 - 2**24
    return announced == 0 or is_near or announced > max(100 * actual, 2**24)


def _check_length(done: int, expected: int, rate_hz: int, name: str) -> None:
    """Raise BadAudioError if more than 0.1 s of the expected samples are missing, and note fewer missing samples."""
    if expected - done > _TOLERANCE_SECONDS * rate_hz:
        raise BadAudioError(f"{name} is truncated: {done} of {expected} samples could be read")
    if expected > done:
        _note(name, f"{done} of {expected} announced samples could be read")


def _open_with_ffmpeg(source: Source, content: Content, form: Format, name: str) -> Sound:
    """Open a recording with FFmpeg: decode a short one, and prepare to decode a long one in blocks."""
    # FFmpeg receives no path, only bytes of an audio file, because a playlist could make it fetch other files.
    if _PLAYLIST.search(content[: 2**20].split(b"\0", 1)[0]):
        raise _not_audio(content, None, name, "libsndfile or FFmpeg", ValueError("it starts with a playlist"))
    make, problem = _import_ffmpeg()
    if make is None:
        raise MissingDecoderError(
            f"{name} ({form.name}) needs FFmpeg, which torchcodec does not find ({problem}); install FFmpeg 4 to 8 "
            "(apt-get install ffmpeg, conda install ffmpeg) and torchcodec, or convert the file to FLAC"
        )

    def make_decoder() -> Any:
        if isinstance(source, bytes):
            return make(source)
        return make(content[:] if len(content) <= _WHOLE_BYTES else open(source, "rb"))

    def blocks() -> Iterator[np.ndarray]:
        position = 0
        try:
            for block in _ffmpeg_blocks(make_decoder()) if is_long else [_decode_all(make_decoder())]:
                # Encoders of MP4 pad the last frame.
                yield block[: announced - position] if announced is not None and form.name == "MP4" else block
                position += len(block)
        except Exception as error:
            raise _not_audio(content, form, name, "FFmpeg", error) from error

    try:
        metadata = make_decoder().metadata
    except Exception as error:
        raise _not_audio(content, form, name, "FFmpeg", error) from error
    seconds = _announced_seconds(metadata, content, form)
    announced = None if seconds is None else round(seconds * metadata.sample_rate)
    is_long = len(content) > _WHOLE_BYTES if seconds is None else seconds > _WHOLE_SECONDS
    return _Forward(blocks, metadata.sample_rate, name, announced, keep=not is_long)


def _import_ffmpeg() -> tuple[Any, str]:
    """Return torchcodec's `AudioDecoder`, or None and the reason if torchcodec or FFmpeg's libraries are missing."""
    try:
        from torchcodec.decoders import AudioDecoder
    except Exception as error:  # RuntimeError or OSError without FFmpeg's libraries
        return None, _first_line(error)
    return AudioDecoder, ""


def _decode_all(decoder: Any) -> np.ndarray:
    return decoder.get_all_samples().data.mean(dim=0).numpy()


def _announced_seconds(metadata: Any, content: Content, form: Format) -> float | None:
    """Return the length that the header announces, without the time before the first sample; None if it has none."""
    if form.name == "AAC":
        return count_aac_seconds(content, form.start) or None
    if form.name in _ESTIMATED or (form.name.startswith("Ogg") and len(read_links(content, form.start)[0]) > 1):
        return None  # of a chain, only the length of one part is known
    seconds = metadata.duration_seconds_from_header
    if seconds is None:  # Matroska has only the length of the whole file
        seconds = getattr(metadata, "duration_seconds", None)
    begin = getattr(metadata, "begin_stream_seconds_from_header", None) or 0.0
    return seconds if seconds is None or not 0 < begin < _MOST_BEGIN_SECONDS else seconds - begin


def _ffmpeg_blocks(decoder: Any) -> Iterator[np.ndarray]:
    """Decode a recording in blocks of whole frames.

    torchcodec starts again from the beginning of the file if the next block starts within a frame. Its public function
    returns parts of frames, therefore the function below it is called, which returns whole frames.
    """
    from torchcodec import _core

    rate_hz = decoder.metadata.sample_rate
    time = max(0.0, getattr(decoder.metadata, "begin_stream_seconds_from_header", None) or 0.0)
    while True:
        span = {"start_seconds": time, "stop_seconds": time + _BLOCK_SECONDS}
        try:
            frames, first = _core.get_frames_by_pts_in_range_audio(decoder._decoder, **span)
        except RuntimeError as error:
            if "No audio frames were decoded" in str(error):  # the end
                return
            raise
        skipped = max(0, round((time - float(first)) * rate_hz))
        block = frames[:, skipped:].mean(dim=0).numpy()
        if not len(block):
            return
        yield block
        time = max(time, float(first)) + len(block) / rate_hz


def _not_audio(content: Content, form: Format | None, name: str, reader: str, error: Exception) -> BadAudioError:
    about = f"{name} ({len(content)} bytes)"
    if form is None:
        return BadAudioError(f"{about} is not audio that {reader} can decode: {_first_line(error)}")
    if "no specified stream" in str(error):
        return BadAudioError(f"{about} is {form.name} without sound; leave it out")
    return BadAudioError(
        f"{about} is {form.name} that {reader} cannot decode: {_first_line(error)}; convert it to FLAC"
    )


def _first_line(error: Exception) -> str:
    """Return the first line of a decoder error, without source file names and line numbers."""
    message = getattr(error, "error_string", None) or str(error) or type(error).__name__
    if "No audio frames were decoded" in message:
        return "it contains no frame that can be decoded"
    if "does not exist" in message:  # libsndfile, if it takes a file for MP3 by its suffix
        return "its format is unknown"
    return re.sub(r"^\w+, \S+\.cpp:\d+, ", "", message.splitlines()[0].removesuffix(" Likely causes:"))


def _note(name: str, deviation: str) -> None:
    """Log a deviation that loses no sound: a warning for the first file of a process, then information."""
    level = logging.INFO if _noted else logging.WARNING
    _noted.add(level)
    logger.log(level, "%s: %s", name, deviation)


def _mean_of_channels(block: np.ndarray) -> np.ndarray:
    """Return the mean of all channels: (frames, channels) -> (frames,), up to 20 times as fast as numpy's `mean`."""
    waveform = block[:, 0].copy()
    for channel in block.T[1:]:
        waveform += channel
    waveform /= np.float32(block.shape[1])
    return waveform


def _count_lost_granules(waveform: np.ndarray) -> int:
    """Return how many granules of an MP3 libmpg123 has replaced by zeros, because they are damaged.

    The sound breaks off at their zeros. Before and after silence that was encoded, the filter bank lets it fade.
    """
    sampled = waveform[:: _GRANULE_SAMPLES // 2] == 0
    if not (sampled[1:] & sampled[:-1]).any():
        return 0
    loud = np.flatnonzero(waveform)
    befores, afters = loud, np.append(loud[1:], len(waveform))
    is_long = afters - befores > _GRANULE_SAMPLES
    befores, afters = befores[is_long], afters[is_long]
    edges = np.maximum(np.abs(waveform[befores]), np.abs(waveform[np.minimum(afters, len(waveform) - 1)]))
    lengths = (afters - befores - 1)[edges > _MOST_FADED]
    return int((lengths // _GRANULE_SAMPLES).sum())


def _check_samples(waveform: np.ndarray, name: str, start: int = 0) -> np.ndarray:
    if not len(waveform):
        raise BadAudioError(f"{name} is empty: it contains no samples")
    if not np.isfinite(waveform).all():
        first = start + int(np.argmin(np.isfinite(waveform)))
        raise BadAudioError(f"{name} contains NaN or infinite samples, the first at {first}")
    peak = max(waveform.max(), -waveform.min())
    if peak > MAX_AMPLITUDE:
        raise BadAudioError(
            f"{name} has a peak of {peak:.6g}, but full scale is 1; divide integer samples by 32768, or replace a "
            "damaged file"
        )
    return waveform


def check_rate(rate_hz: int, name: str) -> int:
    """Return the sampling rate; raise BadAudioError if it is below 200 Hz or above 10 MHz."""
    if not LEAST_RATE_HZ <= rate_hz <= MOST_RATE_HZ:
        expected = f"{LEAST_RATE_HZ} to {MOST_RATE_HZ}"
        raise BadAudioError(f"{name} has a sampling rate of {rate_hz} Hz; expected {expected}: correct its header")
    return rate_hz
