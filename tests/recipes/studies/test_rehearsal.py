"""Every table of the papers at scale full, on tiny folders and checkpoints in the published layouts."""

import json

import full_scale
import pytest
from commands import run_recipe

from modeling_supclap.recipes import reproduce
from modeling_supclap.recipes.studies.select import list_tables

TABLES = [name for name, table in list_tables().items() if "full" in table]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Folder with the data, models and translations; the runs of all tables are shared."""
    folder = tmp_path_factory.mktemp("full")
    full_scale.make_data(folder / "data")
    full_scale.make_models(folder)
    full_scale.make_translations(folder / "data", folder)
    return folder


def reproduce_table(rehearsal, name, *words):
    settings = {"max_steps": 1, "use_cpu": True, "dataloader_num_workers": 0, "per_device_eval_batch_size": 26}
    options = ["--scale", "full", "--seeds", "0", "--allow_missing", "true", "--data_dir", rehearsal / "data"]
    run_recipe(reproduce, name, *options, "--settings", json.dumps(settings), *words)
    return json.loads(
        (rehearsal / "outputs" / "reproduce" / "full" / f"{name.replace('/', '_')}_selected.json").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_written(rehearsal, name, monkeypatch):
    monkeypatch.chdir(rehearsal)
    content = reproduce_table(rehearsal, name)
    for row in content["rows"]:
        assert row["scores"], (name, row["model"])
