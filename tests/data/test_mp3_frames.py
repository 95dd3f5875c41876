"""Frames of MP3 data, from a real encoder: their number, and what is between them."""

import io

import numpy as np
import pytest
import soundfile

from modeling_supclap.datasets_scripts.mp3_frames import find_mp3, is_mp3, read_parts


def encode(rate_hz=16_000, seconds=3.0, channels=1, mode="VARIABLE"):
    noise = np.random.default_rng(0).standard_normal((round(seconds * rate_hz), channels))
    encoded = io.BytesIO()
    soundfile.write(encoded, 0.1 * noise, rate_hz, format="MP3", bitrate_mode=mode)
    return encoded.getvalue()


def without_tag(content):
    """Remove the first frame, which contains only the number of the other frames."""
    (part,) = read_parts(content)
    tag = content.index(b"Xing" if b"Xing" in content[:100] else b"Info")
    first = content.index(content[:2], tag)
    assert part.announced == part.num_frames
    return content[first:]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate_hz", [11_025, 22_050, 32_000, 44_100, 48_000])
def test_the_counted_frames_are_those_that_the_encoder_announced(rate_hz, channels):
    content = encode(rate_hz, channels=channels)
    (part,) = read_parts(content)
    assert part.announced == part.num_frames
    assert part.content == content
    assert part.kind.rate_hz == rate_hz
    assert part.kind.is_mono == (channels == 1)
    assert part.num_frames * part.kind.frame_samples == pytest.approx(3 * rate_hz, abs=4000)

    (bare,) = read_parts(without_tag(content))
    assert (bare.num_frames, bare.announced) == (part.num_frames, None)
    assert soundfile.info(io.BytesIO(bare.content)).frames == pytest.approx(3 * rate_hz, abs=4000)


@pytest.mark.parametrize("between", [b"", bytes(5000), b"ID3\4\0\0\0\0\0\x10" + bytes(16), b"TAG" + b"x" * 125])
def test_joined_files_are_one_part(between):
    content = encode()
    (one,) = read_parts(content)
    (both,) = read_parts(content + between + content)
    assert both.num_frames == 2 * one.num_frames + 1  # the frame of the second tag is silent
    assert soundfile.info(io.BytesIO(both.content)).duration == pytest.approx(6.0, abs=0.3)


def test_other_channels_or_rates_are_other_parts():
    parts = read_parts(encode() + encode(channels=2) + encode(22_050))
    assert [(part.kind.rate_hz, part.kind.is_mono) for part in parts] == [
        (16_000, True), (16_000, False), (22_050, True)
    ]  # fmt: skip


@pytest.mark.parametrize("garbage", [bytes(500), b"\xff" * 77, b"\xff\xfb\x90" * 200, encode()[77:300]])
def test_data_before_the_first_frame_is_left_out(garbage):
    content = without_tag(encode())
    start = find_mp3(garbage + content)
    assert start is not None
    (part,) = read_parts(garbage + content, start)
    assert abs(part.num_frames - read_parts(content)[0].num_frames) <= 1


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"ID3", b"\xff\xfb" * 500, bytes(1000), b"\xff\xfb\x90\x00" + b"x" * 900]
)
def test_other_data_is_not_mp3(content):
    assert not is_mp3(content)
    assert find_mp3(content) is None


def test_a_wrong_number_is_replaced_and_reported():
    content = bytearray(encode())
    place = content.index(b"Xing") + 8
    content[place : place + 4] = (7).to_bytes(4, "big")
    (part,) = read_parts(bytes(content))
    assert part.announced == 7
    assert soundfile.info(io.BytesIO(part.content)).duration == pytest.approx(3.0, abs=0.2)


def test_the_tag_contains_the_size_of_joined_files(capfd):
    content = encode()
    (part,) = read_parts(content + bytes(100) + content)
    place = part.content.index(b"Xing") + 12
    assert part.content[place - 5] & 2  # the size follows the number of frames
    assert int.from_bytes(part.content[place : place + 4], "big") == len(part.content) == 2 * len(content)
    assert int.from_bytes(content[place : place + 4], "big") == len(content)
    with soundfile.SoundFile(io.BytesIO(part.content)) as file:
        file.read()
    assert not capfd.readouterr().err  # a wrong size is a warning of libmpg123, without a name
