"""`evaluate.load("metrics/mrv")`: the mean rank variance of `rank_variance.py` behind `evaluate.Metric`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from .rank_variance import mean_rank_variance

_DESCRIPTION = """\
Mean rank variance (MRV): the variance over languages of the rank of a query's right answer, averaged over the queries.
0 when all languages retrieve alike.
"""

_INPUTS = """
Args:
    predictions: per query one row of K ranks, one for each language; or, with `ranks`, its row number.
    ranks: the ranks of all queries as a matrix (queries, languages), which does not pass through Arrow.
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
            raise ValueError("there are no queries; predictions must hold at least one row of ranks")
        return super()._infer_feature_from_batch(batch)

    def _infer_feature_from_example(self, example: dict[str, Any]) -> datasets.Features:
        # By its form: the ranks of one query [3, 5] are a row, 3 is a row number.
        return self.features[0 if np.ndim(example["predictions"]) else 1]

    def _compute(
        self,
        predictions: Sequence[Any],
        ranks: Any = None,
        **kwargs: Any,  # what `evaluate.combine` hands to all its metrics
    ) -> dict[str, float]:
        if ranks is None:
            return {"MRV": mean_rank_variance(predictions)}
        if np.ndim(predictions[0]) or min(predictions) < 0 or max(predictions) >= len(ranks):
            raise ValueError(
                f"with `ranks`, predictions are its row numbers, from 0 to {len(ranks) - 1}; got {predictions[0]} first"
            )
        return {"MRV": mean_rank_variance(np.asarray(ranks)[predictions])}
