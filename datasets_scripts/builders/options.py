"""Create command-line options from the fields and the docstring of a dataclass."""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

import yaml

from modeling_supclap.datasets_scripts import config_keys


def add_builder_options(
    parser: argparse.ArgumentParser, config_class: type, group: str = "options of the builder"
) -> list[str]:
    """Add an option `--field value` for each field of a dataclass to an argument parser; return the field names.

    Fields inherited from `datasets.BuilderConfig` are skipped. The help texts come from the docstrings of the class and
    its base classes. Options that the user does not set are not in the parsed namespace.
    """
    hints = typing.get_type_hints(config_class)
    texts = option_texts(config_class)
    names = [field.name for field in dataclasses.fields(config_class) if field.name in config_keys(config_class)]

    options = parser.add_argument_group(group)
    for name in names:
        text = texts[name].replace("%", "%%")
        options.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text, **_argument_type(hints[name]))
    return names


def _argument_type(hint: Any) -> dict[str, Any]:
    """Return the `add_argument` keyword arguments for a type hint."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)

    if bool in members:
        return {"type": parse_boolean, "metavar": "true|false", "nargs": "?", "const": True}
    if any(typing.get_origin(member) is Sequence for member in members):
        return {"nargs": "+", "metavar": "VALUE"}
    for kind in (str, float, int):  # str first, so that "0123" stays a string
        if kind in members:
            return {"type": kind, "metavar": kind.__name__.upper()}
    return {"type": yaml.safe_load, "metavar": "YAML"}


def parse_boolean(text: str) -> bool:
    """Parse "true" or "false", as the type of an argument."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def option_texts(options: type) -> dict[str, str]:
    """Return `{field: description}` from the docstrings of a dataclass and its base classes."""
    texts: dict[str, str] = {}
    for base in reversed(options.__mro__):
        if not base.__module__.startswith("transformers."):
            texts |= _field_texts(base.__doc__ or "")
    return texts


def _field_texts(docstring: str) -> dict[str, str]:
    """Parse the "Args" or "Attributes" section of a docstring into `{name: description}`.

    >>> _field_texts("A thing.\\n\\n    Attributes:\\n        size: Length\\n            in samples.\\n    ")
    {'size': 'Length in samples.'}
    """
    section = re.search(r"^(?:Args|Attributes):\n(.*)", inspect.cleandoc(docstring), re.DOTALL | re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
