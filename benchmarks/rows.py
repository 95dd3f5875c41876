"""What the benchmarks share: variants that take turns, and the rows of the table that `run.py` writes."""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

HEADER = ("goal", "what", "wanted", "least", "median", "met")


@dataclass
class Row:
    """One line of the table.

    Args:
        goal: The name of the goal, such as G4.
        what: What is measured, and in units of what.
        least: From the least of the rounds.
        median: From the median of the rounds; by default there was one.
        wanted: The bound, such as "<= 1.3" or ">= 8"; empty where there is none.
        unit: What follows the numbers.
    """

    goal: str
    what: str
    least: float
    median: float | None = None
    wanted: str = ""
    unit: str = "x"

    @property
    def is_met(self) -> bool | None:
        """Whether the least keeps the bound; None where there is none."""
        if not self.wanted:
            return None
        sign, bound = self.wanted.split()
        return self.least <= float(bound) if sign == "<=" else self.least >= float(bound)

    @property
    def cells(self) -> tuple[str, ...]:
        """The line as text, in the order of `HEADER`."""
        met = {None: "", True: "yes", False: "no"}[self.is_met]
        least, median = (f"{number:.3g} {self.unit}" for number in (self.least, self.median or self.least))
        return self.goal, self.what, self.wanted, least, median, met


def get_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_clock() -> float:
    """Seconds of the process where it runs on one thread, which other programs disturb less; else of the wall."""
    if torch.cuda.is_available() or torch.get_num_threads() > 1:
        return read_wall_clock()
    return time.process_time()


def read_wall_clock() -> float:
    """Seconds of the wall, for what works in processes of its own too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(
    ways: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = read_clock
) -> dict[str, list[float]]:
    """The seconds of each way in each round; one round before warms up.

    Args:
        ways: What to run, by name; each runs once a round.
        rounds: How many rounds count.
        clock: Gives the seconds.
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
    """The time of one way in units of another: from the least of each, and the median over the rounds."""
    mine, theirs = seconds[name], seconds[unit]
    return min(mine) / min(theirs), statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def run_script(measure: Callable[..., Iterable[Row]], description: str | None) -> None:
    """What a benchmark does as a script: prints its rows, with an option for each argument of `measure`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        several: dict[str, Any] = {"nargs": "+"} if isinstance(default, tuple) else {}
        kind = type(default[0] if several else default)
        parser.add_argument(f"--{name}", type=str if default is None else kind, default=default, **several)
    print_rows(measure(**vars(parser.parse_args())))


def print_rows(rows: Iterable[Row]) -> None:
    """Prints the lines in columns."""
    lines = [HEADER, *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
