"""Gap and Dis (see `distance.py`) as an `evaluate.Metric`, for `evaluate.load("metrics/embedding_gap")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modeling_supclap.metrics import array_metric  # From: supclap
from modeling_supclap.metrics.embedding_gap import gap_and_distance  # From: supclap


class EmbeddingGap(array_metric.ArrayMetric):
    """Gap and Dis: distances between the text embeddings of English and another language.

    Gap is the distance between the mean text embeddings of the two languages. Dis is the mean distance between the
    embeddings of an English sentence and its translation. Both are 0 if the embeddings are equal.

    Args:
        predictions: embeddings of the sentences in the other language, or row indices of `other_embeds`.
        references: embeddings of the English sentences, or row indices of `english_embeds`.
        other_embeds, english_embeds: embedding matrices, which are not stored in Arrow; default None.

    Returns:
        dict with Gap and Dis.

    Examples:
        >>> import evaluate
        >>> embedding_gap = evaluate.load("metrics/embedding_gap")
        >>> embedding_gap.compute(predictions=[[0.0, 1.0], [1.0, 0.0]], references=[[1.0, 0.0], [0.0, 1.0]])["Gap"]
        0.0
    """

    citation_text = array_metric.ATRI
    row_columns = ("predictions", "references")

    def _compute(
        self,
        predictions: Sequence[Any],
        references: Sequence[Any],
        other_embeds: Any = None,
        english_embeds: Any = None,
    ) -> dict[str, float]:
        return gap_and_distance(
            array_metric.take_rows(other_embeds, predictions, "other_embeds"),
            array_metric.take_rows(english_embeds, references, "english_embeds"),
        )
