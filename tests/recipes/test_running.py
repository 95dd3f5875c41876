"""Errors of recipes: the cause, without a traceback."""

import pytest
import yaml

from modeling_supclap import SupCLAPConfig
from modeling_supclap.recipes.running import is_first_process, run_command


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


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK"])
@pytest.mark.parametrize(("rank", "first"), [(None, True), ("0", True), ("1", False)])
def test_the_first_process_is_known_without_a_group(monkeypatch, name, rank, first):
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv(name, rank)
    assert is_first_process() == first
