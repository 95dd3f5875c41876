"""What ranks by counting cost: beside sorting, loops and packages, and beside the matrix product alone.

    python benchmarks/bench_retrieval.py [--clips 957] [--languages 8] [--gallery 100000] [--rounds 5]

Three tables. First an evaluation as papers report it, clips with five captions in each language, both directions: the
ranks of every relevant item, R@1, 5, 10 and mAP@10, in units of one bare product of audio and text a language. Then
packages, which want one query at a time and so get 300. Then 1024 texts against a large gallery, in units of the
product of the two embedding matrices. Variants run in turn in
one process; a time is the least over the rounds, a ratio that of two such times. All variants must find the same ranks.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytrec_eval
import torch
from numpy.typing import NDArray
from torchmetrics.functional.retrieval import retrieval_average_precision, retrieval_hit_rate

from modeling_supclap.metrics.recall import LazySimilarity, ranks_from_embeddings, retrieval_outcomes

CAPTIONS = 5
K = (1, 5, 10)
Ranks = NDArray[np.int64]


def directions(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
    """Random embeddings of unit norm."""
    embeds = rng.standard_normal((rows, dim), dtype=np.float32)
    return embeds / np.linalg.norm(embeds, axis=1, keepdims=True)


def counted(queries: Any, candidates: Any, relevant: Ranks) -> Ranks:
    """This project's way: the rank of the best relevant candidate, and the scores."""
    return retrieval_outcomes(LazySimilarity(queries, candidates), relevant, K)["rank"]


def sorted_at_once(queries: Any, candidates: Any, relevant: Ranks) -> Ranks:
    """The whole matrix is sorted; a relevant item's rank is where it stands."""
    order = np.argsort(-(queries @ candidates.T), axis=1)
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(order.shape[1])[None], axis=1)
    ranks = np.sort(np.take_along_axis(places, relevant, axis=1), axis=1)
    averages(ranks)
    return ranks[:, 0]


def sorted_in_a_loop(queries: Any, candidates: Any, relevant: Ranks) -> Ranks:
    """One query after the other: its scores, their order, and where in it each relevant item stands."""
    ranks = np.empty(relevant.shape, np.int64)
    for query, columns in enumerate(relevant):
        order = np.argsort(candidates @ queries[query])[::-1]
        ranks[query] = sorted(np.where(order == column)[0][0] for column in columns)
    averages(ranks)
    return ranks[:, 0]


def averages(ranks: Ranks) -> dict[str, float]:
    """R@k and mAP@10 from the 0-based ranks of all relevant items, ascending."""
    precisions = np.arange(1, ranks.shape[1] + 1) / (ranks + 1) * (ranks < 10)
    return {**{f"R@{k}": float((ranks[:, 0] < k).mean()) for k in K}, "mAP@10": float(precisions.mean())}


def counted_from_one_matrix(audio: Any, texts: list[Any]) -> list[Ranks]:
    """One product for both directions, in memory whole; ties of equal embeddings are then left to rounding."""
    captions = np.arange(len(audio) * CAPTIONS)
    ranks = []
    for text in texts:
        similarity = audio @ text.T
        ranks.append(retrieval_outcomes(similarity.T, captions[:, None] // CAPTIONS, K)["rank"])
        ranks.append(retrieval_outcomes(similarity, captions.reshape(-1, CAPTIONS), K)["rank"])
    return ranks


def both_ways(ranker: Callable[..., Ranks], audio: Any, texts: list[Any]) -> list[Ranks]:
    """The ranks of each language, text to audio and audio to text."""
    captions = np.arange(len(audio) * CAPTIONS)
    ranks = []
    for text in texts:
        ranks.append(ranker(text, audio, captions[:, None] // CAPTIONS))
        ranks.append(ranker(audio, text, captions.reshape(-1, CAPTIONS)))
    return ranks


def trec_eval(similarity: NDArray[np.float32], relevant: Ranks) -> float:
    """pytrec_eval from the matrix on: its run must be dictionaries."""
    names = [f"d{column}" for column in range(similarity.shape[1])]
    judged = {f"q{query}": {names[column]: 1 for column in columns} for query, columns in enumerate(relevant)}
    run = {f"q{query}": dict(zip(names, row, strict=True)) for query, row in enumerate(similarity.tolist())}
    answers = pytrec_eval.RelevanceEvaluator(judged, {"success.1,5,10", "map_cut.10"}).evaluate(run)
    return float(np.mean([answer["success_10"] for answer in answers.values()]))


def torchmetrics_loop(similarity: NDArray[np.float32], relevant: Ranks) -> float:
    """torchmetrics' functions, one query after the other."""
    target = torch.zeros(similarity.shape, dtype=torch.bool)
    target.scatter_(1, torch.from_numpy(relevant), True)
    hits = []
    for row, right in zip(torch.from_numpy(similarity), target, strict=True):
        hits.append([float(retrieval_hit_rate(row, right, top_k=k)) for k in K])
        retrieval_average_precision(row, right, top_k=10)
    return float(np.mean(hits, axis=0)[-1])


def product_only(queries: Any, gallery: Any, _: Ranks, tile: int = 8192) -> Ranks:
    """The floor: every score is computed, and none looked at."""
    for start in range(0, len(queries), 1024):
        block = queries[start : start + 1024]
        out = np.empty((len(block), tile), np.float32)
        for first in range(0, len(gallery), tile):
            part = gallery[first : first + tile]
            np.matmul(block, part.T, out=out[:, : len(part)])
    return np.empty(0, np.int64)


def interleaved(variants: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """The least seconds of each variant, run in turn, and what it returned."""
    least, answers = dict.fromkeys(variants, float("inf")), {}
    for _ in range(rounds):
        for name, variant in variants.items():
            started = time.perf_counter()
            answers[name] = variant()
            least[name] = min(least[name], time.perf_counter() - started)
    return least, answers


def report(title: str, least: Mapping[str, float], unit: str) -> None:
    """A table of seconds and of multiples of one of them."""
    print(f"\n{title}")
    for name, seconds in least.items():
        print(f"{name:<34}{1000 * seconds:>10.1f} ms   x {seconds / least[unit]:.2f}")


def evaluation(clips: int, languages: int, dim: int, rounds: int) -> None:
    """The first two tables."""
    rng = np.random.default_rng(0)
    audio = directions(rng, clips, dim)
    texts = [directions(rng, clips * CAPTIONS, dim) for _ in range(languages)]
    rankers = {"counting": counted, "argsort of the matrix": sorted_at_once, "loop of argsort": sorted_in_a_loop}
    variants: dict[str, Callable[[], Any]] = {
        name: partial(both_ways, ranker, audio, texts) for name, ranker in rankers.items()
    }
    variants["counting, one product for both"] = lambda: counted_from_one_matrix(audio, texts)
    variants["one bare product"] = lambda: [audio @ text.T for text in texts]
    least, answers = interleaved(variants, rounds)
    # Products of another shape round differently, so that a near tie may turn: a handful of ranks in tens of thousands.
    for name in [name for name in variants if name not in ("counting", "one bare product")]:
        moved = sum(int((a != b).sum()) for a, b in zip(answers["counting"], answers[name], strict=True))
        total = sum(map(len, answers["counting"]))
        assert moved <= 0.001 * total, f"{name} finds {moved} other ranks of {total}"
    report(f"{clips} clips x {CAPTIONS} captions x {languages} languages, {dim} dimensions", least, "one bare product")

    relevant = np.arange(300)[:, None] // CAPTIONS
    similarity = texts[0][:300] @ audio.T
    packages: dict[str, Callable[[], float]] = {
        "counting": lambda: float(retrieval_outcomes(similarity, relevant, K)["R@10"].mean()),
        "pytrec_eval": lambda: trec_eval(similarity, relevant),
        "torchmetrics": lambda: torchmetrics_loop(similarity, relevant),
    }
    least, answers = interleaved(packages, rounds)
    assert max(answers.values()) - min(answers.values()) < 1e-6, answers
    report(f"300 queries x {clips}, from the matrix on: R@1, R@5, R@10, mAP@10", least, "counting")


def large_gallery(gallery: int, queries: int, dim: int, rounds: int) -> None:
    """The last table."""
    rng = np.random.default_rng(0)
    texts, audios = directions(rng, queries, dim), directions(rng, gallery, dim)
    right = rng.integers(0, gallery, (queries, 1))
    few = slice(0, queries // 16)  # sorting needs 2 GB and much time for all of them
    tracemalloc.start()
    ranks = ranks_from_embeddings(texts, audios, right)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    variants = {
        "products only": lambda: product_only(texts, audios, right),
        "ranks_from_embeddings": lambda: ranks_from_embeddings(texts, audios, right),
        f"argsort of {queries // 16} queries, x 16": lambda: sorted_at_once(texts[few], audios, right[few]),
    }
    least, answers = interleaved(variants, rounds)
    least = {name: seconds * (16 if name.endswith("x 16") else 1) for name, seconds in least.items()}
    np.testing.assert_array_equal(answers["ranks_from_embeddings"], ranks)
    report(f"{queries} texts x {gallery} audios, {dim} dimensions; peak memory + {peak:.0f} MB", least, "products only")


def main() -> None:
    """Runs the rounds and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=957)
    parser.add_argument("--languages", type=int, default=8)
    parser.add_argument("--gallery", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{os.environ.get('OMP_NUM_THREADS', os.cpu_count())} threads")
    evaluation(options.clips, options.languages, options.dim, options.rounds)
    large_gallery(options.gallery, options.queries, options.dim, options.rounds)


if __name__ == "__main__":
    main()
