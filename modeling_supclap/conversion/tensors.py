"""What all conversions share: renaming tensors, reading shapes off them, and filling a model with exactly its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import nn

Tensors = Mapping[str, torch.Tensor]


def fill_exactly(model: nn.Module, tensors: Tensors, source: str) -> None:
    """Copies tensors into a model that has exactly their names and shapes.

    Args:
        model: the model to fill, in place.
        tensors: all of its parameters and persistent buffers, by name.
        source: what they come from, for the message of an error.

    Raises:
        ValueError: names or shapes differ; the model is then as it was.
    """
    own = model.state_dict()
    faults = {
        "lacks": sorted(own.keys() - tensors.keys()),
        "has no place for": sorted(tensors.keys() - own.keys()),
        "has other shapes of": sorted(
            f"{name} {tuple(tensors[name].shape)} for {tuple(own[name].shape)}"
            for name in own.keys() & tensors.keys()
            if tensors[name].shape != own[name].shape
        ),
    }
    refuse_faults(source, type(model).__name__, faults)
    model.load_state_dict(tensors)


def rename_all(tensors: Tensors, rename: Callable[[str], str], source: str) -> dict[str, torch.Tensor]:
    """Renames tensors, none of which may vanish under another's new name.

    Raises:
        ValueError: two tensors would get one name.
    """
    renamed: dict[str, torch.Tensor] = {}
    for name in sorted(tensors):
        if rename(name) in renamed:
            raise ValueError(f"{source} mixes two layouts: it has {rename(name)} under two names, one of them {name}")
        renamed[rename(name)] = tensors[name]
    return renamed


def count_layers(tensors: Tensors, prefix: str) -> int:
    """How many of the numbered layers below a prefix there are: the highest number and one."""
    numbers = [int(found[1]) for name in tensors if (found := re.match(re.escape(prefix) + r"(\d+)\.", name))]
    return max(numbers, default=-1) + 1


def shape_of(tensors: Tensors, name: str, axes: int, source: str) -> tuple[int, ...]:
    """The shape of a tensor that a configuration is read off.

    Raises:
        ValueError: there is no such tensor, or it has another number of axes.
    """
    if name not in tensors:
        raise ValueError(f"{source} lacks {name}; among its {len(tensors)} tensors are {sorted(tensors)[:3]}")
    if tensors[name].ndim != axes:
        raise ValueError(f"{source}: {name} has shape {tuple(tensors[name].shape)}, which should have {axes} axes")
    return tuple(tensors[name].shape)


def refuse_faults(source: str, target: str, faults: Mapping[str, list[str]]) -> None:
    """Raises a ValueError that counts and names what is wrong with a checkpoint, unless nothing is.

    Args:
        source: the checkpoint.
        target: the model that it should fill.
        faults: names of tensors by what is wrong with them, such as "lacks".
    """
    told = [f"{fault} {len(names)} ({', '.join(names[:3])})" for fault, names in faults.items() if names]
    if told:
        raise ValueError(f"{source} does not fit {target}: it {', it '.join(told)}")
