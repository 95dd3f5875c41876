"""Base class of the `evaluate.Metric` classes.

`evaluate.load` uses the first Metric subclass in the namespace of a metric file. Therefore the metric files import this
module, never the base class itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np

OPTIONS = frozenset(
    {
        *("k", "map_cutoff", "metrics", "similarity", "query_embeds", "candidate_embeds"),  # recall
        "ranks",  # mrv
        *("other_embeds", "english_embeds"),  # embedding_gap
        *("tasks", "languages", "questions", "opposites"),  # zste
        *("audio_embeds", "text_embeds"),  # clap_score
    }
)
"""Keyword arguments of `compute` of all metrics in this folder, beside `predictions` and `references`."""


class ArrayMetric(evaluate.Metric):
    """Base class of metrics with rows of numbers as input.

    `evaluate` stores the input in Arrow, but not keyword arguments. To save memory, pass an array as a keyword argument
    of `compute`, and its row indices as input.

    The docstring of a subclass up to "Args:" is the description of the metric; the rest describes the inputs.
    """

    citation_text: ClassVar[str] = ""
    # inputs that are rows of numbers or row indices
    row_columns: ClassVar[tuple[str, ...]] = ("predictions",)
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

    def compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, Any] | None:
        """Compute the metric; raise TypeError for an unknown option."""
        return super().compute(predictions=predictions, references=references, **self.select_options(kwargs))

    def select_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of this metric, with tensors as arrays.

        Options of the other metrics in this folder are dropped, because `evaluate.combine` passes all options to every
        metric. Other options raise TypeError.
        """
        known = list(inspect.signature(self._compute).parameters)
        for name in options:
            if name not in known and name not in OPTIONS:
                raise TypeError(f"{self.name} has no option {name!r}; it has {', '.join(known)}")
        return {name: as_array(value) for name, value in options.items() if name in known}

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> datasets.Features:
        empty = [name for name, column in batch.items() if column is None or len(column) == 0]
        if empty:
            raise ValueError(f"{' and '.join(empty)} are missing or empty; give one or more rows of each")
        return super()._infer_feature_from_batch(batch)


def as_array(value: Any) -> Any:
    """Convert a tensor of torch, of any dtype and device, to an array. Other values are returned unchanged."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    # numpy has no bfloat16
    return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()


def take_rows(array: Any, indices: Sequence[Any], name: str) -> Sequence[Any]:
    """Return the array rows with the given indices. If the array is None, `indices` are rows, and are returned.

    Raises:
        ValueError: An index is not in 0..len(array) - 1.
    """
    if array is None:
        return indices
    for index in indices:
        if np.ndim(index) or not 0 <= index < len(array):
            raise ValueError(f"each row index of {name} must be an integer in 0..{len(array) - 1}, not {index}")
    return [as_array(array[index]) for index in indices]


ATRI = """\
@article{yin2025atri,
  title = {ATRI: Mitigating Multilingual Audio Text Retrieval Inconsistencies by Reducing Data Distribution Errors},
  author = {Yin, Yuguo and Xie, Yuxin and Yang, Wenyuan and Yang, Dongchao and Ru, Jinghan and Zhuang, Xianwei and
            Liang, Liming and Zou, Yuexian},
  year = {2025}
}
"""
