"""The examples run as they are printed."""

import runpy
import sys
from pathlib import Path

import builders
import pytest
import soundfile

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs an example with these words, from a folder of the reader's."""
    monkeypatch.chdir(tmp_path)

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


def test_a_loop_without_the_trainer(run, capsys):
    run("train_without_trainer.py", "--steps", "2", "--batch_size", "4")
    printed = capsys.readouterr().out
    assert "step 2: loss" in printed
    assert "chance 0.016" in printed


def test_a_folder_is_tuned(run, capsys, tmp_path):
    builders.supclap_model().save_pretrained(tmp_path / "start")
    builders.bert_processor().save_pretrained(tmp_path / "start")
    (tmp_path / "sounds").mkdir()
    lines = ["file_name,caption"]
    for number in range(10):
        soundfile.write(tmp_path / "sounds" / f"{number}.wav", 0.5 * builders.tone(300.0 * (number + 1)), 16000)
        lines.append(f"{number}.wav,a tone {number}")
    (tmp_path / "sounds" / "metadata.csv").write_text("\n".join(lines))

    run("finetune_folder.py", tmp_path / "sounds", tmp_path / "start", tmp_path / "tuned")
    assert f"({builders.supclap_config().projection_dim},)" in capsys.readouterr().out
    assert (tmp_path / "tuned" / "model.safetensors").is_file()
