"""How a recipe runs as a command: one process speaks, and an error ends with what is wrong and what would be right."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from datasets import disable_progress_bars
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from transformers import Trainer
from transformers.utils import logging as transformers_logging

from modeling_supclap.datasets_scripts.atomic_files import InUseError, folder_lock
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError
from modeling_supclap.datasets_scripts.bad_audio import find_bad_audio
from modeling_supclap.recipes.command import command_name, say_stopped
from modeling_supclap.training.checkpoints import last_checkpoint
from modeling_supclap.training.distributed import is_first_process, leave_process_group
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

USERS_ERRORS = (ValueError, OSError, FloatingPointError, ImportError, InUseError)
"""What data and arguments raise; their messages say it all, where of anything else the traceback is wanted."""


def run_command(main: Callable[[], int | None]) -> None:
    """Runs a recipe's `main`, which may return a status, as the script: an error ends it with 1, Ctrl-C with 130."""
    if not sys.stderr.isatty():  # a log file takes lines, not bars
        disable_progress_bars()
        transformers_logging.disable_progress_bar()

    name, code = command_name(), 1
    try:
        code = main() or 0
    except KeyboardInterrupt as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher of several processes sends it once more
        if is_first_process():
            say_stopped(name, str(stopped))
        code = 130
    except Exception as error:
        cause = builder_error(error)
        if not isinstance(cause, USERS_ERRORS):
            traceback.print_exc()
        print(f"{name}: error: {_plain(cause)}", file=sys.stderr)
    finally:
        leave_process_group()

    if code:
        sys.exit(code)


def only_run(args: SupCLAPTrainingArguments) -> AbstractContextManager[None]:
    """Within it no other run writes to the output folder, from the first look into it to the card."""
    return folder_lock(args.output_dir or ".") if is_first_process() else nullcontext()


def train(trainer: Trainer, checkpoint: str | None = None) -> None:
    """Trains from a checkpoint or from the beginning; what stops it says how to go on."""
    folder = trainer.args.output_dir or "."

    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one would take the advice away
        if last_checkpoint(folder, resumes=True) is None:
            raise KeyboardInterrupt("no checkpoint was saved yet, so the same command begins anew") from None
        raise KeyboardInterrupt("go on with the same command and --resume_from_checkpoint last") from None
    except MissingDecoderError:
        raise  # no fault of the recording
    except BadAudioError as error:
        raise BadAudioError(f"{_plain(error)}; --on_bad_audio skip leaves such recordings out") from error
    finally:
        for callback in trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.close()  # so that a message is the last line


def require_usable_audio(splits: Mapping[str, Any], args: SupCLAPTrainingArguments) -> None:
    """Reads what a run evaluates on, so that a recording that cannot be used ends it before the training, not after.

    Raises:
        BadAudioError: Recordings of the validation or the test split cannot be used; the message names the first.
    """
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
    """The message of an error, without the traceback that the DataLoader puts into that of a worker."""
    if isinstance(error, FileExistsError) and error.filename:  # what `mkdir` says of a file
        return f"{error.filename} is a file, where a folder is wanted; name another"
    message = str(error).rstrip()
    return message.splitlines()[-1].partition(": ")[2] if message.startswith("Caught ") else message


def builder_error(error: Exception) -> Exception:
    """What a builder or a configuration raised, without the error that `datasets` or `huggingface_hub` wraps it in."""
    while isinstance(error, (DatasetsError, StrictDataclassError)) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def say(text: str) -> None:
    """Prints a line, in the first process of a launch only."""
    if is_first_process():
        print(text, flush=True)
