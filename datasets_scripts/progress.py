"""Progress of long jobs: a progress bar in a terminal, lines with the time left in a log file."""

import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 60.0
"""Seconds between two log lines."""
FIRST_LOG_SECONDS = 10.0
"""Seconds before the first log line."""


class Bar(tqdm):
    """Progress bar whose clock starts after the first batch, because that one also loads and warms up."""

    _is_warm = False

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.update()
        self.close()

    def update(self, n: float | None = 1) -> bool | None:
        """Count items, as `tqdm.update`. The first call restarts the clock."""
        if self.disable or self._is_warm:
            return super().update(n)
        self.start_t = self.last_print_t = self._time()
        self._is_warm, self.initial = True, self.n + (n or 0)
        super().update(n)
        return None if self.delay else self.refresh()


class LogLines(Bar):
    """Progress as whole lines: the first after `FIRST_LOG_SECONDS`, the next every `LOG_SECONDS`. None is repeated."""

    printed = -1

    def display(self, *args: Any, **kwargs: Any) -> bool:
        """Print a line if there is progress, and wait longer before the next one. Return whether tqdm must clear it."""
        if self.n != self.printed:
            self.printed = self.n
            print(self, file=self.fp, flush=True)
        self.mininterval = LOG_SECONDS
        return False


def progress(
    items: Iterable[Any], description: str, total: int | None, unit: str, quiet: bool = False, start: int = 0
) -> tqdm:
    """Wrap an iterable in a tqdm bar. `unit` is a plural, such as "clips"; `start` items are already done."""
    # the mean rate since the start of the clock; the time is checked after each item, as lengths of items differ
    style: dict[str, Any] = {"unit": f" {unit}", "smoothing": 0, "miniters": 1}
    if sys.stderr.isatty():
        # some pseudo-terminals have no width, and tqdm would print blank lines
        style["ncols"] = shutil.get_terminal_size().columns
        return Bar(items, description, total, initial=start, disable=quiet, **style)

    style |= {"bar_format": "{desc}: {n_fmt} of {total_fmt}{unit}, {remaining} left", "leave": False}
    style["delay"] = min(FIRST_LOG_SECONDS, LOG_SECONDS)
    return LogLines(items, description, total, initial=start, disable=quiet, **style)
