"""Mean rank variance (MRV): how much the rank of the correct answer varies between languages."""

from .rank_variance import mean_rank_variance

__all__ = ["mean_rank_variance"]
