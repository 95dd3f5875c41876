"""Gap and Dis: distances between the text embeddings of English and another language."""

from .distance import gap_and_distance

__all__ = ["gap_and_distance"]
