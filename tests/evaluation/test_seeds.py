"""Tables of several models and seeds, from results in memory and in folders."""

import re

import numpy as np
import pandas
import pytest
from results_fixtures import query_results
from scipy import stats

from modeling_supclap import evaluation
from modeling_supclap.evaluation.comparison import COMPARISON_CAPTION

R1 = "retrieval eng t2a R@1"


def results(hits, dataset="esc50", name="start", **protocol):
    """Return results with `hits` correct queries of 40 recordings."""
    content = {"model": {"name": name}, "protocol": {"dataset": dataset, "languages": ["eng"], **protocol}}
    return query_results([1] * hits + [0] * (40 - hits), chance=0.05, **content)


def test_seeds_in_memory_have_mean_deviation_and_paired_difference():
    first, second = [results(hits) for hits in (8, 12, 16)], [results(hits) for hits in (14, 16, 21)]
    frame = evaluation.table({"InfoNCE": first, "SVR & co": second}).to_frame().set_index("model")
    assert isinstance(frame, pandas.DataFrame)
    line = frame.loc["SVR & co"]
    assert (line["dataset"], line["score"], line["seeds"]) == ("esc50", R1, 3)
    assert line["value"] == pytest.approx(np.mean([14, 16, 21]) / 40)
    assert line["std"] == pytest.approx(np.std([14, 16, 21], ddof=1) / 40)
    assert line["difference"] == pytest.approx(5 / 40)
    over_seeds = stats.ttest_1samp(np.array([6, 4, 5]) / 40, 0).confidence_interval(0.95)
    assert line["difference_low"] < over_seeds.low  # also over recordings
    assert line["difference_high"] > over_seeds.high
    assert np.isnan(frame.loc["InfoNCE", "difference"])


def test_lists_are_paired_by_place_and_loaded_results_by_seed(tmp_path):
    for loss, of_seeds in {"InfoNCE": {0: 8, 1: 20}, "SVR": {1: 22, 2: 30}}.items():
        for seed, hits in of_seeds.items():
            results(hits).save(tmp_path / f"{loss}-seed{seed}")
    loaded = evaluation.load_results(tmp_path / "*-seed*")
    assert {name: [each.seed for each in runs] for name, runs in loaded.items()} == {"InfoNCE": [0, 1], "SVR": [1, 2]}
    frame = evaluation.table(loaded).to_frame().set_index("model")
    assert frame.loc["SVR", "difference"] == pytest.approx(2 / 40)  # only seed 1 is in both
    in_memory = {"InfoNCE": [results(8), results(20)], "SVR": [results(22), results(30)]}
    frame = evaluation.table(in_memory).to_frame().set_index("model")
    assert frame.loc["SVR", "difference"] == pytest.approx(12 / 40)


def test_folders_named_seed_belong_to_the_folder_above(tmp_path):
    for loss, seed in (("InfoNCE", 0), ("InfoNCE", 1), ("SVR", 0)):
        results(10).save(tmp_path / loss / f"seed{seed}")
    (tmp_path / "SVR" / "seed1").mkdir()
    with pytest.warns(UserWarning, match="seed1 contains no results.json") as warned:
        loaded = evaluation.load_results(f"{tmp_path}/*/seed*")
    assert warned[0].filename == __file__
    assert {name: len(runs) for name, runs in loaded.items()} == {"InfoNCE": 2, "SVR": 1}
    with pytest.raises(FileNotFoundError, match="sede"):
        evaluation.load_results(tmp_path / "sede*")


def test_training_runs_that_differ_only_in_what_a_seed_changes_are_one_model(tmp_path):
    def save(folder, hits, **arguments):
        training = {"arguments": {"loss": "svr", "output_dir": folder, **arguments}}
        of_run = results(hits, name="start")
        of_run.content["training"] = training
        of_run.save(tmp_path / folder)

    save("first", 8, seed=3, data_seed=3, run_name="one", resume_from_checkpoint=None)
    save("again", 12, seed=4, data_seed=4, run_name="two", resume_from_checkpoint="again/checkpoint-3")
    save("other", 16, seed=4, loss="infonce")
    loaded = evaluation.load_results(*(tmp_path / name for name in ("first", "again", "other")))
    assert {name: [each.seed for each in runs] for name, runs in loaded.items()} == {"first": [3, 4], "other": [4]}


@pytest.mark.parametrize("names", [["svr-seed2-b_seed=10", "svr-seed2-b_seed=3"], ["svr-b.seed10", "svr-b/seed3"]])
def test_the_last_seed_of_a_name_is_that_of_the_run(tmp_path, monkeypatch, names):
    for hits, name in zip((8, 12), names, strict=True):
        results(hits).save(tmp_path / name)
    (tmp_path / "svr.txt").touch()  # no folder; files are not in any order
    monkeypatch.setattr("glob.glob", lambda pattern: [str(tmp_path / name) for name in ("svr.txt", *names[::-1])])
    ((name, runs),) = evaluation.load_results(tmp_path / "*svr*").items()
    assert ([each.seed for each in runs], name) == ([10, 3], "svr-b")


def test_a_run_without_a_number_has_seed_zero(tmp_path):
    results(8, name="mine").save(tmp_path / "mine")
    results(20, name="mine").save(tmp_path / "mine-seed1")
    (runs,) = evaluation.load_results(tmp_path / "*").values()
    assert [run.seed for run in runs] == [0, 1]


def test_models_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for folder in ("a/x", "b/y"):
        results(8, name="outputs/mine").save(tmp_path / folder)
    assert list(evaluation.load_results(tmp_path / "*" / "*")) == ["mine", str(tmp_path / "b" / "y")]

    for folder, loss, config, data in (
        ("c/svr-seed0", "svr", {}, None),
        ("c/svr-seed1", "svr", {}, None),
        ("d/svr-seed1", "infonce", {}, None),
        ("e/svr-seed1", "svr", {"language": "fra"}, None),
        ("f/svr-seed1", "svr", {}, {"train": "other"}),
    ):
        of_run = results(8, dataset_config=config)
        of_run.content |= {"training": {"arguments": {"loss": loss}}, "data": data}
        of_run.save(tmp_path / folder)
    loaded = evaluation.load_results(tmp_path / "[c-f]" / "*")
    others = [str(tmp_path / folder / "svr-seed1") for folder in ("d", "e", "f")]
    assert {name: [run.seed for run in runs] for name, runs in loaded.items()} == {
        "svr": [0, 1],
        **{folder: [1] for folder in others},
    }


def test_each_dataset_has_its_own_tables(tmp_path):
    for dataset, hits in (("esc50", 8), ("clotho", 20)):
        results(hits, dataset, "mine").save(tmp_path / dataset / "mine")
        results(hits + 4, dataset, "other").save(tmp_path / dataset / "other")
    compared = evaluation.table(evaluation.load_results(tmp_path / "*" / "*"))
    frame = compared.to_frame().set_index(["dataset", "model"])
    assert frame["value"].to_dict() == {
        ("clotho", "mine"): 0.5,
        ("clotho", "other"): 0.6,
        ("esc50", "mine"): 0.2,
        ("esc50", "other"): 0.3,
    }
    assert [table.title for table in compared.tables] == ["clotho: retrieval, eng", "esc50: retrieval, eng"]


def test_a_table_is_shown_in_each_format(tmp_path):
    models = {"a_1 & 50%": [results(8), results(12)], "<SVR>": [results(14), results(16)]}
    compared = evaluation.table(models)
    assert "\n| &lt;SVR&gt; | 2 | 37.5 ± 3.5 " in compared.to_markdown()
    assert compared._repr_html_().startswith("<pre>esc50: retrieval, eng\nmodel ")
    assert "&lt;SVR&gt;" in compared._repr_html_()
    line = next(line for line in str(compared).splitlines() if line.startswith("<SVR>"))
    assert re.search(r" 2 +37\.5 ± 3\.5 ", line)

    latex = compared.to_latex()
    environments = re.findall(r"\\(begin|end)\{(\w+)\}", latex)
    assert environments == [("begin", "tabular"), ("end", "tabular")]
    assert re.findall(r"\\(\w+rule)\b", latex) == ["toprule", "midrule", "bottomrule"]
    body = re.sub(r"\\[{}]", "", latex)
    assert body.count("{") == body.count("}")
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", latex)[1]
    rows = [row for row in latex.splitlines() if row.endswith(r" \\")]
    assert [len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows] == [len(columns)] * 3
    assert r"a\_1 \& 50\%" in rows[1]
    assert compared.save(tmp_path) == (tmp_path / "table.md").read_text()
    assert "<h1>Comparison</h1>" in (tmp_path / "table.html").read_text()
    assert COMPARISON_CAPTION in (tmp_path / "table.md").read_text()
    assert (tmp_path / "table.tex").read_text() == latex
    assert pandas.read_csv(tmp_path / "table.csv")["value"].tolist() == compared.to_frame()["value"].tolist()


def test_the_table_names_the_resampled_units():
    few = query_results([1, 0] * 6, protocol={"dataset": "esc50", "languages": ["eng"]})
    few.scores["retrieval"]["eng"]["t2a"]["R@1"] |= {"units": 12, "unit": "recordings", "low": 0.2, "high": 0.8}
    compared = evaluation.table({"one": few, "two": few})
    assert "Resampled units: 12 recordings (few units)." in compared.to_markdown()
    assert compared.to_frame()[["units", "unit"]].values.tolist() == [[12, "recordings"]] * 2


def test_results_of_other_protocols_are_refused():
    one, other = results(8, positives="clip"), results(8, positives="captions")
    with pytest.raises(ValueError, match="positives"):
        evaluation.table({"one": one, "other": other})
    with pytest.warns(UserWarning, match="positives"):
        evaluation.table({"one": one, "other": other}, allow_different=True)
    with pytest.raises(ValueError, match="no scores"):
        evaluation.table({})
