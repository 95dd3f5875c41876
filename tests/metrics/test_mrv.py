"""metrics/mrv, compared with Python's statistics module and enumeration, and its use in `evaluate`."""

import itertools
import statistics

import numpy as np
import pytest

from modeling_supclap.metrics.mrv import mean_rank_variance

# ATRI, tables 9 and 10: ranks of one query in eight languages.
ML_CLAP = [[5, 4, 5, 2, 4, 5, 8, 13], [2, 4, 4, 7, 12, 12, 0, 3], [22, 18, 33, 17, 20, 24, 11, 26]]
KCL = [[1, 1, 0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 2, 4, 0, 0], [10, 8, 9, 8, 7, 5, 11, 12]]


@pytest.mark.parametrize("shape", [(1, 2), (5, 2), (40, 8), (200, 3)])
def test_equals_the_mean_of_population_variances(shape):
    ranks = np.random.default_rng(shape[0]).integers(0, 957, shape)
    expected = statistics.mean(map(statistics.pvariance, ranks.astype(float).tolist()))
    assert mean_rank_variance(ranks) == pytest.approx(expected, rel=1e-12)
    assert mean_rank_variance(ranks.tolist()) == mean_rank_variance(ranks)


def test_the_papers_cases_have_the_papers_order():
    assert mean_rank_variance(KCL[:1]) == 0.5  # squares 1, 1, 4: 6/8 - (4/8)^2
    assert mean_rank_variance(KCL) < mean_rank_variance(ML_CLAP)


def test_equal_ranks_give_zero_for_any_first_rank():
    assert mean_rank_variance([[3, 3, 3], [956, 956, 956]]) == 0
    assert mean_rank_variance(np.array(ML_CLAP) + 1) == pytest.approx(mean_rank_variance(ML_CLAP), rel=1e-12)


@pytest.mark.parametrize(("num_candidates", "num_languages"), [(2, 2), (5, 3), (3, 5)])
def test_random_ranks(num_candidates, num_languages):
    every = list(itertools.product(range(num_candidates), repeat=num_languages))
    expected = (1 - 1 / num_languages) * (num_candidates**2 - 1) / 12
    assert mean_rank_variance(every) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "no queries"),
        ([[1, 2], [1, 2, 3]], r"query 1.*\[1, 2, 3\]"),
        ([[1], [2]], r"query 0.*\[1\]"),
        ([[1, 2], [float("nan"), 2]], r"ranks\[1\]\[0\]"),
        ([[1, float("inf")], [1, 2]], r"ranks\[0\]\[1\]"),
        ([[1, 2], [3, -1]], r"ranks\[1\]\[1\].*-1"),
        ([1, 2], "query 0.*1"),
    ],
)
def test_errors_for_bad_ranks_name_the_problem_and_the_row(ranks, message):
    with pytest.raises(ValueError, match=message):
        mean_rank_variance(ranks)


@pytest.fixture
def metric(load_metric):
    return load_metric("mrv")


def test_evaluate_accepts_the_ranks_as_a_keyword(metric):
    ranks = np.array([*ML_CLAP, *KCL])
    expected = {"MRV": mean_rank_variance(ranks)}
    assert metric.compute(predictions=range(6), ranks=ranks) == expected
    assert metric.compute(predictions=[0, 4], ranks=ranks) == {"MRV": mean_rank_variance(ranks[[0, 4]])}
    for row in range(6):
        metric.add(prediction=row)
    assert metric.compute(ranks=ranks) == expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"predictions": [0, 6], "ranks": [[1, 2]] * 3}, r"0\.\.2.*\b6\b"),
        ({"predictions": [-1], "ranks": [[1, 2]] * 3}, r"0\.\.2.*-1"),
        ({"predictions": [[1, 2]], "ranks": [[1, 2]]}, "row index"),
        ({"predictions": [3, 4]}, "query 0.*3"),
        ({"predictions": []}, "predictions are missing"),
    ],
)
def test_row_numbers_and_ranks_belong_together(metric, inputs, message):
    with pytest.raises(ValueError, match=message):
        metric.compute(**inputs)
