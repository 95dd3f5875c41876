"""Runs of sweeps and tables: the results of a finished run belong to its data."""

import csv
import shutil

import pytest
from recordings import tone_rows
from results_fixtures import query_results

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.negatives import add_negatives, write_negatives
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


def test_runs_on_other_negatives_are_compared_with_their_own(finished, tmp_path):
    source = finished().settings
    splits = load_splits("audio_folder", data_dir=source["data_dir"], languages=["eng"])
    clip_id = splits["train"][0]["clip_id"]
    steps = []
    for text in ("wind", "a dog"):
        path = tmp_path / f"{text}.parquet"
        write_negatives(path, [{"clip_id": clip_id, "language": "eng", "text": text, "similarity": 0.5}])
        step = Step("train", {**source, "negatives": str(path)}, tmp_path / text)
        record = record_splits({**splits, "train": add_negatives(splits["train"], path)})
        query_results([1, 0], data=record).save(step.folder)
        steps.append(step)
    for step in steps:
        refuse_other_data(step)
    with pytest.raises(ValueError, match="train had other clip ids or captions"):
        refuse_other_data(Step("train", steps[0].settings, steps[1].folder))
    table = Step("negatives", source, tmp_path / "table")
    assert not table.is_done
    table.folder.mkdir()
    (table.folder / "negatives.parquet").touch()
    assert table.is_done
    refuse_other_data(table)  # has no results
