"""The recipe, launched as a user launches it: what it leaves behind, and what a kill costs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.image import imread

from modeling_supclap import SupCLAPModel, SupCLAPProcessor

ROOT = Path(__file__).parents[1]
SMOKE = "recipes/configs/smoke.yaml"


def launch(*arguments: str, wait: bool = True, timeout_seconds: float = 300):
    """`accelerate launch recipes/train_supclap.py arguments`, from the project's folder."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "recipes/train_supclap.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if not wait:
        return process
    output, _ = process.communicate(timeout=timeout_seconds)
    return process.returncode, output


def losses(folder: Path) -> list[float]:
    """Every loss of the run whose last checkpoint is in the folder."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe") / "run"
    code, output = launch(SMOKE, "--output_dir", str(folder))
    assert code == 0, output
    return folder, output


def test_it_ends_with_a_table(run):
    folder, output = run
    assert "synthetic: 64 train, 64 validation, 64 test clips" in output
    assert "validation mean_recall" in output
    assert "clips/s" in output
    table = output[output.index("test split, 64 clips") :]
    for line in ("eng       text to audio", "jpn       audio to text", "  chance", "zero-shot accuracy"):
        assert line in table
    assert f"training_curves.png are in {folder}" in table


def test_results_hold_scores_chance_and_how_they_came_about(run):
    results = json.loads((run[0] / "results.json").read_text())
    scores = results["test"]["retrieval"]["jpn"]
    assert 0 <= scores["t2a"]["R@1"] <= scores["t2a"]["R@5"] <= scores["t2a"]["R@10"] <= 1
    assert scores["t2a_chance"]["R@1"] == pytest.approx(1 / 64)
    assert results["test"]["clips"] == 64
    assert results["steps"] == 8
    assert results["arguments"]["svr"] == "bi-dynamic"
    assert results["versions"]["transformers"]
    assert 0 <= results["test"]["zero_shot"]["top1"] <= results["test"]["zero_shot"]["top5"] <= 1


@pytest.mark.parametrize("name", ["training_curves.png", "drift.png"])
def test_curves_are_a_picture(run, name):
    assert imread(run[0] / name)[..., :3].std() > 0.05


def test_the_folder_is_a_model_with_its_processor(run):
    model, report = SupCLAPModel.from_pretrained(run[0], output_loading_info=True)
    assert not any(report.values()), report
    processor = SupCLAPProcessor.from_pretrained(run[0])
    assert len(processor.tokenizer) == model.config.text_config.vocab_size
    known, unheard = "a low siren at the beginning", "Ünïcode 低いサイレン"
    assert len(processor.tokenizer.tokenize(known)) == len(known.split())
    for text in (known, unheard):
        assert processor.tokenizer.decode(processor(text=text)["input_ids"][0], skip_special_tokens=True) == text


def test_a_used_folder_is_not_written_over(run):
    code, output = launch(SMOKE, "--output_dir", str(run[0]))
    assert code != 0
    assert "checkpoint-8 is there already: continue that run with --resume_from_checkpoint last" in output


def test_killed_and_resumed_the_losses_are_the_same(run, tmp_path):
    folder = tmp_path / "killed"
    process = launch(SMOKE, "--output_dir", str(folder), wait=False)
    deadline = time.monotonic() + 240
    while not (folder / "checkpoint-2" / "trainer_state.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "results.json").exists()
    code, output = launch(SMOKE, "--output_dir", str(folder), "--resume_from_checkpoint", "last")
    assert code == 0, output
    assert len(losses(folder)) == 8
    assert losses(folder) == losses(run[0])


def test_an_unknown_key_names_the_valid_one():
    code, output = launch(SMOKE, "--svr_alhpa", "2")
    assert code != 0
    assert "unknown key 'svr_alhpa': did you mean svr_alpha" in output


@pytest.mark.slow
def test_the_default_job_reaches_ten_times_chance_in_both_directions(tmp_path):
    code, output = launch("--output_dir", str(tmp_path / "run"), timeout_seconds=1200)
    assert code == 0, output
    scores = json.loads((tmp_path / "run" / "results.json").read_text())["test"]["retrieval"]["eng"]
    for direction in ("t2a", "a2t"):
        assert scores[direction]["R@1"] >= 10 * scores[f"{direction}_chance"]["R@1"]


@pytest.mark.slow
@pytest.mark.skipif("SUPCLAP_ESC10" not in os.environ, reason="set SUPCLAP_ESC10 to a folder of ESC-10 to train on it")
def test_real_recordings_are_learned(tmp_path):
    folder = ["--data_dir", os.environ["SUPCLAP_ESC10"], "--output_dir", str(tmp_path / "run")]
    code, output = launch("recipes/configs/esc10.yaml", *folder, timeout_seconds=1800)
    assert code == 0, output
    results = json.loads((tmp_path / "run" / "results.json").read_text())["test"]
    assert results["zero_shot"]["top1"] >= 4 * results["zero_shot"]["chance"]
