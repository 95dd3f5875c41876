"""Errors of recipes: the cause, without a traceback."""

import errno
import io
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.constants import HF_HOME

from modeling_supclap import SupCLAPConfig
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError
from modeling_supclap.recipes.command import (
    StoppedError,
    advise_skipping,
    is_first_process,
    join_processes,
    run_command,
)


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda folder: (folder / "a file").mkdir(exist_ok=True), "a file"),
        (lambda folder: SupCLAPConfig(temperature=0.0), "temperature"),
        (lambda folder: yaml.safe_load("[0.1,"), "[0.1,"),
    ],
)
def test_an_error_of_the_user_has_no_traceback(tmp_path, capsys, fail, message):
    (tmp_path / "a file").write_text("")
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: fail(tmp_path))
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_an_error_of_datasets_shows_its_cause_and_one_without_a_cause_itself(capsys):
    def fail(cause):
        raise DatasetGenerationError("while a dataset was built") from cause

    for cause, message in (
        (ValueError("line 3 has no caption"), "line 3 has no caption"),
        (None, "dataset was built"),
    ):
        with pytest.raises(SystemExit):
            run_command(lambda cause=cause: fail(cause))
        printed = capsys.readouterr().err
        assert printed.splitlines()[-1].endswith(message)
        assert ("Traceback" in printed) == (cause is None)


@pytest.mark.parametrize("name", ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"])
@pytest.mark.parametrize(("rank", "first"), [(None, True), ("0", True), ("1", False)])
def test_the_first_process_is_known_without_a_group(monkeypatch, name, rank, first):
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv(name, rank)
    assert is_first_process() == first


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("fails", [False, True])
def test_letters_that_the_terminal_lacks_are_escaped(monkeypatch, encoding, fails):
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding=encoding) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)

    def main():
        print("in \u5e73\u5747")
        if fails:
            raise ValueError("no \u5e73")

    if fails:
        with pytest.raises(SystemExit):
            run_command(main)
    else:
        run_command(main)
    printed = {}
    for name, stream in streams.items():
        stream.flush()
        printed[name] = stream.buffer.getvalue()
    assert printed["stdout"] == b"in \\u5e73\\u5747\n"
    assert (b"no \\u5e73" in printed["stderr"]) == fails


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (PermissionError(errno.EACCES, "Permission denied", str(HF_HOME)), "HF_HOME"),
        (PermissionError(errno.EPERM, "Operation not permitted", os.fsencode(Path(HF_HOME).parent)), "HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), ""),
        (OSError(errno.EROFS, "Read-only file system", f"{HF_HOME}/datasets/x.lock"), "HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied", "/elsewhere/model"), ""),
        (FileNotFoundError(errno.ENOENT, "No such file", f"{HF_HOME}/x"), ""),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 8512 vs 8406"), "disk"),
    ],
)
def test_errors_of_the_disk_name_their_cause(capsys, error, hint):
    def main():
        raise error

    with pytest.raises(SystemExit):
        run_command(main)
    last = capsys.readouterr().err.splitlines()[-1]
    assert str(error) in last
    if hint:
        assert hint in last
    else:
        assert not any(word in last for word in ("HF_HOME", "disk is"))


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("stopped", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "supclap train: stopped"),
        (KeyboardInterrupt("start again"), 130, "supclap train: stopped; start again"),
        (StoppedError("continue"), 143, "supclap train: stopped; continue"),
    ],
)
def test_a_stopped_run_has_its_status_and_the_first_process_its_advice(monkeypatch, capsys, stopped, code, line, rank):
    def main():
        raise stopped

    ignored = []
    monkeypatch.setattr("signal.signal", lambda *signals: ignored.append(signals))
    monkeypatch.setenv("SUPCLAP_COMMAND", "supclap train")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert (ended.value.code, len(ignored)) == (code, 1)
    assert capsys.readouterr().err.splitlines() == ([] if rank == "1" else ["", line])


@pytest.mark.parametrize("is_terminal", [False, True])
def test_log_files_have_no_progress_bars(monkeypatch, is_terminal):
    names = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
    for name in names:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    found = []
    run_command(lambda: found.extend(map(os.environ.get, names)))
    assert found == ([None, None] if is_terminal else ["1", "1"])


def test_skipping_is_advised_for_recordings_that_it_leaves_out():
    lines = [
        "Caught BadAudioError in DataLoader worker process 0.",
        "Traceback ...",
        "audio.BadAudioError: a: no sound",
    ]
    for message in ("a: no sound", "\n".join(lines)):
        with pytest.raises(BadAudioError, match=r"^a: no sound; use --on_bad_audio skip to"), advise_skipping():
            raise BadAudioError(message)
    with pytest.raises(MissingDecoderError, match=r"^install FFmpeg$"), advise_skipping():
        raise MissingDecoderError("install FFmpeg")


@pytest.mark.parametrize(
    ("device", "has_gpu", "on_cpus"),
    [(None, True, False), (None, False, True), ("cpu", True, True), ("cuda", True, False)],
)
def test_processes_of_a_machine_without_a_gpu_are_joined_on_the_cpu(monkeypatch, device, has_gpu, on_cpus):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr("accelerate.PartialState", lambda **options: options)
    assert join_processes(device) == {"cpu": on_cpus, "timeout": timedelta(days=30)}
