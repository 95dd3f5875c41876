"""Errors of recipes: the cause, without a traceback."""

import errno
import io
import sys

import pytest
import yaml
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.constants import HF_HOME

from modeling_supclap import SupCLAPConfig
from modeling_supclap.recipes.command import is_first_process, run_command


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


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK"])
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
