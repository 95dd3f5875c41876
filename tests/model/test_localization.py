"""Localization, compared with embeddings of chunks and with known times of sounds."""

from functools import partial

import builders
import numpy as np
import open_clip_folders as folders
import pytest
import torch

from modeling_supclap import CNN14Config, SupCLAPConfig, SupCLAPModel, SupCLAPProcessor
from modeling_supclap.feature_extraction_msclap import MSCLAPFeatureExtractor
from modeling_supclap.localization import localize

TEXTS = ["rain", "a dog barks"]


def ced():
    return *builders.pair(), 2.56  # 16 whole steps


def dasheng():
    audio = builders.ced_config(patch_size=[64, 4], target_length=256)
    model = builders.supclap_model(SupCLAPConfig(audio_config=audio, text_config=builders.bert_config()))
    return model, builders.bert_processor(), 2.5


def htsat():
    return *builders.pair("converted"), None


def cnn14():
    audio = CNN14Config(hidden_size=8, channels=[4, 8, 8, 8])
    model = SupCLAPModel(
        SupCLAPConfig(audio_config=audio, text_config=builders.bert_config(), projection_dim=8)
    ).eval()
    extractor = MSCLAPFeatureExtractor(max_length_s=2)
    return model, SupCLAPProcessor(extractor, builders.bert_processor().tokenizer), None


def naflex(name, chunk_seconds):
    return *folders.build(name), chunk_seconds


NAFLEX = [
    partial(naflex, "A", 1.99),  # 200 frames, ten patches
    partial(naflex, "B", 2.07),  # 208 frames, 13 patches
    partial(naflex, "C", 2.07),
]


@pytest.mark.parametrize("make", [ced, dasheng, htsat, cnn14, *NAFLEX])
def test_windows_as_long_as_the_chunks_are_their_embeddings(make):
    model, processor, chunk_seconds = make()
    seconds = chunk_seconds or processor.feature_extractor.max_length_s
    rate_hz = processor.feature_extractor.sampling_rate
    waveform = builders.noise(round(3 * seconds * rate_hz))
    options = {"sampling_rate": rate_hz, "chunk_seconds": chunk_seconds, "processor": processor}
    chunks = model.encode_audio(waveform, return_chunks=True, **options)
    expected = chunks.embeds @ model.encode_text(TEXTS, processor).T

    found = localize(model, waveform, TEXTS, window_seconds=seconds, hop_seconds=seconds, batch_size=2, **options)
    assert (found.scores.shape, found.scores.dtype) == ((3, 2), np.float32)
    np.testing.assert_allclose(found.start_seconds, chunks.onset_seconds)
    np.testing.assert_allclose(found.end_seconds, chunks.offset_seconds)
    np.testing.assert_allclose(found.scores, expected, atol=2e-6, rtol=0)


def test_a_sound_changes_only_the_windows_that_contain_it():
    model, rate_hz = builders.supclap_model(), builders.RATE_HZ
    model.audio_model.blocks = torch.nn.ModuleList()  # no information flows between steps
    model.processor = builders.bert_processor()
    quiet = 1e-3 * builders.noise(round(11.3 * rate_hz))
    loud = quiet.copy()
    loud[round(6.2 * rate_hz) : round(6.9 * rate_hz)] += builders.noise(round(0.7 * rate_hz), seed=1)

    before, after = (model.localize(sound, "rain", sampling_rate=rate_hz) for sound in (quiet, loud))
    assert before.start_seconds.tolist() == [*np.arange(0, 10.5, 0.5), pytest.approx(10.3)]
    is_changed = np.abs(before.scores - after.scores)[:, 0] > 1e-6
    holds_it = (before.start_seconds < 6.9) & (before.end_seconds > 6.2)
    assert is_changed.tolist() == holds_it.tolist()


@pytest.mark.parametrize("seconds", [0.5, 5.0, 7.1, 12.0])
def test_every_moment_is_scored_once_for_any_length(seconds):
    model = builders.supclap_model()
    model.processor = builders.bert_processor()
    waveform = builders.noise(round(seconds * builders.RATE_HZ))
    found = model.localize(waveform, TEXTS, sampling_rate=builders.RATE_HZ, chunk_seconds=5.0, hop_seconds=0.25)
    assert np.isfinite(found.scores).all()
    assert found.end_seconds[-1] == pytest.approx(seconds)
    assert (np.diff(found.start_seconds) > 0).all()
    alone = model.localize(waveform, TEXTS, sampling_rate=builders.RATE_HZ, batch_size=1, hop_seconds=0.25)
    np.testing.assert_allclose(found.scores, alone.scores, atol=1e-6)


@pytest.mark.parametrize("make", [htsat, cnn14])
def test_a_recording_shorter_than_half_a_step_is_scored(make):
    model, processor, _ = make()
    rate_hz = processor.feature_extractor.sampling_rate
    found = model.localize(builders.noise(rate_hz // 100), TEXTS, processor, sampling_rate=rate_hz)
    assert found.scores.shape == (1, 2)
    assert np.isfinite(found.scores).all()


def test_texts_have_their_languages_and_recordings_any_rate():
    model, processor = builders.pair("sonar")
    texts = [builders.CAPTIONS["fra"]] * 2
    waveform = builders.noise(24000)
    options = {"processor": processor, "window_seconds": 9.0}
    found = model.localize({"array": waveform, "sampling_rate": 8000}, texts, language=["fra", "eng"], **options)
    assert (found.start_seconds.tolist(), found.end_seconds.tolist()) == ([0.0], [3.0])
    clip = model.encode_audio([{"array": waveform, "sampling_rate": 8000}], processor)
    expected = clip @ model.encode_text(texts, processor, language=["fra", "eng"]).T
    assert abs(expected[0, 0] - expected[0, 1]) > 1e-3
    np.testing.assert_allclose(found.scores, expected, atol=1e-3)
    same = model.localize(waveform, texts, language=["fra", "eng"], sampling_rate=8000, **options)
    np.testing.assert_array_equal(same.scores, found.scores)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hop_seconds": 0}, "hop_seconds is 0; it must be a positive number"),
        ({"hop_seconds": float("inf")}, "hop_seconds is inf"),
        ({"window_seconds": -1.0}, r"window_seconds is -1\.0"),
        ({"window_seconds": float("nan")}, "window_seconds.*nan"),
        ({"chunk_seconds": 60}, "chunk_seconds.*60"),
        ({"audio": [np.zeros(16000), np.zeros(16000)]}, r"\b2\b"),
        ({"texts": [" "]}, "text 0"),
    ],
)
def test_bad_arguments_are_refused(options, words):
    model = builders.supclap_model()
    model.processor = builders.bert_processor()
    with pytest.raises(ValueError, match=words), torch.no_grad():
        model.localize(**{"audio": builders.noise(16000), "texts": "rain", "sampling_rate": 16000, **options})


def test_a_hop_beyond_the_recording_has_a_window_at_its_end():
    model = builders.supclap_model()
    model.processor = builders.bert_processor()
    waveform = builders.noise(16000)
    found = model.localize(waveform, TEXTS, sampling_rate=16000, window_seconds=0.25, hop_seconds=1e9)
    assert found.start_seconds.tolist() == [0.0, 0.75]
    assert found.end_seconds.tolist() == [0.25, 1.0]


def test_rounding_of_the_hop_repeats_no_window():
    model = builders.supclap_model()
    model.processor = builders.bert_processor()
    found = model.localize(builders.noise(35_200), TEXTS, sampling_rate=16000, hop_seconds=0.1)
    assert (2.2 - 1.0) / 0.1 > 12  # hops in a recording of 2.2 s, after the first window
    assert found.start_seconds == pytest.approx(np.arange(13) / 10)
