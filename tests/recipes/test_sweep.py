"""Sweeps: every combination runs once, and the finished runs have a table."""

import re
from pathlib import Path
from unittest import mock

import numpy as np
import pandas
import pytest
import yaml
from commands import run_recipe
from recordings import esc50_folder, tone_rows
from results_fixtures import fake_training, query_results
from scipy import stats

from modeling_supclap.recipes import sweep
from modeling_supclap.recipes.sweep import Step


@pytest.fixture
def calls(monkeypatch):
    """Fake training that writes results: the weight and the seed set the number of correct queries out of 8."""

    def train(settings):
        if settings["svr_alpha"] == 9:
            raise RuntimeError("out of memory")
        hits = np.arange(8) < 2 + 4 * settings["svr_alpha"] + settings["seed"]
        protocol = {"dataset": "synthetic", "languages": ["eng"]}
        config = settings["dataset_config"]
        if "test_fold" in config:
            hits, protocol["dataset_hash"] = hits ^ (hits.cumsum() <= config["test_fold"]), config["test_fold"]
        training = {"arguments": {"seed": settings["seed"]}}
        training["best_validation"] = {"mean_recall": 0.5 - 0.1 * settings["svr_alpha"] + 0.01 * settings["seed"]}
        return query_results(hits, protocol=protocol, training=training)

    return fake_training(monkeypatch, train)


def test_each_combination_and_seed_runs_once(calls, tmp_path):
    words = ["smoke.yaml", "svr_alpha=0.5,1", "svr=bi-static", "--output_dir", tmp_path, "--seeds", "0", "1"]
    run_recipe(sweep, *words)
    assert [(call["svr_alpha"], call["seed"]) for call in calls] == [(0.5, 0), (0.5, 1), (1, 0), (1, 1)]
    (folder,) = tmp_path.glob("runs/svr_alpha=0.5-train-synthetic-*-seed1")
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    assert (settings["svr"], settings["svr_alpha"], settings["seed"], settings["projection_dim"]) == (
        "bi-static",
        0.5,
        1,
        16,
    )

    table = pandas.read_csv(tmp_path / "table.csv").set_index("model")
    assert table["seeds"].to_dict() == {"svr_alpha=0.5": 2, "svr_alpha=1": 2}
    assert table["value"].tolist() == [4.5 / 8, 6.5 / 8]
    assert table["std"].tolist() == pytest.approx([0.125 / 2**0.5] * 2)
    assert table.loc["svr_alpha=1", "difference"] == 0.25

    run_recipe(sweep, *words, "2")
    assert [(call["svr_alpha"], call["seed"]) for call in calls[4:]] == [(0.5, 2), (1, 2)]
    heading, _, first, second = (tmp_path / "table.md").read_text().splitlines()[2:6]
    assert heading == "| model | seeds | validation | text to audio R@1 |"
    assert first.startswith("| svr_alpha=0.5 | 3 | 46.0 | 62.5 ± 12.5 (")
    assert "; +25.0 (" in second


def test_finished_runs_are_written_if_another_run_fails(calls, tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"):
        run_recipe(sweep, "smoke.yaml", "svr_alpha=1,9", "--output_dir", tmp_path)
    assert pandas.read_csv(tmp_path / "table.csv")["model"].tolist() == ["svr_alpha=1"]


@pytest.mark.parametrize(
    ("words", "seeds"), [(["seed=3,1"], [3, 1]), (["--seeds", "3", "1"], [3, 1]), ([], [5]), (["seed=0"], [0])]
)
def test_seeds_are_an_option_a_setting_or_those_of_the_file(calls, tmp_path, words, seeds):
    config = tmp_path / "mine.yaml"
    config.write_text("base: smoke.yaml\nseed: 5\n")
    run_recipe(sweep, config, "svr_alpha=0.5,1", *words, "--output_dir", tmp_path / "out")
    expected = [(alpha, seed) for alpha in (0.5, 1) for seed in seeds]
    assert [(call["svr_alpha"], call["seed"]) for call in calls] == expected
    table = pandas.read_csv(tmp_path / "out" / "table.csv").set_index("model")
    assert table["seeds"].to_dict() == dict.fromkeys(["svr_alpha=0.5", "svr_alpha=1"], len(seeds))


@pytest.mark.parametrize("words", [["seed=0,1", "--seeds", "2"], ["seed=0,0"], ["seed=often"], ["seed=0.5,1"]])
def test_seeds_that_do_not_fit_are_refused(calls, tmp_path, words):
    with pytest.raises(ValueError, match="seed"):
        run_recipe(sweep, "smoke.yaml", "svr_alpha=1,2", *words, "--output_dir", tmp_path)
    assert not calls


def test_no_file_of_a_run_has_a_token_or_a_local_path(calls, tmp_path):
    config, data = tmp_path / "mine.yaml", tmp_path / "ann"
    (data / "sounds").mkdir(parents=True)
    config.write_text(
        f"base: smoke.yaml\nhub_token: hf_secret\nbackground_dir: {data}\n"
        f"dataset_config: {{num_train: 8, api_key: other_secret}}\n"
    )
    run_recipe(sweep, config, "svr_alpha=0.5,1", "--output_dir", tmp_path / "out")
    assert [call["hub_token"] for call in calls] == ["hf_secret"] * 2
    assert {call["background_dir"] for call in calls} == {str(data)}
    assert {call["dataset_config"]["api_key"] for call in calls} == {"other_secret"}
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*/settings.yaml"))
    assert b"num_train" in written
    assert b"secret" not in written
    assert str(tmp_path).encode() not in written


def test_a_sweep_needs_settings_or_several_seeds(calls, tmp_path):
    with pytest.raises(ValueError, match="no settings"):
        run_recipe(sweep, "smoke.yaml", "--output_dir", tmp_path)
    assert not calls


@pytest.mark.parametrize("words", [["svr_alfa=1,2"], ["svr_alpha"], ["svr_alpha=0.1,often"], ["dataset=esc50"]])
def test_wrong_settings_are_named_before_the_first_run(calls, tmp_path, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words[0].partition("=")[0] + "|esc50"):
        run_recipe(sweep, "smoke.yaml", *words, "--output_dir", tmp_path)
    assert not calls
    assert not list(tmp_path.iterdir())


def test_a_dry_run_lists_the_rows_and_trains_nothing(calls, tmp_path, capsys):
    run_recipe(sweep, "smoke.yaml", "svr_alpha=0.5,1", "--output_dir", tmp_path, "--dry_run", "true")
    assert "synthetic, svr_alpha=0.5: train; 1 runs, 0 done" in capsys.readouterr().out
    assert not calls


def test_settings_are_chosen_by_the_validation_score(calls, tmp_path, capsys):
    """In the fake training, the larger weight has the better test score and the worse validation score."""
    run_recipe(sweep, "smoke.yaml", "svr_alpha=1,0.5", "--output_dir", tmp_path)
    printed = capsys.readouterr().out
    assert re.findall("^run (.*): .*", printed, re.MULTILINE) == ["1 of 2", "2 of 2"]
    assert "| svr_alpha=1 | 40.0 | 75.0 |" in printed
    assert pandas.read_csv(tmp_path / "table.csv")["validation"].tolist() == pytest.approx([0.4, 0.45])


def test_options_of_the_dataset_are_settings(calls, tmp_path):
    run_recipe(sweep, "smoke.yaml", "svr_alpha=1", "num_train=8,16", "--output_dir", tmp_path)
    assert [call["dataset_config"]["num_train"] for call in calls] == [8, 16]
    assert calls[0]["dataset_config"]["num_test"] == calls[1]["dataset_config"]["num_test"]
    assert pandas.read_csv(tmp_path / "table.csv")["model"].tolist() == ["num_train=8", "num_train=16"]


def test_groups_are_pooled_in_one_row(calls, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows = tone_rows(data, 9)
    lines = [f"{Path(row['audio_path']).name},a tone,site {number % 3}" for number, row in enumerate(rows)]
    (data / "metadata.csv").write_text("\n".join(["file_name,caption_eng,site", *lines]))
    config = tmp_path / "groups.yaml"
    config.write_text("dataset: audio_folder\nlanguages: [eng]\nper_device_train_batch_size: 2\nsource_column: site\n")
    words = [config, "svr_alpha=0.5,1", "test_group=site 0,site 2", "--data_dir", data]
    run_recipe(sweep, *words, "--output_dir", tmp_path / "out")
    assert len(calls) == 4
    table = pandas.read_csv(tmp_path / "out" / "table.csv").set_index("model")
    assert table["folds"].tolist() == [2, 2]


def test_folds_are_pooled_in_one_row(calls, tmp_path):
    """The seeds of a fold are averaged, and the interval is over the folds, because they share recordings."""
    data = esc50_folder(tmp_path / "ESC", count=40, num_folds=4)
    config = tmp_path / "folds.yaml"
    config.write_text("dataset: esc50\nlanguages: [eng]\nper_device_train_batch_size: 4\n")
    words = [config, "svr_alpha=0.5,1", "test_fold=1,2", "--seeds", "0", "1", "--data_dir", data]
    run_recipe(sweep, *words, "--output_dir", tmp_path / "out")
    assert len(calls) == 8
    table = pandas.read_csv(tmp_path / "out" / "table.csv").set_index("model")
    assert table[["folds", "seeds"]].to_numpy().tolist() == [[2, 2], [2, 2]]
    # 4 and 5 of 8 hits, without the first one or two
    folds = np.array([[3 / 8, 4 / 8], [2 / 8, 3 / 8]]).mean(axis=1)
    line = table.loc["svr_alpha=0.5"]
    assert line["value"] == pytest.approx(folds.mean())
    low, high = stats.t.interval(0.95, 1, folds.mean(), stats.sem(folds))
    assert line[["low", "high"]].tolist() == pytest.approx([max(low, 0), min(high, 1)])
    assert table.loc["svr_alpha=1", "difference"] == pytest.approx(2 / 8)
    assert "| svr_alpha=1 | 2 | 2 | " in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        ("train", {"per_device_train_batch_size": 6}, ["--per_device_train_batch_size", "3"]),
        ("train", {}, ["--per_device_train_batch_size", "4"]),
        (
            "posttrain",
            {"per_device_train_batch_size": 2},
            ["--resume_from_checkpoint", "last", "--per_device_train_batch_size", "1"],
        ),
        ("evaluate", {"per_device_train_batch_size": 6}, []),
    ],
)
@pytest.mark.parametrize("is_done", [False, True])
def test_two_processes_divide_the_batch_and_wait_for_each_other(
    monkeypatch, tmp_path, recipe, settings, words, is_done
):
    parse, run, join = mock.Mock(return_value=("group", "other")), mock.Mock(), mock.Mock()
    monkeypatch.setitem(sweep.RECIPES, recipe, sweep.RECIPES[recipe]._replace(run=run))
    monkeypatch.setattr(type(sweep.RECIPES[recipe]), "parse", parse)
    monkeypatch.setattr(sweep, "join_processes", join)
    step = Step(recipe, settings, tmp_path / "run")
    if is_done:
        query_results([1]).save(step.folder)
        (step.folder / "README.md").touch()
    assert step.is_done is is_done
    sweep.run_step(step)
    assert (parse.mock_calls, run.mock_calls, join.mock_calls) == ([], [], []) if is_done else True
    monkeypatch.setenv("WORLD_SIZE", "2")
    parse.reset_mock()
    run.reset_mock()
    sweep.run_step(step)
    assert parse.mock_calls == ([] if is_done else [mock.call(settings, *words)])
    assert run.mock_calls == ([] if is_done else [mock.call("group", "other")])
    assert join.mock_calls == mock.call(None).wait_for_everyone().call_list()


def test_a_batch_that_the_processes_cannot_divide_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"^run has batches of 8 clips, which 3 processes cannot divide; start "):
        sweep.run_step(Step("train", {}, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
