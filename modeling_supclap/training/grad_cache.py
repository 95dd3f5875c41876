"""Gradient caching (Gao et al., 2021, arXiv 2101.06983): embed a batch in chunks, with its exact gradients.

Rows of similar length are embedded together, and each chunk is padded only to its longest row. If the activations of a
batch exceed a limit, some chunks do not keep them. The backward pass then recomputes the activations of these chunks
with the same random numbers of torch, numpy and Python.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
    lengths: Sequence[int] | None = None,
    kept_cells: int = 0,
    fewest_cells: int | None = None,
    tokens: nn.Embedding | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Tensor:
    """Embed a batch in chunks, with the same gradients as `embed(inputs)`.

    Memory is counted in cells. A cell is one token or frame of one row in a chunk, including padding. The longest rows
    come first. The last chunks may keep their activations, because the backward pass begins with them. It repeats the
    forward pass of the other chunks. A batch of one chunk keeps its activations.

    Args:
        embed: Function from rows of the batch to their embeddings `(n, d)`. The embedding of a row must not depend on
            other rows. The function may use random numbers of torch, numpy and Python.
        inputs: Tensors with N rows, `{input name: tensor}`.
        chunk_size: Maximum rows per chunk. None: as many rows as fit into `kept_cells` cells.
        lengths: Real lengths of the N rows along the last axis of the inputs, such as `real_lengths` of their mask. A
            chunk is cut to its longest row. None: the inputs are not cut.
        kept_cells: Maximum cells whose activations are kept for the backward pass. 0: all chunks are recomputed.
        fewest_cells: If a chunk has at least this number of cells, a row of at most 0.75 times the length of its
            longest row starts a new chunk. None: each chunk is filled.
        tokens: Embedding table that `embed` uses for `input_ids`. If there are several chunks, the table is read once
            per batch. Its gradient, which is as large as the table, is then computed once, not once per chunk.
        parameters: All tensors with a gradient that `embed` uses, except the inputs, and not sharded. The forward pass
            of a recomputed chunk then needs no autograd graph, which would leave gaps between freed activations. None:
            use PyTorch checkpointing.

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
    chunks = _cut(lengths or [1] * len(next(iter(inputs.values()))), chunk_size, kept_cells, fewest_cells)

    # Several chunks cast the weights separately, because the gradient of a shared cast is summed in half precision.
    autocast: dict[str, Any] = {
        "dtype": torch.get_autocast_dtype(device.type),
        "enabled": torch.is_autocast_enabled(device.type),
        "cache_enabled": torch.is_autocast_cache_enabled() and len(chunks) == 1,
    }

    def embed_chunk(rows: Tensor | None, width: int) -> Tensor:
        # sliced here and again in the backward pass, so that no second copy of the batch stays in memory
        chunk = {}
        for name, values in inputs.items():
            columns = values if lengths is None else values[..., :width]
            chunk[name] = columns if rows is None else columns[rows]
        with torch.autocast(device.type, **autocast):
            return embed(chunk)

    if len(chunks) == 1:
        return embed_chunk(None, chunks[0][1])
    sources = None if parameters is None else [*parameters, *inputs.values()]
    if tokens is not None and _has_dense_gradient(tokens):
        used, table_rows = _read_used_rows(tokens, inputs["input_ids"])
        embed = _with_table(embed, tokens, used, table_rows)
        if sources is not None:
            sources = [table_rows, *(tensor for tensor in sources if tensor is not tokens.weight)]

    parts, order = [], []
    cells = sum(len(indices) * width for indices, width in chunks)  # of this and all later chunks
    for indices, width in chunks:
        rows = torch.tensor(indices).to(device, non_blocking=True)
        order.append(rows)
        embed_rows = partial(embed_chunk, rows, width)
        if cells <= kept_cells or not torch.is_grad_enabled():
            parts.append(embed_rows())
        else:
            parts.append(_embed_twice(_replay_random_numbers(embed_rows, device), sources))
        cells -= len(indices) * width
    return torch.cat(parts)[torch.cat(order).argsort()]


def _random_states(device: torch.device) -> list[Any]:
    """Return the states of the random number generators of Python, numpy and torch, the last also for the device."""
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_random_states(states: Sequence[Any], device: torch.device) -> None:
    """Restore the result of `_random_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[3], device)


def _replay_random_numbers(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Wrap a function, so that later calls draw the random numbers of the first, and do not change the states."""
    first: list[Any] = []

    def call() -> Tensor:
        current = _random_states(device)
        if not first:
            first.extend(current)
            return function()
        _set_random_states(first, device)
        try:
            return function()
        finally:
            _set_random_states(current, device)

    return call


def _embed_twice(embed_rows: Callable[[], Tensor], sources: Sequence[Tensor] | None) -> Tensor:
    """Call a function now without keeping its activations, and again in the backward pass."""
    if sources is None:
        embeds = checkpoint(embed_rows, use_reentrant=False, preserve_rng_state=False)
    else:
        embeds = _Recomputed.apply(embed_rows, *(tensor for tensor in sources if tensor.requires_grad))
    return refuse_second_derivatives(embeds)


class _Recomputed(torch.autograd.Function):
    """Autograd function that calls `embed_rows` in both passes. Its inputs are all `sources` of the gradient."""

    @staticmethod
    def forward(ctx: Any, embed_rows: Callable[[], Tensor], *sources: Tensor) -> Tensor:
        ctx.embed_rows, ctx.sources = embed_rows, sources
        return embed_rows()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            embeds = ctx.embed_rows()
        return None, *torch.autograd.grad(embeds, ctx.sources, upstream, allow_unused=True)


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
            much_shorter = fewest_cells is not None and cells >= fewest_cells and length <= _MUCH_SHORTER * width
        if not chunks or is_full or much_shorter:
            chunks.append(([], length))
        chunks[-1][0].append(row)
    return chunks


def _has_dense_gradient(tokens: nn.Embedding) -> bool:
    """Return whether each chunk would compute a gradient of the whole table, which a sharded table does not have."""
    is_whole = tokens.weight.shape == (tokens.num_embeddings, tokens.embedding_dim)
    return tokens.weight.requires_grad and is_whole and torch.is_grad_enabled()


def _read_used_rows(tokens: nn.Embedding, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token ids of the batch (U,), and their rows of the embedding table (U, D)."""
    used = input_ids.unique()
    rows: Tensor = _UsedRows.apply(tokens.weight, used)
    if tokens.padding_idx is not None:  # the padding token gets no gradient
        rows = torch.where((used == tokens.padding_idx).unsqueeze(1), rows.detach(), rows)
    return used, rows


def _with_table(embed: Embed, tokens: nn.Embedding, used: Tensor, rows: Tensor) -> Embed:
    """Wrap `embed`, so that it looks up tokens in the smaller table `rows`."""
    weight, padding = tokens.weight, tokens.padding_idx
    indices = torch.zeros(len(weight), dtype=torch.long, device=used.device)
    indices[used] = torch.arange(len(used), device=used.device)

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
        return torch.sparse_coo_tensor(ctx.used[None], upstream, ctx.weight.shape, check_invariants=False), None
