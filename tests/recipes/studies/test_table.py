"""Tables with their figures, and retrieved clips of single captions."""

import numpy as np
import pytest
from results_fixtures import paired_queries

from modeling_supclap.evaluation.results import Results
from modeling_supclap.evaluation.tables import to_html
from modeling_supclap.recipes.options import ReproductionArguments
from modeling_supclap.recipes.studies.tables import (
    arrange_curves,
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
        "captions/eng/text": np.array(["good", "bad", "good", "fair", "poor"]),
        "captions/fra/text": np.array(["pauvre", "moyen", "bon", "mauvais", "bon"]),
        "captions/eng/clip": np.arange(5),
        "captions/fra/clip": np.arange(5)[::-1],
    }
    several = {}
    for model, more in (("one", 0), ("other", 2)):
        ranks = np.array([[0, 0], [9, 8], [0, 0], [1, 1 + more], [5, 5]])
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
    assert history[-1]["test_similarity"]["counts"] == [1] + [0] * 38 + [2]

    table = {"columns": [R1], "curves": {"test_similarity": "pairs"}}
    (tmp_path / "mini").mkdir()
    write_table("paper/figure", table, rows, ReproductionArguments(output_dir=str(tmp_path)))
    assert (tmp_path / "mini" / "paper_figure.png").read_bytes().startswith(b"\x89PNG")
