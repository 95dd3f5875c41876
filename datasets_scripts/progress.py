"""Progress of long jobs: a progress bar in a terminal, one line per minute in a log file."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 60.0
"""Seconds between two log lines, and before the first one."""


def progress(
    items: Iterable[Any], description: str, total: int, unit: str, quiet: bool = False, start: int = 0
) -> tqdm:
    """Wrap an iterable in a tqdm bar. `unit` is a plural, such as "clips"; `start` items are already done."""
    style: dict[str, Any] = {"unit": f" {unit}"}
    if not sys.stderr.isatty():
        style |= {"mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS, "delay": LOG_SECONDS}
        style["bar_format"] = "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left\n"
    return tqdm(items, description, total, initial=start, disable=quiet, **style)
