"""Fields of a builder config as command-line options: types, and only the options that are set."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import datasets
import pytest

from modeling_supclap.datasets_scripts import builder_names, config_keys, find_builder
from modeling_supclap.datasets_scripts.builders.options import _field_texts, add_builder_options, option_texts


@dataclass
class Config(datasets.BuilderConfig):
    """A config.

    Attributes:
        data_dir: Where.
        count: How many,
            100 % of them.
        fraction: A part.
        code: A text.
        languages: Several.
        strict: True or false.
        columns: Names.
        several: Texts by name.
    """

    data_dir: str | None = None
    count: int = 3
    fraction: float | None = None
    code: str | None = None
    languages: Sequence[str] = ("eng",)
    strict: bool = True
    columns: Mapping[str, str] = field(default_factory=dict)
    several: Sequence[str] | Mapping[str, str] | None = None


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_builder_options(parser, Config)
    return parser


def test_values_have_the_type_of_the_field(parser):
    words = ["--count", "4", "--fraction", "0.5", "--code", "0123", "--languages", "fra", "deu"]
    words += ["--strict", "false", "--data_dir", "d"]
    expected = {"count": 4, "fraction": 0.5, "code": "0123", "languages": ["fra", "deu"], "strict": False}
    assert vars(parser.parse_args(words)) == {**expected, "data_dir": "d"}
    words = ["--strict", "--columns", "{split: part}", "--several", "deu=a"]
    assert vars(parser.parse_args(words)) == {"strict": True, "columns": {"split": "part"}, "several": ["deu=a"]}


@pytest.mark.parametrize(("text", "value"), [("True", True), ("TRUE", True), ("False", False), ("fALSE", False)])
def test_truth_values_in_any_letter_case(parser, text, value):
    assert vars(parser.parse_args(["--strict", text])) == {"strict": value}


def test_options_that_are_not_set_are_absent(parser):
    assert vars(parser.parse_args([])) == {}


@pytest.mark.parametrize("words", [["--count", "many"], ["--strict", "perhaps"], ["--data_files", "x"]])
def test_wrong_values_are_rejected(parser, words, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert words[0] in capsys.readouterr().err


def test_help_is_that_of_the_docstring(parser):
    assert "How many, 100 % of them." in " ".join(parser.format_help().split())
    usage = "[--data_dir STR] [--count INT] [--fraction FLOAT] [--code STR] [--languages VALUE [VALUE ...]]"
    usage += " [--strict [true|false]] [--columns YAML] [--several VALUE [VALUE ...]]"
    assert " ".join(parser.format_usage().split()).partition("[-h] ")[2] == usage


def test_a_text_of_a_class_replaces_that_of_its_base():
    texts = option_texts(find_builder("audio_folder").BUILDER_CONFIG_CLASS)
    assert texts["languages"] == "Caption languages as ISO 639-3 codes, the anchor language first."
    assert texts["limit"].startswith("Maximum number of clips per split; the first ones are used.")


@pytest.mark.parametrize("name", builder_names())
def test_every_builder_has_its_options(name):
    parser = argparse.ArgumentParser()
    config_class = find_builder(name).BUILDER_CONFIG_CLASS
    assert set(add_builder_options(parser, config_class)) == config_keys(config_class)
    assert [action.dest for action in parser._actions if not action.help] == []
    parser.format_help()


def test_a_docstring_that_the_compiler_has_dedented_reads_the_same():  # as in Python 3.13 and later
    text = "A thing.\n\nAttributes:\n    size: How large\n        it is.\n    code: A text.\n"
    assert _field_texts(text) == {"size": "How large it is.", "code": "A text."}
