"""All cells of the notebooks run, with a tiny model instead of the output of `make train`."""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    """Return the cells of one kind, in order."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def reduce_clips(size: re.Match[str]) -> str:
    """Replace a number of clips by a quarter, but at least 64."""
    return f"num_{size[1]}={max(64, int(size[2]) // 4)}"


@pytest.mark.usefixtures("at_a_readers")
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path / "examples")
    names: dict = {"__name__": "__main__"}
    for cell in cells(notebook, "code"):
        # Shorten the notebook, because a test does not need good scores.
        source = re.sub(r"num_train_epochs=\d+", "num_train_epochs=1", "".join(cell["source"]))
        source = re.sub(r"num_(train|test)=(\d+)", reduce_clips, source)
        exec(compile(source, notebook.name, "exec"), names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_contains_its_outputs(notebook):
    code = cells(notebook, "code")
    assert notebook.stat().st_size < 400_000
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    printed = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in printed if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in printed)
