"""Tables of the papers: runs, results, and valid configuration files."""

import json
import sys
from pathlib import Path

import dataset_folders
import numpy as np
import pytest
import yaml
from commands import run_recipe
from processes import run_forks, run_processes
from results_fixtures import fake_training, query_results

from modeling_supclap import evaluation
from modeling_supclap.evaluation.results import Results
from modeling_supclap.recipes import pages, reproduce
from modeling_supclap.recipes.options import SCALES, ReproductionArguments
from modeling_supclap.recipes.result_tables import html_table, markdown_table
from modeling_supclap.training.plots import plot_runs

TABLES = reproduce.list_tables()
R1 = "retrieval eng t2a R@1"


TRAINING = {
    "seconds": 1.0,
    "steps": 12,
    "arguments": {
        "loss": "kcl",
        "languages": ["eng", "fra"],
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
    },
}


def paired_queries(hits):
    """Return results with one query per entry of `hits`, two queries per recording."""
    results = query_results(hits, np.arange(len(hits)) // 2, chance=0.016, training=TRAINING)
    results.arrays["similarity/eng/positive"] = np.array([0.99, 0.99, -1], np.float32)
    return results


@pytest.fixture
def recipe(monkeypatch):
    """Fake training that writes results: the row and the seed set the number of correct queries out of 8."""

    def train(settings):
        answered = (4 if settings["svr"] == "none" else 6) + settings["seed"]
        return paired_queries([1] * answered + [0] * (8 - answered))

    return fake_training(monkeypatch, train)


ROWS = ("--rows", "table1_infonce", "table1_infonce_bi_static", "--seeds", "0", "1")
STEM = "supclap_table1_rows-table1-infonce-table1-infonce-bi-static"


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

    text = (tmp_path / "mini" / f"{STEM}.md").read_text()
    assert "81.2 ± 8.8 (+25.0" in text
    assert "2 of 2 up); paper 43.9" in text
    page = (tmp_path / "mini" / f"{STEM}.html").read_text()
    assert "paper 43.9" in page
    assert "<img" not in page
    assert '<img src="a.png"' in html_table(content, "a.png")


def test_finished_runs_are_not_repeated(recipe, tmp_path):
    words = ("supclap/table1", *ROWS, "--output_dir", tmp_path)
    run_recipe(reproduce, *words)
    runs = sorted((call["svr"], call["seed"]) for call in recipe)
    assert runs == [("bi-static", 0), ("bi-static", 1), ("none", 0), ("none", 1)]
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


def test_captions_of_kcl_are_those_of_the_drawn_languages():
    languages = ["eng", "fra", "deu"]
    for drawn, captions in ((None, 12 * 4 * 3), (2, 12 * 4 * 2)):
        arguments = {**TRAINING["arguments"], "languages": languages, "languages_per_clip": drawn}
        training = {**TRAINING, "arguments": arguments}
        results = query_results([1, 1], np.arange(2), chance=0.5, training=training)
        assert reproduce.get_cost([(results, [])])["captions"] == captions


def test_other_settings_have_a_table_of_their_own(recipe, tmp_path):
    words = ("supclap/table1", *ROWS, "--output_dir", tmp_path)
    run_recipe(reproduce, *words)
    before = (tmp_path / "mini" / f"{STEM}.json").read_bytes()
    run_recipe(reproduce, *words, "--settings", '{"learning_rate": 0.5}')
    assert (tmp_path / "mini" / f"{STEM}.json").read_bytes() == before
    text = (tmp_path / "mini" / f"{STEM}_learning_rate-0-5.md").read_text()
    assert "### supclap/table1 with learning_rate 0.5:" in text
    assert "Changed settings: learning_rate 0.5." in text


def test_a_file_of_controls_adds_rows(recipe, tmp_path):
    controls = tmp_path / "controls.yaml"
    controls.write_text("longer: {row: table1_infonce, model: twice the steps, settings: {num_train_epochs: 20}}\n")
    run_recipe(reproduce, "supclap/table1", *ROWS, "--controls", controls, "--output_dir", tmp_path)
    content = json.loads((tmp_path / "mini" / f"{STEM}_controls.json").read_text())
    rows = {row["row"]: row for row in content["rows"]}
    assert list(rows) == ["table1_infonce", "longer", "table1_infonce_bi_static"]
    assert (rows["longer"]["model"], rows["longer"]["baseline"]) == ("twice the steps", "table1_infonce")
    (folder,) = tmp_path.glob("mini/runs/longer-train-synthetic-*-seed0")
    settings = yaml.safe_load((folder / "settings.yaml").read_text())
    assert (settings["num_train_epochs"], settings["svr"]) == (20, "none")
    controls.write_text("copy: {row: table1_infonce, model: InfoNCE}\n")
    with pytest.raises(ValueError, match="supclap/table1 has two rows named 'InfoNCE'"):
        run_recipe(reproduce, "supclap/table1", *ROWS, "--controls", controls, "--output_dir", tmp_path)
    controls.write_text("longer: {row: table1_infonce, steps: 20}\n")
    with pytest.raises(ValueError, match=r"longer has the keys \['row', 'steps'\]"):
        run_recipe(reproduce, "supclap/table1", *ROWS, "--controls", controls, "--output_dir", tmp_path)


def test_finished_rows_are_written_if_another_row_fails(recipe, tmp_path, monkeypatch):
    train, arguments = reproduce.RECIPES["train"]

    def fail_late():
        if yaml.safe_load(Path(sys.argv[1]).read_text())["svr"] == "bi-static":
            raise RuntimeError("out of memory")
        train()

    monkeypatch.setitem(reproduce.RECIPES, "train", (fail_late, arguments))
    with pytest.raises(RuntimeError, match="out of memory"):
        run_recipe(reproduce, "supclap/table1", *ROWS, "--output_dir", tmp_path)
    content = json.loads((tmp_path / "mini" / f"{STEM}.json").read_text())
    assert [(row["row"], row["seeds"]) for row in content["rows"]] == [("table1_infonce", [0, 1])]


def test_missing_inputs_are_an_error_before_the_first_run(recipe, tmp_path):
    made = dataset_folders.audiocaps(tmp_path / "audiocaps", train=2, held_out=1)
    words = ("supclap/table1", "--scale", "full", *ROWS, "--output_dir", tmp_path)
    words += ("--data_dir", made.config["data_dir"])
    with pytest.raises(FileNotFoundError, match="data of audiocaps: train has 2 recordings of 49,274"):
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


@pytest.mark.process
def test_several_processes_share_the_batch_of_a_row(tmp_path):
    settings: dict = {"max_steps": 4, "use_cpu": True}
    settings["text_config"] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    settings["text_config"] |= dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    words = ["supclap/table1", "--rows", "table1_infonce", "--seeds", "0", "1", "--settings", json.dumps(settings)]
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


def test_rows_are_compared_over_the_seeds_that_both_have():
    row, baseline = (paired_queries([1, 1, 0, 1]), []), (paired_queries([1, 0, 0, 0]), [])
    own, base = {0: row, 2: row}, {0: baseline, 1: baseline}
    compared = reproduce.compare_rows(own, base, R1.split())
    assert compared["differences"] == [0.5]
    assert (compared["low"], compared["high"]) == compared["recordings"]


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
    values, clusters = reproduce.get_outcomes(results, ["retrieval", "mean", "t2a", "R@1"])
    assert (values.tolist(), clusters.tolist()) == ([1.0, 0.5], ["a", "b"])
    values, _ = reproduce.get_outcomes(results, ["multilingual", "all", "MRV"])
    assert values.tolist() == [1.0, 0.0]
    values, _ = reproduce.get_outcomes(results, ["multilingual", "all", "MSR"])
    assert values.tolist() == [2.0, 1.0]


def test_cases_are_the_best_and_the_worst_captions_of_all_models():
    ids = np.array([f"clip{number}#0" for number in range(5)])
    arrays = {
        "multilingual/text": np.array(["good", "bad", "good", "fair", "poor"]),  # two clips share a caption
        "multilingual/query_id": ids,
        "clips/label": np.array(["bark", "", "bark", "rain", "wind"]),
        "clips/id": np.array([f"clip{number}" for number in range(5)]),
        "retrieval/eng/t2a/query_id": ids,
        "retrieval/eng/t2a/top": np.array([[0], [1], [2], [3], [0]]),
        "retrieval/fra/t2a/query_id": ids[::-1],
        "retrieval/fra/t2a/top": np.array([[4], [3], [2], [1], [0]]),
    }
    several = {}
    for model, more in (("one", 0), ("other", 2)):
        ranks = np.array([[0, 0], [9, 8], [0, 0], [1, 1 + more], [5, 5]])
        several[model] = Results({"protocol": {"languages": ["eng", "fra"]}}, {**arrays, "multilingual/ranks": ranks})

    heading, *lines = reproduce.tabulate_cases(several)
    assert heading == ["caption", "model", "eng", "fra"]
    assert lines[0] == ["good", "one", "1: bark", "1: bark"]
    assert lines[3] == ["fair", "other", "2: rain", "4: rain"]
    assert lines[6] == ["bad", "one", "10: clip1", "9: clip1"]
    assert [line[0] for line in lines[::2]] == ["good", "fair", "poor", "bad"]

    content = {"table": "atri/cases", "scale": "mini", "title": "", "claim": "", "rows": [], "cases": [heading, *lines]}
    assert "| bad | one | 10: clip1 | 9: clip1 |" in markdown_table(content)
    assert "<td>10: clip1</td>" in html_table(content)


@pytest.mark.parametrize("scale", SCALES)
def test_every_configuration_file_of_the_tables_is_valid(scale, tmp_path):
    args = ReproductionArguments(scale=scale, data_dir=str(tmp_path), output_dir=str(tmp_path), seeds=[0])
    checked = {}
    for name, table in TABLES.items():
        if "lacks" in table:
            assert len(table["lacks"]) > 20
        elif scale not in table:
            assert table[f"no_{scale}"], name
        else:
            for cell in reproduce.plan(name, table, args):
                checked.update({step.folder: step for step in cell.runs[0]})
    for step in checked.values():
        cost, *_ = reproduce.check_step(step)
        assert cost is None or cost.steps > 0, step


def settings_of(table, row, dataset, scale, tmp_path):
    args = ReproductionArguments(scale=scale, data_dir=str(tmp_path), output_dir=str(tmp_path), seeds=[0])
    cells = {(cell.row, cell.dataset): cell for cell in reproduce.plan(table, TABLES[table], args)}
    return cells[row, dataset].runs[0]


def test_settings_are_those_of_the_papers(tmp_path):
    (step,) = settings_of("supclap/table1", "table1_infonce", "clotho", "full", tmp_path)
    assert reproduce.check_step(step)[0].steps == 7990  # five captions of 3,839 clips, ten epochs [S 4.1.1, table 14]
    (step,) = settings_of("atri/table6", "table1_kcl", "audiocaps", "full", tmp_path)
    assert step.settings["learning_rate"] == 5e-6  # [A appendix B]
    random = {"random_weights": ["audio", "text"], "text_config": {"encoder_layers": 12}}  # [S E.7]
    (step,) = settings_of("supclap/table9", "table1_infonce", "audiocaps", "full", tmp_path)
    assert random.items() <= step.settings.items()
    (step,) = settings_of("supclap/figure6", "table1_infonce_bi_dynamic", "audiocaps", "full", tmp_path)
    assert random.items() <= step.settings.items()
    (step,) = settings_of("supclap/figure6", "figure6_pretrained", "audiocaps", "full", tmp_path)
    assert "random_weights" not in step.settings
    (step, _) = settings_of("teminal/table2", "table2_ab_1111", "esc50", "full", tmp_path)
    assert (step.settings["num_phrasings"], 2450 // step.settings["per_device_train_batch_size"]) == (1, 28)  # [T B.5]
    (step,) = settings_of("supclap/table1", "table1_infonce", "synthetic", "mini", tmp_path)
    assert step.settings["train_temperature"] is False  # from the base file of the row
    assert (step.settings["audio_encoder"], step.settings["text_encoder"]) == ("scratch", "scratch")


def test_every_row_that_a_paper_prints_has_its_number():
    """If a name in `groups` is not in the printed results, the paper's column would be empty."""
    args = ReproductionArguments(scale="full", data_dir=".", seeds=[0])
    for name, table in TABLES.items():
        paper, _, number = name.partition("/table")
        of_paper = {entry["paper"].lower() for entry in evaluation.paper_results(table=number)} if number else set()
        if "lacks" in table or paper not in of_paper or name == "teminal/table5":  # its numbers are in the claim
            continue
        for cell in reproduce.plan(name, table, args):
            places = [column.split() for column in table["columns"]]
            found = [reproduce.get_printed(name, table, cell, place, "full") for place in places]
            if (name, cell.dataset) == ("supclap/table8", "clotho") and "CACL" in cell.model:
                assert set(found) == {None}  # not in the paper
                continue
            assert any(value is not None for value in found), (name, cell.model)


@pytest.mark.parametrize("names", [["supclap/table99"], []])
def test_the_error_of_an_unknown_table_lists_the_known_ones(names):
    with pytest.raises(ValueError, match=r"atri/table1.*supclap/table14"):
        reproduce.find_tables(names)


@pytest.mark.parametrize("names", [["supclap/table1"], ["supclap/table1", "supclap/table3"]])
def test_an_unknown_row_is_named(recipe, names, tmp_path):
    with pytest.raises(ValueError, match=r"'table1_info'.*table1_infonce"):
        run_recipe(reproduce, *names, *ROWS, "--rows", "table1_infonce", "table1_info", "--output_dir", tmp_path)
    assert not recipe


def test_only_tables_with_a_requested_row_are_written(recipe, tmp_path):
    words = ("--rows", "table3_uni_static", "--seeds", "0", "--output_dir", tmp_path)
    run_recipe(reproduce, "supclap/table1", "supclap/table3", *words)
    assert [path.name for path in tmp_path.glob("mini/*.md")] == ["supclap_table3_rows-table3-uni-static.md"]


def test_tables_that_cannot_be_reproduced_have_a_reason():
    with pytest.raises(ValueError, match="supclap/table10"):
        reproduce.find_tables(["supclap/table10"])
    assert "supclap/table10" not in reproduce.find_tables(["supclap"])


def test_a_dry_run_names_missing_inputs(capsys, tmp_path):
    run_recipe(reproduce, "atri/table1", "--scale", "full", "--dry_run", "true", "--output_dir", tmp_path)
    printed = capsys.readouterr().out
    assert "20530" in printed  # 49,274 clips in batches of 24, ten epochs
    assert "models/ml-clap" in printed
    assert "audiocaps.parquet" in printed


def test_several_runs_in_one_picture(tmp_path):
    history = [{"step": step, "drift": 0.1 * step, "bins": {"low": -1, "high": 1, "counts": [0, 1]}} for step in (0, 1)]
    panels = {
        "drift": {"one": ("drift", [history, history[:1]]), "other": ("drift", [history])},
        "pairs": {"one": ("bins", [history])},
    }
    plot_runs(panels, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="radius"):
        plot_runs({"radius": {"one": ("radius", [history])}}, tmp_path / "b.png")


def test_a_figure_has_a_panel_for_each_dataset_and_title(tmp_path):
    paired_queries([1, 0]).save(tmp_path / "run")
    (tmp_path / "run" / "trainer_state.json").write_text('{"log_history": [{"step": 1, "few": 1, "many": 2}]}')
    runs = [[reproduce.Step("train", {"seed": 0}, tmp_path / "run")]]
    cells = [reproduce.Cell("row", "a model", None, dataset, runs) for dataset in ("real", "made")]
    panels = reproduce.arrange_curves({"few": "radius", "many": "radius", "eval_R": "recall"}, cells)
    assert list(panels) == ["radius, real", "recall, real", "radius, made", "recall, made"]
    assert {label: key for label, (key, _) in panels["radius, made"].items()} == {
        "a model, few": "few",
        "a model, many": "many",
    }
    assert list(panels["recall, real"]) == ["a model"]
    (history,) = panels["radius, real"]["a model, few"][1]
    assert history[0]["few"] == 1
    assert history[-1]["test_similarity"]["counts"] == [1] + [0] * 38 + [2]

    table = {"columns": [R1], "curves": {"test_similarity": "pairs"}}
    (tmp_path / "mini").mkdir()
    reproduce.write_table("paper/figure", table, cells, ReproductionArguments(output_dir=str(tmp_path)))
    assert (tmp_path / "mini" / "paper_figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_separation_of_pairs_is_computed_from_their_cosines():
    arrays = {"similarity/eng/positive": np.array([0.5, 0.7]), "similarity/eng/negative": np.array([-0.1, 0.3])}
    results = Results({}, arrays)
    places = (["similarity", kind] for kind in ("positive", "negative", "separation"))
    assert [reproduce.get_value(results, [], place) for place in places] == pytest.approx([0.6, 0.1, 2.5])


def test_the_distance_of_captions_is_relative_to_their_spread():
    english = np.eye(2)[[0, 1, 0]]  # three pairs, two with distance sqrt(2)
    arrays = {"embeddings/text/eng": english, "multilingual/distance/fra": np.array([0.1, 0.3])}
    results = Results({"protocol": {"languages": ["eng", "fra"]}}, arrays)
    assert reproduce.get_value(results, [], ["captions", "relative_distance"]) == pytest.approx(0.2 / (2**1.5 / 3))


def test_a_claim_about_a_table_with_several_datasets_names_one(tmp_path, monkeypatch):
    claim = "{claim: c, table: supclap_table1, row: table1_infonce, baseline: 0.5, columns: [], change: up}"
    (tmp_path / "claims.yaml").write_text(f"- {claim}\n")
    monkeypatch.setattr(pages, "CLAIMS", tmp_path / "claims.yaml")
    with pytest.raises(ValueError, match="esc10"):
        pages.render_claims()


def test_the_page_of_results_is_that_of_the_committed_files():
    page = pages.RESULTS_PAGE.read_text(encoding="utf-8")
    assert pages.render_results(page) == page
    assert pages.MARK in page
    readme = pages.README.read_text(encoding="utf-8")
    assert pages.render_readme(readme) == readme
    verdicts = readme.partition(pages.MARK)[2].partition(pages.END)[0].strip()
    studies = sorted(pages.RESULTS.glob("evidence/*.json"))
    assert len(verdicts.splitlines()) == 2 + len(studies)
    assert all(f"`evidence/{path.stem.removeprefix('evidence_')}`" in verdicts for path in studies)
