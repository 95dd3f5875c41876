"""Products and positives: their dtypes, one side with itself, and the mean over positives."""

import pytest
import torch
from builders import related_pair, unit_rows

from modeling_supclap.losses import similarity_matrix
from modeling_supclap.losses.similarity import gram_products, positive_mean


def test_similarity_keeps_the_wider_dtype() -> None:
    audio, text = related_pair()
    assert similarity_matrix(audio, text.float()).dtype == torch.float64
    assert similarity_matrix(audio.half(), text.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (700, 4)])  # 700 rows are several blocks
def test_products_of_one_side(shape: tuple[int, ...]) -> None:
    embeds = unit_rows(shape[-2], shape[-1]).expand(shape)
    torch.testing.assert_close(gram_products(embeds), embeds @ embeds.mT, rtol=0, atol=1e-14)


def test_positives_are_the_diagonal_or_a_group() -> None:
    values = torch.arange(9.0).reshape(3, 3)
    assert positive_mean(values).tolist() == [0, 4, 8]
    assert positive_mean(values, torch.tensor([5, 1, 5])).tolist() == [1, 4, 7]
