"""Measure the time of ranking by counting, and compare it with sorting, loops, other packages and a matrix product.

    python benchmarks/bench_retrieval.py [--clips 957] [--languages 2] [--gallery 100000] [--rounds 5]

1. An evaluation as in the papers: five captions per clip and language, both retrieval directions, R@1, 5, 10 and
   mAP@10. The time is relative to one audio-text matrix product per language.
2. The same metrics with other packages, and the other computations of an evaluation.
3. Ranking of a large gallery of clips for each text. The time is relative to the product of the embedding matrices.

All ranking methods must compute the same ranks.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytrec_eval
import torch
from numpy.typing import NDArray
from rows import Row, compare, run_script, take_turns
from torchmetrics.functional.retrieval import retrieval_average_precision, retrieval_hit_rate

from modeling_supclap.evaluation.retrieval import find_top
from modeling_supclap.metrics.embedding_gap.distance import gap_and_distance
from modeling_supclap.metrics.recall import LazySimilarity, best_ranks, retrieval_outcomes

METRICS = Path(__file__).parents[1] / "metrics"
CAPTIONS = 5
K = (1, 5, 10)
Ranks = NDArray[np.int64]


def directions(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
    """Sample random unit-norm embeddings, (rows, dim)."""
    embeds = rng.standard_normal((rows, dim), dtype=np.float32)
    return embeds / np.linalg.norm(embeds, axis=1, keepdims=True)


def counted(queries: Any, candidates: Any, relevant: Ranks) -> Ranks:
    """Rank by counting, as the package does. The time includes the similarity matrix and the metrics."""
    return retrieval_outcomes(LazySimilarity(queries, candidates), relevant, K)["rank"]


def sorted_at_once(queries: Any, candidates: Any, relevant: Ranks) -> Ranks:
    """Rank with one argsort of the whole similarity matrix."""
    order = np.argsort(-(queries @ candidates.T), axis=1)
    rank_of_candidate = np.empty_like(order)
    np.put_along_axis(rank_of_candidate, order, np.arange(order.shape[1])[None], axis=1)
    ranks = np.sort(np.take_along_axis(rank_of_candidate, relevant, axis=1), axis=1)
    averages(ranks)
    return ranks[:, 0]


def sorted_in_a_loop(queries: Any, candidates: Any, relevant: Ranks) -> Ranks:
    """Rank with one argsort per query."""
    ranks = np.empty(relevant.shape, np.int64)
    for query, columns in enumerate(relevant):
        order = np.argsort(candidates @ queries[query])[::-1]
        ranks[query] = sorted(np.where(order == column)[0][0] for column in columns)
    averages(ranks)
    return ranks[:, 0]


def averages(ranks: Ranks) -> dict[str, float]:
    """Compute R@k and mAP@10 from the sorted 0-based ranks of all relevant candidates."""
    precisions = np.arange(1, ranks.shape[1] + 1) / (ranks + 1) * (ranks < 10)
    return {**{f"R@{k}": float((ranks[:, 0] < k).mean()) for k in K}, "mAP@10": float(precisions.mean())}


def counted_from_one_matrix(audio: Any, texts: list[Any]) -> list[Ranks]:
    """Rank both directions with one similarity matrix in memory. The order of equal embeddings depends on rounding."""
    captions = np.arange(len(audio) * CAPTIONS)
    ranks = []
    for text in texts:
        similarity = audio @ text.T
        ranks.append(retrieval_outcomes(similarity.T, captions[:, None] // CAPTIONS, K)["rank"])
        ranks.append(retrieval_outcomes(similarity, captions.reshape(-1, CAPTIONS), K)["rank"])
    return ranks


def both_ways(ranker: Callable[..., Ranks], audio: Any, texts: list[Any]) -> list[Ranks]:
    """Return the ranks of text-to-audio and audio-to-text retrieval for each language."""
    captions = np.arange(len(audio) * CAPTIONS)
    ranks = []
    for text in texts:
        ranks.append(ranker(text, audio, captions[:, None] // CAPTIONS))
        ranks.append(ranker(audio, text, captions.reshape(-1, CAPTIONS)))
    return ranks


def trec_eval(similarity: NDArray[np.float32], relevant: Ranks) -> float:
    """Compute the metrics with pytrec_eval, including the conversion of the matrix to dictionaries."""
    names = [f"d{column}" for column in range(similarity.shape[1])]
    judged = {f"q{query}": {names[column]: 1 for column in columns} for query, columns in enumerate(relevant)}
    run = {f"q{query}": dict(zip(names, row, strict=True)) for query, row in enumerate(similarity.tolist())}
    answers = pytrec_eval.RelevanceEvaluator(judged, {"success.1,5,10", "map_cut.10"}).evaluate(run)
    return float(np.mean([answer["success_10"] for answer in answers.values()]))


def torchmetrics_loop(similarity: NDArray[np.float32], relevant: Ranks) -> float:
    """Compute the metrics with torchmetrics, one query at a time."""
    target = torch.zeros(similarity.shape, dtype=torch.bool)
    target.scatter_(1, torch.from_numpy(relevant), True)
    hits = []
    for row, right in zip(torch.from_numpy(similarity), target, strict=True):
        hits.append([float(retrieval_hit_rate(row, right, top_k=k)) for k in K])
        retrieval_average_precision(row, right, top_k=10)
    return float(np.mean(hits, axis=0)[-1])


def product_only(queries: Any, gallery: Any, tile: int = 8192) -> None:
    """Compute all scores without using them, as a lower bound of the time."""
    for start in range(0, len(queries), 1024):
        block = queries[start : start + 1024]
        out = np.empty((len(block), tile), np.float32)
        for first in range(0, len(gallery), tile):
            part = gallery[first : first + tile]
            np.matmul(block, part.T, out=out[:, : len(part)])


def measure(
    clips: int = 957, languages: int = 2, gallery: int = 100_000, queries: int = 1024, dim: int = 512, rounds: int = 5
) -> list[Row]:
    """Run all retrieval benchmarks. Return the rows of their results table."""
    return [
        *rank_both_ways(clips, languages, dim, rounds),
        *use_packages(clips, dim, rounds),
        *evaluate_beside(clips, dim, rounds),
        *search_gallery(gallery, queries, dim, rounds),
    ]


def rank_both_ways(clips: int, languages: int, dim: int, rounds: int) -> list[Row]:
    """Time a whole evaluation with counting, sorting and loops, relative to a matrix product."""
    rng = np.random.default_rng(0)
    audio = directions(rng, clips, dim)
    texts = [directions(rng, clips * CAPTIONS, dim) for _ in range(languages)]
    rankers = {"counting": counted, "argsort of the matrix": sorted_at_once, "a loop of argsort": sorted_in_a_loop}
    ways: dict[str, Callable[[], Any]] = {}
    for name, ranker in rankers.items():
        ways[name] = partial(both_ways, ranker, audio, texts)
    ways["counting in one matrix"] = partial(counted_from_one_matrix, audio, texts)

    # Matrix products of another shape round differently, so a few ranks in tens of thousands may differ (near ties).
    expected = ways["counting"]()
    for name, way in ways.items():
        moved = sum(int((a != b).sum()) for a, b in zip(expected, way(), strict=True))
        assert moved <= 0.001 * sum(map(len, expected)), f"{name} finds {moved} other ranks"

    ways["one product"] = lambda: [audio @ text.T for text in texts]
    seconds = take_turns(ways, rounds)
    shape = f"{clips} clips x {CAPTIONS} captions"
    rows = []
    for name, bound in (("counting in one matrix", "<= 1.7"), ("counting", "")):
        ratio = compare(seconds, name, "one product")
        rows.append(Row("ranks", f"ranks and mAP both ways by {name} / one bare product, {shape}", *ratio, bound))
    for name in ("argsort of the matrix", "a loop of argsort"):
        rows.append(Row("ranks", f"{name} / counting in one matrix", *compare(seconds, name, "counting in one matrix")))
    return rows


def use_packages(clips: int, dim: int, rounds: int) -> list[Row]:
    """Compare counting with other packages on 300 queries, because they process one query at a time."""
    rng = np.random.default_rng(0)
    relevant = np.arange(300)[:, None] // CAPTIONS
    similarity = directions(rng, 300, dim) @ directions(rng, clips, dim).T
    recall = evaluate.load(str(METRICS / "recall"))
    columns = relevant.tolist()
    packages: dict[str, Callable[[], float]] = {
        "counting": lambda: float(retrieval_outcomes(similarity, relevant, K)["R@10"].mean()),
        "pytrec_eval": lambda: trec_eval(similarity, relevant),
        "torchmetrics": lambda: torchmetrics_loop(similarity, relevant),
        'evaluate.load("metrics/recall")': lambda: recall.compute(predictions=similarity, references=columns)["R@10"],
    }
    answers = [package() for package in packages.values()]
    assert max(answers) - min(answers) < 1e-6, answers

    seconds = take_turns(packages, rounds)
    rows = []
    for name, bound in (("pytrec_eval", ""), ("torchmetrics", ""), ('evaluate.load("metrics/recall")', "<= 5")):
        rows.append(Row("metrics", f"{name} / our function, 300 queries", *compare(seconds, name, "counting"), bound))
    return rows


def evaluate_beside(clips: int, dim: int, rounds: int) -> list[Row]:
    """Time the top hits and the language distance of an evaluation, relative to one matrix product."""
    rng = np.random.default_rng(0)
    audio, text = directions(rng, clips, dim), directions(rng, clips * CAPTIONS, dim)
    similarity = LazySimilarity(text, audio)
    anchor = directions(rng, clips * CAPTIONS, dim)
    ways: dict[str, Callable[[], Any]] = {
        "one product": lambda: text @ audio.T,
        "top hits": lambda: find_top(similarity),
        "distance between two languages": lambda: gap_and_distance(text, anchor),
    }
    best = (text @ audio.T).argmax(axis=1)
    assert (find_top(similarity)[:, 0] == best).mean() > 0.999

    seconds = take_turns(ways, rounds)
    rows = []
    for name, bound in (("top hits", "<= 2.5"), ("distance between two languages", "<= 0.6")):
        rows.append(Row("evaluation", f"{name} / one bare product", *compare(seconds, name, "one product"), bound))
    return rows


def search_gallery(gallery: int, queries: int, dim: int, rounds: int) -> list[Row]:
    """Measure time (relative to the matrix products) and memory for ranking in a large gallery."""
    rng = np.random.default_rng(0)
    texts, audios = directions(rng, queries, dim), directions(rng, gallery, dim)
    right = rng.integers(0, gallery, (queries, 1))
    few = slice(0, queries // 16)  # sorting all queries needs 2 GB and a long time
    tracemalloc.start()
    ranks = best_ranks(LazySimilarity(texts, audios), right)
    megabytes = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    np.testing.assert_array_equal(sorted_at_once(texts[few], audios, right[few]), ranks[few])

    ways: dict[str, Callable[[], Any]] = {
        "products": lambda: product_only(texts, audios),
        "ranks": lambda: best_ranks(LazySimilarity(texts, audios), right),
    }
    ratio = compare(take_turns(ways, rounds), "ranks", "products")
    shape = f"{queries:,} texts x {gallery:,} clips"
    return [
        Row("gallery", f"ranks / the bare products, {shape}", *ratio, "<= 1.15"),
        Row("gallery", f"memory beyond the embeddings, {shape}", megabytes, None, "<= 64", "MB"),
    ]


if __name__ == "__main__":
    run_script(measure, __doc__)
