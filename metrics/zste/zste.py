"""`evaluate.load("metrics/zste")`: the scores of `temporal_questions.py` as an `evaluate.Metric`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import datasets

from modeling_supclap.metrics import array_metric
from modeling_supclap.metrics.zste import zste_scores, zste_scores_by_language


class ZSTE(array_metric.ArrayMetric):
    """ZSTE, the zero-shot temporal evaluation: recognition of the sounds in a clip and of their order.

    It has eleven tasks, 1A to 5B, each with its exact chance level. Ties count against the model. With languages, it
    also computes the scores of each language, and the variance of the correct answer's rank over languages.

    Args:
        predictions: scores of each question's candidates (floats, higher is closer); with `similarity`, row numbers.
        references: list of each question's correct candidates, one (tasks 1, 3, 4) or two (tasks 2, 5).
        tasks: task of each question, "1A" to "5B".
        similarity: rows of scores, which are not stored in Arrow.
        languages: language of each question, in the order in which the questions were added.
        questions: id of each question, equal in all languages.
        opposites: each question's candidate with the opposite order of the same sounds, or None.

    Returns:
        For each task present its score (3A), chance level (3A_chance) and number of questions (3A_questions); with
        opposites the share that prefers the correct order (3A_order, 3A_order_chance); with languages these for each
        language (fra_3A, ...) and 3A_MRV, 3A_MRV_chance, 3A_MRV_questions.

    Examples:
        >>> import evaluate
        >>> zste = evaluate.load("metrics/zste")
        >>> zste.compute(predictions=[[0.1, 0.9, 0.3]], references=[[1]], tasks=["3A"])["3A"]
        1.0
    """

    citation_text = """\
@article{sinha_teminal,
  title = {Temporal Enhancement of Contrastive Audio-Language Models through Self-Supervised Post-Training with
           Text-Audio Pairs},
  author = {Sinha, Anshuman and Migozzi, Camille and Rey, Aubin and Zhang, Chao}
}
"""
    other_columns: ClassVar = {
        "references": datasets.Sequence(datasets.Value("int64")),
        "tasks": datasets.Value("string"),
    }

    def _compute(
        self,
        predictions: Sequence[Any],
        references: Sequence[Sequence[int]],
        tasks: Sequence[str],
        similarity: Sequence[Sequence[float]] | None = None,
        languages: Sequence[str] | None = None,
        questions: Sequence[Hashable] | None = None,
        opposites: Sequence[int | None] | None = None,
        **kwargs: Any,
    ) -> dict[str, float]:
        scores = predictions if similarity is None else array_metric.take_rows(similarity, predictions, "similarity")
        if languages is None:
            return zste_scores(scores, references, tasks, opposites)
        return zste_scores_by_language(scores, references, tasks, languages, questions, opposites)
