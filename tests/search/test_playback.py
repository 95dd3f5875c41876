"""Recordings that browsers do not play are sent as 16-bit WAV, and others unchanged."""

import numpy as np
import pytest
import soundfile

from modeling_supclap.search.playback import playable_file

WAVE = np.stack([0.5 * np.sin(np.arange(5000) / 9), 0.1 * np.cos(np.arange(5000) / 5)], axis=1)


@pytest.mark.parametrize(
    ("name", "subtype"),
    [
        ("a.wav", "PCM_16"),
        ("a.wav", "PCM_24"),
        ("a.wav", "FLOAT"),
        ("a.wav", "ULAW"),
        ("a.flac", None),
        ("a.ogg", None),
    ],
)
def test_formats_of_browsers_are_sent_unchanged(tmp_path, name, subtype):
    soundfile.write(tmp_path / name, WAVE, 16000, subtype)
    assert playable_file(tmp_path / name, tmp_path / "copies") == tmp_path / name


@pytest.mark.parametrize(
    ("name", "subtype"),
    [("a.aiff", None), ("a.wav", "DOUBLE"), ("a.wav", "IMA_ADPCM"), ("a.caf", None), ("a.au", None)],
)
def test_other_formats_are_sent_as_wav(tmp_path, name, subtype):
    soundfile.write(tmp_path / name, WAVE, 16000, subtype)
    (tmp_path / "copies").mkdir()
    copy = playable_file(tmp_path / name, tmp_path / "copies")
    assert (soundfile.info(copy).format, soundfile.info(copy).subtype) == ("WAV", "PCM_16")
    expected, _ = soundfile.read(tmp_path / name)
    found, rate_hz = soundfile.read(copy)
    assert (rate_hz, found.shape) == (16000, expected.shape)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert playable_file(tmp_path / name, tmp_path / "copies") == copy
    assert len(list((tmp_path / "copies").iterdir())) == 1


def test_a_file_that_only_ffmpeg_reads_is_left_to_the_browser(tmp_path):
    (tmp_path / "a.m4a").write_bytes(b"\0\0\0\x20ftypM4A ")
    assert playable_file(tmp_path / "a.m4a", tmp_path) == tmp_path / "a.m4a"
