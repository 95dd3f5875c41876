"""ZSTE scores (see `temporal_questions.py`) as an `evaluate.Metric`, for `evaluate.load("metrics/zste")`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import datasets

from modeling_supclap.metrics import array_metric  # From: supclap
from modeling_supclap.metrics.zste import zste_scores  # From: supclap


class ZSTE(array_metric.ArrayMetric):
    """Zero-shot temporal evaluation (ZSTE): recognise the sounds in a clip and their order.

    There are eleven tasks, 1A to 5B, and each has an exact chance level. Ties count against the model. If languages are
    passed, the metric also computes scores per language and the mean rank variance (MRV) over languages.

    Args:
        predictions: one row per question with the candidate scores (higher is closer), or row indices of `similarity`.
        references: list with the correct candidates of each question: one (tasks 1, 3, 4) or two (tasks 2, 5).
        tasks: task of each question, "1A" to "5B".
        similarity: rows of scores, which are not stored in Arrow; default None.
        languages: language of each question, in the order in which the questions were added.
        questions: id of each question; translations of a question have the same id.
        opposites: for each question, the index of the candidate with the opposite order of the same sounds, or None.

    Returns:
        dict with score (3A), chance level (3A_chance) and number of questions (3A_questions) of each task. If opposites
        are passed, it also contains the order score and its chance level (3A_order, 3A_order_chance). If languages are
        passed, these keys start with the language (fra_3A, ...), and 3A_MRV, 3A_MRV_chance and 3A_MRV_questions are
        added.

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
    ) -> dict[str, float]:
        scores = array_metric.take_rows(similarity, predictions, "similarity")
        return zste_scores(scores, references, tasks, opposites, languages, questions)
