"""Bootstrap confidence intervals of scores, intervals over seeds, and a paired test of two systems.

The captions of one clip are correlated, so resampling single queries would make the intervals too narrow. Therefore
whole clusters (clips with all their queries) are resampled. A resampled score is the mean over the sampled queries,

    score* = sum over clusters c of w_c s_c / sum over c of w_c n_c

where s_c is the sum of the outcomes of the n_c queries in cluster c, and w_c counts how often cluster c was sampled
(multinomial). An outcome is the score of a single query, such as 0 or 1 for R@1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 1000
"""Default number of bootstrap resamples, and of random sign patterns of the test."""

# Random numbers per batch. A batch of this size fits into the cache of a core.
_DRAWS = 1 << 18
# Maximum number of differing clusters for the exact test with all 2^n sign patterns.
_EXACT_CLUSTERS = 12


def bootstrap_intervals(
    outcomes: Mapping[str, ArrayLike],
    clusters: Sequence[Any] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Compute percentile bootstrap intervals of mean outcomes (Efron and Tibshirani 1993, chapter 13).

    With fewer than about 30 clusters, percentile intervals are too narrow. If all outcomes are equal, the interval has
    zero width. All scores use the same resamples.

    Args:
        outcomes: `{score name: outcomes}` with one outcome per query, (Q,).
        clusters: Cluster of each query, such as its clip id. None: each query is its own cluster.

    Returns:
        `{score name: (lower, upper)}`, the ends of the intervals.

    Raises:
        ValueError: There are no outcomes or fewer than two clusters, lengths differ, an outcome is NaN or infinite, or
            `num_resamples` or `confidence` is out of range.

    >>> low, high = bootstrap_intervals({"R@1": [1, 1, 0, 0, 1, 0]}, clusters=["a", "a", "b", "b", "c", "c"])["R@1"]
    >>> 0 <= low <= 0.5 <= high <= 1
    True
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; give 1 or more")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give a value between 0 and 1, such as 0.95")
    from scipy import stats  # this import takes a second, and only intervals need it

    sums, sizes = _sum_clusters(outcomes, clusters)

    def mean(*columns: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        *drawn_sums, drawn_sizes = columns  # (resamples, C) each
        return np.stack([column.sum(axis) for column in drawn_sums]) / drawn_sizes.sum(axis)

    ends = stats.bootstrap(
        (*sums.T, sizes),
        mean,
        paired=True,  # resamples all outcomes of a cluster and its size together
        vectorized=True,
        method="percentile",
        n_resamples=num_resamples,
        confidence_level=confidence,
        batch=max(1, _DRAWS // len(sizes)),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    intervals = {}
    for name, low, high in zip(outcomes, ends.low, ends.high, strict=True):
        intervals[name] = (float(low), float(high))
    return intervals


def paired_test(
    a: Mapping[str, ArrayLike],
    b: Mapping[str, ArrayLike],
    clusters: Sequence[Any] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Test whether systems a and b differ on the same queries, with a paired randomisation test over clusters.

    Under the null hypothesis, the sign of each cluster's difference is random. The two-sided p-value is the share of
    sign patterns with an absolute mean difference at least as large as the observed one. If at most 12 clusters differ,
    all patterns are evaluated. Otherwise `num_resamples` random patterns are sampled. If `hits` of them have a
    difference this large, the p-value is (1 + hits) / (1 + num_resamples), which is never 0 (Smucker, Allan and
    Carterette 2007, "A comparison of statistical significance tests for information retrieval evaluation").

    Each score is tested separately. There is no correction for multiple testing. `a` and `b` are the outcomes of the
    two systems on the same queries. `bootstrap_intervals` describes their format and all other arguments.

    Returns:
        `{score name: {"difference", "low", "high", "p_value"}}`. The difference is mean a - mean b, and (low, high) is
        its bootstrap interval.

    Raises:
        ValueError: As in `bootstrap_intervals`, or a and b differ in their names or number of queries.

    >>> paired_test({"R@1": [1, 1, 1, 1, 0]}, {"R@1": [0, 0, 0, 0, 0]})["R@1"]["p_value"]  # 2 of 2^4 sign patterns
    0.125
    """
    if a.keys() != b.keys():
        raise ValueError(f"a has the outcomes {list(a)} and b {list(b)}; both must have the same names")
    differences = {}
    for name in a:
        first, second = np.asarray(a[name], np.float64), np.asarray(b[name], np.float64)
        if first.shape != second.shape:
            raise ValueError(f"a has {len(first)} queries and b {len(second)}; both must have the same queries")
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


def seed_interval(
    values: Sequence[float], recordings: tuple[float, float] | None = None, confidence: float = 0.95
) -> tuple[float, float]:
    """Compute a confidence interval of the mean over runs with several seeds.

    It combines a bootstrap interval over recordings with a t-interval over seeds. Let m be the mean of n runs, s their
    standard deviation, t the quantile with n - 1 degrees of freedom, and (low, high) the bootstrap interval of m over
    recordings. The interval ends are

        m - sqrt(t^2 s^2 / n + (m - low)^2)   and   m + sqrt(t^2 s^2 / n + (high - m)^2),

    as for a sum of two independent errors (MOVER; Zou and Donner 2008, "Construction of confidence limits about effect
    measures: a general approach").

    Args:
        values: Score of each run, or its difference to a baseline, (n,).
        recordings: Bootstrap interval of the mean of `values` over recordings. None: return the t-interval over seeds.

    Raises:
        ValueError: There are fewer than two runs.

    >>> low, high = seed_interval([0.1, 0.2, 0.3], (0.15, 0.25))
    >>> round(low, 3), round(high, 3)
    (-0.053, 0.453)
    """
    from scipy import stats

    count = len(values)
    if count < 2:
        raise ValueError(f"there are {count} runs; an interval over seeds needs two or more")
    mean = float(np.mean(values))
    over_seeds = stats.t.ppf((1 + confidence) / 2, count - 1) * np.std(values, ddof=1) / count**0.5
    low, high = recordings or (mean, mean)
    return mean - float(np.hypot(over_seeds, mean - low)), mean + float(np.hypot(over_seeds, high - mean))


def _sum_clusters(
    outcomes: Mapping[str, ArrayLike], clusters: Sequence[Any] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum the M scores over the queries in each cluster; return the sums (C, M) and the cluster sizes (C,)."""
    columns = {name: np.asarray(values, np.float64) for name, values in outcomes.items()}
    shapes = {name: column.shape for name, column in columns.items()}
    if len({*shapes.values()}) != 1 or max(map(len, shapes.values())) != 1:
        raise ValueError(
            f"outcomes have the shapes {shapes}; give one or more outcomes, each with one number per query"
        )
    for name, column in columns.items():
        bad = np.flatnonzero(~np.isfinite(column))
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}] is {column[bad[0]]}; every outcome must be finite")
    table = np.stack(list(columns.values()), axis=1)  # (Q, M)

    if clusters is None:
        clusters = range(len(table))
    if len(clusters) != len(table):
        raise ValueError(f"got {len(clusters)} clusters for {len(table)} queries; give the cluster of each query")

    order: dict[Any, int] = {}
    numbers = [order.setdefault(cluster, len(order)) for cluster in clusters]
    if len(order) < 2:
        raise ValueError(f"there are {len(order)} clusters of queries; resampling requires two or more")

    sums = np.zeros((len(order), table.shape[1]))
    np.add.at(sums, numbers, table)  # (Q, M) -> (C, M)
    return sums, np.bincount(numbers).astype(np.float64)


def _sign_flip_p_value(differences: NDArray[np.float64], num_resamples: int, seed: int) -> float:
    # The same p-value as `stats.permutation_test`, which is 16 times slower because it sorts to sample signs.
    differing = differences[differences != 0]  # zeros have no sign to flip
    # tolerance for rounding in the sums
    observed = abs(differing.sum()) - 1e-12 * np.abs(differing).sum()
    count = len(differing)

    if count <= _EXACT_CLUSTERS:
        patterns = np.arange(2**count)[:, None] >> np.arange(count) & 1
        return float((np.abs((2 * patterns - 1) @ differing) >= observed).mean())

    rng = np.random.default_rng((seed, 1))  # independent of the bootstrap resamples
    hits = 0
    for start in range(0, num_resamples, step := max(1, _DRAWS // count)):
        shape = (min(step, num_resamples - start), count)
        flipped = rng.integers(0, 2, shape, dtype=np.int8).astype(np.float64)
        hits += int((np.abs(2 * flipped @ differing - differing.sum()) >= observed).sum())
    return (1 + hits) / (1 + num_resamples)
