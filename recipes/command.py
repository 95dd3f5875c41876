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
import importlib
import importlib.util
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from modeling_supclap import __version__
from modeling_supclap.recipes.arguments import asks_for_help, print_help
from modeling_supclap.recipes.running import STOPPED_BY_SIGTERM, report_stop, run_command

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


def _source(module: str) -> Path:
    """Return the path of a module's source file, without importing the module."""
    spec = importlib.util.find_spec(f"modeling_supclap.{module}")
    assert spec is not None
    return Path(str(spec.origin))


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
        launch.simple_launcher = _run_here
        launch.launch_command(launch.launch_command_parser().parse_args(["--quiet", str(_source(module)), *words]))
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


if __name__ == "__main__":
    sys.exit(main())
