"""One batch over several processes: gathering that lets gradients through, and waiting that says for whom."""

from __future__ import annotations

import itertools
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import get_int_from_env

from ..losses.tiles import shared_tiles

BEAT_SECONDS = 1.0
"""How often a process says that it lives."""

logger = logging.getLogger(__name__)
_uses = itertools.count()  # of the store, in the same order in every process


class MissingProcessError(RuntimeError):
    """A process of the run has stopped, or does not come to the batch at which the others wait for it."""


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts = list(map(torch.empty_like, [tensor] * dist.get_world_size()))
        dist.all_gather(parts, tensor.contiguous())

        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)

        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def world_size() -> int:
    """Gives the number of processes that train together, 1 when training is not distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first_process() -> bool:
    """Tells whether this is the first of the processes that a launcher started, or the only one.

    Read off what the launcher says: processes without GPUs are in no process group until they are told to join one,
    and up to then each of them takes itself for the main process.
    """
    return get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"], 0) == 0


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


@contextmanager
def first_process_first(what: str, is_first: bool, place: str) -> Iterator[None]:
    """Lets one process run the block before the others, which then find what it left behind.

    The others wait as long as that takes, outside the process group, whose collectives end after `ddp_timeout`.

    Args:
        what: What the block does, for the log of a process that waits for more than a minute.
        is_first: Whether this process is the one.
        place: The same string for those who wait for the same process.

    Raises:
        SystemExit: The first process has failed, and says why itself.
    """
    store = _open_store()
    if store is None:
        yield
        return

    waited_seconds = 0.0
    while not is_first and not store.check([place]):
        time.sleep(0.1)
        waited_seconds += 0.1
        if 60 <= waited_seconds < 60.1:
            logger.warning("process %d waits for the first process: %s", dist.get_rank(), what)
    if not is_first and store.get(place) == b"failed":
        raise SystemExit(1)

    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        if is_first:
            store.set(place, outcome)


@contextmanager
def naming_missing_processes(batches: Callable[[], int], patience_seconds: float) -> Iterator[None]:
    """Says which process the others wait for: a collective that one of them never joins ends without naming it.

    In each process a thread tells the others that it lives and how far it is, and another one looks at the others when
    this process has begun no batch for a while.

    Args:
        batches: Counts the batches that this process has begun.
        patience_seconds: After so many seconds in one batch the processes that it waits for are named in the log.

    Raises:
        MissingProcessError: The block failed, and there are such processes.
    """
    store = _open_store()
    if store is None:
        yield
        return

    rank, ended = dist.get_rank(), threading.Event()
    keys = [str(other) for other in range(world_size())]

    def beat() -> None:
        for number in itertools.count():
            store.set(keys[rank], f"{batches()} {number} pid {os.getpid()} on {platform.node()}")
            if ended.wait(BEAT_SECONDS):
                return

    def watch() -> None:
        begun, since = batches(), time.monotonic()
        while not ended.wait(BEAT_SECONDS):
            if begun != batches():
                begun, since = batches(), time.monotonic()
            elif time.monotonic() - since > patience_seconds:
                missing = look()
                if missing and begun == batches() and not ended.is_set():
                    logger.warning("%s; process %d waits for it at batch %d", missing, rank, begun)
                    since = float("inf")  # said once a batch

    def look() -> str:
        try:
            before = store.multi_get(keys)
            ended.wait(5 * BEAT_SECONDS)
            now = store.multi_get(keys)
        except RuntimeError:  # nobody hosts the store any more, which the first process does without torchrun
            return "process 0 does not answer"

        missing = []
        for key, old, new in zip(keys, before, now, strict=True):
            count, _, where = new.decode().split(" ", 2)
            if old == new:
                missing.append(f"process {key} ({where}) has stopped at batch {count}")
            elif int(count) < batches():
                missing.append(f"process {key} ({where}) is still at batch {count}")
        return ", ".join(missing)

    threads = [threading.Thread(target=task, name="supclap", daemon=True) for task in (beat, watch)]
    for thread in threads:
        thread.start()
    try:
        yield
    except RuntimeError as error:
        missing = look()
        if missing:
            raise MissingProcessError(f"{missing}; process {rank} waited for it at batch {batches()}") from error
        raise
    finally:
        ended.set()
        for thread in threads:  # one that still waits for the store would abort an interpreter that goes
            thread.join()


def _open_store() -> dist.Store | None:
    """A part of its own of the store through which the launched processes found each other; None for one process."""
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"supclap/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_uses)}", store)
