"""Bootstrap confidence intervals of scores, intervals over seeds, and a paired test of two systems.

The captions of one clip are correlated, so resampling single queries would make the intervals too narrow. Therefore
whole clusters (clips with all their queries) are resampled. A resampled score is the mean over the sampled queries,

    score* = sum over clusters c of w_c s_c / sum over c of w_c n_c

where s_c is the sum of the outcomes of the n_c queries in cluster c, and w_c counts how often cluster c was sampled
(multinomial). An outcome is the score of a single query, such as 0 or 1 for R@1.

A query can belong to two units, such as the recordings of a pair. Units are then resampled, and the weight of a query
is the product of the counts of its units (Owen 2007, "The pigeonhole bootstrap").

Few units give no interval, or one that is too narrow: `describe_units` states the rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 1000
"""Default number of bootstrap resamples, and of random sign patterns of the test."""

MIN_UNITS = 10
"""Minimum number of units for an interval. With fewer, the interval misses the truth far too often."""
FEW_UNITS = 30
"""Maximum number of units for which an interval is marked, because it is too narrow."""

# Random numbers per batch. A batch of this size fits into the cache of a core.
_DRAWS = 1 << 18
# Maximum number of differing clusters for the exact test with all 2^n sign patterns.
_EXACT_CLUSTERS = 12


def count_units(clusters: Sequence[Any] | NDArray[Any]) -> int:
    """Count the units of resampling: the distinct clusters. For pairs, at most the number of their recordings.

    >>> count_units(["a", "b", "a"]), count_units([("a", "b"), ("a", "c"), ("b", "c"), ("c", "d"), ("a", "d")])
    (2, 4)
    """
    members = _number_units(clusters)
    return min(int(members.max()) + 1, len(np.unique(members, axis=0)))


def describe_units(count: int | None, unit: str = "units") -> str:
    """Describe the number of units, and whether it is too few for an interval, or few. "" if it is unknown.

    >>> describe_units(40, "recordings"), describe_units(1, "clips")
    ('40 recordings', '1 clip (fewer than 10: no interval)')
    >>> describe_units(12, "recordings")  # the interval is too narrow
    '12 recordings (few units)'
    """
    if count is None:
        return ""
    name = unit if count != 1 else {"classes": "class"}.get(unit, unit.removesuffix("s"))
    if count < MIN_UNITS:
        return f"{count} {name} (fewer than {MIN_UNITS}: no interval)"
    return f"{count} {name} (few units)" if count <= FEW_UNITS else f"{count} {name}"


def list_units(units: Iterable[tuple[int | None, str]]) -> str:
    """Describe the units of several scores in a sentence, each once. "" if all are unknown.

    >>> list_units([(12, "recordings"), (None, "units"), (50, "classes"), (12, "recordings")])
    'Resampled units: 12 recordings (few units); 50 classes.'
    """
    texts = dict.fromkeys(filter(None, itertools.starmap(describe_units, units)))
    return f"Resampled units: {'; '.join(texts)}." if texts else ""


def bootstrap_intervals(
    outcomes: Mapping[str, ArrayLike],
    clusters: Sequence[Any] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, tuple[float, float] | None]:
    """Compute percentile bootstrap intervals of mean outcomes (Efron and Tibshirani 1993, chapter 13).

    With at most 30 clusters, percentile intervals are too narrow. With fewer than 10, there is no interval. If all
    outcomes are equal, the interval has zero width. All scores use the same resamples.

    Args:
        outcomes: `{score name: outcomes}` with one outcome per query, (Q,).
        clusters: Cluster of each query, such as its clip id, (Q,), or its two units, (Q, 2). None: each query is its
            own cluster.

    Returns:
        `{score name: (lower, upper)}`, the ends of the intervals, or `{score name: None}` with fewer than 10 clusters.

    Raises:
        ValueError: There are no outcomes, lengths differ, an outcome is NaN or infinite, or `num_resamples` or
            `confidence` is out of range.

    >>> low, high = bootstrap_intervals({"R@1": [1, 0] * 10}, clusters=[query // 2 for query in range(20)])["R@1"]
    >>> low, high
    (0.5, 0.5)
    >>> bootstrap_intervals({"R@1": [1, 1, 0, 0]}, clusters=["a", "a", "b", "b"])
    {'R@1': None}
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; give 1 or more")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give a value between 0 and 1, such as 0.95")
    sums, sizes, members = _sum_clusters(outcomes, clusters)
    num_units = int(members.max()) + 1
    if min(num_units, len(members)) < MIN_UNITS:
        return dict.fromkeys(outcomes)

    rng, means = np.random.default_rng(seed), []
    for _ in range(num_resamples):
        counts = np.bincount(rng.integers(0, num_units, num_units), minlength=num_units)
        weights = np.append(counts, 1)[members].prod(axis=1)  # (C,); the last count is that of no unit
        if weights.any():  # a resample can lack both recordings of each pair
            means.append(weights @ sums / (weights @ sizes))
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0).tolist()
    return dict(zip(outcomes, zip(low, high, strict=True), strict=True))


def paired_test(
    a: Mapping[str, ArrayLike],
    b: Mapping[str, ArrayLike],
    clusters: Sequence[Any] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, dict[str, float | None]]:
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
        its bootstrap interval, or (None, None) with fewer than 10 clusters. The p-value is valid for any number.

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
    sums, *_ = _sum_clusters(differences, clusters)
    intervals = bootstrap_intervals(differences, clusters, num_resamples, confidence, seed)

    tested: dict[str, dict[str, float | None]] = {}
    for column, name in enumerate(a):
        low, high = intervals[name] or (None, None)
        tested[name] = {
            "difference": float(differences[name].mean()),
            "low": low,
            "high": high,
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


def _number_units(clusters: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    """Number the units of the clusters (Q,) or (Q, K) from 0, and return their numbers, (Q, K), or -1 if repeated."""
    table = np.asarray(clusters)
    order: dict[Any, int] = {}
    numbers = [order.setdefault(cluster, len(order)) for cluster in table.ravel().tolist()]
    members = np.sort(np.reshape(numbers, (len(table), -1)), axis=1)
    members[:, 1:][members[:, 1:] == members[:, :-1]] = -1
    return members


def _sum_clusters(
    outcomes: Mapping[str, ArrayLike], clusters: Sequence[Any] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Sum the M scores over the queries in each cluster.

    Return the sums (C, M), the cluster sizes (C,), and the numbers of the units of each cluster, (C, K).
    """
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
    if not len(table):
        raise ValueError("there are 0 queries; give one or more outcomes")

    if clusters is None:
        clusters = range(len(table))
    if len(clusters) != len(table):
        raise ValueError(f"got {len(clusters)} clusters for {len(table)} queries; give the cluster of each query")

    members, numbers = np.unique(_number_units(clusters), axis=0, return_inverse=True)
    sums = np.zeros((len(members), table.shape[1]))
    np.add.at(sums, numbers.ravel(), table)  # (Q, M) -> (C, M)
    return sums, np.bincount(numbers.ravel()).astype(np.float64), members


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
