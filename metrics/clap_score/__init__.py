"""CLAP score: similarity of sounds and the texts that they were generated from."""

from .pairs import pair_similarity

__all__ = ["pair_similarity"]
