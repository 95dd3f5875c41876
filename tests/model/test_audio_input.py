"""Types of audio inputs: single recordings and lists, durations, and names in messages."""

import io
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import builders
import numpy as np
import pytest
import soundfile
import torch

from modeling_supclap.audio_input import as_recordings

CLIP = builders.noise(8000)
STEREO = np.stack([1.5 * CLIP, 0.5 * CLIP])  # the mean is CLIP


@pytest.fixture
def path(tmp_path) -> Path:
    """File of half a second at 16 kHz."""
    soundfile.write(tmp_path / "clip.wav", CLIP, 16000, subtype="FLOAT")
    return tmp_path / "clip.wav"


FORMS = {
    "path": lambda path: path,
    "string": str,
    "bytes": Path.read_bytes,
    "bytes in memory": lambda path: io.BytesIO(path.read_bytes()),
    "open file": lambda path: path.open("rb"),
    "array": lambda path: CLIP,
    "tensor": lambda path: torch.from_numpy(CLIP),
    "numbers": lambda path: CLIP.tolist(),
    "as soundfile reads": lambda path: STEREO.T,
    "as torchaudio reads": lambda path: (torch.from_numpy(STEREO), 16000),
    "as scipy reads": lambda path: (16000, STEREO.T),
    "mapping": lambda path: {"array": CLIP, "sampling_rate": 16000},
    "undecoded file": lambda path: {"bytes": None, "path": str(path)},
    "undecoded bytes": lambda path: {"bytes": path.read_bytes(), "path": "clip.wav"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_waveform(path, form):
    make = FORMS[form]
    (one,), is_one = as_recordings(make(path), 16000)
    assert is_one
    assert one.get_seconds() == 0.5
    np.testing.assert_allclose(one.read(16000), CLIP, atol=1e-7)
    np.testing.assert_allclose(one.read(16000, start=7000), CLIP[7000:], atol=1e-7)

    several, is_one = as_recordings([make(path), make(path)], [16000, 16000])
    assert not is_one
    np.testing.assert_allclose(several[1].read(16000), CLIP, atol=1e-7)


def test_an_address_is_fetched(path):
    def handler(*arguments):
        return SimpleHTTPRequestHandler(*arguments, directory=path.parent)

    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (found,), _ = as_recordings(f"http://127.0.0.1:{server.server_port}/clip.wav")
        np.testing.assert_allclose(found.read(16000), CLIP, atol=1e-7)
        (missing,), _ = as_recordings(f"http://127.0.0.1:{server.server_port}/nothing.wav")
        with pytest.raises(OSError, match=r"nothing\.wav.*404"):
            missing.read(16000)
    finally:
        server.shutdown()
        server.server_close()


def test_a_decoder_knows_its_rate_and_length(path, torchcodec):
    (recording,), is_one = as_recordings(torchcodec.decoders.AudioDecoder(path))
    assert is_one
    assert recording.get_seconds() == pytest.approx(0.5)
    np.testing.assert_allclose(recording.read(16000), CLIP, atol=1e-7)


@pytest.mark.parametrize("clip", [None, "nothing.wav", b"no sound"])
def test_an_invalid_recording_has_no_length(clip):
    assert as_recordings([clip], 16000)[0][0].get_seconds() == 0


def test_rows_of_an_array_are_recordings_unless_there_are_two(path):
    assert [one.source for one in as_recordings(np.array([str(path), "dog.wav"]))[0]] == [str(path), "dog.wav"]
    assert len(as_recordings(np.zeros((3, 16000)), 16000)[0]) == 3
    for shape in [(1, 2, 3), (2, 16000)]:
        with pytest.raises(ValueError, match=rf"\({shape[0]}, "):
            as_recordings(torch.zeros(shape), 16000)


def test_names(path):
    clips = [path, "dog.wav", CLIP, b"RIFF", path.open("rb")]
    assert [one.name for one in as_recordings(clips, 16000)[0]] == [str(path), "dog.wav", "clip 2", "clip 3", str(path)]


def test_unreadable_recordings_are_named(path):
    (missing,), _ = as_recordings({"bytes": None, "path": "nothing.wav"})
    with pytest.raises(FileNotFoundError, match=r"nothing\.wav"):
        missing.read(16000)
    with pytest.raises(ValueError, match=r"clip\.wav"):
        as_recordings([path.open(encoding="latin-1")])
    with pytest.raises(ValueError, match="clip 0 has no audio"):
        as_recordings({"bytes": None, "path": None})[0][0].read(16000)


@pytest.mark.parametrize("rate_hz", [8000, 16000, 22050, 44100])
@pytest.mark.parametrize(("start", "stop"), [(0, 8000), (20_001, 50_000), (60_000, 80_000)])
def test_a_part_of_a_file_is_that_part_of_its_waveform(tmp_path, rate_hz, start, stop):
    soundfile.write(tmp_path / "long.wav", builders.noise(5 * rate_hz), rate_hz, subtype="FLOAT")
    (recording,), _ = as_recordings(tmp_path / "long.wav")
    whole = recording.read(16000)
    np.testing.assert_allclose(recording.read(16000, start, stop), whole[start:stop], atol=1e-6)
