"""Reading recordings: what is read is what was written, and every bad file is named."""

import numpy as np
import pytest
import soundfile

from modeling_supclap.audio import BadAudioError, load_clip, read_audio

RATE_HZ = 16_000


def sine(frequency_hz: float, seconds: float, rate_hz: int = RATE_HZ) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency_hz * np.arange(round(seconds * rate_hz)) / rate_hz)


@pytest.fixture
def tone(tmp_path):
    path = tmp_path / "tone.wav"
    soundfile.write(path, sine(440, 1.0), RATE_HZ)
    return path


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_reads_what_was_written(tone):
    waveform, rate_hz = read_audio(tone)
    assert rate_hz == RATE_HZ
    assert waveform.dtype == np.float32
    np.testing.assert_allclose(waveform, sine(440, 1.0), atol=1 / 32768)


def test_reads_a_part(tone):
    part, _ = read_audio(tone, offset_seconds=0.25, duration_seconds=0.5)
    np.testing.assert_array_equal(part, read_audio(tone)[0][4000:12000])


def test_channels_are_averaged(tmp_path):
    left, right = sine(440, 0.2), sine(880, 0.2)
    soundfile.write(tmp_path / "five.wav", np.stack([left, right, left, right, left], axis=1), RATE_HZ, "FLOAT")
    np.testing.assert_allclose(read_audio(tmp_path / "five.wav")[0], 0.6 * left + 0.4 * right, atol=1e-6)


@pytest.mark.parametrize(("suffix", "subtype"), [("flac", "PCM_24"), ("ogg", "VORBIS"), ("mp3", "MPEG_LAYER_III")])
def test_formats(tmp_path, suffix, subtype):
    path = tmp_path / f"tone.{suffix}"
    soundfile.write(path, sine(440, 1.0), RATE_HZ, subtype)
    spectrum = np.abs(np.fft.rfft(read_audio(path)[0]))
    assert np.argmax(spectrum) * RATE_HZ / (2 * len(spectrum)) == pytest.approx(440, abs=2)


def test_a_clip_is_resampled(tmp_path):
    soundfile.write(tmp_path / "high.wav", sine(440, 0.5, 44_100), 44_100)
    clip = load_clip(tmp_path / "high.wav", RATE_HZ)
    np.testing.assert_allclose(clip[200:-200], sine(440, 0.5)[200:-200], atol=2e-3)


@pytest.mark.parametrize(("position", "start"), [(0.0, 0), (0.5, 6000), (1.0, 12000)])
def test_a_long_clip_is_cropped_where_asked(tone, position, start):
    crop = load_clip(tone, RATE_HZ, max_seconds=0.25, crop_position=position)
    np.testing.assert_array_equal(crop, read_audio(tone)[0][start : start + 4000])


def test_a_short_clip_is_left_alone(tone):
    assert len(load_clip(tone, RATE_HZ, max_seconds=30.0, crop_position=0.7)) == RATE_HZ


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.wav"):
        read_audio(tmp_path / "nowhere.wav")


def test_text_named_wav_is_refused(tmp_path):
    (tmp_path / "text.wav").write_text("dear diary")
    with pytest.raises(BadAudioError, match=r"text\.wav \(10 bytes\) is not audio"):
        read_audio(tmp_path / "text.wav")


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_truncated_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"cut.{suffix}"
    soundfile.write(path, sine(440, 3.0), RATE_HZ)
    truncate(path)
    with pytest.raises(BadAudioError, match=rf"cut\.{suffix}"):
        read_audio(path)


def test_a_streamed_wav_is_not_truncated(tone):
    content = bytearray(tone.read_bytes())
    position = content.index(b"data") + 4
    content[position : position + 4] = (0xFFFFFFFF).to_bytes(4, "little")
    tone.write_bytes(bytes(content))
    assert len(read_audio(tone)[0]) == RATE_HZ


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(0), "is empty"),
        (np.zeros(RATE_HZ), "is silent"),
        (np.array([0.1, np.nan, 0.2]), "NaN or infinite samples, the first at 1"),
        (np.array([0.1, 0.2, np.inf]), "NaN or infinite samples, the first at 2"),
    ],
)
def test_unusable_sound_is_refused(tmp_path, samples, message):
    path = tmp_path / "bad.wav"
    soundfile.write(path, samples, RATE_HZ, "FLOAT")
    with pytest.raises(BadAudioError, match=rf"bad\.wav.*{message}"):
        load_clip(path, RATE_HZ)


def test_a_silent_crop_of_a_sounding_recording_is_fine(tmp_path):
    soundfile.write(tmp_path / "late.wav", np.concatenate([np.zeros(RATE_HZ), sine(440, 1.0)]), RATE_HZ)
    assert not load_clip(tmp_path / "late.wav", RATE_HZ, max_seconds=0.5).any()
