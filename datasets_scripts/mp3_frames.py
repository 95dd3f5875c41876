"""Find and count the frames of MP3 data, because decoders only estimate a length that is not announced correctly.

libsndfile divides the file size by the bit rate of the first frame, unless a Xing or Info tag announces the number of
frames. This is wrong for variable bit rates, for data between the frames, and if the tag itself is wrong.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

Content: TypeAlias = bytes | mmap.mmap

# Bit rates in kbit/s, indexed by (is MPEG 1, layer) and by the value in the frame header.
_KILOBITS = {
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES_HZ = (44100, 48000, 32000)  # for MPEG 1; half of these rates for MPEG 2, a quarter for MPEG 2.5
_HALVINGS = {3: 0, 2: 1, 0: 2}  # by the version in the frame header: MPEG 1, MPEG 2, MPEG 2.5

# Number of successive frames that prove that data is MP3, at its beginning and after other data.
_FRAMES_AT_START, _FRAMES_ELSEWHERE = 2, 4
_MOST_LEADING_BYTES = 2**20
_TAG_POSITIONS = slice(4, 48)  # of a Xing, Info or VBRI tag in its frame


class Kind(NamedTuple):
    """Format of a frame. Only frames of the same kind can be decoded together."""

    rate_hz: int
    layer: int
    is_mono: bool
    is_mpeg_1: bool

    @property
    def frame_samples(self) -> int:
        """Number of samples in a frame."""
        if self.layer == 1:
            return 384
        return 1152 if self.is_mpeg_1 or self.layer == 2 else 576


class Run(NamedTuple):
    """Frames of one kind that follow each other without other data: their bytes and their number."""

    kind: Kind
    start: int
    stop: int
    num_frames: int


@dataclass
class Part:
    """Successive frames of one kind, ready for a decoder that reads the announced number of frames.

    Attributes:
        content: The frames, after a frame that announces their number.
        num_frames: Number of frames with sound.
        announced: Number of frames that the tag of the file announces, or None without one.
    """

    kind: Kind
    content: bytes
    num_frames: int
    announced: int | None


def is_mp3(content: Content, start: int = 0) -> bool:
    """Return whether two successive frames, the only frame of the data, or the frame of a tag are at `start`."""
    if _starts_run(content, start, _FRAMES_AT_START):
        return True
    return _starts_run(content, start, 1) and _find_tag(content[start : start + 64]) is not None


def find_mp3(content: Content, start: int = 0) -> int | None:
    """Return the position of the first frame after other data of up to a megabyte, or None if the data is not MP3."""
    position = content.find(b"\xff", start, start + _MOST_LEADING_BYTES)
    while position >= 0:
        if _starts_run(content, position, _FRAMES_ELSEWHERE):
            return position
        position = content.find(b"\xff", position + 1, start + _MOST_LEADING_BYTES)
    return None


def read_parts(content: Content, start: int = 0) -> list[Part]:
    """Return all frames from `start` on, without other data, as one part per kind of frames.

    The frames of several joined files of the same kind are one part.
    """
    parts: list[Part] = []
    runs: list[Run] = []
    for run in _find_runs(content, start):
        if runs and run.kind != runs[-1].kind:
            parts.append(_make_part(content, runs))
            runs = []
        runs.append(run)
    return [*parts, _make_part(content, runs)] if runs else parts


def _find_runs(content: Content, start: int) -> list[Run]:
    runs = []
    position, size = start, len(content)
    while position >= 0:
        first, num_frames = position, 0
        length, kind = _read_header(content[position : position + 4])
        while length and position + length <= size:
            num_frames += 1
            position += length
            length, following = _read_header(content[position : position + 4])
            if following != kind:
                break
        if num_frames and kind is not None:
            runs.append(Run(kind, first, position, num_frames))

        known = {run.kind for run in runs}
        position = content.find(b"\xff", position)
        while position >= 0:  # after a tag, or damaged data
            kind = _read_header(content[position : position + 4])[1]
            if kind is not None and _starts_run(content, position, 2 if kind in known else _FRAMES_ELSEWHERE):
                break
            position = content.find(b"\xff", position + 1)
    return runs


def _starts_run(content: Content, start: int, count: int) -> bool:
    """Return whether `count` frames of one kind are at `start`, or fewer if they end with the data or with a tag."""
    kind = _read_header(content[start : start + 4])[1]
    for _ in range(count):
        length, following = _read_header(content[start : start + 4])
        if not length or following != kind or start + length > len(content):
            return False
        start += length
        if start == len(content) or content[start : start + 3] in (b"TAG", b"APE", b"LYR"):
            return True
    return True


@lru_cache(maxsize=2**12)
def _read_header(header: bytes) -> tuple[int, Kind | None]:
    """Return the size of a frame in bytes and its kind, or (0, None) if the four bytes are no header of a frame.

    The size is 0 for the free format, which does not announce it.
    """
    bits = int.from_bytes(header, "big") if len(header) == 4 else 0
    version, layer = bits >> 19 & 3, 4 - (bits >> 17 & 3)
    bit_rate, rate = bits >> 12 & 15, bits >> 10 & 3
    if bits >> 21 != 0x7FF or version not in _HALVINGS or layer == 4 or bit_rate == 15 or rate == 3:
        return 0, None

    is_mpeg_1 = version == 3
    kind = Kind(_RATES_HZ[rate] >> _HALVINGS[version], layer, bits >> 6 & 3 == 3, is_mpeg_1)
    kilobits, padding = _KILOBITS[is_mpeg_1, layer][bit_rate], bits >> 9 & 1
    if not kilobits:
        return 0, kind
    if layer == 1:
        return (12 * kilobits * 1000 // kind.rate_hz + padding) * 4, kind
    return kind.frame_samples // 8 * kilobits * 1000 // kind.rate_hz + padding, kind


def _make_part(content: Content, runs: list[Run]) -> Part:
    """Join the frames of `runs`, with a first frame that announces their number (layer III)."""
    kind, start, view = runs[0].kind, runs[0].start, memoryview(content)
    num_frames = sum(run.num_frames for run in runs)
    if kind.layer < 3:
        return Part(kind, b"".join(view[run.start : run.stop] for run in runs), num_frames, None)

    header = content[start : start + 4]
    first = content[start : start + _read_header(header)[0]]
    tag = _find_tag(first)
    announced = None
    if tag is not None:
        num_frames -= 1  # the frame of the tag is silent
        start += len(first)
    if tag in (b"Xing", b"Info"):
        place = first.index(tag) + 8  # flags, and the numbers of frames and bytes if flagged, follow the name
        if first[place - 1] & 1:
            announced = int.from_bytes(first[place : place + 4], "big")
            # The rest of the tag can contain the delay of the encoder.
            size = sum(run.stop - run.start for run in runs)
            counts = [num_frames, size] if first[place - 1] & 2 else [num_frames]
            stored = b"".join(count.to_bytes(4, "big") for count in counts)
            first = first[:place] + stored + first[place + len(stored) :]
    elif tag == b"VBRI":
        place = first.index(tag) + 14
        announced = int.from_bytes(first[place : place + 4], "big")
    if tag not in (b"Xing", b"Info") or announced is None:
        first = _make_announcing_frame(header, num_frames)

    pieces: list[bytes | memoryview] = [first, view[start : runs[0].stop]]
    pieces += [view[run.start : run.stop] for run in runs[1:]]
    return Part(kind, b"".join(pieces), num_frames, announced)


def _find_tag(frame: bytes) -> bytes | None:
    """Return the name of the tag in a frame that contains the number of frames, or None without a tag."""
    for name in (b"Xing", b"Info", b"VBRI"):
        if name in frame[_TAG_POSITIONS]:
            return name
    return None


def _make_announcing_frame(header: bytes, num_frames: int) -> bytes:
    """Return a silent frame of layer III with the given header; its Xing tag announces `num_frames`."""
    kind = _read_header(header)[1]
    assert kind is not None
    bits = int.from_bytes(header, "big")
    bits = bits & ~(0xF << 12 | 1 << 9) | 9 << 12 | 1 << 16  # 128 or 80 kbit/s, no padding, no checksum
    side_information = {(True, True): 17, (True, False): 32, (False, True): 9, (False, False): 17}

    tag = b"Xing" + (1).to_bytes(4, "big") + num_frames.to_bytes(4, "big")
    start = bits.to_bytes(4, "big") + bytes(side_information[kind.is_mpeg_1, kind.is_mono]) + tag
    return start.ljust(_read_header(start[:4])[0], b"\0")
