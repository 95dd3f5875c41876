"""All benchmarks, one table: printed, and written to `benchmarks/results.md` with the machine that it is of.

    OMP_NUM_THREADS=1 python benchmarks/run.py [--only G4 growth] [--output benchmarks/results.md]

Each benchmark runs in a process of its own, one after the other, on a GPU where there is one. Times are ratios within
one process, of the least and of the median round; a goal is met by the least. What ends with an error is named in the
table and does not stop the others.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import multiprocessing
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
BENCHMARKS = {
    "bench_imports": ("imports",),
    "bench_step": ("step", "G1", "G2", "G3", "G5", "G6", "SVR", "drift", "frozen", "table"),
    "bench_support_vector": ("G4",),
    "bench_mel": ("G7",),
    "bench_input_pipeline": ("G8", "embed"),
    "bench_retrieval": ("G9", "G10", "metrics", "evaluation"),
    "bench_towers": ("G11",),
    "bench_composition": ("G12",),
    "bench_growth": ("growth",),
    "bench_rows": ("rows",),
    "bench_tiles": ("tiles",),
    "bench_stream": ("stream",),
    "bench_search": ("search",),
    "bench_localize": ("localize",),
}
"""The goals that each file measures."""


def measure(name: str) -> list:
    """The rows of one benchmark."""
    return importlib.import_module(name).measure()


def describe_machine() -> str:
    """The processor, or GPU, and the versions."""
    import torch

    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            processor = line.partition(": ")[2]
            break

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    return (
        f"{processor}, {os.cpu_count()} cores{gpu}; {os.environ['OMP_NUM_THREADS']} thread(s); "
        f"Python {platform.python_version()}, {versions}"
    )


def main() -> None:
    """Runs, prints and writes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rows import HEADER, Row, print_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="Goals, such as G4; by default all.")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.md")
    options = parser.parse_args()

    started, rows, failed = time.perf_counter(), [], []
    for name, goals in BENCHMARKS.items():
        if options.only and not set(goals) & set(options.only):
            continue
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            try:
                rows += process.submit(measure, name).result()
            except Exception as error:
                failed.append(f"{name} ended with {type(error).__name__}: {error}")
        print(f"{name}: {time.perf_counter() - started:.0f} s so far", flush=True)

    chosen: list[Row] = [row for row in rows if not options.only or row.goal in options.only]
    print()
    print_rows(chosen)
    print(*failed, sep="\n")

    lines = ["# Benchmarks", "", f"{datetime.date.today()}, in {time.perf_counter() - started:.0f} s, `make bench`:"]
    lines += [f"{describe_machine()}.", "", f"| {' | '.join(HEADER)} |", "|---|---|---|---:|---:|---|"]
    for row in chosen:
        lines.append(f"| {' | '.join(row.cells)} |")
    for failure in failed:
        lines += ["", failure]
    lines += ["", (FOLDER / "notes.md").read_text(encoding="utf-8").strip()]
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
