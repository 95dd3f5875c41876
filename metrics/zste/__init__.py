"""Zero-shot temporal evaluation (ZSTE): recognise the sounds in a clip and their order."""

from .temporal_questions import zste_chance, zste_order_outcomes, zste_outcomes, zste_ranks, zste_scores

__all__ = ["zste_chance", "zste_order_outcomes", "zste_outcomes", "zste_ranks", "zste_scores"]
