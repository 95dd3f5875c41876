"""Decode recordings with FFmpeg, which PyAV contains (extra `ffmpeg`). FFmpeg receives bytes, and opens no other file.

A part is decoded from one second before it if the position of the decoded samples is exact: the clock of the container
counts samples, or all frames have the same length (Matroska, WebM and Windows Media have a clock of milliseconds). Only
Vorbis in these is decoded from the beginning, because its frames have several lengths.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import av
import numpy as np

logger = logging.getLogger(__name__)

# Formats whose headers contain the length.
_WITH_LENGTH = "aiff,ape,au,caf,dsf,flac,iff,matroska,mov,mpc,mpc8,nistsphere,oma,ogg,rm,shn,tak,tta,voc,w64,wv"
# FFmpeg estimates the length of these from the bit rate or from the last time stamp, or headers are often wrong.
_OTHERS = (
    "aac,ac3,aea,amr,amrnb,amrwb,asf,ast,avi,bonk,dss,dts,dtshd,eac3,flv,g726,gsm,ircam,loas,mlp,mp3,mpeg,mpegts,mpegvideo,nut,"
    "osq,qoa,rka,sbc,sol,sox,svag,truehd,vqf,wav,wavarc,wsd,wtv,wve,xwma"
)
# Without the first list, FFmpeg would open playlists and the files that they name.
_OPTIONS = {"format_whitelist": f"{_WITH_LENGTH},{_OTHERS}", "protocol_whitelist": "none"}
_PREROLL_SECONDS = 1.0  # decoded before a part, because a frame needs data of earlier ones
_MOST_BEGIN_SECONDS = 0.5  # a later first sample is a time of day or of a broadcast, not part of the length
_MOST_PADDED_FRAMES = 2  # that encoders of MP4 add at the end
_BLOCK_SAMPLES = 2**18


class Track:
    """Sound of a recording that FFmpeg decodes: a reader for `decoders.Sound`.

    Args:
        open_file: Function that opens the file, which has no name, so that the content selects the format.
        name: Name for messages.

    Attributes:
        length: Number of samples per channel by the header or, if it has no length, by the packets. None: unknown.
        slack: Number of samples that the header may count too many, because it counts whole frames.

    Raises:
        av.FFmpegError: The format is unknown, or the file is damaged.
        ValueError: There is no sound, or none that can be decoded.
    """

    def __init__(self, open_file: Callable[[], Any], name: str) -> None:
        self._open_file, self._name = open_file, name
        self.rate_hz, self._num_lost = 0, 0
        self._open()
        form = self._container.format.name.split(",")[0]
        self._is_padded = form == "mov"
        self.slack = len(self._first) if form == "caf" else 0
        self.length = self._announced_length(form)
        if self.length is None and form != "asf":  # its packets overlap
            ticks = sum(packet.duration or 0 for packet in self._container.demux(self._stream))
            self.length = len(self._first) + round(ticks * self._tick) if ticks else None
            self._open()

    def _open(self) -> None:
        self._container = av.open(self._open_file(), options=_OPTIONS, metadata_errors="replace")
        self._stream: Any = self._container.streams.best("audio")
        if self._stream is None or self._stream.codec_context is None:
            raise ValueError("its codec is unknown" if self._container.streams.audio else "it has no sound")
        context = self._stream.codec_context
        context.thread_count, self._is_vorbis = 1, context.name == "vorbis"
        # PyAV 18.1 frees an unusual order of channels with each object that shows it; the order is not needed.
        layout = context.layout
        if layout.nb_channels:
            context.layout = f"{layout.nb_channels} channels"
        self._pieces = self._decode()
        first = next(self._pieces, None)
        if first is None:
            raise ValueError("it contains no frame that can be decoded")
        self._first_pts, self._first = first
        self._tick = float(self._stream.time_base * self.rate_hz)  # samples per unit of the clock

    def _announced_length(self, form: str) -> int | None:
        """Return the number of samples by the header, without the time before the first one, or None."""
        stream, container = self._stream, self._container
        if form not in _WITH_LENGTH.split(",") or (form == "matroska" and stream.duration):
            return None  # streams of Matroska have no length: FFmpeg has estimated one by the bit rate
        begin = float((stream.start_time or 0) * stream.time_base)
        if stream.duration:
            seconds = float(stream.duration * stream.time_base)
        elif "DURATION" in stream.metadata:  # of Matroska, such as 00:00:03.008000000
            hours, minutes, rest = stream.metadata["DURATION"].split(":")
            seconds = 3600 * int(hours) + 60 * int(minutes) + float(rest)
        elif container.duration and len(container.streams) == 1:
            seconds = container.duration / av.time_base
        else:
            return None
        if form == "matroska" or 0 < begin < _MOST_BEGIN_SECONDS:
            seconds -= begin
        return max(1, round(seconds * self.rate_hz))

    def blocks(self, start: int, count: int | None) -> Iterator[np.ndarray]:
        """Yield float32 arrays (samples, channels) from the sample `start` on, in total at least `count` samples."""
        position, pieces = self._seek(start)
        most = min(count or _BLOCK_SAMPLES, _BLOCK_SAMPLES)
        group: list[np.ndarray] = []
        try:
            for piece in pieces:
                if group and (sum(map(len, group)) >= most or group[0].shape[1] != piece.shape[1]):
                    yield np.concatenate(group)
                    group = []
                if position + len(piece) > start:
                    group.append(piece[max(0, start - position) :])
                position += len(piece)
            if not group:
                return
            last = np.concatenate(group)
            excess = position - self.length if self._is_padded and self.length else 0
            yield last[:-excess] if 0 < excess <= _MOST_PADDED_FRAMES * len(piece) else last
        finally:
            if self._num_lost:
                seconds = self._num_lost / self.rate_hz
                logger.warning("%s: %.3f s in damaged packets cannot be decoded and are silent", self._name, seconds)
        if 2 * self._num_lost > position:
            raise ValueError("most of its packets are damaged")

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def _seek(self, start: int) -> tuple[int, Iterator[np.ndarray]]:
        """Return the position of a sample at or before `start`, and the decoded samples from there on."""
        begin = start - _PREROLL_SECONDS * self.rate_hz - 2 * len(self._first)
        if begin > self.rate_hz and self._first_pts is not None and (self._tick <= 1 or not self._is_vorbis):
            try:
                self._container.seek(self._first_pts + int(begin / self._tick), stream=self._stream)
                pieces = self._decode()
                next(pieces)  # may be incomplete
                # the silence of a damaged packet has no time stamp
                pts, piece = next((pts, piece) for pts, piece in pieces if pts is not None)
                grid, offset = (1, 0) if self._tick <= 1 else (len(piece), len(self._first))
                counted = (pts - self._first_pts) * self._tick
                position = offset + round((counted - offset) / grid) * grid
                if position <= start and abs(position - counted) <= max(0.5, min(2 * self._tick, grid / 4)):
                    return position, chain([piece], (samples for _, samples in pieces))
            except (av.FFmpegError, StopIteration):
                pass
            self._open()
        return 0, chain([self._first], (samples for _, samples in self._pieces))

    def _decode(self) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yield the decoded frames with their time stamps; silence replaces damaged packets between them."""
        resampler: Any = None
        kind, lost, is_cut = None, 0, False
        for packet in self._container.demux(self._stream):
            is_cut = packet.is_corrupt or (is_cut and not packet.size)
            try:
                frames = packet.decode()
            except av.FFmpegError:
                is_cut = True
                lost += round((packet.duration or 0) * float(packet.time_base) * self.rate_hz)
                continue
            for frame in frames:
                self.rate_hz = self.rate_hz or frame.sample_rate
                if frame.sample_rate != self.rate_hz:
                    rates = f"{self.rate_hz} and {frame.sample_rate} Hz"
                    raise ValueError(f"it has several sampling rates, {rates}; convert it to FLAC")
                num_channels = frame.layout.nb_channels
                if kind != (frame.format.name, frame.layout.name):
                    kind = frame.format.name, frame.layout.name
                    # Packed samples, because PyAV 18.1 crashes when it converts eight or more planes.
                    resampler = av.AudioResampler(format="flt")
                if lost:
                    yield None, np.zeros((lost, num_channels), np.float32)
                    self._num_lost, lost = self._num_lost + lost, 0
                for packed in resampler.resample(frame):
                    yield frame.pts, packed.to_ndarray().reshape(-1, num_channels)
        self._num_lost += lost
        form = self._container.format.name
        is_open_ended = form in ("mp3", "wav") or (form == "caf" and not self._stream.frames)  # a tag may follow
        if is_cut and not is_open_ended:
            raise ValueError("it ends within a packet, and is probably truncated")
