"""Work spread over processes: the order, the laziness and the end of a process that dies."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from modeling_supclap.datasets_scripts.parallel import map_in_order


def threads_after(item):
    return item, torch.get_num_threads()


def die_at(fatal, item):
    if item == fatal:
        os._exit(1)
    return item


@pytest.mark.parametrize("workers", [1, 3])
def test_results_are_in_order_and_on_one_thread(workers):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(map_in_order(threads_after, range(50), workers, chunk=4)) == [(item, 1) for item in range(50)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2])
def test_items_are_taken_as_they_are_needed(workers):
    taken = []
    items = (taken.append(item) or item for item in range(1000))
    results = map_in_order(abs, items, workers, chunk=2)
    assert next(results) == 0
    assert len(taken) <= 1 + 2 * workers * 2
    results.close()


def test_a_worker_that_dies_is_told():
    with pytest.raises(RuntimeError, match="a worker process died"):
        list(map_in_order(partial(die_at, 5), range(10), workers=2, chunk=1))


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="asks Linux' /proc who runs")
def test_workers_end_with_a_parent_that_is_killed():
    script = """if True:
        import os, sys, time
        from modeling_supclap.datasets_scripts.parallel import map_in_order
        def pid(_):
            time.sleep(0.05)
            return os.getpid()
        results = map_in_order(pid, range(10**6), workers=2, chunk=1)
        found = set()
        while len(found) < 2:
            found.add(next(results))
        print(*found, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if _runs(pid)]


def _runs(pid):
    """Whether the process is there; one that has ended and was not waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
