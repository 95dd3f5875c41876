"""The examples run unchanged."""

import re
import runpy
import sys
from pathlib import Path

import builders
import pytest
from recordings import captioned_folder

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Function that runs an example with command-line arguments in a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


def test_a_loop_without_the_trainer(run, capsys):
    run("train_without_trainer.py", "--steps", "2", "--batch_size", "4")
    printed = capsys.readouterr().out
    assert re.search(r"\b2\b.*\bloss\b", printed)
    assert re.search(r"chance.*0\.016", printed)


def test_a_folder_is_tuned(run, capsys, tmp_path):
    builders.save_supclap(tmp_path / "start")
    run("finetune_folder.py", captioned_folder(tmp_path / "sounds", 10), tmp_path / "start", tmp_path / "tuned")
    assert f"({builders.supclap_config().projection_dim},)" in capsys.readouterr().out
    assert (tmp_path / "tuned" / "model.safetensors").is_file()
