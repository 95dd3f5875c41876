"""Measure the time and memory of text-to-audio evaluation, relative to a plain loop.

    python benchmarks/bench_retrieval.py [--texts 4785] [--clips 957] [--dim 512] [--rounds 5]

The metrics are R@1, 5, 10 and mAP@10. The evaluation is compared with two loops over 1,000 texts at a time. One counts
the clips with higher scores, the other sorts the clips. All variants must compute the same ranks, except for
near ties. With `--texts 20000 --clips 100000`, the loops need 0.4 GB for each chunk of scores.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rows import Row, compare, run_script, take_turns

from modeling_supclap.metrics.recall import LazySimilarity, retrieval_outcomes

K = (1, 5, 10)
Ranks = NDArray[np.int64]


def directions(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
    """Sample random unit-norm embeddings, (rows, dim)."""
    embeds = rng.standard_normal((rows, dim), dtype=np.float32)
    return embeds / np.linalg.norm(embeds, axis=1, keepdims=True)


def counted(texts: Any, clips: Any, relevant: Ranks) -> Ranks:
    """Compute the ranks of the relevant clips, R@k and mAP@10 with the package."""
    return retrieval_outcomes(LazySimilarity(texts, clips), relevant[:, None], K)["rank"]


def loop(texts: Any, clips: Any, relevant: Ranks, is_sorted: bool, size: int = 1000) -> Ranks:
    """Compute the ranks of the relevant clips, R@k and mAP@10 in a plain loop. If `is_sorted` is set, the loop
    sorts the clips by their scores. Otherwise it counts the clips with a higher score than the relevant one.
    """
    chunks = []
    for start in range(0, len(texts), size):
        scores, right = texts[start : start + size] @ clips.T, relevant[start : start + size, None]
        if is_sorted:
            chunks.append((np.argsort(-scores, axis=1) == right).argmax(axis=1))
        else:
            chunks.append((scores > np.take_along_axis(scores, right, axis=1)).sum(axis=1))
    ranks = np.concatenate(chunks)
    [(ranks < k).mean() for k in K] + [((ranks < 10) / (ranks + 1)).mean()]
    return ranks


def measure(texts: int = 4785, clips: int = 957, dim: int = 512, rounds: int = 5) -> list[Row]:
    """Measure the time to rank one clip per text, in the package and in the loops, and the memory that the package
    needs.
    """
    rng = np.random.default_rng(0)
    queries, gallery = directions(rng, texts, dim), directions(rng, clips, dim)
    relevant = rng.integers(0, clips, texts)
    tracemalloc.start()
    expected = counted(queries, gallery, relevant)
    megabytes = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()

    rankers: dict[str, Any] = {"ours": counted, "a loop that counts": partial(loop, is_sorted=False)}
    if texts * clips <= 10**8:  # beyond, it takes minutes
        rankers["a loop that sorts"] = partial(loop, is_sorted=True)
    ways: dict[str, Callable[[], Any]] = {}
    for name, ranker in rankers.items():
        ways[name] = partial(ranker, queries, gallery, relevant)
        # scores within 1e-6 tie in the package, and products of another shape round differently
        few = slice(0, 2000)
        moved = np.abs(ranker(queries[few], gallery, relevant[few]) - expected[few]).max()
        assert moved <= 3 + clips / 10_000, f"{name} computes ranks that differ by {moved}"

    seconds = take_turns(ways, rounds)
    shape = f"R@k and mAP@10, {texts:,} texts x {clips:,} clips"
    rows = [Row("evaluation", f"{shape}: memory beyond the embeddings", megabytes, None, "<= 64", "MB")]
    for name in list(ways)[1:]:
        rows.append(Row("evaluation", f"{shape}: our time / {name}", *compare(seconds, "ours", name), "<= 1.2"))
    return rows


if __name__ == "__main__":
    run_script(measure, __doc__)
