"""Runs a function of a test file in several real gloo processes, as `torchrun` starts them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_processes(script: str, *arguments: str, count: int = 2, timeout_seconds: float = 240) -> str:
    """`torchrun --nproc_per_node count script arguments`; its output, or an AssertionError with it."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", script, *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
