"""All-gather with gradients, and shutdown of the process group."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..losses.tiles import shared_tiles


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(dist.get_world_size() * len(tensor), *tensor.shape[1:])
        # its new name in torch 2.13
        gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather_into(gathered, tensor.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("got create_graph=True for embeddings of several processes; use a single process")
        own = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        # the sum over processes of the rows of this process
        reduce_scatter(own, gradient.contiguous())
        return own


def world_size() -> int:
    """Return the number of distributed processes, or 1 if training is not distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def leave_process_group() -> None:
    """Destroy the process group if one exists. Call this at the end of a script that may run in several processes.

    Otherwise Gloo threads may still own tensors at interpreter exit, and freeing these tensors aborts the process
    ("terminate called without an active exception": https://github.com/pytorch/pytorch/issues/190489).
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def gather(tensor: Tensor) -> Tensor:
    """All-gather a tensor `(B, ...)` along its first axis, in rank order, with gradients.

    Each process then computes the same loss on the global batch. The backward pass sums the gradients of all processes,
    which is `world_size()` times the gradient of the loss. DistributedDataParallel then averages over the processes, so
    the result is exact: one process with N rows and N processes with one row each compute the same gradients.

    Returns:
        `(world_size() * B, ...)`. With a single process, this is the input tensor.
    """
    return tensor if world_size() == 1 else _GatherWithGradient.apply(tensor)


def distributed_tiles() -> AbstractContextManager[None]:
    """Return a context manager in which each process computes a part of the tiles of the similarity matrix."""
    return nullcontext() if world_size() == 1 else shared_tiles(dist.get_rank(), world_size(), gather)
