"""Time alternating variants, and format the rows of the results table in `run.py`."""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modeling_supclap.evaluation.tables import Table

HEADER = ("benchmark", "what", "bound", "minimum", "median", "met")


@dataclass
class Row:
    """One row of the results table."""

    benchmark: str
    what: str  # the measured quantity and its reference, such as "a step / a plain step"
    least: float  # minimum over the rounds
    median: float | None = None  # over the rounds; None for a single measurement
    bound: str = ""  # bound of the median, such as "at most 1.3" or "at least 8"
    unit: str = "x"

    @property
    def is_met(self) -> bool | None:
        """Whether the median, or a single measurement, meets the bound. None if there is no bound."""
        if not self.bound:
            return None
        kind, limit = self.bound.rsplit(maxsplit=1)
        value = self.least if self.median is None else self.median
        return value <= float(limit) if kind == "at most" else value >= float(limit)

    @property
    def cells(self) -> tuple[str, ...]:
        """The table cells as strings, in the order of `HEADER`."""
        met = {None: "", True: "yes", False: "no"}[self.is_met]
        cells = []
        for number in (self.least, self.median or self.least):
            digits = str(number) if isinstance(number, int) else f"{number:.3g}"
            cells.append(f"{digits} {self.unit}")
        return (self.benchmark, self.what, self.bound, *cells, met)


def get_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_clock() -> float:
    """Return CPU time in seconds for single-threaded CPU runs (less noise from other programs), or else wall time."""
    if torch.cuda.is_available() or torch.get_num_threads() > 1:
        return read_wall_clock()
    return time.process_time()


def read_wall_clock() -> float:
    """Return wall time in seconds, after the GPU has finished. Use this for code that starts its own processes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(
    ways: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = read_clock
) -> dict[str, list[float]]:
    """Time functions `{name: function}` in alternation; each one runs once per round, after one warm-up round.

    Return the seconds of each round, `{name: [seconds, ...]}`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            started = clock()
            run()
            if number:
                seconds[name].append(clock() - started)
    return seconds


def compare(seconds: Mapping[str, Sequence[float]], name: str, unit: str) -> tuple[float, float]:
    """Divide the times of function `name` by those of the reference function `unit`, round by round. Return the ratio
    of the minima, and the median ratio.
    """
    mine, theirs = seconds[name], seconds[unit]
    return min(mine) / min(theirs), statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def run_script(measure: Callable[..., Iterable[Row]], description: str | None) -> None:
    """Run a benchmark as a script, with one command-line option per argument of `measure`. Print its results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        several: dict[str, Any] = {"nargs": "+"} if isinstance(default, tuple) else {}
        kind = type(default[0] if several else default)
        parser.add_argument(f"--{name}", type=str if default is None else kind, default=default, **several)
    print(make_table(measure(**vars(parser.parse_args()))).to_text())


def make_table(rows: Iterable[Row]) -> Table:
    return Table([HEADER, *(row.cells for row in rows)])
