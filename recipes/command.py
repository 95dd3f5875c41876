"""The command `supclap`: the recipes under one name, as `pip install` leaves them.

    supclap train --dataset audio_folder --data_dir my_sounds --languages eng
    supclap train esc10.yaml --data_dir ESC-10
    supclap evaluate --model outputs/esc10 --dataset esc50 --data_dir ESC-10

`supclap NAME --help` lists the keys of a recipe. What trains or embeds a corpus is launched by accelerate, with what
`accelerate config` or its environment variables say of processes and GPUs. A configuration of the package goes by its
name.
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

LAUNCHED = {"train": "recipes.train_supclap", "posttrain": "recipes.posttrain_teminal", "embed": "recipes.embed_corpus"}
COMMANDS = {
    **LAUNCHED,
    "evaluate": "recipes.evaluate_supclap",
    "reproduce": "recipes.reproduce",
    "convert": "recipes.convert_checkpoint",
    "export": "recipes.export_onnx",
    "search": "recipes.search_audio",
    "prepare": "datasets_scripts.prepare",
    "overlap": "datasets_scripts.overlap.check_overlap",
    "translate": "recipes.translate_captions",
}
"""The module behind each name; those of `LAUNCHED` run under `accelerate launch`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the recipe that the first word names.

    Args:
        arguments: The words of the command line, by default those of the process.

    Returns:
        The exit status: 0 where all went well, 2 where there is no such recipe, 130 after Ctrl-C.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while accelerate is imported; `run_command` handles it later
        report_stop()
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words else "--help"
    if name == "--version":
        print(f"supclap {__version__}")
        return 0
    if name not in COMMANDS:
        is_help = name in ("-h", "--help")
        usage = f"usage: supclap {{{','.join(COMMANDS)}}} ...\n\n{__doc__}"
        if is_help:
            print_help(usage)
        else:
            print(f"{usage}\nsupclap: error: there is no command {name!r}", file=sys.stderr)
        return 0 if is_help else 2

    os.environ["SUPCLAP_COMMAND"] = f"supclap {name}"  # for the model card, which says how to reproduce a run
    sys.argv = [f"supclap {name}", *words]
    if name in LAUNCHED and not asks_for_help():
        return _launch(COMMANDS[name], words)
    run_command(importlib.import_module(f"modeling_supclap.{COMMANDS[name]}").main)
    return 0


def _source(module: str) -> Path:
    """The file of a recipe, which is not imported."""
    spec = importlib.util.find_spec(f"modeling_supclap.{module}")
    assert spec is not None
    return Path(str(spec.origin))


def _launch(module: str, words: Sequence[str]) -> int:
    """Runs a recipe under `accelerate launch`, without the traceback that launchers add to an error."""
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # of torch's launcher of several processes: they speak for themselves
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What accelerate chooses where nobody told it otherwise is right: no newcomer needs four lines of it.
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the recipe, which says how to go on
    try:
        # By its path, not by its name: what lies in the current folder cannot stand in the way of what it imports.
        launch.simple_launcher = _run_here
        launch.launch_command(launch.launch_command_parser().parse_args(["--quiet", str(_source(module)), *words]))
    except SystemExit as ended:
        return int(ended.code or 0)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        process, failure = failed.get_first_failure()
        if failure.exitcode < 0:  # one that was killed could say nothing
            signal_name = signal.Signals(-failure.exitcode).name
            print(f"supclap: error: process {process} (pid {failure.pid}) was ended by {signal_name}", file=sys.stderr)
        return STOPPED_BY_SIGTERM if failure.exitcode == STOPPED_BY_SIGTERM else 1
    return 0


def _run_here(arguments: argparse.Namespace) -> None:
    """Runs a recipe that needs one process in this one: accelerate would start another, which imports torch again."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(arguments)
    if command[0] != sys.executable:  # mpirun, of several machines
        sys.exit(subprocess.run(command, env=environment).returncode)

    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = command[1:]
    runpy.run_path(arguments.training_script, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
