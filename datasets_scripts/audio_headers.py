"""Check Ogg and MP3 headers, because libsndfile does not check them."""

# Bit rates of layer III in kbit/s, indexed by the value in the frame header. True: MPEG 1. False: MPEG 2 and 2.5.
_KILOBITS = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES_HZ = (44100, 48000, 32000)  # for MPEG 1; half of these rates for MPEG 2, a quarter for MPEG 2.5
_MPEG_1, _MPEG_2, _MPEG_2_5 = 3, 2, 0  # values in the frame header


def ends_as_ogg(tail: bytes) -> bool:
    """Return whether an Ogg file ends with a complete page that is marked as the last one (RFC 3533, section 6).

    libsndfile reads a truncated file without an error. `tail` contains the last bytes of the file, at least 64 KiB.
    """
    start = tail.rfind(b"OggS")
    if start < 0 or len(tail) < start + 27:
        return False
    num_segments = tail[start + 26]
    body = start + 27 + num_segments
    is_whole = len(tail) >= body + sum(tail[start + 27 : body])
    return is_whole and bool(tail[start + 5] & 4)


def announce_mp3_frames(content: bytes) -> bytes:
    """Add a header frame with the frame count to the bytes of an MP3 file that lacks this count.

    Otherwise, libsndfile divides the file size by the bit rate of the first frame, which is wrong for variable bit
    rates and for files with tags. If `content` is not MP3, or contains a frame count, it is returned unchanged.
    """
    start = 0
    if content[:3] == b"ID3" and len(content) >= 10:  # ID3 tag: the size is stored as four bytes of seven bits
        for byte in content[6:10]:
            start = start << 7 | byte & 0x7F
        start += 10
    while (length := _frame_length(content, start)) == 0 or not _frame_length(content, start + length):
        start = content.find(b"\xff", start + 1)
        if start < 0:
            return content

    first = content[start : start + length]
    if b"Xing" in first[:40] or b"Info" in first[:40] or b"VBRI" in first[:40]:
        return content

    num_frames, position = 0, start
    while 0 <= position < len(content):
        length = _frame_length(content, position)
        if length and position + length <= len(content):
            num_frames, position = num_frames + 1, position + length
        else:  # a tag, or damaged data
            position = content.find(b"\xff", position + 1)
    return _make_announcing_frame(int.from_bytes(first[:4], "big"), num_frames) + content[start:]


def _frame_length(content: bytes, start: int) -> int:
    """Return the size in bytes of the layer III frame at `start`, or 0 if no frame starts there."""
    header = int.from_bytes(content[start : start + 4].ljust(4, b"\0"), "big")
    version, layer = header >> 19 & 3, header >> 17 & 3
    bit_rate, rate = header >> 12 & 15, header >> 10 & 3
    if header >> 21 != 0x7FF or version not in (_MPEG_1, _MPEG_2, _MPEG_2_5) or layer != 1:
        return 0
    if bit_rate in (0, 15) or rate == 3:
        return 0

    is_first = version == _MPEG_1
    rate_hz = _RATES_HZ[rate] >> {_MPEG_1: 0, _MPEG_2: 1, _MPEG_2_5: 2}[version]
    return (144 if is_first else 72) * _KILOBITS[is_first][bit_rate] * 1000 // rate_hz + (header >> 9 & 1)


def _make_announcing_frame(header: int, num_frames: int) -> bytes:
    """Return a silent MP3 frame with the given header; its Xing tag announces `num_frames`."""
    header = header & ~(0xF << 12 | 1 << 9) | 9 << 12 | 1 << 16  # 128 or 80 kbit/s, no padding, no checksum
    is_first, is_mono = header >> 19 & 3 == _MPEG_1, header >> 6 & 3 == 3
    side_information = (17 if is_mono else 32) if is_first else (9 if is_mono else 17)

    tag = b"Xing" + (1).to_bytes(4, "big") + num_frames.to_bytes(4, "big")
    start = header.to_bytes(4, "big") + bytes(side_information) + tag
    return start.ljust(_frame_length(header.to_bytes(4, "big"), 0), b"\0")
