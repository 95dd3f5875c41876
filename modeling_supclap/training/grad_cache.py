"""Gradient caching (Gao et al., 2021, arXiv 2101.06983): embed a batch in chunks, with its exact gradients.

Rows of similar length are embedded together, and each chunk is padded only to its longest row. If the activations of a
batch exceed a limit, some chunks do not keep them. The backward pass then recomputes the activations of these chunks
with the same random numbers of torch, numpy and Python, by non-reentrant PyTorch checkpointing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ..losses.tiles import refuse_second_derivatives

Rows = Mapping[str, Tensor]
Embed = Callable[[Rows], Tensor]

_MUCH_SHORTER = 0.75
"""A row with at most this fraction of the length of the longest row in a chunk can start a new chunk."""


def real_lengths(mask: Tensor) -> list[int]:
    """Return the length of each mask row `(..., L)` up to its last 1. If the mask is on a GPU, the CPU waits for it."""
    columns = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    lengths: list[int] = (columns * mask.bool()).amax(dim=-1).flatten().tolist()
    return lengths


def embed_in_chunks(
    embed: Embed,
    inputs: Rows,
    chunk_size: int | None,
    mask: str | None = None,
    kept_cells: int = 0,
    fewest_cells: int | None = None,
    tokens: nn.Embedding | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Embed a batch in chunks, with the same gradients as `embed(inputs)`.

    Memory is counted in cells. A cell is one token or frame of one row in a chunk, including padding. The longest rows
    come first. The last chunks keep their activations, because the backward pass begins with them. The backward pass
    repeats the forward pass of the other chunks. A batch of one chunk keeps its activations.

    Args:
        embed: Function from rows of the batch to their embeddings `(n, d)`. The embedding of a row must not depend on
            other rows. The function may use random numbers of torch, numpy and Python.
        inputs: Tensors with N rows, `{input name: tensor}`.
        chunk_size: Maximum rows per chunk. None: as many rows as fit into `kept_cells` cells.
        mask: Name of the input that is 1 for real tokens or frames and 0 for padding, `(N, L)`. The last axis of each
            input must then have size L or 1. None: all rows have the same length.
        kept_cells: Maximum cells with activations in memory. 0: those of the last chunk.
        fewest_cells: If a chunk has at least this number of cells, a row of at most 0.75 times the length of its
            longest row starts a new chunk. None: each chunk is filled.
        tokens: Embedding table that `embed` uses for `input_ids`. If there are several chunks, the table is read once
            per batch. Its gradient, which is as large as the table, is then computed once, not once per chunk.
        lengths: `real_lengths` of the mask. None: computed from the mask.

    Returns:
        `(N, d)`, in input order.

    Example:
        >>> tower = nn.Linear(2, 3)
        >>> batch = {"x": torch.ones(5, 2)}
        >>> embeds = embed_in_chunks(lambda rows: tower(rows["x"]), batch, chunk_size=2)
        >>> embeds.sum().backward()
        >>> embeds.shape, tower.bias.grad
        (torch.Size([5, 3]), tensor([5., 5., 5.]))
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"got chunk_size={chunk_size}; a chunk needs at least one row")
    counts = {name: len(tensor) for name, tensor in inputs.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"got rows {counts}; all inputs need the same number of rows, at least one")

    device = next(iter(inputs.values())).device
    if mask is None:
        lengths = [1] * len(next(iter(inputs.values())))
    elif lengths is None:
        lengths = real_lengths(inputs[mask])
    chunks = _cut(lengths, chunk_size, kept_cells, fewest_cells)

    # Several chunks cast the weights separately, because the gradient of a shared cast is summed in half precision.
    autocast: dict[str, Any] = {
        "dtype": torch.get_autocast_dtype(device.type),
        "enabled": torch.is_autocast_enabled(device.type),
        "cache_enabled": torch.is_autocast_cache_enabled() and len(chunks) == 1,
    }

    def embed_chunk(rows: Tensor | None, width: int, states: list[Any] | None = None) -> Tensor:
        # the backward pass: repeat the random numbers of numpy and Python, as torch does with its own
        if states:
            current = _random_states()
            _set_random_states(states[0])
            try:
                return embed_chunk(rows, width)
            finally:
                _set_random_states(current)
        if states is not None:
            states.append(_random_states())

        # sliced here and again in the backward pass, so that no second copy of the batch stays in memory
        chunk = {}
        for name, values in inputs.items():
            columns = values if mask is None else values[..., :width]
            chunk[name] = columns if rows is None else columns[rows]
        with torch.autocast(device.type, **autocast):
            return embed(chunk)

    if len(chunks) == 1:
        return embed_chunk(None, chunks[0][1])
    if tokens is not None:
        embed = _with_shared_rows(embed, tokens, inputs["input_ids"])

    parts, order = [], []
    cells = sum(len(indices) * width for indices, width in chunks)  # of this and all later chunks
    for number, (indices, width) in enumerate(chunks):
        rows = torch.tensor(indices).to(device, non_blocking=True)
        order.append(rows)
        is_kept = cells <= kept_cells or (kept_cells == 0 and number == len(chunks) - 1)
        if is_kept or not torch.is_grad_enabled():
            parts.append(embed_chunk(rows, width))
        else:
            recomputed = checkpoint(embed_chunk, rows, width, [], use_reentrant=False)
            parts.append(refuse_second_derivatives(recomputed))
        cells -= len(indices) * width
    return torch.cat(parts)[torch.cat(order).argsort()]


def _random_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _cut(
    lengths: Sequence[int], chunk_size: int | None, kept_cells: int, fewest_cells: int | None
) -> list[tuple[list[int], int]]:
    """Sort rows by length, longest first, and split them into chunks. Return (row indices, width) for each chunk."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    chunks: list[tuple[list[int], int]] = []
    for row in order:
        length = max(1, lengths[row])
        if chunks:
            rows, width = chunks[-1]
            cells = len(rows) * width
            is_full = cells + width > kept_cells if chunk_size is None else len(rows) == chunk_size
            much_shorter = (
                fewest_cells is not None and cells >= fewest_cells and length <= _MUCH_SHORTER * width
            )
        if not chunks or is_full or much_shorter:
            chunks.append(([], length))
        chunks[-1][0].append(row)
    return chunks


def _with_shared_rows(embed: Embed, tokens: nn.Embedding, input_ids: Tensor) -> Embed:
    """Wrap `embed`, so that it looks up tokens in a smaller table, which contains only the tokens of the batch."""
    weight, padding = tokens.weight, tokens.padding_idx
    whole = weight.shape == (tokens.num_embeddings, tokens.embedding_dim)  # False for a sharded table
    if not (weight.requires_grad and whole and torch.is_grad_enabled()):
        return embed

    used = input_ids.unique()  # (U,)
    indices = torch.zeros(len(weight), dtype=torch.long, device=input_ids.device)
    indices[used] = torch.arange(len(used), device=input_ids.device)
    rows = _UsedRows.apply(weight, used)  # (U, D)
    if padding is not None:  # the padding token gets no gradient
        rows = torch.where((used == padding).unsqueeze(1), rows.detach(), rows)

    def embed_with_rows(chunk: Rows) -> Tensor:
        hook = tokens.register_forward_pre_hook(lambda module, ids: (indices[ids[0]],))
        parameters: dict[str, Any] = tokens._parameters
        parameters["weight"], tokens.padding_idx = rows, None  # for this call
        try:
            return embed(chunk)
        finally:
            parameters["weight"], tokens.padding_idx = weight, padding
            hook.remove()

    return embed_with_rows


class _UsedRows(torch.autograd.Function):
    """Autograd function that selects the rows `used` of an embedding table `weight`.

    If the table already has a gradient, the new gradient is a sparse tensor, because this needs less memory.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, used: Tensor) -> Tensor:
        ctx.weight, ctx.used = weight, used
        return weight[used]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        if ctx.weight.grad is None:
            return torch.zeros_like(ctx.weight).index_add_(0, ctx.used, upstream), None
        return torch.sparse_coo_tensor(
            ctx.used[None], upstream, ctx.weight.shape, check_invariants=False
        ), None
