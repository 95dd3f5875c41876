"""The paper index is correct: all names exist, and it contains all losses and paper configurations."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from modeling_supclap import losses
from modeling_supclap.evaluation.results import paper_results
from modeling_supclap.recipes import options
from modeling_supclap.recipes.options import TrainedPartArguments
from modeling_supclap.training.training_args import TemporalTrainingArguments

ROOT = Path(__file__).parents[2]
INDEX = (ROOT / "docs" / "paper_index.md").read_text(encoding="utf-8")
ARGUMENTS = ("text_embeds", "audio_embeds", "anchors", "targets", "temperature", "logit_scale", "radius")  # of losses
NAMES = sorted(set(re.findall(r"`([^`]+)`", INDEX)).difference(ARGUMENTS))
GROUPS = (
    options.DataArguments,
    options.ModelArguments,
    options.PostTrainingArguments,
    options.EvaluationArguments,
    TrainedPartArguments,
    TemporalTrainingArguments,
)
KEYS = {f"--{key.name}" for group in GROUPS for key in dataclasses.fields(group)}


@pytest.mark.parametrize("name", NAMES)
def test_all_names_exist(name):
    if name.startswith("--"):
        assert name in KEYS
    elif "/" in name:
        assert (ROOT / name).exists()
    else:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", [name for name in losses.__all__ if name.endswith(("loss", "nce", "weights"))])
def test_every_loss_is_in_it(name):
    assert f"`modeling_supclap.losses.{name}`" in INDEX


def test_every_named_system_of_the_tables_is_in_the_guide():
    """Rows of the tables that no configuration of this project trains."""
    ours = re.compile(r"InfoNCE|SigLIP|ATRI-|KCL|CACL|ML-CLAP|TeminAL|T-CLAP, |Deepseek")
    systems = {entry["model"].lower() for entry in paper_results() if not ours.match(entry["model"])}
    assert len(systems) == 17  # fifteen, two of them with two names
    guide = (ROOT / "docs" / "guides" / "papers.md").read_text(encoding="utf-8").lower()
    assert not {name for name in systems if name.removesuffix("-audio-630k") not in guide}


def test_every_configuration_of_a_paper_is_in_it():
    configs = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "recipes" / "configs").rglob("*.yaml")
        if re.match(r"# (SupCLAP|ATRI|TeminAL as published)", path.read_text(encoding="utf-8"))
    ]
    assert configs
    assert not [config for config in configs if f"`{config}`" not in INDEX]
