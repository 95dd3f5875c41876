"""Tables and studies are selected by name; the settings of the tables are valid, and those of the papers."""

import dataset_folders
import pytest
from recordings import esc50_folder

from modeling_supclap import evaluation
from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.recipes import train_supclap
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import SCALES, ReproductionArguments
from modeling_supclap.recipes.studies import plan as plan_module
from modeling_supclap.recipes.studies.plan import (
    PUBLISHED_CLIPS,
    find_studies,
    find_tables,
    list_tables,
    plan,
    refuse_few_clips,
    select,
)
from modeling_supclap.recipes.studies.tables import find_printed, list_columns
from modeling_supclap.recipes.sweep import RECIPES, Step

TABLES = list_tables()


@pytest.mark.parametrize("scale", SCALES)
def test_every_configuration_file_of_the_tables_is_valid(scale, tmp_path):
    args = ReproductionArguments(scale=scale, data_dir=str(tmp_path), output_dir=str(tmp_path), seeds=[0])
    checked = {}
    for name, table in TABLES.items():
        if "lacks" in table:
            assert len(table["lacks"]) > 20
        elif scale not in table:
            assert table[f"no_{scale}"], name
        else:
            for row in plan(name, table, args):
                checked.update({step.folder: step for step in row.runs[0]})
    for step in checked.values():
        parsed = RECIPES[step.recipe].parse(step.settings)
        if step.recipe == "train":
            train_supclap.refuse_options(*parsed)


def settings_of(table, name, dataset, scale, tmp_path):
    args = ReproductionArguments(scale=scale, data_dir=str(tmp_path), output_dir=str(tmp_path), seeds=[0])
    rows = {(row.name, row.dataset): row for row in plan(table, TABLES[table], args)}
    return rows[name, dataset].runs[0]


def test_settings_are_those_of_the_papers(tmp_path):
    (step,) = settings_of("supclap/table1", "table1_infonce", "clotho", "full", tmp_path)
    *_, training = RECIPES["train"].parse(step.settings)
    clips = 5 * PUBLISHED_CLIPS["clotho"]["train"] if training.every_caption else 0
    steps = clips // training.per_device_train_batch_size * training.num_train_epochs
    assert steps == 7990  # five captions of 3,839 clips, ten epochs [S 4.1.1, table 14]
    (step,) = settings_of("atri/table6", "table1_kcl", "audiocaps", "full", tmp_path)
    assert step.settings["learning_rate"] == 5e-6  # [A appendix B]
    random = {"random_weights": ["audio", "text"], "text_config": {"encoder_layers": 12}}  # [S E.7]
    (step,) = settings_of("supclap/table9", "table1_infonce", "audiocaps", "full", tmp_path)
    assert random.items() <= step.settings.items()
    (step,) = settings_of("supclap/figure6", "table1_infonce_bi_dynamic", "audiocaps", "full", tmp_path)
    assert random.items() <= step.settings.items()
    (step,) = settings_of("supclap/figure6", "figure6_pretrained", "audiocaps", "full", tmp_path)
    assert "random_weights" not in step.settings
    (step, _) = settings_of("teminal/table2", "table2_ab_1111", "esc50", "full", tmp_path)
    # [T B.5]
    assert (step.settings["num_phrasings"], 2450 // step.settings["per_device_train_batch_size"]) == (1, 28)
    (step,) = settings_of("supclap/table1", "table1_infonce", "synthetic", "mini", tmp_path)
    assert step.settings["train_temperature"] is False  # from the base file of the row
    assert (step.settings["audio_encoder"], step.settings["text_encoder"]) == ("scratch", "scratch")


@pytest.mark.parametrize("names", [["supclap/table99"], []])
def test_the_error_of_an_unknown_table_lists_the_known_ones(names):
    with pytest.raises(ValueError, match=r"atri/table1.*supclap/table14"):
        find_tables(names)


def test_tables_that_cannot_be_reproduced_have_a_reason():
    with pytest.raises(ValueError, match="supclap/table10"):
        find_tables(["supclap/table10"])
    assert "supclap/table10" not in find_tables(["supclap"])


def test_an_unknown_study_is_named():
    with pytest.raises(ValueError, match="evidence/kcll"):
        find_studies(["evidence/kcll"])


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (
            ["supclap/table3"],
            {"rows": ["table99", "a"]},
            r"^supclap/table3: no rows \['a', 'table99'\]; expected .*infonce",
        ),
        (["supclap/table3"], {"datasets": ["esc99"]}, r"^supclap/table3: no datasets \['esc99'\]; expected some of "),
        (["evidence/kcl"], {"rows": ["esc99"]}, r"^evidence/kcl: no rows \['esc99'\]; expected some of "),
    ],
)
def test_selected_rows_and_datasets_exist(tmp_path, names, options, message):
    with pytest.raises(ValueError, match=message):
        select(names, ReproductionArguments(scale="mini", output_dir=str(tmp_path), **options))


def test_a_table_without_the_scale_is_refused_alone_and_left_out_among_others(tmp_path, capsys):
    args = ReproductionArguments(scale="full", output_dir=str(tmp_path))
    lacking = {name: table["no_full"] for name, table in TABLES.items() if "no_full" in table}
    assert lacking
    for name, reason in lacking.items():
        with pytest.raises(ValueError, match=f"{name} has no dataset at scale full: {reason}"):
            select([name], args)
    assert capsys.readouterr().out == ""
    studies, tables = select(["supclap"], args)
    assert (studies, set(lacking) & set(tables)) == ({}, set())
    assert "supclap/table1" in tables
    lines = [f"{name} has no dataset at scale full: {reason}; it is left out" for name, reason in lacking.items()]
    assert capsys.readouterr().out.splitlines() == lines
    studies, tables = select(["evidence", "supclap/table1"], args)
    assert (len(studies) > 1, list(tables)) == (True, ["supclap/table1"])
    assert select(["evidence/kcl"], args)[1] == {}  # no table is named


def test_several_tables_without_the_scale_are_refused(monkeypatch, capsys):
    table = {"mini": {"synthetic": "mini.yaml"}, "groups": []}  # of a user, who has not stated the reason
    monkeypatch.setattr(plan_module, "list_tables", lambda: {"mine/table1": table, "mine/table2": table})
    with pytest.raises(ValueError, match=r"^mine/table2 has no dataset at scale full: not yet$"):
        select(["mine"], ReproductionArguments(scale="full"))
    assert capsys.readouterr().out == "mine/table1 has no dataset at scale full: not yet; it is left out\n"


@pytest.mark.parametrize(("recipe", "more"), [("posttrain", {}), ("evaluate", {"folds": [1, 2, 3, 4, 5]})])
def test_a_part_of_a_dataset_is_not_the_published_one(tmp_path, recipe, more):
    data_dir = str(esc50_folder(tmp_path, count=5, num_folds=5))
    step = Step(recipe, {"dataset": "esc50", "data_dir": data_dir, **more}, tmp_path / "run")
    with pytest.raises(ValueError, match=r"the dataset has 20 clips of 2,000.*--allow_missing"):
        refuse_few_clips(step, load_splits("esc50", data_dir=data_dir))
    # a test split is a part of the dataset
    refuse_few_clips(Step("evaluate", {"dataset": "esc50", "data_dir": data_dir}, tmp_path), {"test": range(600)})


@pytest.mark.parametrize(("lost", "is_accepted"), [(4, True), (5, False)])
def test_a_fifth_of_the_recordings_may_be_missing(tmp_path, monkeypatch, lost, is_accepted):
    made = dataset_folders.audiocaps(tmp_path, train=20, held_out=2)
    for path in made.audio[:lost]:
        path.unlink()
    monkeypatch.setitem(PUBLISHED_CLIPS, "audiocaps", {"train": 20})
    splits = load_splits("audiocaps", **made.config)
    assert len(splits["train"]) == 20 - lost
    step = Step("train", {"dataset": "audiocaps", **made.config}, tmp_path / "run")
    if is_accepted:
        return refuse_few_clips(step, splits)
    with pytest.raises(ValueError, match="train has 15 clips of 20"):
        refuse_few_clips(step, splits)


def test_datasets_that_need_a_folder_are_left_out_without_one(capsys):
    scale = {"recordings": {"base": "mini.yaml", "needs_data": True}, "synthetic": "mini.yaml"}
    table = {
        "mini": scale,
        "groups": [{"table1_infonce": "InfoNCE"}, {"table1_siglip": {"model": "S", "only": "full"}}],
    }

    def find(**options):
        rows = plan("supclap/x", table, ReproductionArguments(seeds=[0, 1], **options))
        return [(row.name, row.model, row.baseline, row.dataset, len(row.runs)) for row in rows]

    of_generated = [("table1_infonce", "InfoNCE", None, "synthetic", 2)]
    assert find() == of_generated
    assert capsys.readouterr().out == "supclap/x: recordings is left out because it needs --data_dir\n"
    of_both = [("table1_infonce", "InfoNCE", None, "recordings", 2), *of_generated]
    assert find(data_dir="d") == find(dry_run=True) == of_both
    assert find(datasets=["synthetic"]) == of_generated
    assert find(rows=["table1_siglip"], data_dir="d") == []
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="all datasets of supclap/x need --data_dir"):
        find(datasets=["recordings"])


def test_both_scales_of_teminal_train_on_the_captions_of_its_evaluation(tmp_path):
    """Before, before and while (T B.4): no row of a table trains on "y after x", at either scale."""
    numbers = {}
    for scale in SCALES:
        args = ReproductionArguments(scale=scale, data_dir=str(tmp_path), output_dir=str(tmp_path), seeds=[0])
        steps = {}
        for name, table in TABLES.items():
            for row in plan(name, table, args) if scale in table else ():
                steps |= {step.folder: step for step in row.runs[0] if step.recipe == "posttrain"}
        for step in steps.values():
            (arguments, *_) = parse_arguments(RECIPES["posttrain"][1], [], settings=step.settings)
            assert (arguments.use_after, arguments.num_phrasings) == (False, 1), step.folder
        numbers[scale] = len(steps)
    assert numbers["full"] >= 9
    assert numbers["mini"] >= 9


PRINTED = sorted({(entry["paper"], entry["table"]) for entry in evaluation.paper_results()})
WITHOUT_ROW = {"MMT", "ML-ACT", "CompA-CLAP", "GPA", "ReCLAP", "Cacophony", "Wav2CLIP", "AudioCLIP", "AudioClip"}
WITHOUT_ROW |= {"Collat", "Pengi", "Qwen-Audio", "Audio Flamingo"}  # docs/guides/papers.md
KEYS = ("dataset", "model", "language", "direction", "metric")


@pytest.mark.parametrize(("paper", "number"), PRINTED)
def test_every_printed_number_is_in_a_table(paper, number):
    """All numbers of a paper's table are beside a column of a row, except those of systems that cannot be run."""
    name = f"{paper.lower()}/table{number}"
    table = TABLES[name]
    if "lacks" in table or name == "teminal/table5":  # its numbers are in the claim
        return
    printed = set()
    for entry in evaluation.paper_results(paper=paper, table=number):
        is_other = (name, entry["model"]) == ("supclap/table1", "T-CLAP")  # of Yuan et al.
        if entry["model"] not in WITHOUT_ROW and not is_other:
            printed.add(tuple(entry[key] for key in KEYS))
    found = set()
    for row in plan(name, table, ReproductionArguments(scale="full", data_dir=".", seeds=[0])):
        for column in list_columns(table, "full"):
            entry = find_printed(name, table, row, column.split(), "full")
            if entry is not None:
                found.add(tuple(entry[key] for key in KEYS))
    assert found == printed
