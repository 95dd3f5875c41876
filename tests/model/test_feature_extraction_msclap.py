"""MS-CLAP's spectrograms, compared with torchaudio: filters for another rate, and repeated short clips."""

import builders
import numpy as np
import pytest
import torch
import torchaudio
from transformers import AutoFeatureExtractor

from modeling_supclap import MSCLAPFeatureExtractor, SupCLAPProcessor

RATE_HZ = 44_100


def log_mel(wave: np.ndarray, filter_rate_hz: int) -> torch.Tensor:
    """Compute (T, 64) in decibels with torchaudio: 1024 samples, hop 320, Slaney filters for `filter_rate_hz`."""
    power = torch.stft(
        torch.from_numpy(wave).double(), 1024, 320, window=torch.hann_window(1024).double(), return_complex=True
    ).abs()
    filters = torchaudio.functional.melscale_fbanks(
        513, 50.0, 14_000.0, 64, filter_rate_hz, norm="slaney", mel_scale="slaney"
    )
    return (10 * (power.square().T @ filters.double()).clamp(min=1e-10).log10()).float()


@pytest.mark.parametrize(("seconds", "filter_rate_hz"), [(7, 32_000), (5, None)])
def test_it_agrees_with_another_library(seconds, filter_rate_hz):
    extractor = MSCLAPFeatureExtractor(filter_rate_hz=filter_rate_hz, max_length_s=seconds)
    clip = builders.noise(3 * RATE_HZ, seed=1) + 0.3 * builders.tone(440, 3 * RATE_HZ)
    repeated = np.tile(clip, 4)[: seconds * RATE_HZ]
    seen = extractor(clip, sampling_rate=RATE_HZ, return_tensors="pt")["input_features"]
    expected = log_mel(repeated, filter_rate_hz or RATE_HZ)
    assert seen.shape == (1, 1, *expected.shape)
    torch.testing.assert_close(seen[0, 0], expected, atol=2e-3, rtol=0)


def test_a_saved_one_has_its_filters_again(tmp_path):
    processor = SupCLAPProcessor(MSCLAPFeatureExtractor(max_length_s=5), builders.bert_tokenizer())
    processor.save_pretrained(tmp_path / "processor")
    processor.feature_extractor.save_pretrained(tmp_path / "alone")
    for loaded in (
        SupCLAPProcessor.from_pretrained(tmp_path / "processor").feature_extractor,
        AutoFeatureExtractor.from_pretrained(tmp_path / "alone"),
    ):
        assert type(loaded) is MSCLAPFeatureExtractor
        assert (loaded.nb_max_samples, loaded.filter_rate_hz) == (5 * RATE_HZ, 32_000)
        assert np.array_equal(loaded.mel_filters_slaney, processor.feature_extractor.mel_filters_slaney)


def test_a_long_clip_is_the_same_every_time():
    processor = SupCLAPProcessor(MSCLAPFeatureExtractor(max_length_s=1), builders.bert_tokenizer())
    clip = builders.noise(3 * RATE_HZ)
    first, again = (processor(audio=clip, sampling_rate=RATE_HZ, return_tensors="pt") for _ in range(2))
    assert torch.equal(first["input_features"], again["input_features"])
