"""Checks before the first step: published numbers, splits, options and overlaps."""

import json
import re
from pathlib import Path

import dataset_folders
import pytest
from builders import save_supclap
from dataset_folders import youtube_id
from full_scale import write_sounds
from recordings import esc50_folder

from modeling_supclap.recipes import estimates, training_data
from modeling_supclap.recipes.models import has_model
from modeling_supclap.recipes.options import DataArguments, ReproductionArguments
from modeling_supclap.recipes.run_checks import check_inputs, find_data
from modeling_supclap.recipes.runs import Row, Step
from modeling_supclap.recipes.training_data import describe_bad_audio


def test_a_part_of_a_dataset_is_not_the_published_one(tmp_path):
    config = json.dumps({"data_dir": str(esc50_folder(tmp_path, count=5, num_folds=5))})
    _, _, lack = find_data("esc50", "train", config, describe=False)
    assert "the dataset has 20 recordings of 2,000" in lack[0]
    assert find_data("esc50", "train", config, describe=False, allow_missing=True)[2] == []
    assert find_data("esc50", "train", config, describe=False, is_published=False)[2] == []


@pytest.mark.parametrize(("lost", "is_accepted"), [(3, True), (5, False)])
def test_a_fifth_of_the_recordings_may_be_missing(tmp_path, monkeypatch, lost, is_accepted):
    made = dataset_folders.audiocaps(tmp_path, train=20, held_out=2)
    for path in made.audio[:lost]:
        path.unlink()
    monkeypatch.setitem(estimates.TRAIN_CLIPS, "audiocaps", 20)
    count, _, lack = find_data("audiocaps", "train", json.dumps(made.config), describe=False)
    assert count == 20 - lost
    assert (lack == []) == is_accepted
    assert find_data("audiocaps", "train", json.dumps(made.config), describe=False, allow_missing=True)[2] == []


def evaluated(tmp_path, **evaluation):
    """Return a row that trains on AudioCaps and evaluates its training split."""
    made = dataset_folders.audiocaps(tmp_path / "audiocaps", train=24, held_out=3)
    train = {
        "dataset": "audiocaps",
        "data_dir": made.config["data_dir"],
        "use_cpu": True,
        "languages": ["eng"],
        "seed": 0,
    }
    folder = tmp_path / "runs" / "row-train-audiocaps-0-seed0"
    again = {"dataset": "audiocaps", "data_dir": made.config["data_dir"], "model": str(folder), "split": "train+test"}
    last = tmp_path / "runs" / "row-evaluate-audiocaps-0-seed0"
    steps = [Step("train", train, folder), Step("evaluate", {**again, **evaluation}, last)]
    return Row("row", "Row", None, "audiocaps", [steps])


def test_an_overlap_with_the_training_data_is_refused_or_reported(tmp_path, capsys):
    args = ReproductionArguments(output_dir=str(tmp_path), dry_run=True)
    for number, (evaluation, text) in enumerate(
        [
            (
                {},
                "missing: data of audiocaps for evaluate: 24 of 27 clips of audiocaps are in the training data of row",
            ),
            (
                {"allow_trained": True},
                "found: 24 of 27 clips of audiocaps are in the training data of row; they are evaluated",
            ),
            (
                {"exclude_trained": True},
                "found: 24 of 27 clips of audiocaps are in the training data of row; they are left out",
            ),
            ({"split": "test"}, "found: audiocaps: 24 train, 3 validation, 3 test recordings"),
        ]
    ):
        check_inputs("table", [evaluated(tmp_path / str(number), **evaluation)], args)
        printed = capsys.readouterr().out
        assert text in printed
        assert ("training data" in printed) == ("split" not in evaluation)


@pytest.mark.parametrize("check_audio", [False, True])
def test_a_dry_run_decodes_recordings_and_says_what_would_stop(tmp_path, capsys, monkeypatch, check_audio):
    """A sample of each split, or all recordings; training reads all splits, and an evaluation its own."""
    monkeypatch.setattr(training_data, "SAMPLE_RECORDINGS", 0)  # too small to meet the unusable ones
    describe_bad_audio.cache_clear()
    row = evaluated(tmp_path, split="test", on_bad_audio="skip")
    made = Path(row.runs[0][0].settings["data_dir"])
    write_sounds(sorted(made.rglob("*.wav")))
    args = ReproductionArguments(output_dir=str(tmp_path), dry_run=True, check_audio=check_audio)
    check_inputs("table", [row], args)
    assert "cannot be used" not in capsys.readouterr().out

    (broken,) = [path for path in made.rglob("*.wav") if youtube_id(28) in path.name]  # of the test split
    broken.write_bytes(b"junk")
    describe_bad_audio.cache_clear()
    check_inputs("table", [row], args)
    lines = capsys.readouterr().out.splitlines()
    missing = [line for line in lines if line.startswith("  missing") and "1 of 3 recordings of test" in line]
    found = [line for line in lines if line.startswith("  found") and "1 of 3 recordings of test" in line]
    assert (len(missing), len(found)) == ((1, 1) if check_audio else (0, 0))
    if check_audio:
        assert "--on_bad_audio skip" in missing[0]  # the training stops
        assert "left out" in found[0]  # the evaluation does not
        assert youtube_id(28) in missing[0]


def test_the_advice_for_missing_files_is_the_same_everywhere(tmp_path, monkeypatch):
    made = dataset_folders.audiocaps(tmp_path, train=20, held_out=2)
    for path in made.audio[:10]:
        path.unlink()
    _, _, lack = find_data("audiocaps", "train", json.dumps(made.config), describe=False)
    assert re.search("10 of the 24 recordings.*--allow_missing true", lack[0])
    with pytest.raises(FileNotFoundError, match=r"10 of 24 recordings.*--allow_missing true"):
        DataArguments("audiocaps", **made.config).load_splits()


def test_a_missing_split_is_found(tmp_path):
    row = evaluated(tmp_path)
    Path(row.runs[0][0].settings["data_dir"], "val.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.csv|validation"):
        check_inputs("table", [row], ReproductionArguments(output_dir=str(tmp_path)))


def test_options_that_do_not_fit_together_are_an_error(tmp_path):
    row = evaluated(tmp_path)
    row.runs[0][0].settings.update(loss="siglip", svr="bi-static", svr_decoupled=True)
    with pytest.raises(ValueError, match="svr_decoupled"):
        check_inputs("table", [row], ReproductionArguments(output_dir=str(tmp_path)))


def test_the_temperature_of_each_training_is_printed(tmp_path, capsys):
    row = evaluated(tmp_path)
    row.runs[0][0].settings.update(temperature=0.05, train_temperature=False)
    check_inputs("table", [row], ReproductionArguments(output_dir=str(tmp_path), dry_run=True))
    assert "temperature 0.05, fixed" in capsys.readouterr().out


def test_a_model_is_looked_for_in_the_folder_of_today(tmp_path, monkeypatch):
    """A relative name can mean another folder later in the same process, and a folder can appear."""
    for folder in ("without", "with"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        assert not has_model("models/start")
    save_supclap(tmp_path / "with" / "models" / "start")
    assert has_model("models/start")
