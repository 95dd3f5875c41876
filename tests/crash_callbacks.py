"""Simulated crashes: end a run between two steps, and kill a process that has workers."""

import contextlib
import multiprocessing
import os
import signal
import time

import pytest
import torch
from transformers import TrainerCallback


class Killed(Exception):
    """Simulated crash."""


class KillAt(TrainerCallback):
    """Callback that raises `Killed` after the given step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def name_worker(_):
    """Return the process id of a worker, with more bytes than an unread pipe can buffer."""
    return os.getpid(), bytes(200_000)


def read_two(results, sender):
    """Read one result of each of two workers in the parent process, then sleep."""
    results = iter(results)
    for _ in range(2):
        sender.send(next(results)[0])
    time.sleep(600)


def assert_workers_end_with_their_parent(results, monkeypatch):
    """Read results of `name_worker` in a separate process, kill it, and wait for its two workers to end.

    Args:
        results: Iterable of at least four results, computed by two workers as they are read.
        monkeypatch: Used to shorten the interval at which workers check for their parent.
    """
    monkeypatch.setattr(torch.utils.data._utils.worker, "MP_STATUS_CHECK_INTERVAL", 0.1)
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    parent = processes.Process(target=read_two, args=(results, sender))
    parent.start()
    sender.close()
    workers = {receiver.recv(), receiver.recv()}
    assert len(workers) == 2

    parent.kill()
    parent.join()
    try:
        assert receiver.poll(60), "a worker is left"
        with pytest.raises(EOFError):  # no process can write any more
            receiver.recv()
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
