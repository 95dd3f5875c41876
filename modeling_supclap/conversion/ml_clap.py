"""ML-CLAP's files (Yan et al., 2024, arXiv 2406.07012) to `SupCLAPModel` and back: CED-base and SONAR, joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.initialization import no_init_weights

from ..configuration_supclap import SupCLAPConfig
from ..modeling_supclap import SupCLAPModel
from .ced import ced_from_original, original_from_ced
from .sonar import fairseq2_from_sonar, sonar_from_fairseq2
from .tensors import Tensors, fill_exactly, shape_of

AUDIO = "audio_encoder.model."
TEXT = "text_encoder.model."
TEMPERATURE = "temperature"
# Their projections are Linear, ReLU, Linear in a row.
PROJECTIONS = {
    "audio_proj.0": "audio_projection.linear1",
    "audio_proj.2": "audio_projection.linear2",
    "text_proj.0": "text_projection.linear1",
    "text_proj.2": "text_projection.linear2",
}


def below(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def supclap_from_ml_clap(tensors: Tensors, source: str) -> tuple[SupCLAPModel, dict[str, torch.Tensor]]:
    """The model in a file of ML-CLAP (557 tensors): logits are cosine / temperature, one for both directions.

    Args:
        tensors: all of the file's.
        source: what they come from, for the message of an error.

    Returns:
        The model in float32, in evaluation mode, and the tensors that it has no place for: the tagging head and the
        front end of CED, under their full names.

    Raises:
        ValueError: the file is of another layout, or its temperature is not positive.
    """
    audio, aside = ced_from_original(below(tensors, AUDIO), f"{source}, its audio encoder")
    text = sonar_from_fairseq2(below(tensors, TEXT), f"{source}, its text encoder")
    rest = {name: value for name, value in tensors.items() if not name.startswith((AUDIO, TEXT))}
    temperature = _temperature(rest, source)
    config = SupCLAPConfig(
        audio_config=audio.config,
        text_config=text.config,
        projection_dim=shape_of(rest, "audio_proj.0.weight", 2, source)[0],
        temperature=temperature,
    )
    with no_init_weights():
        model = SupCLAPModel(config, audio, text)
    # The towers are filled; what is left must be exactly the joint.
    joint = {_our_name(name): value for name, value in rest.items() if name != TEMPERATURE}
    joint["logit_scale"] = -torch.tensor([temperature], dtype=torch.float64).log()
    towers = {f"audio_model.{name}": value for name, value in audio.state_dict().items()}
    towers |= {f"text_model.{name}": value for name, value in text.state_dict().items()}
    fill_exactly(model, {**towers, **joint}, source)
    return model.eval(), {AUDIO + name: value for name, value in aside.items()}


def ml_clap_from_supclap(model: SupCLAPModel, set_aside: Tensors) -> dict[str, torch.Tensor]:
    """The way back to ML-CLAP's layout; the temperature to the last bit of float32 but one.

    Args:
        model: of CED and SONAR, mean pooling, ReLU and no bias.
        set_aside: what `supclap_from_ml_clap` gave beside the model.

    Raises:
        ValueError: ML-CLAP cannot express the model.
    """
    config: Any = model.config
    parts = {
        "audio tower": config.audio_config.model_type,
        "text tower": config.text_config.model_type,
        "pooling": config.text_pooling,
        "activation": config.projection_hidden_act,
        "bias": config.logit_bias,
    }
    wanted = {"audio tower": "ced", "text tower": "m2m_100", "pooling": "mean", "activation": "relu", "bias": None}
    if parts != wanted:
        raise ValueError(f"the model has {parts}; ML-CLAP has {wanted}")
    audio: Any = model.audio_model
    text: Any = model.text_model
    towers: Mapping[str, Tensors] = {
        AUDIO: original_from_ced(audio, below(set_aside, AUDIO)),
        TEXT: fairseq2_from_sonar(text),
    }
    tensors = {prefix + name: value for prefix, tower in towers.items() for name, value in tower.items()}
    for theirs, ours in PROJECTIONS.items():
        linear = model.get_submodule(ours)
        tensors |= {f"{theirs}.{name}": value.clone() for name, value in linear.state_dict().items()}
    tensors[TEMPERATURE] = model.logit_scale.detach().double().neg().exp().float().reshape(())
    return tensors


def _our_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{PROJECTIONS[layer]}.{kind}" if layer in PROJECTIONS else name


def _temperature(rest: Tensors, source: str) -> float:
    value = rest.get(TEMPERATURE)
    if value is None or value.numel() != 1 or not 0 < float(value) < float("inf"):
        raise ValueError(f"{source} must have a 'temperature' of one positive number, has {value}")
    return float(value)
