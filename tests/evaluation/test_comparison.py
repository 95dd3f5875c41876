"""Comparisons of results: pairing by query and seed, checked with another statistics package, and refused protocols."""

import numpy as np
import pytest
from results_fixtures import outcome_results as results
from results_fixtures import paired_queries, query_results
from scipy import stats

from modeling_supclap.evaluation.comparison import (
    compare,
    compare_seeds,
    comparison_tables,
    format_comparison,
    get_outcomes,
    tabulate,
)
from modeling_supclap.evaluation.results import Interval, Results, score
from modeling_supclap.metrics.comparison import difference

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


def test_a_row_is_the_difference_of_the_queries():
    first, second = (results(hits, clusters=np.arange(40) // 2) for hits in (A, B))
    second.scores["retrieval"]["eng"]["t2a"]["R@1"] = score(0.6, Interval(None, None, 20, "recordings"))
    rows = compare(first, second, num_resamples=37, seed=2)
    names = ["R@1", "R@5", "R@10", "mAP@10", "mean_rank"]  # in the order of the results
    assert [row["score"] for row in rows] == [*(f"retrieval eng t2a {name}" for name in names), "zste eng 3A"]
    found = difference([0.6], [0.3], B, A, np.arange(40) // 2, num_resamples=37, seed=2)
    default = difference([0.6], [0.3], B, A, np.arange(40) // 2)
    assert (found.low, found.high) != (default.low, default.high)
    assert by_name(rows)["retrieval eng t2a R@1"] == {
        "score": "retrieval eng t2a R@1",
        "first": 0.3,
        "second": 0.6,
        "difference": found.value,
        "low": found.low,
        "high": found.high,
        "p_value": found.p_value,
        "queries": 40,
        "units": 20,
        "unit": "recordings",
    }
    assert by_name(rows)["zste eng 3A"]["unit"] == "units"  # unknown


def test_a_comparison_is_printed_as_a_table():
    row = {"score": "retrieval eng t2a R@1", "first": 0.3, "second": 0.6, "difference": 0.3, "units": 40}
    rank = {"score": "retrieval eng t2a mean_rank", "first": 3.1, "second": 2.25, "difference": -0.85, "units": 12}
    table = [{**row, "low": 0.15, "high": 0.45, "p_value": 0.0123, "unit": "clips"}]
    table.append({**rank, "low": None, "high": None, "p_value": None, "unit": "recordings"})
    text = """\
score                        first  second  difference        interval      p            resampled units
retrieval eng t2a R@1         30.0    60.0       +30.0  +15.0 to +45.0  0.012                   40 clips
retrieval eng t2a mean_rank    3.1     2.2        -0.8                         12 recordings (few units)"""
    assert format_comparison(table) == text


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
    seeds = {"first": {0: results(A), 1: results(A)}, "second": {0: results(A), 1: results(B, **change)}}
    with pytest.raises(ValueError, match=next(iter(change))):
        tabulate(seeds)
    with pytest.raises(ValueError, match=next(iter(change))):  # a seed that the first model lacks
        tabulate({"first": {0: results(A)}, "second": seeds["second"]})
    with pytest.warns(UserWarning, match=next(iter(change))):
        assert compare(results(A), results(B, **change), allow_different=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio": {"chunk_seconds": 10.0}}, 'audio: {"chunk_seconds": null} and {"chunk_seconds": 10.0}'),
        ({"missing_clips": ["é"]}, 'missing_clips: [] and ["é"]'),
        ({"missing_clips": ["a" * 198]}, f'missing_clips: [] and ["{"a" * 198} ...'),
        ({"missing_clips": ["a" * 196]}, f'missing_clips: [] and ["{"a" * 196}"]'),
        ({"intervals": {"seed": 1, "confidence": 0.9}}, 'intervals: {} and {"confidence": 0.9, "seed": 1}'),
        ({"selected_on": "test"}, 'selected_on: null and "test"'),
    ],
)
def test_differences_between_models_only_warn(change, message):
    other = {"zste": {"set_hash": "s", "clip_seconds": {"pair": 5.0}}}  # they depend on the model
    with pytest.warns(UserWarning, match="differ in") as warned:
        assert compare(results(A), results(B, **other, **change))
    assert [str(each.message) for each in warned] == [f"the results differ in {message}"]
    assert warned[0].filename == __file__  # where they are compared


def test_all_settings_that_differ_are_named():
    other = results(B, positives="captions", zste={"set_hash": "t"})
    message = r"""the results are not comparable; positives: "clip" and "captions"; zste: \{.*"s"\} and \{.*"t"\}"""
    with pytest.raises(ValueError, match=message + "; evaluate both with the same data and protocol"):
        compare(results(A), other)
    del other.scores["zste"]
    with pytest.raises(ValueError, match=r'positives: "clip" and "captions"; evaluate both'):
        compare(results(A), other)


def test_other_queries_are_refused_or_left_out():
    fewer = results(B[:30])
    with pytest.raises(ValueError, match=r"\b40\b.*\b30\b"):
        compare(results(A), fewer)
    row = by_name(compare(results(A), fewer, allow_different=True))["retrieval eng t2a R@1"]
    assert row["queries"] == 30
    assert row["first"] == pytest.approx(np.mean(A[:30]))

    partly = results(B)
    partly.arrays["zste/eng/3A/query_id"] = np.char.add("other ", partly.arrays["zste/eng/3A/query_id"])
    with pytest.raises(ValueError, match="zste/eng/3A: the results have 40 and 40 queries, 0 shared"):
        compare(results(A), partly)
    assert {row["score"].split()[0] for row in compare(results(A), partly, allow_different=True)} == {"retrieval"}


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

    # without the same recordings in all runs, or without outcomes of one, there is no pairing by query
    apart, without = query_results([1] * 40), paired_queries([1] * 40)
    without.arrays.clear()
    for other in (apart, without):
        unpaired = compare_seeds({0: other, 1: row}, base, place, {0: 1, 1: 0.75}, {0: 0.25, 1: 0.25})
        assert (unpaired.values, unpaired.recordings) == ((0.75, 0.5), None)
    paired = compare_seeds({0: row, 1: row}, base, place, {0: 0.75, 1: 0.75}, {0: 0.25, 1: 0.25})
    assert paired.recordings is not None


def test_one_run_is_compared_with_the_run_of_its_seed():
    """Not with the first run of the other model, nor with their mean."""
    two, one = (
        {0: query_results([1] * 8 + [0] * 32), 1: query_results([1] * 20 + [0] * 20)},
        {1: query_results([1] * 40)},
    )
    for models, difference_of_second in (({"a": two, "b": one}, 0.5), ({"b": one, "a": two}, -0.5)):
        first, second = tabulate(models)
        assert (first["difference"], second["difference"]) == (None, difference_of_second)
        assert second["difference_low"] <= difference_of_second <= second["difference_high"]
    apart = {1: query_results([1] * 40)}
    apart[1].arrays["retrieval/eng/t2a/query_id"] = np.arange(40, 80).astype(str)
    with pytest.raises(ValueError, match="40 and 40 queries, 0 shared"):
        tabulate({"b": one, "other": apart})
    _, second = tabulate({"b": one, "other": apart}, allow_different=True)
    assert second["difference"] == 0


def test_a_score_that_only_one_model_has_has_no_difference():
    start, tuned = query_results([1, 0] * 20, interval=(0.3, 0.7)), query_results([1, 1] * 20)
    tuned.scores["zste"] = {"eng": {"3A": score(0.5, None, 1 / 3)}}
    first, second, third = tabulate({"start": {0: start}, "tuned": {0: tuned}})
    assert (first["low"], first["high"], first["std"]) == (0.3, 0.7, None)
    assert [record["score"] for record in (second, third)] == ["retrieval eng t2a R@1", "zste eng 3A"]
    assert (second["difference"], third["difference"], third["chance"]) == (0.5, None, 1 / 3)


def test_the_interval_of_a_rank_over_seeds_may_exceed_one():
    runs = {}
    for seed, rank in enumerate((5.0, 7.0)):
        runs[seed] = Results({"scores": {"multilingual": {"all": {"MSR": score(rank)}}}, "protocol": {}})
    (record,) = tabulate({"one": runs})
    expected = stats.ttest_1samp([5.0, 7.0], 0).confidence_interval(0.95)
    assert (record["low"], record["high"]) == pytest.approx((expected.low, expected.high))


def of_folds(*hits):
    """Return results of 40 queries for two folds and two seeds, with these numbers of correct queries."""
    runs = {}
    for key, count in zip([(1, 0), (1, 1), (2, 0), (2, 1)], hits, strict=True):
        training = {"best_validation": {"eval_eng_t2a_R@1": count / 80}}
        runs[key] = query_results([1] * count + [0] * (40 - count), chance=0.05, training=training)
    return runs


def test_the_seeds_of_a_fold_are_averaged():
    records = tabulate({"start": of_folds(8, 12, 20, 24), "tuned": of_folds(16, 20, 24, 24)})
    start = stats.ttest_1samp([0.25, 0.55], 0).confidence_interval(0.95)
    found = stats.ttest_1samp([0.2, 0.05], 0).confidence_interval(0.95)
    common = {"score": "retrieval eng t2a R@1", "seeds": 2, "folds": 2, "validation_metric": "eval_eng_t2a_R@1"}
    common |= {"chance": 0.05, "units": None, "unit": "units", "p_value": None}
    assert records == [
        {
            **common,
            "model": "start",
            "validation": pytest.approx(0.2),
            "value": pytest.approx(0.4),
            "std": pytest.approx(np.std([0.25, 0.55], ddof=1)),
            "low": max(start.low, 0.0),
            "high": min(start.high, 1.0),
            **dict.fromkeys(["difference", "difference_low", "difference_high"]),
        },
        {
            **common,
            "model": "tuned",
            "validation": pytest.approx(0.2625),
            "value": pytest.approx(0.525),
            "std": pytest.approx(np.std([0.45, 0.6], ddof=1)),
            "low": 0.0,
            "high": 1.0,
            "difference": pytest.approx(0.125),
            "difference_low": pytest.approx(found.low),
            "difference_high": pytest.approx(found.high),
        },
    ]
    (table,) = comparison_tables("esc50", records)
    assert records[0]["validation"] == pytest.approx(0.2)  # still a number
    assert table.title == "esc50: retrieval, eng"
    assert table.lines == [
        ["model", "seeds", "folds", "validation", "text to audio R@1 (chance 5.0)"],
        ["start", "2", "2", "20.0", "40.0 ± 21.2 (0.0 to 100.0)"],
        ["tuned", "2", "2", "26.2", "52.5 ± 10.6 (0.0 to 100.0); +12.5 (-82.8 to +107.8)"],
    ]


@pytest.mark.parametrize("change", ["training", "best", "selected_on"])
def test_a_column_of_validation_needs_the_score_of_each_run(change):
    runs = of_folds(8, 12, 20, 24)
    if change == "training":
        runs[1, 0].content["training"] = None
    elif change == "best":
        runs[1, 0].content["training"]["best_validation"] = None
    else:
        runs[1, 0].protocol["selected_on"] = "test"
    (record,) = tabulate({"start": runs})
    assert (record["validation_metric"], record["validation"]) == (None, None)
    (table,) = comparison_tables("esc50", [record])
    assert table.lines[0][:3] == ["model", "seeds", "folds"]
    (one,) = tabulate({"start": {0: runs[2, 0]}})
    assert (one["seeds"], one["folds"], one["validation"]) == (1, None, 0.25)
    (table,) = comparison_tables("esc50", [{**one, "validation": None}])
    assert table.lines[0] == ["model", "text to audio R@1 (chance 5.0)"]


def test_each_task_and_language_has_a_table():
    scores = {
        "retrieval": {"eng": {"t2a": {"R@1": score(0.5), "mean_rank": score(3.0), "num_queries": 7}}},
        "multilingual": {"all": {"MRV": score(2.0)}, "fra": {"Gap": score(0.5)}},
        "zero_shot": {"eng": {"supclap": {"top1": score(0.5, Interval(0.4, 0.6, 12, "recordings"))}}},
        "zste": {"all": {"3A": {"MRV": score(0.5)}}, "fra": {"3A": score(0.25)}},
    }
    tables = comparison_tables("esc50", tabulate({"one": {0: Results({"scores": scores, "protocol": {}})}}))
    assert {table.title: (table.lines[0][1:], table.caption) for table in tables} == {
        "esc50: retrieval, eng": (["text to audio R@1"], ""),
        "esc50: multilingual": (["mean rank variance", "gap to English, fra"], ""),
        "esc50: zero shot, eng": (
            ["top-1 accuracy, prompts of supclap"],
            "Resampled units: 12 recordings (few units).",
        ),
        "esc50: zste, fra": (["ZSTE 3A, fra"], ""),
    }


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
    values, clusters = get_outcomes(results, ["multilingual", "all", "MSR"])
    assert (values.tolist(), clusters.tolist()) == ([2.0, 1.0], ["a", "b"])
    arrays |= {"zste/fra/3A/score": np.array([1.0, 0.0]), "zste/fra/3A/cluster": np.array(["c", "d"])}
    values, clusters = get_outcomes(results, ["zste", "fra", "3A"])
    assert (values.tolist(), clusters.tolist()) == ([1.0, 0.0], ["c", "d"])
    assert get_outcomes(results, ["retrieval", "mean", "t2a", "R@5"]) is None

    arrays["retrieval/fra/t2a/R@1"] = np.array([1.0])
    assert get_outcomes(results, ["retrieval", "mean", "t2a", "R@1"]) is None  # not the same queries
    assert get_outcomes(results, ["retrieval", "deu", "t2a", "R@1"]) is None
    results.protocol["languages"] = []
    assert get_outcomes(results, ["retrieval", "mean", "t2a", "R@1"]) is None
    del arrays["multilingual/ranks"]
    assert get_outcomes(results, ["multilingual", "all", "MRV"]) is None


def test_the_ranks_of_all_languages_are_no_task_of_their_own():
    first, second = results(A), results(B)
    before = compare(first, second)
    for each in (first, second):
        for name in ("query_id", "cluster"):
            each.arrays[f"multilingual/{name}"] = each.arrays[f"retrieval/eng/t2a/{name}"]
        each.arrays["multilingual/ranks"] = np.tile(each.arrays["retrieval/eng/t2a/rank"], (2, 1)).T
    assert compare(first, second) == before
