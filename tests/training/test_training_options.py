"""The options in `--help` are those of the training arguments, with the same defaults."""

import dataclasses

import pytest
from transformers import TrainingArguments

from modeling_supclap.training.options import ContrastiveOptions, TemporalOptions
from modeling_supclap.training.training_args import SupCLAPTrainingArguments, TemporalTrainingArguments


@pytest.mark.parametrize(
    ("options", "arguments"),
    [(ContrastiveOptions, SupCLAPTrainingArguments), (TemporalOptions, TemporalTrainingArguments)],
)
def test_our_defaults_win_over_the_trainers(options, arguments):
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = options()
    filled = {field.name: field for field in dataclasses.fields(arguments)}
    assert len(inherited & set(vars(ours))) > 10
    for field in dataclasses.fields(options):
        assert filled[field.name].default == field.default, field.name
        if field.default is dataclasses.MISSING:
            assert filled[field.name].default_factory() == getattr(ours, field.name)
