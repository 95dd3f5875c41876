"""Load the model and the processor that a recipe starts from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from transformers import ClapConfig, ClapProcessor, PreTrainedConfig

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.conversion import load_clap, processor_from_clap, supclap_from_clap
from modeling_supclap.conversion.layouts import FUSION_REMARK
from modeling_supclap.recipes.running import say


@cache
def has_model(name: str) -> bool:
    """Return whether a model exists as a local folder, in the Hub cache, or on the Hub."""
    try:
        return Path(name).exists() or bool(PreTrainedConfig.get_config_dict(name))
    except (OSError, ValueError):
        return False


def is_clap(name: str) -> bool:
    """Return whether a Hub id or folder contains a transformers `ClapModel`."""
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except OSError:
        return False  # loading it later raises the error
    return fields.get("model_type") == ClapConfig.model_type


def load_start(name: str) -> tuple[SupCLAPModel, SupCLAPProcessor]:
    """Load a SupCLAP model and its processor from a Hub id or folder. A transformers `ClapModel` is converted."""
    if is_clap(name):
        clap = load_clap(name)
        if getattr(clap.config.audio_config, "enable_fusion", False):
            say(f"{name}: {FUSION_REMARK}")
        return supclap_from_clap(clap), load_processor(name)
    return SupCLAPModel.from_pretrained(name), load_processor(name)


def load_processor(name: str) -> SupCLAPProcessor:
    """Load the processor of a SupCLAP model or a transformers `ClapModel` from a Hub id or folder."""
    if is_clap(name):
        return processor_from_clap(ClapProcessor.from_pretrained(name))
    return SupCLAPProcessor.from_pretrained(name)
