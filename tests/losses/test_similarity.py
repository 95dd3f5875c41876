"""Similarities have the wider dtype, and the mean over positives."""

import torch
from builders import related_pair

from modeling_supclap.losses import similarity_matrix
from modeling_supclap.losses.similarity import positive_mean


def test_similarity_keeps_the_wider_dtype() -> None:
    audio, text = related_pair()
    assert similarity_matrix(audio, text.float()).dtype == torch.float64
    assert similarity_matrix(audio.half(), text.bfloat16()).dtype == torch.float32


def test_positives_are_the_diagonal_or_a_group() -> None:
    values = torch.arange(9.0).reshape(3, 3)
    assert positive_mean(values).tolist() == [0, 4, 8]
    assert positive_mean(values, torch.tensor([5, 1, 5])).tolist() == [1, 4, 7]
