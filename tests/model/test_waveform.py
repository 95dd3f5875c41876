"""Resampling, of files and of arrays."""

import builders
import numpy as np
import pytest
from processes import run_python

from modeling_supclap import waveform
from modeling_supclap.datasets_scripts.audio import resample as resample_file
from modeling_supclap.waveform import resample


@pytest.mark.parametrize("rate_hz", [8000, 11_127, 22_050, 44_100, 44_101, 96_000])
def test_one_resampler_serves_files_and_arrays(rate_hz):
    """A tone of 440 Hz stays a tone of 440 Hz. Includes odd rates, for which torchaudio would need gigabytes."""
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    clip = np.sin(2 * np.pi * 440 * np.arange(rate_hz) / rate_hz).astype(np.float32)
    for function in (resample, resample_file):
        found = function(clip, rate_hz, 16_000)
        assert found.shape == (16_000,)
        np.testing.assert_allclose(found[400:-400], expected[400:-400], atol=3e-3)  # of phase, at odd rates
    np.testing.assert_array_equal(found, resample(clip, rate_hz, 16_000))


@pytest.mark.parametrize("method", waveform.RESAMPLING_METHODS)
@pytest.mark.parametrize(("from_hz", "to_hz"), [(44_100, 16_000), (48_000, 16_000), (7999, 16_000)])
def test_a_long_waveform_is_resampled_in_pieces(monkeypatch, from_hz, to_hz, method):
    clip = builders.noise(30_011)
    whole = resample(clip, from_hz, to_hz, method)
    monkeypatch.setattr(waveform, "PIECE_SAMPLES", 9000)
    # the filters have up to 400 weights, whose products are summed in another order
    np.testing.assert_allclose(resample(clip, from_hz, to_hz, method), whole, atol=1e-6)


def test_resample_returns_the_same_array_at_the_same_rate():
    clip = builders.noise(100)
    assert resample(clip, 16000, 16000) is clip
    assert resample(clip, 16000, 8000).shape == (50,)


@pytest.mark.parametrize("samples", [2, 159_995])
def test_the_length_is_exact_at_rates_whose_ratio_is_rounded(samples):
    found = resample(np.full(samples, 0.5, np.float32), 31_999, 16_000)
    assert found.shape == (-(-samples * 16_000 // 31_999),)
    assert found[-1] > 0.2  # no silence at the end


@pytest.mark.process
def test_rows_are_listed_without_torch():
    """Commands that only list rows start fast."""
    run_python("-c", "import sys, modeling_supclap.datasets_scripts.audio; assert 'torch' not in sys.modules")
