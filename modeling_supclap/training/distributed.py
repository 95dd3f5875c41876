"""Gathering of batches over processes with gradients, and the start and end of a process group."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from ..losses.tiles import shared_tiles


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts = list(map(torch.empty_like, [tensor] * dist.get_world_size()))
        dist.all_gather(parts, tensor.contiguous())

        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("got create_graph=True; second derivatives of gathered embeddings need a single process")
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # autograd may share it with other nodes
        dist.all_reduce(gradient)

        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def world_size() -> int:
    """Gives the number of processes that train together, 1 when training is not distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join_processes_on_cpus(backend: str | None, timeout_seconds: float) -> None:
    """Joins the launched processes before the Trainer does: on CPUs it would forget its `ddp_timeout`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=True, backend=backend, timeout=timedelta(seconds=timeout_seconds))


def require_the_launched_processes(count: int) -> None:
    """Checks that `count`, the processes that train together, are all that the launcher started.

    On CPUs the Trainer joins them only when told to; left alone, each would train the whole run and write its files.

    Raises:
        ValueError: More were started.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > count:
        raise ValueError(
            f"{launched} processes were started, but this one trains with {count} in all; on CPUs give --use_cpu true"
        )


def leave_process_group() -> None:
    """Destroys the process group, if there is one: the last thing a script does that may run in several processes.

    Without it Gloo's threads may still hold tensors when the interpreter goes, and freeing those then aborts the
    process ("terminate called without an active exception": https://github.com/pytorch/pytorch/issues/190489).
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenates a tensor of every process along its first axis, in the order of the processes.

    Each process then computes the same loss on the global batch. The backward pass sums what the processes want of a
    row, so it carries `world_size()` times the gradient of that loss, and the mean that DistributedDataParallel takes
    over the processes makes it exact: one process with N rows and N processes with one row give the same gradients.

    Args:
        tensor: `(B, ...)`, of the same shape on every process.

    Returns:
        `(world_size() * B, ...)`; on a single process the tensor itself.
    """
    if world_size() == 1:
        return tensor
    return _GatherWithGradient.apply(tensor)


def distributed_tiles() -> AbstractContextManager[None]:
    """Within this context a loss in tiles is made by all processes together, each making the tiles of its own clips."""
    if world_size() == 1:
        return nullcontext()
    return shared_tiles(dist.get_rank(), world_size(), gather)
