"""Gap and Dis: distances between the text embeddings of a language and English."""

from .distance import gap_and_distance

__all__ = ["gap_and_distance"]
