"""Types of audio inputs: single recordings and lists, durations, and names in messages."""

import io
import sys
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import builders
import numpy as np
import pytest
import soundfile
import torch

from modeling_supclap.audio_input import Recording, as_recordings, as_waveform
from modeling_supclap.waveform import RESAMPLING_METHODS, resample

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
    "eight channels": lambda path: np.stack([8 * CLIP, *[0 * CLIP] * 7], axis=1),
    "eight channels as torchaudio reads": lambda path: (np.stack([8 * CLIP, *[0 * CLIP] * 7]), 16000),
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


def test_a_decoder_knows_its_rate_and_length():
    """`datasets.Audio` returns such objects, of torchcodec."""
    samples = SimpleNamespace(data=torch.from_numpy(CLIP)[None], sample_rate=16000)
    decoder = SimpleNamespace(get_all_samples=lambda: samples, metadata=SimpleNamespace(duration_seconds=0.5))
    (recording,), is_one = as_recordings(decoder)
    assert is_one
    assert recording.get_seconds() == pytest.approx(0.5)
    np.testing.assert_allclose(recording.read(16000), CLIP, atol=1e-7)
    decoder.metadata.duration_seconds = None  # as of a stream
    assert recording.get_seconds() == 0


@pytest.mark.parametrize("clip", [None, "nothing.wav", b"no sound"])
def test_an_invalid_recording_has_no_length(clip):
    assert as_recordings([clip], 16000)[0][0].get_seconds() == 0
    assert as_recordings(CLIP)[0][0].get_seconds() == 0  # an array without a rate


def test_rows_of_an_array_are_recordings_unless_there_are_two(path):
    assert [one.source for one in as_recordings(np.array([str(path), "dog.wav"]))[0]] == [str(path), "dog.wav"]
    assert len(as_recordings(np.zeros((3, 16000)), 16000)[0]) == 3
    for clips in ((CLIP, CLIP), (CLIP, CLIP, CLIP), (CLIP, "dog.wav")):  # tuples are lists
        assert [one.source for one in as_recordings(clips, 16000)[0]] == list(clips)
    (short,), is_one = as_recordings((0.25, 0.5), 16000)
    assert (is_one, short.read(16000).tolist()) == (True, [0.25, 0.5])
    for shape in [(1, 2, 3), (2, 16000)]:
        with pytest.raises(ValueError, match=rf"\({shape[0]}, "):
            as_recordings(torch.zeros(shape), 16000)


def test_names(path):
    clips = [path, "dog.wav", CLIP, b"RIFF", path.open("rb"), io.BytesIO(b"RIFF"), {"path": "dog.wav"}]
    names = [str(path), "dog.wav", "clip 2", "clip 3", str(path), "clip 5", "clip 6"]
    assert [one.name for one in as_recordings(clips, 16000)[0]] == names


def test_unreadable_recordings_are_named(path):
    (missing,), _ = as_recordings({"bytes": None, "path": "nothing.wav"})
    with pytest.raises(FileNotFoundError, match=r"nothing\.wav"):
        missing.read(16000)
    with pytest.raises(ValueError, match=r"clip\.wav"):
        as_recordings([path.open(encoding="latin-1")])
    with pytest.raises(ValueError, match="clip 0 has no audio"):
        as_recordings({"bytes": None, "path": None})[0][0].read(16000)


@pytest.mark.parametrize("form", [list, iter, np.array])
def test_each_array_has_its_rate(form):
    recordings, _ = as_recordings([CLIP, CLIP, {"array": CLIP, "sampling_rate": 44_100}], form([8000, 16000, 8000]))
    assert [recording.rate_hz for recording in recordings] == [8000, 16000, 44_100]


def test_a_rate_in_quotes_is_named():
    with pytest.raises(ValueError, match="sampling_rate is '16000'"):
        as_recordings([CLIP, CLIP], "16000")


@pytest.mark.parametrize("kind", ["<i2", ">i2", "<i4", ">i4"])
def test_pcm_may_have_either_byte_order(kind):
    largest = 2.0 ** (8 * int(kind[-1]) - 1)
    waveform = as_waveform((CLIP * (largest - 1)).astype(kind), 16000, 16000)
    assert waveform.dtype == np.float32
    np.testing.assert_allclose(waveform, CLIP, atol=1e-4)


@pytest.mark.parametrize(("kind", "least"), [(np.int16, -(2**15)), (np.int32, -(2**31))])
def test_pcm_has_the_scale_of_files(kind, least):
    """libsndfile divides by 2^15 and 2^31, so that the least number is exactly -1."""
    found = as_waveform(np.array([least, least // -2, 0], dtype=kind), 16000, 16000)
    assert found.tolist() == [-1.0, 0.5, 0.0]


@pytest.mark.parametrize("rate_hz", [8000, 16000, 22050, 44100])
@pytest.mark.parametrize(("start", "stop"), [(0, 8000), (20_001, 50_000), (60_000, 80_000)])
def test_a_part_of_a_file_is_that_part_of_its_waveform(tmp_path, rate_hz, start, stop):
    soundfile.write(tmp_path / "long.wav", builders.noise(5 * rate_hz), rate_hz, subtype="FLOAT")
    (recording,), _ = as_recordings(tmp_path / "long.wav")
    whole = recording.read(16000)
    np.testing.assert_allclose(recording.read(16000, start, stop), whole[start:stop], atol=1e-6)


@pytest.mark.parametrize(("from_hz", "to_hz"), [(8000, 48_000), (44_100, 48_000), (96_000, 48_000), (44_100, 16_000)])
def test_images_and_aliases_are_100_db_below_the_signal(from_hz, to_hz):
    """Noise must leave nothing above the lower Nyquist frequency, and a tone above the new one nothing at all."""
    for method in RESAMPLING_METHODS:
        if to_hz > from_hz:
            resampled = resample(builders.noise(4 * from_hz), from_hz, to_hz, method) * np.hanning(4 * to_hz)
            power, hz = np.abs(np.fft.rfft(resampled)) ** 2, np.fft.rfftfreq(4 * to_hz, 1 / to_hz)
            ratio = power[hz > 0.52 * from_hz].max() / power[(hz > 100) & (hz < 0.4 * from_hz)].mean()
        else:
            tone = np.sin(2 * np.pi * 0.53 * to_hz / from_hz * np.arange(4 * from_hz)).astype(np.float32)
            ratio = np.mean(2 * resample(tone, from_hz, to_hz, method)[to_hz:-to_hz] ** 2)
        assert (10 * np.log10(ratio) < -100) == (method == "kaiser_best"), (method, ratio)


def test_a_recording_in_parts_and_whole_have_the_same_samples(tmp_path):
    soundfile.write(tmp_path / "long.wav", builders.noise(8 * 8000), 8000, subtype="FLOAT")
    recording = Recording(str(tmp_path / "long.wav"), None, "long.wav")
    for method in RESAMPLING_METHODS:
        whole = recording.read(48_000, resampling_method=method)
        part = recording.read(48_000, 100_000, 250_000, resampling_method=method)
        np.testing.assert_allclose(part, whole[100_000:250_000], atol=1e-6)
    other = recording.read(48_000)
    assert np.abs(whole - other).max() > 0.01


def test_the_dict_of_transformers_pipelines_is_one_recording():
    (recording,), is_one = as_recordings({"raw": CLIP, "sampling_rate": 8000})
    assert is_one
    assert (recording.rate_hz, recording.read(8000).tolist()) == (8000, CLIP.tolist())


def test_decoded_samples_of_torchcodec_are_recordings():
    samples = SimpleNamespace(data=torch.sin(torch.arange(8000) * 0.1)[None], sample_rate=8000, pts_seconds=0.0)
    for value in (samples, [samples]):
        recordings, is_one = as_recordings(value)
        assert is_one == (value is samples)
        np.testing.assert_array_equal(recordings[0].read(8000), samples.data[0].numpy())


def test_a_copy_without_the_package_names_the_extra_for_other_formats(tmp_path, monkeypatch):
    """A saved model contains a copy of the module, which reads with soundfile where the package is not installed."""
    monkeypatch.setitem(sys.modules, "modeling_supclap.datasets_scripts.audio", None)
    stereo = np.stack([CLIP, 0 * CLIP], axis=1)
    soundfile.write(tmp_path / "a.wav", stereo, 16000, subtype="FLOAT")
    np.testing.assert_array_equal(Recording(tmp_path / "a.wav", None, "a.wav", channel=0).read(16000), CLIP)
    np.testing.assert_allclose(Recording(tmp_path / "a.wav", None, "a.wav").read(16000), CLIP / 2, atol=1e-7)
    for source in (tmp_path / "a.wav", (tmp_path / "a.wav").read_bytes()):
        recording = Recording(source, None, "a.wav", channel=1)
        assert recording.get_seconds() == 0.5
        np.testing.assert_array_equal(recording.read(16000), 0 * CLIP)
    soundfile.write(tmp_path / "long.wav", builders.noise(5 * 8000), 8000, subtype="FLOAT")
    recording = Recording(tmp_path / "long.wav", None, "long.wav")
    np.testing.assert_allclose(recording.read(16000, 33_001, 40_000), recording.read(16000)[33_001:40_000], atol=1e-6)
    with pytest.raises(FileNotFoundError, match="there is no audio file dog"):
        Recording(str(tmp_path / "nothing.wav"), None, "dog").read(16000)
    with pytest.raises(ValueError, match=r"a\.m4a is not audio that soundfile can read.*supclap\[ffmpeg\]"):
        Recording(b"\0\0\0\x20ftypM4A " + bytes(100), None, "a.m4a").read(16000)
