"""Mean rank variance (MRV): variance over languages of the rank of a query's correct answer."""

from .rank_variance import mean_rank_variance

__all__ = ["mean_rank_variance"]
