"""metrics/recall, compared with loops, enumeration, scikit-learn and golden values, and its use in `evaluate`."""

import itertools
import math
import statistics
import warnings

import numpy as np
import pytest
import torch
from memory import traced_peak
from sklearn.metrics import average_precision_score, coverage_error

from modeling_supclap.metrics.recall import (
    LazySimilarity,
    average_precision,
    best_ranks,
    chance_scores,
    retrieval_outcomes,
    retrieval_scores,
)


def naive_ranks(scores, right):
    """Return sorted 1-based ranks of the relevant candidates; a tie with an irrelevant one counts as lost."""
    wrong = [score for column, score in enumerate(scores) if column not in right]
    best_first = sorted((scores[column] for column in right), reverse=True)
    return [sum(other >= score for other in wrong) + place for place, score in enumerate(best_first, start=1)]


def naive_outcomes(similarity, relevant, cutoffs, map_cutoff):
    ranks = [naive_ranks(row, set(right)) for row, right in zip(similarity, relevant, strict=True)]
    outcomes = {f"R@{k}": [float(mine[0] <= k) for mine in ranks] for k in cutoffs}
    outcomes[f"mAP@{map_cutoff}"] = [
        sum(place / rank for place, rank in enumerate(mine, start=1) if rank <= map_cutoff) / len(mine)
        for mine in ranks
    ]
    return {**outcomes, "rank": [mine[0] - 1 for mine in ranks]}


def random_case(seed, num_queries, num_candidates, most, levels):
    """Return scores and relevant columns. `levels` is the number of distinct scores, to create ties; None: no ties."""
    rng = np.random.default_rng(seed)
    similarity = rng.standard_normal((num_queries, num_candidates))
    if levels:
        similarity = rng.integers(0, levels, similarity.shape) / levels
    relevant = [rng.permutation(num_candidates)[: rng.integers(1, most + 1)].tolist() for _ in range(num_queries)]
    return similarity, relevant


CASES = [
    random_case(seed, num_queries, num_candidates, min(most, num_candidates), levels)
    for seed, ((num_queries, num_candidates), most, levels) in enumerate(
        itertools.product([(1, 1), (1, 7), (9, 2), (40, 13), (7, 150)], [1, 5, 14], [None, 1, 2, 6])
    )
]


@pytest.mark.parametrize(("similarity", "relevant"), CASES)
@pytest.mark.parametrize("map_cutoff", [1, 10, 16])
def test_outcomes_and_scores_equal_naive_loops(similarity, relevant, map_cutoff):
    expected = naive_outcomes(similarity.tolist(), relevant, (1, 3, 10), map_cutoff)
    outcomes = retrieval_outcomes(similarity, relevant, (1, 3, 10), map_cutoff)
    assert list(outcomes) == list(expected)
    for name, values in expected.items():
        assert outcomes[name] == pytest.approx(values, abs=1e-12)
    assert best_ranks(similarity, relevant).tolist() == expected["rank"]

    ranks = [rank + 1 for rank in expected.pop("rank")]
    means = {name: statistics.mean(values) for name, values in expected.items()}
    assert chance_scores(relevant, similarity.shape[1], (1, 3, 10), map_cutoff).keys() == means.keys()
    of_ranks = {"median_rank": math.floor(statistics.median(ranks)), "mean_rank": statistics.mean(ranks)}
    scores = retrieval_scores(similarity, relevant, (1, 3, 10), map_cutoff)
    assert scores == pytest.approx({**means, **of_ranks, "num_queries": len(ranks)}, abs=1e-12)


def test_many_tiles_with_several_relevant_candidates_equal_naive_loops():
    """The relevant candidates rank among the first 30, and the first query has none within the cutoff but its best."""
    rng = np.random.default_rng(0)
    similarity = rng.standard_normal((30, 3000))
    relevant = [rng.permutation(3000)[:5].tolist() for _ in range(30)]
    for row, columns in zip(similarity, relevant, strict=True):
        row[columns] = np.sort(row)[-rng.permutation(30)[:5]]
    similarity[0, relevant[0]] = [9, -1, -1.1, -1.2, -1.3]
    expected = naive_outcomes(similarity.tolist(), relevant, (1, 10), 10)
    outcomes = retrieval_outcomes(similarity, relevant, (1, 10), 10)
    for name, values in expected.items():
        assert outcomes[name] == pytest.approx(values, abs=1e-12), name


@pytest.mark.parametrize(
    "form",
    [
        np.ndarray.tolist,
        np.asfortranarray,
        lambda scores: scores.astype(np.float16),
        lambda scores: (scores * 8).astype(np.int32),
        lambda scores: np.repeat(scores, 2, axis=1)[:, ::2],
    ],
    ids=["lists", "columns-first", "half", "integers", "strided"],
)
def test_the_form_of_the_matrix_does_not_matter(form):
    similarity, relevant = random_case(3, 300, 1500, 4, 8)  # several blocks of rows
    untouched = similarity.copy()
    assert retrieval_scores(form(similarity), relevant) == retrieval_scores(similarity, relevant)
    np.testing.assert_array_equal(similarity, untouched)


def golden_fill(shape, j):
    n = np.arange(math.prod(shape), dtype=np.float64)
    return (np.sin(12.9898 * (n + 1) + 78.233 * j) * 43758.5453 % 1.0 - 0.5).reshape(shape)


@pytest.fixture(scope="module")
def golden():
    """12 clips with 5 captions each; the expected values are from ML-CLAP's published evaluation code."""
    audio = golden_fill((12, 8), 0)
    text = audio.repeat(5, axis=0) + 1.2 * golden_fill((60, 8), 1)
    return tuple(embeds / np.linalg.norm(embeds, axis=1, keepdims=True) for embeds in (audio, text))


@pytest.mark.parametrize(
    ("direction", "relevant", "expected"),
    [
        ("t2a", np.arange(60)[:, None] // 5, [0.616667, 0.95, 1, 0.752262, 1, 1.9333, 60]),
        ("a2t", np.arange(60).reshape(12, 5), [0.666667, 1, 1, 0.546997, 1, 1.5833, 12]),
    ],
)
def test_golden_numbers(golden, direction, relevant, expected):
    audio, text = golden
    scores = retrieval_scores(text @ audio.T if direction == "t2a" else audio @ text.T, relevant, k=(1, 5, 10))
    assert list(scores.values()) == pytest.approx(expected, abs=5e-5)


def test_ties_agree_with_scikit_learn_coverage():
    """With one correct answer, the coverage error is the mean rank and also counts ties against the model."""
    rng = np.random.default_rng(1)
    scores, right = rng.integers(0, 4, (60, 20)) / 4, rng.integers(0, 20, 60)
    expected = coverage_error(np.eye(20)[right], scores)
    assert retrieval_scores(scores, right[:, None])["mean_rank"] == pytest.approx(expected, abs=1e-12)


def test_a_constant_model_is_the_worst_model():
    relevant = [[0], [3, 5], [1, 2, 4]]
    assert best_ranks(np.full((3, 20), 0.7), relevant).tolist() == [19, 18, 17]
    scores = retrieval_scores(np.full((3, 20), 0.7), relevant)
    assert (scores["R@1"], scores["R@10"], scores["mAP@10"], scores["median_rank"]) == (0, 0, 0, 19)


def test_a_perfect_model():
    scores = retrieval_scores(np.eye(12), [[i] for i in range(12)])
    assert scores.pop("num_queries") == 12
    assert list(scores) == ["R@1", "R@5", "R@10", "mAP@10", "median_rank", "mean_rank"]
    assert set(scores.values()) == {1}
    many = np.arange(40.0)[None, ::-1]
    assert retrieval_scores(many, [range(20)])["mAP@10"] == pytest.approx(10 / 20)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (4, 1), (5, 3), (6, 6), (9, 2), (13, 2), (12, 3)])
def test_chance_is_the_mean_over_all_orders(n, m):
    descending = np.arange(n, 0, -1.0)
    places = [list(chosen) for chosen in itertools.combinations(range(n), m)]
    more = {"metrics": ["mAP@2", "nDCG@2", "nDCG@10", "MRR"]}
    mean = retrieval_scores(np.tile(descending, (len(places), 1)), places, k=(1, 2, 5), **more)
    chance = chance_scores([range(m)], n, k=(1, 2, 5), **more)
    assert set(more["metrics"]) < chance.keys()
    assert chance == pytest.approx({name: mean[name] for name in chance}, abs=1e-12)


def test_further_metrics_have_the_ties_of_the_others():
    """A constant model has the worst ranks: with 3 relevant candidates of 6, these are 4, 5 and 6."""
    scores = retrieval_scores(np.ones((1, 6)), [[0, 2, 4]], metrics=["MRR", "nDCG@5", "mAP@5", "R@4"])
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    expected = {"MRR": 1 / 4, "nDCG@5": (1 / math.log2(5) + 1 / math.log2(6)) / ideal, "R@4": 1.0}
    expected["mAP@5"] = (1 / 4 + 2 / 5) / 3
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    with pytest.raises(ValueError, match="'nDCG@0'"):
        retrieval_scores(np.ones((1, 6)), [[0]], metrics=["MRR", "nDCG@0"])


def test_chance_is_stable_at_scale():
    n, m, k = 1_000_000, 5, 10
    exact = 1 - math.comb(n - m, k) / math.comb(n, k)  # Python integers are exact; only the division rounds
    assert chance_scores([range(m)], n, k)[f"R@{k}"] == pytest.approx(exact, rel=1e-9)
    assert chance_scores([[7]], 10**9, 1)["R@1"] == pytest.approx(1e-9, rel=1e-12)


def ranks_from_embeddings(queries, candidates, relevant, chunk=1024):
    return best_ranks(LazySimilarity(queries, candidates, chunk), relevant)


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000])
@pytest.mark.parametrize("num_candidates", [1, 63, 64, 5000, 9001])
def test_chunks_of_embeddings_equal_the_whole_matrix(chunk, num_candidates):
    """Products of quarters are exact in any order, so the whole matrix is a reference; it has many ties."""
    rng = np.random.default_rng(num_candidates)
    queries = rng.choice(np.float32([-0.25, 0.25]), (70, 16))
    candidates = rng.choice(np.float32([-0.25, 0.25]), (num_candidates, 16))
    relevant = [rng.permutation(num_candidates)[: rng.integers(1, 7)].tolist() for _ in range(70)]
    lazy, whole = LazySimilarity(queries, candidates, chunk), queries @ candidates.T
    np.testing.assert_array_equal(best_ranks(lazy, relevant), best_ranks(whole, relevant))
    assert retrieval_scores(lazy, relevant) == retrieval_scores(whole, relevant)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("num_candidates", [5, 190, 4100, 8300])
def test_equal_embeddings_tie_at_any_position(dtype, num_candidates):
    """A model with one embedding for all clips must have the worst scores, also in chunks."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((37, 46)).astype(dtype)
    candidates = np.tile(rng.standard_normal(46).astype(dtype), (num_candidates, 1))
    right = rng.integers(0, num_candidates, (37, 1))
    worst = [num_candidates - 1] * 37
    with pytest.warns(UserWarning, match=r"candidates.*norm"):
        assert ranks_from_embeddings(queries, candidates, right, chunk=17).tolist() == worst


def test_lazy_scores_do_not_depend_on_the_order_of_summation():
    """Ties must not depend on the order of summation, which differs between BLAS libraries and matrix positions."""
    rng = np.random.default_rng(0)
    queries, candidates = (directions(rng, rows, 512).astype(np.float32) for rows in (40, 9000))
    order = rng.permutation(512)
    # first, because an empty array may be the memory of an earlier result
    in_chunks = LazySimilarity(queries, candidates, chunk=3)[:]
    found = LazySimilarity(queries, candidates)
    np.testing.assert_array_equal(found[:], LazySimilarity(queries[:, order], candidates[:, order])[:])
    np.testing.assert_allclose(found[:], queries.astype(np.float64) @ candidates.T.astype(np.float64), atol=1e-7)
    columns = rng.integers(0, 9000, (40, 3))
    np.testing.assert_array_equal(in_chunks, found[:])
    np.testing.assert_array_equal(found.at(slice(0, 40), columns), np.take_along_axis(found[:], columns, axis=1))


def test_a_candidate_that_scores_a_millionth_less_ties():
    """The relevant candidate is the first; the other is nearly as near."""
    query = np.array([[1.0, 0.0]])
    for less, rank in ((-1e-5, 1), (0, 1), (5e-7, 1), (3e-6, 0)):
        candidates = np.array([[0.6, 0.8], [0.6 - less, np.sqrt(1 - (0.6 - less) ** 2)]])
        assert ranks_from_embeddings(query, candidates, [[0]]) == [rank]


def test_rows_of_lazy_scores():
    rng = np.random.default_rng(0)
    lazy, whole = LazySimilarity(directions(rng, 9, 4), directions(rng, 5, 4)), np.empty((9, 5))
    for first, tile in lazy.tiles(slice(0, 9)):
        whole[:, first : first + tile.shape[1]] = tile
    for rows in (slice(None), slice(2, 5), slice(-3, None), slice(7, 2), slice(None, None, 2), 3):
        np.testing.assert_allclose(lazy[rows], whole[rows], atol=2e-7)


def directions(rng, *shape):
    embeds = rng.standard_normal(shape)
    return embeds / np.linalg.norm(embeds, axis=-1, keepdims=True)


@pytest.mark.parametrize("num_candidates", [20, 8200])
def test_other_norms_are_normalised_with_a_warning(num_candidates):
    rng = np.random.default_rng(0)
    queries, candidates = directions(rng, 300, 3), directions(rng, num_candidates, 3)
    relevant = rng.integers(0, num_candidates, (300, 1))
    longer = candidates * rng.uniform(0.5, 3, (num_candidates, 1))
    with pytest.warns(UserWarning, match=r"candidates.*norm"):
        found = ranks_from_embeddings(queries, longer, relevant)
    # scores within 1e-6 tie
    np.testing.assert_allclose(found, best_ranks(queries @ candidates.T, relevant), atol=2)
    with pytest.warns(UserWarning, match=r"queries.*norm 2"):
        np.testing.assert_array_equal(ranks_from_embeddings(2 * queries, candidates, relevant), found)
    with pytest.warns(UserWarning, match=r"queries.*norm"):  # its square overflows in float32
        assert ranks_from_embeddings(np.float32([[3e38, 1e38]]), np.eye(2, dtype=np.float32), [[1]]) == [1]


@pytest.mark.parametrize(("norm", "warns"), [(1.0, False), (0.991, False), (1.009, False), (0.98, True), (1.02, True)])
def test_the_tolerance_of_unit_norm(norm, warns):
    queries = directions(np.random.default_rng(0), 5, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LazySimilarity(queries.astype(np.float16), queries * norm)
    assert bool(caught) == warns


@pytest.mark.parametrize("num_queries", [1500, 6000])
def test_chunks_limit_the_memory_for_embeddings_on_disk(tmp_path, num_queries):
    rng = np.random.default_rng(0)
    candidates = directions(rng, 30_000, 4).astype(np.float32)
    relevant = rng.integers(0, 30_000, (num_queries, 1))
    np.save(tmp_path / "queries.npy", candidates[relevant[:, 0]])  # each query finds its candidate
    queries = np.load(tmp_path / "queries.npy", mmap_mode="r")
    found = []
    peak = traced_peak(lambda: found.append(ranks_from_embeddings(queries, candidates, relevant, 128)))
    assert peak < 8e6  # the matrix has 180e6 bytes or more
    assert not found[0].any()


def test_a_matrix_is_neither_copied_nor_sorted():
    similarity = np.random.default_rng(0).standard_normal((2000, 3000), dtype=np.float32)
    relevant = np.arange(2000)[:, None]
    assert traced_peak(best_ranks, similarity, relevant) < similarity.nbytes / 5
    assert traced_peak(best_ranks, similarity.T[:2000], relevant) < similarity.nbytes / 5


def with_value(value):
    similarity = np.zeros((3, 4))
    similarity[1, 2] = value
    return similarity


@pytest.mark.parametrize(
    ("similarity", "relevant", "message"),
    [
        (with_value(np.nan), [[0]] * 3, r"similarity\[1, 2\].*nan"),
        (with_value(-np.inf), [[0]] * 3, r"similarity\[1, 2\].*-inf"),
        (np.zeros((3, 4)), [[0], [], [1]], "query 1"),
        (np.zeros((3, 4)), [[0], [1, 4], [1]], "query 1.*column 4"),
        (np.zeros((3, 4)), [[0], [1], [-1]], "query 2.*column -1"),
        (np.zeros((3, 4)), [[0], [1, 2, 1], [1]], "query 1.*column 1"),
        (np.zeros((3, 4)), [[0], [1]], r"\b2\b.*\b3\b"),
        (np.zeros((3, 4)), [0, 1, 2], "list of columns"),
        (np.zeros((3, 4)), [[0.5], [1], [2]], "float64"),
        (np.zeros((0, 4)), [], r"similarity.*\(0, 4\)"),
        (np.zeros((3, 0)), [[0]] * 3, r"similarity.*\(3, 0\)"),
        (np.zeros(3), [[0]] * 3, r"similarity.*\(3,\)"),
        ([[0.1, 0.2], [0.3]], [[0]] * 2, "similarity"),
        ([["a", "b"]], [[0]], "real numbers"),
    ],
)
def test_errors_for_bad_input_name_the_problem_and_the_row(similarity, relevant, message):
    with pytest.raises(ValueError, match=message):
        retrieval_scores(similarity, relevant)
    with pytest.raises(ValueError, match=message):
        best_ranks(similarity, relevant)


@pytest.mark.parametrize("k", [0, -1, 2.5, [1, 0], [], True, "10"])
def test_a_cutoff_is_a_positive_whole_number(k):
    with pytest.raises(ValueError, match=r"^k "):
        retrieval_scores(np.eye(3), [[0], [1], [2]], k)


@pytest.mark.parametrize(
    ("queries", "candidates", "chunk", "message"),
    [
        (np.ones((2, 3)), np.ones((4, 5)), 8, "dimension"),
        (np.array([[1.0, 0.0], [np.nan, 0.0]]), np.eye(2), 8, r"queries\[1\].*nan"),
        (np.eye(2), np.array([[np.inf, 0.0], [1.0, 0.0]]), 8, r"candidates\[0\].*inf"),
        (np.ones((0, 2)), np.eye(2), 8, r"queries.*\(0, 2\)"),
        (np.eye(2), np.eye(2), 0, "chunk is 0"),
        (np.eye(2), np.array([[1.0, 0.0], [0.0, 0.0]]), 8, r"candidates\[1\]"),
    ],
)
def test_errors_for_bad_embeddings_name_the_problem_and_the_row(queries, candidates, chunk, message):
    with pytest.raises(ValueError, match=message):
        ranks_from_embeddings(queries, candidates, [[0]] * len(queries), chunk)


def test_evaluate_stores_no_input_that_is_passed_at_once(load_metric, monkeypatch):
    similarity, relevant = random_case(5, 30, 12, 4, 5)
    metric, stored = load_metric("recall"), []
    monkeypatch.setattr(metric, "add_batch", lambda **columns: stored.append(columns))
    assert metric.compute(predictions=similarity, references=relevant) == retrieval_scores(similarity, relevant)
    assert not stored


def test_evaluate_reads_tensors(load_metric):
    similarity, relevant = random_case(5, 30, 12, 4, 5)
    rows = torch.tensor(similarity, dtype=torch.bfloat16, requires_grad=True)
    expected = retrieval_scores(rows.detach().float().numpy(), relevant)
    assert load_metric("recall").compute(predictions=rows, references=relevant) == expected


def test_evaluate_accepts_the_whole_matrix_as_a_keyword(load_metric):
    similarity, relevant = random_case(6, 30, 12, 4, 5)
    expected = retrieval_scores(similarity, relevant)
    shuffled = np.random.default_rng(0).permutation(30)
    references = [relevant[row] for row in shuffled]
    metric = load_metric("recall")
    assert metric.compute(predictions=shuffled, references=references, similarity=similarity) == expected
    for row in shuffled:
        metric.add(prediction=int(row), reference=relevant[row])
    assert metric.compute(similarity=similarity) == expected


def test_evaluate_accepts_embeddings_as_keywords(load_metric):
    rng = np.random.default_rng(0)
    queries, candidates = directions(rng, 9, 4), directions(rng, 6, 4)
    relevant = [[i % 6] for i in range(9)]
    expected = retrieval_scores(queries @ candidates.T, relevant, k=1, map_cutoff=16)
    inputs = {"predictions": range(9), "references": relevant, "k": 1, "map_cutoff": 16}
    metric = load_metric("recall")
    assert metric.compute(**inputs, query_embeds=queries, candidate_embeds=candidates) == pytest.approx(expected)
    lazy = LazySimilarity(queries, candidates)  # of the copy of the class in this package
    assert metric.compute(**inputs, similarity=lazy) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"query_embeds.*candidate_embeds"):
        metric.compute(**inputs, query_embeds=queries)


def test_a_keyword_never_passes_through_arrow(load_metric):
    """3000 x 3000 scores have 36 MB; in Arrow they would be at least 450 MB of Python numbers."""
    similarity = np.random.default_rng(0).standard_normal((3000, 3000), dtype=np.float32)
    metric, relevant = load_metric("recall"), [[i] for i in range(3000)]
    metric.compute(predictions=[0], references=[[0]], similarity=np.eye(1))  # import everything once

    def compute():
        metric.compute(predictions=range(3000), references=relevant, similarity=similarity)

    assert traced_peak(compute) < similarity.nbytes / 5


def test_an_empty_split_is_an_error(load_metric):
    metric = load_metric("recall")
    with pytest.raises(ValueError, match="at least once before calling `compute`"):
        metric.compute()
    with pytest.raises(ValueError, match="predictions and references"):
        metric.add_batch(predictions=[], references=[])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"predictions": [], "references": []}, "predictions and references"),
        ({"predictions": [[0.1, 0.2]], "references": [[]]}, "query 0"),
        ({"predictions": [[0.1, 0.2], [0.1]], "references": [[0], [0]]}, "similarity"),
        ({"predictions": [0, 1], "references": [[0], [0]]}, r"similarity.*\(2,\)"),
        ({"predictions": [0, 0], "references": [[0], [0]], "similarity": np.eye(2)}, "row 0 .* 2 times"),
        ({"predictions": [0, 5], "references": [[0], [0]], "similarity": np.eye(2)}, r"0\.\.1.*\b5\b"),
        ({"predictions": np.eye(2), "references": [[0], [0]], "similarity": np.eye(2)}, "row index"),
    ],
)
def test_evaluate_errors_are_clear(load_metric, inputs, message):
    with pytest.raises(ValueError, match=message):
        load_metric("recall").compute(**inputs)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_average_precision_is_that_of_scikit_learn_with_and_without_ties(levels):
    rng = np.random.default_rng(levels)
    for size in (1, 2, 7, 50):
        scores, is_relevant = rng.integers(levels, size=size) / levels, rng.random(size) < 0.4
        is_relevant[rng.integers(size)] = True
        assert average_precision(scores, is_relevant) == pytest.approx(average_precision_score(is_relevant, scores))
