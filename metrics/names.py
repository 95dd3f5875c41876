"""Table of metric names: display name, direction and number format of each metric."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

DIRECTIONS = {"t2a": "text to audio", "a2t": "audio to text"}
"""Retrieval directions and their display names."""

RECALL_CUTOFFS = (1, 5, 10)
RETRIEVAL_METRICS = (*(f"R@{k}" for k in RECALL_CUTOFFS), "mAP@10")
"""Metrics in a retrieval table, in column order."""

MORE_RETRIEVAL_METRICS = ("mAP@16", "nDCG@10", "MRR")
"""Retrieval metrics that are computed if they are requested."""


@dataclass(frozen=True)
class MetricName:
    """Display name and number format of a metric."""

    display: str
    higher_is_better: bool = True
    percent: bool = True  # whether to show a fraction in 0..1 as a percentage
    # decimal places; None: three significant digits, and none after the point from 1,000
    digits: int | None = 1

    def format(self, value: float, signed: bool = False) -> str:
        """Format a value as a string, multiplied by 100 if `percent` is set. `signed` adds a plus to positive values.

        >>> METRICS["top1"].format(0.625), METRICS["MRV"].format(0.625), METRICS["top1"].format(0.021, signed=True)
        ('62.5', '0.62', '+2.1')
        >>> NUMBER.format(1234.5), NUMBER.format(0.012345)
        ('1,234', '0.0123')
        """
        value = 100 * value if self.percent else value
        form = f".{self.digits}f"
        if self.digits is None:
            form = ",.0f" if abs(value) >= 1000 else ".3g"
        return f"{value:{'+' if signed else ''}{form}}"


NUMBER = MetricName("", percent=False, digits=None)
"""Format of a logged number or a count."""


_cost = partial(MetricName, higher_is_better=False, percent=False)  # lower is better

METRICS = {
    "top1": MetricName("top-1 accuracy"),
    "top5": MetricName("top-5 accuracy"),
    "mean_per_class": MetricName("accuracy, mean over the classes"),
    "mean_over_folds": MetricName("accuracy, mean over the folds"),
    "mAP": MetricName("mean average precision"),
    "main_score": MetricName("main score"),
    "temporal_accuracy": MetricName("temporal accuracy"),
    "single_accuracy": MetricName("accuracy, single sounds"),
    "combined_accuracy": MetricName("accuracy, two sounds"),
    "forward_accuracy": MetricName("accuracy, forward"),
    "reversed_accuracy": MetricName("accuracy, reversed"),
    "overlaid_accuracy": MetricName("accuracy, overlaid"),
    "order_accuracy": MetricName("order accuracy"),
    "mean_recall": MetricName("mean recall"),
    "MRR": MetricName("mean reciprocal rank"),
    "mean_rank": _cost("mean rank"),
    "median_rank": _cost("median rank", digits=0),
    "MRV": _cost("mean rank variance", digits=2),
    "MSR": _cost("mean squared rank"),
    "clap_score": MetricName("CLAP score", percent=False, digits=3),
    "Gap": _cost("gap to English", digits=3),
    "Dis": _cost("distance to English", digits=3),
    "back_translation": MetricName("similarity after translating back"),
    "train_runtime": _cost("seconds of training and evaluations", digits=0),
    "epoch_runtime": _cost("seconds per epoch, with its evaluation", digits=0),
    "peak_memory_mib": _cost("peak GPU memory in MiB", digits=0),
    "text_trained": _cost("trained parameters, text", digits=0),
    "audio_trained": _cost("trained parameters, audio", digits=0),
    "text_share": MetricName("trained share of the parameters, text", higher_is_better=False, digits=2),
    "audio_share": MetricName("trained share of the parameters, audio", higher_is_better=False, digits=2),
}
"""Display format of each metric. R@k, mAP@k, nDCG@k and the ZSTE tasks are not listed; use `get_metric` for them."""


def get_metric(name: str) -> MetricName:
    """Return the display format of a metric; raise KeyError if the name is unknown.

    `name` is a key of `METRICS`, `R@k`, `mAP@k`, `nDCG@k`, a ZSTE task ("1A" to "5B"), or its order score ("3A_order").

    >>> get_metric("R@10").display, get_metric("Dis").higher_is_better
    ('recall at 10', False)
    """
    if name in METRICS:
        return METRICS[name]
    if cutoff := re.fullmatch(r"(R|mAP|nDCG)@(\d+)", name):
        kind = {"R": "recall", "mAP": "mean average precision", "nDCG": "nDCG"}[cutoff[1]]
        return MetricName(f"{kind} at {cutoff[2]}")
    if task := re.fullmatch("([1-5][A-D])(_order)?", name):
        return MetricName(f"ZSTE {task[1]}, order only" if task[2] else f"ZSTE {task[1]}")
    known = f"{', '.join(METRICS)}, R@k, mAP@k, nDCG@k and ZSTE's tasks"
    raise KeyError(f"unknown metric {name!r}; metrics/names.py has {known}")
