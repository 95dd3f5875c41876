"""ZSTE, the zero-shot temporal evaluation: which sounds a clip contains, and in which order."""

from .temporal_questions import (
    zste_chance,
    zste_order_outcomes,
    zste_outcomes,
    zste_ranks,
    zste_scores,
    zste_scores_by_language,
)

__all__ = [
    "zste_chance",
    "zste_order_outcomes",
    "zste_outcomes",
    "zste_ranks",
    "zste_scores",
    "zste_scores_by_language",
]
