"""Tables of the papers: runs, results, and valid configuration files."""

import json

import dataset_folders
import numpy as np
import pytest
from commands import run_recipe
from processes import run_forks, run_processes
from results_fixtures import fake_training, paired_queries

from modeling_supclap.evaluation.tables import to_html
from modeling_supclap.recipes import reproduce, sweep
from modeling_supclap.recipes.studies.tables import make_tables

R1 = "retrieval eng t2a R@1"


@pytest.fixture
def recipe(monkeypatch):
    """Fake training that writes results: the row and the seed set the number of correct queries out of 8."""

    def train(settings):
        answered = (4 if settings["svr"] == "none" else 6) + settings["seed"]
        return paired_queries(([1] * answered + [0] * (8 - answered)) * 5)

    return fake_training(monkeypatch, train)


ROWS = ("--rows", "table1_infonce", "table1_infonce_bi_static", "--seeds", "0", "1")
STEM = "supclap_table1_selected"


def test_a_table_contains_measured_and_printed_numbers(recipe, tmp_path):
    run_recipe(reproduce, "supclap/table1", *ROWS, "--output_dir", tmp_path)
    content = json.loads((tmp_path / "mini" / f"{STEM}.json").read_text())
    baseline, static = (row["scores"][R1] for row in content["rows"])

    assert baseline["values"] == [0.5, 0.625]
    assert (baseline["mean"], static["mean"]) == (0.5625, 0.8125)
    assert baseline["std"] == pytest.approx(0.125 / 2**0.5)
    assert (baseline["paper"], static["paper"]) == (0.4187, 0.4389)
    assert static["differences"] == [0.25, 0.25]
    assert static["low"] < 0.25 < static["high"]
    assert "low" not in baseline
    assert baseline["chance"] == static["chance"] == 0.016
    about = {name: value for name, value in content["rows"][1].items() if name not in ("scores", "model")}
    assert about == {
        "row": "table1_infonce_bi_static", "dataset": "synthetic", "baseline": "table1_infonce", "seeds": [0, 1],
        "overlap": {"clips": 0, "trained": 0, "excluded": 0}, "left_out": {},
        "cost": {"steps": 12, "captions": 96, "seconds": 1},
    }  # fmt: skip
    assert content["rows"][0]["baseline"] is None
    assert (content["table"], content["scale"], content["settings"]) == ("supclap/table1", "mini", {})
    assert content["versions"]["supclap"]

    text = (tmp_path / "mini" / f"{STEM}.md").read_text()
    assert "81.2 ± 8.8; +25.0 (" in text
    assert "2 of 2 up; paper 43.9" in text
    page = (tmp_path / "mini" / f"{STEM}.html").read_text()
    assert "paper 43.9" in page
    assert "<img" not in page
    assert '<img src="a.png"' in to_html("", make_tables(content), figure="a.png")


def test_finished_runs_are_not_repeated(recipe, tmp_path):
    words = ("supclap/table1", *ROWS, "--output_dir", tmp_path)
    run_recipe(reproduce, *words)
    trained = sorted((call["svr"], call["seed"]) for call in recipe)
    assert trained == [("bi-static", 0), ("bi-static", 1), ("none", 0), ("none", 1)]
    recipe.clear()
    run_recipe(reproduce, "supclap/table3", *words[1:])  # this table has the same two rows
    assert recipe == []

    (broken,) = tmp_path.glob("mini/runs/table1_infonce-*-seed1")
    (broken / "outcomes.npz").write_bytes(b"of another run")
    run_recipe(reproduce, *words)
    assert [(call["svr"], call["seed"]) for call in recipe] == [("none", 1)]
    run_recipe(reproduce, *words, "--settings", '{"learning_rate": 0.5}')
    assert len(recipe) == 5


def test_a_table_states_costs_chance_and_few_seeds(recipe, tmp_path):
    run_recipe(reproduce, "supclap/table1", *ROWS, "--output_dir", tmp_path)
    text = (tmp_path / "mini" / f"{STEM}.md").read_text()
    assert "| row | steps | captions | seconds | text to audio R@1 (chance 1.6) |" in text
    assert "| InfoNCE | 12 | 96 | 1 |" in text  # 12 steps of 4 clips with 2 captions
    assert "Fewer than five seeds** (2)" in text
    run_recipe(reproduce, "supclap/table1", *ROWS[:-1], "--output_dir", tmp_path)
    assert "One seed" in (tmp_path / "mini" / f"{STEM}.md").read_text()


def test_a_selection_does_not_replace_the_complete_table(recipe, tmp_path):
    words = ("supclap/table3", "--seeds", "0", "1", "--output_dir", tmp_path)
    run_recipe(reproduce, *words)
    before = (tmp_path / "mini" / "supclap_table3.json").read_bytes()
    for selection in (ROWS[:2], ("--datasets", "synthetic"), ("--settings", '{"learning_rate": 0.5}')):
        run_recipe(reproduce, *words, *selection)
        (selected,) = tmp_path.glob("mini/supclap_table3_*.md")
        assert (tmp_path / "mini" / "supclap_table3.json").read_bytes() == before
    assert "Changed settings: learning_rate 0.5." in selected.read_text()


def test_finished_rows_are_written_if_another_row_fails(recipe, tmp_path, monkeypatch):
    train = sweep.RECIPES["train"]

    def fail_late(*groups):
        if groups[-1].svr == "bi-static":
            raise RuntimeError("out of memory")
        train.run(*groups)

    monkeypatch.setitem(sweep.RECIPES, "train", train._replace(run=fail_late))
    with pytest.raises(RuntimeError, match="out of memory"):
        run_recipe(reproduce, "supclap/table1", *ROWS, "--output_dir", tmp_path)
    content = json.loads((tmp_path / "mini" / f"{STEM}.json").read_text())
    assert [(row["row"], row["seeds"]) for row in content["rows"]] == [("table1_infonce", [0, 1])]


def test_missing_inputs_are_an_error_before_the_first_run(recipe, tmp_path):
    made = dataset_folders.audiocaps(tmp_path / "audiocaps", train=2, held_out=1)
    words = ("supclap/table1", "--scale", "full", *ROWS, "--output_dir", tmp_path)
    words += ("--data_dir", made.config["data_dir"])
    with pytest.raises(FileNotFoundError, match="data of audiocaps for train: train has 2 clips of 49,274"):
        run_recipe(reproduce, *words)
    run_recipe(reproduce, *words, "--skip_missing", "true")
    assert not recipe
    assert not list(tmp_path.glob("full/*.md"))


def test_one_dataset_of_a_table_is_reproduced(recipe, capsys, tmp_path):
    words = ("supclap/table1", "supclap/table3", "--scale", "full", "--dry_run", "true", "--output_dir", tmp_path)
    run_recipe(reproduce, *words, "--datasets", "clotho")
    printed = capsys.readouterr().out
    assert "clotho, table1_infonce:" in printed
    assert "audiocaps" not in printed
    with pytest.raises(ValueError, match=r"\['clohto'\].*audiocaps, clotho"):
        run_recipe(reproduce, *words, "--datasets", "clotho", "clohto")


@pytest.mark.slow
@pytest.mark.process
def test_several_processes_share_the_batch_of_a_row(tmp_path):
    settings: dict = {"max_steps": 4, "use_cpu": True}
    settings["text_config"] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    settings["text_config"] |= dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    words = ["supclap/table1", "--rows", "table1_infonce", "--seeds", "0", "--settings", json.dumps(settings)]
    run_recipe(reproduce, *words, "--output_dir", tmp_path / "1")
    run_processes("recipes/reproduce.py", *words, "--output_dir", tmp_path / "2")

    (one,), (two,) = (json.loads(next((tmp_path / count).glob("mini/*.json")).read_text())["rows"] for count in "12")
    assert {name: two["cost"][name] for name in ("steps", "captions")} == {"steps": 4, "captions": 4 * 24}
    assert one["cost"]["captions"] == 4 * 24
    assert two["scores"][R1]["values"] == pytest.approx(one["scores"][R1]["values"], abs=0.05)
    for state in sorted((tmp_path / "1").glob("mini/runs/*/trainer_state.json")):
        histories = []
        for count in "12":
            path = tmp_path / count / state.relative_to(tmp_path / "1")
            log = json.loads(path.read_text())["log_history"]
            histories.append([entry["loss"] for entry in log if "loss" in entry])
        np.testing.assert_allclose(*histories, rtol=1e-4)
    codes, printed = run_forks("recipes/reproduce.py", *words, "--output_dir", tmp_path / "5", count=5)
    assert 1 in codes
    assert "batches of 24 clips, which 5 processes" in printed


@pytest.mark.parametrize("names", [["supclap/table1"], ["supclap/table1", "supclap/table3"]])
def test_an_unknown_row_is_named(recipe, names, tmp_path):
    with pytest.raises(ValueError, match=r"'table1_info'.*table1_infonce"):
        run_recipe(reproduce, *names, *ROWS, "--rows", "table1_infonce", "table1_info", "--output_dir", tmp_path)
    assert not recipe


def test_only_tables_with_a_requested_row_are_written(recipe, tmp_path):
    words = ("--rows", "table3_uni_static", "--seeds", "0", "--output_dir", tmp_path)
    run_recipe(reproduce, "supclap/table1", "supclap/table3", *words)
    assert [path.name for path in tmp_path.glob("mini/*.md")] == ["supclap_table3_selected.md"]


def test_a_dry_run_names_missing_inputs(capsys, tmp_path):
    run_recipe(reproduce, "atri/table1", "--scale", "full", "--dry_run", "true", "--output_dir", tmp_path)
    printed = capsys.readouterr().out
    assert "missing: model models/ml-clap" in printed
    assert printed.count("missing: data of audiocaps for train: give --data_dir") == 1
    assert "minutes" not in printed
    assert "GiB" not in printed


def test_the_command_has_the_functions_of_the_plan():
    assert next(iter(reproduce.list_tables())) == "atri/table1"
    with pytest.raises(AttributeError, match="__path__"):
        _ = reproduce.__path__


def test_outside_of_a_checkout_the_command_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="checkout"):
        run_recipe(reproduce, "supclap/table1", "--output_dir", tmp_path)
