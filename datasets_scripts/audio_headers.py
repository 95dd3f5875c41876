"""Read the structure that decoders do not check: tags, unfinished headers, frames of MP3, links and ends of Ogg files.

libsndfile reads incomplete and chained Ogg files (RFC 3533) without an error, and unfinished WAV files as empty.
"""

import mmap
import re
from functools import lru_cache
from typing import NamedTuple, TypeAlias

Content: TypeAlias = bytes | mmap.mmap

# Headers of sound without a length: the `data` chunk of WAV and RF64, `SSND` of AIFF, and the `data` chunk of Wave64.
_UNFINISHED = re.compile(rb"data(?:\0{4}|\xff{4})|SSND.{4}\0{8}|data\xf3\xac\xd3\x11.{16}", re.DOTALL)
_CHUNK = re.compile(rb"[A-Za-z0-9 _]{4}")

MP3_SYNC = re.compile(rb"\xff[\xe2-\xff]")
"""First bytes of a frame of MP3."""

# Bit rates of layer III in kbit/s, of MPEG 1 and of MPEG 2 and 2.5.
_KILOBITS = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
)
_RATES_HZ = (44_100, 48_000, 32_000, 10**9)  # of MPEG 1; the last one is no rate
_HALVINGS = {0xFA: 0, 0xFB: 0, 0xF2: 1, 0xF3: 1, 0xE2: 2, 0xE3: 2}  # of the rate, by the second byte of layer III

_FIRST_PAGE = re.compile(rb"OggS\0[\x02\x06]")  # of a stream: flags of a page with the first packet
_PAGE_HEADER_BYTES = 27
_LAST = 4  # flag of the last page of a stream


def skip_id3(content: Content) -> int:
    """Return the position after all ID3 tags at the beginning."""
    start = 0
    while content[start : start + 3] == b"ID3":
        header = content[start : start + 10].ljust(10, b"\0")
        size = 0
        for byte in header[6:]:  # four bytes of seven bits
            size = size << 7 | byte & 0x7F
        start += 10 + size + (10 if header[5] & 0x10 else 0)  # the flag of a footer
    return start


def count_mp3_frames(content: Content) -> tuple[int, int, bool]:
    """Count the frames of layer III at the beginning, including that of a tag.

    Frames of the free format, which have no announced size, do not count.

    Returns:
        Their number, the position after them, and whether the content ends within the next frame.
    """
    count = stop = 0
    while size := _mp3_frame_bytes(content[stop : stop + 4]):
        if stop + size > len(content):
            return count, stop, True
        count, stop = count + 1, stop + size
    return count, stop, False


@lru_cache
def _mp3_frame_bytes(header: bytes) -> int:
    """Return the size of a frame of layer III, or 0 if the four bytes are no header of one."""
    if len(header) < 4 or header[0] < 0xFF or header[1] not in _HALVINGS:
        return 0
    halvings = _HALVINGS[header[1]]
    rate_hz = _RATES_HZ[header[2] >> 2 & 3] >> halvings
    size = _KILOBITS[halvings > 0][header[2] >> 4] * (72_000 if halvings else 144_000) // rate_hz
    return size and size + (header[2] >> 1 & 1)


def find_sound(content: Content) -> int | None:
    """Return the position of samples that the header does not announce, or None if none follow.

    Recorders write the sizes into WAV, RF64, AIFF, AU and Wave64 files when they finish.
    """
    if content[:4] == b".snd":
        start = int.from_bytes(content[4:8], "big")
    else:
        header = _UNFINISHED.search(content)
        start = len(content) if header is None else header.end()
    head, size = content[start : start + 4], content[start + 4 : start + 8]
    for order in ("little", "big"):
        if _CHUNK.match(head) and start + 8 + int.from_bytes(size, order) <= len(content):  # another chunk
            return None
    return start if start < len(content) else None


class Link(NamedTuple):
    """Part of an Ogg file that is a whole Ogg file: its bytes, and the first bytes of each of its streams."""

    content: Content
    streams: list[bytes]


def is_whole_ogg(content: Content) -> bool:
    """Return whether an Ogg file ends at the end of a page and of a packet."""
    start = content.rfind(b"OggS\0")
    body = start + _PAGE_HEADER_BYTES + sum(content[start + 26 : start + 27])
    sizes = content[start + _PAGE_HEADER_BYTES : body]
    stop = body + sum(sizes)
    rest = content[stop : stop + 4]  # none, or data that is no page, such as a tag
    # A page without segments, as VLC writes at the end, ends no packet and starts none.
    ends_packet = not sizes or sizes[-1] < 255
    return ends_packet and stop <= len(content) and not (rest and b"OggS".startswith(rest))


def read_links(content: Content) -> list[Link]:
    """Split an Ogg file into its links. Most files have one link; a chain has several, such as joined files."""
    starts: list[int] = []
    streams: list[list[bytes]] = []
    stop = 0
    for page in _FIRST_PAGE.finditer(content):
        start = page.start()
        if not starts or start != stop:  # the first pages of all streams of a link follow each other
            starts.append(start)
            streams.append([])
        body = start + _PAGE_HEADER_BYTES + content[start + 26]
        stop = body + sum(content[start + _PAGE_HEADER_BYTES : body])
        streams[-1].append(content[body : body + 8])
    stops = [*starts[1:], len(content)][: len(starts)]
    return [Link(content[start:stop], names) for start, stop, names in zip(starts, stops, streams, strict=True)]


def mark_end(link: Content) -> Content:
    """Return a link with the end mark that libsndfile requires to read Opus, and that some recorders leave out."""
    start = link.rfind(b"OggS\0")
    if link[start + 5] & _LAST:
        return link
    page = bytearray(link[start:])
    page[5] |= _LAST
    page[22:26] = bytes(4)
    page[22:26] = _checksum(page).to_bytes(4, "little")
    return link[:start] + bytes(page)


def _checksum(page: bytearray) -> int:
    """Compute the CRC of a page (RFC 3533, section 6): polynomial 0x04C11DB7, no reflection."""
    value = 0
    for byte in page:
        value ^= byte << 24
        for _ in range(8):
            value = value << 1 ^ (0x104C11DB7 if value & 0x80000000 else 0)
    return value
