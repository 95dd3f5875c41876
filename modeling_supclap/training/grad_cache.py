"""Embeds a batch in chunks of rows of similar length, with the exact gradients of the whole batch.

A contrastive loss wants the embeddings of the whole batch at once. What fills the memory are the activations behind
them, and what fills the time is often padding; neither has to do with the loss, since those of one row have nothing to
do with those of another. So rows of similar length are embedded together, each chunk without the padding that it does
not need. Chunks beyond a limit forget their activations, and the backward pass makes them again, with the same dropout,
when the gradient of their embeddings is known (Gao et al., 2021, arXiv 2101.06983).

The forgetting and remaking is PyTorch's non-reentrant checkpoint, one for each chunk. Nothing else of a training step
changes: it stays one forward and one backward pass, with whatever scales, synchronises or accumulates gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..losses.tiles import refuse_second_derivatives

Rows = Mapping[str, Tensor]
Embed = Callable[[Rows], Tensor]

_MUCH_SHORTER = 0.75
"""A row of at most this share of a chunk's longest begins a chunk of its own length."""


def real_lengths(mask: Tensor) -> list[int]:
    """Return the columns of each row up to its last real one, for a mask `(..., L)` of 1 and 0; waits for a GPU."""
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
    """Embed a batch in chunks, with the gradients of `embed(inputs)` for any loss of the embeddings.

    A cell is a row's column in its chunk: a token, real or padding, or a frame. The longest rows come first, and the
    backward pass begins with the last chunk. So the last ones, at least one, keep their activations; each of the
    others costs one more forward pass. Towers that are called later are done and freed when it begins.

    Args:
        embed: Function from rows of the batch to their embeddings `(n, d)`. A row's embedding must not depend on the
            other rows, see `refuse_batch_statistics`. It may draw random numbers, on the CPU and on the inputs' device.
        inputs: Tensors by name, each with the N rows along its first axis.
        chunk_size: Maximum rows of a chunk; None: as many as have at most `kept_cells` cells.
        mask: Name of the input that marks real columns with 1 and padding with 0, `(N, L)`; all inputs then have L
            columns, or one, on their last axis. None keeps rows in order and padded as they are.
        kept_cells: Number of cells whose activations may stay in memory.
        fewest_cells: A chunk with this many cells ends where rows are much shorter; None fills each chunk.
        tokens: The embeddings in which `embed` looks up `input_ids`. Several chunks then look their tokens up in the
            rows that the batch uses, so that the gradient of the whole table is made once and not for each chunk.
        lengths: The `real_lengths` of the mask, if known; reading them from a mask on a GPU waits for it.

    Returns:
        `(N, d)`, in the order of the inputs.

    Raises:
        ValueError: `chunk_size` is below 1, or the inputs have no row or different numbers of rows.

    Example:
        >>> tower = nn.Linear(2, 3)
        >>> batch = {"x": torch.ones(5, 2)}
        >>> embeds = embed_in_chunks(lambda rows: tower(rows["x"]), batch, chunk_size=2)
        >>> embeds.sum().backward()
        >>> embeds.shape, tower.bias.grad
        (torch.Size([5, 3]), tensor([5., 5., 5.]))
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; a chunk needs at least one row")
    counts = {name: len(tensor) for name, tensor in inputs.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"got rows {counts}; give tensors with the same number of rows, at least one")

    first = next(iter(inputs.values()))
    if mask is None:
        lengths = [1] * len(first)
    elif lengths is None:
        lengths = real_lengths(inputs[mask])
    chunks = _cut(lengths, chunk_size, kept_cells, fewest_cells)

    def embed_chunk(rows: Tensor | None, width: int) -> Tensor:
        chunk = {}  # cut here, and cut again in the backward pass, so that no second copy of the batch is kept
        for name, values in inputs.items():
            columns = values if mask is None else values[..., :width]
            chunk[name] = columns if rows is None else columns[rows]
        with _fresh_casts(len(chunks) > 1):
            return embed(chunk)

    if len(chunks) == 1:
        return embed_chunk(None, chunks[0][1])
    if tokens is not None:
        embed = _with_shared_rows(embed, tokens, inputs["input_ids"])

    cells = [len(rows) * width for rows, width in chunks]
    first_kept = len(chunks) - 1
    while first_kept > 0 and sum(cells[first_kept - 1 :]) <= kept_cells:
        first_kept -= 1

    parts, order = [], []
    for number, (numbers, width) in enumerate(chunks):
        rows = torch.tensor(numbers, device=first.device)
        order.append(rows)
        if number < first_kept and torch.is_grad_enabled():
            parts.append(refuse_second_derivatives(checkpoint(embed_chunk, rows, width, use_reentrant=False)))
        else:
            parts.append(embed_chunk(rows, width))
    return torch.cat(parts)[torch.cat(order).argsort()]


def refuse_batch_statistics(module: nn.Module) -> None:
    """Makes each batch norm of a module raise where it would normalise by the statistics of its batch.

    It would see a chunk in place of the batch, which changes the gradients (by a tenth, for one at the input).

    Args:
        module: What is to be embedded with; marked for good.
    """

    def refuse(name: str, layer: nn.Module, inputs: Any) -> None:
        if layer.training:
            raise ValueError(
                f"{name} normalises by the statistics of its batch, so its output differs from chunk to chunk; "
                "freeze those statistics (layer.eval())"
            )

    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            layer.register_forward_pre_hook(partial(refuse, name))


def _cut(
    lengths: Sequence[int], chunk_size: int | None, kept_cells: int, fewest_cells: int | None
) -> list[tuple[list[int], int]]:
    """Cut rows of these lengths into chunks, the longest first: the numbers of the rows of each, and its columns."""
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


def _with_shared_rows(embed: Embed, tokens: nn.Embedding, input_ids: Tensor) -> Embed:
    """Makes `embed` look tokens up among those of the batch, gathered once: the table has one gradient for all."""
    weight = tokens.weight
    whole = weight.shape == (tokens.num_embeddings, tokens.embedding_dim)  # a sharded table is not
    if not (weight.requires_grad and whole and torch.is_grad_enabled()):
        return embed

    used = input_ids.unique()  # (U,)
    padding = tokens.padding_idx
    if padding is not None:
        # The row with the number of the padding token gets no gradient, so it has to be that token's here too.
        used = used[used != padding]
        filling = used.new_full((max(1, padding + 1 - len(used)),), padding)
        used = torch.cat([used[:padding], filling, used[padding:]])

    places = torch.zeros(len(weight), dtype=torch.long, device=input_ids.device)
    places[used] = torch.arange(len(used), device=input_ids.device)
    if padding is not None:
        places[padding] = padding

    rows = _UsedRows.apply(weight, used)  # (U, D)

    def embed_with_rows(chunk: Rows) -> Tensor:
        hook = tokens.register_forward_pre_hook(lambda module, ids: (places[ids[0]],))
        parameters: dict[str, Any] = tokens._parameters
        parameters["weight"] = rows  # for this call
        try:
            return embed(chunk)
        finally:
            parameters["weight"] = weight
            hook.remove()

    return embed_with_rows


class _UsedRows(torch.autograd.Function):
    """Rows of a table; to a gradient that the table already has theirs is added without another one of its size."""

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


@contextmanager
def _fresh_casts(several: bool) -> Iterator[None]:
    """Casts weights for each of several chunks anew under autocast.

    Chunks that share a cast weight add up its gradient in half precision, the less exactly the more chunks there
    are; with a cast of their own they add it up in the precision of the parameter, as accumulated steps do.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and not several)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
