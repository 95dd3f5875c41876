"""Formats by content, and sizes of unfinished files."""

import io

import numpy as np
import pytest
import soundfile

from modeling_supclap.datasets_scripts.audio import read_audio
from modeling_supclap.datasets_scripts.audio_headers import find_sound, is_whole_ogg, mark_end, read_links, skip_id3

ID3 = b"ID3\4\0\0\0\0\0\x0a" + bytes(10)
ID3_WITH_FOOTER = b"ID3\4\0\x10\0\0\0\x0a" + bytes(10) + b"3DI\4\0\x10\0\0\0\x0a"


def encode(form, samples, subtype="PCM_16"):
    encoded = io.BytesIO()
    soundfile.write(encoded, samples, 16_000, subtype, format=form)
    return encoded.getvalue()


@pytest.mark.parametrize("tag", [b"", ID3, ID3_WITH_FOOTER, 2 * ID3])
def test_tags_are_skipped(tag):
    assert skip_id3(tag + b"fLaC") == len(tag)


@pytest.mark.parametrize(("form", "size"), [("WAV", 40), ("AIFF", 42), ("AU", 8), ("W64", None), ("RF64", None)])
def test_a_header_without_sizes_is_read_to_the_end(form, size):
    tone = 0.5 * np.sin(np.arange(8000) * 0.1)
    content = encode(form, tone)
    unfinished = bytearray(content)
    if form == "AIFF":  # the number of frames, and the size of the sound
        unfinished[22:26] = bytes(4)
    if form in ("W64", "RF64"):
        size = content.index(b"data\xf3" if form == "W64" else b"ds64") + 16
    unfinished[size : size + (8 if form in ("W64", "RF64") else 4)] = bytes(8 if form in ("W64", "RF64") else 4)
    np.testing.assert_array_equal(read_audio(bytes(unfinished))[0], read_audio(content)[0])


def test_an_empty_file_has_no_sound():
    content = encode("WAV", np.zeros(0))
    assert find_sound(content) is None
    assert find_sound(content + b"LIST\4\0\0\0INFO") is None


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


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_chain_has_one_link_per_file(subtype):
    first, second = encode_ogg(subtype), encode_ogg(subtype, 2.0)
    links = read_links(first + second)
    assert [link.content for link in links] == [first, second]
    start = {"VORBIS": b"\x01vorbis", "OPUS": b"OpusHead"}[subtype]
    assert all(len(link.streams) == 1 and link.streams[0].startswith(start) for link in links)


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
