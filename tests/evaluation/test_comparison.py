"""Comparisons of results: pairing by query and seed, checked with another statistics package, and refused protocols."""

import numpy as np
import pytest
from results_fixtures import outcome_results as results
from results_fixtures import paired_queries
from scipy import stats

from modeling_supclap.evaluation.comparison import compare, compare_seeds, get_outcomes
from modeling_supclap.evaluation.results import Results

A = [1, 0, 0, 1, 0, 0, 1, 0, 0, 0] * 4
B = [1, 1, 0, 1, 1, 0, 1, 1, 0, 0] * 4


def by_name(table):
    return {row["score"]: row for row in table}


def test_a_comparison_is_paired():
    rows = by_name(compare(results(A), results(B)))
    row = rows["retrieval eng t2a R@1"]
    assert (row["first"], row["second"], row["difference"]) == (
        pytest.approx(0.3),
        pytest.approx(0.6),
        pytest.approx(0.3),
    )
    assert 0 < row["low"] < 0.3 < row["high"]
    # SciPy's exact test of the same null hypothesis: all 12 differing queries favour one model.
    assert row["p_value"] == pytest.approx(stats.binomtest(12, 12).pvalue, abs=1e-9)
    assert rows["retrieval eng t2a mean_rank"]["first"] == pytest.approx(1 + 3 * 0.7)
    assert rows["zste eng 3A"]["difference"] == pytest.approx(0.3)
    assert all(row["difference"] == 0 for row in compare(results(A), results(A)))


def test_queries_are_paired_by_id():
    order = np.random.default_rng(0).permutation(len(B))
    ids = np.array([f"clip{index}" for index in range(len(B))])[order]
    shuffled = results(np.array(B)[order], ids=ids)
    expected, rows = (by_name(compare(results(A), other)) for other in (results(B), shuffled))
    assert rows["retrieval eng t2a R@1"] == expected["retrieval eng t2a R@1"]


def test_queries_of_one_recording_are_drawn_together():
    apart = by_name(compare(results(A), results(B)))["zste eng 3A"]
    ten = [f"source{index % 10}" for index in range(40)]
    together = by_name(compare(results(A, clusters=ten), results(B, clusters=ten)))["zste eng 3A"]
    assert together["p_value"] > apart["p_value"]
    assert together["high"] - together["low"] > apart["high"] - apart["low"]


@pytest.mark.parametrize(
    "change",
    [
        {"dataset_hash": "other"},
        {"positives": "captions"},
        {"caption_handling": "parallel"},
        {"zste": {"set_hash": "t"}},
    ],
)
def test_other_data_or_another_protocol_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        compare(results(A), results(B, **change))
    with pytest.warns(UserWarning, match=next(iter(change))):
        assert compare(results(A), results(B, **change), allow_different=True)


def test_differences_between_models_only_warn():
    other = {"audio": {"chunk_seconds": 10.0}, "zste": {"set_hash": "s", "clip_seconds": {"pair": 5.0}}}
    with pytest.warns(UserWarning, match=r"\baudio\b"):
        assert compare(results(A), results(B, **other))


def test_other_queries_are_refused_or_left_out():
    fewer = results(B[:30])
    with pytest.raises(ValueError, match=r"\b40\b.*\b30\b"):
        compare(results(A), fewer)
    row = by_name(compare(results(A), fewer, allow_different=True))["retrieval eng t2a R@1"]
    assert row["queries"] == 30
    assert row["first"] == pytest.approx(np.mean(A[:30]))


def test_a_task_without_a_common_query_is_left_out():
    first, second = results(A), results(B)
    second.arrays["zste/eng/3A/query_id"] = np.array([f"other{index}" for index in range(len(B))])
    scores = by_name(compare(first, second, allow_different=True))
    assert "retrieval eng t2a R@1" in scores
    assert not [name for name in scores if name.startswith("zste")]
    with pytest.raises(ValueError, match=r"40 and 40 queries, 0 shared"):
        compare(first, second)


def test_results_without_a_common_score():
    other = results(B)
    other.arrays = {name.replace("eng", "fra"): values for name, values in other.arrays.items()}
    with pytest.raises(ValueError, match="score"):
        compare(results(A), other)


def test_a_repeated_query_counts_twice():
    ids = ["once", "twice", "twice", "thrice"]
    row = by_name(compare(results([1, 1, 0, 0], ids=ids), results([1, 0, 1, 1], ids=ids)))["zste eng 3A"]
    assert (row["first"], row["second"], row["queries"]) == (0.5, 0.75, 4)


def test_rows_are_compared_over_the_seeds_that_both_have():
    row, baseline = paired_queries([1, 1, 1, 1, 0, 1, 0, 1] * 5), paired_queries([1, 1, 0, 0, 0, 0, 0, 0] * 5)
    own, base = {0: row, 2: row}, {0: baseline, 1: baseline}
    place = ("retrieval", "eng", "t2a", "R@1")
    compared = compare_seeds(own, base, place, {0: 0.75, 2: 0.75}, {0: 0.25, 1: 0.25})
    assert compared.values == (0.5,)
    assert (compared.low, compared.high) == compared.recordings
    assert compared.low < 0.5
    assert compare_seeds({2: row}, base, place, {2: 0.75}, {0: 0.25, 1: 0.25}) is None


def test_the_mean_over_languages_is_compared_query_by_query():
    ranks = np.array([[0, 2], [1, 1]])
    arrays = {
        "retrieval/eng/t2a/R@1": np.array([1.0, 0.0]),
        "retrieval/fra/t2a/R@1": np.array([1.0, 1.0]),
        "retrieval/eng/t2a/cluster": np.array(["a", "b"]),
        "multilingual/ranks": ranks,
        "multilingual/cluster": np.array(["a", "b"]),
    }
    results = Results({"protocol": {"languages": ["eng", "fra"]}}, arrays)
    values, clusters = get_outcomes(results, ["retrieval", "mean", "t2a", "R@1"])
    assert (values.tolist(), clusters.tolist()) == ([1.0, 0.5], ["a", "b"])
    values, _ = get_outcomes(results, ["multilingual", "all", "MRV"])
    assert values.tolist() == [1.0, 0.0]
    values, _ = get_outcomes(results, ["multilingual", "all", "MSR"])
    assert values.tolist() == [2.0, 1.0]
    del results.arrays["multilingual/ranks"]
    assert get_outcomes(results, ["multilingual", "all", "MRV"]) is None
    results.arrays["retrieval/fra/t2a/R@1"] = np.ones(3)  # another number of queries
    assert get_outcomes(results, ["retrieval", "mean", "t2a", "R@1"]) is None
    assert get_outcomes(results, ["retrieval", "mean", "t2a", "R@5"]) is None
    assert get_outcomes(Results({"protocol": {}}, arrays), ["retrieval", "mean", "t2a", "R@1"]) is None


def test_the_ranks_of_all_languages_are_no_task_of_their_own():
    first, second = results(A), results(B)
    before = compare(first, second)
    for each in (first, second):
        for name in ("query_id", "cluster"):
            each.arrays[f"multilingual/{name}"] = each.arrays[f"retrieval/eng/t2a/{name}"]
        each.arrays["multilingual/ranks"] = np.tile(each.arrays["retrieval/eng/t2a/rank"], (2, 1)).T
    assert compare(first, second) == before
