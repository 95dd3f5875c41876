"""How a recipe runs as a command: one process prints, and an error or Ctrl-C ends it with one line.

Nothing here imports torch or transformers before a function needs them, so that `--help` is immediate.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling_supclap.datasets_scripts.atomic_files import InUseError, folder_lock

if TYPE_CHECKING:
    from transformers import Trainer

    from modeling_supclap.training.training_args import SupCLAPTrainingArguments

STOPPED_BY_SIGTERM = 128 + signal.SIGTERM
"""Exit status of a run that SIGTERM stopped after it saved a checkpoint: 143, for scripts that requeue it."""

USERS_ERRORS = (ValueError, OSError, FloatingPointError, ImportError, InUseError)
"""Errors of data and arguments, whose message is enough; any other error is printed with its traceback."""


class StoppedError(Exception):
    """SIGTERM has stopped a run, and its checkpoint is saved."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a recipe as a script: an error ends the process with status 1, Ctrl-C with 130, SIGTERM with 143.

    Args:
        main: The recipe. It reads `sys.argv` and may return an exit status.
    """
    if not sys.stderr.isatty():  # no progress bars in log files; read when datasets and transformers are imported
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    code = 1
    try:
        code = main() or 0
    except KeyboardInterrupt as stopped:
        report_stop(str(stopped))
        code = 130
    except StoppedError as stopped:
        report_stop(str(stopped))
        code = STOPPED_BY_SIGTERM
    except Exception as error:
        cause = builder_error(error)
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
    """Return the words that the user typed: `supclap train`, or the name of the script."""
    return os.environ.get("SUPCLAP_COMMAND") or Path(sys.argv[0]).name


def is_first_process() -> bool:
    """Return whether this is the first of the launched processes, or the only one.

    The launcher's variables are read, because processes without GPUs join a process group late.
    """
    ranks = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    return next((os.environ[name] for name in ranks if name in os.environ), "0") == "0"


def report_stop(advice: str = "") -> None:
    """Print one line after a stop, in the first process only, and ignore Ctrl-C from now on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher of several processes sends it once more
    if is_first_process():
        print(f"\n{command_name()}: stopped{advice and f'; {advice}'}", file=sys.stderr)


def say(text: str) -> None:
    """Print a line, in the first process only."""
    if is_first_process():
        print(text, flush=True)


def only_run(args: SupCLAPTrainingArguments) -> AbstractContextManager[None]:
    """Lock the output folder for this run."""
    return folder_lock(args.output_dir or ".") if is_first_process() else nullcontext()


def train(trainer: Trainer, checkpoint: str | None = None) -> None:
    """Train, from a checkpoint if one is given; Ctrl-C and unusable recordings say how to go on.

    Raises:
        StoppedError: `enable_jit_checkpoint` is set and SIGTERM has stopped the run, so that it has no results yet.
    """
    from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError
    from modeling_supclap.training.checkpoints import last_checkpoint

    folder = trainer.args.output_dir or "."

    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would prevent the advice
        if last_checkpoint(folder, resumes=True) is None:
            raise KeyboardInterrupt("no checkpoint was saved yet, so the same command begins anew") from None
        raise KeyboardInterrupt("go on with the same command and --resume_from_checkpoint last") from None
    except MissingDecoderError:
        raise  # not the recording's fault
    except BadAudioError as error:
        raise BadAudioError(f"{_plain(error)}; --on_bad_audio skip leaves such recordings out") from error
    finally:
        for callback in trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.close()  # so that a message is the last line

    if trainer.args.enable_jit_checkpoint and trainer.state.global_step < trainer.state.max_steps:
        raise StoppedError("go on with the same command and --resume_from_checkpoint last")


def require_usable_audio(splits: Mapping[str, Any], args: SupCLAPTrainingArguments) -> None:
    """Read the validation and test recordings before the training, so that an unusable one is found early.

    Raises:
        BadAudioError: Recordings of the validation or the test split cannot be used; the message names the first.
    """
    from modeling_supclap.datasets_scripts.audio import BadAudioError
    from modeling_supclap.datasets_scripts.bad_audio import find_bad_audio

    if args.on_bad_audio != "error":  # such recordings are left out already
        return

    for name in ("validation", "test"):
        bad = []
        with args.main_process_first(local=False, desc=f"reading the recordings of the {name} split"):
            if name in splits and is_first_process():
                bad = find_bad_audio(splits[name], max(1, args.dataloader_num_workers))
        if bad:
            raise BadAudioError(
                f"{len(bad)} of the {len(splits[name])} {name} recordings cannot be used, the first is that of clip "
                f"{bad[0].clip_id!r}: {bad[0].reason}; --on_bad_audio skip leaves such recordings out"
            )


def _plain(error: Exception) -> str:
    """Return the message of an error, without the worker's traceback that the DataLoader adds."""
    if isinstance(error, FileExistsError) and error.filename:  # from `mkdir`
        return f"{error.filename} is a file; a folder is expected, name another"
    message = str(error).rstrip()
    return message.splitlines()[-1].partition(": ")[2] if message.startswith("Caught ") else message


def builder_error(error: Exception) -> Exception:
    """Return the error of a builder or a configuration that `datasets` or `huggingface_hub` wrapped in its own."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import StrictDataclassError

    while isinstance(error, (DatasetsError, StrictDataclassError)) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error
