"""Means and differences with confidence intervals, and their format in tables.

`difference` compares two systems, paired by query, by seed, or by both. All tables format it with `Cell.format`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bootstrap import NUM_RESAMPLES, bootstrap_intervals, paired_test, seed_interval
from .names import MetricName


@dataclass(frozen=True)
class Cell:
    """Number in a table, with its confidence interval.

    Attributes:
        value: A score, a mean over seeds, or a difference.
        low: Lower end of the interval, or None.
        high: Upper end of the interval, or None.
        std: Sample standard deviation over seeds, or None.
    """

    value: float
    low: float | None = None
    high: float | None = None
    std: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def is_above_zero(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def is_below_zero(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high is not None and self.high < 0

    def format(self, metric: MetricName, signed: bool = False) -> str:
        """Format value, standard deviation and interval; `signed` is for differences.

        >>> from modeling_supclap.metrics.names import METRICS
        >>> Cell(0.5, 0.4, 0.6, std=0.1).format(METRICS["top1"]), Cell(0.05, -0.01, 0.11).format(METRICS["top1"], True)
        ('50.0 ± 10.0 (40.0 to 60.0)', '+5.0 (-1.0 to +11.0)')
        """
        text = metric.format(self.value, signed)
        if self.std is not None:
            text += f" ± {metric.format(self.std)}"
        interval = self.format_interval(metric, signed)
        return f"{text} ({interval})" if interval else text

    def format_interval(self, metric: MetricName, signed: bool = False) -> str:
        """Format the interval; "" if there is none."""
        if self.interval is None:
            return ""
        low, high = self.interval
        return f"{metric.format(low, signed)} to {metric.format(high, signed)}"


@dataclass(frozen=True)
class Difference(Cell):
    """Mean difference of two systems, with its interval.

    Attributes:
        values: Difference with each seed.
        recordings: Interval over recordings only, or None.
        p_value: Two-sided p-value of `paired_test`, or None. It requires one run and outcomes per query.
    """

    values: tuple[float, ...] = ()
    recordings: tuple[float, float] | None = None
    p_value: float | None = None


def summarize(
    values: Sequence[float] | NDArray[np.float64],
    recordings: tuple[float, float] | None = None,
    confidence: float = 0.95,
    is_share: bool = False,
) -> Cell:
    """Summarize the score of several runs: mean, standard deviation, and the interval of `seed_interval`.

    Args:
        values: Score of each run, (n,). One run has no standard deviation, and the interval `recordings`.
        recordings: Interval of the mean over recordings, or None.
        is_share: Whether the score is between 0 and 1. The interval is then limited to this range.

    >>> summarize([0.03, 0.0], is_share=True).low
    0.0
    """
    mean = float(np.mean(values))
    if len(values) == 1:
        return Cell(mean, *(recordings or (None, None)))
    low, high = seed_interval(list(values), recordings, confidence)
    if is_share:
        low, high = max(low, 0.0), min(high, 1.0)
    return Cell(mean, low, high, float(np.std(values, ddof=1)))


def difference(
    values: Sequence[float] | NDArray[np.float64],
    others: Sequence[float] | NDArray[np.float64],
    outcomes: ArrayLike | None = None,
    other_outcomes: ArrayLike | None = None,
    clusters: Sequence[Any] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Difference:
    """Compute the mean difference of two systems with its 95 % interval.

    The interval combines the seeds (t-interval of the differences) and the recordings (bootstrap of the differences per
    query, averaged over seeds), as in `seed_interval`. With one run it covers the recordings only, without outcomes the
    seeds only, and with one run and no outcomes there is none.

    Args:
        values: Scores of the first system with n seeds, (n,).
        others: Scores of the second system with the same seeds, (n,).
        outcomes: Score of each query, (n, Q). None: do not pair by query.
        other_outcomes: The same of the second system, (n, Q).
        clusters: Recording of each query, (Q,), or two, (Q, 2). With fewer than 10, the interval covers only the seeds.
        num_resamples: Number of bootstrap resamples, and of random sign patterns of the test.
        seed: Seed of both.

    >>> both = difference([0.6, 0.7, 0.8], [0.5, 0.5, 0.5])
    >>> round(both.value, 3), round(both.low, 3), round(both.high, 3)  # 0.2 ± 4.30 x 0.1 / sqrt(3)
    (0.2, -0.048, 0.448)
    """
    differences = tuple((np.asarray(values, np.float64) - np.asarray(others, np.float64)).tolist())
    mean, recordings, p_value = float(np.mean(differences)), None, None
    if outcomes is not None and other_outcomes is not None and clusters is not None:
        first = np.mean(np.atleast_2d(outcomes), axis=0)  # (n, Q) -> (Q,)
        second = np.mean(np.atleast_2d(other_outcomes), axis=0)
        if len(differences) == 1:
            tested = paired_test({"": first}, {"": second}, clusters, num_resamples, seed=seed)[""]
            low, high, p_value = tested["low"], tested["high"], tested["p_value"]
            recordings = None if low is None or high is None else (low, high)
        else:
            recordings = bootstrap_intervals({"": first - second}, clusters, num_resamples, seed=seed)[""]
    low, high = recordings or (None, None)
    if len(differences) > 1:
        low, high = seed_interval(differences, recordings)
    return Difference(mean, low, high, values=differences, recordings=recordings, p_value=p_value)
