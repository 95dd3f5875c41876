"""Run scripts in forks of a process that has imported all packages, so that each run takes only seconds.

A fork skips the imports, which take several seconds. Otherwise it is like a run that a user starts, with its own
`__main__`, session and output file.
"""

import argparse
import os
import runpy
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """Result of a run.

    Attributes:
        code: Exit status, or the negative number of the signal that ended the run.
        output: Printed text of stdout and stderr.
        seconds: Duration in seconds.
    """

    code: int
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Last line of the output that is not blank."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def warm_up() -> None:
    """Import the packages of the scripts before the first fork. Use one torch thread: threads are not forked."""
    import torch

    torch.set_num_threads(1)
    import datasets
    import matplotlib.pyplot  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn.manifold  # noqa: F401
    import transformers
    from transformers import BertModel, Trainer  # noqa: F401

    import modeling_supclap.evaluation.report
    import modeling_supclap.model_card
    import modeling_supclap.training.trainer  # noqa: F401

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


class Run:
    """A script in a fork.

    Args:
        script: Path of the script, relative to the project.
        arguments: Command-line arguments.
        log: File for stdout and stderr.
        before: Function to call first in the fork, for example to lower a limit.
    """

    def __init__(
        self, script: str, arguments: Sequence[str], log: Path, before: Callable[[], None] | None = None
    ) -> None:
        self.log = log
        self.started = time.perf_counter()
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_script(script, [str(argument) for argument in arguments], log, before)

        self.code: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the script runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def kill(self, alone: bool = False) -> bool:
        """Kill the script and its children with SIGKILL. Return False if the script had already ended.

        Args:
            alone: Whether to kill only the script, so that its children must detect this and exit.
        """
        if self.poll() is not None:
            return False
        if alone:
            os.kill(self.pid, signal.SIGKILL)
        else:
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        return True

    def is_survived(self, timeout_seconds: float = 60) -> bool:
        """Return whether a child process of the script still exists after the timeout."""
        deadline = time.perf_counter() + timeout_seconds
        while time.perf_counter() < deadline:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.1)
        return True

    def wait(self, timeout_seconds: float = 300) -> Ended:
        """Wait for the end of the script. A script that exceeds the timeout is killed."""
        while self.poll() is None:
            if time.perf_counter() - self.started > timeout_seconds:
                self.kill()
            time.sleep(0.01)

        seconds = time.perf_counter() - self.started
        return Ended(self.code or 0, self.log.read_text(encoding="utf-8", errors="replace"), seconds)


def run(script: str, arguments: Sequence[str], log: Path, before: Callable[[], None] | None = None) -> Ended:
    """Run a script to its end."""
    return Run(script, arguments, log, before).wait()


def run_as_command(description: str, campaign: Callable[..., Counter[str]], option: str, default: int) -> None:
    """Parse the command line, run a campaign of jobs, and print the number of trials by outcome.

    Args:
        description: Text for `--help`.
        campaign: Function of the number of trials, an empty folder, the seed and the names of the jobs.
        option: Name of the option for the number of trials.
        default: Default number of trials.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(option, dest="number", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", help="training, post-training, preparing, evaluation, translation")
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder to work in")
    arguments = parser.parse_args()

    warm_up()
    counts = campaign(arguments.number, arguments.folder.resolve(), arguments.seed, arguments.jobs)
    for what, count in sorted(counts.items()):
        print(f"{count:6d}  {what}")


def _be_the_script(script: str, arguments: list[str], log: Path, before: Callable[[], None] | None) -> None:
    """Run the script in the fork; never returns."""
    code = 1
    try:
        os.setsid()
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        os.chdir(ROOT)

        # Otherwise each fork would use the same random temporary names as its parent.
        import tempfile

        tempfile._name_sequence = None  # type: ignore[attr-defined]
        sys.argv = [script, *arguments]
        sys.path.insert(0, str((ROOT / script).parent))
        if before is not None:
            before()
        runpy.run_path(str(ROOT / script), run_name="__main__")
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
