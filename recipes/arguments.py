"""How a recipe is configured: a flat YAML file, `--key value` pairs that override it, and the options of a dataset.

A file may name another as its `base` and hold the differences only.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import math
import os
import shutil
import sys
import textwrap
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from modeling_supclap import require_torchaudio
from modeling_supclap.datasets_scripts import find_config
from modeling_supclap.datasets_scripts.builders.options import add_builder_options, option_texts
from modeling_supclap.training.options import AllStagesOptions, ContrastiveOptions, get_default

from .options import DatasetArguments, ReproductionArguments, as_mapping

if TYPE_CHECKING:
    from transformers import HfArgumentParser

CONFIGS = Path(__file__).parent / "configs"


def asks_for_help() -> bool:
    """Return whether the command line holds `--help`."""
    return not {"-h", "--help"}.isdisjoint(sys.argv[1:])


def print_help(text: str) -> None:
    """Print a help text; the reader may stop early, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # so that the interpreter does not try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_help(groups: Sequence[Any], about: str) -> str:
    """What a recipe does, by its docstring, and its own keys with defaults; to those of transformers it only points."""
    first = "TABLE [TABLE ...]" if ReproductionArguments in groups else "[CONFIG.yaml]"
    lines = [f"usage: {Path(sys.argv[0]).name} {first} [--KEY VALUE ...]", ""]
    lines.append(about.strip())

    for group in groups:
        options = {option.name: option for option in dataclasses.fields(group) if option.init}
        own: dict[str, None] = {}  # in the order in which they are declared
        for base in reversed(group.__mro__):
            if not base.__module__.startswith("transformers."):
                own |= dict.fromkeys(inspect.get_annotations(base))

        lines += ["", (group.__doc__ or "").strip().splitlines()[0]]
        texts = option_texts(group)
        for name in own:
            if name in options:
                lines.append(_describe(options[name], texts.get(name, "")))

    lines.append("")
    if any(issubclass(group, ContrastiveOptions) for group in groups):
        lines.append(
            "All keys of transformers' TrainingArguments work too, such as --output_dir and --learning_rate:"
            " --help_all lists them."
        )
    if any(issubclass(group, DatasetArguments) for group in groups):
        lines.append("The options of the dataset's builder are keys too: see `supclap prepare NAME --help`.")
    return "\n".join(lines)


def _describe(option: dataclasses.Field, text: str) -> str:
    """Format an option, its description, and its default unless that is empty."""
    value = get_default(option)
    if value is dataclasses.MISSING:
        text += " Required."
    elif value not in (None, [], ""):
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value).lower()
        text += f" Default: {shown}."
    name, width = f"  --{option.name}", min(shutil.get_terminal_size().columns, 120)
    start = f"{name:30}" if len(name) <= 28 else f"{name}\n{'':30}"
    return start + textwrap.fill(text.strip(), width - 30, break_on_hyphens=False).replace("\n", f"\n{'':30}")


def parse_arguments(
    groups: Sequence[Any],
    argv: Sequence[str] | None = None,
    default_config: str | Path | None = None,
    about: str | None = None,
) -> tuple[Any, ...]:
    """Read `[config.yaml] [--key value ...]` into dataclasses; the command line wins over the file.

    If one of the dataclasses is a `DatasetArguments`, the fields of the dataset's builder are keys too, such as
    `--test_fold 4` with `--dataset esc50`. A name that the recipe itself has, such as `languages`, is the recipe's; the
    builder's field of that name can be given in `dataset_config`.

    Args:
        groups: The dataclasses to fill; all of their keys share the one flat file. The options of a training,
            `ContrastiveOptions` and `AllStagesOptions`, are read with transformers' `TrainingArguments`, into
            `SupCLAPTrainingArguments` and `AllStagesArguments`.
        argv: The arguments, by default those of the process.
        default_config: The file to read when the first argument is not one, unless `--dataset` names another dataset
            than this file.
        about: Docstring of the recipe. With it `--help` prints the recipe's own keys and ends the process, before
            torch and transformers are imported.

    Returns:
        One instance for each of `groups`.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: A key is in no group (the message names similar ones), or a value has another type.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if about is not None and asks_for_help():
        print_help(format_help(groups, about))
        sys.exit(0)

    require_torchaudio()
    groups = list(map(_with_trainer_arguments, groups))
    parser = _make_parser(groups)
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


def _with_trainer_arguments(group: Any) -> Any:
    """Return the arguments of the Trainer that extend our options of a training; other groups as they are."""
    if group not in (ContrastiveOptions, AllStagesOptions):
        return group

    from modeling_supclap.training import training_args

    return training_args.SupCLAPTrainingArguments if group is ContrastiveOptions else training_args.AllStagesArguments


def _make_parser(groups: Sequence[Any]) -> HfArgumentParser:
    """Make a parser of dataclasses whose errors are exceptions, because the usage has two hundred keys."""
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = Parser(list(groups), allow_abbrev=False, add_help=False)
    texts = {name: text for group in groups for name, text in option_texts(group).items()}
    for action in parser._actions:
        action.help = texts.get(action.dest, action.help or "").replace("%", "%%")
    return parser


def _take_builder_options(group: DatasetArguments, words: list[str], keys: Collection[str]) -> None:
    """Puts the options of the dataset's builder into the group; refuses words that are none."""
    parser = _make_parser([])
    names = add_builder_options(parser, find_config(group.dataset))
    parser.add_argument("--translations", nargs="+", default=argparse.SUPPRESS)

    given, unknown = parser.parse_known_args(words)
    _reject_unknown(unknown, [*keys, *names])
    group.dataset_config = {**as_mapping(group.dataset_config), **vars(given)}


def read_settings(path: str | Path, scale: str | Path | None = None) -> dict[str, Any]:
    """Read a YAML file over the file that its key `base` names, which lies beside it or in the package.

    Args:
        path: The file.
        scale: A file whose values stand over those of the base, and below those of the file itself.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not YAML, or holds something other than `key: value` lines.
    """
    path = Path(path)
    if not path.is_file():  # one that comes with the package goes by its name, or by its place in a checkout
        shipped = CONFIGS / path.as_posix().removeprefix("recipes/configs/")
        if not shipped.is_file():
            names = sorted(shipped.relative_to(CONFIGS).as_posix() for shipped in CONFIGS.rglob("*.yaml"))
            close = difflib.get_close_matches(path.as_posix(), names, n=3, cutoff=0.75)
            own = [name for name in names if "/" not in name]  # the others are rows of the papers' tables
            hint = f"did you mean {' or '.join(close)}?" if close else f"the package has {', '.join(own)}"
            raise FileNotFoundError(f"there is no configuration file {path}; {hint}")
        path = shipped

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; it should hold `key: value` lines")

    base = values.pop("base", None)
    merged: dict[str, Any] = {}
    if base is not None:
        beside = path.parent / str(base)
        merged |= read_settings(beside if beside.is_file() else str(base))
    if scale is not None:
        merged |= read_settings(scale)
    return merged | values


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
    if (CONFIGS / f"{key}.yaml").is_file():
        close = [f"{key}.yaml"]
    hint = (
        f"did you mean {' or '.join(close)}?" if close else "--help and --help_all list the keys, which begin with --"
    )
    raise ValueError(f"unknown key {key!r}: {hint}")
