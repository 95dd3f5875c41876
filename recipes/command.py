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
import ast
import importlib
import importlib.util
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from modeling_supclap import require_torchaudio
from modeling_supclap.recipes.options import (
    AllStagesOptions,
    CaptionArguments,
    CorpusArguments,
    DataArguments,
    EvaluationArguments,
    LastPartArguments,
    ModelArguments,
    PostTrainingArguments,
    QualityArguments,
    ReproductionArguments,
    TrainedPartArguments,
    TranslatorArguments,
    format_help,
)
from modeling_supclap.training.options import ContrastiveOptions

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

KEYS: dict[str, tuple[Any, ...]] = {
    "train": (DataArguments, ModelArguments, TrainedPartArguments, ContrastiveOptions),
    "posttrain": (PostTrainingArguments, LastPartArguments, AllStagesOptions),
    "embed": (CorpusArguments,),
    "evaluate": (EvaluationArguments,),
    "reproduce": (ReproductionArguments,),
    "translate": (CaptionArguments, TranslatorArguments, QualityArguments),
}
"""The keys of those that read `--key value`; the help of the others is that of their own parsers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the recipe that the first word names.

    Args:
        arguments: The words of the command line, by default those of the process.

    Returns:
        The exit status: 0 where all went well, 2 where there is no such recipe, 130 after Ctrl-C.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while modules are imported; from then on it is `run_command` that speaks
        say_stopped(command_name())
        return 130


def begin(name: str) -> None:
    """What a script that is started by its path does before it imports what takes seconds.

    `--help` prints the keys and ends the process. From then on Ctrl-C ends it with one line and no traceback, as it
    does in `run_command`.

    Args:
        name: The command whose recipe the script is, one of `KEYS`.
    """
    if _asks_for_help(sys.argv[1:]):
        _print_help(_format_help(name))
        sys.exit()

    def stop(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        elif os.environ.get("RANK", "0") == "0":  # one of all processes speaks
            say_stopped(command_name())

    sys.excepthook = stop
    require_torchaudio()


def start(main: Callable[[], int | None]) -> None:
    """Runs a script whose own parser answers `--help`, without the imports that take seconds.

    Args:
        main: The recipe, which reads the command line itself; it may return an exit status.
    """
    if _asks_for_help(sys.argv[1:]):
        main()

    require_torchaudio()
    from modeling_supclap.recipes.running import run_command  # takes seconds that a mistyped name need not wait for

    run_command(main)


def command_name() -> str:
    """What the user typed: the command, or the script that was started by its path."""
    return os.environ.get("SUPCLAP_COMMAND") or Path(sys.argv[0]).name


def say_stopped(name: str, advice: str = "") -> None:
    """Prints the one line that Ctrl-C ends with, and ignores a second one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"\n{name}: stopped{advice and f'; {advice}'}", file=sys.stderr)


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words else "--help"
    if name not in COMMANDS:
        is_help = name in ("-h", "--help")
        usage = f"usage: supclap {{{','.join(COMMANDS)}}} ...\n\n{__doc__}"
        if is_help:
            _print_help(usage)
        else:
            print(f"{usage}\nsupclap: error: there is no command {name!r}", file=sys.stderr)
        return 0 if is_help else 2

    os.environ["SUPCLAP_COMMAND"] = f"supclap {name}"  # for the model card, which says how to reproduce a run
    sys.argv = [f"supclap {name}", *words]
    if name in KEYS and _asks_for_help(words):
        _print_help(_format_help(name))
    elif name in LAUNCHED:
        return _launch(COMMANDS[name], words)
    else:
        start(importlib.import_module(f"modeling_supclap.{COMMANDS[name]}").main)
    return 0


def _asks_for_help(words: Sequence[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(words)


def _format_help(name: str) -> str:
    """The help of a recipe that is not imported, which takes seconds."""
    source = _source(COMMANDS[name]).read_text(encoding="utf-8")
    return format_help(KEYS[name], ast.get_docstring(ast.parse(source)) or "")


def _print_help(text: str) -> None:
    """Prints a help, of which a reader such as `head` may take only the first lines."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # what is left must not be tried again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        return 1
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
