"""Model cards: describe a model's components, training data, license and scores, and how to reproduce it."""

from ..conversion.provenance import Origin, license_of, origins
from .card import citations, is_untouched, model_card, push_to_hub, write_card, write_card_of_run
from .facts import CardFacts, facts_of_run
from .results import CardScore, get_card_scores

__all__ = [
    "CardFacts",
    "CardScore",
    "Origin",
    "citations",
    "facts_of_run",
    "get_card_scores",
    "is_untouched",
    "license_of",
    "model_card",
    "origins",
    "push_to_hub",
    "write_card",
    "write_card_of_run",
]
