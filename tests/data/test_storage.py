"""What is kept of a recording: its bytes, FLAC or samples, and nothing of one that cannot be used."""

import hashlib
import io
import sys

import numpy as np
import pytest
import soundfile

from modeling_supclap.datasets_scripts.audio import MissingDecoderError, load_clip
from modeling_supclap.datasets_scripts.storage import STORAGES, audio_features, pack, source_of

RATE_HZ = 44_100
TONE = (0.5 * np.sin(np.arange(RATE_HZ) / 20)).astype(np.float32)


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "tone.ogg"
    soundfile.write(path, TONE, RATE_HZ)
    return path


@pytest.mark.parametrize("storage", STORAGES)
def test_columns_are_those_that_the_features_name(recording, storage):
    packed = pack(str(recording), "audio/tone.ogg", storage)
    assert packed.problem is None
    assert packed.columns.keys() == audio_features(storage).keys()
    assert packed.source_sha256 == hashlib.sha256(recording.read_bytes()).hexdigest()
    assert packed.source_bytes == recording.stat().st_size
    assert packed.seconds == pytest.approx(1.0, abs=1e-3)
    assert pack(recording.read_bytes(), "audio/tone.ogg", storage) == packed


def test_an_original_is_kept_byte_by_byte(recording):
    kept = pack(str(recording), "audio/tone.ogg", "original").columns["audio"]
    assert kept == {"bytes": recording.read_bytes(), "path": "tone.ogg"}


@pytest.mark.parametrize(("storage", "rate_hz"), [("flac16k", 16_000), ("flac48k", 48_000), ("int16", 16_000)])
def test_resampled_audio_is_within_half_a_step_of_16_bits(recording, storage, rate_hz):
    columns = pack(str(recording), "tone.ogg", storage).columns
    if storage == "int16":
        assert columns["sampling_rate_hz"] == rate_hz
        samples = np.frombuffer(columns["samples"], "<i2") / 32768
    else:
        assert columns["audio"]["path"] == "tone.flac"
        samples, found_hz = soundfile.read(io.BytesIO(columns["audio"]["bytes"]))
        assert found_hz == rate_hz
    np.testing.assert_allclose(samples, load_clip(recording, rate_hz), atol=0.501 / 32768)


@pytest.mark.parametrize("storage", ["original", "int16", "reference"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"no audio at all", "is not audio"), (None, "No such file"), (np.zeros(100), "is silent")],
    ids=["empty", "junk", "missing", "silent"],
)
def test_what_cannot_be_used_says_why(tmp_path, content, message, storage):
    path = tmp_path / "bad.wav"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        soundfile.write(path, content, 8000)
    packed = pack(str(path), "audio/bad.wav", storage)
    assert packed.columns == {}
    assert "audio/bad.wav" in packed.problem
    assert message in packed.problem


def test_a_sound_below_one_step_of_16_bits_is_silent_there(tmp_path):
    soundfile.write(tmp_path / "faint.wav", 1e-6 * TONE, RATE_HZ, "FLOAT")
    assert pack(str(tmp_path / "faint.wav"), "faint.wav", "original").problem is None
    assert "too quiet" in pack(str(tmp_path / "faint.wav"), "faint.wav", "int16").problem


def test_a_missing_decoder_is_no_fault_of_the_recording(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(MissingDecoderError):
        pack(b"\0\0\0\x20ftypM4A " + bytes(100), "a.m4a", "original")


def test_the_source_of_a_row():
    assert source_of({"clip_id": "a", "audio_path": "a.wav"}) == "a.wav"
    assert source_of({"clip_id": "a", "audio_path": "a.wav", "audio": {"bytes": b"x", "path": "a.wav"}}) == b"x"
    with pytest.raises(ValueError, match="clip 'a' is stored as int16"):
        source_of({"clip_id": "a", "audio_path": "a.wav", "samples": b"xx"})
