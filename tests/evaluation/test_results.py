"""Results: atomic files, tables, and the numbers of the papers."""

import json
import re

import numpy as np
import pytest
from results_fixtures import outcome_results as results
from scipy import stats

from modeling_supclap.evaluation.comparison import compare, format_comparison
from modeling_supclap.evaluation.results import (
    Interval,
    Intervals,
    Results,
    flat_scores,
    get_dataset_name,
    paper_results,
    score,
)
from modeling_supclap.metrics.bootstrap import bootstrap_intervals
from modeling_supclap.metrics.names import get_metric

A = [1, 0, 0, 1, 0, 0, 1, 0, 0, 0] * 4
B = [1, 1, 0, 1, 1, 0, 1, 1, 0, 0] * 4


def test_results_are_loaded_unchanged_and_written_reproducibly(tmp_path):
    for name in ("one", "two"):
        assert results(A).save(str(tmp_path / name)) == tmp_path / name / "results.json"
    for file in ("results.json", "outcomes.npz"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    for path in (tmp_path / "one", str(tmp_path / "one"), tmp_path / "one" / "results.json"):
        loaded = Results.load(path)
        assert loaded.content == results(A).content
        assert loaded.arrays.keys() == results(A).arrays.keys()
        assert all(np.array_equal(loaded.arrays[name], values) for name, values in results(A).arrays.items())
    assert {file.name for file in (tmp_path / "one").iterdir()} == {"results.json", "outcomes.npz"}


def test_other_files_are_refused_as_results(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"results\.json"):
        Results.load(tmp_path)
    for content, message in (('{"test": {}}', "schema None"), ("[]", "schema 'list'"), ("<html>", "JSON")):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(ValueError, match=f"results.json .*{message}"):
            Results.load(tmp_path)
    results(A).save(tmp_path)
    (tmp_path / "outcomes.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"outcomes\.npz"):
        Results.load(tmp_path)


def test_a_score_that_is_not_a_number_is_not_written(tmp_path):
    results(A).save(tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    broken = results(B)
    broken.content["scores"]["retrieval"]["eng"]["t2a"]["R@1"]["value"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        broken.save(tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before


def test_outcomes_of_another_run_are_rejected(tmp_path):
    results(A).save(tmp_path / "one")
    results(B).save(tmp_path / "two")
    (tmp_path / "two" / "outcomes.npz").replace(
        tmp_path / "one" / "outcomes.npz"
    )  # as after a kill between both writes
    with pytest.raises(ValueError, match=r"outcomes\.npz.*results\.json"):
        Results.load(tmp_path / "one")


def test_secrets_and_folders_of_this_machine_are_not_written(tmp_path):
    trained = results(A)
    trained.content["training"] = {"arguments": {"hub_token": "hf_x", "data_dir": "/home/me/ESC-50"}}
    assert json.loads(trained.save(tmp_path).read_text())["training"]["arguments"] == {"data_dir": "ESC-50"}


def test_a_notebook_shows_the_scores_escaped():
    shown = results(A)
    shown.scores["zste"]["<b>"] = {"3A": score(0.5, None, 1 / 3, 1 / 2)}
    page = shown._repr_html_()
    assert re.search(r"retrieval eng t2a R@1 +30\.0\n", page)
    assert "order-blind" in page
    assert "zste &lt;b&gt; 3A" in page


def test_tables_are_in_percent_where_scores_are_shares():
    scores = {
        "retrieval": {
            "eng": {"t2a": {"R@1": score(0.5, (0.4, 0.6), 0.1), "mean_rank": score(7.25), "num_queries": 3}}
        },
        "multilingual": {"all": {"MRV": score(12.5)}, "fra": {"Dis": score(0.25)}},
        "zste": {"eng": {"3A": score(0.5, None, 1 / 3, 1 / 2)}},
        "few_shot": {"5_per_class": {"top1": score(0.5, Interval(0.4, 0.6, 12, "recordings"))}},
        "linear_probe": {"logistic_regression": {"mAP": score(0.5, Interval(None, None, 1, "classes"))}},
    }
    lines = [line.split() for line in Results({"scores": scores}).table().splitlines()]
    assert lines[1:] == [
        ["retrieval", "eng", "t2a", "R@1", "50.0", "40.0", "to", "60.0", "10.0"],
        ["retrieval", "eng", "t2a", "mean_rank", "7.2"],
        ["multilingual", "all", "MRV", "12.50"],
        ["multilingual", "fra", "Dis", "0.250"],
        ["zste", "eng", "3A", "50.0", "33.3", "50.0"],
        ["few_shot", "5_per_class", "top1", "50.0", "40.0", "to", "60.0", "12", "recordings", "(few", "units)"],
        [
            "linear_probe",
            "logistic_regression",
            "mAP",
            "50.0",
            "1",
            "class",
            "(fewer",
            "than",
            "10:",
            "no",
            "interval)",
        ],
    ]
    assert lines[0] == ["score", "value", "interval", "chance", "order-blind", "resampled", "units"]
    plain = Results({"scores": {"multilingual": {"all": {"MRV": score(12.5)}}}}).table().splitlines()
    assert plain[0].split() == ["score", "value", "interval", "chance"]
    assert [each.place for each in flat_scores(scores)][3] == ("multilingual", "fra", "Dis")
    compared = format_comparison(compare(results(A), results(B))).splitlines()
    row = next(line for line in compared if "t2a R@1" in line)
    assert row.endswith("  40 units")
    assert row.split()[:7] == ["retrieval", "eng", "t2a", "R@1", "30.0", "60.0", "+30.0"]
    assert "-0.9" in next(line for line in compared if "rank" in line)


@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        ({"dataset": "esc50", "classes": 50}, "esc50"),
        ({"dataset": "esc50", "classes": 10}, "esc50, 10 of 50 classes"),
        ({"dataset": "prepared", "origin": "urbansound8k", "classes": 3}, "urbansound8k, 3 of 10 classes"),
        ({"dataset": "clotho", "classes": 0}, "clotho"),
        ({"dataset": "esc50", "classes": 0}, "esc50"),
        ({"dataset": "esc50"}, "esc50"),
        ({"dataset": "esc50", "classes": 1}, "esc50, 1 of 50 classes"),
        ({"dataset": None, "origin": None}, "unnamed data"),
    ],
)
def test_a_subset_of_the_classes_is_named_as_such(protocol, name):
    assert get_dataset_name(protocol) == name


def test_every_metric_of_the_papers_has_a_name():
    for metric in {entry["metric"] for entry in paper_results()}:
        assert get_metric(metric).display


def test_intervals_are_those_of_the_bootstrap():
    outcomes = {"R@1": np.array(A, dtype=float)}
    low, high, *units = Intervals(2000).draw(outcomes, np.arange(40), "clips")["R@1"]
    expected = stats.bootstrap((A,), np.mean, method="percentile", n_resamples=2000, rng=0).confidence_interval
    assert (low, high) == (pytest.approx(expected.low, abs=0.03), pytest.approx(expected.high, abs=0.03))
    assert units == [40, "clips"]
    drawn = bootstrap_intervals(outcomes, np.arange(40) // 2, num_resamples=50, confidence=0.8, seed=3)
    assert Intervals(50, 0.8, 3).draw(outcomes, np.arange(40) // 2, "pairs") == {"R@1": (*drawn["R@1"], 20, "pairs")}
    assert Intervals(0).draw(outcomes, np.arange(40), "clips") == {"R@1": None}
    assert Intervals().draw(outcomes, np.arange(40) % 2, "tapes") == {"R@1": (None, None, 2, "tapes")}


# ---- the papers ----


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("SupCLAP", "1", "clotho", "InfoNCE bi-DynamicSVR", "eng", "a2t", "R@10"), 0.6329),
        (("SupCLAP", "2", "vggsound", "InfoNCE bi-StaticSVR", "eng", None, "top1"), 0.2465),
        (("SupCLAP", "8", "audiocaps", "ATRI-CACL bi-DynamicSVR", "avg", "t2a", "R@1"), 0.4361),
        (("ATRI", "1", "clotho", "KCL", "zho", "a2t", "R@5"), 0.5634),
        (("ATRI", "1", "audiocaps", "CACL", "nld", "t2a", "mAP@10"), 0.6122),
        (("ATRI", "2", "clotho", "ML-CLAP", "jpn", None, "Dis"), 0.353),
        (("ATRI", "7", "audiocaps", "KCL, LaBSE", "avg", "t2a", "R@5"), 0.758),
        (("TeminAL", "1", "clotho", "CompA-CLAP", "eng", "a2t", "R@5"), 0.507),
        (("TeminAL", "2", "esc50", "TeminAL A and B, alphas 0, 1, 0, 1", "eng", None, "3B"), 0.2433),
        (("SupCLAP", "14", "clotho", "InfoNCE bi-DynamicSVR", None, None, "train_runtime"), 1116),
        (("TeminAL", "3", "esc50", "T-CLAP, TeminAL A and B", "eng", None, "2C"), 0.6234),
        (("TeminAL", "4", "urbansound8k", "T-CLAP", "eng", None, "top1"), 0.722),
    ],
)
def test_paper_results_are_those_of_the_tables(key, value):
    names = ("paper", "table", "dataset", "model", "language", "direction", "metric")
    (entry,) = [one for one in paper_results(paper=key[0]) if tuple(one[name] for name in names) == key]
    assert entry["value"] == pytest.approx(value)


def test_the_papers_averages_are_those_of_their_languages():
    """Check the averages in ATRI table 1, to find transcription errors. Two printed averages are wrong."""
    printed = {("ML-CLAP", "clotho", "t2a", "R@1"), ("CACL", "clotho", "t2a", "mAP@10")}
    groups = {}
    for entry in paper_results(paper="ATRI", table="1"):
        key = tuple(entry[name] for name in ("model", "dataset", "direction", "metric"))
        groups.setdefault(key, {})[entry["language"]] = entry["value"]
    assert len(groups) == 36
    for key, values in groups.items():
        average = values.pop("avg")
        assert len(values) == 8
        assert (abs(np.mean(list(values.values())) - average) < 1.5e-4) == (key not in printed), key


def test_the_average_gain_of_teminal_is_that_over_compa_clap():
    """The abstract prints 5.28 % without saying over what: T-CLAP and CompA-CLAP, the eleven scores of table 3."""
    scores = {}
    for entry in paper_results(paper="TeminAL", table="3"):
        scores.setdefault(entry["model"], {})[entry["metric"]] = 100 * entry["value"]
    ours, other = scores["T-CLAP, TeminAL A and B"], scores["CompA-CLAP"]
    assert len(ours) == 11
    assert np.mean([ours[task] - other[task] for task in ours]) == pytest.approx(5.28, abs=0.005)


def test_every_entry_of_the_papers_is_one_score():
    entries = paper_results()
    keys = [tuple(value for name, value in entry.items() if name != "value") for entry in entries]
    assert len(set(keys)) == len(keys) == 1173
    for entry in entries:
        largest = 1 if get_metric(entry["metric"]).percent else 400
        if entry["task"] in ("overhead", "parameters"):
            largest = 1e7
        assert 0 <= entry["value"] <= largest, entry
    with pytest.raises(ValueError, match=r"\['modle', 'tabel'\]; the entries have \['paper', 'table', 'task', "):
        paper_results(tabel="1", modle="KCL")
