"""Ends a run between two steps, as a crash would, and a process that has workers, as `kill -9` does."""

import contextlib
import multiprocessing
import os
import signal
import time

import pytest
import torch
from transformers import TrainerCallback


class Killed(Exception):
    """The crash."""


class KillAt(TrainerCallback):
    """Crashes after the given step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def name_worker(_):
    """What a worker hands over: its process, with more bytes than a pipe takes that nobody reads."""
    return os.getpid(), bytes(200_000)


def read_two(results, sender):
    """What the parent does: it reads a result of each of two workers, and never another."""
    results = iter(results)
    for _ in range(2):
        sender.send(next(results)[0])
    time.sleep(600)


def assert_workers_end_with_their_parent(results, monkeypatch):
    """Reads results of `name_worker` in a process of its own, kills it, and waits for its two workers to end.

    Args:
        results: Two workers make them as they are read, four of them or more.
        monkeypatch: Shortens the time in which a worker notices that it is alone.
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
        with pytest.raises(EOFError):  # nobody is left who could write
            receiver.recv()
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
