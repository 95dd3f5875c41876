"""Similarity matrices and positive-pair masks, used by all losses.

All arithmetic is in float32 or wider, even under autocast and for half-precision embeddings. At a temperature of 0.07,
rounding cosines near 1 to bfloat16 would change the logits by 0.06.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both tensors to float32, or to a wider dtype if one of them has it."""
    if first.dtype == second.dtype == torch.float32:
        return first, second
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return first.to(dtype), second.to(dtype)


def check_pairs(first: Tensor, second: Tensor) -> None:
    """Raise ValueError if the shapes of the embeddings differ, or if there are fewer than two rows."""
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
    """Raise ValueError if all clips have the same group id, because a decoupled loss then has no negatives."""
    if group_ids is not None and bool((group_ids == group_ids[0]).all()):
        raise ValueError("all clips of the batch have the same group id; a decoupled loss needs negatives")


def similarity_matrix(first: Tensor, second: Tensor) -> Tensor:
    """Compute the cosine similarity between all rows of `first` and all rows of `second`.

    Both are (..., N, d) with unit norm, and row i of `second` is the positive of row i of `first`.

    Returns:
        (..., N, N), float32 or wider; entry [i, j] is `first[i] . second[j]`.

    Raises:
        ValueError: The shapes differ, or there are fewer than two rows.

    >>> similarity_matrix(torch.eye(2), torch.eye(2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    check_pairs(first, second)
    first, second = at_least_float32(first, second)
    with torch.autocast(first.device.type, enabled=False):
        return first @ second.mT  # (..., N, d), (..., N, d) -> (..., N, N)


def positive_mask(size: int, group_ids: Tensor | None, device: torch.device, rows: slice = slice(None)) -> Tensor:
    """Build a boolean mask of positive pairs: the diagonal, or all pairs of clips with the same group id.

    Args:
        size: N, the number of clips.
        rows: Rows of the (N, N) mask to return; all by default.

    Raises:
        ValueError: `group_ids` does not have shape (N,).

    >>> positive_mask(3, torch.tensor([7, 7, 2]), torch.device("cpu")).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    ids = torch.arange(size, device=device) if group_ids is None else group_ids.to(device)
    if ids.shape != (size,):
        raise ValueError(f"got group_ids of shape {tuple(ids.shape)} for {size} clips; expected one id per clip")
    return ids[rows].unsqueeze(1) == ids


def positive_mean(values: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Compute the mean over the positives in each row of a matrix, (..., N, N) -> (..., N)."""
    if group_ids is None:
        return values.diagonal(dim1=-2, dim2=-1)
    positives = positive_mask(values.shape[-1], group_ids, values.device)
    return values.masked_fill(~positives, 0.0).sum(-1) / positives.sum(-1)
