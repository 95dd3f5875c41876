"""Every table of the papers at scale full, on tiny folders and checkpoints in the published layouts."""

import json
from functools import partial
from pathlib import Path

import full_scale
import pytest
from commands import run_recipe

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.evaluation.results import Results
from modeling_supclap.recipes import reproduce
from modeling_supclap.recipes.options import ReproductionArguments
from modeling_supclap.recipes.studies.pages import resolve_settings
from modeling_supclap.recipes.studies.plan import list_tables, plan
from modeling_supclap.recipes.studies.tables import list_columns
from modeling_supclap.recipes.sweep import RECIPES

TABLES = {name: table for name, table in list_tables().items() if "full" in table}
SHORT = {
    "max_steps": 1,
    "logging_steps": 1,
    "use_cpu": True,
    "dataloader_num_workers": 0,
    "per_device_eval_batch_size": 26,
}


NOT_MEASURED = {"training peak_memory_mib", "multilingual eng Gap", "multilingual eng Dis"}
"""Columns without a value on the CPU, or in English, from which the distances are measured."""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Folder with the data, models and translations; the tables share their runs."""
    folder = tmp_path_factory.mktemp("full")
    full_scale.make_data(folder / "data")
    full_scale.make_models(folder)
    full_scale.make_translations(folder / "data", folder)
    return folder


def reproduce_table(rehearsal, monkeypatch, name, *words, output="outputs/reproduce"):
    """Run the command in the folder of the models, and return the content of its JSON file; None for a dry run."""
    monkeypatch.chdir(rehearsal)
    settings = {**SHORT, "dataset_config": {"num_test": 5, "blacklists": []}} if name == "supclap/table5" else SHORT
    options = ["--scale", "full", "--seeds", "0", "--allow_missing", "true", "--data_dir", rehearsal / "data"]
    run_recipe(reproduce, name, *options, "--settings", json.dumps(settings), "--output_dir", output, *words)
    path = rehearsal / output / "full" / f"{name.replace('/', '_')}_selected.json"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.slow
def test_a_zero_shot_table_runs_to_its_end(rehearsal, monkeypatch, capsys):
    """The shortest way through training, a published start model, ten folds, and clips that were trained on."""
    words = ("--rows", "table1_infonce", "clap", "--datasets", "urbansound8k", "vggsound")
    reproduce_table(rehearsal, monkeypatch, "supclap/table2", *words, "--dry_run", "true")
    printed = capsys.readouterr().out
    assert "missing" not in printed
    assert "3 of 3 clips of vggsound are in the training data of table1_infonce-train-audiocaps-" in printed

    content = reproduce_table(rehearsal, monkeypatch, "supclap/table2", *words)
    rows = {(row["row"], row["dataset"]): row for row in content["rows"]}
    assert all(row["scores"]["zero_shot eng supclap top1"]["values"] for row in rows.values())
    assert rows["table1_infonce", "urbansound8k"]["overlap"] == {"clips": 20, "trained": 0, "excluded": 0}
    assert rows["table1_infonce", "vggsound"]["overlap"] == {"clips": 3, "trained": 3, "excluded": 0}
    assert rows["clap", "urbansound8k"]["scores"]["zero_shot eng supclap top1"]["paper"] == 0.732
    (folder,) = rehearsal.glob("outputs/reproduce/full/runs/table1_infonce-train-audiocaps-*-seed0")
    used = Results.load(folder).content["training"]["arguments"]
    assert (used["temperature"], used["train_temperature"], used["selection_split"]) == (0.07, False, "test")


def test_unusable_recordings_do_not_stop_a_table(rehearsal, monkeypatch, capsys, tmp_path):
    """Trainings and evaluations leave them out and the table names them; classes without a clip stay candidates."""
    data = full_scale.make_data(tmp_path / "data")
    clips = {
        split: rows["clip_id"] for split, rows in load_splits("audiocaps", data_dir=str(data / "audiocaps")).items()
    }
    junk = {"train": clips["train"][3], "validation": clips["validation"][0], "test": clips["test"][1]}
    videos = load_splits("vggsound", data_dir=str(data / "vggsound"))
    first, second, _ = videos["test"]
    for path in data.rglob("*.wav"):
        if (
            any(clip_id.rpartition("_")[0] in path.name for clip_id in junk.values())
            or str(path) == first["audio_path"]
        ):
            path.write_bytes(path.name.encode())  # equal files would be copies
    Path(second["audio_path"]).unlink()

    words = ("--rows", "table1_infonce", "--datasets", "vggsound", "--data_dir", data)
    table = partial(reproduce_table, rehearsal, monkeypatch, "supclap/table2", *words, output="outputs/damaged")
    table("--dry_run", "true")
    printed = capsys.readouterr().out
    assert f"1 of 2 recordings of test cannot be used, first that of clip '{first['clip_id']}'" in printed
    with pytest.raises(BadAudioError, match="--on_bad_audio skip"):
        table()

    content = table("--on_bad_audio", "skip")
    (row,) = content["rows"]
    assert row["left_out"] == {
        **{f"audiocaps {split}": [clip_id] for split, clip_id in junk.items()},
        "vggsound test": [first["clip_id"]],
    }
    assert row["overlap"]["clips"] == 1
    score = row["scores"]["zero_shot eng supclap top1"]
    assert score["chance"] == 1 / 5  # of the labels in the metadata, although one clip is left
    note = (rehearsal / "outputs/damaged/full/supclap_table2_selected.md").read_text()
    assert f"**Left out**: 1 unusable recordings of vggsound test ({first['clip_id']})" in note


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_written(rehearsal, monkeypatch, name):
    content = reproduce_table(rehearsal, monkeypatch, name)
    args = ReproductionArguments(scale="full", data_dir=".", seeds=[0])
    planned = {(row.name, row.dataset): row for row in plan(name, TABLES[name], args)}
    assert {(row["row"], row["dataset"]) for row in content["rows"]} == planned.keys()
    for row in content["rows"]:
        lacking = set(list_columns(TABLES[name], "full")) - row["scores"].keys()
        assert lacking <= NOT_MEASURED, row["row"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["supclap/table1", "atri/table1", "teminal/table2"])
def test_a_run_uses_the_settings_of_the_page(rehearsal, monkeypatch, name):
    """The temperature and all other arguments in results.json are those that docs/paper_settings.md states."""
    reproduce_table(rehearsal, monkeypatch, name)
    args = ReproductionArguments(scale="full", data_dir=".", seeds=[0], settings=SHORT)
    for row in plan(name, TABLES[name], args):
        step = row.runs[0][0]
        if step.recipe not in ("train", "posttrain"):
            continue
        resolved = resolve_settings(row, 0)
        (folder,) = rehearsal.glob(f"outputs/reproduce/full/runs/{step.folder.name}")
        used = Results.load(folder).content["training"]["arguments"]
        names = RECIPES[step.recipe].options[0].__dataclass_fields__.keys() | {"temperature", "train_temperature"}
        for key in (names | {"learning_rate", "svr", "shared_radius", "radius_order"}) & used.keys() & resolved.keys():
            if key in ("data_dir", "datasets", "share", "allow_missing") or resolved[key] == "of the start model":
                continue
            assert used[key] == resolved[key], (row.name, key)
