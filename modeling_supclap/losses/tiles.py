"""Contrastive losses with memory linear in the number of clips.

The similarity matrix is computed in tiles of `chunk_size` rows. Only one tile is in memory at a time, and the backward
pass recomputes it, which costs one more matrix product. The loss is the same as without tiles, up to float32 rounding.
On a CPU, use tiles larger than 32 MB (256 rows for 32,768 clips), because smaller tiles fragment memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from .similarity import at_least_float32, check_pairs, similarity_matrix

T = TypeVar("T")


def map_rows(
    function: Callable[..., Tensor],
    anchors: Tensor,
    targets: Tensor,
    logit_scale: float | Tensor,
    chunk_size: int | None,
) -> Tensor:
    """Apply a function to the rows of the scaled similarity matrix, `chunk_size` rows at a time.

    Args:
        function: Function from n rows (..., n, N) to (..., n, *). The keyword argument `rows` is their slice.
        anchors, targets: (..., N, d), with any norm. Row i contains the similarities of anchor i.
        chunk_size: Number of rows in a tile. None: all rows at once.

    Returns:
        (..., N, *).
    """
    if chunk_size is None:
        return function(logit_scale * similarity_matrix(anchors, targets), rows=slice(None))
    results = []
    for first, second in pairs_of_batches(anchors, targets):

        def tile(rows: slice, first: Tensor = first, second: Tensor = second) -> Tensor:
            return function(logit_scale * first[rows] @ second.mT, rows=rows)

        results.append(torch.cat(checkpoint_tiles(tile, len(first), chunk_size)))
    leading = torch.broadcast_shapes(anchors.shape, targets.shape)[:-2]
    return torch.stack(results).reshape(*leading, *results[0].shape)  # (batches, N, *) -> (..., N, *)


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


def _without_autocast(tile: Callable[[slice], T], rows: slice) -> T:
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    with torch.autocast(device, enabled=False):
        return tile(rows)
