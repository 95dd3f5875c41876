"""How long one waits: for the package, for help, and for the first step of the default training.

    OMP_NUM_THREADS=1 python benchmarks/bench_imports.py

CPU seconds of whole processes, the least and the median of several; the first step once.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile

from rows import Row, print_rows

FIRST_STEP = ["-m", "modeling_supclap.recipes.train_supclap", "--max_steps", "1", "--eval_strategy", "no"]
FIRST_STEP += ["--save_strategy", "no", "--load_best_model_at_end", "false", "--report_to", "none"]
FIRST_STEP += ["--num_test", "8", "--num_validation", "8", "--num_train", "64"]


def cpu_seconds(*words: str) -> float:
    """The CPU time of a Python process and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int = 3) -> list[Row]:
    """The three rows of waiting."""
    seconds: dict[str, list[float]] = {"transformers": [], "ours": [], "help": []}
    for _ in range(rounds):
        seconds["transformers"].append(cpu_seconds("-c", "import transformers"))
        seconds["ours"].append(cpu_seconds("-c", "import transformers, modeling_supclap"))
        seconds["help"].append(cpu_seconds("-m", "modeling_supclap.recipes.command", "train", "--help"))
    least = {name: min(values) for name, values in seconds.items()}
    median = {name: statistics.median(values) for name, values in seconds.items()}

    added = least["ours"] - least["transformers"], median["ours"] - median["transformers"]
    with tempfile.TemporaryDirectory() as folder:
        first_s = cpu_seconds(*FIRST_STEP, "--output_dir", folder)
    return [
        Row("imports", "`import modeling_supclap` over `import transformers`", *added, "<= 0.3", "CPU s"),
        Row("imports", "`supclap train --help`", least["help"], median["help"], "<= 2", "CPU s"),
        Row("imports", "a training of one step, with data, test and report", first_s, None, "", "CPU s"),
    ]


if __name__ == "__main__":
    print_rows(measure())
