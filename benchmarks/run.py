"""Run all benchmarks, and write a results table with a machine description to `benchmarks/results.md`.

    OMP_NUM_THREADS=1 python benchmarks/run.py [--only step search] [--output benchmarks/results.md]

The benchmarks run one after the other, each in its own process, on a GPU if there is one. Most times are ratios of two
variants in the same process, as minimum and median over the rounds. Bounds apply to the median. If a benchmark fails,
the error is written below the table, and the other benchmarks still run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import multiprocessing
import os
import platform
import re
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BENCHMARKS = ("clap", "step", "search")
"""Benchmarks in the order of the table. `gpu` runs only if it is selected with `--only`."""


def measure(name: str) -> list[Any]:
    """Run one benchmark. Return the rows of its results table."""
    return importlib.import_module(f"bench_{name}").measure()


def describe_machine() -> str:
    """Return a text with the processor, the GPU and the package versions."""
    import torch

    processors = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search("model name.*: (.*)", processors)
    processor = found[1] if found else platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    return (
        f"{processor}, {os.cpu_count()} cores{gpu}; {os.environ['OMP_NUM_THREADS']} thread(s); "
        f"Python {platform.python_version()}, {versions}"
    )


def main() -> None:
    """Run the selected benchmarks, and print and write the results table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rows import make_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*BENCHMARKS, "gpu"), help="Benchmarks to run.")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.md")
    options = parser.parse_args()
    target = "bench-gpu" if options.only == ["gpu"] else "bench"

    started, rows, failed = time.perf_counter(), [], []
    for name in options.only or BENCHMARKS:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            try:
                rows += process.submit(measure, name).result()
            except Exception as error:
                failed.append(f"{name} ended with {type(error).__name__}: {error}")
        print(f"{name}: {time.perf_counter() - started:.0f} s so far", flush=True)

    table = make_table(rows)
    print("", table.to_text(), *failed, sep="\n")
    seconds = time.perf_counter() - started
    lines = ["# Benchmarks", "", f"{datetime.date.today()}, in {seconds:.0f} s, `make {target}`:"]
    lines += [f"{describe_machine()}.", "", table.to_markdown()]
    for failure in failed:
        lines += ["", failure]
    if options.output == FOLDER / "results.md":
        lines += ["", (FOLDER / "notes.md").read_text(encoding="utf-8").strip()]
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
