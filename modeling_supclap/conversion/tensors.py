"""What all conversions share: renaming tensors, reading shapes off them, and filling a model with exactly its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights


class Tensors(dict[str, torch.Tensor]):
    """The tensors of a checkpoint by name. Whatever is wrong with them is a ValueError that says where they come from.

    Args:
        tensors: All of them.
        origin: What they come from, for the message of an error.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
        super().__init__(tensors)
        self.origin = origin

    def build(self, model_class: Callable[..., Any], *args: Any) -> Any:
        """A model that is filled with exactly these tensors, in float32 and in evaluation mode.

        Args:
            model_class: Its class.
            *args: Its configuration, and towers that are filled already.

        Raises:
            ValueError: Names or shapes differ from the model's.
        """
        with no_init_weights():
            model = model_class(*args)
        fill_exactly(model, self, self.origin)
        return model.eval()

    def rename(self, rules: Sequence[tuple[str, str]]) -> Tensors:
        """Renames tensors, none of which may vanish under another's new name.

        Args:
            rules: Regular expressions and their replacements, of which the first that finds something in a name counts.

        Raises:
            ValueError: Two tensors would get one name.
        """
        renamed = Tensors({}, self.origin)
        for name in sorted(self):
            new = name
            for pattern, replacement in rules:
                new, count = re.subn(pattern, replacement, name)
                if count:
                    break
            if new in renamed:
                raise ValueError(f"{self.origin} mixes two layouts: it has {new} under two names, one of them {name}")
            renamed[new] = self[name]

        return renamed

    def without(self, *prefixes: str) -> Tensors:
        """The tensors below none of these prefixes."""
        return Tensors({name: self[name] for name in self if not name.startswith(prefixes)}, self.origin)

    def below(self, prefix: str) -> Tensors:
        """The tensors below a prefix, without it."""
        own = {name.removeprefix(prefix): self[name] for name in self if name.startswith(prefix)}
        return Tensors(own, self.origin)

    def set_aside(self, reasons: Mapping[str, str]) -> tuple[Tensors, dict[str, int]]:
        """Takes out the tensors that no embedding depends on.

        Args:
            reasons: Regular expressions of the beginnings of their names, and what they are.

        Returns:
            The other tensors, and how many were taken out by what they were.
        """
        kept = Tensors({}, self.origin)
        counts: dict[str, int] = {}
        for name, value in self.items():
            for pattern, reason in reasons.items():
                if re.match(pattern, name):
                    counts[reason] = counts.get(reason, 0) + 1
                    break
            else:
                kept[name] = value

        return kept, counts

    def count_layers(self, prefix: str) -> int:
        """How many of the numbered layers below a prefix there are: the highest number and one."""
        count = 0
        for name in self:
            if found := re.match(re.escape(prefix) + r"(\d+)\.", name):
                count = max(count, int(found[1]) + 1)

        return count

    def count_heads(self, width: int, head_dim: int) -> int:
        """The attention heads of an encoder, which no tensor shows, by the width that the published sizes have.

        Raises:
            ValueError: The width is no multiple of that of a head.
        """
        if width % head_dim:
            raise ValueError(
                f"{self.origin} is {width} wide; the published heads are {head_dim} wide. Give a folder with a "
                "config.json"
            )
        return width // head_dim

    def get_shape(self, name: str, axes: int) -> tuple[int, ...]:
        """The shape of a tensor that a configuration is read off.

        Raises:
            ValueError: There is no such tensor, or it has another number of axes.
        """
        if name not in self:
            raise ValueError(f"{self.origin} lacks {name}; among its {len(self)} tensors are {sorted(self)[:3]}")
        shape = tuple(self[name].shape)
        if len(shape) != axes:
            raise ValueError(f"{self.origin}: {name} has shape {shape}, which should have {axes} axes")
        return shape

    def check_constant(self, name: str, expected: torch.Tensor, advice: str) -> None:
        """Refuses weights that were trained on other spectrograms than our feature extractor makes.

        Args:
            name: A constant of the checkpoint's front end, such as its mel filters.
            expected: The same constant of ours.
            advice: Which front end would be right.

        Raises:
            ValueError: It is missing, has another shape, or differs by more than two libraries do.
        """
        seen = self.get(name)
        if seen is None or seen.shape != expected.shape:
            shape = None if seen is None else tuple(seen.shape)
            raise ValueError(
                f"{self.origin}: {name} has shape {shape}, which should be {tuple(expected.shape)}; {advice}"
            )

        # Libraries differ by up to 5e-6 of the maximum, other frequency ranges by more than 0.01. Half precision rounds
        # numbers up to 1 by a quarter of its epsilon.
        tolerance = 1e-4 + torch.finfo(seen.dtype).eps / 4
        error = (seen.float() - expected).abs().max() / expected.abs().max()
        if not error <= tolerance:
            raise ValueError(
                f"{self.origin}: {name} differs by {error:.2g} of its maximum: it was trained on other spectrograms; "
                f"{advice}"
            )


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with a prefix before each name."""
    return {prefix + name: value for name, value in tensors.items()}


def fill_exactly(model: nn.Module, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Copies tensors into a model that has exactly their names and shapes.

    Args:
        model: The model to fill, in place.
        tensors: All of its parameters and persistent buffers, by name.
        origin: What they come from, for the message of an error.

    Raises:
        ValueError: Names or shapes differ; the model is then as it was.
    """
    own = model.state_dict()

    reshaped = []
    for name in sorted(own.keys() & tensors.keys()):
        if tensors[name].shape != own[name].shape:
            reshaped.append(f"{name} {tuple(tensors[name].shape)} for {tuple(own[name].shape)}")

    faults = {
        "lacks": sorted(own.keys() - tensors.keys()),
        "has no place for": sorted(tensors.keys() - own.keys()),
        "has other shapes of": reshaped,
    }
    refuse_faults(origin, type(model).__name__, faults)
    model.load_state_dict(tensors)


def refuse_faults(origin: str, target: str, faults: Mapping[str, list[str]]) -> None:
    """Raises a ValueError that counts and names the tensors by what is wrong with them, unless nothing is."""
    told = []
    for fault, names in faults.items():
        if names:
            told.append(f"{fault} {len(names)} ({', '.join(names[:3])})")

    if told:
        raise ValueError(f"{origin} does not fit {target}: it {', it '.join(told)}")
