"""Progress of long jobs: a progress bar in a terminal, lines with the time left in a log file."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 60.0
"""Seconds between two log lines."""
FIRST_LOG_SECONDS = 10.0
"""Seconds before the first log line."""


class LogLines(tqdm):
    """Progress as whole lines: the first after `FIRST_LOG_SECONDS`, the next every `LOG_SECONDS`. None is repeated."""

    printed = -1

    def display(self, *args: Any, **kwargs: Any) -> bool:
        """Print a line if there is progress, and wait longer before the next one. Return whether tqdm must clear it."""
        if self.n != self.printed:
            self.printed = self.n
            print(self, file=self.fp, flush=True)
        self.mininterval = self.maxinterval = LOG_SECONDS
        return False


def progress(
    items: Iterable[Any], description: str, total: int | None, unit: str, quiet: bool = False, start: int = 0
) -> tqdm:
    """Wrap an iterable in a tqdm bar. `unit` is a plural, such as "clips"; `start` items are already done."""
    style: dict[str, Any] = {"unit": f" {unit}"}
    if sys.stderr.isatty():
        if not _terminal_width():  # some pseudo-terminals have no width, and tqdm would print blank lines
            style["ncols"] = 80
        return tqdm(items, description, total, initial=start, disable=quiet, **style)

    first = min(FIRST_LOG_SECONDS, LOG_SECONDS)
    style |= {"mininterval": first, "maxinterval": first, "delay": first}
    style |= {"bar_format": "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left", "leave": False}
    return LogLines(items, description, total, initial=start, disable=quiet, **style)


def _terminal_width() -> int:
    """Return the width of the terminal of standard error, 0 if it is unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 80  # no real terminal; tqdm chooses
