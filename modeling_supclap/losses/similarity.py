"""Products of embeddings, and which of them are positives: what all losses are made of.

All arithmetic is in float32 or wider, whatever the dtype of the embeddings and under autocast too: at a temperature of
0.07 the spacing of bfloat16 near a cosine of 1 would move the logits by 0.06.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def at_least_float32(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in the widest of their dtypes and float32."""
    if first.dtype == second.dtype == torch.float32:
        return first, second
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return first.to(dtype), second.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products keep their dtype."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()  # a tenth of the time, which is a product's of a small batch
    return torch.autocast(device.type, enabled=False)


def check_pairs(first: Tensor, second: Tensor) -> None:
    """Refuses embeddings that are no batch of pairs.

    Raises:
        ValueError: The shapes differ, or there are fewer than two rows.
    """
    if first.ndim < 2 or second.ndim < 2 or first.shape[-2:] != second.shape[-2:]:
        raise ValueError(
            f"got embeddings of shapes {tuple(first.shape)} and {tuple(second.shape)}; "
            "both must be (N, d), row i of one being the positive of row i of the other"
        )
    if first.shape[-2] < 2:
        raise ValueError(f"got a batch of {first.shape[-2]}; contrast needs two: the negatives are the other clips")


def check_negatives(group_ids: Tensor | None) -> None:
    """Refuses a batch that is one group where the positives are left out of the denominator.

    Raises:
        ValueError: No row has a negative.
    """
    if group_ids is not None and bool((group_ids == group_ids[0]).all()):
        raise ValueError("got one group for the whole batch; a decoupled loss needs a negative in every row")


def similarity_matrix(first: Tensor, second: Tensor) -> Tensor:
    """Cosine of every row of `first` with every row of `second`.

    Args:
        first: (..., N, d), unit norm.
        second: (..., N, d), unit norm; row i is the positive of row i of `first`.

    Returns:
        (..., N, N), float32 or wider: entry [i, j] is `first[i] . second[j]`.

    Raises:
        ValueError: The shapes differ, or there are fewer than two rows.

    >>> similarity_matrix(torch.eye(2), torch.eye(2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    check_pairs(first, second)
    first, second = at_least_float32(first, second)
    with without_autocast(first.device):
        return first @ second.mT  # (..., N, d), (..., N, d) -> (..., N, N)


def positive_mask(size: int, group_ids: Tensor | None, device: torch.device) -> Tensor:
    """Which pairs are positive: the diagonal, or all pairs whose clips share a group.

    Args:
        size: The number of clips, N.
        group_ids: (N,) integers, or None for the diagonal alone.
        device: Where the mask is to be.

    Returns:
        (N, N) bool, symmetric, true on the diagonal.

    Raises:
        ValueError: `group_ids` does not hold one id per clip.

    >>> positive_mask(3, torch.tensor([7, 7, 2]), torch.device("cpu")).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    if group_ids is None:
        return torch.eye(size, dtype=torch.bool, device=device)
    if group_ids.shape != (size,):
        raise ValueError(f"got group_ids of shape {tuple(group_ids.shape)} for {size} clips; give one id per clip")
    group_ids = group_ids.to(device)
    return group_ids.unsqueeze(1) == group_ids


def positive_mean(values: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Mean over the positives of each row of `values` (..., N, N); (..., N). Without groups, the diagonal."""
    if group_ids is None:
        return values.diagonal(dim1=-2, dim2=-1)
    positives = positive_mask(values.shape[-1], group_ids, values.device)
    return values.masked_fill(~positives, 0.0).sum(-1) / positives.sum(-1)
