"""Formats by content, and sizes of unfinished files."""

import io
import logging
import re

import numpy as np
import pytest
import soundfile

from modeling_supclap.datasets_scripts import decoders
from modeling_supclap.datasets_scripts.audio import BadAudioError, read_audio
from modeling_supclap.datasets_scripts.audio_headers import (
    count_mp3_frames,
    find_sound,
    is_whole_ogg,
    mark_end,
    read_links,
    skip_id3,
)

ID3 = b"ID3\4\0\0\0\0\0\x0a" + bytes(10)
LONG_ID3 = b"ID3\4\0\0\x01\0\x81\2" + bytes(2**21 + 2**7 + 2)
ID3_WITH_FOOTER = b"ID3\4\0\x10\0\0\0\x0a" + bytes(10) + b"3DI\4\0\x10\0\0\0\x0a"


def encode(form, samples, **options):
    encoded = io.BytesIO()
    soundfile.write(encoded, samples, 16_000, "PCM_16", format=form, **options)
    return encoded.getvalue()


@pytest.mark.parametrize("tag", [b"", ID3, ID3_WITH_FOOTER, 2 * ID3, LONG_ID3], ids=len)
def test_tags_are_skipped(tag):
    assert skip_id3(tag + b"fLaC") == len(tag)


def test_a_file_that_ends_within_its_tag_is_named():
    for content in (b"ID3", ID3[:8], ID3):
        with pytest.raises(BadAudioError, match=r"a\.mp3"):
            read_audio(content, name="a.mp3")


@pytest.mark.parametrize("rate_hz", [8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize(("mode", "channels"), [("CONSTANT", 1), ("VARIABLE", 2)])
def test_frames_of_mp3_are_counted(rate_hz, mode, channels):
    encoded = io.BytesIO()
    noise = 0.1 * np.random.default_rng(0).standard_normal((rate_hz, channels))
    soundfile.write(encoded, noise, rate_hz, format="MP3", bitrate_mode=mode, compression_level=0.3)
    content = encoded.getvalue()
    place = re.search(b"Info|Xing", content).start() + 8
    count = int.from_bytes(content[place : place + 4], "big") + 1  # with that of the tag
    assert count_mp3_frames(content) == (count, len(content), False)
    assert count_mp3_frames(content + content[:3]) == (count, len(content), False)
    free_format = content[:2] + b"\2\0" + bytes(500)  # with padding, but without a size
    assert count_mp3_frames(content + free_format) == (count, len(content), False)
    assert count_mp3_frames(content + b"\0" + content[1:]) == (count, len(content), False)
    without_last, stop, is_cut = count_mp3_frames(content[:-1])
    assert (without_last, is_cut) == (count - 1, True)
    assert content[stop : stop + 2] == content[:2]


@pytest.mark.parametrize(
    ("form", "size"), [("WAV", 40), ("RIFX", 40), ("AIFF", 42), ("AU", 8), ("W64", None), ("RF64", None)]
)
def test_a_header_without_sizes_is_read_to_the_end(form, size, caplog):
    tone = 0.5 * np.sin(np.arange(8000) * 0.1)
    content = encode("WAV", tone, endian="BIG") if form == "RIFX" else encode(form, tone)
    unfinished = bytearray(content)
    if form in ("W64", "RF64"):
        size = content.index(b"data\xf3" if form == "W64" else b"ds64") + 16
    unfinished[size : size + (8 if form in ("W64", "RF64") else 4)] = bytes(8 if form in ("W64", "RF64") else 4)
    if form == "AIFF":  # the number of frames, and the size of the sound with eight bytes before it
        unfinished[22:26], unfinished[42:46] = bytes(4), b"\0\0\0\x08"
    with caplog.at_level(logging.INFO, decoders.__name__):
        waveform, rate_hz = read_audio(bytes(unfinished), name="a.bin")
    np.testing.assert_array_equal(waveform, read_audio(content)[0])
    assert rate_hz == 16_000
    note = "a.bin: its header announces no data; all 8000 samples to the end of the file are read"
    assert caplog.messages == [note] * (form != "W64")  # libsndfile reads it


def test_an_empty_file_has_no_sound():
    content = encode("WAV", np.zeros(0))
    assert find_sound(content) is None
    assert find_sound(content + b"LIST\4\0\0\0INFO") is None
    assert find_sound(content + b"LIST\5\0\0\0INFO") == len(content)
    big = encode("AIFF", np.zeros(0))
    assert find_sound(big + b"NAME\0\0\0\4rain") is None
    assert find_sound(big + b"NAME\0\0\0\5rain") == len(big)


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
    whole = {length for length in range(len(content) - 3000, len(content) + 1) if is_whole_ogg(content[:length])}
    assert whole <= ends
    assert len(content) in whole
    assert not is_whole_ogg(content[: len(content) // 2])
    assert is_whole_ogg(content + b"TAG" + bytes(125))
    empty = content[page_starts(content)[-1] :][:26] + b"\0"  # a page without segments, as VLC writes it
    assert [length for length in range(28) if is_whole_ogg(content + empty[:length])] == [0, 27]


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_chain_has_one_link_per_file(subtype):
    first, second = encode_ogg(subtype), encode_ogg(subtype, 2.0)
    links = read_links(first + second)
    assert [link.content for link in links] == [first, second]
    start = {"VORBIS": b"\x01vorbis", "OPUS": b"OpusHead"}[subtype]
    assert all(len(link.streams) == 1 and link.streams[0].startswith(start) for link in links)


def test_the_streams_of_a_link_begin_with_their_first_pages():
    sounds, voices = encode_ogg("VORBIS"), encode_ogg("OPUS")
    first, second = page_starts(sounds)[1], page_starts(voices)[1]
    both = sounds[:first] + voices[:second] + sounds[first:] + voices[second:]
    links = read_links(both + sounds)
    assert [link.content for link in links] == [both, sounds]
    assert [link.streams for link in links] == [[b"\x01vorbis\0", b"OpusHead"], [b"\x01vorbis\0"]]


def test_a_missing_end_mark_is_restored_with_its_checksum():
    content = encode_ogg("OPUS")
    start = page_starts(content)[-1]
    unmarked = content[: start + 5] + bytes([content[start + 5] & ~4]) + content[start + 6 :]
    assert is_whole_ogg(unmarked)
    assert mark_end(unmarked) == content == mark_end(content)


def test_a_page_that_ends_within_a_packet_is_not_the_last():
    content = encode_ogg("VORBIS")
    start = page_starts(content)[-1]
    body = start + 27 + content[start + 26]
    continued = bytearray(content)
    continued[body - 1] = 255
    assert not is_whole_ogg(bytes(continued) + bytes(255))


def test_other_data_has_no_links():
    assert read_links(b"no ogg at all") == []
