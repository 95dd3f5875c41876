"""Gap and Dis: how far a language's text embeddings lie from the English ones."""

from .distance import gap_and_distance

__all__ = ["gap_and_distance"]
