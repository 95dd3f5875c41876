"""How much memory a call takes."""

import tracemalloc
from collections.abc import Callable
from typing import Any


def traced_peak(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Bytes allocated at the worst moment of the call."""
    tracemalloc.start()
    try:
        function(*arguments, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
