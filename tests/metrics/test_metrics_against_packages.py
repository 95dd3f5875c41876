"""The metrics against packages of others: trec_eval's measures (pytrec_eval), torchmetrics, SciPy and torch."""

import numpy as np
import pytest
import pytrec_eval
import torch
from scipy.spatial.distance import cdist
from torchmetrics.functional.retrieval import retrieval_average_precision, retrieval_hit_rate, retrieval_reciprocal_rank

from modeling_supclap.metrics.embedding_gap import gap_and_distance
from modeling_supclap.metrics.mrv import mean_rank_variance
from modeling_supclap.metrics.recall import LazySimilarity, relevant_from_qrels, retrieval_outcomes, retrieval_scores
from modeling_supclap.metrics.zste import zste_outcomes

K = (1, 5, 10)


def distinct_scores(rng, num_queries, num_candidates):
    """No ties: packages break them by the candidates' names or places, and these metrics against the model."""
    scores = np.stack([rng.permutation(num_candidates) for _ in range(num_queries)])
    return scores / num_candidates


def several_right(rng, num_queries, num_candidates, most):
    return [rng.permutation(num_candidates)[: rng.integers(1, most + 1)].tolist() for _ in range(num_queries)]


def trec_eval(similarity, relevant, measures):
    """Its measures, one row for each query."""
    names = [f"q{query:06d}" for query in range(len(relevant))]
    judged = {name: {f"d{column}": 1 for column in columns} for name, columns in zip(names, relevant, strict=True)}
    run = {
        name: {f"d{column}": float(score) for column, score in enumerate(row)}
        for name, row in zip(names, similarity, strict=True)
    }
    answers = pytrec_eval.RelevanceEvaluator(judged, set(measures)).evaluate(run)
    return [answers[name] for name in names]


@pytest.mark.parametrize(
    ("num_queries", "num_candidates", "most"), [(60, 40, 1), (60, 40, 6), (25, 300, 30), (9, 7, 7)]
)
def test_retrieval_agrees_with_trec_eval(num_queries, num_candidates, most):
    rng = np.random.default_rng(num_candidates)
    similarity = distinct_scores(rng, num_queries, num_candidates)
    relevant = several_right(rng, num_queries, num_candidates, most)
    answers = trec_eval(similarity, relevant, ("success.1,5,10", "map_cut.10,16", "recip_rank"))
    outcomes = retrieval_outcomes(similarity, relevant, K)
    for k in K:
        assert outcomes[f"R@{k}"] == pytest.approx([answer[f"success_{k}"] for answer in answers], abs=1e-9)
    assert outcomes["mAP@10"] == pytest.approx([answer["map_cut_10"] for answer in answers], abs=1e-9)
    wider = retrieval_outcomes(similarity, relevant, K, map_cutoff=16)
    assert wider["mAP@16"] == pytest.approx([answer["map_cut_16"] for answer in answers], abs=1e-9)
    assert 1 / (outcomes["rank"] + 1) == pytest.approx([answer["recip_rank"] for answer in answers], abs=1e-9)


def test_qrels_agree_with_trec_eval():
    """The table that trec_eval reads, read by both."""
    rng = np.random.default_rng(0)
    similarity, queries = distinct_scores(rng, 20, 15), [f"q{i:02d}" for i in range(20)]
    judged = {q: {f"d{c}": int(rng.integers(0, 3)) for c in rng.permutation(15)[:6]} | {"d0": 1} for q in queries}
    run = {q: {f"d{c}": float(s) for c, s in enumerate(row)} for q, row in zip(queries, similarity, strict=True)}
    answers = pytrec_eval.RelevanceEvaluator(judged, {"map_cut.16"}).evaluate(run)
    relevant = relevant_from_qrels(judged, queries, [f"d{c}" for c in range(15)])
    outcomes = retrieval_outcomes(similarity, relevant, map_cutoff=16)
    assert outcomes["mAP@16"] == pytest.approx([answers[q]["map_cut_16"] for q in queries], abs=1e-9)


@pytest.mark.parametrize("most", [1, 5])
def test_retrieval_agrees_with_torchmetrics(most):
    rng = np.random.default_rng(most)
    similarity, relevant = distinct_scores(rng, 30, 64), several_right(rng, 30, 64, most)
    target = torch.zeros(30, 64, dtype=torch.bool)
    for query, columns in enumerate(relevant):
        target[query, columns] = True
    outcomes = retrieval_outcomes(similarity, relevant, K)
    rows = list(zip(torch.from_numpy(similarity), target, strict=True))
    for k in K:
        assert outcomes[f"R@{k}"] == pytest.approx([float(retrieval_hit_rate(*row, top_k=k)) for row in rows], abs=1e-9)
    reciprocal = [float(retrieval_reciprocal_rank(*row)) for row in rows]
    assert 1 / (outcomes["rank"] + 1) == pytest.approx(reciprocal, abs=1e-7)  # theirs is in single precision
    whole = retrieval_outcomes(similarity, relevant, K, map_cutoff=64)["mAP@64"]
    assert whole == pytest.approx([float(retrieval_average_precision(*row)) for row in rows], abs=1e-6)


def test_embeddings_agree_with_trec_eval():
    """From embeddings, in chunks, as from a matrix made by SciPy."""
    rng = np.random.default_rng(0)
    texts, audios = (rng.standard_normal((count, 12)) for count in (50, 30))
    texts, audios = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (texts, audios))
    relevant = several_right(rng, 50, 30, 4)
    answers = trec_eval(1 - cdist(texts, audios, "cosine"), relevant, ("success.1,5,10", "map_cut.10"))
    scores = retrieval_scores(LazySimilarity(texts, audios, chunk=7), relevant)
    for ours, theirs in [("mAP@10", "map_cut_10"), *((f"R@{k}", f"success_{k}") for k in K)]:
        assert scores[ours] == pytest.approx(np.mean([answer[theirs] for answer in answers]), abs=1e-9)


def test_zste_agrees_with_trec_eval():
    """Both right ones among two answers is recall 1 at 2; the share of them is precision at 2."""
    rng = np.random.default_rng(0)
    similarity = distinct_scores(rng, 200, 8)
    one, two = (np.argsort(rng.random((200, 8)), axis=1)[:, :count].tolist() for count in (1, 2))
    single = trec_eval(similarity, one, ("success.1",))
    pairs = trec_eval(similarity, two, ("success.1,2", "recall.2", "P.2"))
    for task in ("1A", "3A", "3B", "4A", "4B"):
        expected = [answer["success_1"] for answer in single]
        assert zste_outcomes(similarity, one, [task] * 200)[task].tolist() == expected
    for task, measure in [("2B", "success_2"), ("2D", "success_2"), ("5A", "P_2"), ("5B", "recall_2")]:
        assert zste_outcomes(similarity, two, [task] * 200)[task].tolist() == [answer[measure] for answer in pairs]
    for task in ("2A", "2C"):
        assert zste_outcomes(similarity, two, [task] * 200)[task].tolist() == [a["recall_2"] == 1 for a in pairs]


def test_rank_variance_agrees_with_torch():
    ranks = np.random.default_rng(0).integers(0, 957, (100, 8))
    expected = float(torch.from_numpy(ranks).double().var(dim=1, correction=0).mean())
    assert mean_rank_variance(ranks) == pytest.approx(expected, abs=1e-9, rel=1e-12)


def test_gap_agrees_with_scipy():
    rng = np.random.default_rng(0)
    other, english = (rng.standard_normal((40, 9)) for _ in range(2))
    other, english = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (other, english))
    centres = cdist(other.mean(axis=0)[None], english.mean(axis=0)[None])[0, 0]
    pairs = cdist(other, english).diagonal().mean()
    assert gap_and_distance(other, english) == pytest.approx({"Gap": centres, "Dis": pairs}, abs=1e-9)
