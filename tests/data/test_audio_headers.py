"""Header checks, tested with files from real encoders."""

import io

import numpy as np
import pytest
import soundfile

from modeling_supclap.datasets_scripts.audio_headers import announce_mp3_frames, ends_as_ogg


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_ends_with_its_last_page_and_nowhere_else(subtype):
    encoded = io.BytesIO()
    soundfile.write(encoded, 0.1 * np.random.default_rng(0).standard_normal(16_000), 16_000, subtype, format="OGG")
    content = encoded.getvalue()
    assert ends_as_ogg(content)
    assert not any(ends_as_ogg(content[:length]) for length in range(0, len(content), 97))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate_hz", [11_025, 22_050, 32_000, 44_100, 48_000])
def test_the_announced_frames_are_those_that_the_encoder_announced(rate_hz, channels):
    encoded = io.BytesIO()
    samples = 0.1 * np.random.default_rng(0).standard_normal((3 * rate_hz, channels))
    soundfile.write(encoded, samples, rate_hz, format="MP3", bitrate_mode="VARIABLE")
    content = encoded.getvalue()
    assert announce_mp3_frames(content) is content

    place = content.index(b"Xing")
    untold = content.replace(b"Xing", b"\0\0\0\0", 1)  # now a normal silent frame
    announced = announce_mp3_frames(untold)
    assert announced.endswith(untold)
    tag = announced.index(b"Xing")
    count, told = (int.from_bytes(text[at + 8 : at + 12], "big") for text, at in ((announced, tag), (content, place)))
    assert count == told + 1


@pytest.mark.parametrize("content", [b"", b"\xff", b"ID3", b"ID3\4\0\0\0\0\0\1", b"\xff\xfb" * 500, bytes(1000)])
def test_content_that_is_not_mp3_is_unchanged(content):
    assert announce_mp3_frames(content) is content
