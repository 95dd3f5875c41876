"""Measure the memory of a call."""

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any


def traced_peak(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Return the peak of allocated bytes during a call."""
    tracemalloc.start()
    try:
        function(*arguments, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def resident_peak(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Return how many bytes the resident memory of this process rises during a call, with tensors. Linux only."""
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    function(*arguments, **options)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
