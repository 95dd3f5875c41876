"""Mean rank variance (see `rank_variance.py`) as an `evaluate.Metric`, for `evaluate.load("metrics/mrv")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

from modeling_supclap.metrics import array_metric  # From: supclap
from modeling_supclap.metrics.mrv import mean_rank_variance  # From: supclap


class MRV(array_metric.ArrayMetric):
    """Mean rank variance (MRV).

    The correct answer of a query has a rank in each language. MRV is the variance of these ranks, averaged over
    queries. It is 0 if every query has the same rank in all languages.

    Args:
        predictions: one row per query with its rank in each of K languages, or row indices of `ranks`.
        ranks: rank matrix (queries, languages), which is not stored in Arrow; default None.

    Returns:
        dict with MRV.

    Examples:
        >>> import evaluate
        >>> evaluate.load("metrics/mrv").compute(predictions=[[0, 2], [5, 5]])
        {'MRV': 0.5}
    """

    citation_text = array_metric.ATRI

    def _infer_feature_from_example(self, example: dict[str, Any]) -> datasets.Features:
        # A list such as [3, 5] is a row of ranks; an integer is a row index.
        return self.features[0 if np.ndim(example["predictions"]) else 1]

    def _compute(self, predictions: Sequence[Any], ranks: Any = None) -> dict[str, float]:
        return {"MRV": mean_rank_variance(array_metric.take_rows(ranks, predictions, "ranks"))}
