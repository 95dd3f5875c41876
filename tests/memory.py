"""Measure the memory of a call."""

import tracemalloc
from collections.abc import Callable
from typing import Any


def traced_peak(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Return the peak of allocated bytes during a call."""
    tracemalloc.start()
    try:
        function(*arguments, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
