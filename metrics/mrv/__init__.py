"""Mean rank variance (MRV): variance of a query's rank over languages."""

from .rank_variance import mean_rank_variance

__all__ = ["mean_rank_variance"]
