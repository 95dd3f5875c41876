"""Contrastive losses with memory linear in the number of clips.

The similarity matrix is computed in tiles of `chunk_size` rows. Only one tile is in memory at a time, and the backward
pass recomputes it, which costs one more matrix product. The loss is the same as without tiles, up to float32 rounding.
On a CPU, use tiles larger than 32 MB (256 rows for 32,768 clips), because smaller tiles fragment memory.
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

from .similarity import at_least_float32, check_negatives, check_pairs, positive_mask

T = TypeVar("T")


def tiled_symmetric_contrast(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None,
    chunk_size: int,
    negatives: Tensor | None = None,
) -> Tensor:
    """Compute `info_nce` of (..., N, d) embeddings, `chunk_size` rows of the similarity matrix at a time.

    `negatives` (N, M) are the logits of further texts of each clip. They require embeddings (N, d).
    """

    def loss(audio: Tensor, text: Tensor) -> Tensor:
        audio_positives = logit_scale * _positive_similarity(audio, text, group_ids)
        text_positives = logit_scale * _positive_similarity(text, audio, group_ids)

        def row_and_column_sums(rows: slice) -> tuple[Tensor, Tensor]:
            logits = logit_scale * audio[rows] @ text.mT  # (n, N)
            texts = logits if negatives is None else torch.cat([logits, negatives[rows]], dim=-1)
            # Subtract the positives first, so that small losses are not lost to rounding.
            row_sums = (texts - audio_positives[rows, None]).logsumexp(-1)
            return row_sums, (logits - text_positives).logsumexp(-2)

        per_clip, per_tile = zip(*checkpoint_tiles(row_and_column_sums, len(audio), chunk_size), strict=True)
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
    """Compute InfoNCE in one direction, -log softmax at the positives, for `chunk_size` anchors at a time.

    The anchors (..., N, d) do not need unit norm. The other arguments are the same as in `support_vector_loss`.
    """
    if decoupled:
        check_negatives(group_ids)

    def loss(anchors: Tensor, targets: Tensor) -> Tensor:
        positives = logit_scale * _positive_similarity(anchors, targets, group_ids)

        def row_sums(rows: slice) -> Tensor:
            logits = logit_scale * anchors[rows] @ targets.mT  # (n, N)
            if decoupled:
                logits = logits.masked_fill(positive_mask(len(anchors), group_ids, logits.device, rows), -torch.inf)
            return (logits - positives[rows, None]).logsumexp(-1)

        return torch.cat(checkpoint_tiles(row_sums, len(anchors), chunk_size)).mean()

    return _mean_over_batches(loss, anchors, targets)


def tiled_sigmoid_contrast(
    anchors: Tensor,
    targets: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    group_ids: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """Compute `sigmoid_loss` for anchors of shape (..., N, d), `chunk_size` anchors at a time."""

    def loss(anchors: Tensor, targets: Tensor) -> Tensor:
        def tile_sum(rows: slice) -> Tensor:
            logits = logit_scale * anchors[rows] @ targets.mT + logit_bias  # (n, N)
            positives = positive_mask(len(anchors), group_ids, logits.device, rows)
            return -F.logsigmoid(torch.where(positives, logits, -logits)).sum()

        return torch.stack(checkpoint_tiles(tile_sum, len(anchors), chunk_size)).sum() / len(anchors)

    return _mean_over_batches(loss, anchors, targets)


class _Share(NamedTuple):
    process: int
    num_processes: int
    gather: Callable[[Tensor], Tensor]


_share: ContextVar[_Share | None] = ContextVar("share", default=None)


@contextmanager
def shared_tiles(process: int, num_processes: int, gather: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context manager that divides the work on the tiles of the similarity matrix among the processes.

    Each process computes a part of the tiles, and the results are all-gathered. All processes must pass the same
    embeddings, those of the global batch. The caller must average the gradients of all parameters over the processes,
    as data-parallel training does. This includes learned parameters of the loss.

    Args:
        process: Rank of this process, 0 to `num_processes` - 1.
        gather: Function that concatenates the tensors of all processes along the first axis. Its backward pass must sum
            the gradients of all processes.
    """
    token = _share.set(_Share(process, num_processes, gather))
    try:
        yield
    finally:
        _share.reset(token)


def checkpoint_tiles(tile: Callable[[slice], T], size: int, chunk_size: int) -> list[T]:
    """Compute a function of the similarity matrix in tiles of rows, with activation checkpointing.

    Inside `shared_tiles`, each process computes a part of the tiles, or all tiles if the number of processes does not
    divide `size`. Each process returns the results of all tiles.

    Args:
        tile: Function from a slice of rows to a tensor or a tuple of tensors.
        size: Number of rows of the matrix.
        chunk_size: Maximum number of rows of a tile.

    Returns:
        The results of `tile`, in row order.
    """
    if chunk_size < 1:
        raise ValueError(f"got chunk_size={chunk_size}; it must be 1 or more rows")
    share = _share.get()
    if share is None or size % share.num_processes:
        share = _Share(0, 1, lambda tensor: tensor)

    rows_per_process = size // share.num_processes
    first, last = share.process * rows_per_process, (share.process + 1) * rows_per_process
    parts: list[T] = []
    for start in range(first, last, chunk_size):
        rows = slice(start, min(start + chunk_size, last))
        part = checkpoint(_without_autocast, tile, rows, use_reentrant=False, preserve_rng_state=False)
        parts.append(tree_map(refuse_second_derivatives, part))
    if share.num_processes == 1:
        return parts

    gathered = tree_map(lambda result: share.gather(result.unsqueeze(0)), parts)  # each (processes, ...)
    all_parts: list[T] = []
    for process in range(share.num_processes):
        all_parts += tree_map(lambda results, process=process: results[process], gathered)
    return all_parts


def refuse_second_derivatives(recomputed: Tensor) -> Tensor:
    """Return the tensor, with a hook that raises RuntimeError in a backward pass with `create_graph=True`.

    Second derivatives would be wrong, because checkpointing saves detached activations.
    """

    def check(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "got create_graph=True, but second derivatives of recomputed activations would be wrong; "
                "leave out chunk_size (loss_chunk_size, cached_chunk_size) to keep all activations"
            )

    if recomputed.requires_grad:
        recomputed.register_hook(check)
    return recomputed


def pairs_of_batches(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Broadcast two (..., N, d) tensors and yield their batches as pairs of (N, d) tensors, float32 or wider.

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
    """Compute the mean similarity of each anchor to its positives, (N,), without computing the similarity matrix."""
    if group_ids is None:
        return (anchors * targets).sum(-1)
    if group_ids.shape != anchors.shape[:1]:
        raise ValueError(
            f"got group_ids of shape {tuple(group_ids.shape)} for {len(anchors)} clips; expected one id per clip"
        )
    _, group, sizes = group_ids.to(anchors.device).unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), targets.shape[-1], dtype=targets.dtype, device=targets.device)
    means = sums.index_add(0, group, targets) / sizes.unsqueeze(-1)  # (N, d) -> (groups, d)
    return (anchors * means[group]).sum(-1)
