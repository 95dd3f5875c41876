"""The command `supclap`, which runs the recipes.

    supclap train --dataset audio_folder --data_dir my_sounds --languages eng
    supclap train esc10.yaml --data_dir ESC-10
    supclap evaluate --model outputs/esc10 --dataset esc50 --data_dir ESC-10 --test_fold 4

`supclap NAME --help` lists the keys of a recipe. train, posttrain, sweep, reproduce and embed run under `accelerate
launch`, with the processes and GPUs set by `accelerate config` or its environment variables. A configuration file of
the package, such as `esc10.yaml`, needs no path.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from modeling_supclap import __version__
from modeling_supclap.datasets_scripts.atomic_files import InUseError
from modeling_supclap.recipes.arguments import asks_for_help, print_help

if TYPE_CHECKING:
    from accelerate import PartialState

LAUNCHED = {
    "train": "recipes.train_supclap",
    "posttrain": "recipes.posttrain_teminal",
    "sweep": "recipes.sweep",
    "reproduce": "recipes.reproduce",
    "embed": "recipes.embed_corpus",
}
COMMANDS = {
    **LAUNCHED,
    "evaluate": "recipes.evaluate_supclap",
    "compare": "recipes.compare_results",
    "convert": "recipes.convert_checkpoint",
    "average": "recipes.average_models",
    "mine": "recipes.mine_negatives",
    "export": "recipes.export_onnx",
    "search": "recipes.search_audio",
    "prepare": "datasets_scripts.prepare",
    "overlap": "datasets_scripts.overlap.check_overlap",
    "translate": "recipes.translate_captions",
}
"""Dict from command name to module. Commands in `LAUNCHED` run under `accelerate launch`."""

STOPPED_BY_SIGTERM = 128 + signal.SIGTERM
"""Exit status (143) if SIGTERM stopped a run after it saved a checkpoint, so that scripts can requeue the run."""

USERS_ERRORS = (ValueError, OSError, FloatingPointError, ImportError, InUseError, yaml.YAMLError)
"""Exceptions caused by data or arguments, which are printed without a traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `supclap` command line. `arguments` defaults to `sys.argv[1:]`.

    The exit status is 0, 2 for an unknown command, 130 after Ctrl-C, or the status of the launched processes.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # during the import of accelerate; later, `run_command` handles it
        report_stop()
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words else "--help"
    if name == "--version":
        print(f"supclap {__version__}")
        return 0
    usage = f"usage: supclap {{{','.join(COMMANDS)}}} ...\n\n{__doc__}"
    if name in ("-h", "--help"):
        print_help(usage)
        return 0
    if name not in COMMANDS:
        print(f"{usage}\nsupclap: error: unknown command {name!r}", file=sys.stderr)
        return 2

    os.environ["SUPCLAP_COMMAND"] = f"supclap {name}"  # for the command in the model card
    sys.argv = [f"supclap {name}", *words]
    if name in LAUNCHED and not asks_for_help():
        return _launch(COMMANDS[name], words)
    run_command(importlib.import_module(f"modeling_supclap.{COMMANDS[name]}").main)
    return 0


def _launch(module: str, words: Sequence[str]) -> int:
    """Run a recipe under `accelerate launch`, without the traceback of the launcher. Return the exit status."""
    # silences torch's launcher; the processes print their own errors
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # accelerate logs its default settings at each launch; they are correct, so hide them.
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, lambda *_: None)  # the recipe handles Ctrl-C and prints how to continue
    try:
        # Run by path, not by module name, so that files in the current folder cannot shadow imports.
        script = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
        launch.simple_launcher = _run_here
        launch.launch_command(launch.launch_command_parser().parse_args(["--quiet", str(script), *words]))
    except SystemExit as error:
        return int(error.code or 0)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        process, failure = error.get_first_failure()
        if failure.exitcode < 0:  # a killed process prints no message
            signal_name = signal.Signals(-failure.exitcode).name
            print(
                f"supclap: error: process {process} (pid {failure.pid}) was killed by {signal_name}", file=sys.stderr
            )
        return STOPPED_BY_SIGTERM if failure.exitcode == STOPPED_BY_SIGTERM else 1
    return 0


def _run_here(arguments: argparse.Namespace) -> None:
    """Run a recipe in this process. By default, accelerate starts a new process, which imports torch again."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(arguments)
    if command[0] != sys.executable:  # mpirun, for several machines
        sys.exit(subprocess.run(command, env=environment).returncode)

    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = command[1:]
    runpy.run_path(arguments.training_script, run_name="__main__")


class StoppedError(Exception):
    """Raised when SIGTERM stopped a run after it saved a checkpoint."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run the main function of a recipe, which reads `sys.argv`, and exit with the status that it returns.

    The exit status is 1 after an error, 130 after Ctrl-C, and 143 after SIGTERM with a saved checkpoint. Letters that
    the terminal cannot encode are printed as escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not in notebooks and under pytest
            stream.reconfigure(errors="backslashreplace")
    # no progress bars in log files; read when datasets and transformers are imported
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    code = 1
    try:
        code = main() or 0
    except (KeyboardInterrupt, StoppedError) as stopped:
        report_stop(str(stopped))
        code = STOPPED_BY_SIGTERM if isinstance(stopped, StoppedError) else 130
    except Exception as error:
        from datasets.exceptions import DatasetsError
        from huggingface_hub.errors import StrictDataclassError

        cause = error
        while isinstance(cause, (DatasetsError, StrictDataclassError)) and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__  # the original error of a builder or a configuration
        if not isinstance(cause, USERS_ERRORS):
            traceback.print_exc()
        print(f"{command_name()}: error: {plain_message(cause)}", file=sys.stderr)
    finally:
        if "torch" in sys.modules:
            from modeling_supclap.training.distributed import leave_process_group

            leave_process_group()
    if code:
        sys.exit(code)


def command_name() -> str:
    return os.environ.get("SUPCLAP_COMMAND") or Path(sys.argv[0]).name


def is_first_process() -> bool:
    """Return whether this process has rank 0 in the launcher's environment variables, or is the only process."""
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"):
        if name in os.environ:
            return os.environ[name] == "0"
    return True


def report_stop(advice: str = "") -> None:
    """Print in the first process that the run was stopped, with optional advice. Ignore Ctrl-C afterwards."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher of several processes sends the signal twice
    if is_first_process():
        print(f"\n{command_name()}: stopped{advice and f'; {advice}'}", file=sys.stderr)


def say(text: str) -> None:
    """Print text in the first process only."""
    if is_first_process():
        print(text, flush=True)


def join_processes(device: str | None) -> PartialState:
    """Connect the launched processes. The timeout is 30 days, because the launcher stops all processes if one fails."""
    import torch
    from accelerate import PartialState

    on_cpus = device == "cpu" or not torch.accelerator.is_available()  # required to join CPU processes
    return PartialState(cpu=on_cpus, timeout=timedelta(days=30))


@contextmanager
def advise_skipping() -> Iterator[None]:
    """Context manager that adds the option to skip recordings to the error message of an unusable one."""
    from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError

    try:
        yield
    except MissingDecoderError:
        raise  # skipping recordings would not help
    except BadAudioError as error:
        raise BadAudioError(f"{plain_message(error)}; use --on_bad_audio skip to leave such recordings out") from error


def plain_message(error: Exception) -> str:
    """Return the message of an error, without the worker traceback that the DataLoader adds.

    A full disk and a cache folder that is not writable get a hint, because their own messages do not name the cause.
    """
    if isinstance(error, FileExistsError) and error.filename:  # from `mkdir`
        return f"{error.filename} is a file; expected a folder; choose another path"
    message = str(error).rstrip()
    if "inline_container" in message and "unexpected pos" in message:  # torch.save on a full disk
        return f"torch wrote only a part of a file; the disk is probably full: free space and run again ({message})"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
        from huggingface_hub.constants import HF_HOME

        cache, denied = Path(HF_HOME).absolute(), Path(os.fsdecode(error.filename)).absolute()
        if denied == cache or denied in cache.parents or cache in denied.parents:
            return f"{message}; set the environment variable HF_HOME to a folder that you may write to"
    return message.splitlines()[-1].partition(": ")[2] if message.startswith("Caught ") else message


if __name__ == "__main__":
    sys.exit(main())
