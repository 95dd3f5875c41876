"""Mean and last-token pooling ignore padding."""

import torch

from modeling_supclap.pooling import last_pool, mean_pool


def test_mean_pool_is_the_mean_of_real_tokens():
    hidden = torch.randn(3, 5, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]])
    pooled = mean_pool(hidden, mask)
    for row, length in enumerate([5, 1, 3]):
        torch.testing.assert_close(pooled[row], sum(hidden[row, :length]) / length)
    assert torch.equal(mean_pool(hidden, None), mean_pool(hidden, torch.ones(3, 5)))


def test_mean_pool_of_nothing_is_zero_and_padding_may_be_anything():
    hidden = torch.full((2, 2, 3), torch.nan)
    hidden[1, 0] = 1.0
    assert mean_pool(hidden, torch.tensor([[0, 0], [1, 0]])).tolist() == [[0, 0, 0], [1, 1, 1]]


def test_last_pool_takes_the_last_real_token_on_either_side():
    hidden = torch.arange(8.0).reshape(2, 4, 1)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]])
    assert last_pool(hidden, mask).tolist() == [[1], [7]]
    assert last_pool(hidden, None).tolist() == [[3], [7]]
