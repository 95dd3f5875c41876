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


def test_values_of_the_training_and_means_over_languages():
    training = {"steps": 40, "train_runtime": 90.0, "epoch": 3, "last_logs": {"steps": 39, "radius": 0.5}}
    scores = {"fra": {"t2a": {"R@1": score(0.2, None, 0.1)}}, "deu": {"t2a": {"R@1": score(0.7, None, 0.1)}}}
    scores["deu"]["a2t"] = {"R@1": score(0.9, None, 0.1)}
    results = Results({"training": training, "scores": {"retrieval": scores, "zero_shot": {}}})
    expected = {
        "training steps": 40,
        "training radius": 0.5,
        "training epoch_runtime": 30.0,
        "training peak_memory_mib": None,
        "retrieval deu t2a R@1": 0.7,
        "retrieval mean t2a R@1": pytest.approx(0.45),
        "retrieval mean a2t R@1": 0.9,
        "retrieval mean t2a R@5": None,
        "retrieval eng t2a R@1": None,
    }
    assert {place: get_value(results, [], place.split()) for place in expected} == expected
    del training["train_runtime"]
    assert get_value(results, [], ["training", "epoch_runtime"]) is None


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
