"""Base class of the four `evaluate.Metric`s.

`evaluate.load` takes the first subclass of Metric that a metric's file names. So the files import this module, never
the class by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np


class ArrayMetric(evaluate.Metric):
    """Metric of rows of numbers, or of the row numbers of an array that `compute` gets as a keyword.

    Arrays among the keywords do not pass through Arrow. `_compute` takes `**kwargs`, because `evaluate.combine` passes
    the keywords of all its metrics.

    A subclass documents itself in its docstring: `evaluate` shows it up to "Args:" as the description and the rest as
    the inputs.

    Attributes:
        citation_text: BibTeX.
        row_columns: Inputs that are rows of numbers, or row numbers.
        other_columns: Features of the other inputs.
    """

    citation_text: ClassVar[str] = ""
    row_columns: ClassVar[tuple[str, ...]] = ("predictions",)
    other_columns: ClassVar[dict[str, Any]] = {}

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


def take_rows(array: Any, numbers: Sequence[int], name: str) -> list[Any]:
    """Return rows of an array by their numbers.

    Raises:
        ValueError: The numbers are no row numbers of the array `name`.
    """
    if np.ndim(numbers[0]) or min(numbers) < 0 or max(numbers) >= len(array):
        raise ValueError(
            f"with {name}, the input must be row numbers in 0..{len(array) - 1}; the first is {numbers[0]}"
        )
    return [array[number] for number in numbers]


ATRI = """\
@article{yin2025atri,
  title = {ATRI: Mitigating Multilingual Audio Text Retrieval Inconsistencies by Reducing Data Distribution Errors},
  author = {Yin, Yuguo and Xie, Yuxin and Yang, Wenyuan and Yang, Dongchao and Ru, Jinghan and Zhuang, Xianwei and
            Liang, Liming and Zou, Yuexian},
  year = {2025}
}
"""
