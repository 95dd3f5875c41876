"""Parse the configuration of a recipe: a flat YAML file, and `--key value` arguments that override the file."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import json
import math
import os
import shutil
import sys
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from modeling_supclap import require_torchaudio
from modeling_supclap.datasets_scripts import config_keys, find_config
from modeling_supclap.datasets_scripts.builders.options import add_builder_options, option_texts
from modeling_supclap.languages import LANGUAGES
from modeling_supclap.training.options import AllStagesOptions, ContrastiveOptions, get_default

from .options import DatasetArguments, as_mapping

if TYPE_CHECKING:
    from transformers import HfArgumentParser

CONFIGS = Path(__file__).parent / "configs"
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is eight times as fast as Python


_OTHER_NAMES = {
    "learning_rate": "lr lrate peak_lr",
    "num_train_epochs": "epochs num_epochs n_epochs max_epochs",
    "max_steps": "steps num_steps train_steps",
    "per_device_train_batch_size": "batch_size bs train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "weight_decay": "wd decay",
    "warmup_steps": "warmup num_warmup_steps",
    "lr_scheduler_type": "scheduler lr_scheduler schedule",
    "optim": "optimizer optimiser",
    "dataloader_num_workers": "workers num_workers",
    "model": "model_name_or_path pretrained checkpoint",
    "early_stopping_patience": "early_stopping patience",
    "gradient_accumulation_steps": "accumulation_steps grad_accum",
    "audio_layers 0": "freeze_audio freeze_audio_encoder lock_audio",
    "text_layers 0": "freeze_text freeze_text_encoder lock_text",
    "output_dir with a new folder": "overwrite_output_dir overwrite",
    "resume_from_checkpoint last": "resume resume_from",
    "zero_shot_templates": "templates template_sets",
}
"""Options, with a value that they may need, and their names in other projects or in earlier versions."""

BUILDER_TEXTS = {
    "audio_column": "Column of the recordings in a table or a dataset of the Hub. Default: a usual name.",
    "caption_column": "Column of the captions in a table or a dataset of the Hub. Default: a usual name.",
}
"""Texts of builder options in the help of a command. The builders are not imported for it."""


def asks_for_help() -> bool:
    return not {"-h", "--help"}.isdisjoint(sys.argv[1:])


def print_help(text: str) -> None:
    """Print a help text. Ignore a closed pipe, for example in `supclap train --help | head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # prevents a second error when the interpreter flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_help(groups: Sequence[Any], about: str, common: Mapping[str, Sequence[str]] | None = None) -> str:
    """Format the help text of a command without imports of torch: `about`, and its options.

    Args:
        common: Names of the options to print, by title, in the order in which they are needed. Names that are not in
            `groups` are those of `BUILDER_TEXTS`. None: print all options.
    """
    first = getattr(groups[0], "positional", "[CONFIG.yaml]")
    lines = [f"usage: {Path(sys.argv[0]).name} {first} [--KEY VALUE ...]", "", about.strip(), ""]
    sections = list_options(groups)
    if common is not None:
        every = {name: _describe(name, text, None) for name, text in BUILDER_TEXTS.items()}
        for section in sections.values():
            every |= section
        sections = {title: {name: every[name] for name in names} for title, names in common.items()}
    lines.append(_format_sections(sections))
    if common is not None:
        lines.append("--help_all lists all options in groups.")
    if any(issubclass(group, DatasetArguments) for group in groups):
        lines.append("Options of the dataset's builder are accepted, too; `supclap prepare NAME --help` lists them.")
    return "\n".join(lines)


def list_options(groups: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Return the help of all options, `{title: {name: text}}`. A title is the first line of a class's docstring.

    Options of transformers' `TrainingArguments` are left out, except those that this package describes.
    """
    sections: dict[str, dict[str, str]] = {}
    listed = set()
    for group in groups:
        texts = option_texts(group)  # from docstrings
        fields = {option.name: option for option in dataclasses.fields(group) if option.init}
        for base in reversed(group.__mro__):
            declared = {} if base.__module__.startswith("transformers.") else vars(base).get("__annotations__", {})
            title = (base.__doc__ or "").strip().partition("\n")[0].rstrip(".")
            for name in declared:
                if name in fields and name in texts and name not in listed:
                    listed.add(name)
                    sections.setdefault(title, {})[name] = _describe(name, texts[name], get_default(fields[name]))
    return sections


def format_all_options(parser: HfArgumentParser, groups: Sequence[Any]) -> str:
    """Format all options in groups; last, those of transformers' `TrainingArguments` without internal ones."""
    from modeling_supclap.training.training_args import INTERNAL

    sections = list_options(groups)
    known = set(INTERNAL).union(*sections.values())
    others = {}
    for action in parser._actions:
        name = action.dest
        if name not in known and f"--{name}" in action.option_strings:
            others[name] = _describe(name, " ".join((action.help or "").split()), action.default)
    return _format_sections({**sections, "Trainer of transformers": others} if others else sections)


def _format_sections(sections: Mapping[str, Mapping[str, str]]) -> str:
    return "\n".join("\n".join([title, *section.values(), ""]) for title, section in sections.items())


def _describe(name: str, text: str, value: Any) -> str:
    """Format the help of one option: its name, its description, and its default value unless it is empty."""
    if value is dataclasses.MISSING:
        text += " Required."
    elif value not in (None, [], ""):
        value = getattr(value, "value", value)  # of an enum
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value).lower()
        text += f" Default: {shown}."
    start, width = f"  --{name}", min(shutil.get_terminal_size().columns, 120)
    start = f"{start:30}" if len(start) <= 28 else f"{start}\n{'':30}"
    return start + textwrap.fill(text.strip(), width - 30, break_on_hyphens=False).replace("\n", f"\n{'':30}")


def parse_arguments(
    groups: Sequence[Any],
    argv: Sequence[str] | None = None,
    default_config: str | Path | None = None,
    about: str | None = None,
    settings: Mapping[str, Any] | None = None,
    common: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Any, ...]:
    """Parse `[config.yaml] [--key value ...]` into dataclasses. The command line overrides the YAML file.

    If `--dataset` differs from the dataset in the YAML file, `dataset_config` of the file is ignored.
    A `DatasetArguments` group also accepts the options of the dataset builder, for example
    `--dataset esc50 --test_fold 4`. If the recipe and the builder have an option with the same name, such as
    `languages`, the key sets the option of the recipe, and `dataset_config` that of the builder. The languages of the
    recipe are added to those of an audio_folder and a webdataset, unless `dataset_config` sets them.

    Args:
        groups: Dataclasses to fill. `ContrastiveOptions` is replaced by `SupCLAPTrainingArguments`, and
            `AllStagesOptions` by `AllStagesArguments`. These classes contain transformers' `TrainingArguments`.
        default_config: YAML file to read if the first argument is not a YAML file. It is ignored if `--datasets` is
            set, or if `--dataset` differs from the dataset in the file.
        about: Docstring of the recipe. If set, `--help` prints it with the options of the recipe, and exits before
            torch and transformers are imported.
        settings: Settings to use instead of a YAML file.
        common: Options that `--help` prints, by title; `--help_all` prints all.

    Raises:
        FileNotFoundError: The YAML file does not exist.
        ValueError: A key is unknown (the message lists similar keys), or a value has the wrong type.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if about is not None and asks_for_help():
        print_help(format_help(groups, about, common))
        sys.exit(0)

    require_torchaudio()
    if not {ContrastiveOptions, AllStagesOptions}.isdisjoint(groups):
        from modeling_supclap.training.training_args import AllStagesArguments, SupCLAPTrainingArguments

        whole: dict[Any, Any] = {ContrastiveOptions: SupCLAPTrainingArguments, AllStagesOptions: AllStagesArguments}
        groups = [whole.get(group, group) for group in groups]
    parser = _make_parser(groups)
    if "--help_all" in words:
        print_help(format_all_options(parser, groups))
        sys.exit(0)

    hints: dict[str, Any] = {}
    for group in groups:
        types = typing.get_type_hints(group)
        hints |= {option.name: types[option.name] for option in dataclasses.fields(group) if option.init}
    if settings is not None:
        parser.set_defaults(**_convert(settings, "settings", parser, hints))
    else:
        parser.set_defaults(**_read_defaults(words, default_config, parser, hints))

    parsed: Any = parser.parse_args_into_dataclasses(words, return_remaining_strings=True, look_for_args_file=False)
    *filled, unknown = parsed
    dataset = next((group for group in filled if isinstance(group, DatasetArguments)), None)
    if unknown and dataset is not None and dataset.dataset is not None and not getattr(dataset, "datasets", []):
        builder_parser = _make_parser([])
        names = add_builder_options(builder_parser, find_config(dataset.dataset))
        builder_parser.add_argument("--translations", nargs="+", default=argparse.SUPPRESS)
        chosen, unknown = builder_parser.parse_known_args(unknown)
        hints |= dict.fromkeys(names)
        dataset.dataset_config = {**as_mapping(dataset.dataset_config), **vars(chosen)}
    _reject_unknown(unknown, hints)
    if dataset is not None:
        languages: list[str] = []
        for name in ("languages", "eval_languages"):
            for group in filled:
                languages += getattr(group, name, [])
        _add_languages(dataset, languages)
    return tuple(filled)


def _add_languages(data: Any, languages: Sequence[str]) -> None:
    """Add the languages of a recipe to those of its datasets that read captions only in the languages of an option."""
    if entries := getattr(data, "datasets", []):
        options = map(as_mapping, entries)
        data.datasets = [_with_languages(each.get("dataset"), each, languages) for each in options]
    else:
        data.dataset_config = _with_languages(data.dataset, as_mapping(data.dataset_config), languages)


def _with_languages(dataset: str | None, options: Mapping[str, Any], languages: Sequence[str]) -> dict[str, Any]:
    known = {"audio_folder": LANGUAGES, "webdataset": (options.get("language", LANGUAGES[0]),)}.get(dataset or "")
    if known is None or "languages" in options or set(languages) <= set(known):
        return dict(options)
    return {**options, "languages": list(dict.fromkeys([*known, *languages]))}


def _read_defaults(
    words: list[str], default_config: str | Path | None, parser: HfArgumentParser, hints: dict[str, Any]
) -> dict[str, Any]:
    """Read the YAML file that `words` start with, and remove it from them; or read the default file, if it applies."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--dataset")
    finder.add_argument("--datasets", nargs="+")
    named = finder.parse_known_args(words)[0]
    has_file = bool(words) and words[0].endswith((".yaml", ".yml"))
    path = words.pop(0) if has_file else default_config
    if path is None:
        return {}
    values = _convert(read_settings(path), path, parser, hints)
    is_other = named.dataset not in (None, values.get("dataset", named.dataset))
    if not has_file:
        return {} if is_other or named.datasets is not None else values
    if is_other:
        values.pop("dataset_config", None)
    return values


def parse_names(group: Any, about: str | None) -> tuple[list[str], Any]:
    """Parse `NAME [NAME ...] [--key value ...]`, and return the names and the filled dataclass."""
    words = sys.argv[1:]
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    (args,) = parse_arguments((group,), words[len(names) :], about=about)
    return names, args


def _make_parser(groups: Sequence[Any]) -> HfArgumentParser:
    """Build a parser for dataclasses. Invalid arguments raise ValueError, without a long usage text."""
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    return Parser(list(groups), allow_abbrev=False, add_help=False)


def read_settings(path: str | Path, scale: str | Path | None = None) -> dict[str, Any]:
    """Read the YAML configuration file `path`, and merge it with other files.

    A file may set the key `base` to the name of a base file. The file `scale` overrides the base file, and `path`
    overrides both. Each file is a path, or the name of a configuration in the package.

    Raises FileNotFoundError if a file is missing, and ValueError if a file is not UTF-8 YAML with `key: value` lines.
    """
    path = Path(path)
    if not path.is_file():  # name of a configuration in the package, or its path in a checkout
        shipped = CONFIGS / path.as_posix().removeprefix("recipes/configs/")
        if not shipped.is_file():
            names = sorted(shipped.relative_to(CONFIGS).as_posix() for shipped in CONFIGS.rglob("*.yaml"))
            close = difflib.get_close_matches(path.as_posix(), names, n=3, cutoff=0.75)
            # the others are rows of the papers' tables
            top_level = [name for name in names if "/" not in name]
            hint = f"did you mean {' or '.join(close)}?" if close else f"the package has {', '.join(top_level)}"
            raise FileNotFoundError(f"configuration file {path} does not exist; {hint}")
        path = shipped

    try:
        values = yaml.load(path.read_text(encoding="utf-8"), YAML_LOADER) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML in UTF-8: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} contains a {type(values).__name__}; expected `key: value` lines")

    merged: dict[str, Any] = {}
    base = values.pop("base", None)
    if base is not None:
        beside = path.parent / str(base)
        merged = read_settings(beside if beside.is_file() else str(base))
    if scale is not None:
        merged |= read_settings(scale)
    return merged | values


def _convert(
    settings: Mapping[str, Any], origin: str | Path, parser: HfArgumentParser, hints: dict[str, Any]
) -> dict[str, Any]:
    """Convert each setting to the type of its option. Errors name `origin`, usually a file.

    Options of the dataset's builder become entries of `dataset_config`.
    """
    values: dict[str, Any] = {}
    of_builder = {}
    dataset = None if settings.get("datasets") else settings.get("dataset", parser.get_default("dataset"))
    for key, value in settings.items():
        if key not in hints:
            if dataset is None or key not in {"translations", *config_keys(find_config(dataset))}:
                _reject_unknown([key], hints)
            of_builder[key] = value
            continue
        try:
            values[key] = _typed(value, parser._option_string_actions[f"--{key}"], str(hints[key]))
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            kind = hints[key].__name__ if isinstance(hints[key], type) else hints[key]
            raise ValueError(f"{origin}: {key} is {value!r}; expected the type {kind}") from error
    if of_builder:
        values["dataset_config"] = {**as_mapping(values.get("dataset_config")), **of_builder}
    return values


def _typed(value: Any, action: argparse.Action, kind: str) -> Any:
    """Convert a YAML value to the type of its option. For example, `languages: eng` becomes the list `["eng"]`."""
    if value is None or isinstance(value, dict) or (isinstance(value, list) and action.nargs != "+"):
        if ("None" if value is None else type(value).__name__) not in kind:
            raise TypeError
        return value

    typed = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and action.dest == "datasets":
            item = json.dumps(item)  # as on the command line
        if item is None or isinstance(item, (dict, list)) or not callable(action.type):
            raise TypeError
        typed.append(action.type(str(item)))
        if isinstance(typed[-1], float) and not math.isfinite(typed[-1]):
            raise ValueError
    return typed if action.nargs == "+" else typed[0]


def _reject_unknown(words: Sequence[str], valid: Collection[str]) -> None:
    """Raise ValueError for the first unknown key in `words`, the unparsed arguments (keys and values)."""
    if not words:
        return

    keys = [word for word in words if word.startswith("-")] or words
    key = keys[0].lstrip("-").split("=")[0]

    close = difflib.get_close_matches(key, list(valid), n=3)
    for option, names in _OTHER_NAMES.items():
        if key.lower().replace("-", "_") in names.split() and option.split()[0] in valid:
            close = [option]
    if (CONFIGS / f"{key}.yaml").is_file():
        close = [f"{key}.yaml"]
    hint = f"did you mean {' or '.join(close)}?" if close else "--help and --help_all list them, a key starts with --"
    raise ValueError(f"unknown key {key!r}: {hint}")
