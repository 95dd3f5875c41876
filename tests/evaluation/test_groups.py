"""Scores of groups of clips, such as sites, in results, table and report."""

import re

import pytest
from datasets import Dataset
from fake_models import ToneModel, caption_tones
from recordings import tone_rows

from modeling_supclap.evaluation import EmbeddingCache, Results, evaluate
from modeling_supclap.evaluation.report import render_report


@pytest.fixture
def rows(tmp_path):
    """Rows of eight tones at two sites, five at north. At south, the labels of two of three clips are wrong."""
    rows = tone_rows(tmp_path)
    for index, row in enumerate(rows):
        row["site"] = "north" if index < 5 else "south"
        row["labels"] = ["tone_0"] if index > 5 else row["labels"]
    return rows


def run(rows, tasks=("retrieval", "zero_shot"), **options):
    model = ToneModel(caption_tones(rows) | caption_tones(rows, "fra"))
    return evaluate(model, rows, cache=EmbeddingCache(None), tasks=tasks, **options)


def test_each_site_is_scored_alone(rows, tmp_path):
    results = run(rows, group_by="site")
    whole = results.scores["zero_shot"]["eng"]["supclap"]["top1"]
    groups = results.content["groups"]
    assert (groups["column"], list(groups["scores"])) == ("site", ["north", "south"])
    found = {site: scores["zero_shot"]["eng"]["supclap"]["top1"] for site, scores in groups["scores"].items()}
    assert {site: (score["value"], score["units"], score["unit"]) for site, score in found.items()} == {
        "north": (1.0, 5, "clips"),
        "south": (pytest.approx(1 / 3), 3, "clips"),
    }
    assert whole["value"] == pytest.approx(6 / 8)
    assert found["south"]["chance"] == whole["chance"]  # the classes are those of all sites
    recall = {site: scores["retrieval"]["eng"]["t2a"]["R@1"] for site, scores in groups["scores"].items()}
    assert (recall["north"]["chance"], recall["south"]["chance"]) == (pytest.approx(1 / 5), pytest.approx(1 / 3))

    plain = run(rows)
    assert "groups" not in plain.content
    assert plain.scores == results.scores
    results.save(tmp_path / "saved")
    assert Results.load(tmp_path / "saved").content["groups"] == groups
    assert evaluate(ToneModel(), Dataset.from_list(rows), tasks=["zero_shot"], group_by="site").content["groups"]


def test_table_and_report_have_a_row_for_each_site(rows):
    results = run(rows, group_by="site")
    (line,) = [line for line in results.table().splitlines() if line.startswith("site south: zero_shot eng supclap")]
    assert re.search(r"top1 +33\.3 .*3 clips \(fewer than 10: no interval\)", line)
    page = render_report(results)
    assert "<h2>Zero-shot classification by site</h2>" in page
    assert "<h2>Retrieval by site</h2>" in page
    lines = []
    for line in re.findall("<tr.*?</tr>", page, re.DOTALL):
        lines.append(" ".join(re.sub("<small>.*?</small>|<[^>]*>", " ", line).split()))
    few = "clips (fewer than 10: no interval)"
    assert f"south, eng, supclap; 3 {few} 33.3" in lines
    assert f"north, eng; 5 {few}{' 100.0' * 8}" in lines
    assert "by site" not in render_report(run(rows))


def test_a_language_without_captions_at_a_site_is_left_out(rows):
    for row in rows[5:]:
        row["captions"]["fra"] = []
    options = {"languages": ["eng", "fra"], "caption_handling": "each"}
    groups = run(rows, group_by="site", **options).content["groups"]["scores"]
    assert set(groups["south"]["retrieval"]) == {"eng"}
    assert {"eng", "fra"} <= set(groups["north"]["retrieval"])


def test_zero_is_a_value_and_an_empty_cell_is_none(rows):
    for row, speaker in zip(rows, [1, 0, 0, 1, 0, None, "", None], strict=True):
        row["speaker"] = speaker
    groups = run(rows, ["zero_shot"], group_by="speaker").content["groups"]["scores"]
    counts = {value: scores["zero_shot"]["eng"]["supclap"]["num_clips"] for value, scores in groups.items()}
    assert list(counts.items()) == [("0", 3), ("1", 2), ("no value", 3)]


def test_only_the_chosen_tasks_are_scored_by_group(rows):
    for task in ("retrieval", "zero_shot"):
        groups = run(rows, [task], group_by="site").content["groups"]
        assert [set(scores) for scores in groups["scores"].values()] == [{task}, {task}]


def test_a_column_that_rows_lack_is_named(rows):
    with pytest.raises(ValueError, match=r"group_by is 'year'.*'site'"):
        run(rows, group_by="year")
