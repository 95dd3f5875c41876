"""`evaluate.load("metrics/mrv")`: the mean rank variance of `rank_variance.py` as an `evaluate.Metric`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from .rank_variance import mean_rank_variance

_DESCRIPTION = """\
Mean rank variance (MRV): the variance, over languages, of the rank of a query's correct answer, averaged over queries.
It is 0 if every query has the same rank in all languages.
"""

_INPUTS = """
Args:
    predictions: one row of K ranks per query, one for each language; with `ranks`, row numbers.
    ranks: matrix (queries, languages) of all ranks, which is not stored in Arrow.
Returns:
    MRV.
Examples:
    >>> evaluate.load("metrics/mrv").compute(predictions=[[0, 2], [5, 5]])
    {'MRV': 0.5}
"""

_CITATION = """\
@article{yin2025atri,
  title = {ATRI: Mitigating Multilingual Audio Text Retrieval Inconsistencies by Reducing Data Distribution Errors},
  author = {Yin, Yuguo and Xie, Yuxin and Yang, Wenyuan and Yang, Dongchao and Ru, Jinghan and Zhuang, Xianwei and
            Liang, Liming and Zou, Yuexian},
  year = {2025}
}
"""


class MRV(evaluate.Metric):
    """Mean rank variance; see the card, README.md."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features(predictions=datasets.Sequence(datasets.Value("float64"))),
                datasets.Features(predictions=datasets.Value("int64")),
            ],
        )

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> datasets.Features:
        if batch["predictions"] is None or len(batch["predictions"]) == 0:
            raise ValueError("there are no queries; give one or more rows of ranks as predictions")
        return super()._infer_feature_from_batch(batch)

    def _infer_feature_from_example(self, example: dict[str, Any]) -> datasets.Features:
        # A list such as [3, 5] is a row of ranks; an integer is a row number.
        return self.features[0 if np.ndim(example["predictions"]) else 1]

    def _compute(
        self,
        predictions: Sequence[Any],
        ranks: Any = None,
        **kwargs: Any,  # `evaluate.combine` passes the options of all its metrics
    ) -> dict[str, float]:
        if ranks is None:
            return {"MRV": mean_rank_variance(predictions)}
        if np.ndim(predictions[0]) or min(predictions) < 0 or max(predictions) >= len(ranks):
            raise ValueError(
                f"with `ranks`, predictions must be row numbers in 0..{len(ranks) - 1}; the first is {predictions[0]}"
            )
        return {"MRV": mean_rank_variance(np.asarray(ranks)[predictions])}
