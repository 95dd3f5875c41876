"""Recordings that browsers do not play are sent as 16-bit WAV, and others unchanged."""

import os
import re

import numpy as np
import pytest
import soundfile

from modeling_supclap.search.playback import draw_waveform, playable_file

WAVE = np.stack([0.5 * np.sin(np.arange(5000) / 9), 0.1 * np.cos(np.arange(5000) / 5)], axis=1)


@pytest.mark.parametrize(
    ("name", "subtype"),
    [
        ("a.wav", "PCM_U8"),
        ("a.wav", "PCM_16"),
        ("a.wav", "PCM_24"),
        ("a.wav", "FLOAT"),
        ("a.wav", "PCM_32"),
        ("a.wav", "ULAW"),
        ("a.wav", "ALAW"),
        ("a.mp3", None),
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


def test_a_changed_recording_of_equal_size_has_a_new_copy(tmp_path):
    path = tmp_path / "a.aiff"
    contents = []
    for number in (1, 2):
        soundfile.write(path, number * 0.2 * np.sign(WAVE), 16000)
        os.utime(path, (10**9 + number,) * 2)
        copy = playable_file(path, tmp_path / "copies")
        contents.append(soundfile.read(copy)[0])
        assert playable_file(path, tmp_path / "copies") == copy
    np.testing.assert_allclose(contents[1], 2 * contents[0], atol=1e-3)


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_the_waveform_of_a_part_has_its_peaks(tmp_path, suffix):
    wave = np.zeros(16000 * 6)
    wave[16000 * 3 : 16000 * 4] = 0.01 * np.sin(np.arange(16000) / 5)  # as faint as nature
    wave[: 16000 * 2] = 0.9
    soundfile.write(tmp_path / f"a.{suffix}", wave, 16000)
    drawing = draw_waveform(tmp_path / f"a.{suffix}", 8000, 2.5, 2.0)
    assert drawing.startswith("<svg xmlns=")
    assert 'viewBox="0 0 200 101" preserveAspectRatio="none"' in drawing
    columns, tops, bottoms = np.array(re.findall(r"M(\d+) ([\d.]+)V([\d.]+)", drawing), float).T
    assert columns.tolist() == list(range(200))
    path = re.search(r'<path d="([^"]*)"', drawing)[1]
    assert re.fullmatch(r"(M\d+ [\d.]+V[\d.]+){200}", path)
    np.testing.assert_allclose(tops + bottoms, 101, atol=1e-6)
    heights = 50 - tops
    assert heights[:48].max() < 1 < heights[60:140].min()  # silence, then sound from 3 to 4 s
    assert heights[152:].max() < 1
    assert heights.max() == pytest.approx(48, abs=0.1)


def test_a_part_of_fewer_samples_than_columns_is_drawn(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.full(100, 0.5), 8000)
    heights = 50 - np.array(re.findall(r"M\d+ ([\d.]+)V", draw_waveform(tmp_path / "a.wav", 8000, 0.0, 5.0)), float)
    assert heights.tolist() == [48.0] * 100 + [0.0] * 100


def test_silence_is_a_line(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(16000), 16000)
    drawing = draw_waveform(tmp_path / "a.wav", 8000, 0.0, 5.0)
    assert set(re.findall(r"M\d+ ([^V]+)V([\d.]+)", drawing)) == {("50.0", "51.0")}


def test_a_part_beyond_the_end_is_an_error(tmp_path):
    soundfile.write(tmp_path / "a.wav", WAVE, 16000)
    with pytest.raises(ValueError, match=r"a\.wav"):
        draw_waveform(tmp_path / "a.wav", 8000, 100.0, 5.0)
