"""Load the model and the processor that a recipe starts from."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import nn

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import find_kind, load_model, load_processor
from modeling_supclap.conversion.layouts import FUSION_REMARK
from modeling_supclap.recipes.options import ModelArguments
from modeling_supclap.recipes.running import say


def has_model(name: str) -> bool:
    """Return whether a model exists as a local folder, in the Hub cache, or on the Hub."""
    return Path(name).exists() or _is_published(name)


@cache
def _is_published(name: str) -> bool:
    """Return whether a model is in the Hub cache or on the Hub, which is asked once per name."""
    try:
        # Without a network, a request for several files fails at once. One for a single file is tried for 23 s.
        return bool(snapshot_download(name, allow_patterns="config.json"))
    except (OSError, ValueError):
        return False


def require_models(args: ModelArguments) -> None:
    """Raise FileNotFoundError if a model or an encoder does not exist, and ValueError if it is of another kind."""
    if args.model is not None:
        find_kind(args.model)
        return
    for name in (args.audio_encoder, args.text_encoder):
        if name != "scratch" and not has_model(name):
            raise FileNotFoundError(
                f"{name} is neither a local folder nor in the cache, and the Hub has no such model or cannot be reached"
            )


def load_start(
    name: str, temperature: float | None = None, logit_bias: float | None = None
) -> tuple[SupCLAPModel, SupCLAPProcessor]:
    """Load a SupCLAP model and its processor from a Hub id or folder. Other formats are converted.

    These are the `ClapModel` of transformers and CLAP2 in OpenCLIP's format. The `temperature`, and the `logit_bias` of
    SigLIP, replace those of the model. None: keep them.
    """
    model = load_model(name)
    if getattr(model.config.audio_config, "enable_fusion", False):
        say(f"{name}: {FUSION_REMARK}")
    model.set_temperature(temperature, logit_bias)
    return model, load_processor(name)


def report_temperature(model: SupCLAPModel) -> dict[str, Any]:
    """Print the temperature with which a run starts, and whether it is trained. Return both, for `results.json`."""
    temperature = round(math.exp(-model.logit_scale.item()), 6)
    settings: dict[str, Any] = {"temperature": temperature, "train_temperature": model.logit_scale.requires_grad}
    line = f"temperature: {temperature:g}, {_is_trained(model.logit_scale)}"
    if model.logit_bias is not None:
        bias = round(model.logit_bias.item(), 6)
        settings |= {"logit_bias": bias, "train_bias": model.logit_bias.requires_grad}
        line += f"; bias of the logits: {bias:g}, {_is_trained(model.logit_bias)}"
    say(line)
    return settings


def _is_trained(parameter: nn.Parameter) -> str:
    return "trained" if parameter.requires_grad else "fixed"
