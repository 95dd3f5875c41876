"""How sure is a score, and is one system better than another? Bootstrap intervals and a paired test over clips.

The captions of one clip succeed and fail together, so queries are not independent draws: resampling them one by one
gives intervals that are too narrow. Here whole clusters, clips with all their queries, are drawn. A score is the mean
over the queries drawn,

    score* = sum over clusters c of w_c s_c / sum over c of w_c n_c

with s_c the sum of the outcomes of a cluster's n_c queries and w_c how often it was drawn (multinomial). Outcomes come
from `metrics.recall.retrieval_outcomes` or `metrics.zste.zste_outcomes`: one number for each query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# So many draws are held at once, few enough for a core's cache.
_DRAWS = 1 << 18
# Up to so many clusters that differ, all 2^n signs are tried.
_EXACT_CLUSTERS = 12


def bootstrap_intervals(
    outcomes: Mapping[str, ArrayLike],
    clusters: Sequence[Any] | None = None,
    num_resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap intervals of the mean of each outcome (Efron and Tibshirani 1993, chapter 13).

    Intervals of few clusters (below 30, say) are too narrow, as all percentile intervals are; outcomes that are all
    alike give an interval of no width.

    Args:
        outcomes: By name the outcome of each query, (Q,).
        clusters: The clip that each query belongs to, by any name. Without them every query stands alone.
        num_resamples: How often the clusters are drawn.
        confidence: The share of intervals that hold the true mean, in 0..1.
        seed: The seed of the draws. It is the same for all outcomes, so that they are resampled together.

    Returns:
        By name the lower and the upper end.

    Raises:
        ValueError: There is no outcome or fewer than two clusters, lengths differ, an outcome is NaN or infinite, or
            `num_resamples` or `confidence` is out of range.

    >>> low, high = bootstrap_intervals({"R@1": [1, 1, 0, 0, 1, 0]}, clusters=["a", "a", "b", "b", "c", "c"])["R@1"]
    >>> 0 <= low <= 0.5 <= high <= 1
    True
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; give 1 or more")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give a share between 0 and 1, such as 0.95")
    from scipy import stats  # takes a second, which what draws no interval need not wait for

    sums, sizes = _sum_clusters(outcomes, clusters)

    def mean(*columns: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        *drawn_sums, drawn_sizes = columns  # (resamples, C) each
        return np.stack([column.sum(axis) for column in drawn_sums]) / drawn_sizes.sum(axis)

    ends = stats.bootstrap(
        (*sums.T, sizes),
        mean,
        paired=True,  # all outcomes of a cluster, and its size, are drawn together
        vectorized=True,
        method="percentile",
        n_resamples=num_resamples,
        confidence_level=confidence,
        batch=max(1, _DRAWS // len(sizes)),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return {name: (float(low), float(high)) for name, low, high in zip(outcomes, ends.low, ends.high, strict=True)}


def paired_test(
    a: Mapping[str, ArrayLike],
    b: Mapping[str, ArrayLike],
    clusters: Sequence[Any] | None = None,
    num_resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Is system a better than system b on the same queries? A paired randomisation test over clusters.

    If the two were alike, the difference of a cluster could as well have the other sign. The p-value is the share of
    all sign patterns whose mean difference is at least as far from 0 as the one found (two-sided): exactly, when up to
    12 clusters differ, and else from `num_resamples` patterns, (1 + hits) / (1 + patterns), which is never 0
    (Smucker, Allan and Carterette 2007, "A comparison of statistical significance tests for information retrieval
    evaluation"). The interval is the bootstrap's. Several outcomes are several tests; nothing is corrected for that.

    Args:
        a: By name the outcome of each query, (Q,), under the one system.
        b: The same names and queries under the other system.
        clusters: The clip of each query, as in `bootstrap_intervals`.
        num_resamples: The number of resamples of the interval, and of sign patterns of the test.
        confidence: The confidence of the interval.
        seed: The seed of the draws.

    Returns:
        By name `difference`, mean a - mean b; `low` and `high`, its interval; `p_value`.

    Raises:
        ValueError: As in `bootstrap_intervals`; or a and b differ in names or in number of queries.

    >>> paired_test({"R@1": [1, 1, 1, 1, 0]}, {"R@1": [0, 0, 0, 0, 0]})["R@1"]["p_value"]  # 2 of 2^4 sign patterns
    0.125
    """
    if a.keys() != b.keys():
        raise ValueError(f"a has the outcomes {list(a)}, b has {list(b)}; both must have the same")
    differences = {}
    for name in a:
        first, second = np.asarray(a[name], np.float64), np.asarray(b[name], np.float64)
        if first.shape != second.shape:
            raise ValueError(f"a has {len(first)} queries and b {len(second)}; both must answer the same ones")
        differences[name] = first - second
    sums, _ = _sum_clusters(differences, clusters)
    intervals = bootstrap_intervals(differences, clusters, num_resamples, confidence, seed)

    tested = {}
    for column, name in enumerate(a):
        tested[name] = {
            "difference": float(differences[name].mean()),
            "low": intervals[name][0],
            "high": intervals[name][1],
            "p_value": _sign_flip_p_value(sums[:, column], num_resamples, seed),
        }
    return tested


def _sum_clusters(
    outcomes: Mapping[str, ArrayLike], clusters: Sequence[Any] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(C, M) the sum of each of M outcomes over each cluster's queries, and (C,) how many these are."""
    columns, shapes = [], []
    for name, values in outcomes.items():
        column = np.asarray(values, np.float64)
        columns.append(column)
        shapes.append(column.shape)
        bad = np.argwhere(~np.isfinite(column))
        if column.ndim == 1 and len(bad):
            raise ValueError(f"{name}[{bad[0, 0]}] is {column[bad[0, 0]]}; every outcome must be finite")
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        told = dict(zip(outcomes, shapes, strict=True))
        raise ValueError(f"outcomes have the shapes {told}; give one outcome at least, each with one number a query")
    table = np.stack(columns, axis=1)  # (Q, M)

    if clusters is None:
        clusters = range(len(table))
    if len(clusters) != len(table):
        raise ValueError(f"got {len(clusters)} clusters for {len(table)} queries; give the cluster of each query")

    order: dict[Any, int] = {}
    numbers = []
    for cluster in clusters:
        numbers.append(order.setdefault(cluster, len(order)))
    if len(order) < 2:
        raise ValueError(f"there are {len(order)} clusters of queries; resampling needs two or more")

    sums = np.zeros((len(order), table.shape[1]))
    np.add.at(sums, numbers, table)  # (Q, M) -> (C, M)
    return sums, np.bincount(numbers).astype(np.float64)


def _sign_flip_p_value(differences: NDArray[np.float64], num_resamples: int, seed: int) -> float:
    # `stats.permutation_test` gives the same, but takes 16 times as long: it sorts random numbers to draw a sign.
    differing = differences[differences != 0]  # the others have no sign to flip
    found = abs(differing.sum()) - 1e-12 * np.abs(differing).sum()  # sums in another order differ by rounding
    count = len(differing)

    if count <= _EXACT_CLUSTERS:
        patterns = np.arange(2**count)[:, None] >> np.arange(count) & 1
        return float((np.abs((2 * patterns - 1) @ differing) >= found).mean())

    rng = np.random.default_rng((seed, 1))  # apart from the draws of the interval
    hits = 0
    for start in range(0, num_resamples, step := max(1, _DRAWS // count)):
        shape = (min(step, num_resamples - start), count)
        flipped = rng.integers(0, 2, shape, dtype=np.int8).astype(np.float64)
        hits += int((np.abs(2 * flipped @ differing - differing.sum()) >= found).sum())
    return (1 + hits) / (1 + num_resamples)
