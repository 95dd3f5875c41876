"""Checks before the first of several runs: missing inputs, overlaps, and finished runs on other data."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import dataset_folders
import numpy as np
import pytest
from builders import save_supclap
from dataset_folders import youtube_id
from datasets import Dataset
from full_scale import write_sounds
from recordings import tone_rows
from results_fixtures import query_results

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.negatives import add_negatives, write_negatives
from modeling_supclap.evaluation.results import Results
from modeling_supclap.recipes import sweep, train_supclap
from modeling_supclap.recipes.options import ReproductionArguments
from modeling_supclap.recipes.sweep import Row, Step, check_rows, refuse_other_data
from modeling_supclap.recipes.train_supclap import has_model, record_splits


@pytest.fixture(autouse=True)
def _without_cache():
    sweep._LOADED.clear()
    sweep._DECODED.clear()


def write_table(folder, captions):
    with open(folder / "metadata.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "caption_eng", "split"])
        for number, caption in enumerate(captions):
            writer.writerow([f"tone_{number}.wav", caption, "train" if number < 4 else "test"])


@pytest.fixture
def finished(tmp_path):
    """Return a function from settings to a finished step on a folder of six sounds."""
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
        sweep._LOADED.clear()
        return step

    return finish


@pytest.mark.parametrize("recipe", ["train", "evaluate"])
def test_results_on_other_data_are_refused(finished, tmp_path, recipe):
    step = finished(recipe)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "data", moved)
    refuse_other_data(Step(recipe, {**step.settings, "data_dir": str(moved)}, step.folder))

    write_table(moved, ["rain"] * 4 + ["rain", "a dog"])
    sweep._LOADED.clear()
    with pytest.raises(ValueError, match=rf"{step.folder}.*test.*captions of 2 clips"):
        refuse_other_data(Step(recipe, {**step.settings, "data_dir": str(moved)}, step.folder))
    write_table(moved, ["rain"] * 5)
    sweep._LOADED.clear()
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


def evaluated(tmp_path, **evaluation):
    """Return a row that trains on AudioCaps and evaluates its training split."""
    made = dataset_folders.audiocaps(tmp_path / "audiocaps", train=24, held_out=3)
    write_sounds(made.audio)
    train = {"dataset": "audiocaps", "data_dir": made.config["data_dir"], "use_cpu": True, "seed": 0}
    folder = tmp_path / "runs" / "row-train-audiocaps-0-seed0"
    again = {"dataset": "audiocaps", "data_dir": made.config["data_dir"], "model": str(folder), "split": "train+test"}
    last = tmp_path / "runs" / "row-evaluate-audiocaps-0-seed0"
    steps = [Step("train", train, folder), Step("evaluate", {**again, **evaluation}, last)]
    return Row("row", "Row", None, "audiocaps", [steps])


def test_a_missing_model_of_each_recipe_is_named(tmp_path):
    """Also of steps on generated data, whose settings are not compared."""
    train = Step("train", {"model": "nobody/first"}, tmp_path / "runs" / "train")
    evaluate = Step("evaluate", {"model": "nobody/second"}, tmp_path / "runs" / "evaluate")
    row = Row("row", "Row", None, "synthetic", [[train, evaluate]])
    _, missing = sweep.check_row(row, None, ReproductionArguments(output_dir=str(tmp_path)))
    assert missing == ["model nobody/first", "model nobody/second"]


OVERLAP = "24 of 27 clips of audiocaps are in the training data of row-train-audiocaps-0-seed0"


@pytest.mark.parametrize(
    ("evaluation", "text"),
    [
        ({}, "row-train-audiocaps-0-seed0 has trained on 24 of 27 clips"),
        ({"allow_trained": True}, f"found: {OVERLAP}; they are evaluated"),
        ({"exclude_trained": True}, f"found: {OVERLAP}; they are left out"),
        ({"split": "test"}, "found: audiocaps: 24 train, 3 validation, 3 test recordings"),
    ],
)
def test_an_overlap_with_the_training_data_is_refused_or_reported(tmp_path, capsys, evaluation, text):
    args = ReproductionArguments(output_dir=str(tmp_path), dry_run=True)
    assert check_rows("table", [evaluated(tmp_path, **evaluation)], args) == []
    printed = capsys.readouterr().out
    assert text in printed
    assert ("trained on" in printed or "training data" in printed) == ("split" not in evaluation)
    assert ("missing" in printed) == (not evaluation)


@pytest.mark.parametrize("check_audio", [False, True])
def test_a_dry_run_decodes_recordings_and_says_what_would_stop(tmp_path, capsys, monkeypatch, check_audio):
    """A sample of each split, or all recordings; training reads all splits, and an evaluation its own."""
    monkeypatch.setattr(sweep, "SAMPLE_RECORDINGS", 0)  # too small to meet the unusable one
    row = evaluated(tmp_path, split="test", on_bad_audio="skip")
    args = ReproductionArguments(output_dir=str(tmp_path), dry_run=True, check_audio=check_audio)
    check_rows("table", [row], args)
    assert "cannot be used" not in capsys.readouterr().out

    data_dir = Path(row.runs[0][0].settings["data_dir"])
    (broken,) = [path for path in data_dir.rglob("*.wav") if youtube_id(28) in path.name]  # of the test split
    broken.write_bytes(b"junk")
    sweep._DECODED.clear()
    check_rows("table", [row], args)
    lines = capsys.readouterr().out.splitlines()
    missing = [line for line in lines if line.startswith("  missing") and "1 of 3 recordings of test" in line]
    found = [line for line in lines if line.startswith("  found") and "1 of 3 recordings of test" in line]
    assert (len(missing), len(found)) == ((1, 1) if check_audio else (0, 0))
    if check_audio:
        bad = f"1 of 3 recordings of test cannot be used, first that of clip '{youtube_id(28)}"
        assert missing[0].startswith(f"  missing: data of audiocaps for train: {bad}")  # the training stops
        assert missing[0].endswith("; --on_bad_audio skip leaves such recordings out")
        assert found[0].startswith(f"  found: data of audiocaps: {bad}")  # the evaluation does not
        assert found[0].endswith("; they are left out")


def test_unusable_recordings_of_a_sample_are_counted_once(tmp_path, monkeypatch):
    rows = tone_rows(tmp_path, 5)
    first, second, *_ = np.random.default_rng(0).permutation(5).tolist()  # the sample
    (tmp_path / f"tone_{first}.wav").write_bytes(b"junk")
    monkeypatch.setattr(sweep, "SAMPLE_RECORDINGS", 2)
    columns = {name: [row[name] for row in rows] for name in ("clip_id", "audio_path")}
    train, test = Dataset.from_dict(columns), Dataset.from_dict(columns).select([first])
    splits = {"train": train, "validation": rows, "test": test}  # rows that are no Dataset are not read

    of_train, of_test = sweep.describe_bad_audio(splits, check_all=False).split("; ")
    start = f" cannot be used, first that of clip 'clip{first}': "
    assert of_train.startswith(f"1 of 2 sampled recordings of train{start}")
    assert of_test.startswith(f"1 of 1 recordings of test{start}")
    (tmp_path / f"tone_{second}.wav").write_bytes(b"junk")
    assert sweep.describe_bad_audio(splits, check_all=False) == f"{of_train}; {of_test}"  # not read again
    sweep._DECODED.clear()
    assert sweep.describe_bad_audio(splits, check_all=True).startswith("2 of 5 recordings of train cannot be used")


def test_the_folder_of_a_run_depends_on_its_settings_and_not_on_its_place(tmp_path):
    (tmp_path / "esc50").mkdir()
    args = ReproductionArguments(scale="full", output_dir="out", data_dir=str(tmp_path))
    settings = {"dataset": "esc50", "svr_alpha": 1, "seed": 3, "model": "a/start", "output_dir": "elsewhere"}
    step = sweep.build_step("row", "train", dict(settings), args)
    folder = Path("out", "full", "runs", step.folder.name)
    expected = {**settings, "data_dir": str(tmp_path / "esc50"), "output_dir": str(folder)}
    assert (step.recipe, step.settings, step.folder) == ("train", expected, folder)
    assert re.fullmatch("row-train-esc50-[0-9a-f]{8}-seed3", folder.name)

    def name_of(args=args, recipe="train", **changed):
        return sweep.build_step("row", recipe, {**settings, **changed}, args).folder.name

    options = replace(args, data_dir=str(tmp_path / "esc50"), allow_missing=True, on_bad_audio="skip", output_dir="o")
    assert {name_of(), name_of(options), name_of(model="b/start")} == {folder.name}
    assert name_of(seed=4) == folder.name.replace("seed3", "seed4")
    others = [name_of(model="a/other"), name_of(svr_alpha=2), name_of(dataset_config={"test_fold": 2})]
    assert len({folder.name, *others}) == 4

    trained = sweep.build_step("row", "train", dict(settings), options).settings
    assert (trained["data_dir"], trained["allow_missing"]) == (str(tmp_path / "esc50"), True)
    assert trained["on_bad_audio"] == "skip"
    scored = sweep.build_step("row", "evaluate", dict(settings), options).settings
    assert ("allow_missing" in scored, scored["on_bad_audio"]) == (False, "skip")
    made = sweep.build_step("row", "train", {"seed": 0}, args)
    assert ("data_dir" in made.settings, made.folder.name.startswith("row-train-synthetic-")) == (False, True)


@pytest.mark.parametrize(("change", "count"), [({"seed": 1}, 1), ({"dataset_config": {"limit": 9}}, 2)])
def test_runs_that_differ_only_in_their_seed_are_checked_once(tmp_path, monkeypatch, change, count):
    row, calls = evaluated(tmp_path, split="test"), []
    (train, _) = row.runs[0]
    again = Step("train", {**train.settings, **change, "output_dir": "other"}, train.folder.with_name("again"))
    monkeypatch.setattr(sweep, "check_data", lambda step, *_: calls.append(step) or [f"data of {step.recipe}"])
    args = ReproductionArguments(output_dir=str(tmp_path))
    found, missing = sweep.check_row(Row("row", "Row", None, "audiocaps", [[train], [again]]), None, args)
    assert (calls, found, missing) == ([train, again][:count], ["data of train"] * count, [])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"loss": "siglip", "svr": "bi-static", "svr_decoupled": True}, ValueError, "svr_decoupled"),
        ({"audio_encoder": "nobody/none", "text_encoder": "scratch"}, ValueError, "text_encoder"),
        ({"audio_encoder": "nobody/none", "text_encoder": "."}, FileNotFoundError, "audio_encoder nobody/none"),
        ({"model": "nobody/none"}, FileNotFoundError, "model nobody/none"),
        ({"per_device_train_batch_size": 25}, FileNotFoundError, "24 clips are fewer than a batch of 25"),
        ({"languages": ["fra"]}, FileNotFoundError, "'fra'"),
        ({"zero_shot_templates": ["clip"]}, ValueError, "'clip'"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before_the_first_run(tmp_path, change, error, message):
    row = evaluated(tmp_path, split="test")
    row.runs[0][0].settings.update(change)
    with pytest.raises(error, match=message):
        check_rows("table", [row], ReproductionArguments(output_dir=str(tmp_path)))


def test_what_an_evaluation_would_refuse_is_refused_before_the_first_run(tmp_path):
    row = evaluated(tmp_path, split="test", zero_shot_templates=["clip"])
    with pytest.raises(FileNotFoundError, match=r"data of audiocaps for evaluate: .*'clip'"):
        check_rows("table", [row], ReproductionArguments(output_dir=str(tmp_path)))


def test_a_missing_split_is_found(tmp_path):
    row = evaluated(tmp_path)
    Path(row.runs[0][0].settings["data_dir"], "val.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.csv|validation"):
        check_rows("table", [row], ReproductionArguments(output_dir=str(tmp_path)))


def test_a_model_is_looked_for_in_the_folder_of_today(tmp_path, monkeypatch):
    """A relative name can mean another folder later in the same process, and a folder can appear."""
    for folder in ("without", "with"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        assert not has_model("models/start")
    save_supclap(tmp_path / "with" / "models" / "start")
    assert has_model("models/start")


def test_a_run_without_its_last_file_is_not_finished(tmp_path):
    """The results are written after the card. A run that was killed between them is repeated."""
    step = Step("train", {"seed": 0}, tmp_path)
    (tmp_path / "README.md").touch()
    (tmp_path / "report.html").touch()
    assert not step.is_done
    query_results([1, 0]).save(tmp_path)
    assert step.is_done
    (tmp_path / "outcomes.npz").write_bytes(b"of another run")
    assert not step.is_done


def test_the_card_comes_before_the_results_and_the_whole_split_last(tmp_path, monkeypatch):
    trainer = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path), push_to_hub=False))
    write_card = mock.Mock(side_effect=OSError("disk full"))
    monkeypatch.setattr("modeling_supclap.model_card.write_card_of_run", write_card)
    of_run = {"": query_results([1, 0]), "b": query_results([0, 0]), "a": query_results([1, 1])}
    with pytest.raises(OSError, match="disk full"):
        train_supclap.finish_run(trainer, of_run, "start")
    assert not any(tmp_path.iterdir())

    write_card.side_effect = None
    monkeypatch.setattr(of_run["a"], "save", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        train_supclap.finish_run(trainer, of_run, "start")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    monkeypatch.undo()

    monkeypatch.setattr("modeling_supclap.model_card.write_card_of_run", write_card)
    train_supclap.finish_run(trainer, of_run, "start")
    stored = [Results.load(tmp_path / name).scores for name in ("", "a", "b")]
    assert [content["scores"] for content in write_card.call_args.kwargs["results"]] == stored
    assert write_card.call_args.kwargs["base_model"] == "start"


def test_results_of_earlier_weights_go_before_the_new_weights_are_written(tmp_path):
    (tmp_path / "results.json").touch()
    trainer = mock.MagicMock(is_fsdp_enabled=False)
    trainer.args.output_dir = str(tmp_path)
    trainer.save_model.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train_supclap.save_trained(trainer, SimpleNamespace(lora_rank=None))
    assert not any(tmp_path.iterdir())
