"""Progress of long jobs: a bar in a terminal, an occasional line in a log."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 60.0
"""Seconds between two lines of a log, and before the first one."""


def progress(
    items: Iterable[Any], description: str, total: int, unit: str, quiet: bool = False, start: int = 0
) -> tqdm:
    """Iterate over items and show the progress.

    Args:
        items: Items of the job.
        description: Text before the numbers.
        total: Total number of items.
        unit: Name of an item, in the plural.
        quiet: Whether to show nothing.
        start: Number of items done before.
    """
    style: dict[str, Any] = {"unit": f" {unit}"}
    if not sys.stderr.isatty():
        style |= {"mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS, "delay": LOG_SECONDS}
        style["bar_format"] = "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left\n"
    return tqdm(items, description, total, initial=start, disable=quiet, **style)
