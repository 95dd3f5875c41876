"""The two softmax losses on a matrix of similarities, with their gradients written by hand.

Automatic differentiation keeps a matrix for each step from similarities to loss and reads each of them from memory
again. Here both passes walk over blocks of rows that stay in a core's cache, and what is kept is a few multiplications
from the gradient. On a GPU a block is the whole matrix. Gradients of gradients are not available.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .similarity import (
    at_least_float32,
    check_negatives,
    gram_products,
    positive_mask,
    positive_mean,
    without_autocast,
)

# Up to so many rows a loss is written as its formula reads: a few operations more cost more there than memory does.
FEW_ROWS = 256
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
    if similarity.shape[-1] <= FEW_ROWS:
        logits = logit_scale * similarity
        return -positive_mean(logits.log_softmax(-1) + logits.log_softmax(-2), group_ids).mean()
    scale = torch.as_tensor(logit_scale, dtype=similarity.dtype, device=similarity.device)
    return _SymmetricContrast.apply(similarity, scale, _positive_shares(similarity, group_ids))


def displaced_contrast(
    cross: Tensor,
    targets: Tensor,
    near: Tensor,
    far: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None = None,
    decoupled: bool = False,
) -> Tensor:
    """Mean over rows of -log softmax of the row's positives, for the anchors near_i anchors_i + far_i targets_i.

    Args:
        cross: (..., N, N), anchors . targets; a transposed matrix is read as it lies in memory.
        targets: (N, d) or (..., N, d), whose products with themselves are made here.
        near: (..., N), the factor of each row of `cross`.
        far: (..., N), the factor of each row of those products.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        group_ids: (N,) integers; clips with the same id are positives of each other.
        decoupled: Whether the positives are left out of the denominator.

    Returns:
        0-d tensor, the mean over rows and leading dimensions.

    Raises:
        ValueError: A decoupled row has no negative.

    >>> ones, zeros = torch.ones(2), torch.zeros(2)
    >>> round(displaced_contrast(torch.eye(2), torch.eye(2), ones, zeros, 1.0).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    cross, targets = at_least_float32(cross, targets)
    scale = torch.as_tensor(logit_scale, dtype=near.dtype, device=near.device)
    left_out = None
    if decoupled:
        check_negatives(group_ids)
        left_out = positive_mask(cross.shape[-1], group_ids, cross.device)

    # Rows that lie across the memory are walked over as the columns they are.
    dim = -1
    if cross.stride(-1) > cross.stride(-2):
        cross, dim = cross.mT, -2
    shares = _positive_shares(cross, group_ids)
    with without_autocast(cross.device):
        return _DisplacedContrast.apply(cross, targets, near, far, scale, shares, left_out, dim)


def _positive_shares(similarity: Tensor, group_ids: Tensor | None) -> Tensor | None:
    """(N, N) the target distribution of each row, uniform over its positives; None where it is the diagonal."""
    if group_ids is None:
        return None
    positives = positive_mask(similarity.shape[-1], group_ids, similarity.device).to(similarity.dtype)
    return positives / positives.sum(-1, keepdim=True)


def _blocks(matrix: Tensor, together: int = 1) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each block, or of so many of them together."""
    size = matrix.shape[-1]
    step = size if matrix.is_cuda else max(1, together * _BLOCK_ENTRIES // size)
    for start in range(0, size, step):
        yield start, min(step, size - start)


def _positive_logits(block: Tensor, start: int, shares: Tensor | None, dim: int = -1) -> Tensor:
    """The mean over the positives of each row of a block of logits, (..., n)."""
    if shares is None:
        return block.diagonal(start if dim == -1 else -start, -2, -1).clone()
    return (block * shares.narrow(-3 - dim, start, block.shape[-3 - dim])).sum(dim)


def _subtract_positives(block: Tensor, start: int, shares: Tensor | None, weight: Tensor, dim: int = -1) -> None:
    """Takes the target distribution from a block of probabilities, times a weight: one number, or one a row."""
    if shares is None:
        block.diagonal(start if dim == -1 else -start, -2, -1).sub_(weight.squeeze(dim) if weight.ndim else weight)
    else:
        block.sub_(weight * shares.narrow(-3 - dim, start, block.shape[-3 - dim]))


class _SymmetricContrast(torch.autograd.Function):
    """Softmax over rows and over columns; kept are the similarities, and the maximum and the sum of each of both."""

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, scale: Tensor, shares: Tensor | None) -> Tensor:
        top, peak = similarity.amax(-1, keepdim=True), similarity.amax(-2, keepdim=True)  # (..., N, 1), (..., 1, N)
        row_mass, column_mass = torch.empty_like(top), torch.zeros_like(peak)
        # How far the positives are below the two maxima: exact where the pairs are good and the difference is small.
        lifts = top.squeeze(-1) + peak.squeeze(-2)

        for start, count in _blocks(similarity):
            block = similarity.narrow(-2, start, count)
            lifts.narrow(-1, start, count).sub_(2 * _positive_logits(block, start, shares))
            per_row = _exponentials(block, top.narrow(-2, start, count), scale)
            row_mass.narrow(-2, start, count).copy_(per_row.sum(-1, keepdim=True))
            column_mass += _exponentials(block, peak, scale).sum(-2, keepdim=True)

        ctx.save_for_backward(similarity, scale, shares, top, peak, row_mass, column_mass)
        total = row_mass.log().sum() + column_mass.log().sum() + scale * lifts.sum()
        return total / top.numel()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        similarity, scale, shares, top, peak, row_mass, column_mass = ctx.saved_tensors
        gradient = torch.empty_like(similarity)
        scale_gradient = torch.zeros_like(scale)
        weight = upstream * scale / row_mass.numel()
        rows, columns = weight / row_mass, weight / column_mass

        for start, count in _blocks(similarity):
            block, own = similarity.narrow(-2, start, count), slice(start, start + count)
            # P_rows + P_columns - 2 Y
            per_row, error = _exponentials(block, top[..., own, :], scale), gradient.narrow(-2, start, count)
            torch.mul(per_row, rows[..., own, :], out=error).addcmul_(_exponentials(block, peak, scale), columns)
            _subtract_positives(error, start, shares, 2 * weight)
            scale_gradient += (error * block).sum()
        return gradient, scale_gradient / scale, None


def _exponentials(block: Tensor, maxima: Tensor, scale: Tensor) -> Tensor:
    return (block - maxima).mul_(scale).exp_()


class _DisplacedContrast(torch.autograd.Function):
    """A walk over blocks of anchors, which are the rows (dim -1, that of their targets) or the columns (dim -2).

    What is kept is the gradient of the logits but for a factor a row, mass (P - Y), of which those of all inputs are
    multiples and sums. It takes the place of the products of the targets.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cross: Tensor,
        targets: Tensor,
        near: Tensor,
        far: Tensor,
        scale: Tensor,
        shares: Tensor | None,
        left_out: Tensor | None,
        dim: int,
    ) -> Tensor:
        total = cross.new_zeros(())
        across = -3 - dim
        within = gram_products(targets)
        errors = within if within.shape == cross.shape else torch.empty_like(cross)
        near_sums, far_sums, masses = torch.empty_like(near), torch.empty_like(near), torch.empty_like(near)

        for start, count in _blocks(cross):
            own_near, own_far = (scale * each.narrow(-1, start, count).unsqueeze(dim) for each in (near, far))
            block, inner = cross.narrow(across, start, count), within.narrow(across, start, count)
            error = (block * own_near).addcmul_(own_far, inner)
            positives = _positive_logits(error, start, shares, dim)

            # logits -> mass (P - Y), in place
            if left_out is not None:
                error.masked_fill_(left_out.narrow(across, start, count), -torch.inf)
            top = error.amax(dim, keepdim=True)
            mass = error.sub_(top).exp_().sum(dim, keepdim=True)
            total += ((top + mass.log()).squeeze(dim) - positives).sum()
            _subtract_positives(error, start, shares, mass, dim)

            masses.narrow(-1, start, count).copy_(mass.squeeze(dim))
            product = error * block
            near_sums.narrow(-1, start, count).copy_(product.sum(dim))
            far_sums.narrow(-1, start, count).copy_(torch.mul(error, inner, out=product).sum(dim))
            errors.narrow(across, start, count).copy_(error)

        ctx.save_for_backward(errors, targets, near, far, scale, near_sums / masses, far_sums / masses, masses)
        ctx.dim = dim
        return total / near.numel()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        errors, targets, near, far, scale, near_sums, far_sums, masses = ctx.saved_tensors
        weight = upstream / near.numel()
        rows = (weight * scale / masses).unsqueeze(ctx.dim)
        cross_gradient = errors * (rows * near.unsqueeze(ctx.dim))

        # That of the targets' products with themselves, of which both factors are the targets: the sum of a matrix and
        # its transpose, of which only what lies from the diagonal on is made.
        factors = (rows * far.unsqueeze(ctx.dim)).expand_as(errors)
        targets_gradient = torch.zeros_like(targets)
        size = targets.shape[-2]
        for start, count in _blocks(errors, 2):
            own, rest = slice(start, start + count), slice(start + count, None)
            within = errors[..., own, start:] * factors[..., own, start:]
            within += (errors[..., start:, own] * factors[..., start:, own]).mT.contiguous()
            within = within.sum_to_size(*targets.shape[:-2], count, size - start)
            targets_gradient[..., own, :] += within @ targets[..., start:, :]
            targets_gradient[..., rest, :] += within[..., count:].mT @ targets[..., own, :]

        near_gradient, far_gradient = weight * near_sums, weight * far_sums
        scale_gradient = (near * near_gradient + far * far_gradient).sum()
        of_factors = scale * near_gradient, scale * far_gradient, scale_gradient
        return cross_gradient, targets_gradient, *of_factors, None, None, None
