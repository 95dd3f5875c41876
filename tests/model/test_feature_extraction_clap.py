"""Spectrograms of CLAP: equal to transformers' in all modes, on the CPU and in batches on the device."""

import builders
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import ClapFeatureExtractor

from modeling_supclap import MSCLAPFeatureExtractor, SupCLAPProcessor
from modeling_supclap.feature_extraction_clap import extract_clap

EXTRACTORS = {
    "clap": {"truncation": "rand_trunc"},
    "fused": {"truncation": "fusion"},
    "repeat": {"truncation": "rand_trunc", "padding": "repeat"},
    "silence": {"truncation": "fusion", "padding": "pad"},
    "other spectrogram": {
        "truncation": "rand_trunc",
        "sampling_rate": 16_000,
        "feature_size": 40,
        "hop_length": 200,
        "fft_window_size": 512,
        "frequency_min": 60,
        "frequency_max": 7800,
        "max_length_s": 3,
    },
    "ms-clap": None,
}


@pytest.fixture(params=EXTRACTORS)
def extractor(request):
    fields = EXTRACTORS[request.param]
    return (
        MSCLAPFeatureExtractor(max_length_s=1)
        if fields is None
        else ClapFeatureExtractor(**{"max_length_s": 1} | fields)
    )


def make_clips(extractor):
    """Return noise of several lengths, and a loud tone, beside which the other bands are silent."""
    most = extractor.nb_max_samples
    lengths = [most, most - 1, most // 2, most // 3 + 7, 600, 1]
    clips = [builders.noise(length, seed) for seed, length in enumerate(lengths)]
    return [*clips, 0.9 * builders.tone(440, most)]


def assert_close_within_80_db(found, expected):
    """Compare with decibels in float64. Below 80 dB under the peak of the clip, float32 rounds."""
    assert found.dtype == np.float32
    is_loud = expected > expected.max() - 80
    np.testing.assert_allclose(found[is_loud], expected[is_loud], atol=0.01, rtol=0)
    assert found[~is_loud].max(initial=-np.inf) < expected.max() - 79.9


def test_spectrograms_are_those_of_transformers(extractor):
    clips = make_clips(extractor)
    expected = extractor(clips, sampling_rate=extractor.sampling_rate)["input_features"]
    for clip, decibels in zip(clips, expected, strict=True):
        found = extract_clap(extractor, clip)
        assert_close_within_80_db(found["input_features"], decibels)
        assert found["is_longer"].tolist() == [False]


@pytest.mark.parametrize("padding", ["repeat", "repeatpad", "pad"])
@pytest.mark.parametrize("hops", [1, 3, 4, 33, 50, 99, 100])
def test_frames_of_a_repeated_clip_are_those_of_transformers(padding, hops):
    extractor = builders.clap_processor().feature_extractor
    extractor.padding = padding
    clip = builders.noise(hops * extractor.hop_length)
    expected = extractor([clip], sampling_rate=extractor.sampling_rate)["input_features"][0]
    assert_close_within_80_db(extract_clap(extractor, clip)["input_features"], expected)


def test_long_clips_are_cropped_to_their_beginning(extractor):
    long = builders.noise(extractor.nb_max_samples + 5000)
    found = extract_clap(extractor, long)["input_features"]
    expected = extract_clap(extractor, long[: extractor.nb_max_samples])["input_features"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_batches_on_the_device_have_the_same_spectrograms(extractor, dtype):
    processor = SupCLAPProcessor(extractor, builders.bert_tokenizer())
    clips = [np.rint(clip * 32767).astype(np.int16) for clip in make_clips(extractor)]
    clips.append(builders.noise(extractor.nb_max_samples + 5000))
    clips[-1] = np.rint(clips[-1] * 32767).astype(np.int16)
    expected = processor(audio=clips, sampling_rate=extractor.sampling_rate, return_tensors="pt")

    samples = pad_sequence([torch.from_numpy(clip) for clip in clips], batch_first=True)
    samples = samples if dtype == torch.int16 else samples / 32768
    samples[samples == 0] = 7  # values after the end of a clip are ignored
    counts = torch.tensor([len(clip) for clip in clips])
    for clip, row in zip(clips, samples, strict=True):
        row[: len(clip)] = torch.from_numpy(clip) / (1 if dtype == torch.int16 else 32768)
    found = processor.on_device(samples, counts)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["input_features"], expected["input_features"], atol=1e-4, rtol=0)
    assert torch.equal(found["is_longer"], expected["is_longer"])


def test_only_some_extractors_run_on_the_device(processor):
    assert processor.runs_on_device
    whisper = SupCLAPProcessor(builders.make_encoder("whisper")[1], builders.bert_tokenizer())
    assert not whisper.runs_on_device
    with pytest.raises(ValueError, match="WhisperFeatureExtractor"):
        whisper.on_device(torch.zeros(1, 16000), torch.tensor([16000]))
