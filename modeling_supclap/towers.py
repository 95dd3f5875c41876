"""The encoders that can be a tower of the model: which class a configuration builds, and what no tower can be."""

import importlib
import inspect
from typing import Any, get_args

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    ClapAudioModel,
    ClapTextModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from .configuration_supclap import OWN_TOWERS

# Audio towers with a pooling of their own; all others run as `audio_encoder` describes.
AUDIO_TOWERS = ("ced", "clap_audio_model", "cnn14")
# Towers of transformers that AutoModel does not know.
_PARTS: dict[str, type[PreTrainedModel]] = {"clap_audio_model": ClapAudioModel, "clap_text_model": ClapTextModel}
POOLINGS_OF_ALL = {"audio": "audio_pooling must be 'mean'", "text": "text_pooling must be 'mean' or 'cls'"}


def get_tower_class(model_type: str) -> type[PreTrainedModel] | None:
    """Return the class of a tower that `AutoModel` cannot build; None for all others."""
    if model_type in OWN_TOWERS:
        module, name = OWN_TOWERS[model_type]
        return getattr(importlib.import_module(f".{module}", __package__), name)
    return _PARTS.get(model_type)


def build_tower(kind: str, config: Any, pooling: str = "mean") -> PreTrainedModel:
    """A tower with random weights.

    Args:
        kind: "audio" or "text".
        config: That of any audio or text encoder that `AutoModel` knows, or of an own tower.
        pooling: Of a text tower: "mean", "cls", "last" or "pooler".

    Raises:
        ValueError: The configuration is not of one encoder of this kind.
    """
    tower_class, options = get_class(kind, config, pooling)
    build = AutoModel.from_config if tower_class is AutoModel else tower_class._from_config
    return build(config, **options)


def check_audio_config(config: PreTrainedConfig) -> None:
    """Raise a ValueError unless the configuration is that of one audio encoder."""
    if config.model_type in AUDIO_TOWERS:
        return
    model_class = MODEL_MAPPING.get(type(config), None)
    takes_audio = getattr(model_class, "main_input_name", None) in ("input_values", "input_features")
    if config.sub_configs or not takes_audio or not hasattr(config, "hidden_size"):
        raise ValueError(
            f"{config.model_type!r} cannot be a tower for audio; give the checkpoint or configuration of one audio "
            f"encoder: {', '.join(AUDIO_TOWERS)} (clap_audio_model is the HTSAT of CLAP), or one that AutoModel loads, "
            "such as AST, Whisper, wav2vec 2.0, HuBERT, WavLM"
        )


def check_text_config(config: PreTrainedConfig, pooling: str = "mean") -> None:
    """Refuses what is not the configuration of one text encoder: a model of several parts, or one that takes no text.

    A decoder must be pooled by its "last" token, since no other has seen the whole text.

    Raises:
        ValueError: It is none; the message says what would be.
    """
    kind = config.model_type
    if config.sub_configs or not hasattr(config, "hidden_size"):
        raise ValueError(f"{kind!r} cannot be a tower; give the checkpoint or configuration of one encoder")
    if kind in ("m2m_100", "clap_text_model"):
        return

    advice = "give an encoder, for example BERT, XLM-R, LaBSE or SONAR"
    if config.is_encoder_decoder:
        raise ValueError(f"{kind!r} is an encoder with a decoder and cannot be a tower; {advice}")
    if _is_decoder(config) and pooling != "last":
        raise ValueError(
            f"{kind!r} is a decoder, whose tokens do not see those after them; {advice}, or read its last token with "
            "text_pooling='last'"
        )

    model_class: Any = get_tower_class(kind) or MODEL_MAPPING.get(type(config), None)
    if isinstance(model_class, type) and not takes(model_class, "input_ids"):
        raise ValueError(f"{kind!r} cannot be a tower for text: {model_class.__name__} takes no input_ids; {advice}")


def check_width(tower: PreTrainedModel, config: Any, name: str) -> None:
    """Refuses, by a ValueError, a tower whose width is not that of its field `name` in the model's configuration."""
    if tower.config.hidden_size != config.hidden_size:
        raise ValueError(
            f"{type(tower).__name__} is {tower.config.hidden_size} wide and {name} says {config.hidden_size}; "
            f"take the configuration from the tower: SupCLAPConfig({name}=tower.config, ...)"
        )


def check_pooling(tower: PreTrainedModel, pooling: str | None, kind: str) -> None:
    """Raise a ValueError if a tower cannot be pooled like this, before a batch meets it."""
    if kind == "audio" and tower.config.model_type in AUDIO_TOWERS:
        if pooling == "mean":
            raise ValueError(f"{type(tower).__name__} has a pooling of its own; audio_pooling must be None, got 'mean'")
    elif pooling == "pooler" and not has_pooler(tower):
        raise ValueError(f"{type(tower).__name__} has no pooler; {POOLINGS_OF_ALL[kind]}, got 'pooler'")


def has_pooler(tower: PreTrainedModel) -> bool:
    """BERT's kin have a `pooler`, or None where it was left out; of others what `forward` returns declares it."""
    if hasattr(tower, "pooler"):
        return tower.pooler is not None
    returned = inspect.signature(type(tower).forward).return_annotation
    return any(
        "pooler_output" in getattr(kind, "__dataclass_fields__", ()) for kind in get_args(returned) or (returned,)
    )


def takes(tower: nn.Module | type, argument: str) -> bool:
    """Whether the `forward` of a tower, or of its class, has an argument of this name."""
    tower_class: Any = tower if isinstance(tower, type) else type(tower)
    return argument in inspect.signature(tower_class.forward).parameters


def _is_decoder(config: PreTrainedConfig) -> bool:
    """Whether each token sees only those before it; some decoders have a switch that turns them into encoders."""
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        return False
    causal_only = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    return causal_only or bool(getattr(config, "is_decoder", False))


def get_class(kind: str, config: PreTrainedConfig, pooling: str) -> tuple[Any, dict[str, Any]]:
    """The class of a tower and what it is built with, or an error that says why it can be none."""
    if kind == "audio":
        check_audio_config(config)
        return get_tower_class(config.model_type) or _get_encoder_class(config), {}

    check_text_config(config, pooling)
    own_class = get_tower_class(config.model_type)
    model_class: Any = own_class or MODEL_MAPPING.get(type(config), None)
    options = {}
    # A BERT-like tower's own pooler is left out where nothing would read it, so that no weight stays untrained.
    if isinstance(model_class, type) and "add_pooling_layer" in inspect.signature(model_class).parameters:
        options["add_pooling_layer"] = pooling == "pooler"
    return own_class or AutoModel, options


def _get_encoder_class(config: PreTrainedConfig) -> Any:
    """The class of the encoder within a model of encoder and decoder; of others, `AutoModel`."""
    if not config.is_encoder_decoder:
        return AutoModel
    model_class: Any = MODEL_MAPPING[type(config)]
    with torch.device("meta"):
        return type(model_class(config).get_encoder())
