"""Build the towers (the audio and the text encoder) of `SupCLAPModel` from configurations, and validate them."""

import importlib
import inspect
import re
from typing import Any, Literal, get_args

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

from .configuration_supclap import AUDIO_TOWERS, OWN_TOWERS

# Towers of transformers that AutoModel cannot build.
_PARTS: dict[str, type[PreTrainedModel]] = {"clap_audio_model": ClapAudioModel, "clap_text_model": ClapTextModel}
POOLINGS_OF_ALL = {"audio": "audio_pooling must be 'mean'", "text": "text_pooling must be 'mean' or 'cls'"}


# Weights that no embedding depends on: those of masked inputs, which need SpecAugment or masked tokens, of Longformer's
# global attention and of LUKE's entities, which captions do not have.
_IDLE = re.compile(
    r"(?:^|\.)(?:masked_spec_embed|mask_emb|(?:query|key|value)_global\.\w+|entity_embeddings\..+|(?:w2e|e2w|e2e)_query\.\w+)$"
)


def freeze_idle(model: Any) -> None:
    """Freeze the weights of both towers that no embedding depends on. Otherwise, several processes would wait for them.

    A pooler that is not used is frozen, too.
    """
    for kind in ("audio", "text"):
        tower, pooling = getattr(model, f"{kind}_model"), getattr(model.config, f"{kind}_pooling")
        masks_inputs = getattr(tower.config, "apply_spec_augment", False)
        for name, parameter in tower.named_parameters():
            is_masked = name.endswith("masked_spec_embed")
            is_unused_pooler = name.startswith("pooler.") and pooling not in (None, "pooler")
            if is_unused_pooler or (_IDLE.search(name) and not (is_masked and masks_inputs)):
                parameter.requires_grad_(False)


def import_tower_code(module: str, name: str) -> Any:
    """Import a class or function on first use, because a saved model contains only the code of its two towers."""
    return getattr(importlib.import_module(f".{module}", __package__), name)


def get_tower_class(model_type: str) -> type[PreTrainedModel] | None:
    """Return the model class for a `model_type` that `AutoModel` cannot build. Return None for other types."""
    return import_tower_code(*OWN_TOWERS[model_type]) if model_type in OWN_TOWERS else _PARTS.get(model_type)


def build_tower(kind: Literal["audio", "text"], config: Any, pooling: str = "mean") -> PreTrainedModel:
    """Build an encoder with random weights. Raise ValueError if a model of this type cannot be a tower.

    `pooling` ("mean", "cls", "last" or "pooler") applies to text encoders only.
    """
    tower_class, options = get_class(kind, config, pooling)
    build = AutoModel.from_config if tower_class is AutoModel else tower_class._from_config
    return build(config, **options)


def check_audio_config(config: PreTrainedConfig) -> None:
    """Raise ValueError if the configuration does not describe a single audio encoder."""
    if config.model_type in AUDIO_TOWERS:
        return
    model_class = MODEL_MAPPING.get(type(config), None)
    takes_audio = getattr(model_class, "main_input_name", None) in ("input_values", "input_features")
    if config.sub_configs or not takes_audio or not hasattr(config, "hidden_size"):
        raise ValueError(
            f"{config.model_type!r} cannot be an audio tower; pass an audio encoder that AutoModel loads, such as "
            f"Whisper or wav2vec 2.0, or one of {', '.join(AUDIO_TOWERS)} (clap_audio_model is the HTSAT of CLAP)"
        )


def check_text_config(config: PreTrainedConfig, pooling: str = "mean") -> None:
    """Raise ValueError if the configuration does not describe a text encoder.

    A decoder is accepted with `pooling="last"`, because only its last token attends to the whole text.
    """
    kind = config.model_type
    if config.sub_configs or not hasattr(config, "hidden_size"):
        raise ValueError(f"{kind!r} cannot be a tower; pass the checkpoint or configuration of one encoder")
    if kind in ("m2m_100", "clap_text_model"):
        return

    advice = "pass an encoder, for example BERT, XLM-R, LaBSE or SONAR"
    if config.is_encoder_decoder:
        raise ValueError(f"{kind!r} has an encoder and a decoder and cannot be a text tower; {advice}")
    if _is_decoder(config) and pooling != "last":
        raise ValueError(f"{kind!r} is a decoder; {advice}, or set text_pooling='last' instead of {pooling!r}")

    model_class: Any = get_tower_class(kind) or MODEL_MAPPING.get(type(config), None)
    if isinstance(model_class, type) and not takes(model_class, "input_ids"):
        raise ValueError(f"{kind!r} cannot be a text tower: {model_class.__name__} takes no input_ids; {advice}")


def check_tower(kind: Literal["audio", "text"], tower: PreTrainedModel, config: Any, pooling: str | None) -> None:
    """Raise ValueError if the hidden size of a tower differs from `config`, or if it does not support the pooling."""
    name, width = type(tower).__name__, tower.config.hidden_size
    if width != config.hidden_size:
        raise ValueError(
            f"{name} has width {width}, but {kind}_config has {config.hidden_size}; pass {kind}_config=tower.config"
        )
    if kind == "audio" and tower.config.model_type in AUDIO_TOWERS:
        if pooling == "mean":
            raise ValueError(f"{name} has its own pooling; audio_pooling must be None, got 'mean'")
    elif pooling == "pooler" and not has_pooler(tower):
        raise ValueError(f"{name} has no pooler; {POOLINGS_OF_ALL[kind]}, got 'pooler'")


def has_pooler(tower: PreTrainedModel) -> bool:
    """Return whether the output of a tower has a `pooler_output`.

    If the tower has no attribute `pooler`, the return annotation of its `forward` method is used.
    """
    if hasattr(tower, "pooler"):
        return tower.pooler is not None
    returned = inspect.signature(type(tower).forward).return_annotation
    return any(
        "pooler_output" in getattr(kind, "__dataclass_fields__", ()) for kind in get_args(returned) or (returned,)
    )


def takes(tower: nn.Module | type, argument: str) -> bool:
    """Return whether the `forward` method of a tower (or tower class) accepts this argument."""
    tower_class: Any = tower if isinstance(tower, type) else type(tower)
    return argument in inspect.signature(tower_class.forward).parameters


def _is_decoder(config: PreTrainedConfig) -> bool:
    """Return whether the attention is causal. A decoder with bidirectional attention counts as an encoder."""
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        return False
    causal_only = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    return causal_only or bool(getattr(config, "is_decoder", False))


def get_class(kind: Literal["audio", "text"], config: PreTrainedConfig, pooling: str) -> tuple[Any, dict[str, Any]]:
    """Return the model class of a tower and its constructor arguments. Raise ValueError for an unsupported model."""
    if kind == "audio":
        check_audio_config(config)
        if config.is_encoder_decoder:  # the encoder class
            model_class: Any = MODEL_MAPPING[type(config)]
            with torch.device("meta"):
                return type(model_class(config).get_encoder()), {}
        return get_tower_class(config.model_type) or AutoModel, {}

    check_text_config(config, pooling)
    own_class = get_tower_class(config.model_type)
    model_class = own_class or MODEL_MAPPING.get(type(config), None)
    options = {}
    # An unused pooler of a BERT-like tower is not built, so that no weight stays untrained.
    if isinstance(model_class, type) and "add_pooling_layer" in inspect.signature(model_class).parameters:
        options["add_pooling_layer"] = pooling == "pooler"
    return own_class or AutoModel, options
