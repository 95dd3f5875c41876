"""How a recipe is configured: a flat YAML file, `--key value` pairs that override it, and the options of a dataset.

A file may name another as its `base` and hold the differences only.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import math
import shutil
import sys
import textwrap
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from modeling_supclap.datasets_scripts import find_builder, load_splits
from modeling_supclap.datasets_scripts.builders.hf import get_origin
from modeling_supclap.datasets_scripts.builders.options import add_builder_options
from modeling_supclap.datasets_scripts.prepared import dataset_origin

CONFIGS = Path(__file__).parent / "configs"


@dataclass
class DatasetArguments:
    """Which dataset to work on. Every recipe that reads one takes these keys, and the options of its builder too."""

    dataset: str = field(default="synthetic", metadata={"help": "A builder of datasets_scripts, or prepared."})
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the data, where the builder takes one."}
    )
    dataset_config: dict | str | None = field(
        default=None,
        metadata={"help": "Options of the builder in a file; on the command line they go by their own names."},
    )

    @property
    def builder_options(self) -> dict[str, Any]:
        """All options of the builder, `data_dir` among them."""
        options = dict(as_mapping(self.dataset_config))
        if self.data_dir is not None:
            options["data_dir"] = self.data_dir
        return options

    @property
    def origin(self) -> str:
        """The dataset that the rows come from; of a prepared set, the one that it was prepared from."""
        options = self.builder_options
        if self.dataset == "hf" and "data_dir" in options:
            return get_origin(options["data_dir"])
        return dataset_origin(self.dataset, options.get("data_dir"), options.get("revision"))

    def load_splits(self) -> dict[str, Any]:
        """All splits of the dataset, as `datasets_scripts.load_splits` gives them."""
        return load_splits(self.dataset, **self.builder_options)


def parse_arguments(
    groups: Sequence[Any], argv: Sequence[str] | None = None, default_config: str | Path | None = None
) -> tuple[Any, ...]:
    """Reads `[config.yaml] [--key value ...]` into dataclasses; the command line wins over the file.

    Where one of the dataclasses is a `DatasetArguments`, the fields of the dataset's builder are keys too, such as
    `--test_fold 4` with `--dataset esc50`. A name that the recipe itself has, such as `languages`, is the recipe's; the
    builder's field of that name can be given in `dataset_config`.

    Args:
        groups: The dataclasses to fill; all of their keys share the one flat file.
        argv: The arguments, by default those of the process.
        default_config: The file to read when the first argument is not one, unless `--dataset` names another dataset
            than this file, whose keys would not fit it.

    Returns:
        One instance for each of `groups`.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: A key that no group has, where the message names those that come close, or a value of another type.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(format_help(groups))
        sys.exit(0)
    parser = _Parser(list(groups), allow_abbrev=False, add_help=False)
    if "--help_all" in words:
        parser.print_help()
        sys.exit(0)
    hints: dict[str, Any] = {}
    for group in groups:
        types = typing.get_type_hints(group)
        hints |= {option.name: types[option.name] for option in dataclasses.fields(group) if option.init}

    if words and words[0].endswith((".yaml", ".yml")):
        parser.set_defaults(**_read_config(Path(words.pop(0)), parser, hints))
    elif default_config is not None:
        values = _read_config(Path(default_config), parser, hints)
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--dataset")
        if finder.parse_known_args(words)[0].dataset in (None, values.get("dataset")):
            parser.set_defaults(**values)

    parsed: Any = parser.parse_args_into_dataclasses(words, return_remaining_strings=True, look_for_args_file=False)
    *filled, unknown = parsed
    for group in filled:
        if unknown and isinstance(group, DatasetArguments) and group.dataset is not None:
            _take_builder_options(group, unknown, hints)
            unknown = []
    _reject_unknown(unknown, hints)
    return tuple(filled)


def format_help(groups: Sequence[Any]) -> str:
    """What a recipe does and its own keys, with their own defaults; to the keys of transformers it only points."""
    lines = [f"usage: {Path(sys.argv[0]).name} [CONFIG.yaml] [--KEY VALUE ...]", ""]
    lines.append((sys.modules[groups[0].__module__].__doc__ or "").strip())

    for group in groups:
        options = {option.name: option for option in dataclasses.fields(group) if option.init}
        own: dict[str, None] = {}  # in the order in which they are declared
        for base in reversed(group.__mro__):
            if base not in TrainingArguments.__mro__:
                own |= dict.fromkeys(inspect.get_annotations(base))

        lines += ["", (group.__doc__ or "").strip().splitlines()[0]]
        for name in own:
            if name in options:
                lines.append(_describe(options[name]))

    lines.append("")
    if any(issubclass(group, TrainingArguments) for group in groups):
        lines.append(
            "All keys of transformers' TrainingArguments work too, such as --output_dir and --learning_rate:"
            " --help_all lists them."
        )
    if any(issubclass(group, DatasetArguments) for group in groups):
        lines.append("So do the options of the dataset's builder: see `supclap prepare NAME --help`.")
    return "\n".join(lines)


def as_mapping(value: dict | str | None) -> dict[str, Any]:
    """A mapping from the YAML file, or the same as JSON from the command line."""
    parsed = json.loads(value) if isinstance(value, str) else value or {}
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a mapping such as '{{\"depth\": 4}}', got {value!r}")
    return parsed


class _Parser(HfArgumentParser):
    """A parser whose errors are exceptions: no usage of two hundred keys hides what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _describe(option: dataclasses.Field) -> str:
    """The key, what it is for, and its default where it has one that says something."""
    value = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
    text = option.metadata.get("help", "")
    if value is dataclasses.MISSING:
        text += " Required."
    elif value not in (None, [], ""):
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value).lower()
        text += f" Default: {shown}."
    width = min(shutil.get_terminal_size().columns, 120)
    lines = textwrap.wrap(text.strip(), width - 30) or [""]
    name = f"  --{option.name}"
    if len(name) > 28:
        lines.insert(0, "")
    return "\n".join(f"{name if number == 0 else '':30}{line}".rstrip() for number, line in enumerate(lines))


def _take_builder_options(group: DatasetArguments, words: list[str], keys: Collection[str]) -> None:
    """Puts the options of the dataset's builder into the group; refuses words that are none."""
    parser = _Parser([], allow_abbrev=False, add_help=False)
    names = add_builder_options(parser, find_builder(group.dataset).BUILDER_CONFIG_CLASS)
    parser.add_argument("--translations", nargs="+", default=argparse.SUPPRESS)

    given, unknown = parser.parse_known_args(words)
    _reject_unknown(unknown, [*keys, *names])
    group.dataset_config = {**as_mapping(group.dataset_config), **vars(given)}


def read_settings(path: str | Path, base: str | Path | None = None) -> dict[str, Any]:
    """The values of a YAML file, over those of the file that its key `base` names, by its place beside it.

    Args:
        path: The file.
        base: Another file to take in place of its own base.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not YAML, or holds something other than `key: value` lines.
    """
    path = Path(path)
    if not path.is_file():  # one that comes with the package goes by its name, or by its place in a checkout
        shipped = CONFIGS / path.as_posix().removeprefix("recipes/configs/")
        if not shipped.is_file():
            names = sorted(map(str, CONFIGS.rglob("*.yaml")))
            raise FileNotFoundError(f"there is no configuration file {path}; those of the package: {', '.join(names)}")
        path = shipped

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; it should hold `key: value` lines")

    own_base = values.pop("base", None)
    base = base or (path.parent / own_base if own_base else None)
    return values if base is None else {**read_settings(base), **values}


def _read_config(path: Path, parser: HfArgumentParser, hints: dict[str, Any]) -> dict[str, Any]:
    """The values of a YAML file and of its base, each of the type that its key has on the command line."""
    values = read_settings(path)
    for key, value in values.items():
        if key not in hints:
            _reject_unknown([key], hints)
        try:
            values[key] = _typed(value, parser._option_string_actions[f"--{key}"], str(hints[key]))
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            kind = hints[key].__name__ if isinstance(hints[key], type) else hints[key]
            raise ValueError(f"{path}: {key} is {value!r}; it should be of type {kind}") from error
    return values


def _typed(value: Any, action: argparse.Action, kind: str) -> Any:
    """A value of the file as the command line would read it: `languages: eng` is the list of one language."""
    if value is None or isinstance(value, dict):
        if ("None" if value is None else "dict") not in kind:
            raise TypeError
        return value
    if isinstance(value, list) and action.nargs != "+":
        if "list" not in kind:
            raise TypeError
        return value

    typed = []
    for item in value if isinstance(value, list) else [value]:
        if item is None or isinstance(item, (dict, list)) or not callable(action.type):
            raise TypeError
        typed.append(action.type(str(item)))
        if isinstance(typed[-1], float) and not math.isfinite(typed[-1]):
            raise ValueError
    return typed if action.nargs == "+" else typed[0]


def _reject_unknown(words: Sequence[str], valid: Collection[str]) -> None:
    """Refuses the first key among words that no option took, which may hold values too."""
    if not words:
        return
    named = [word for word in words if word.startswith("-")] or words
    key = named[0].lstrip("-").split("=")[0]

    close = difflib.get_close_matches(key, list(valid), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"valid keys are {', '.join(sorted(valid))}"
    raise ValueError(f"unknown key {key!r}: {hint}")
