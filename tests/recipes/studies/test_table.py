"""Tables with their figures, and retrieved clips of single captions."""

import numpy as np
import pytest
from results_fixtures import paired_queries

from modeling_supclap.evaluation.results import Results
from modeling_supclap.evaluation.tables import to_html
from modeling_supclap.recipes.options import ReproductionArguments
from modeling_supclap.recipes.studies.tables import (
    arrange_curves,
    describe,
    get_stem,
    make_tables,
    tabulate_cases,
    to_markdown,
    write_table,
)
from modeling_supclap.recipes.sweep import Row, Step
from modeling_supclap.training.plots import plot_runs

R1 = "retrieval eng t2a R@1"


def test_cases_are_the_best_and_the_worst_captions_of_all_models():
    ids = np.array([f"clip{number}#0" for number in range(6)])
    arrays = {
        "multilingual/text": np.array(
            ["good", "bad", "good", "fair", "poor", "middling"]
        ),  # two clips share a caption
        "multilingual/query_id": ids,
        "clips/label": np.array(["bark", "", "bark", "rain", "wind", "saw"]),
        "clips/id": np.array([f"clip{number}" for number in range(6)]),
        "retrieval/eng/t2a/query_id": ids,
        "retrieval/eng/t2a/top": np.array([[0], [1], [2], [3], [0], [5]]),
        "retrieval/fra/t2a/query_id": ids[::-1],
        "retrieval/fra/t2a/top": np.array([[5], [4], [3], [2], [1], [0]]),
        "captions/eng/text": np.array(["good", "bad", "good", "fair", "poor", "middling"]),
        "captions/fra/text": np.array(["passable", "pauvre", "moyen", "bon", "mauvais", "bon"]),
        "captions/eng/clip": np.arange(6),
        "captions/fra/clip": np.arange(6)[::-1],
    }
    several = {}
    for model, more in (("one", 0), ("other", 2)):
        ranks = np.array([[0, 0], [9, 8], [0, 0], [1, 1 + more], [5, 5], [3, 3]])
        several[model] = Results({"protocol": {"languages": ["eng", "fra"]}}, {**arrays, "multilingual/ranks": ranks})

    heading, *lines = tabulate_cases(several)
    assert heading == ["caption", "model", "eng", "fra"]
    assert lines[0] == ["good", "caption", "good", "bon"]
    assert lines[1] == ["good", "one", "1: bark", "1: bark"]
    assert lines[5] == ["fair", "other", "2: rain", "4: rain"]
    assert lines[10] == ["bad", "one", "10: bad", "9: mauvais"]  # the captions of the top-ranked clip without a label
    assert [line[0] for line in lines[::3]] == ["good", "fair", "poor", "bad"]
    _, *named = tabulate_cases(several, ["clip4"])
    assert [line[0] for line in named[::3]] == ["poor", "good", "fair", "bad"]
    assert named[0] == ["poor", "caption", "poor", "pauvre"]

    content = {
        "table": "atri/cases",
        "scale": "mini",
        "title": "",
        "claim": "",
        "rows": [],
        "cases": [heading, *lines],
    }
    assert "| bad | one | 10: bad | 9: mauvais |" in to_markdown(content)
    assert "<td>10: bad</td>" in to_html("", make_tables(content))


@pytest.mark.parametrize("part", [{"rows": ["table1_infonce"]}, {"datasets": ["esc10"]}, {"settings": {"seed": 1}}])
def test_a_part_of_a_table_does_not_replace_the_whole_one(tmp_path, part):
    options = {"output_dir": str(tmp_path), "scale": "full"}
    whole = get_stem("supclap/table1", ReproductionArguments(**options))
    assert whole == tmp_path / "full" / "supclap_table1"
    assert get_stem("supclap/table1", ReproductionArguments(**options, **part)) == whole.with_name(
        "supclap_table1_selected"
    )


def table_content(**more):
    """Return a table of a baseline of two seeds and of a row of six, each with one score."""
    value = {"values": [0.5, 0.5], "mean": 0.5, "chance": 0.25, "paper": 0.625}
    gain = {"mean": 0.75, "differences": [0.5, -0.25, 0.5, 0.25, 0.25, 0.0], "low": -0.125, "high": 0.5}
    shared = {"dataset": "esc10", "overlap": {"clips": 1200, "trained": 0, "excluded": 0}, "left_out": {}}
    rows = [{"row": "a", "model": "InfoNCE", "baseline": None, "seeds": [3, 1], "scores": {R1: value}, **shared}]
    rows.append({"row": "b", "model": "SVR", "baseline": "a", "seeds": [1, 5, 3], "scores": {R1: gain}, **shared})
    return {"table": "supclap/table1", "scale": "mini", "title": "Recall", "claim": "SVR helps.", "rows": rows, **more}


CAPTION = (
    "Scale mini, seeds 1, 3, 5: mean ± standard deviation over the seeds. Then the difference to the row's baseline, "
    "its 95 % interval over seeds and recordings, and the number of seeds with a difference above 0. **Fewer than "
    "five seeds** (2): an indication, not evidence."
)


def test_a_table_has_its_title_claim_scores_and_caption():
    content = table_content()
    assert to_markdown(content).split("\n\n") == [
        "### supclap/table1: Recall",
        "Claim: SVR helps.",
        "| row | text to audio R@1 (chance 25.0) |\n|---|---|\n| InfoNCE | 50.0; paper 62.5 |\n"
        "| SVR | 75.0; +20.8 (-12.5 to +50.0), 4 of 6 up |",
        CAPTION + "\n",
    ]
    content["rows"][0] |= {"cost": {"steps": 1200.0, "captions": 9600.4}}
    content["rows"][1] |= {"dataset": "esc50"}
    lines = to_markdown(content).split("\n\n")[2].splitlines()
    assert lines[0] == "| row | data | steps | captions | text to audio R@1 (chance 25.0) |"
    assert lines[2] == "| InfoNCE | esc10 | 1,200 | 9,600 | 50.0; paper 62.5 |"


def test_the_caption_of_a_table_states_what_differs_from_the_paper():
    assert describe(table_content()) == CAPTION
    content = table_content(settings={"seed": 1, "lr": 0.5})
    one, other = content["rows"]
    one |= {"seeds": [1], "left_out": {"esc50 test": ["x", "y"]}, "cost": {"steps": 3.0}}
    one["overlap"] = {"clips": 1200, "trained": 1100, "excluded": 3}
    assert describe(content) == (
        "Scale mini, seeds 1, 3, 5: mean ± standard deviation over the seeds. Changed settings: seed 1, lr 0.5. Then "
        "the difference to the row's baseline and its 95 % interval over recordings. **One seed**: the interval does "
        "not cover the variation between seeds. **Trained on**: 1,100 of 1,200 clips of esc10 are in the training data "
        "of InfoNCE and are scored. **Trained on**: 3 of 1,200 clips of esc10 are in the training data of InfoNCE and "
        "are left out. **Left out**: 2 unusable recordings of esc50 test (x, y). Captions: number of captions that the "
        "text encoder embeds in training. Seconds: processor time."
    )
    for row in (one, other):
        row["seeds"] = [0, 1, 2, 3, 4]
    assert "Fewer than" not in describe(content)


def test_several_runs_in_one_picture(tmp_path):
    history = [
        {"step": step, "drift": 0.1 * step, "bins": {"low": -1, "high": 1, "counts": [0, 1]}} for step in (0, 1)
    ]
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
    runs = [[Step("train", {"seed": 0}, tmp_path / "run")]]
    rows = [Row("row", "a model", None, dataset, runs) for dataset in ("real", "made")]
    panels = arrange_curves({"few": "radius", "many": "radius", "eval_R": "recall"}, rows)
    assert list(panels) == ["radius, real", "recall, real", "radius, made", "recall, made"]
    assert {label: key for label, (key, _) in panels["radius, made"].items()} == {
        "a model, few": "few",
        "a model, many": "many",
    }
    assert list(panels["recall, real"]) == ["a model"]
    (history,) = panels["radius, real"]["a model, few"][1]
    assert history[0]["few"] == 1
    assert list(arrange_curves({"few": "radius"}, rows[:1])) == ["radius"]
    assert history[-1]["test_similarity"]["counts"] == [1] + [0] * 38 + [2]

    table = {"columns": [R1], "curves": {"test_similarity": "pairs"}}
    (tmp_path / "mini").mkdir()
    write_table("paper/figure", table, rows, ReproductionArguments(output_dir=str(tmp_path)))
    assert (tmp_path / "mini" / "paper_figure.png").read_bytes().startswith(b"\x89PNG")
