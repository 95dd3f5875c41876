"""Scores, logged values and costs of runs."""

import numpy as np
import pytest
from results_fixtures import PAPER_TRAINING, query_results

from modeling_supclap.evaluation.results import Results
from modeling_supclap.recipes.studies.tables import get_cost, get_value


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


def test_the_distance_of_captions_is_relative_to_their_spread():
    english = np.eye(2)[[0, 1, 0]]  # three pairs, two with distance sqrt(2)
    arrays = {"embeddings/text/eng": english, "multilingual/distance/fra": np.array([0.1, 0.3])}
    results = Results({"protocol": {"languages": ["eng", "fra"]}}, arrays)
    assert get_value(results, [], ["captions", "relative_distance"]) == pytest.approx(0.2 / (2**1.5 / 3))
