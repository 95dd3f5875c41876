"""Two processes, one of which is late, fails or stops: who may wait waits, and who waits in vain says for whom."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import builders
import pytest
from processes import run_processes
from recordings import tone_rows
from transformers import TrainerCallback

from modeling_supclap.recipes.running import run_command
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments


class StopSecondProcess(TrainerCallback):
    """Stops the second process as a debugger or a machine that sleeps would, in the middle of a run."""

    def __init__(self, folder):
        self.note = Path(folder, "stopped")

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == 1:
            self.note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)


def train(folder, seconds_of_data, callbacks):
    """Trains with two processes, of which the first one reads the data, and steps that wait four seconds at most."""
    quiet = {"disable_tqdm": True, "report_to": "none", "use_cpu": True, "save_strategy": "no", "eval_strategy": "no"}
    args = SupCLAPTrainingArguments(
        output_dir=folder,
        ddp_timeout=4,
        max_steps=4,
        per_device_train_batch_size=2,
        load_best_model_at_end=False,
        **quiet,
    )
    with args.main_process_first(desc="reading"):
        if args.process_index == 0:
            time.sleep(seconds_of_data)
            rows = tone_rows(Path(folder), count=8)
            if callbacks is None:
                raise ValueError("the recordings are not there")
    rows = tone_rows(Path(folder), count=8)

    model, processor = builders.supclap_model(), builders.bert_processor()
    SupCLAPTrainer(model, args, rows, processing_class=processor, callbacks=callbacks).train()


def stop(folder):
    train(folder, 6, [StopSecondProcess(folder)])  # reading may take longer than a step waits


SCENARIOS = {"failed": lambda folder: train(folder, 0, None), "stopped": stop}


def run_two(tmp_path, scenario):
    with pytest.raises(AssertionError) as failed:
        run_processes(__file__, scenario, str(tmp_path))
    return str(failed.value)


def test_one_message_says_why_the_data_cannot_be_read(tmp_path):
    printed = run_two(tmp_path, "failed")
    assert printed.count("error: the recordings are not there") == 1
    assert not re.search(r"process 1\b", printed)


def test_a_stopped_process_is_named(tmp_path):
    printed = run_two(tmp_path, "stopped")
    error = next(line for line in printed.splitlines() if "error: " in line)
    assert f"process 1 (pid {(tmp_path / 'stopped').read_text()} on " in error
    assert "process 0 waited for it at batch 3" in error


if __name__ == "__main__":
    run_command(lambda: SCENARIOS[sys.argv[1]](sys.argv[2]))
