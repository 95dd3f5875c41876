"""Rename tensors, read their shapes, and load them into a model with strict checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights


class Tensors(dict[str, torch.Tensor]):
    """Tensors of a checkpoint as `{name: tensor}`, with methods for conversions.

    `origin` is the name of the checkpoint for error messages. `aside` contains the numbers of unused tensors, as
    `{kind of tensor: number}`: those of a part, and of renamed tensors, are also those of the whole checkpoint.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], origin: str, aside: Counter[str] | None = None) -> None:
        super().__init__(tensors)
        self.origin = origin
        self.aside: Counter[str] = Counter() if aside is None else aside

    def __missing__(self, name: str) -> torch.Tensor:
        raise ValueError(f"{self.origin} lacks {name}; among its {len(self)} tensors are {sorted(self)[:3]}")

    def build(self, model_class: Callable[..., Any], *args: Any) -> Any:
        """Build `model_class(*args)` and load exactly these tensors into it (float32, evaluation mode)."""
        with no_init_weights():
            # Without memory first, because the sizes may be those of a stranger's configuration.
            with torch.device("meta"):
                refuse_misfit(model_class(*args), self, self.origin)
            model = model_class(*args)
        model.load_state_dict(self)
        return model.eval()

    def rename(self, rules: Sequence[tuple[str, str]]) -> Tensors:
        """Rename tensors by the first matching rule (pattern, replacement). Raise ValueError if names become equal."""
        renamed = Tensors({}, self.origin, self.aside)
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
        """Return the tensors that have none of these name prefixes."""
        others = {name: self[name] for name in self if not name.startswith(prefixes)}
        return Tensors(others, self.origin, self.aside)

    def below(self, prefix: str, origin: str | None = None) -> Tensors:
        """Return the tensors with this name prefix, and remove the prefix from their names.

        `origin` is the name of this part for error messages, by default that of the checkpoint.
        """
        matching = {}
        for name, value in self.items():
            if name.startswith(prefix):
                matching[name.removeprefix(prefix)] = value
        return Tensors(matching, origin or self.origin, self.aside)

    def set_aside(self, reasons: Mapping[str, str]) -> Tensors:
        """Return the tensors that affect the embeddings, and count the others in `aside`.

        `reasons` is `{regular expression: kind of tensor}`. A tensor is left out if an expression matches the start of
        its name.
        """
        used = Tensors(self, self.origin, self.aside)
        for name in self:
            for pattern, reason in reasons.items():
                if name in used and re.match(pattern, name):
                    self.aside[reason] += 1
                    del used[name]

        return used

    def count_layers(self, prefix: str) -> int:
        """Return the number of layers with names `<prefix><index>.`: the highest index + 1."""
        count = 0
        for name in self:
            if match := re.match(re.escape(prefix) + r"(\d+)\.", name):
                count = max(count, int(match[1]) + 1)
        return count

    def count_heads(self, width: int, head_dim: int = 64) -> int:
        """Return the number of attention heads, width / head_dim. Raise ValueError if it is not a whole number.

        The heads of BERT, RoBERTa, GPT-2, SONAR and all sizes of CED have the width 64.
        """
        if width % head_dim:
            raise ValueError(f"{self.origin} has width {width}, not a multiple of {head_dim}; add its config.json")
        return width // head_dim

    def check_constant(self, name: str, expected: torch.Tensor, advice: str) -> None:
        """Check that a front-end constant in the checkpoint equals the one in our feature extractor.

        `advice` describes the expected front end in the error message.

        Raises:
            ValueError: The constant is missing, has a different shape, or differs by more than 1e-4 of its maximum
                (plus rounding in half precision).
        """
        constant = self.get(name)
        if constant is None or constant.shape != expected.shape:
            shape = None if constant is None else tuple(constant.shape)
            raise ValueError(f"{self.origin}: {name} has shape {shape}, expected {tuple(expected.shape)}; {advice}")

        # Between libraries, constants differ by up to 5e-6 of the maximum; between frequency ranges, by more than 0.01.
        # Half precision rounds numbers up to 1 by at most a quarter of its epsilon.
        tolerance = 1e-4 + torch.finfo(constant.dtype).eps / 4
        error = (constant.float() - expected).abs().max() / expected.abs().max()
        if not error <= tolerance:
            raise ValueError(
                f"{self.origin}: {name} differs from ours by {error:.2g} of its maximum, so the model was trained on "
                f"different spectrograms; {advice}"
            )


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with a prefix added to each name."""
    return {prefix + name: value for name, value in tensors.items()}


def fill_exactly(model: nn.Module, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Load tensors into a model, in place. Their names and shapes must equal those of the model.

    Raises:
        ValueError: Names or shapes differ. In this case the model is unchanged.
    """
    refuse_misfit(model, tensors, origin)
    model.load_state_dict(tensors)


def refuse_misfit(model: nn.Module, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Raise ValueError if names or shapes of tensors differ from those of a model."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in tensors.items()}
    if wrong := sorted(name for name in {**expected, **given} if expected.get(name) != given.get(name)):
        pairs = "; ".join(f"{name}: {given.get(name, 'none')} for {expected.get(name, 'none')}" for name in wrong[:3])
        raise ValueError(f"{origin} does not fit {type(model).__name__}: {len(wrong)} shapes differ, such as {pairs}")
