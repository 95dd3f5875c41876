"""Exact gradients of a big contrastive batch in the memory of a small one (Gao et al., 2021, arXiv 2101.06983).

A contrastive loss wants the embeddings of the whole batch at once. What fills the memory are the activations behind
them, and those of one row have nothing to do with those of another. So the rows are embedded chunk by chunk and their
activations forgotten; the loss sees all embeddings; and the backward pass makes each chunk's activations again, with
the same dropout, when the gradient of its embeddings is known.

The forgetting and remaking is PyTorch's non-reentrant checkpoint, one for each chunk. Nothing else of a training step
changes: it stays one forward and one backward pass, with whatever scales, synchronises or accumulates gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

Rows = Mapping[str, Tensor]
Embed = Callable[[Rows], Tensor]


def embed_in_chunks(embed: Embed, inputs: Rows, chunk_size: int, mask: str | None = None) -> Tensor:
    """Embeds a batch with the activations of at most `chunk_size` rows alive, in the forward and in the backward pass.

    The gradients are those of `embed(inputs)`, whatever loss the embeddings go into. The price is one more forward
    pass over all chunks but the last, which keeps its activations, since the backward pass begins with it. Call it
    once for each tower: together they then take the memory of a plain step on `chunk_size` clips and as many texts.

    Args:
        embed: rows of the batch to their embeddings `(n, d)`. A row's embedding must not depend on the other rows,
            see `refuse_batch_statistics`. Random numbers may be drawn, on the CPU and on the device of the inputs.
        inputs: tensors by name, each with the N rows along its first axis.
        chunk_size: rows of a chunk; a batch of no more rows is embedded at once.
        mask: which of `inputs` tells real columns from padding, 1 and 0, `(N, L)`; all inputs then have L columns on
            their last axis. Rows of similar length go together and each chunk loses the padding that it does not
            need, which saves about half the time on captions. None keeps chunks in order and padded as they are.

    Returns:
        `(N, d)`, in the order of the inputs.

    Raises:
        ValueError: `chunk_size` is below 1, or the inputs hold no row or different numbers of rows.

    Example:
        >>> tower = nn.Linear(2, 3)
        >>> batch = {"x": torch.ones(5, 2)}
        >>> embeds = embed_in_chunks(lambda rows: tower(rows["x"]), batch, chunk_size=2)
        >>> embeds.sum().backward()
        >>> embeds.shape, tower.bias.grad
        (torch.Size([5, 3]), tensor([5., 5., 5.]))
    """
    if _count(inputs, chunk_size) <= chunk_size:
        return embed(inputs)
    if mask is None:
        return _embed_each(embed, _split(inputs, chunk_size))
    order = _ends(inputs[mask]).argsort(stable=True)
    chunks = _split({name: tensor[order] for name, tensor in inputs.items()}, chunk_size)
    return _embed_each(embed, [_trim(chunk, mask) for chunk in chunks])[order.argsort()]


def refuse_batch_statistics(module: nn.Module) -> None:
    """Makes each batch norm of a module raise where it would normalise by the statistics of its batch.

    It would see a chunk in place of the batch, which changes the gradients (by a tenth, for one at the input).

    Args:
        module: what is to be embedded with; marked for good.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            layer.register_forward_pre_hook(partial(_refuse, name))


def _refuse(name: str, layer: nn.Module, inputs: Any) -> None:
    if layer.training:
        raise ValueError(
            f"{name} normalises by the statistics of its batch, so its output differs from chunk to chunk; "
            "train this tower without cached_chunk_size"
        )


def _count(inputs: Rows, chunk_size: int) -> int:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; a chunk needs at least one row")
    counts = {name: len(tensor) for name, tensor in inputs.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"got rows {counts}; give tensors with the same number of rows, at least one")
    return next(iter(counts.values()))


def _split(inputs: Rows, chunk_size: int) -> list[Rows]:
    pieces = (tensor.split(chunk_size) for tensor in inputs.values())
    return [dict(zip(inputs, chunk, strict=True)) for chunk in zip(*pieces, strict=True)]


def _ends(mask: Tensor) -> Tensor:
    """Columns up to each row's last real one, `(N,)`; all of them where the padding comes first."""
    columns = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return (columns * mask.bool()).amax(dim=-1)


def _trim(chunk: Rows, mask: str) -> Rows:
    width = max(1, int(_ends(chunk[mask]).max()))
    return {name: tensor[..., :width] for name, tensor in chunk.items()}


def _embed_each(embed: Embed, chunks: list[Rows]) -> Tensor:
    def embed_chunk(chunk: Rows) -> Tensor:
        with _fresh_casts():
            return embed(chunk)

    *forgotten, last = chunks
    return torch.cat([*(checkpoint(embed_chunk, chunk, use_reentrant=False) for chunk in forgotten), embed_chunk(last)])


@contextmanager
def _fresh_casts() -> Iterator[None]:
    """Casts weights for each chunk anew under autocast.

    Chunks that share a cast weight add up its gradient in half precision, the less exactly the more chunks there
    are; with a cast of their own they add it up in the precision of the parameter, as accumulated steps do.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
