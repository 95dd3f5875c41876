"""The losses in tiles of a few rows, each made anew in the backward pass: memory linear in the number of clips.

A global batch of 65,536 clips has a matrix of similarities of 16 GB. Here `chunk_size` rows of it exist at a time, and
nothing is kept of them but a number for each row and, a tile, for each column (as open_clip and the distributed SigLIP
do). The price is one product more, since the backward pass repeats that of the forward pass. Values are those of the
plain losses to the rounding of float32. On a CPU a tile should be larger than 32 MB (256 rows for 32,768 clips): those
below leave holes in the heap, which the C library does not give back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from .similarity import at_least_float32, check_negatives, check_pairs

T = TypeVar("T")


def tiled_symmetric_contrast(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """`info_nce` of (..., N, d) embeddings, of which `chunk_size` clips are compared with all texts at a time.

    >>> round(tiled_symmetric_contrast(torch.eye(2), torch.eye(2), 1.0, None, chunk_size=1).item(), 4)
    0.6265
    """

    def loss(audio: Tensor, text: Tensor) -> Tensor:
        audio_positives = logit_scale * _positive_similarity(audio, text, group_ids)
        text_positives = logit_scale * _positive_similarity(text, audio, group_ids)

        def both_sums(rows: slice) -> tuple[Tensor, Tensor]:
            logits = logit_scale * audio[rows] @ text.mT  # (n, N)
            # Relative to the positives, whose own share is then 1: small losses are not lost to rounding.
            return (logits - audio_positives[rows, None]).logsumexp(-1), (logits - text_positives).logsumexp(-2)

        per_clip, per_tile = zip(*checkpoint_tiles(both_sums, len(audio), chunk_size), strict=True)
        return torch.cat(per_clip).mean() + torch.stack(per_tile).logsumexp(0).mean()

    return _mean_over_batches(loss, audio_embeds, text_embeds)


def tiled_row_contrast(
    anchors: Tensor,
    targets: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None,
    decoupled: bool,
    chunk_size: int,
) -> Tensor:
    """Mean over the anchors of -log softmax of their positives among all targets, in tiles of `chunk_size` anchors.

    Anchors (..., N, d) may have any norm, as support vectors have; all else is as in `support_vector_loss`.

    >>> pairs = torch.eye(2)
    >>> loss = tiled_row_contrast(pairs, pairs, 1.0, None, decoupled=False, chunk_size=1)
    >>> round(loss.item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    if decoupled:
        check_negatives(group_ids)

    def loss(anchors: Tensor, targets: Tensor) -> Tensor:
        positives = logit_scale * _positive_similarity(anchors, targets, group_ids)

        def sums(rows: slice) -> Tensor:
            logits = logit_scale * anchors[rows] @ targets.mT  # (n, N)
            if decoupled:
                logits = logits.masked_fill(_positive_rows(rows, len(anchors), group_ids, logits.device), -torch.inf)
            return (logits - positives[rows, None]).logsumexp(-1)

        return torch.cat(checkpoint_tiles(sums, len(anchors), chunk_size)).mean()

    return _mean_over_batches(loss, anchors, targets)


def tiled_sigmoid_contrast(
    anchors: Tensor,
    targets: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    group_ids: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """`sigmoid_loss` of (..., N, d) anchors, clips or support vectors, `chunk_size` of them at a time.

    >>> round(tiled_sigmoid_contrast(torch.eye(2), torch.eye(2), 2.0, -1.0, None, chunk_size=1).item(), 4)
    0.6265
    """

    def loss(anchors: Tensor, targets: Tensor) -> Tensor:
        def total(rows: slice) -> Tensor:
            logits = logit_scale * anchors[rows] @ targets.mT + logit_bias  # (n, N)
            positives = _positive_rows(rows, len(anchors), group_ids, logits.device)
            return -F.logsigmoid(torch.where(positives, logits, -logits)).sum()

        return torch.stack(checkpoint_tiles(total, len(anchors), chunk_size)).sum() / len(anchors)

    return _mean_over_batches(loss, anchors, targets)


class _Share(NamedTuple):
    process: int
    num_processes: int
    gather: Callable[[Tensor], Tensor]


_share: ContextVar[_Share | None] = ContextVar("share", default=None)


@contextmanager
def shared_tiles(process: int, num_processes: int, gather: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within this context each process makes the tiles of its own rows, and hears what the others' tiles give.

    Args:
        process: Which process this is, counted from 0.
        num_processes: How many compute this loss, on the same embeddings of all clips. Their gradients are to be
            averaged afterwards, those of the loss's parameters too, as data-parallel training does.
        gather: Concatenates a tensor of every process along its first axis; its backward pass sums what they want.
    """
    token = _share.set(_Share(process, num_processes, gather))
    try:
        yield
    finally:
        _share.reset(token)


def checkpoint_tiles(tile: Callable[[slice], T], size: int, chunk_size: int) -> list[T]:
    """What a function gives for each slice of rows; its matrices are dropped, and made anew for the gradient.

    Args:
        tile: Gives a tensor, or several, for a slice.
        size: How many rows there are.
        chunk_size: The most rows of a slice.

    Raises:
        ValueError: A slice would hold no row.
    """
    if chunk_size < 1:
        raise ValueError(f"got chunk_size={chunk_size}; it must be 1 or more rows")
    share = _share.get()
    if share is None or size % share.num_processes:
        share = _Share(0, 1, lambda tensor: tensor)

    own = size // share.num_processes
    parts: list[T] = []
    for start in range(share.process * own, (share.process + 1) * own, chunk_size):
        rows = slice(start, min(start + chunk_size, (share.process + 1) * own))
        part = checkpoint(_without_autocast, tile, rows, use_reentrant=False, preserve_rng_state=False)
        parts.append(tree_map(refuse_second_derivatives, part))
    if share.num_processes == 1:
        return parts

    gathered = tree_map(lambda result: share.gather(result.unsqueeze(0)), parts)  # each (processes, ...)
    every: list[T] = []
    for process in range(share.num_processes):
        every += tree_map(lambda results, process=process: results[process], gathered)
    return every


def refuse_second_derivatives(recomputed: Tensor) -> Tensor:
    """Make the backward pass through a recomputed tensor raise if it builds a graph; return the tensor.

    Checkpointing saves detached activations, so that a second derivative would be wrong without an error.

    Raises:
        RuntimeError: In the backward pass, with `create_graph=True`.
    """

    def check(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "got create_graph=True for activations that the backward pass recomputes, whose second derivatives are "
                "wrong; leave out chunk_size (loss_chunk_size, cached_chunk_size), which keeps all activations"
            )

    if recomputed.requires_grad:
        recomputed.register_hook(check)
    return recomputed


def pairs_of_batches(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The (N, d) pairs of embeddings that may have leading dimensions, in float32 or wider.

    >>> [tuple(text.shape) for _, text in pairs_of_batches(torch.zeros(2, 8), torch.zeros(3, 2, 8))]
    [(2, 8), (2, 8), (2, 8)]
    """
    check_pairs(first, second)
    shape = torch.broadcast_shapes(first.shape, second.shape)
    first, second = at_least_float32(first, second)
    flat = (-1, *shape[-2:])
    yield from zip(first.expand(shape).reshape(flat), second.expand(shape).reshape(flat), strict=True)


def _mean_over_batches(loss: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([loss(*pair) for pair in pairs_of_batches(first, second)]).mean()


def _without_autocast(tile: Callable[[slice], T], rows: slice) -> T:
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    with torch.autocast(device, enabled=False):
        return tile(rows)


def _positive_similarity(anchors: Tensor, targets: Tensor, group_ids: Tensor | None) -> Tensor:
    """(N,) the mean product of each anchor with its positives, without the matrix of all of them."""
    if group_ids is None:
        return (anchors * targets).sum(-1)
    if group_ids.shape != anchors.shape[:1]:
        raise ValueError(
            f"got group_ids of shape {tuple(group_ids.shape)} for {len(anchors)} clips; give one id per clip"
        )
    _, group, sizes = group_ids.to(anchors.device).unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), targets.shape[-1], dtype=targets.dtype, device=targets.device)
    means = sums.index_add(0, group, targets) / sizes.unsqueeze(-1)  # (N, d) -> (groups, d)
    return (anchors * means[group]).sum(-1)


def _positive_rows(rows: slice, size: int, group_ids: Tensor | None, device: torch.device) -> Tensor:
    """The rows of `positive_mask`, (n, N)."""
    ids = torch.arange(size, device=device) if group_ids is None else group_ids.to(device)
    return ids[rows, None] == ids
