"""Run Python in a separate process, and scripts in several gloo processes.

Unless a test needs a new interpreter or a launcher, processes are forks of one that has imported the package, which
saves five seconds per process.
"""

import fnmatch
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
FOLDERS = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
PATHS = {"PYTHONPATH": os.pathsep.join(FOLDERS), "OMP_NUM_THREADS": "1"}

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "builders",
        "matplotlib.pyplot",
        "modeling_supclap.evaluation.report",
        "modeling_supclap.model_card",
        "modeling_supclap.recipes.command",
        "modeling_supclap.training.trainer",
        "scipy.stats",
        "sklearn.manifold",
    ]
)


class Moment(NamedTuple):
    """Time at which a process is killed: its `number`-th audit event of this name with a path that matches `path`."""

    event: str
    path: str
    number: int = 1


def run_python(*words: object, cwd: str | Path = ROOT, timeout_seconds: float = 300, **environment: str) -> str:
    """Run `python words` with this package and the test helpers importable, and return its output.

    Args:
        *words: Options, code or script, arguments.
        cwd: Working directory.
        timeout_seconds: Time limit.
        **environment: Environment variables to set.
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


def run_processes(script: str | Path, *arguments: object, count: int = 2) -> str:
    """Run a script in `count` forks as torchrun would, assert that all succeed, and return their output.

    If one fails, the others are killed. A script must leave its process group and end its threads, because otherwise it
    crashes occasionally (see `leave_process_group`).
    """
    codes, printed = run_forks(script, *arguments, count=count)
    assert codes == [0] * count, f"{codes}: {printed}"
    return printed


def run_killed(script: str | Path, *arguments: object, moment: Moment, count: int = 1) -> None:
    """Run a script in forks, kill the last one at `moment`, and assert that the moment was reached."""
    codes, printed = run_forks(script, *arguments, count=count, moment=moment)
    assert codes[-1] == -signal.SIGKILL, f"{codes}: {printed}"


def run_forks(
    script: str | Path, *arguments: object, count: int = 1, moment: Moment | None = None
) -> tuple[list[int | None], str]:
    """Run a script in forks; return their exit codes and their combined output."""
    with mock.patch.dict(os.environ, PATHS):
        forkserver.ensure_running()

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        processes = []
        for rank in range(count):
            environment = {**os.environ, **PATHS}
            if count > 1:
                environment |= {**launch, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            killed_at = moment if rank == count - 1 else None
            words = tuple(map(str, (script, *arguments)))
            process = FORKS.Process(target=_be_the_script, args=(words, log.name, environment, killed_at))
            process.start()
            processes.append(process)

        codes: list[int | None] = [None]
        deadline = time.monotonic() + 240
        while None in codes:
            time.sleep(0.02)
            codes = [process.exitcode for process in processes]
            if any(codes) or time.monotonic() > deadline:
                for process in processes:
                    process.kill()
        return codes, Path(log.name).read_text(errors="replace")


def _be_the_script(words: Sequence[str], log: str, environment: dict[str, str], killed_at: Moment | None) -> None:
    """Run a script in a fork, with its output in `log`."""
    multiprocessing.set_start_method(None, force=True)  # its workers start with the default method
    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)

    seen = []

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        assert killed_at is not None
        if event == killed_at.event and any(fnmatch.fnmatch(str(path), killed_at.path) for path in arguments):
            seen.append(arguments)
            if len(seen) == killed_at.number:
                os.kill(os.getpid(), signal.SIGKILL)

    if killed_at is not None:
        sys.addaudithook(kill)
    run_script(*words)


def assert_same_training(one: Path, many: Path, world_size: int) -> None:
    """Assert that the parameters in two reports `{"world_size": W, run: {parameter: values}}` agree to 1e-6."""
    expected, found = (json.loads(path.read_text()) for path in (one, many))
    assert (expected.pop("world_size"), found.pop("world_size")) == (1, world_size)
    assert expected.keys() == found.keys()
    for run, parameters in expected.items():
        for name, values in parameters.items():
            np.testing.assert_allclose(found[run][name], values, atol=1e-6, rtol=0, err_msg=f"{run}: {name}")


def run_script(script: str, *arguments: str) -> None:
    """Run a script in this process; assert that it leaves its process group and ends its threads."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as for `python script`
    runpy.run_path(script, run_name="__main__")
    assert not dist.is_initialized(), f"{script} ended inside its process group"
    assert "supclap" not in {thread.name for thread in threading.enumerate()}, f"{script} left a thread running"
