"""Metrics per query, compared with trec_eval (pytrec_eval)."""

import numpy as np
import pytest
import pytrec_eval

from modeling_supclap.metrics.recall import relevant_from_qrels, retrieval_outcomes
from modeling_supclap.metrics.zste import zste_outcomes

K = (1, 5, 10)


def distinct_scores(rng, num_queries, num_candidates):
    """Return scores without ties, because packages break ties by name or position, unlike our metrics."""
    scores = np.stack([rng.permutation(num_candidates) for _ in range(num_queries)])
    return scores / num_candidates


def several_right(rng, num_queries, num_candidates, most):
    return [rng.permutation(num_candidates)[: rng.integers(1, most + 1)].tolist() for _ in range(num_queries)]


def trec_eval(similarity, relevant, measures):
    """Compute measures with pytrec_eval, one row per query."""
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
    answers = trec_eval(similarity, relevant, ("success.1,5,10", "map_cut.10,16", "ndcg_cut.3,10", "recip_rank"))
    more = {"mAP@16": "map_cut_16", "nDCG@10": "ndcg_cut_10", "nDCG@3": "ndcg_cut_3", "MRR": "recip_rank"}
    outcomes = retrieval_outcomes(similarity, relevant, K, metrics=list(more))
    for name, measure in more.items():
        assert outcomes[name] == pytest.approx([answer[measure] for answer in answers], abs=1e-9), name
    for k in K:
        assert outcomes[f"R@{k}"] == pytest.approx([answer[f"success_{k}"] for answer in answers], abs=1e-9)
    assert outcomes["mAP@10"] == pytest.approx([answer["map_cut_10"] for answer in answers], abs=1e-9)
    wider = retrieval_outcomes(similarity, relevant, K, map_cutoff=16)
    assert wider["mAP@16"] == pytest.approx([answer["map_cut_16"] for answer in answers], abs=1e-9)
    assert 1 / (outcomes["rank"] + 1) == pytest.approx([answer["recip_rank"] for answer in answers], abs=1e-9)


def test_qrels_agree_with_trec_eval():
    """Both read the same table of judgements."""
    rng = np.random.default_rng(0)
    similarity, queries = distinct_scores(rng, 20, 15), [f"q{i:02d}" for i in range(20)]
    judged = {q: {f"d{c}": int(rng.integers(0, 3)) for c in rng.permutation(15)[:6]} | {"d0": 1} for q in queries}
    run = {q: {f"d{c}": float(s) for c, s in enumerate(row)} for q, row in zip(queries, similarity, strict=True)}
    answers = pytrec_eval.RelevanceEvaluator(judged, {"map_cut.16"}).evaluate(run)
    relevant = relevant_from_qrels(judged, queries, [f"d{c}" for c in range(15)])
    outcomes = retrieval_outcomes(similarity, relevant, map_cutoff=16)
    assert outcomes["mAP@16"] == pytest.approx([answers[q]["map_cut_16"] for q in queries], abs=1e-9)


def test_zste_agrees_with_trec_eval():
    """ "Both correct" is recall@2 = 1, and the fraction of correct answers is precision@2."""
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
