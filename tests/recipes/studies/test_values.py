"""Scores, logged values and costs of runs."""

import json

import numpy as np
import pytest
from results_fixtures import PAPER_TRAINING, query_results

from modeling_supclap.evaluation.results import Results, score
from modeling_supclap.recipes.studies.tables import get_cost, get_value, load_run
from modeling_supclap.recipes.sweep import Step


def test_captions_of_kcl_are_those_of_the_drawn_languages():
    languages = ["eng", "fra", "deu"]
    for drawn, captions in ((None, 12 * 4 * 3), (2, 12 * 4 * 2)):
        arguments = {**PAPER_TRAINING["arguments"], "languages": languages, "languages_per_clip": drawn}
        training = {**PAPER_TRAINING, "arguments": arguments}
        results = query_results([1, 1], np.arange(2), chance=0.5, training=training)
        assert get_cost([(results, [])])["captions"] == captions


def test_negatives_are_captions_of_a_step():
    arguments = {**PAPER_TRAINING["arguments"], "loss": "infonce", "negatives_per_clip": 2}
    results = query_results([1, 1], np.arange(2), chance=0.5, training={**PAPER_TRAINING, "arguments": arguments})
    assert get_cost([(results, [])])["captions"] == 12 * 4 * 3


def test_the_separation_of_pairs_is_computed_from_their_cosines():
    arrays = {"similarity/eng/positive": np.array([0.5, 0.7]), "similarity/eng/negative": np.array([-0.1, 0.3])}
    results = Results({}, arrays)
    places = (["similarity", kind] for kind in ("positive", "negative", "separation"))
    assert [get_value(results, [], place) for place in places] == pytest.approx([0.6, 0.1, 2.5])


def test_the_radius_is_averaged_over_each_epoch(tmp_path):
    """Figure 3: not the last batch before each log (`radius_mean_t2a`)."""
    log = []
    for step, radius in enumerate((1.5, 1.25, 1.0, 0.5, 0.0), start=1):  # two logs in an epoch
        log.append({"step": step, "epoch": step / 2, "radius_t2a": radius, "radius_mean_t2a": 9.0})
    query_results([1], np.arange(1), chance=0.5, training=PAPER_TRAINING).save(tmp_path)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    run = load_run([Step("train", {"seed": 0}, tmp_path)])
    places = [["log", "epoch_radius_t2a", which] for which in ("first", "last", "mean")]
    assert [get_value(*run, place) for place in places] == pytest.approx([1.375, 0.0, (1.375 + 0.75 + 0) / 3])
    assert [entry["step"] for entry in run[1] if "epoch_radius_t2a" in entry] == [2, 4, 5]
    assert get_value(*run, ["log", "epoch_radius_a2t", "first"]) is None


def test_the_distance_of_captions_is_relative_to_their_spread():
    english = np.eye(2)[[0, 1, 0]]  # three pairs, two with distance sqrt(2)
    arrays = {"embeddings/text/eng": english, "multilingual/distance/fra": np.array([0.1, 0.3])}
    results = Results({"protocol": {"languages": ["eng", "fra"]}}, arrays)
    assert get_value(results, [], ["captions", "relative_distance"]) == pytest.approx(0.2 / (2**1.5 / 3))


def test_each_kind_of_column_is_looked_up():
    """Two languages, whose means differ from the last value, and a task with a number that is not per language."""
    values = {"eng": 0.5, "fra": 0.25}
    retrieval = {name: {"t2a": {"R@1": score(value)}, "a2t": {"R@1": score(1.0)}} for name, value in values.items()}
    scores = {"retrieval": retrieval, "multilingual": {"all": {"MRV": score(2.0)}}, "mean": {"mean": score(0.125)}}
    training = {"last_logs": {"loss": 3.0, "drift": 0.75}, "loss": 1.0, "train_runtime": 30.0, "epoch": 4}
    results = Results({"scores": scores, "training": training})
    log = [{"step": 1, "grad_norm": 4.0}, {"step": 2, "loss": 9.0}, {"step": 3, "grad_norm": 1.0}, {"grad_norm": 2.0}]
    expected = {
        "training loss": 1.0,  # of the run, not of its last log
        "training drift": 0.75,
        "training epoch_runtime": 7.5,
        "training unknown": None,
        "retrieval eng t2a R@1": 0.5,
        "retrieval mean t2a R@1": 0.375,
        "retrieval mean t2a R@5": None,
        "retrieval deu t2a R@1": None,
        "multilingual all MRV": 2.0,
        "mean mean": 0.125,
        "log grad_norm first": 4.0,
        "log grad_norm mean": 7 / 3,
        "log grad_norm last": 2.0,
        "log loss last": 9.0,
        "log unknown mean": None,
    }
    assert {place: get_value(results, log, place.split()) for place in expected} == expected
    assert get_value(Results({"training": {"epoch_runtime": 6.0}}), [], ["training", "epoch_runtime"]) == 6.0


def test_a_run_has_the_log_of_its_last_training_and_the_lost_clips_of_all_steps(tmp_path):
    steps = []
    for name, lost, dataset in (
        ("start", ["a"], {}),
        ("second", ["b", "c"], {"dataset": "esc50"}),
        ("scores", [], {}),
    ):
        step = Step("train", {"seed": 0, **dataset}, tmp_path / name)
        of_run = {} if name == "scores" else {"training": {"steps": len(steps)}}
        results = query_results([1], np.arange(1), left_out={"train": lost, "test": []}, **of_run)
        results.arrays["similarity/eng/positive"] = np.array([0.5, 0.5, -1.0], np.float32)
        results.save(step.folder)
        steps.append(step)
    for number, folder in enumerate((steps[0].folder, steps[1].folder, steps[1].folder / "stage_b")):
        folder.mkdir(exist_ok=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 5 + number}]}))
    results, log = load_run(steps)
    assert results.content["training"] == {"steps": 1}
    assert results.content["left_out"] == {"esc50 train": ["b", "c"]}  # the last step has read "synthetic" again
    histogram = log[-1].pop("test_similarity")
    assert log == [{"step": 7}, {"step": 7}]
    assert sum(histogram["counts"]) == 3
    assert [entry["step"] for entry in load_run(steps[2:])[1]] == [0]  # without training


def test_the_cost_of_several_runs_is_their_mean_and_names_only_what_was_recorded():
    first, second = (
        query_results([1, 1], np.arange(2), chance=0.5, training={**PAPER_TRAINING, **more})
        for more in ({"steps": 10, "processes": 2}, {"steps": 20, "captions": 60, "process_seconds": 7.5})
    )
    cost = get_cost([(first, []), (second, [])])  # KCL of two languages, with batches of four clips
    assert cost == {"steps": 15, "captions": (10 * 4 * 2 * 2 + 60) / 2, "seconds": (1.0 + 7.5) / 2}
    assert get_cost([(query_results([1], np.arange(1), chance=0.5, training={"steps": 3, "captions": 6}), [])]) == {
        "steps": 3, "captions": 6,
    }  # fmt: skip
