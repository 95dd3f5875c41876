"""One function over many recordings, by several processes, with the results in order."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from .audio import use_threads

T = TypeVar("T")
R = TypeVar("R")


def map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int = 1, chunk: int = 8) -> Iterator[R]:
    """As `map`, by processes that run torch on one thread each, so that their number changes the speed and no bit.

    Args:
        function: Takes an item; a function of a module, or a `functools.partial` of one.
        items: Asked for as they are needed: a few chunks ahead of the results, never all at once.
        workers: Processes; 1 is this one.
        chunk: Items that a process takes at a time.

    Yields:
        The results, in the order of the items.

    Raises:
        RuntimeError: A process died.

    >>> list(map_in_order(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    before = use_threads(1)
    try:
        yield from map(function, items) if workers < 2 else _by_processes(function, iter(items), workers, chunk)
    finally:
        use_threads(before)


def _by_processes(function: Callable[[T], R], items: Iterator[T], workers: int, chunk: int) -> Iterator[R]:
    pool = ProcessPoolExecutor(workers, initializer=_start_worker)
    running: deque[Future[list[R]]] = deque()
    try:
        while True:
            while len(running) < 2 * workers and (taken := list(itertools.islice(items, chunk))):
                running.append(pool.submit(_all, function, taken))
            if not running:
                return
            yield from running.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError("a worker process died, perhaps for want of memory; try again with fewer workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    use_threads()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Without it the workers of a parent that was killed would wait for work, and hold their memory, for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _all(function: Callable[[T], R], items: list[T]) -> list[R]:
    return [function(item) for item in items]
