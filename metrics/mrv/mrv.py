"""`evaluate.load("metrics/mrv")`: the mean rank variance of `rank_variance.py` behind `evaluate.Metric`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from .rank_variance import mean_rank_variance

_DESCRIPTION = """\
Mean rank variance (MRV): the variance over languages of the rank of a query's right answer, averaged over the queries.
0 when all languages retrieve alike.
"""

_INPUTS = """
Args:
    predictions: per query one row of K ranks, one for each language.
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
            features=datasets.Features(predictions=datasets.Sequence(datasets.Value("float64"))),
        )

    def _compute(
        self,
        predictions: Sequence[Sequence[float]],
        **kwargs: Any,  # what `evaluate.combine` hands to all its metrics
    ) -> dict[str, float]:
        return {"MRV": mean_rank_variance(predictions)}
