"""metrics/embedding_gap, compared with loops, and its use in `evaluate`."""

import math
import warnings

import numpy as np
import pytest
from memory import traced_peak

from modeling_supclap.metrics.embedding_gap import gap_and_distance


def directions(seed, *shape):
    embeds = np.random.default_rng(seed).standard_normal(shape)
    return embeds / np.linalg.norm(embeds, axis=-1, keepdims=True)


def naive(other, english):
    n, d = len(other), len(other[0])
    gap = [sum(row[j] for row in english) / n - sum(row[j] for row in other) / n for j in range(d)]
    return {"Gap": math.hypot(*gap), "Dis": sum(math.dist(a, b) for a, b in zip(english, other, strict=True)) / n}


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 3), (60, 16), (5000, 3)])
def test_equals_loops(shape):
    other, english = directions(0, *shape), directions(1, *shape)
    assert gap_and_distance(other, english) == pytest.approx(naive(other.tolist(), english.tolist()), abs=1e-12)
    assert gap_and_distance(other.tolist(), english.tolist()) == gap_and_distance(other, english)


def test_shuffled_sentences_change_dis_but_not_gap():
    english = directions(0, 50, 8)
    scores = gap_and_distance(english[np.random.default_rng(1).permutation(50)], english)
    assert scores["Gap"] == pytest.approx(0, abs=1e-12)
    assert scores["Dis"] > 1
    assert gap_and_distance(english, english) == {"Gap": 0, "Dis": 0}


def test_other_norms_are_normalised_with_a_warning():
    other, english = directions(0, 9, 4), directions(1, 9, 4)
    lengths = np.linspace(0.5, 3, 9)[:, None]
    with pytest.warns(UserWarning, match=r"other_embeds.*\b3\b"):
        scores = gap_and_distance(other * lengths, english)
    assert scores == pytest.approx(gap_and_distance(other, english), abs=1e-12)
    with pytest.warns(UserWarning, match=r"english_embeds.*0\.5"):
        gap_and_distance(other, english * 0.5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_lower_precision_is_unit_norm_enough(dtype):
    other, english = directions(0, 40, 512), directions(1, 40, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = gap_and_distance(other.astype(dtype), english.astype(dtype))
    assert scores == pytest.approx(gap_and_distance(other, english), abs=1e-3)


@pytest.mark.parametrize(("norm", "warns"), [(1.0, False), (0.991, False), (1.009, False), (0.98, True), (1.02, True)])
def test_the_tolerance_of_unit_norm(norm, warns):
    other, english = directions(0, 9, 4), directions(1, 9, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert gap_and_distance(other * norm, english) == pytest.approx(gap_and_distance(other, english), abs=1e-12)
    assert bool(caught) == warns


def test_memory_is_that_of_a_block():
    other, english = (np.ones((200_000, 16), np.float32) / 4 for _ in range(2))
    assert gap_and_distance(other, english) == {"Gap": 0, "Dis": 0}
    # both matrices in double precision would be 51e6
    assert traced_peak(gap_and_distance, other, english) < 12e6


@pytest.mark.parametrize(
    ("other", "english", "message"),
    [
        (np.eye(2), np.eye(3), r"other_embeds.*\(2, 2\).*english_embeds.*\(3, 3\)"),
        (np.eye(2), np.array([[1.0, 0.0], [np.nan, 0.0]]), r"english_embeds\[1\].*nan"),
        (np.array([[np.inf, 0.0], [1.0, 0.0]]), np.eye(2), r"other_embeds\[0\].*inf"),
        (np.zeros((2, 2)), np.eye(2), r"other_embeds\[0\].*0\.0"),
        ([[1.0, 0.0], [1.0]], np.eye(2), "other_embeds"),
        (np.ones(2), np.ones(2), r"other_embeds.*\(2,\)"),
        (np.ones((0, 2)), np.ones((0, 2)), r"\(0, 2\)"),
    ],
)
def test_errors_for_bad_embeddings_name_the_problem_and_the_row(other, english, message):
    with pytest.raises(ValueError, match=message):
        gap_and_distance(other, english)


@pytest.fixture
def metric(load_metric):
    return load_metric("embedding_gap")


def test_evaluate_accepts_whole_matrices_as_keywords(metric):
    other, english = directions(0, 10, 4), directions(1, 10, 4)
    rows = [7, 2, 5]
    scores = metric.compute(predictions=rows, references=[1, 2, 3], other_embeds=other, english_embeds=english)
    assert scores == gap_and_distance(other[rows], english[1:4])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"predictions": np.eye(2), "references": np.eye(3)}, "Mismatch in the number"),
        ({"predictions": [], "references": []}, "predictions and references"),
        ({"predictions": [0], "references": [0], "other_embeds": np.eye(2)}, "english_embeds"),
        (
            {"predictions": [0], "references": [2], "other_embeds": np.eye(2), "english_embeds": np.eye(2)},
            r"english_embeds.*0\.\.1.*\b2\b",
        ),
        (
            {
                "predictions": np.eye(2),
                "references": np.eye(2),
                "other_embeds": np.eye(2),
                "english_embeds": np.eye(2),
            },
            "row index",
        ),
    ],
)
def test_evaluate_errors_are_clear(metric, inputs, message):
    with pytest.raises(ValueError, match=message):
        metric.compute(**inputs)
