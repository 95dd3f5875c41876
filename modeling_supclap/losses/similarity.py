"""Unit vectors, similarity matrices and positive-pair masks, used by all losses.

All arithmetic is in float32 or wider, even under autocast and for half-precision embeddings. At a temperature of 0.07,
rounding cosines near 1 to bfloat16 would change the logits by 0.06.
"""

from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_TOLERANCE = 0.01
"""Largest accepted difference of a norm from 1. Normalizing in bfloat16 has an error of up to 0.004."""

_differences: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # on their way from a GPU


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


def unit_norm(embeds: Tensor, normalize: bool | None = False) -> Tensor:
    """Return embeddings (..., d) with unit norm: normalized, or checked.

    On a GPU, the check does not wait for its result: the error is raised by a later call. Compiled functions and CUDA
    graphs have no check. A vector of zeros is accepted, because normalization does not change it.

    Args:
        normalize: Whether to divide the embeddings by their norm. False: check them. None: do neither, because they are
            known to have unit norm.

    Raises:
        ValueError: The norm of an embedding differs from 1 by more than `NORM_TOLERANCE`.

    >>> unit_norm(torch.tensor([[3.0, 4.0]]), normalize=True)
    tensor([[0.6000, 0.8000]])
    """
    if normalize:
        return F.normalize(embeds, dim=-1)
    if normalize is None or torch.compiler.is_compiling() or embeds.device.type not in ("cpu", "cuda"):
        return embeds

    norms = torch.linalg.vector_norm(embeds.detach(), dim=-1)
    difference = torch.linalg.vector_norm(norms - norms.sign(), ord=torch.inf)
    if not embeds.is_cuda:
        _check_difference(difference)
    elif not torch.cuda.is_current_stream_capturing():
        copied = difference.to("cpu", non_blocking=True)
        _differences.append((torch.cuda.current_stream(embeds.device).record_event(), copied))
        while _differences and _differences[0][0].query():
            _check_difference(_differences.popleft()[1])
    return embeds


def _check_difference(difference: Tensor) -> None:
    if difference > NORM_TOLERANCE:
        _differences.clear()  # one error for all batches that are on their way
        raise ValueError(
            f"got embeddings with norms that differ from 1 by up to {difference:.3g} (on a GPU, in this or an earlier "
            "call); losses need unit vectors: normalize them, or pass normalize=True"
        )


def unit_pairs(first: Tensor, second: Tensor, normalize: bool | None = False) -> tuple[Tensor, Tensor]:
    """Check the shapes of paired embeddings, and return them with unit norm (`unit_norm`), in float32 or wider."""
    check_pairs(first, second)
    first, second = at_least_float32(first, second)
    if normalize is None:
        return first, second
    return unit_norm(first, normalize), unit_norm(second, normalize)


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


def positive_mean(values: Tensor, group_ids: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
    """Compute the mean over the positives in each of n `rows` of a matrix, (..., n, N) -> (..., n)."""
    if group_ids is None:
        return values.diagonal(rows.start or 0, -2, -1)
    positives = positive_mask(values.shape[-1], group_ids, values.device, rows)
    return values.masked_fill(~positives, 0.0).sum(-1) / positives.sum(-1)
