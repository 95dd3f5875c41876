"""The settings of the papers' tables are valid, and those of the papers."""

import pytest

from modeling_supclap import evaluation
from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.options import SCALES, ReproductionArguments
from modeling_supclap.recipes.run_checks import check_step
from modeling_supclap.recipes.runs import RECIPES
from modeling_supclap.recipes.studies.plan import plan
from modeling_supclap.recipes.studies.select import list_tables
from modeling_supclap.recipes.studies.table import find_printed, list_columns

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
        check = check_step(step, args, tmp_path / "scratch")
        assert check.cost is None or check.cost.steps > 0, step


def settings_of(table, name, dataset, scale, tmp_path):
    args = ReproductionArguments(scale=scale, data_dir=str(tmp_path), output_dir=str(tmp_path), seeds=[0])
    rows = {(row.name, row.dataset): row for row in plan(table, TABLES[table], args)}
    return rows[name, dataset].runs[0]


def test_settings_are_those_of_the_papers(tmp_path):
    (step,) = settings_of("supclap/table1", "table1_infonce", "clotho", "full", tmp_path)
    check = check_step(step, ReproductionArguments(scale="full"), tmp_path)
    assert check.cost.steps == 7990  # five captions of 3,839 clips, ten epochs [S 4.1.1, table 14]
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
