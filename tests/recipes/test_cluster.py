"""The Slurm script with a fake Slurm: two machines on one host, a SIGTERM, and the requeued job."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATHS, run_processes

ROOT = Path(__file__).parents[2]
WORDS = ["recipes/configs/smoke.yaml", "--use_cpu", "true", "--per_device_train_batch_size", "8"]
WORDS += ["--num_train_epochs", "4", "--dataloader_num_workers", "1"]

# One task on each of two machines, in a process group of its own. As Slurm does, send SIGTERM to all processes of a
# machine, after the first checkpoint; to the second machine first.
SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys, time
words = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
ranks = [{{"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}} for rank in range(2)]
tasks = [subprocess.Popen(words, env={{**os.environ, **rank}}, start_new_session=True) for rank in ranks]
sent = pathlib.Path("{folder}", "sent")
while not sent.exists() and all(task.poll() is None for task in tasks):
    time.sleep(0.01)
    if pathlib.Path("{folder}", "run", "checkpoint-2").exists():
        for task in reversed(tasks):
            os.killpg(task.pid, signal.SIGTERM)
            time.sleep(0.1)
        sent.touch()
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> {folder}/requeued; fi
"""


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.process
def test_a_job_on_two_machines_is_requeued_after_sigterm_and_has_the_losses_of_one_job(tmp_path):
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text.format(python=sys.executable, folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job_id = next(number for number in range(port - 20000, 10**6, 20000) if number > 0)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **PATHS, "PATH": path, "SLURM_JOB_ID": str(job_id), "SLURM_JOB_NODELIST": "a[1-2]"}

    def submit() -> subprocess.CompletedProcess[str]:
        words = ["bash", "examples/train.sbatch", *WORDS, "--output_dir", str(tmp_path / "run")]
        return subprocess.run(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
        )

    stopped = submit()
    assert stopped.returncode == 143, stopped.stdout
    assert "starting a new run" in stopped.stdout
    assert (tmp_path / "requeued").read_text() == f"requeue {job_id}\n"
    assert not (tmp_path / "run" / "results.json").exists()
    continued = submit()
    assert continued.returncode == 0, continued.stdout
    assert "starting a new run" not in continued.stdout

    run_processes("recipes/train_supclap.py", *WORDS, "--output_dir", tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "run")) == 16
