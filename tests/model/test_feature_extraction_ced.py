"""Front end of CED, compared with golden values, the definition of a log-mel spectrogram, and known sounds."""

import json
import math
import pickle

import builders
import numpy as np
import pytest
import torch
import torchaudio
from transformers import AutoFeatureExtractor

from modeling_supclap import CEDFeatureExtractor

EXTRACTOR = CEDFeatureExtractor()


def spectrogram(clip, rate_hz: float = 16000) -> np.ndarray:
    """Return the spectrogram of a clip, (64, T)."""
    return EXTRACTOR([clip], sampling_rate=rate_hz)["input_features"][0]


def definition(clip: np.ndarray) -> np.ndarray:
    """Compute the log-mel spectrogram from its definition in float64: DFT as a sum, HTK triangles by formula."""
    padded = np.pad(clip.astype(np.float64), 256, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(512) / 512)
    frames = np.stack([padded[start : start + 512] * window for start in range(0, len(clip) + 1, 160)])
    dft = np.exp(-2j * np.pi * np.outer(np.arange(257), np.arange(512)) / 512)
    power = np.abs(frames @ dft.T) ** 2
    edges_hz = 700 * (10 ** (np.linspace(0, 2595 * math.log10(1 + 8000 / 700), 66) / 2595) - 1)
    bins_hz = np.linspace(0, 8000, 257)
    mel = []
    for low, centre, high in zip(edges_hz, edges_hz[1:], edges_hz[2:], strict=False):
        triangle = np.minimum((bins_hz - low) / (centre - low), (high - bins_hz) / (high - centre)).clip(0)
        mel.append(power @ triangle)
    return 10 * np.log10(np.maximum(np.stack(mel), 1e-10))


def test_golden_sine():
    # Sum the phase in the same order as for the golden values, which are rounding noise below -40 dB.
    clip = torch.sin(torch.arange(16000, dtype=torch.float32) * (2 * math.pi) * 440 / 16000)
    mel = spectrogram(clip)
    assert mel.shape == (64, 101)
    assert mel[:, 50].argmax() == 12
    assert mel.max() == pytest.approx(40.9473, abs=2e-3)
    assert mel.mean() == pytest.approx(-45.2218, abs=2e-3)
    assert mel[:5, 50] == pytest.approx([-55.5913, -50.6406, -46.1437, -41.8026, -38.9456], abs=1e-2)


def test_silence_is_the_floor_exactly():
    assert (spectrogram(np.zeros(16000, dtype=np.float32)) == -100).all()


def test_agrees_with_the_definition():
    clip = builders.noise(8000)
    np.testing.assert_allclose(spectrogram(clip), definition(clip), atol=1e-3)


SETTINGS = {
    "of CED": {},
    "a window shorter than the transform": {"win_size": 400, "n_fft": 512},
    "bands that cannot be grouped evenly": {"feature_size": 40, "f_min": 50.0, "f_max": 7000.0},
    "frames that are not centred": {"center": False, "hop_size": 200, "n_fft": 1024, "win_size": 800},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_agrees_with_torchaudio(settings):
    extractor, clip = CEDFeatureExtractor(**settings), torch.from_numpy(builders.noise(16000))
    transform = torchaudio.transforms.MelSpectrogram(
        n_fft=extractor.n_fft,
        win_length=extractor.win_size,
        hop_length=extractor.hop_size,
        f_min=extractor.f_min,
        f_max=extractor.f_max,
        n_mels=extractor.feature_size,
        center=extractor.center,
    )
    expected = torchaudio.functional.amplitude_to_DB(transform(clip), 10.0, 1e-10, 0.0, top_db=120.0)
    found = extractor(clip, sampling_rate=16000)["input_features"][0]
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_batch_of_a_device_is_that_of_a_call(settings):
    """Compare quiet, loud and partly silent clips of several lengths; padding does not affect other clips."""
    extractor = CEDFeatureExtractor(**settings)
    levels = {16000: 0.1, 30000: 1e-3, 4100: 1.0, 16159: 1e-6}
    clips = [level * builders.noise(length, seed=length) for length, level in levels.items()]
    clips[1][5000:20000] = 0
    samples = torch.full((4, 30000), 7.7)
    for row, clip in zip(samples, clips, strict=True):
        row[: len(clip)] = torch.from_numpy(clip)

    found = extractor.on_device(samples, torch.tensor(list(levels)))
    expected = extractor(clips, sampling_rate=16000, return_tensors="pt")
    torch.testing.assert_close(found["input_features"], expected["input_features"], atol=1e-4, rtol=0)
    assert torch.equal(found["audio_attention_mask"], expected["audio_attention_mask"])


def test_a_device_accepts_int16():
    samples = torch.randint(-32768, 32768, (2, 16000), dtype=torch.int16)
    found = EXTRACTOR.on_device(samples, torch.tensor([16000, 16000]))["input_features"]
    expected = EXTRACTOR(list(samples.numpy()), sampling_rate=16000, return_tensors="pt")["input_features"]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_dynamic_range_is_each_clips_own():
    loud, quiet = builders.tone(1000), np.zeros(16000, dtype=np.float32)
    features = EXTRACTOR([loud, quiet], sampling_rate=16000)["input_features"]
    assert features[0].min() == pytest.approx(-77.2575, abs=1e-3)
    assert (features[1] == -100).all()


@pytest.mark.parametrize(("seconds", "frames"), [(0.15, 16), (1, 101), (5, 501), (10, 1001), (30, 3001)])
def test_nothing_is_cropped(seconds, frames):
    assert spectrogram(builders.noise(round(seconds * 16000))).shape == (64, frames)


def test_batch_mates_change_nothing():
    lengths = [16000, 4000, 16000, 2400, 16000, 16000, 16000, 16000, 30000]
    clips = [builders.noise(length, seed) for seed, length in enumerate(lengths)]
    batch = EXTRACTOR(clips, sampling_rate=16000, return_tensors="pt")
    assert batch["input_features"].shape == (9, 64, 188)
    assert batch["input_features"].dtype == torch.float32
    assert batch["audio_attention_mask"].dtype == torch.int64
    for row, mask, clip in zip(*batch.values(), clips, strict=True):
        alone = spectrogram(clip)
        frames = alone.shape[1]
        assert mask.tolist() == [1] * frames + [0] * (188 - frames)
        np.testing.assert_allclose(row[:, :frames], alone, atol=1e-4)
        assert (row[:, frames:] == -100).all()


FORMS = {
    "numpy": lambda x: x,
    "float64": lambda x: x.astype(np.float64),
    "tensor": torch.from_numpy,
    "list": lambda x: x.tolist(),
    "list of one": lambda x: [x],
    "tuple of one": lambda x: (x,),
    "list of lists": lambda x: [x.tolist()],
    "array of one": lambda x: x[None],
    "tensor of one": lambda x: torch.from_numpy(x)[None],
    "reversed twice": lambda x: x[::-1].copy()[::-1],
    "big-endian": lambda x: x.astype(">f4"),
    "with gradient": lambda x: torch.from_numpy(x).requires_grad_(),
    "mono in channels": lambda x: [x[None]],
    "stereo": lambda x: [np.stack([x + 0.25, x - 0.25])],
    "five channels": lambda x: [np.stack([5 * x, *[0 * x] * 4])],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_clip(form):
    clip = np.round(builders.noise(4000) * 1024) / 1024  # for exact sums of channels
    features = EXTRACTOR(FORMS[form](clip), sampling_rate=16000)["input_features"]
    np.testing.assert_allclose(features, spectrogram(clip)[None], atol=1e-4)


def test_half_precision_clips():
    for dtype in (torch.bfloat16, torch.float16):
        clip = torch.from_numpy(builders.noise(4000)).to(dtype)
        np.testing.assert_array_equal(spectrogram(clip), spectrogram(clip.float()))


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_pcm_has_full_scale_one(dtype):
    full_scale = 2 ** (8 * np.dtype(dtype).itemsize - 1)
    clip = builders.noise(4000).astype(np.float64)
    pcm = np.round(clip * full_scale).astype(dtype)
    np.testing.assert_allclose(spectrogram(pcm), spectrogram(pcm / full_scale), atol=1e-5)


@pytest.mark.parametrize("rate_hz", [8000, 11025, 22050, 44100, 48000.0, np.int64(96000)])
def test_resampling_keeps_a_tone_in_its_place(rate_hz):
    seconds = np.arange(int(rate_hz)) / rate_hz
    clip = np.sin(2 * np.pi * 1000 * seconds).astype(np.float32)
    resampled, reference = spectrogram(clip, rate_hz), spectrogram(builders.tone(1000))
    assert resampled.shape == reference.shape
    inner = slice(10, 90)
    peak = reference[:, 50].argmax()
    assert (resampled[:, inner].argmax(axis=0) == peak).all()
    np.testing.assert_allclose(resampled[peak, inner], reference[peak, inner], atol=0.05)


def test_resampling_removes_frequencies_above_nyquist():
    clip = np.sin(2 * np.pi * 12000 * np.arange(44100) / 44100).astype(np.float32)
    audible = spectrogram(np.sin(2 * np.pi * 1000 * np.arange(44100) / 44100).astype(np.float32), 44100)
    assert spectrogram(clip, 44100)[:, 10:90].max() < audible.max() - 50


GOOD = builders.noise(4000)


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        ([], "clip"),
        (np.zeros((0, 4000)), "clip"),
        ([GOOD, np.zeros(0)], r"clip 1.*\(0,\)"),
        ([GOOD, np.zeros((0, 4000))], r"clip 1.*\(0, 4000\)"),
        ([GOOD, GOOD[:1]], r"clip 1.*0\.0001"),
        (GOOD[:2399], r"clip 0.*0\.1499"),
        ([GOOD, np.where(np.arange(4000) == 7, np.nan, GOOD)], r"clip 1.*NaN.*\b7\b"),
        (np.full(4000, np.inf), r"clip 0.*NaN.*\b0\b"),
        ([GOOD, np.zeros((4000, 9))], r"clip 1.*\(4000, 9\)"),
        ([GOOD, np.zeros((2, 3, 4))], r"clip 1.*\(2, 3, 4\)"),
        ([GOOD, 32767 * GOOD / np.abs(GOOD).max()], "clip 1.*32767"),
        (np.full(4000, 1e18), r"clip 0.*1e\+18"),
        (np.zeros((2, 3, 4)), r"\(2, 3, 4\)"),
        (np.zeros(4000, dtype=np.uint8), "clip 0.*uint8"),
        (np.zeros(4000, dtype=bool), "clip 0.*bool"),
        ([0] * 4000, "clip 0.*int64"),
        (["dog.wav"], "clip 0.*<U7"),
        ("dog.wav", r"\bstr\b"),
        ([[[0.1, 0.2], [0.3]]], "clip 0"),
    ],
)
def test_unusable_clips_are_named(audio, message):
    with pytest.raises(ValueError, match=message):
        EXTRACTOR(audio, sampling_rate=16000)


def test_duration_is_judged_after_resampling():
    with pytest.raises(ValueError, match=r"0\.0907"):
        EXTRACTOR(GOOD, sampling_rate=44100)


@pytest.mark.parametrize(
    ("rate_hz", "message"),
    [
        (None, "sampling_rate"),
        (0, r"\b0\b"),
        (-16000, "-16000"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (16000.5, r"16000\.5"),
        ("16k", "'16k'"),
        ([16000], r"\[16000\]"),
        (True, "True"),
    ],
)
def test_unusable_rates_are_named(rate_hz, message):
    with pytest.raises(ValueError, match=message):
        EXTRACTOR(GOOD, sampling_rate=rate_hz)


def test_saving_and_loading_changes_nothing(tmp_path):
    extractor = CEDFeatureExtractor(f_min=50.0, top_db=80.0)
    extractor.save_pretrained(tmp_path)
    again = AutoFeatureExtractor.from_pretrained(tmp_path)
    assert type(again) is CEDFeatureExtractor
    assert again.to_dict() == extractor.to_dict()
    expected = extractor(GOOD, sampling_rate=16000)["input_features"]
    np.testing.assert_array_equal(again(GOOD, sampling_rate=16000)["input_features"], expected)
    assert not np.array_equal(spectrogram(GOOD)[None], expected)


def test_published_file_loads(tmp_path):
    saved = {
        "center": True,
        "f_max": None,
        "f_min": 0,
        "feature_extractor_type": "CedFeatureExtractor",
        "feature_size": 64,
        "hop_size": 160,
        "model_input_names": ["input_values"],
        "n_fft": 512,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
        "sampling_rate": 16000,
        "win_size": 512,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(saved))
    extractor = CEDFeatureExtractor.from_pretrained(tmp_path)
    assert extractor.to_dict() == EXTRACTOR.to_dict()
    assert list(extractor(GOOD, sampling_rate=16000)) == extractor.model_input_names


def test_travels_to_the_workers_of_a_data_loader():
    again = pickle.loads(pickle.dumps(EXTRACTOR))
    np.testing.assert_array_equal(again(GOOD, sampling_rate=16000)["input_features"][0], spectrogram(GOOD))


@pytest.mark.parametrize("rate", [1, 16, 48, 192, 10**9])
def test_rates_in_kilohertz_are_rejected(rate):
    with pytest.raises(ValueError, match=f"{rate} Hz"):
        CEDFeatureExtractor()(np.zeros(16000, np.float32), sampling_rate=rate)
