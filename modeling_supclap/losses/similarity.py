"""Similarity matrices and masks of positive pairs, which all losses share.

All arithmetic is in float32 or wider, for every dtype of the embeddings and under autocast. At a temperature of 0.07
the spacing of bfloat16 near a cosine of 1 would change the logits by 0.06.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def at_least_float32(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both tensors to the widest of their dtypes and float32."""
    if first.dtype == second.dtype == torch.float32:
        return first, second
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return first.to(dtype), second.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, so that matrix products keep their dtype."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()  # ten times faster than a disabled autocast, which costs as much as a small product
    return torch.autocast(device.type, enabled=False)


def check_pairs(first: Tensor, second: Tensor) -> None:
    """Raise if the embeddings are not a batch of pairs.

    Raises:
        ValueError: The shapes differ, or there are fewer than two rows.
    """
    if first.ndim < 2 or second.ndim < 2 or first.shape[-2:] != second.shape[-2:]:
        raise ValueError(
            f"got embeddings of shapes {tuple(first.shape)} and {tuple(second.shape)}; "
            "both must be (N, d), and row i of one is the positive of row i of the other"
        )
    if first.shape[-2] < 2:
        raise ValueError(
            f"got a batch of {first.shape[-2]}; a contrastive loss needs at least two clips, "
            "because the other clips are the negatives"
        )


def check_negatives(group_ids: Tensor | None) -> None:
    """Raise if the whole batch is one group, so that a decoupled loss has an empty denominator.

    Raises:
        ValueError: No row has a negative.
    """
    if group_ids is not None and bool((group_ids == group_ids[0]).all()):
        raise ValueError("got one group for the whole batch; a decoupled loss needs a negative in every row")


def similarity_matrix(first: Tensor, second: Tensor) -> Tensor:
    """Compute the cosine of every row of `first` with every row of `second`.

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
    """Return the mask of positive pairs: the diagonal, or all pairs of clips with the same group id.

    Args:
        size: Number of clips, N.
        group_ids: (N,) integers; None: the diagonal only.
        device: Device of the mask.

    Returns:
        (N, N) bool, symmetric, True on the diagonal.

    Raises:
        ValueError: `group_ids` is not (N,).

    >>> positive_mask(3, torch.tensor([7, 7, 2]), torch.device("cpu")).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    if group_ids is None:
        return torch.eye(size, dtype=torch.bool, device=device)
    if group_ids.shape != (size,):
        raise ValueError(f"got group_ids of shape {tuple(group_ids.shape)} for {size} clips; expected one id per clip")
    group_ids = group_ids.to(device)
    return group_ids.unsqueeze(1) == group_ids


def positive_mean(values: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Compute the mean over the positives of each row; without groups, return the diagonal.

    (..., N, N) -> (..., N)
    """
    if group_ids is None:
        return values.diagonal(dim1=-2, dim2=-1)
    positives = positive_mask(values.shape[-1], group_ids, values.device)
    return values.masked_fill(~positives, 0.0).sum(-1) / positives.sum(-1)
