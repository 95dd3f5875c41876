"""Contrastive losses of the SupCLAP, ATRI and TeminAL papers, as functions of embeddings. They need only torch."""

from .contrastive import info_nce, reweighted_info_nce, sigmoid_loss
from .multilingual import (
    alignment_direction_error,
    by_language,
    cacl_loss,
    data_distribution_error,
    kcl_loss,
    language_distribution_error,
    momentum_error_bound,
    weight_error_bound,
    weight_error_term,
)
from .similarity import similarity_matrix
from .support_vector import DynamicRadius, StaticRadius, radius_constraint, supclap_loss, support_vector_loss
from .temporal import teminal_a_weights, teminal_b_weights, temporal_nce

__all__ = [
    "DynamicRadius",
    "StaticRadius",
    "alignment_direction_error",
    "by_language",
    "cacl_loss",
    "data_distribution_error",
    "info_nce",
    "kcl_loss",
    "language_distribution_error",
    "momentum_error_bound",
    "radius_constraint",
    "reweighted_info_nce",
    "sigmoid_loss",
    "similarity_matrix",
    "supclap_loss",
    "support_vector_loss",
    "teminal_a_weights",
    "teminal_b_weights",
    "temporal_nce",
    "weight_error_bound",
    "weight_error_term",
]
