"""Formats by content, and sizes of unfinished files."""

import io
import struct

import numpy as np
import pytest
import soundfile

from modeling_supclap.datasets_scripts.audio_headers import correct_sizes, count_aac_seconds, identify, read_links

TONE = 0.5 * np.sin(np.arange(8000) * 0.1)
ID3 = b"ID3\4\0\0\0\0\0\x0a" + bytes(10)
ID3_WITH_FOOTER = b"ID3\4\0\x10\0\0\0\x0a" + bytes(10) + b"3DI\4\0\x10\0\0\0\x0a"
ADTS = b"\xff\xf1\x50\x80\x02\x1f\xfc" + bytes(9)


def encode(form, subtype="PCM_16"):
    encoded = io.BytesIO()
    soundfile.write(encoded, TONE, 16_000, subtype, format=form)
    return encoded.getvalue()


@pytest.mark.parametrize("tag", [b"", ID3, ID3_WITH_FOOTER, 2 * ID3])
@pytest.mark.parametrize(
    ("content", "name", "decoder"),
    [
        (encode("WAV"), "WAV", "libsndfile"),
        (encode("WAVEX"), "WAV", "libsndfile"),
        (encode("RF64"), "WAV", "libsndfile"),
        (encode("AIFF"), "AIFF", "libsndfile"),
        (encode("CAF"), "CAF", "libsndfile"),
        (encode("FLAC"), "FLAC", "libsndfile"),
        (encode("OGG", "VORBIS"), "Ogg", "ogg"),
        (encode("MP3", "MPEG_LAYER_III"), "MP3", "mp3"),
        (20 * ADTS, "AAC", "ffmpeg"),
        (b"\0\0\0\x20ftypM4A " + bytes(100), "MP4", "ffmpeg"),
        (b"\x1aE\xdf\xa3" + bytes(100), "Matroska or WebM", "ffmpeg"),
        (b"MAC \x96\x0f" + bytes(100), "Monkey's Audio (APE)", "ffmpeg"),
        (b"\x0b\x77" + bytes(100), "AC-3", "ffmpeg"),
        (3 * (b"\x47" + bytes(187)), "MPEG-TS", "ffmpeg"),
        (b"RIFF\0\0\0\0AVI LIST" + bytes(100), "AVI", "ffmpeg"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_format_is_known_by_its_content_after_tags(content, name, decoder, tag):
    form = identify(tag + content)
    assert form is not None
    assert form.name.startswith(name)
    assert form.decoder == decoder
    assert form.start == len(tag)


@pytest.mark.parametrize("text", [b"", b"dear diary", b"MAC addresses of all machines", "Vélo".encode("latin-1")])
def test_a_text_has_no_format(text):
    assert identify(text) is None


@pytest.mark.parametrize(("codec", "bits", "decoder"), [(1, 64, "ffmpeg"), (0x45, 4, "ffmpeg"), (3, 64, "libsndfile")])
def test_the_codec_of_a_wav_selects_the_decoder(codec, bits, decoder):
    content = bytearray(encode("WAV"))
    content[20:22], content[34:36] = struct.pack("<H", codec), struct.pack("<H", bits)
    form = identify(bytes(content))
    assert form is not None
    assert form.decoder == decoder


@pytest.mark.parametrize(("form", "size"), [("WAV", 40), ("AIFF", 42), ("AU", 8), ("W64", None), ("RF64", None)])
def test_a_header_without_sizes_is_corrected(form, size):
    content = encode(form)
    unfinished = bytearray(content)
    if form == "W64":
        size = content.index(b"data\xf3") + 16
        unfinished[size : size + 8] = bytes(8)
    elif form == "RF64":
        size = content.index(b"ds64") + 16
        unfinished[size : size + 8] = bytes(8)
    else:
        unfinished[size : size + 4] = bytes(4)
    for position, value in correct_sizes(bytes(unfinished)):
        unfinished[position : position + len(value)] = value
    np.testing.assert_array_equal(soundfile.read(io.BytesIO(unfinished))[0], soundfile.read(io.BytesIO(content))[0])


def test_an_empty_file_is_not_corrected():
    encoded = io.BytesIO()
    soundfile.write(encoded, np.zeros(0), 16_000, format="WAV")
    content = encoded.getvalue()
    assert correct_sizes(content) == []
    assert correct_sizes(content + b"LIST\4\0\0\0INFO") == []


def test_aac_is_counted_by_its_frames():
    assert count_aac_seconds(20 * ADTS) == pytest.approx(20 * 1024 / 44_100)
    assert count_aac_seconds(20 * ADTS + ADTS[:9]) == pytest.approx(20 * 1024 / 44_100)
    assert count_aac_seconds(bytes(100)) == 0


def encode_ogg(subtype, seconds=1.0):
    encoded = io.BytesIO()
    noise = 0.1 * np.random.default_rng(0).standard_normal(round(16_000 * seconds))
    soundfile.write(encoded, noise, 16_000, subtype, format="OGG")
    return encoded.getvalue()


def page_starts(content):
    starts = [0]
    while (start := content.find(b"OggS", starts[-1] + 4)) > 0:
        starts.append(start)
    return starts


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_file_is_whole_only_at_the_ends_of_its_pages(subtype):
    content = encode_ogg(subtype, 3.0)
    ends = {*page_starts(content)[1:], len(content)}
    whole = {length for length in range(len(content) - 3000, len(content) + 1) if read_links(content[:length])[1]}
    assert whole <= ends
    assert len(content) in whole
    assert not read_links(content[: len(content) // 2])[1]
    assert read_links(content + b"TAG" + bytes(125))[1]


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_chain_has_one_link_per_file(subtype):
    first, second = encode_ogg(subtype), encode_ogg(subtype, 2.0)
    links, is_whole = read_links(first + second)
    assert is_whole
    assert [(link.start, link.stop) for link in links] == [(0, len(first)), (len(first), len(first) + len(second))]
    assert [link.codecs for link in links] == [[subtype.capitalize()]] * 2
    assert [link.read(first + second) for link in links] == [first, second]


def test_a_missing_end_mark_is_restored_with_its_checksum():
    content = encode_ogg("OPUS")
    start = page_starts(content)[-1]
    unmarked = content[: start + 5] + bytes([content[start + 5] & ~4]) + content[start + 6 :]
    links, is_whole = read_links(unmarked)
    assert is_whole
    assert not links[0].has_end_mark
    assert links[0].read(unmarked) == content


def test_a_page_that_ends_within_a_packet_is_not_the_last():
    content = encode_ogg("VORBIS")
    start = page_starts(content)[-1]
    num_segments = content[start + 26]
    continued = bytearray(content)
    body = start + 27 + num_segments
    continued[body - 1] = 255
    assert not read_links(bytes(continued) + bytes(255))[1]


def test_other_data_has_no_links():
    assert read_links(b"no ogg at all") == ([], False)
