"""All-gather with gradients, and creation and destruction of the process group."""

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
            raise RuntimeError(
                "got create_graph=True for embeddings gathered from several processes; "
                "use a single process for second derivatives"
            )
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # autograd may share it with other nodes
        dist.all_reduce(gradient)

        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def world_size() -> int:
    """Return the number of distributed processes, or 1 if training is not distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join_processes_on_cpus(backend: str | None, timeout_seconds: float) -> None:
    """Initialize the process group on CPUs with a timeout; the Trainer would ignore its `ddp_timeout` here."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=True, backend=backend, timeout=timedelta(seconds=timeout_seconds))


def require_the_launched_processes(count: int) -> None:
    """Raise if the launcher started more processes than the `count` processes that train together.

    On CPUs the Trainer creates a process group only with `--use_cpu true`. Without it, each process would train alone
    and write the same files.

    Raises:
        ValueError: The launcher started more than `count` processes.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > count:
        raise ValueError(
            f"{launched} processes were started, but only {count} would train together; on CPUs set --use_cpu true"
        )


def leave_process_group() -> None:
    """Destroy the process group if one exists. Call this at the end of a script that may run in several processes.

    Otherwise Gloo threads may still own tensors at interpreter exit, and freeing these tensors aborts the process
    ("terminate called without an active exception": https://github.com/pytorch/pytorch/issues/190489).
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """All-gather a tensor along its first axis, in rank order, with gradients.

    Each process then computes the same loss on the global batch. The backward pass sums the gradients of all processes,
    which gives `world_size()` times the gradient of the loss. DistributedDataParallel then averages over the processes,
    so the result is exact: one process with N rows and N processes with one row each compute the same gradients.

    Args:
        tensor: `(B, ...)`, with the same shape in every process.

    Returns:
        `(world_size() * B, ...)`. With a single process, the input tensor itself.
    """
    if world_size() == 1:
        return tensor
    return _GatherWithGradient.apply(tensor)


def distributed_tiles() -> AbstractContextManager[None]:
    """Return a context manager that splits the tiles of a loss among the processes, see `losses/tiles.py`."""
    if world_size() == 1:
        return nullcontext()
    return shared_tiles(dist.get_rank(), world_size(), gather)
