"""Run a recipe as a command. Only the first process prints. An error or Ctrl-C prints a one-line message."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from modeling_supclap.datasets_scripts.atomic_files import InUseError, folder_lock

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import Trainer

    from modeling_supclap.training.training_args import SupCLAPTrainingArguments

STOPPED_BY_SIGTERM = 128 + signal.SIGTERM
"""Exit status (143) if SIGTERM stopped a run after it saved a checkpoint, so that scripts can requeue the run."""

USERS_ERRORS = (ValueError, OSError, FloatingPointError, ImportError, InUseError, yaml.YAMLError)
"""Exceptions caused by data or arguments, which are printed without a traceback."""


class Clock:
    """Time since this object was created, in seconds: of the clock, and of this process on the CPU."""

    def __init__(self) -> None:
        self._started, self._process_started = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def process_seconds(self) -> float:
        return time.process_time() - self._process_started


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
        print(f"{command_name()}: error: {_plain(cause)}", file=sys.stderr)
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


def only_run(args: SupCLAPTrainingArguments) -> AbstractContextManager[None]:
    """Return a context manager that locks the output folder, so that no other run writes to it."""
    return folder_lock(args.output_dir or ".") if is_first_process() else nullcontext()


def train(trainer: Trainer, checkpoint: str | None = None) -> None:
    """Train a model, optionally from a checkpoint. If training stops, the error message explains how to continue.

    With `enable_jit_checkpoint`, StoppedError is raised if SIGTERM stopped the run before its last step.
    """
    from modeling_supclap.training.checkpoints import last_checkpoint

    advice = "continue with the same command and --resume_from_checkpoint last"
    try:
        with advise_skipping():
            trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would suppress the advice
        if last_checkpoint(trainer.args.output_dir or ".", resumes=True) is None:
            advice = "no checkpoint was saved yet; run the same command to start again"
        raise KeyboardInterrupt(advice) from None
    finally:
        for callback in trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.close()  # so that the error message is the last line

    if trainer.args.enable_jit_checkpoint and trainer.state.global_step < trainer.state.max_steps:
        raise StoppedError(advice)


@contextmanager
def advise_skipping() -> Iterator[None]:
    """Context manager that adds the option to skip recordings to the error message of an unusable one."""
    from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError

    try:
        yield
    except MissingDecoderError:
        raise  # skipping recordings would not help
    except BadAudioError as error:
        raise BadAudioError(f"{_plain(error)}; use --on_bad_audio skip to leave such recordings out") from error


def write_final_card(trainer: Trainer, start: str | None) -> None:
    """Write the model card of a finished run that started from the model `start`.

    With `push_to_hub`, upload the output folder again, because the Trainer uploads it before it contains the results.
    """
    args = trainer.args
    trainer.create_model_card(finetuned_from=start)
    if args.push_to_hub:
        from huggingface_hub import upload_folder

        upload_folder(
            repo_id=str(trainer.hub_model_id),
            folder_path=str(args.output_dir),
            commit_message="Results and model card",
            token=args.hub_token,
            revision=args.hub_revision,
            ignore_patterns=["_*", "*checkpoint-*"],
        )


def _plain(error: Exception) -> str:
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
