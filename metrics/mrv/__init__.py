"""Mean rank variance: does a question get the same rank in every language?"""

from .rank_variance import mean_rank_variance

__all__ = ["mean_rank_variance"]
