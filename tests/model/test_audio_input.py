"""What a recording can be given as: which is one and which are several, how long it is, what it is called."""

from pathlib import Path

import builders
import numpy as np
import pytest
import soundfile
import torch

from modeling_supclap.audio_input import as_recordings, name_of, read_waveform, seconds_of

CLIP = builders.noise(8000)


@pytest.fixture
def path(tmp_path) -> Path:
    """Half a second at 16 kHz."""
    soundfile.write(tmp_path / "clip.wav", CLIP, 16000, subtype="FLOAT")
    return tmp_path / "clip.wav"


def forms(path: Path) -> dict:
    """One recording in the forms that it can have without torchcodec, each with the rate that goes with it."""
    return {
        "path": (path, None),
        "string": (str(path), None),
        "bytes": (path.read_bytes(), None),
        "array": (CLIP, 16000),
        "tensor": (torch.from_numpy(CLIP), 16000),
        "numbers": (CLIP.tolist(), 16000),
        "mapping": ({"array": CLIP, "sampling_rate": 16000}, None),
        "undecoded file": ({"bytes": None, "path": str(path)}, None),
        "undecoded bytes": ({"bytes": path.read_bytes(), "path": "clip.wav"}, None),
    }


@pytest.mark.parametrize("form", forms(Path(__file__)))
def test_every_form_is_the_same_waveform(path, form):
    clip, rate_hz = forms(path)[form]
    (one,), is_one = as_recordings(clip)
    assert is_one
    assert as_recordings([clip, clip])[1] is False
    np.testing.assert_allclose(read_waveform(one, rate_hz, 16000, "the clip"), CLIP, atol=1e-7)
    assert seconds_of(one, rate_hz) == 0.5


def test_a_decoder_knows_its_rate_and_length(path, torchcodec):
    decoder = torchcodec.decoders.AudioDecoder(path)
    assert as_recordings(decoder) == ([decoder], True)
    assert seconds_of(decoder, None) == pytest.approx(0.5)
    np.testing.assert_allclose(read_waveform(decoder, None, 16000, "the clip"), CLIP, atol=1e-7)


@pytest.mark.parametrize("clip", [None, "nothing.wav", b"no sound", {"array": CLIP}, {}])
def test_what_is_no_recording_has_no_length(clip):
    assert seconds_of(clip, 16000) == 0


def test_rows_of_an_array_are_recordings():
    assert len(as_recordings(np.zeros((3, 16000)))[0]) == 3
    with pytest.raises(ValueError, match=r"got an array of shape \(1, 2, 3\)"):
        as_recordings(torch.zeros(1, 2, 3))


def test_names(path):
    assert [name_of(clip, 7) for clip in (path, "dog.wav", CLIP, b"RIFF")] == [str(path), "dog.wav", "clip 7", "clip 7"]


def test_a_missing_file_keeps_its_name():
    with pytest.raises(FileNotFoundError, match=r"nothing\.wav"):
        read_waveform({"bytes": None, "path": "nothing.wav"}, None, 16000, "clip 3")
