"""metrics/comparison: differences paired by seed and query, compared with SciPy, and their format."""

import numpy as np
import pytest
from scipy import stats

from modeling_supclap.metrics.bootstrap import bootstrap_intervals, paired_test, seed_interval
from modeling_supclap.metrics.comparison import Cell, difference, summarize
from modeling_supclap.metrics.names import METRICS

FIRST = np.tile([[1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 1, 1]], 4).astype(float)  # (seeds, queries)
SECOND = np.tile([[1, 0, 0, 0, 1, 0], [0, 0, 1, 1, 0, 1]], 4).astype(float)
CLIPS = [f"clip{query // 2}" for query in range(24)]


def test_one_run_is_paired_by_query():
    found = difference([4 / 6], [2 / 6], FIRST[0], SECOND[0], CLIPS)
    tested = paired_test({"x": FIRST[0]}, {"x": SECOND[0]}, CLIPS)["x"]
    assert found.value == pytest.approx(tested["difference"])
    assert (found.low, found.high, found.p_value) == (tested["low"], tested["high"], tested["p_value"])
    assert found.recordings == (found.low, found.high)
    assert found.values == (pytest.approx(2 / 6),)
    options = {"num_resamples": 50, "seed": 3}
    other = difference([4 / 6], [2 / 6], FIRST[0], SECOND[0], CLIPS, **options)
    tested = paired_test({"x": FIRST[0]}, {"x": SECOND[0]}, CLIPS, **options)["x"]
    assert (other.low, other.high, other.p_value) == (tested["low"], tested["high"], tested["p_value"])
    assert other != found
    for unpaired in ((), (FIRST[0], None, CLIPS), (None, SECOND[0], CLIPS), (FIRST[0], SECOND[0], None)):
        alone = difference([4 / 6], [2 / 6], *unpaired)
        assert (alone.low, alone.high, alone.recordings, alone.p_value) == (None, None, None, None)
    few = difference([4 / 6], [2 / 6], FIRST[0], SECOND[0], [query % 9 for query in range(24)])
    assert (few.low, few.recordings) == (None, None)
    assert 0 < few.p_value < 1


def test_several_runs_are_paired_by_seed():
    values, others = [0.6, 0.7, 0.9], [0.5, 0.4, 0.7]
    expected = stats.ttest_rel(values, others).confidence_interval(0.95)
    found = difference(values, others)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.values == pytest.approx((0.1, 0.3, 0.2))
    assert found.p_value is None


def test_several_runs_are_paired_by_seed_and_query():
    found = difference(FIRST.mean(axis=1), SECOND.mean(axis=1), FIRST, SECOND, CLIPS)
    of_queries = FIRST.mean(axis=0) - SECOND.mean(axis=0)
    assert found.recordings == bootstrap_intervals({"x": of_queries}, CLIPS)["x"]
    assert (found.low, found.high) == seed_interval(list(found.values), found.recordings)
    assert found.value == pytest.approx(of_queries.mean())
    options = {"num_resamples": 50, "seed": 3}
    other = difference(FIRST.mean(axis=1), SECOND.mean(axis=1), FIRST, SECOND, CLIPS, **options)
    assert other.recordings == bootstrap_intervals({"x": of_queries}, CLIPS, **options)["x"] != found.recordings
    few = difference(FIRST.mean(axis=1), SECOND.mean(axis=1), FIRST, SECOND, [query % 9 for query in range(24)])
    assert few.recordings is None
    assert (few.low, few.high) == seed_interval(list(few.values))


def test_intervals_of_shares_stay_between_0_and_1():
    values = [0.03, 0.0]
    assert seed_interval(values)[0] < 0
    cell = summarize(values, is_share=True)
    assert (cell.low, cell.high) == (0.0, seed_interval(values)[1])
    assert summarize([1.0, 0.9], is_share=True).high == 1.0
    assert summarize([1.0, 30.0]).low < 0  # a rank is no share
    several = summarize([0.2, 0.5, 0.3], (0.1, 0.8), confidence=0.9)
    assert (several.low, several.high) == seed_interval([0.2, 0.5, 0.3], (0.1, 0.8), 0.9)
    assert (several.value, several.std) == (pytest.approx(1 / 3), pytest.approx(np.std([0.2, 0.5, 0.3], ddof=1)))
    assert summarize([0.5], (0.4, 0.6)) == Cell(0.5, 0.4, 0.6)
    assert summarize([0.5]) == Cell(0.5)


def test_an_interval_on_one_side_of_zero():
    assert Cell(0.2, 0.1, 0.3).is_above_zero
    assert Cell(-0.2, -0.3, -0.1).is_below_zero
    for cell in (Cell(0.2, 0.0, 0.3), Cell(-0.2, -0.3, 0.0), Cell(0.2)):
        assert not cell.is_above_zero
        assert not cell.is_below_zero


def test_a_cell_has_the_digits_of_its_metric():
    assert Cell(0.5, 0.4, 0.6).format(METRICS["MRV"]) == "0.50 (0.40 to 0.60)"
    assert Cell(-0.001, -0.01, 0.008).format(METRICS["top1"], signed=True) == "-0.1 (-1.0 to +0.8)"
    for cell in (Cell(0.5), Cell(0.5, 0.4), Cell(0.5, high=0.6)):
        assert cell.format_interval(METRICS["top1"]) == ""
        assert cell.format(METRICS["top1"]) == "50.0"
    assert Cell(0.05, std=0.01).format(METRICS["top1"], signed=True) == "+5.0 ± 1.0"
