"""metrics/recall against naive loops, enumeration, scikit-learn, golden numbers and the real `evaluate` loader."""

import ast
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch
from memory import traced_peak
from sklearn.metrics import coverage_error

from modeling_supclap.metrics.recall import (
    LazySimilarity,
    best_ranks,
    chance_scores,
    relevant_from_qrels,
    retrieval_outcomes,
    retrieval_scores,
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "metrics" / "recall"


def naive_ranks(scores, right):
    """1-based ranks of the relevant candidates, best first, every tie with an irrelevant one lost."""
    wrong = [score for column, score in enumerate(scores) if column not in right]
    best_first = sorted((scores[column] for column in right), reverse=True)
    return [sum(other >= score for other in wrong) + place for place, score in enumerate(best_first, start=1)]


def naive_scores(similarity, relevant, cutoffs):
    ranks = [naive_ranks(row, set(right)) for row, right in zip(similarity, relevant, strict=True)]
    first = sorted(mine[0] for mine in ranks)
    middle = (first[(len(first) - 1) // 2] + first[len(first) // 2]) / 2
    precisions = [
        sum(place / rank for place, rank in enumerate(mine, start=1) if rank <= 10) / len(mine) for mine in ranks
    ]
    return {
        **{f"R@{k}": sum(rank <= k for rank in first) / len(first) for k in cutoffs},
        "mAP@10": sum(precisions) / len(precisions),
        "median_rank": math.floor(middle),
        "mean_rank": sum(first) / len(first),
        "num_queries": len(first),
    }


def random_case(seed, num_queries, num_candidates, most, levels):
    """Scores and relevant columns; `levels` distinct values make ties, None makes none."""
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
def test_scores_equal_naive_loops(similarity, relevant):
    expected = naive_scores(similarity.tolist(), relevant, (1, 3, 10))
    assert retrieval_scores(similarity, relevant, k=(1, 3, 10)) == pytest.approx(expected, abs=1e-12)
    ranks = [naive_ranks(row, set(right))[0] - 1 for row, right in zip(similarity.tolist(), relevant, strict=True)]
    assert best_ranks(similarity, relevant).tolist() == ranks


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
    """12 clips with 5 captions each; the expected numbers are ML-CLAP's published evaluation code run on them."""
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
    """With one right answer, coverage error is the mean rank, and it too counts ties against the model."""
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


@pytest.mark.parametrize(("n", "m"), [(1, 1), (4, 1), (5, 3), (6, 6), (9, 2), (13, 2), (12, 3)])
def test_chance_is_the_mean_over_all_orders(n, m):
    descending = np.arange(n, 0, -1.0)
    places = [list(chosen) for chosen in itertools.combinations(range(n), m)]
    mean = retrieval_scores(np.tile(descending, (len(places), 1)), places, k=(1, 2, 5))
    chance = chance_scores([range(m)], n, k=(1, 2, 5))
    assert chance == pytest.approx({name: mean[name] for name in chance}, abs=1e-12)


def test_chance_is_stable_at_scale():
    n, m, k = 1_000_000, 5, 10
    exact = 1 - math.comb(n - m, k) / math.comb(n, k)  # Python's integers are exact, their ratio rounds once
    assert chance_scores([range(m)], n, k)[f"R@{k}"] == pytest.approx(exact, rel=1e-9)
    assert chance_scores([[7]], 10**9, 1)["R@1"] == pytest.approx(1e-9, rel=1e-12)


def ranks_from_embeddings(queries, candidates, relevant, chunk=1024, similarity="cosine"):
    return best_ranks(LazySimilarity(queries, candidates, chunk, similarity), relevant)


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000])
@pytest.mark.parametrize("num_candidates", [1, 63, 64, 5000, 9001])
def test_chunks_of_embeddings_equal_the_whole_matrix(chunk, num_candidates):
    """On small integers a product is exact in any order, so the whole matrix is the truth; it is full of ties too."""
    rng = np.random.default_rng(num_candidates)
    queries = rng.integers(-2, 3, (70, 6)).astype(np.float32)
    candidates = rng.integers(-2, 3, (num_candidates, 6)).astype(np.float32)
    relevant = [rng.permutation(num_candidates)[: rng.integers(1, 7)].tolist() for _ in range(70)]
    lazy, whole = LazySimilarity(queries, candidates, chunk, similarity="dot"), queries @ candidates.T
    np.testing.assert_array_equal(
        ranks_from_embeddings(queries, candidates, relevant, chunk, similarity="dot"), best_ranks(whole, relevant)
    )
    assert retrieval_scores(lazy, relevant) == retrieval_scores(whole, relevant)


def test_lazy_scores_are_the_products():
    rng = np.random.default_rng(0)
    queries, candidates = rng.standard_normal((90, 33)), rng.standard_normal((5000, 33))
    lazy = LazySimilarity(queries, candidates, chunk=32, similarity="dot")
    whole = np.full((90, 5000), np.nan)
    for start in range(0, 90, 32):
        for first, tile in lazy.tiles(slice(start, start + 32)):
            whole[start : start + 32, first : first + tile.shape[1]] = tile
    np.testing.assert_allclose(whole, np.einsum("qd,cd->qc", queries, candidates), rtol=0, atol=1e-9)
    relevant = rng.integers(0, 5000, (90, 2))
    relevant[:, 1] = (relevant[:, 0] + 7) % 5000
    assert retrieval_scores(lazy, relevant) == retrieval_scores(whole, relevant)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("num_candidates", [5, 190, 4100, 8300])
def test_equal_embeddings_tie_wherever_they_stand(dtype, num_candidates):
    """A model that gives every clip one embedding is constant: in chunks, too, it must score as the worst."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((37, 46)).astype(dtype)
    candidates = np.tile(rng.standard_normal(46).astype(dtype), (num_candidates, 1))
    right = rng.integers(0, num_candidates, (37, 1))
    worst = [num_candidates - 1] * 37
    assert ranks_from_embeddings(queries, candidates, right, chunk=17, similarity="dot").tolist() == worst
    with pytest.warns(UserWarning, match="where 1 is expected"):
        assert ranks_from_embeddings(queries, candidates, right, chunk=17).tolist() == worst


def directions(rng, *shape):
    embeds = rng.standard_normal(shape)
    return embeds / np.linalg.norm(embeds, axis=-1, keepdims=True)


@pytest.mark.parametrize("num_candidates", [20, 8200])  # a block of scores that is held, and one that is not
def test_other_norms_are_normalised_with_a_warning(num_candidates):
    rng = np.random.default_rng(0)
    queries, candidates = directions(rng, 300, 3), directions(rng, num_candidates, 3)
    relevant = rng.integers(0, num_candidates, (300, 1))
    longer = candidates * rng.uniform(0.5, 3, (num_candidates, 1))
    with pytest.warns(UserWarning, match=r"candidates has rows of norm .* where 1 is expected"):
        found = ranks_from_embeddings(queries, longer, relevant)
    np.testing.assert_array_equal(found, best_ranks(queries @ candidates.T, relevant))
    as_they_are = ranks_from_embeddings(queries, longer, relevant, similarity="dot")
    np.testing.assert_array_equal(as_they_are, best_ranks(queries @ longer.T, relevant))
    assert (found != as_they_are).any()
    with pytest.warns(UserWarning, match="queries has rows of norm 2 "):
        np.testing.assert_array_equal(ranks_from_embeddings(2 * queries, candidates, relevant), found)


@pytest.mark.parametrize(("norm", "warns"), [(1.0, False), (0.991, False), (1.009, False), (0.98, True), (1.02, True)])
def test_the_tolerance_of_unit_norm(norm, warns):
    queries = directions(np.random.default_rng(0), 5, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LazySimilarity(queries.astype(np.float16), queries * norm)
    assert bool(caught) == warns


def test_chunks_bound_the_memory():
    rng = np.random.default_rng(0)
    queries = directions(rng, 1500, 4).astype(np.float32)
    candidates = directions(rng, 30_000, 4).astype(np.float32)
    relevant = rng.integers(0, 30_000, (1500, 1))
    assert traced_peak(ranks_from_embeddings, queries, candidates, relevant, 128) < 8e6  # the matrix: 180e6 bytes


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
        (with_value(np.nan), [[0]] * 3, r"similarity\[1, 2\] is nan"),
        (with_value(-np.inf), [[0]] * 3, r"similarity\[1, 2\] is -inf"),
        (np.zeros((3, 4)), [[0], [], [1]], "query 1 has no relevant candidate"),
        (np.zeros((3, 4)), [[0], [1, 4], [1]], "query 1 names column 4 as relevant; columns run from 0 to 3"),
        (np.zeros((3, 4)), [[0], [1], [-1]], "query 2 names column -1"),
        (np.zeros((3, 4)), [[0], [1, 2, 1], [1]], "query 1 names column 1 as relevant 2 times"),
        (np.zeros((3, 4)), [[0], [1]], "got 2 lists of relevant candidates for 3 queries"),
        (np.zeros((3, 4)), [0, 1, 2], "give a list of columns for each query"),
        (np.zeros((3, 4)), [[0.5], [1], [2]], "must be integers"),
        (np.zeros((0, 4)), [], r"similarity has shape \(0, 4\)"),
        (np.zeros((3, 0)), [[0]] * 3, r"similarity has shape \(3, 0\)"),
        (np.zeros(3), [[0]] * 3, r"similarity has shape \(3,\)"),
        ([[0.1, 0.2], [0.3]], [[0]] * 2, "rows of similarity differ in length"),
        ([["a", "b"]], [[0]], "matrix of real numbers"),
    ],
)
def test_bad_input_says_what_and_where(similarity, relevant, message):
    with pytest.raises(ValueError, match=message):
        retrieval_scores(similarity, relevant)
    with pytest.raises(ValueError, match=message):
        best_ranks(similarity, relevant)


@pytest.mark.parametrize(("similarity", "relevant"), CASES[::3])
@pytest.mark.parametrize("map_cutoff", [1, 10, 16])
def test_outcomes_are_what_the_scores_are_means_of(similarity, relevant, map_cutoff):
    outcomes = retrieval_outcomes(similarity, relevant, (1, 3), map_cutoff)
    scores = retrieval_scores(similarity, relevant, (1, 3), map_cutoff)
    assert list(outcomes) == ["R@1", "R@3", f"mAP@{map_cutoff}", "rank"]
    ranks = [naive_ranks(row, set(right)) for row, right in zip(similarity.tolist(), relevant, strict=True)]
    assert outcomes.pop("rank").tolist() == [mine[0] - 1 for mine in ranks]
    for name, outcome in outcomes.items():
        assert outcome.dtype == np.float64
        assert scores[name] == outcome.mean()
    assert outcomes["R@3"].tolist() == [mine[0] <= 3 for mine in ranks]
    precisions = [
        sum(place / rank for place, rank in enumerate(mine, 1) if rank <= map_cutoff) / len(mine) for mine in ranks
    ]
    assert outcomes[f"mAP@{map_cutoff}"] == pytest.approx(precisions, abs=1e-12)
    chance = chance_scores(relevant, similarity.shape[1], (1, 3), map_cutoff)
    assert list(chance) == ["R@1", "R@3", f"mAP@{map_cutoff}"]


@pytest.mark.parametrize("k", [0, -1, 2.5, [1, 0], [], True, "10"])
def test_a_cutoff_is_a_positive_whole_number(k):
    with pytest.raises(ValueError, match="positive whole numbers"):
        retrieval_scores(np.eye(3), [[0], [1], [2]], k)


@pytest.mark.parametrize(
    ("queries", "candidates", "chunk", "message"),
    [
        (np.ones((2, 3)), np.ones((4, 5)), 8, "last dimensions must be equal"),
        (np.array([[1.0, 0.0], [np.nan, 0.0]]), np.eye(2), 8, r"queries\[1\] has NaN"),
        (np.eye(2), np.array([[np.inf, 0.0], [1.0, 0.0]]), 8, r"candidates\[0\] has NaN, inf or huge"),
        (np.ones((0, 2)), np.eye(2), 8, r"queries has shape \(0, 2\)"),
        (np.eye(2), np.eye(2), 0, "chunk is 0"),
        (np.eye(2), np.array([[1.0, 0.0], [0.0, 0.0]]), 8, r"candidates\[1\] is zero"),
        (np.full((1, 2), 3e38, np.float32), np.eye(2, dtype=np.float32), 8, r"queries\[0\] has NaN, inf or huge"),
    ],
)
def test_bad_embeddings_say_what_and_where(queries, candidates, chunk, message):
    with pytest.raises(ValueError, match=message):
        ranks_from_embeddings(queries, candidates, [[0]] * len(queries), chunk)


def test_evaluate_gives_the_same_numbers(load_metric):
    similarity, relevant = random_case(5, 30, 12, 4, 5)
    expected = retrieval_scores(similarity, relevant, k=[1, 3])
    metric = load_metric("recall")
    assert metric.compute(predictions=similarity, references=relevant, k=[1, 3]) == expected
    assert metric.compute(predictions=similarity.tolist(), references=relevant, k=[1, 3]) == expected
    for start in range(0, 30, 8):
        metric.add_batch(predictions=similarity[start : start + 8], references=relevant[start : start + 8])
    assert metric.compute(k=[1, 3]) == expected


def test_evaluate_stores_nothing_that_it_gets_at_once(load_metric, monkeypatch):
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


def test_evaluate_takes_the_whole_matrix_as_a_keyword(load_metric):
    similarity, relevant = random_case(6, 30, 12, 4, 5)
    expected = retrieval_scores(similarity, relevant)
    shuffled = np.random.default_rng(0).permutation(30)
    references = [relevant[row] for row in shuffled]
    metric = load_metric("recall")
    assert metric.compute(predictions=shuffled, references=references, similarity=similarity) == expected
    for row in shuffled:
        metric.add(prediction=int(row), reference=relevant[row])
    assert metric.compute(similarity=similarity) == expected


def test_evaluate_takes_embeddings_as_keywords(load_metric):
    rng = np.random.default_rng(0)
    queries, candidates = directions(rng, 9, 4), directions(rng, 6, 4)
    relevant = [[i % 6] for i in range(9)]
    expected = retrieval_scores(queries @ candidates.T, relevant, k=1, map_cutoff=16)
    inputs = {"predictions": range(9), "references": relevant, "k": 1, "map_cutoff": 16}
    metric = load_metric("recall")
    assert metric.compute(**inputs, query_embeds=queries, candidate_embeds=candidates) == pytest.approx(expected)
    lazy = LazySimilarity(queries, candidates)  # of this package's own copy of the class
    assert metric.compute(**inputs, similarity=lazy) == pytest.approx(expected)
    with pytest.raises(ValueError, match="give both query_embeds and candidate_embeds"):
        metric.compute(**inputs, query_embeds=queries)


def test_a_keyword_never_passes_through_arrow(load_metric):
    """3000 x 3000 scores are 36 MB; through Arrow they would be 450 MB of Python numbers and more."""
    similarity = np.random.default_rng(0).standard_normal((3000, 3000), dtype=np.float32)
    metric, relevant = load_metric("recall"), [[i] for i in range(3000)]
    metric.compute(predictions=[0], references=[[0]], similarity=np.eye(1))  # what is imported once

    def compute():
        metric.compute(predictions=range(3000), references=relevant, similarity=similarity)

    assert traced_peak(compute) < similarity.nbytes / 5


def test_evaluate_has_the_reader_of_qrels(load_metric):
    rows = [("q", "a", 0), ("q", "b", 1)]
    assert load_metric("recall").relevant_from_qrels(rows, ["q"], ["a", "b"]) == relevant_from_qrels(
        rows, ["q"], ["a", "b"]
    )


def test_an_empty_split_is_an_error(load_metric):
    metric = load_metric("recall")
    with pytest.raises(ValueError, match="at least once before calling `compute`"):
        metric.compute()
    with pytest.raises(ValueError, match="hold at least one query"):
        metric.add_batch(predictions=[], references=[])


def test_evaluate_combines(load_metric):
    similarity, relevant = random_case(7, 10, 6, 2, None)
    both = evaluate.combine({"first": load_metric("recall"), "second": load_metric("recall")}, force_prefix=True)
    scores = both.compute(predictions=similarity, references=relevant, k=[1], unknown_to_recall=3)
    expected = retrieval_scores(similarity, relevant, k=[1])
    assert scores == {f"{name}_{key}": value for name in ("first", "second") for key, value in expected.items()}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"predictions": [], "references": []}, "hold at least one query"),
        ({"predictions": [[0.1, np.nan]], "references": [[0]]}, r"similarity\[0, 1\] is nan"),
        ({"predictions": [[0.1, 0.2]], "references": [[]]}, "no relevant candidate"),
        ({"predictions": [[0.1, 0.2], [0.1]], "references": [[0], [0]]}, "differ in length"),
        ({"predictions": [0, 1], "references": [[0], [0]]}, r"similarity has shape \(2,\)"),
        ({"predictions": [0, 0], "references": [[0], [0]], "similarity": np.eye(2)}, "each of 0..1 once; got 2"),
        ({"predictions": np.eye(2), "references": [[0], [0]], "similarity": np.eye(2)}, "row numbers"),
    ],
)
def test_evaluate_errors_are_clear(load_metric, inputs, message):
    with pytest.raises(ValueError, match=message):
        load_metric("recall").compute(**inputs)


WORKER = """
import json, sys
import numpy as np
import evaluate
folder, rank = sys.argv[1], int(sys.argv[2])
mine = slice(0, 7) if rank == 0 else slice(7, 10)
rng = np.random.default_rng(0)
scores, other = rng.standard_normal((10, 6)), rng.standard_normal((10, 6))
unit = lambda rows: rows / np.linalg.norm(rows, axis=1, keepdims=True)
columns = {
    "recall": {"predictions": scores, "references": [[i % 6] for i in range(10)]},
    "zste": {"predictions": scores, "references": [[i % 6] for i in range(10)], "tasks": ["4A"] * 10},
    "mrv": {"predictions": rng.integers(0, 9, (10, 3))},
    "embedding_gap": {"predictions": unit(scores), "references": unit(other)},
}
result = {}
for name, inputs in columns.items():
    metric = evaluate.load(f"{folder}/{name}", num_process=2, process_id=rank, experiment_id="pair")
    metric.add_batch(**{column: rows[mine] for column, rows in inputs.items()})
    together = metric.compute(k=[1, 2])
    alone = evaluate.load(f"{folder}/{name}", experiment_id=f"alone{rank}").compute(**inputs, k=[1, 2])
    assert alone, name
    result[name] = together if rank else together == alone and sorted(alone)
print(json.dumps(result))
"""


@pytest.mark.process
def test_two_processes_elsewhere_and_offline(tmp_path):
    """In fresh processes started elsewhere, rank 0 gets the scores of both ranks' rows."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(FOLDER.parent), str(rank)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    main, other = (json.loads(process.communicate(timeout=300)[0]) for process in ranks)
    assert main == {
        "recall": ["R@1", "R@2", "mAP@10", "mean_rank", "median_rank", "num_queries"],
        "zste": ["4A", "4A_chance", "4A_questions"],
        "mrv": ["MRV"],
        "embedding_gap": ["Dis", "Gap"],
    }
    assert other == dict.fromkeys(main)
    assert (tmp_path / "home" / "modules" / "evaluate_modules").is_dir()


def imports_of(path):
    """(level, module) of the imports of a file."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {(0, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {(node.level, node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("name", ["recall", "mrv", "zste", "embedding_gap"])
def test_a_folder_needs_no_other(name):
    """`evaluate` copies the metric's file and the helpers that this file itself names, and nothing else."""
    folder = FOLDER.parent / name
    main = imports_of(folder / f"{name}.py")
    helpers = {path.stem for path in folder.glob("*.py")} - {"__init__", name}
    assert {module for level, module in main if level} == helpers
    for path in folder.glob("*.py"):
        for level, module in imports_of(path):
            assert (level, module in helpers) == (1, True) or (
                level == 0 and module.split(".")[0] in {"numpy", "datasets", "evaluate"} | sys.stdlib_module_names
            ), f"{path.name} imports {'.' * level}{module}"
    for line in (folder / f"{name}.py").read_text(encoding="utf-8").splitlines():
        assert not (line.startswith("from .") and "#" in line), "the loader takes the comment for an address"
