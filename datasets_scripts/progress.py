"""How far a long job is: a bar in a terminal, a line now and then in a log."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 60.0
"""From one line of a log to the next, and to the first."""


def progress(
    items: Iterable[Any], description: str, total: int, unit: str, quiet: bool = False, start: int = 0
) -> tqdm:
    """Passes items on and shows how many there were.

    Args:
        items: What the job goes through.
        description: What is done with them, before the numbers.
        total: How many there are in all.
        unit: What one of them is, in the plural.
        quiet: Shows nothing.
        start: How many were done before.
    """
    style: dict[str, Any] = {"unit": f" {unit}"}
    if not sys.stderr.isatty():
        style |= {"mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS, "delay": LOG_SECONDS}
        style["bar_format"] = "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left\n"
    return tqdm(items, description, total, initial=start, disable=quiet, **style)
