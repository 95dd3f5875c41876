"""Groups of parameters for the optimizer: without weight decay, and with their own learning rates."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

_NOT_DECAYED = re.compile(
    r"\bradii\b|pos(ition)?(al)?_?(embed|bias|enc)|embed_positions|(relative|rel)_(pos|attention_bias)|masked_spec_embed"
    r"|\b(cls|reg|distillation|mask)_tokens?\b"
)
"""Names of radii, tables of positions and learned tokens, in the towers of this package and of transformers."""


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, except tables of positions and radii.

    As in CLIP, biases, norms, the temperature and all other parameters with one axis have no decay. As in timm, learned
    tokens (class, registers) have none either.
    """
    return parameter.ndim > 1 and _NOT_DECAYED.search(name) is None


def as_rates(value: Mapping[str, Any] | str | None) -> dict[str, float]:
    """Return `{part: learning rate}` from a mapping, or from JSON on the command line.

    Raises:
        ValueError: It is not a mapping, or a rate is not a number of 0 or more.
    """
    problem = f"learning_rates is {value!r}; expected a mapping such as " + '{"text_model": 1e-5}'
    try:
        parsed = json.loads(value) if isinstance(value, str) else dict(value or {})
        rates = {name: float(rate) for name, rate in parsed.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(problem) from error
    if not all(rate >= 0 and math.isfinite(rate) for rate in rates.values()):
        raise ValueError(f"{problem}, with rates of 0 or more")
    return rates


def split_by_rate(
    optimizer: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]], rates: Mapping[str, float]
) -> None:
    """Split the groups of a new optimizer, so that each part of the model has its own learning rate.

    Args:
        parameters: Names and parameters of the model.
        rates: `{part: learning rate}`. A part is the beginning of dotted names of parameters, such as `text_model` or
            `audio_model.blocks.1`. If several parts contain a parameter, the longest one applies.

    Raises:
        ValueError: A part has no trainable parameter.
    """
    rate_of: dict[int, float] = {}
    unused, parts = set(rates), set()
    for name, parameter in parameters:
        name = name.replace("_fsdp_wrapped_module.", "").removeprefix("model.")
        containing = [part for part in rates if f"{name}.".startswith(f"{part}.")]
        parts.add(name.split(".")[0])
        if parameter.requires_grad and containing:
            part = max(containing, key=len)
            rate_of[id(parameter)] = rates[part]
            unused.difference_update(containing)
    if unused:
        raise ValueError(
            f"learning_rates has {sorted(unused)}, without trainable parameters; the model has {sorted(parts)}"
        )

    groups, optimizer.param_groups[:] = list(optimizer.param_groups), []
    for group in groups:
        # the general rate first: it is the logged one
        by_rate: dict[float, list[nn.Parameter]] = {group["lr"]: []}
        for parameter in group["params"]:
            by_rate.setdefault(rate_of.get(id(parameter), group["lr"]), []).append(parameter)
        for rate, chosen in by_rate.items():
            if chosen:
                optimizer.add_param_group({**group, "params": chosen, "lr": rate})
