"""Errors of recipes: one line with the cause."""

import pytest

from modeling_supclap import SupCLAPConfig
from modeling_supclap.recipes.running import is_first_process, run_command


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda folder: (folder / "a file").mkdir(exist_ok=True), "a file"),
        (lambda folder: SupCLAPConfig(temperature=0.0), "temperature"),
    ],
)
def test_an_error_is_one_line(tmp_path, capsys, fail, message):
    (tmp_path / "a file").write_text("")
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: fail(tmp_path))
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK"])
@pytest.mark.parametrize(("rank", "first"), [(None, True), ("0", True), ("1", False)])
def test_the_first_process_is_known_without_a_group(monkeypatch, name, rank, first):
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv(name, rank)
    assert is_first_process() == first
