"""The two softmax losses on a matrix of similarities, with their gradients written by hand.

Automatic differentiation keeps a matrix for each step from similarities to loss and reads each of them from memory
again. Here the forward pass walks over blocks of rows that stay in a core's cache, and keeps what is a few
multiplications from the gradient. On a GPU a block is the whole matrix. Gradients of gradients are not available.
"""

from __future__ import annotations

import math
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
    shares = _positive_shares(similarity, group_ids)

    # One exponential for both directions underflows where the maxima of two rows or columns lie too far apart. Those of
    # cosines cannot at smaller scales than this.
    widest = -2 * math.log(torch.finfo(similarity.dtype).tiny) - 4  # 170 in float32
    if scale * 2 > widest:
        lowest = torch.minimum(similarity.amax(-1).amin(), similarity.amax(-2).amin())
        if scale * (similarity.amax() - lowest) > widest:
            logits = scale * similarity
            positives = 2 * _positive_logits(logits, 0, shares)
            return (logits.logsumexp(-1) + logits.logsumexp(-2) - positives).mean()
    return _SymmetricContrast.apply(similarity, scale, shares)


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
    """Rows and columns from one exponential, F_ij = exp(l_ij - (top_i + peak_j) / 2), l being the logits.

    Half the maximum of its row and half that of its column are taken off each logit. No entry is above 1 then, and what
    matters to a row or a column underflows only where the maxima of two of them differ by 170 in float32, which at a
    temperature of 0.0115 no two cosines do. With the largest logit M, u_i = exp((top_i - M) / 2) and
    v_j = exp((peak_j - M) / 2), the sums of a row and of a column of exp(l) are sum_j F_ij v_j and sum_i u_i F_ij, but
    for factors that the loss takes off as logarithms.
    """

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, scale: Tensor, shares: Tensor | None) -> Tensor:
        top, peak = similarity.amax(-1, keepdim=True), similarity.amax(-2, keepdim=True)  # (..., N, 1), (..., 1, N)
        largest = top.amax(-2, keepdim=True)
        row_weights, column_weights = (scale / 2 * (top - largest)).exp(), (scale / 2 * (peak - largest)).exp()

        shared = torch.empty_like(similarity)
        row_mass, column_mass = torch.empty_like(top), torch.zeros_like(peak)
        # In double precision, where there is one, so that a small difference of large numbers keeps its digits.
        wide = similarity.dtype if similarity.is_mps else torch.float64
        lifts = (top.to(wide) + largest).sum() / 2 + (peak.to(wide) + largest).sum() / 2
        for start, count in _blocks(similarity):
            block, exponential = similarity.narrow(-2, start, count), shared.narrow(-2, start, count)
            lifts -= 2 * _positive_logits(block, start, shares).to(wide).sum()
            torch.sub(block, top.narrow(-2, start, count) / 2, out=exponential)
            exponential.sub_(peak / 2).mul_(scale).exp_()

            weighted = exponential * column_weights
            row_mass.narrow(-2, start, count).copy_(weighted.sum(-1, keepdim=True))
            torch.mul(exponential, row_weights.narrow(-2, start, count), out=weighted)
            column_mass += weighted.sum(-2, keepdim=True)

        ctx.save_for_backward(similarity, shared, scale, shares, row_weights, column_weights, row_mass, column_mass)
        total = row_mass.to(wide).log().sum() + column_mass.to(wide).log().sum() + scale * lifts
        return (total / top.numel()).to(similarity.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        similarity, shared, scale, shares, row_weights, column_weights, row_mass, column_mass = ctx.saved_tensors
        gradient = torch.empty_like(similarity)
        scale_gradient = torch.zeros_like(scale)
        weight = upstream * scale / row_mass.numel()
        rows, columns = weight / row_mass, weight / column_mass

        for start, count in _blocks(similarity):
            own = slice(start, start + count)
            # P_rows + P_columns - 2 Y, in place
            error = torch.mul(rows[..., own, :], column_weights, out=gradient.narrow(-2, start, count))
            error.addcmul_(row_weights[..., own, :], columns).mul_(shared.narrow(-2, start, count))
            _subtract_positives(error, start, shares, 2 * weight)
            scale_gradient += (error * similarity.narrow(-2, start, count)).sum()
        return gradient, scale_gradient / scale, None


class _DisplacedContrast(torch.autograd.Function):
    """A walk over blocks of anchors, which are the rows (dim -1, that of their targets) or the columns (dim -2).

    What is kept is the gradient of the logits, P - Y, of which those of all inputs are multiples and sums.
    """

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
        trains = any(ctx.needs_input_grad)
        errors = torch.empty_like(cross if trains else cross[..., :0])
        near_gradient, far_gradient = torch.empty_like(near), torch.empty_like(far)

        for start, count in _blocks(cross):
            own_near, own_far = (each.narrow(-1, start, count).unsqueeze(dim) for each in (near, far))
            block, inner = cross.narrow(across, start, count), within.narrow(across, start, count)
            error = torch.mul(block, own_near, out=errors.narrow(across, start, count) if trains else None)
            error.addcmul_(own_far, inner)
            positives = _positive_logits(error, start, shares, dim)

            # logits -> P - Y, in place
            if left_out is not None:
                error.masked_fill_(left_out.narrow(across, start, count), -torch.inf)
            top = error.amax(dim, keepdim=True)
            mass = error.sub_(top).exp_().sum(dim, keepdim=True)
            total += ((top + mass.log()).squeeze(dim) - positives).sum()
            if not trains:
                continue
            error *= 1 / mass
            _subtract_positives(error, start, shares, 1, dim)

            product = error * block
            near_gradient.narrow(-1, start, count).copy_(product.sum(dim))
            far_gradient.narrow(-1, start, count).copy_(torch.mul(error, inner, out=product).sum(dim))

        ctx.save_for_backward(errors, near, far, near_gradient, far_gradient)
        ctx.dim = dim
        return total / near.numel()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        errors, near, far, near_gradient, far_gradient = ctx.saved_tensors
        weight = upstream / near.numel()
        cross_gradient, within_gradient = (errors * (weight * factor).unsqueeze(ctx.dim) for factor in (near, far))
        return cross_gradient, within_gradient, weight * near_gradient, weight * far_gradient, None, None, None
