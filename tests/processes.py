"""Runs Python in a process of its own, and a script in several real gloo processes, as `torchrun` starts them."""

import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]


def run_python(*words: object, cwd: str | Path = ROOT, timeout_seconds: float = 300, **environment: str) -> str:
    """`python words`, which finds this package and the helpers of the tests; what it prints.

    Args:
        *words: Options, code or script, arguments.
        cwd: Where it runs.
        timeout_seconds: After which it is killed.
        **environment: Variables to change.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **PATHS, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_processes(script: str, *arguments: str, count: int = 2, timeout_seconds: float = 240) -> str:
    """`torchrun --nproc_per_node count script arguments`; its output, or an AssertionError with it.

    A script fails that ends inside its process group or beside a thread that asks the others' store: it would crash
    now and then (`leave_process_group` says why).
    """
    launcher = [*LAUNCHER, f"--nproc_per_node={count}"]
    return run_python(*launcher, __file__, script, *arguments, timeout_seconds=timeout_seconds)


def kill_one_of_two(script: str, *arguments: str, is_time: Callable[[], bool]) -> None:
    """Starts two processes as `run_processes` does, kills the second when it is time, and waits for the launch to fail.

    Args:
        script: As of `run_processes`.
        *arguments: As of `run_processes`.
        is_time: Tells when there is something to lose.
    """
    command = [sys.executable, *LAUNCHER, "--nproc_per_node=2", __file__, script, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **PATHS}, stderr=subprocess.PIPE) as launcher:
        deadline = time.monotonic() + 120
        while launcher.poll() is None and not is_time() and time.monotonic() < deadline:
            time.sleep(0.005)
        for process in psutil.Process(launcher.pid).children():
            if process.environ().get("RANK") == "1":
                process.kill()
        _, printed = launcher.communicate(timeout=120)
    assert launcher.returncode != 0, f"nothing was left to do when one was killed\n{printed.decode()}"


def assert_same_training(one: Path, many: Path, world_size: int) -> None:
    """Both reports hold `{"world_size": W, run: {parameter: values}}`; the parameters agree to 1e-6."""
    expected, found = (json.loads(path.read_text()) for path in (one, many))
    assert (expected.pop("world_size"), found.pop("world_size")) == (1, world_size)
    assert expected.keys() == found.keys()
    for run, parameters in expected.items():
        for name, values in parameters.items():
            np.testing.assert_allclose(found[run][name], values, atol=1e-6, rtol=0, err_msg=f"{run}: {name}")


def run_script(script: str, *arguments: str) -> None:
    """What each process does: the script, which has to leave its process group and to end its threads."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as `python script` has it
    runpy.run_path(script, run_name="__main__")
    assert not dist.is_initialized(), f"{script} ended inside its process group"
    assert "supclap" not in {thread.name for thread in threading.enumerate()}, f"{script} left a thread running"


if __name__ == "__main__":
    run_script(*sys.argv[1:])
