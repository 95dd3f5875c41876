"""Combined waveforms: correct levels and order, and no clipping."""

import math

import numpy as np
import pytest
import torch
from temporal_assertions import GOOD, RATE_HZ, noise, strength_db, tone

from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions, active_rms, compose


def test_concatenation_is_one_after_the_other_sample_by_sample():
    first, second = noise(0, 0.5), noise(1, 0.3)
    joined = compose("forward", [first, second], RATE_HZ)
    assert joined.dtype == np.float32
    np.testing.assert_array_equal(joined, np.concatenate([first, second]).astype(np.float32))


def test_lists_and_tensors_are_clips():
    assert compose("forward", [[0.5, 0.25], torch.tensor([0.125])], RATE_HZ).tolist() == [0.5, 0.25, 0.125]


def test_loudness_is_matched_in_a_concatenation_if_requested():
    loud, quiet = tone(500, amplitude=0.5), tone(2000, amplitude=0.005)
    apart = compose("forward", [loud, quiet], RATE_HZ)
    assert strength_db(apart[:RATE_HZ], 500) - strength_db(apart[RATE_HZ:], 2000) == pytest.approx(40, abs=0.01)
    matched = compose("forward", [loud, quiet], RATE_HZ, RenderOptions(match_loudness=True))
    assert strength_db(matched[:RATE_HZ], 500) == pytest.approx(strength_db(matched[RATE_HZ:], 2000), abs=0.01)
    alone = compose("single", [quiet], RATE_HZ, RenderOptions(match_loudness=True))
    np.testing.assert_array_equal(alone, quiet.astype(np.float32))


@pytest.mark.parametrize("quiet_db", [0, -20, -60])
def test_overlaid_clips_are_equally_loud_whatever_their_levels_and_padding(quiet_db):
    quiet = tone(2000, 0.5, amplitude=0.5 * 10 ** (quiet_db / 20))
    padded = np.concatenate([quiet, np.zeros(3 * RATE_HZ)])
    mixed = compose("overlaid", [tone(500, 2.0, amplitude=0.5), padded], RATE_HZ)
    assert mixed.size == 3.5 * RATE_HZ
    together = mixed[: quiet.size]
    assert strength_db(together, 500) == pytest.approx(strength_db(together, 2000), abs=0.1)
    assert strength_db(mixed[RATE_HZ : 2 * RATE_HZ], 2000) < -100


def test_overlaid_clips_keep_their_levels_without_matching():
    loud, quiet = tone(500, amplitude=0.5), tone(2000, 0.5, amplitude=0.05)
    expected = loud.copy()
    expected[: quiet.size] += quiet
    options = RenderOptions(match_overlay_loudness=False)
    np.testing.assert_allclose(compose("overlaid", [loud, quiet], RATE_HZ, options), expected, atol=1e-6)
    compose("overlaid", [GOOD, 0 * GOOD], RATE_HZ, options)


def test_overlay_is_a_weighted_sum_and_commutes():
    first, second = noise(0, 1.0), noise(1, 0.7, amplitude=0.02)
    mixed = compose("overlaid", [first, second], RATE_HZ)
    parts = np.stack([first, np.pad(second, (0, first.size - second.size))], axis=1)
    gains, *_ = np.linalg.lstsq(parts, mixed, rcond=None)
    np.testing.assert_allclose(mixed, parts @ gains, atol=1e-6)
    level_db = 20 * np.log10(gains * [np.std(first), np.std(second)])
    assert level_db[0] == pytest.approx(level_db[1], abs=0.1)
    np.testing.assert_array_equal(compose("overlaid", [second, first], RATE_HZ), mixed)
    louder = compose("overlaid", [first, 4 * second], RATE_HZ)
    np.testing.assert_allclose(louder / louder[0], mixed / mixed[0], rtol=1e-3)


@pytest.mark.parametrize(("amplitude", "peak"), [(0.2, 0.4), (0.495, 0.99), (0.8, 0.99), (30.0, 0.99)])
def test_nothing_clips_and_only_the_scale_changes(amplitude, peak):
    mixed = compose("overlaid", [tone(500, amplitude=amplitude), tone(500, amplitude=amplitude)], RATE_HZ)
    assert np.abs(mixed).max() == pytest.approx(peak, abs=1e-6)
    np.testing.assert_allclose(mixed / np.abs(mixed).max(), tone(500, amplitude=1), atol=1e-5)
    for whole in (
        compose("forward", [tone(500, amplitude=amplitude), tone(50)], RATE_HZ),
        compose("single", [mixed], RATE_HZ),
    ):
        assert np.abs(whole).max() <= 0.99 + 1e-6


def test_active_level_against_a_loop():
    waveform = noise(0, 1.003) * np.repeat([1, 0.01, 0, 0.5], 2006)
    frames = [waveform[start : start + 160] for start in range(0, waveform.size, 160)]
    threshold = 0.1 * np.mean(waveform**2)
    kept = np.concatenate([frame for frame in frames if np.mean(frame**2) >= threshold])
    assert kept.size < 0.6 * waveform.size
    assert active_rms(waveform, RATE_HZ) == pytest.approx(np.sqrt(np.mean(kept**2)), rel=1e-6)


@pytest.mark.parametrize("padding_seconds", [0, 1, 10])
def test_active_level_does_not_count_padding(padding_seconds):
    padded = np.pad(tone(500, amplitude=0.2), round(padding_seconds * RATE_HZ))
    assert 20 * math.log10(active_rms(padded, RATE_HZ)) == pytest.approx(20 * math.log10(0.2 / math.sqrt(2)), abs=0.1)
    assert active_rms(np.zeros(100), RATE_HZ) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compose("forward", [GOOD[:0], GOOD], RATE_HZ), r"\(0,\).*float64"),
        (lambda: compose("overlaid", [GOOD, GOOD[:0]], RATE_HZ), r"\(0,\)"),
        (lambda: compose("forward", [np.stack([GOOD, GOOD]), GOOD], RATE_HZ), r"\(2, 80\)"),
        (lambda: compose("overlaid", [GOOD.astype(np.int16), GOOD], RATE_HZ), "int16"),
        (lambda: compose("overlaid", [GOOD * np.nan, GOOD], RATE_HZ), "NaN"),
        (lambda: compose("forward", [GOOD, GOOD], 0), "sampling_rate_hz.*0"),
        (lambda: compose("overlaid", [GOOD, GOOD], -1), "sampling_rate_hz.*-1"),
        (lambda: compose("overlaid", [GOOD, 0 * GOOD], RATE_HZ), r"0\.1\b.*\b0\b"),
        (lambda: compose("overlay", [GOOD, GOOD], RATE_HZ), "'overlay'"),
        (lambda: compose("single", [GOOD, GOOD], RATE_HZ), r"\b2\b.*'single'"),
        (lambda: compose("forward", [GOOD], RATE_HZ), r"\b1\b.*'forward'"),
    ],
)
def test_bad_audio_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
