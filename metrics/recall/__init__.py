"""Retrieval metrics (R@k, mAP@10, median and mean rank) and their chance levels."""

from .ranking import LazySimilarity, average_precision, best_ranks, chance_scores, retrieval_outcomes, retrieval_scores
from .relevance import relevant_from_qrels

__all__ = [
    "LazySimilarity",
    "average_precision",
    "best_ranks",
    "chance_scores",
    "relevant_from_qrels",
    "retrieval_outcomes",
    "retrieval_scores",
]
