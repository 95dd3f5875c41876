"""metrics/bootstrap, compared with a loop, SciPy's permutation test, enumeration and simulations with a known truth."""

import itertools
import time

import numpy as np
import pytest
from scipy import stats

from modeling_supclap.metrics import bootstrap
from modeling_supclap.metrics.bootstrap import (
    bootstrap_intervals,
    count_units,
    describe_units,
    paired_test,
    seed_interval,
)
from modeling_supclap.metrics.recall import retrieval_outcomes


def naive_intervals(outcome, clusters, num_resamples, confidence, seed):
    """Sample whole clusters one after the other, and concatenate their queries."""
    names = list(dict.fromkeys(clusters))
    members = [[value for value, own in zip(outcome, clusters, strict=True) if own == name] for name in names]
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(num_resamples):
        drawn = list(itertools.chain.from_iterable(members[i] for i in rng.integers(0, len(names), len(names))))
        means.append(sum(drawn) / len(drawn))
    return tuple(np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2]))


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_clusters_are_drawn_whole(confidence):
    """With the same random numbers, the loop and the weights have the same resamples and intervals."""
    rng = np.random.default_rng(0)
    clusters = [f"clip{i}" for i in rng.integers(0, 17, 60)]
    outcome = rng.standard_normal(60)
    found = bootstrap_intervals({"x": outcome}, clusters, 50, confidence, seed=3)["x"]
    assert found == pytest.approx(naive_intervals(outcome, clusters, 50, confidence, 3), abs=1e-12)


def simulated(rng, num_clips, effect=0.0):
    """Return outcomes of five captions per clip, which are correlated because clips are easy or hard."""
    ease = rng.normal(size=(num_clips, 1))
    return ((ease + 0.3 * rng.normal(size=(num_clips, 5))) > -effect).astype(float).ravel()


def test_intervals_cover_the_truth_only_when_clips_are_drawn():
    """The truth is 1/2. 95 % of the intervals must contain it; if captions are resampled, far fewer do."""
    rng, clusters = np.random.default_rng(0), np.arange(80).repeat(5)
    covered = {"clips": 0, "captions": 0}
    for trial in range(300):
        outcome = {"x": simulated(rng, 80)}
        for name, drawn in (("clips", clusters), ("captions", None)):
            low, high = bootstrap_intervals(outcome, drawn, num_resamples=300, seed=trial)["x"]
            covered[name] += low <= 0.5 <= high
    assert 0.91 <= covered["clips"] / 300 <= 0.985
    assert covered["captions"] / 300 < 0.75


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_an_interval_over_seeds_covers_the_truth_and_one_over_recordings_does_not(num_seeds):
    """Compare two equal methods: the true difference is 0, and each seed adds the same error to all recordings."""
    rng, clusters = np.random.default_rng(0), [str(clip) for clip in range(60)]
    covered = {"both": 0, "recordings": 0}
    for trial in range(300):
        seeds = rng.normal(size=(num_seeds, 1))
        clips = 8 * rng.normal(size=60)
        # the test set is the same for all seeds
        runs = 0.5 * seeds + clips + rng.normal(size=(num_seeds, 60))
        outcome = {"x": runs.mean(axis=0)}
        recordings = bootstrap_intervals(outcome, clusters, num_resamples=300, seed=trial)["x"]
        low, high = seed_interval(runs.mean(axis=1), recordings)
        covered["both"] += low <= 0 <= high

        few = {"x": runs.mean(axis=0) - clips + 0.1 * clips}  # smaller differences between recordings
        recordings = bootstrap_intervals(few, clusters, num_resamples=300, seed=trial)["x"]
        covered["recordings"] += recordings[0] <= 0 <= recordings[1]
    assert covered["both"] / 300 >= 0.93
    assert covered["recordings"] / 300 < 0.75
    with pytest.raises(ValueError, match="there are 1 runs"):
        seed_interval([0.5])


@pytest.mark.parametrize(("num_recordings", "least", "most"), [(5, 0.7, 0.86), (12, 0.86, 0.94), (40, 0.9, 0.975)])
def test_the_rule_about_few_units_follows_the_coverage(monkeypatch, num_recordings, least, most):
    """The truth is 0. A recording has 20 clips, which are alike. With 5 recordings, 81 % of the intervals cover it.

    With 12, these are 91 %, and with 40, 93 %, of 95 % intervals. Therefore 5 have no interval, and 12 a mark.
    """
    note = describe_units(num_recordings, "recordings")
    assert note == f"{num_recordings} recordings" + {5: " (fewer than 10: no interval)", 12: " (few units)"}.get(
        num_recordings, ""
    )
    rng, clusters = np.random.default_rng(1), np.arange(num_recordings).repeat(20)
    is_too_few = bootstrap_intervals({"x": np.arange(len(clusters))}, clusters)["x"] is None
    assert is_too_few == (num_recordings < 10)

    monkeypatch.setattr(bootstrap, "MIN_UNITS", 2)
    covered = 0
    for trial in range(400):
        clips = rng.normal(size=(num_recordings, 1)) + rng.normal(size=(num_recordings, 20))
        low, high = bootstrap_intervals({"x": clips.ravel()}, clusters, num_resamples=200, seed=trial)["x"]
        covered += low <= 0 <= high
    assert least <= covered / 400 <= most


@pytest.mark.parametrize(
    ("count", "has_interval", "is_marked"), [(9, False, False), (10, True, True), (30, True, True), (31, True, False)]
)
def test_the_limits_of_the_rule(count, has_interval, is_marked):
    """The number of units counts, not that of queries."""
    clusters = [f"tape{query % count}" for query in range(90)]
    assert count_units(clusters) == count
    assert (bootstrap_intervals({"x": np.arange(90)}, clusters)["x"] is not None) == has_interval
    assert ("few units" in describe_units(count)) == is_marked


def test_pairs_of_recordings_resample_the_recordings():
    """All pairs of 40 recordings: an interval that resamples pairs is too narrow, because they share recordings."""
    first, second = np.triu_indices(40, 1)
    names = np.array([f"tape {number}" for number in range(40)])
    pairs = np.stack([names[first], names[second]], axis=1)
    rng, covered = np.random.default_rng(0), {"recordings": 0, "pairs": 0}
    for trial in range(150):
        ease = rng.normal(size=40)
        outcome = {"x": ease[first] + ease[second] + rng.normal(size=len(first))}
        for name, clusters in (("recordings", pairs), ("pairs", None)):
            low, high = bootstrap_intervals(outcome, clusters, num_resamples=100, seed=trial)["x"]
            covered[name] += low <= 0 <= high
    assert covered["recordings"] / 150 > 0.88
    assert covered["pairs"] / 150 < 0.5
    assert count_units(pairs) == 40

    few = np.isin(first, range(5)) & np.isin(second, range(5))
    assert few.sum() == 10
    assert count_units(pairs[few]) == 5
    assert bootstrap_intervals({"x": np.arange(10)}, pairs[few]) == {"x": None}


def test_a_pair_within_one_recording_is_that_recording():
    rng = np.random.default_rng(0)
    clusters, outcome = [f"tape{number}" for number in rng.integers(0, 15, 60)], {"x": rng.random(60)}
    doubled = np.stack([clusters, clusters], axis=1)
    assert bootstrap_intervals(outcome, doubled)["x"] == pytest.approx(bootstrap_intervals(outcome, clusters)["x"])


def test_an_interval_over_seeds_only_is_that_of_the_t_test():
    values = [0.2, 0.5, 0.3, 0.9]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert seed_interval(values, confidence=0.9) == pytest.approx((expected.low, expected.high))


def test_the_paired_test_rejects_as_often_as_it_says():
    """For two equal systems, p <= 0.05 in 5 % of the experiments, for few and for many clusters."""
    rng = np.random.default_rng(0)
    for num_clips in (9, 40):
        clusters = np.arange(num_clips).repeat(5)
        p_values = []
        for _ in range(400):
            a, b = rng.normal(size=(2, num_clips)).repeat(5, axis=1)
            p_values.append(paired_test({"x": a}, {"x": b}, clusters, num_resamples=199)["x"]["p_value"])
        assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(0.05, abs=0.03)
        assert np.mean(p_values) == pytest.approx(0.5, abs=0.05)


def test_the_paired_test_finds_a_difference():
    rng, clusters = np.random.default_rng(0), np.arange(150).repeat(5)
    result = paired_test({"x": simulated(rng, 150, effect=0.8)}, {"x": simulated(rng, 150)}, clusters)["x"]
    assert result["p_value"] < 0.01
    assert 0 < result["low"] < result["difference"] < result["high"]


@pytest.mark.parametrize(("count", "tolerance"), [(2, 1e-9), (5, 1e-9), (11, 1e-9), (13, 0.015)])
def test_p_values_are_those_of_all_sign_patterns(count, tolerance):
    """For 13 clusters, sign patterns are sampled, but enumeration is still possible."""
    a, b = np.random.default_rng(count).standard_normal((2, count))
    result = paired_test({"x": a}, {"x": b}, num_resamples=20_000)["x"]
    theirs = stats.permutation_test(
        (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert result["p_value"] == pytest.approx(theirs.pvalue, abs=tolerance)
    assert result["difference"] == pytest.approx((a - b).mean(), abs=1e-12)


@pytest.mark.parametrize("positive", [10, 12, 14])
def test_ties_with_the_observed_sum_count_as_extreme(positive):
    """With 16 clusters of +1 or -1, which are sampled, the test is the binomial sign test."""
    differences = np.repeat([1.0, -1.0], [positive, 16 - positive])
    result = paired_test({"x": differences}, {"x": np.zeros(16)}, num_resamples=20_000)["x"]
    assert result["p_value"] == pytest.approx(stats.binomtest(positive, 16).pvalue, abs=0.015)


@pytest.mark.parametrize("count", range(3, 13))
def test_differences_of_one_sign_have_the_least_p_value(count):
    """Only the observed pattern and its mirror image are that extreme, in spite of rounding."""
    for seed in range(20):
        a = np.random.default_rng(seed).random(count) * 10 ** np.arange(count)
        assert paired_test({"x": a}, {"x": np.zeros(count)}, num_resamples=2)["x"]["p_value"] == 2 / 2**count


def test_clusters_without_a_difference_do_not_change_the_p_value():
    a, b = np.array([1.0, 1, 0, 1]), np.array([0.0, 0, 0, 0])
    alone = paired_test({"x": a}, {"x": b})["x"]["p_value"]
    more = paired_test({"x": np.append(a, np.ones(500))}, {"x": np.append(b, np.ones(500))})["x"]["p_value"]
    assert alone == more == 2 / 2**3


def test_a_system_equals_itself():
    outcome = {"R@1": [1, 0, 1, 1] * 3}
    assert paired_test(outcome, outcome) == {"R@1": {"difference": 0, "low": 0, "high": 0, "p_value": 1}}
    alone = {"R@1": [1, 0]}
    assert paired_test(alone, alone, ["a", "a"])["R@1"] == {"difference": 0, "low": None, "high": None, "p_value": 1}


def test_the_difference_turns_its_sign_with_the_systems():
    rng = np.random.default_rng(0)
    a, b = ({"x": rng.random(50), "y": rng.random(50)} for _ in range(2))
    clusters = np.arange(50) // 3
    forward, backward = paired_test(a, b, clusters), paired_test(b, a, clusters)
    for name in ("x", "y"):
        assert forward[name]["difference"] == -backward[name]["difference"]
        assert forward[name]["low"] == pytest.approx(-backward[name]["high"], abs=1e-12)
        assert forward[name]["p_value"] == backward[name]["p_value"]
    assert paired_test(a, dict(reversed(b.items())), clusters) == forward


def test_outcomes_are_resampled_together_and_reproducibly():
    similarity = np.random.default_rng(0).standard_normal((60, 12))
    outcomes = retrieval_outcomes(similarity, [[i % 12] for i in range(60)])
    clusters = [i % 12 for i in range(60)]
    intervals = bootstrap_intervals(outcomes, clusters)
    assert intervals == bootstrap_intervals(outcomes, np.array(clusters), seed=0)
    assert intervals != bootstrap_intervals(outcomes, clusters, seed=1)
    assert list(intervals) == ["R@1", "R@5", "R@10", "mAP@10", "rank"]
    for name, (low, high) in intervals.items():
        assert low <= outcomes[name].mean() <= high
        assert (low, high) == pytest.approx(bootstrap_intervals({name: outcomes[name]}, clusters)[name], abs=1e-12)


def test_ten_thousand_queries_are_fast():
    outcomes = {name: np.random.default_rng(0).random(10_000) for name in ("a", "b", "c")}
    started = time.process_time()
    bootstrap_intervals(outcomes)
    assert time.process_time() - started < 10  # 0.2 s; a loop takes a minute


@pytest.mark.parametrize(
    ("outcomes", "options", "message"),
    [
        ({}, {}, "outcome"),
        ({"x": []}, {}, r"\b0 queries"),
        ({"x": [1, 2]}, {"clusters": ["a"]}, r"\b1 clusters.*\b2\b"),
        ({"x": [1, 2], "y": [1]}, {}, "shape"),
        ({"x": [[1, 2]]}, {}, "shape"),
        ({"x": [1, float("nan")]}, {}, r"x\[1\].*nan"),
        ({"x": [1, 2]}, {"num_resamples": 0}, "num_resamples.*0"),
        ({"x": [1, 2]}, {"confidence": 95}, "confidence.*95"),
    ],
)
def test_errors_for_bad_input_name_the_problem(outcomes, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_intervals(outcomes, **options)
    with pytest.raises(ValueError, match=message):
        paired_test(outcomes, outcomes, **options)


def test_systems_must_answer_the_same_queries():
    with pytest.raises(ValueError, match=r"'x'.*'y'"):
        paired_test({"x": [1, 2]}, {"y": [1, 2]})
    with pytest.raises(ValueError, match=r"\b2 queries.*\b3\b"):
        paired_test({"x": [1, 2]}, {"x": [1, 2, 3]})
