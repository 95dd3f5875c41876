"""The two softmax losses on a matrix of similarities, with their gradients written by hand.

Automatic differentiation keeps a matrix for each step from similarities to loss and reads each of them from memory
again. Here the forward pass walks over blocks of rows that stay in a core's cache and keeps the normalisers, (N,), and
the backward pass makes the probabilities anew, block by block, straight into the gradient. On a GPU a block is the
whole matrix. Gradients of gradients are not available.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .similarity import check_negatives, positive_mask

# Entries of a block: 1 MB in float32.
_BLOCK_ENTRIES = 1 << 18


def symmetric_contrast(similarity: Tensor, logit_scale: float | Tensor, group_ids: Tensor | None = None) -> Tensor:
    """InfoNCE, the sum of its two directions, from the similarities themselves; see `info_nce`.

    Args:
        similarity: (..., N, N), [i, j] being audio i against text j; float32 or wider.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        group_ids: (N,) integers; clips with the same id are positives of each other.

    Returns:
        0-d tensor, the mean over the leading dimensions.

    >>> round(symmetric_contrast(torch.eye(2), 1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    scale = torch.as_tensor(logit_scale, dtype=similarity.dtype, device=similarity.device)
    return _SymmetricContrast.apply(similarity, scale, _positive_shares(similarity, group_ids))


def displaced_contrast(
    cross: Tensor, within: Tensor, near: Tensor, far: Tensor, group_ids: Tensor | None = None, decoupled: bool = False
) -> Tensor:
    """Mean over rows of -log softmax of the row's positives, on the logits near_i cross_ij + far_i within_ij.

    Args:
        cross: (..., N, N), anchors . targets; a transposed matrix is read as it lies in memory.
        within: (N, N) or (..., N, N), targets . targets, symmetric.
        near: (..., N), the factor of each row of `cross`.
        far: (..., N), the factor of each row of `within`.
        group_ids: (N,) integers; clips with the same id are positives of each other.
        decoupled: Whether the positives are left out of the denominator.

    Returns:
        0-d tensor, the mean over rows and leading dimensions.

    Raises:
        ValueError: A decoupled row has no negative.

    >>> ones, zeros = torch.ones(2), torch.zeros(2)
    >>> round(displaced_contrast(torch.eye(2), torch.eye(2), ones, zeros).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    left_out = None
    if decoupled:
        check_negatives(group_ids)
        left_out = positive_mask(cross.shape[-1], group_ids, cross.device)

    # Rows that lie across the memory are walked over as the columns they are. `within` is its own transpose.
    dim = -1
    if cross.stride(-1) > cross.stride(-2):
        cross, dim = cross.mT, -2
    shares = _positive_shares(cross, group_ids)
    return _DisplacedContrast.apply(cross, within.expand_as(cross), near, far, shares, left_out, dim)


def _positive_shares(similarity: Tensor, group_ids: Tensor | None) -> Tensor | None:
    """(N, N) the target distribution of each row, uniform over its positives; None where it is the diagonal."""
    if group_ids is None:
        return None
    positives = positive_mask(similarity.shape[-1], group_ids, similarity.device).to(similarity.dtype)
    return positives / positives.sum(-1, keepdim=True)


def _blocks(matrix: Tensor) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each block."""
    size = matrix.shape[-1]
    step = size if matrix.is_cuda else max(1, _BLOCK_ENTRIES // size)
    for start in range(0, size, step):
        yield start, min(step, size - start)


def _positive_logits(block: Tensor, start: int, shares: Tensor | None, dim: int = -1) -> Tensor:
    """The mean over the positives of each row of a block of logits, (..., n)."""
    if shares is None:
        return block.diagonal(start if dim == -1 else -start, -2, -1).clone()
    return (block * shares.narrow(-3 - dim, start, block.shape[-3 - dim])).sum(dim)


def _subtract_positives(block: Tensor, start: int, shares: Tensor | None, weight: Tensor | int, dim: int = -1) -> None:
    """Takes the target distribution, times a weight, from a block of probabilities."""
    if shares is None:
        block.diagonal(start if dim == -1 else -start, -2, -1).sub_(weight)
    else:
        block.sub_(weight * shares.narrow(-3 - dim, start, block.shape[-3 - dim]))


class _SymmetricContrast(torch.autograd.Function):
    """Rows and columns in one walk: columns gather a running maximum and, relative to it, a sum of exponentials."""

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, scale: Tensor, shares: Tensor | None) -> Tensor:
        peak = similarity.new_full((*similarity.shape[:-2], 1, similarity.shape[-1]), -torch.inf)
        mass = torch.zeros_like(peak)
        column_positives = torch.zeros_like(peak)
        total = similarity.new_zeros(())

        for start, count in _blocks(similarity):
            logits = similarity.narrow(-2, start, count) * scale  # (..., n, N)
            positives = _positive_logits(logits, start, shares)
            if shares is None:
                column_positives.squeeze(-2).narrow(-1, start, count).copy_(positives)
            else:
                column_positives += (logits * shares.narrow(-2, start, count)).sum(-2, keepdim=True)

            # The maximum is subtracted before the positive, so that a small loss is not lost to rounding.
            top = logits.amax(-1, keepdim=True)
            total += (top.squeeze(-1) - positives + (logits - top).exp_().sum(-1).log_()).sum()

            higher = torch.maximum(peak, logits.amax(-2, keepdim=True))
            mass = mass * (peak - higher).exp_() + logits.sub_(higher).exp_().sum(-2, keepdim=True)
            peak = higher

        total += (peak - column_positives + mass.log()).sum()
        ctx.save_for_backward(similarity, scale, shares, peak, mass)
        return total / mass.numel()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        similarity, scale, shares, peak, mass = ctx.saved_tensors
        gradient = torch.empty_like(similarity)
        scale_gradient = torch.zeros_like(scale)
        weight = upstream / mass.numel()

        for start, count in _blocks(similarity):
            block = similarity.narrow(-2, start, count)
            logits = block * scale
            # P_rows + P_columns - 2 Y, in place
            error = torch.softmax(logits, -1, out=gradient.narrow(-2, start, count))
            error += logits.sub_(peak).exp_().div_(mass)
            _subtract_positives(error, start, shares, 2)
            error *= weight
            scale_gradient += torch.mul(error, block, out=logits).sum()
            error *= scale
        return gradient, scale_gradient, None


class _DisplacedContrast(torch.autograd.Function):
    """A walk over blocks of anchors, which are the rows (dim -1, that of their targets) or the columns (dim -2)."""

    @staticmethod
    def forward(
        ctx: Any,
        cross: Tensor,
        within: Tensor,
        near: Tensor,
        far: Tensor,
        shares: Tensor | None,
        left_out: Tensor | None,
        dim: int,
    ) -> Tensor:
        total = cross.new_zeros(())
        across = -3 - dim

        for start, count in _blocks(cross):
            own_near, own_far = (each.narrow(-1, start, count).unsqueeze(dim) for each in (near, far))
            logits = cross.narrow(across, start, count) * own_near
            logits.addcmul_(own_far, within.narrow(across, start, count))
            positives = _positive_logits(logits, start, shares, dim)

            if left_out is not None:
                logits.masked_fill_(left_out.narrow(across, start, count), -torch.inf)
            top = logits.amax(dim, keepdim=True)
            total += (top.squeeze(dim) - positives + logits.sub_(top).exp_().sum(dim).log_()).sum()

        ctx.save_for_backward(cross, within, near, far, shares, left_out)
        ctx.dim = dim
        return total / near.numel()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cross, within, near, far, shares, left_out = ctx.saved_tensors
        dim, across = ctx.dim, -3 - ctx.dim
        cross_gradient, within_gradient = torch.empty_like(cross), torch.empty_like(cross)
        near_gradient, far_gradient = torch.empty_like(near), torch.empty_like(far)
        weight = upstream / near.numel()

        for start, count in _blocks(cross):
            own_near, own_far = (each.narrow(-1, start, count).unsqueeze(dim) for each in (near, far))
            block, inner = cross.narrow(across, start, count), within.narrow(across, start, count)
            error = torch.addcmul(block * own_near, own_far, inner)

            # logits -> P - Y, in place
            if left_out is not None:
                error.masked_fill_(left_out.narrow(across, start, count), -torch.inf)
            error.sub_(error.amax(dim, keepdim=True)).exp_()
            error *= weight / error.sum(dim, keepdim=True)
            _subtract_positives(error, start, shares, weight, dim)

            for factor, values, factor_gradient, matrix_gradient in (
                (own_near, block, near_gradient, cross_gradient),
                (own_far, inner, far_gradient, within_gradient),
            ):
                product = torch.mul(error, values, out=matrix_gradient.narrow(across, start, count))
                factor_gradient.narrow(-1, start, count).copy_(product.sum(dim))
                torch.mul(error, factor, out=product)
        return cross_gradient, within_gradient, near_gradient, far_gradient, None, None, None
