"""Runs of sweeps and tables: the results of a finished run belong to its data."""

import csv
import shutil

import pytest
from recordings import tone_rows
from results_fixtures import query_results

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.recipes import run_checks
from modeling_supclap.recipes.run_checks import refuse_other_data
from modeling_supclap.recipes.runs import Step
from modeling_supclap.recipes.training_data import record_splits


def write_table(folder, captions):
    with open(folder / "metadata.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "caption_eng", "split"])
        for number, caption in enumerate(captions):
            writer.writerow([f"tone_{number}.wav", caption, "train" if number < 4 else "test"])


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """Return a function from settings to a finished step on a folder of six sounds."""
    monkeypatch.setattr(run_checks, "_RECORDS", {})
    data = tmp_path / "data"
    data.mkdir()
    tone_rows(data, 6)
    write_table(data, ["rain"] * 6)

    def finish(recipe="train"):
        source = {"dataset": "audio_folder", "data_dir": str(data), "dataset_config": {"languages": ["eng"]}}
        step = Step(recipe, source, tmp_path / recipe)
        splits = load_splits("audio_folder", data_dir=str(data), languages=["eng"])
        record = record_splits(splits if recipe == "train" else {"test": splits["test"]})
        query_results([1, 0], data=record).save(step.folder)
        refuse_other_data(step)
        run_checks._RECORDS.clear()
        return step

    return finish


@pytest.mark.parametrize("recipe", ["train", "evaluate"])
def test_results_on_other_data_are_refused(finished, tmp_path, recipe):
    step = finished(recipe)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "data", moved)
    refuse_other_data(Step(recipe, {**step.settings, "data_dir": str(moved)}, step.folder))

    write_table(moved, ["rain"] * 4 + ["rain", "a dog"])
    run_checks._RECORDS.clear()
    with pytest.raises(ValueError, match=rf"{step.folder}.*test.*captions of 2 clips"):
        refuse_other_data(Step(recipe, {**step.settings, "data_dir": str(moved)}, step.folder))
    write_table(moved, ["rain"] * 5)
    run_checks._RECORDS.clear()
    with pytest.raises(ValueError, match="test had 2 clips, now 1"):
        refuse_other_data(Step(recipe, {**step.settings, "data_dir": str(moved)}, step.folder))


def test_data_that_are_gone_are_not_compared(finished, tmp_path):
    step = finished()
    shutil.rmtree(tmp_path / "data")
    refuse_other_data(step)
    del step.settings["data_dir"]
    refuse_other_data(step)
