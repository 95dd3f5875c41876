"""How long one waits: for the package, for help, and for the first step of the default training.

    OMP_NUM_THREADS=1 python benchmarks/bench_imports.py

CPU seconds of whole processes, the least and the median of several.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile

import psutil
from rows import Row, print_rows

COMMAND = ["-m", "modeling_supclap.recipes.command"]
FIRST_STEP = ["train", "--max_steps", "1", "--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
FIRST_STEP += ["--load_best_model_at_end", "false", "--output_dir"]
THEIRS = "import torch, datasets, accelerate.commands.launch; from transformers import HfArgumentParser, Trainer"


def cpu_seconds(*words: str) -> float:
    """The CPU time of a Python process and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu_seconds_until(printed: str, *words: str) -> float:
    """The CPU time that a Python process and its children have taken when one of them prints a line."""
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if line.startswith(printed):
                break
        else:
            raise AssertionError("".join(lines))

        seconds = 0.0
        for process in (parent := psutil.Process(run.pid), *parent.children(recursive=True)):
            seconds += sum(process.cpu_times()[:4])  # with those of its children that have ended
        run.kill()
    return seconds


def measure(rounds: int = 3) -> list[Row]:
    """The rows of waiting."""
    seconds: dict[str, list[float]] = {"transformers": [], "ours": [], "help": [], "theirs": [], "first": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            seconds["transformers"].append(cpu_seconds("-c", "import transformers"))
            seconds["ours"].append(cpu_seconds("-c", "import transformers, modeling_supclap"))
            seconds["help"].append(cpu_seconds(*COMMAND, "train", "--help"))
            seconds["theirs"].append(cpu_seconds("-c", THEIRS))
            seconds["first"].append(cpu_seconds_until("step 1 of 1", *COMMAND, *FIRST_STEP, folder))
    least = {name: min(values) for name, values in seconds.items()}
    median = {name: statistics.median(values) for name, values in seconds.items()}

    added = least["ours"] - least["transformers"], median["ours"] - median["transformers"]
    theirs = f"of it {least['theirs']:.1f} are the imports of torch, transformers, datasets and accelerate"
    return [
        Row("imports", "`import modeling_supclap` over `import transformers`", *added, "<= 0.3", "CPU s"),
        Row("imports", "`supclap train --help`", least["help"], median["help"], "<= 2", "CPU s"),
        Row(
            "imports",
            f"`supclap train` to its first step, data prepared, {theirs}",
            least["first"],
            median["first"],
            "<= 10",
            "CPU s",
        ),
    ]


if __name__ == "__main__":
    print_rows(measure())
