"""The spectrogram inside a graph has the values of the feature extractors."""

import builders
import numpy as np
import pytest
import torch
from transformers import ClapFeatureExtractor, WhisperFeatureExtractor

from modeling_supclap import CEDFeatureExtractor
from modeling_supclap.conversion.open_clip import extractor_from_audio_cfg
from modeling_supclap.feature_extraction_clap import extract_clap
from modeling_supclap.integrations.spectrogram import Spectrogram


def tone_beside_silence(samples):
    """Return a loud tone that stops in the middle, so that some frames and most bands are silent."""
    clip = builders.tone(1000.0, samples)
    clip[samples // 2 :] = 0
    return clip


@pytest.mark.parametrize(
    "options", [{}, {"center": False}, {"win_size": 400, "f_max": None}, {"top_db": 40.0}], ids=str
)
@pytest.mark.parametrize("samples", [4000, 16000, 33333])
def test_ced(options, samples):
    extractor = CEDFeatureExtractor(**options)
    for clip in (builders.noise(samples), tone_beside_silence(samples)):
        expected = extractor([clip], sampling_rate=16000)["input_features"]
        found = Spectrogram(extractor)(torch.from_numpy(clip)[None]).numpy()
        assert found.dtype == np.float32
        quiet = expected.max() - expected > 80  # float32 rounds in the extractor
        np.testing.assert_allclose(found[~quiet], expected[~quiet], atol=1e-2)
        np.testing.assert_allclose(found[quiet], expected[quiet], atol=6)


@pytest.mark.parametrize("samples", [1, 600, 1025])
def test_a_clip_below_the_window_of_clap2_ends_with_zeros(samples):
    extractor = extractor_from_audio_cfg({})
    clip = builders.noise(samples)
    expected = extractor([clip], sampling_rate=48000)["input_features"]
    found = Spectrogram(extractor)(torch.from_numpy(clip)[None]).numpy()
    assert found.shape == (1, 64, 3)
    np.testing.assert_allclose(found, expected, atol=1e-2)


@pytest.mark.parametrize("padding", ["repeatpad", "repeat", "pad"])
@pytest.mark.parametrize("samples", [600, 16000, 40001])
def test_clap(padding, samples):
    extractor = ClapFeatureExtractor(
        feature_size=32, sampling_rate=16000, max_length_s=1, hop_length=160, truncation="rand_trunc", padding=padding
    )
    clips = [builders.noise(samples), tone_beside_silence(samples)]
    found = Spectrogram(extractor)(torch.from_numpy(np.stack(clips))).numpy()
    for clip, decibels in zip(clips, found, strict=True):
        expected = extract_clap(extractor, clip)["input_features"]
        quiet = expected.max() - expected > 80  # float32 rounds in the extractor
        np.testing.assert_allclose(decibels[~quiet], expected[~quiet], atol=1e-2)


@pytest.mark.parametrize(
    "extractor",
    [WhisperFeatureExtractor(), ClapFeatureExtractor(truncation="fusion")],
    ids=lambda extractor: type(extractor).__name__,
)
def test_others_are_refused(extractor):
    with pytest.raises(ValueError, match=type(extractor).__name__):
        Spectrogram(extractor)
