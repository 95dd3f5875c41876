"""Products and positives: their dtypes, the gradient of a side with itself, and the mean over positives."""

import pytest
import torch
from builders import related_pair, unit_rows

from modeling_supclap.losses import similarity_matrix
from modeling_supclap.losses.similarity import gram_matrix, positive_mean


def test_similarity_keeps_the_wider_dtype() -> None:
    audio, text = related_pair()
    assert similarity_matrix(audio, text.float()).dtype == torch.float64
    assert similarity_matrix(audio.half(), text.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (300, 4)])  # 300 rows are two blocks of the gradient
def test_gram_matrix_has_the_gradient_of_automatic_differentiation(shape: tuple[int, ...]) -> None:
    embeds = unit_rows(shape[-2], shape[-1]).expand(shape).clone().requires_grad_()
    weights = torch.rand(*shape[:-1], shape[-2], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (found,) = torch.autograd.grad(gram_matrix(embeds), embeds, weights)
    (expected,) = torch.autograd.grad(embeds @ embeds.mT, embeds, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_positives_are_the_diagonal_or_a_group() -> None:
    values = torch.arange(9.0).reshape(3, 3)
    assert positive_mean(values).tolist() == [0, 4, 8]
    assert positive_mean(values, torch.tensor([5, 1, 5])).tolist() == [1, 4, 7]
