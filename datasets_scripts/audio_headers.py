"""Identify the format of a recording by its content, and read the structure of WAV, AIFF, AAC and Ogg files.

libsndfile reads incomplete and chained Ogg files (RFC 3533) without an error, and unfinished WAV files as empty.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .mp3_frames import Content, find_mp3, is_mp3

# First bytes of formats that only FFmpeg decodes.
_FFMPEG = {
    "MP4": rb"....(?:ftyp|moov|mdat|wide)|\x00...(?:free|skip)",
    "Matroska or WebM": rb"\x1aE\xdf\xa3",
    "Windows Media": rb"0&\xb2u\x8ef\xcf\x11",
    "AAC": rb"\xff[\xf0\xf1\xf8\xf9]|ADIF|\x56[\xe0-\xff].{20,380}\x56[\xe0-\xff]",
    "WavPack": rb"wvpk",
    "AMR": rb"#!AMR",
    "Monkey's Audio (APE)": rb"MAC .[\x0b-\x10]",
    "Musepack": rb"MPCK|MP\+[\x07\x17]",
    "True Audio (TTA)": rb"TTA[12][\x00-\x1f]",
    "DSD": rb"DSD [\x00-\x1f]|FRM8\x00",
    "TAK": rb"tBaK",
    "AC-3": rb"\x0b\x77",
    "DTS": rb"\x7f\xfe\x80\x01|\xfe\x7f\x01\x80|\x1f\xff\xe8\x00|\xff\x1f\x00\xe8",
    "MPEG-TS": rb"\x47.{187}\x47|.{4}\x47.{191}\x47",
    "MPEG video": rb"\x00\x00\x01[\xb3\xba]",
    "Flash video": rb"FLV\x01",
    "RealMedia": rb"\.RMF|\.ra\xfd",
    "AVI": rb"RIFF....AVI ",
}
_PATTERNS = {name: re.compile(pattern, re.DOTALL) for name, pattern in _FFMPEG.items()}

# Codecs that libsndfile decodes, in WAV (format tags), AIFF, CAF and Ogg files.
_PCM, _FLOAT, _WAV_MP3, _EXTENSIBLE = 0x1, 0x3, 0x55, 0xFFFE
_WAV_CODECS = (_PCM, 0x2, _FLOAT, 0x6, 0x7, 0x11, 0x31, 0x38, 0x40)
_AIFF_CODECS = re.compile(rb"NONE|sowt|twos|(fl|FL)(32|64)|[ua]law|[UA]LAW|GSM |ima4|in24|in32|42ni|23ni|raw |DWVW")
_CAF_CODECS = (b"lpcm", b"alac", b"ulaw", b"alaw")
_OGG_CODECS = ("Vorbis", "Opus")

_UNKNOWN_SIZE = 0xFFFFFFFF
_CHUNK = re.compile(rb"[A-Za-z0-9 _]{4}")

_PAGE_HEADER_BYTES = 27
_FIRST, _LAST = 2, 4  # flags of the first and the last page of a stream

# First bytes of the first packet of a stream, and the name of its codec.
_OGG_STREAMS = {
    b"\x01vorbis": "Vorbis",
    b"OpusHead": "Opus",
    b"\x7fFLAC": "FLAC",
    b"Speex   ": "Speex",
    b"\x80theora": "Theora video",
    b"fishead\0": "Skeleton",
}


class Format(NamedTuple):
    """Format of a recording.

    Attributes:
        name: Name for messages, such as "Ogg FLAC".
        decoder: "libsndfile", "mp3" (libsndfile reads the frames from `start` to `stop`), "ogg" (libsndfile reads each
            link of the file) or "ffmpeg".
        start: Position of the data after tags, or of the MP3 data.
        stop: End of the MP3 data in a WAV file. None: the end of the file.
    """

    name: str
    decoder: str
    start: int = 0
    stop: int | None = None


def identify(content: Content) -> Format | None:
    """Return the format of a recording, or None if it is unknown; libsndfile reads some formats not listed here."""
    start = _skip_id3(content)
    head = content[start : start + 400]
    magic = head[:4]
    if magic in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE":
        return _identify_wav(content, start)
    if magic == b"OggS":
        return _identify_ogg(content, start)
    if magic == b"FORM":
        return _identify_aiff(content, start)
    if magic == b"caff":
        codec = head[28:32] if head[8:12] == b"desc" else b"lpcm"
        return _choose(f"CAF with {codec.decode('latin-1')}", codec in _CAF_CODECS, start)
    if magic in (b"fLaC", b".snd", b"riff"):
        return _choose({b"fLaC": "FLAC", b".snd": "AU", b"riff": "Wave64"}[magic], True, start)
    if is_mp3(content, start):
        return Format("MP3", "mp3", start)
    for name, pattern in _PATTERNS.items():
        if pattern.match(head):
            return Format(name, "ffmpeg", start)
    mp3_start = find_mp3(content, start if head else 0)
    return None if mp3_start is None else Format("MP3", "mp3", mp3_start)


def correct_sizes(content: Content) -> list[tuple[int, bytes]]:
    """Return the corrections of a file with a header that announces no data, although data follows it.

    Recorders write the sizes when they finish. The corrections are `[(position, bytes), ...]`; the list is empty if the
    file has no data, or its format is not WAV, RF64, AIFF, AU or Wave64.
    """
    size = len(content)
    if content[:4] in (b"RIFF", b"RIFX", b"RF64"):
        order = ">" if content[:4] == b"RIFX" else "<"
        chunks = _read_chunks(content, order)
        data = chunks.get(b"data", size)
        if data == size or _is_chunk(content, data, order):
            return []
        if b"ds64" in chunks:
            return [(chunks[b"ds64"] + 8, struct.pack("<Q", size - data))]
        return [(data - 4, struct.pack(f"{order}I", _limit(size - data)))]
    if content[:4] == b"FORM":
        chunks = _read_chunks(content, ">")
        sound, common = chunks.get(b"SSND", size), chunks.get(b"COMM", 0)
        if not common or sound + 8 >= size or _is_chunk(content, sound + 8, ">"):
            return []
        channels, _, bits = struct.unpack(">HIH", content[common : common + 8])
        num_frames = (size - sound - 8) // max(1, channels * ((bits + 7) // 8))
        sizes = (sound - 4, _limit(size - sound)), (common + 2, _limit(num_frames))
        return [(position, struct.pack(">I", value)) for position, value in sizes]
    if content[:4] == b".snd":
        return [(8, struct.pack(">I", _UNKNOWN_SIZE))]
    if content[:4] == b"riff":
        data = content.find(b"data\xf3\xac\xd3\x11")
        return [(data + 16, struct.pack("<Q", size - data))] if 0 < data < size - 24 else []
    return []


def count_aac_seconds(content: Content, start: int = 0) -> float:
    """Return the length of raw AAC data in seconds by its ADTS frames, or 0.0 if it has none."""
    rates_hz = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)
    seconds, position = 0.0, start
    while position + 7 <= len(content):
        header = int.from_bytes(content[position : position + 7], "big")
        length, rate = header >> 13 & 0x1FFF, header >> 34 & 15
        if header >> 44 != 0xFFF or rate >= len(rates_hz) or length < 7 or position + length > len(content):
            break
        seconds += 1024 * (1 + (header & 3)) / rates_hz[rate]
        position += length
    return seconds


def _choose(name: str, is_known: bool, start: int) -> Format:
    return Format(name, "libsndfile" if is_known else "ffmpeg", start)


def _limit(size: int) -> int:
    return min(size, _UNKNOWN_SIZE)


def _skip_id3(content: Content) -> int:
    """Return the position after all ID3 tags at the beginning."""
    start = 0
    while content[start : start + 3] == b"ID3" and start + 10 <= len(content):
        header = content[start : start + 10]
        size = 0
        for byte in header[6:]:  # four bytes of seven bits
            size = size << 7 | byte & 0x7F
        start += 10 + size + (10 if header[5] & 0x10 else 0)  # the flag of a footer
    return start


def _read_chunks(content: Content, order: str, start: int = 0) -> dict[bytes, int]:
    """Return the position of the content of each chunk up to the sound: `{name: position}`."""
    chunks: dict[bytes, int] = {}
    position = start + 12
    while position + 8 <= len(content) and not chunks.keys() & {b"data", b"SSND"}:
        name, size = content[position : position + 4], content[position + 4 : position + 8]
        chunks[name] = position + 8
        position += 8 + struct.unpack(f"{order}I", size)[0]
        position += position & 1
    return chunks


def _is_chunk(content: Content, position: int, order: str) -> bool:
    """Return whether a whole chunk starts at `position`."""
    header = content[position : position + 8]
    if len(header) < 8 or not _CHUNK.match(header):
        return False
    return position + 8 + struct.unpack(f"{order}I", header[4:])[0] <= len(content)


def _identify_wav(content: Content, start: int) -> Format:
    order = ">" if content[start : start + 4] == b"RIFX" else "<"
    chunks = _read_chunks(content, order, start)
    place = chunks.get(b"fmt ", len(content))
    if place + 16 > len(content):  # damaged
        return _choose("WAV", True, start)
    codec, channels, _, _, align, bits = struct.unpack(f"{order}HHIIHH", content[place : place + 16])
    if codec == _EXTENSIBLE:
        (codec,) = struct.unpack(f"{order}H", content[place + 24 : place + 26].ljust(2, b"\0"))

    if codec == _WAV_MP3 and b"data" in chunks:
        data = chunks[b"data"]
        (size,) = struct.unpack(f"{order}I", content[data - 4 : data])
        return Format("WAV with MP3", "mp3", data, data + size)
    # libsndfile reads neither integers of 64 bits nor floats of 16, and samples of 24 bits in four bytes incorrectly.
    is_odd = (codec, bits) in ((_PCM, 64), (_FLOAT, 16)) or (codec == _PCM and bits == 24 and align == 4 * channels)
    if is_odd:
        return _choose(f"WAV with {bits} bits in {align // max(1, channels)} bytes", False, start)
    return _choose("WAV" if codec in _WAV_CODECS else f"WAV with codec 0x{codec:04X}", codec in _WAV_CODECS, start)


def _identify_aiff(content: Content, start: int) -> Format:
    if content[start + 8 : start + 12] != b"AIFC":
        return _choose("AIFF", True, start)
    place = _read_chunks(content, ">", start).get(b"COMM", len(content))
    codec = content[place + 18 : place + 22]
    return _choose(f"AIFF with {codec.decode('latin-1')}", bool(_AIFF_CODECS.fullmatch(codec)), start)


def _identify_ogg(content: Content, start: int) -> Format:
    links, _ = read_links(content, start)
    codecs: set[str] = set()
    has_one_each = True
    for link in links:
        of_link = [codec for codec in link.codecs if codec != "Skeleton"]
        has_one_each &= len(of_link) == 1
        codecs.update(of_link)
    if has_one_each and codecs <= set(_OGG_CODECS):
        return Format("Ogg", "ogg", start)
    return Format(f"Ogg with {', '.join(sorted(codecs))}", "ffmpeg", start)


class Page(NamedTuple):
    """Page of an Ogg file: its bytes from `start` to `stop`, its flags, and whether its last packet ends in it."""

    start: int
    body: int
    stop: int
    flags: int
    ends_packet: bool


@dataclass
class Link:
    """Part of a chained Ogg file that is a whole Ogg file.

    Attributes:
        start: Position of its first page.
        last: Its last page.
        codecs: Names of the codecs of its streams.
    """

    start: int
    last: Page
    codecs: list[str] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """Position of the end of the last page."""
        return self.last.stop

    @property
    def has_end_mark(self) -> bool:
        """Whether the last page is marked as the last one, which some recorders leave out."""
        return bool(self.last.flags & _LAST)

    def read(self, content: Content) -> bytes:
        """Return the bytes of the link, with the end mark that libsndfile requires to read Opus."""
        link = content[self.start : self.stop]
        if self.has_end_mark:
            return link
        start = self.last.start - self.start
        page = bytearray(link[start:])
        page[5] |= _LAST
        page[22:26] = bytes(4)
        page[22:26] = _checksum(page).to_bytes(4, "little")
        return link[:start] + bytes(page)


def read_links(content: Content, start: int = 0) -> tuple[list[Link], bool]:
    """Return the links of an Ogg file, and whether the file ends at the end of a page and of a packet.

    A file without links is no Ogg file. Most files have one link.
    """
    links: list[Link] = []
    page: Page | None = None
    was_first = False
    for page in _pages(content, start):
        is_first = bool(page.flags & _FIRST)
        if is_first and not was_first:
            links.append(Link(page.start, page))
        if is_first:
            links[-1].codecs.append(_codec_of(content[page.body : page.body + 8]))
        if links:
            links[-1].last = page
        was_first = is_first

    if page is None:
        return links, False
    rest = content[page.stop : page.stop + 4]  # none, or data that is no page, such as a tag
    is_whole = page.ends_packet and page.stop <= len(content) and not (rest and b"OggS".startswith(rest))
    return links, is_whole


def _pages(content: Content, start: int) -> Iterator[Page]:
    position = content.find(b"OggS", start)
    while position >= 0:
        header = content[position : position + _PAGE_HEADER_BYTES]
        if len(header) < _PAGE_HEADER_BYTES:
            return
        sizes = content[position + _PAGE_HEADER_BYTES : position + _PAGE_HEADER_BYTES + header[26]]
        body = position + _PAGE_HEADER_BYTES + header[26]
        stop = body + sum(sizes) if len(sizes) == header[26] else len(content) + 1
        # A page without segments, as VLC writes at the end, ends no packet and starts none.
        yield Page(position, body, stop, header[5], not sizes or sizes[-1] < 255)
        position = content.find(b"OggS", stop)


def _codec_of(packet: bytes) -> str:
    for start, codec in _OGG_STREAMS.items():
        if packet.startswith(start):
            return codec
    return f"an unknown codec ({packet[:8]!r})"


def _checksum(page: bytes | bytearray) -> int:
    """Compute the CRC of a page (RFC 3533, section 6): polynomial 0x04C11DB7, no reflection."""
    value = 0
    for byte in page:
        value ^= byte << 24
        for _ in range(8):
            value = value << 1 ^ (0x104C11DB7 if value & 0x80000000 else 0)
    return value
