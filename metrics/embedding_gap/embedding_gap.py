"""`evaluate.load("metrics/embedding_gap")`: Gap and Dis of `distance.py` as an `evaluate.Metric`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from .distance import gap_and_distance

_DESCRIPTION = """\
Gap and Dis: the distance between the mean text embeddings of English and another language, and the mean distance
between the embeddings of an English sentence and its translation. Both are 0 if the embeddings coincide.
"""

_INPUTS = """
Args:
    predictions: embeddings of the sentences in the other language; with `other_embeds`, row numbers.
    references: embeddings of the sentences in English; with `english_embeds`, row numbers.
    other_embeds, english_embeds: matrices of the embeddings, which are not stored in Arrow.
Returns:
    Gap, Dis.
Examples:
    >>> embedding_gap = evaluate.load("metrics/embedding_gap")
    >>> embedding_gap.compute(predictions=[[0.0, 1.0], [1.0, 0.0]], references=[[1.0, 0.0], [0.0, 1.0]])["Gap"]
    0.0
"""

_CITATION = """\
@article{yin2025atri,
  title = {ATRI: Mitigating Multilingual Audio Text Retrieval Inconsistencies by Reducing Data Distribution Errors},
  author = {Yin, Yuguo and Xie, Yuxin and Yang, Wenyuan and Yang, Dongchao and Ru, Jinghan and Zhuang, Xianwei and
            Liang, Liming and Zou, Yuexian},
  year = {2025}
}
"""


class EmbeddingGap(evaluate.Metric):
    """Gap and Dis; see the card, README.md."""

    def _info(self) -> evaluate.MetricInfo:
        embedding, row = datasets.Sequence(datasets.Value("float64")), datasets.Value("int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features(predictions=embedding, references=embedding),
                datasets.Features(predictions=row, references=row),
            ],
        )

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> datasets.Features:
        for column in batch.values():
            if column is None or len(column) == 0:
                raise ValueError("predictions or references are missing or empty; give one of each per sentence")
        return super()._infer_feature_from_batch(batch)

    def _compute(
        self,
        predictions: Sequence[Any],
        references: Sequence[Any],
        other_embeds: Any = None,
        english_embeds: Any = None,
        **kwargs: Any,  # `evaluate.combine` passes the options of all its metrics
    ) -> dict[str, float]:
        if other_embeds is None and english_embeds is None:
            return gap_and_distance(predictions, references)
        return gap_and_distance(
            _rows(other_embeds, predictions, "other_embeds"), _rows(english_embeds, references, "english_embeds")
        )


def _rows(embeds: Any, numbers: Sequence[int], name: str) -> Any:
    if embeds is None:
        raise ValueError(f"{name} is missing; give both other_embeds and english_embeds, or neither")
    if np.ndim(numbers[0]) or min(numbers) < 0 or max(numbers) >= len(embeds):
        raise ValueError(
            f"with {name}, predictions or references must be row numbers in 0..{len(embeds) - 1}; the first is "
            f"{numbers[0]}"
        )
    return np.asarray(embeds)[numbers]
