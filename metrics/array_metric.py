"""Base class of the four `evaluate.Metric` classes.

`evaluate.load` uses the first Metric subclass in the namespace of a metric file. Therefore the metric files import this
module, never the base class itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np


class ArrayMetric(evaluate.Metric):
    """Base class of metrics with rows of numbers as input.

    `evaluate` stores the input in Arrow, but not keyword arguments. To save memory, pass an array as a keyword argument
    of `compute`, and its row indices as input.

    The docstring of a subclass up to "Args:" is the description of the metric; the rest describes the inputs.
    `_compute` accepts `**kwargs` because `evaluate.combine` passes all keyword arguments to every metric.
    """

    citation_text: ClassVar[str] = ""
    row_columns: ClassVar[tuple[str, ...]] = ("predictions",)  # inputs that are rows of numbers or row indices
    other_columns: ClassVar[dict[str, Any]] = {}  # name -> feature of `datasets`

    def _info(self) -> evaluate.MetricInfo:
        description, _, inputs = inspect.cleandoc(type(self).__doc__ or "").partition("Args:")
        features = []
        for kind in (datasets.Sequence(datasets.Value("float64")), datasets.Value("int64")):
            features.append(datasets.Features({**dict.fromkeys(self.row_columns, kind), **self.other_columns}))
        return evaluate.MetricInfo(
            description=description,
            citation=self.citation_text,
            inputs_description=f"Args:{inputs}",
            features=features,
        )

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> datasets.Features:
        empty = [name for name, column in batch.items() if column is None or len(column) == 0]
        if empty:
            raise ValueError(f"{' and '.join(empty)} are missing or empty; give one or more rows of each")
        return super()._infer_feature_from_batch(batch)


def take_rows(array: Any, indices: Sequence[int], name: str) -> list[Any]:
    """Return the array rows with the given indices; raise ValueError if an index is not in 0..len(array) - 1."""
    for index in indices:
        if np.ndim(index) or not 0 <= index < len(array):
            raise ValueError(f"each row index of {name} must be an integer in 0..{len(array) - 1}, not {index}")
    return [array[index] for index in indices]


ATRI = """\
@article{yin2025atri,
  title = {ATRI: Mitigating Multilingual Audio Text Retrieval Inconsistencies by Reducing Data Distribution Errors},
  author = {Yin, Yuguo and Xie, Yuxin and Yang, Wenyuan and Yang, Dongchao and Ru, Jinghan and Zhuang, Xianwei and
            Liang, Liming and Zou, Yuexian},
  year = {2025}
}
"""
