"""How a recipe ends as a command: with one line that says what is wrong."""

import pytest

from modeling_supclap import SupCLAPConfig
from modeling_supclap.recipes.running import run_command


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda folder: (folder / "a file").mkdir(exist_ok=True), "a file is a file, where a folder is wanted"),
        (lambda folder: SupCLAPConfig(temperature=0.0), "error: temperature must be positive"),
    ],
)
def test_an_error_is_one_line(tmp_path, capsys, fail, message):
    (tmp_path / "a file").write_text("")
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: fail(tmp_path))
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
