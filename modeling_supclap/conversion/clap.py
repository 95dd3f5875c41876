"""transformers' `ClapModel` to our model and back; its towers are taken from the whole, never loaded alone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import ClapConfig, ClapModel, ClapProcessor, PreTrainedConfig

from ..configuration_supclap import SupCLAPConfig
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from ..strict_loading import naming_damaged_files
from .tensors import fill_exactly, refuse_faults


def load_clap(name: str | Path) -> ClapModel:
    """A whole CLAP of the Hub (`laion/clap-htsat-unfused`) or of a folder, with every weight found.

    Its towers are `.audio_model` and `.text_model`; saved on their own they are towers for `from_encoders`.

    Args:
        name: The Hub id or folder of a `ClapModel`.

    Returns:
        The model in float32, in evaluation mode.

    Raises:
        OSError: There is no such folder or id, or a file of weights is damaged.
        ValueError: It is a checkpoint of another kind of model, or lacks weights, or has some that the model has not.
    """
    fields, _ = PreTrainedConfig.get_config_dict(str(name))
    if fields.get("model_type") != ClapConfig.model_type:
        raise ValueError(f"{name} is a {fields.get('model_type')!r} model; give a whole CLAP, of model_type 'clap'")
    with naming_damaged_files(name):
        loaded: Any = ClapModel.from_pretrained(str(name), dtype=torch.float32, output_loading_info=True)

    model, report = loaded
    # The numbers of positions and types are constants, which not every version of transformers has written.
    constants = {name for name, _ in model.named_buffers() if name.endswith("_ids")}
    faults = {
        "lacks": sorted(set(report["missing_keys"]) - constants),
        "has no place for": sorted(report["unexpected_keys"]),
        "has other shapes of": sorted(map(str, report["mismatched_keys"])),
    }
    refuse_faults(str(name), "ClapModel", faults)
    return model.eval()


def supclap_from_clap(clap: ClapModel) -> SupCLAPModel:
    """A `SupCLAPModel` that embeds as a transformers CLAP does, ready to be post-trained.

    CLAP has a scale for each direction; ours has one and takes the audio's, so that `logits_per_audio` agrees and
    `logits_per_text` is its transpose.

    Args:
        clap: The model to copy: HTSAT, RoBERTa-like text tower with its pooler, two-layer projections.

    Returns:
        A model with weights of its own in float32, in evaluation mode.

    Raises:
        ValueError: The model holds other tensors than a `ClapModel` does, adapters for example.

    Example:
        >>> text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
        >>> audio = {"hidden_size": 16, "patch_embeds_hidden_size": 2, "num_attention_heads": [1, 1, 2, 2]}
        >>> clap = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=4))
        >>> supclap_from_clap(clap).get_text_features(torch.tensor([[0, 5, 2]])).pooler_output.shape
        torch.Size([1, 4])
    """
    config = SupCLAPConfig(
        audio_config=deepcopy(clap.config.audio_config),
        text_config=deepcopy(clap.config.text_config),
        projection_dim=clap.config.projection_dim,
        projection_hidden_act=clap.config.projection_hidden_act,
        temperature=1 / clap.config.logit_scale_init_value,
        text_pooling="pooler",
    )
    tensors = clap.state_dict()
    del tensors["logit_scale_t"]
    tensors["logit_scale"] = tensors.pop("logit_scale_a").reshape(1)

    model = SupCLAPModel(config)
    fill_exactly(model, tensors, "the ClapModel")
    for tower in (model.audio_model, model.text_model):  # for the model card, which says where each is from
        tower.config.name_or_path = clap.name_or_path
    return model.eval()


def clap_from_supclap(model: SupCLAPModel) -> ClapModel:
    """The way back: a transformers `ClapModel` with both of its scales set to the model's.

    Args:
        model: One made by `supclap_from_clap` or with the same towers, pooling and no bias; adapters merged.

    Returns:
        A model with weights of its own in float32, in evaluation mode.

    Raises:
        ValueError: A `ClapModel` cannot express the model.
    """
    config: Any = model.config
    parts = (config.audio_config.model_type, config.text_config.model_type, config.text_pooling, config.logit_bias)
    if parts != (wanted := ("clap_audio_model", "clap_text_model", "pooler", None)):
        raise ValueError(f"audio tower, text tower, pooling and bias are {parts}; a ClapModel has {wanted}")

    fields = config.to_dict()
    clap = ClapModel(
        ClapConfig(
            audio_config=fields["audio_config"],
            text_config=fields["text_config"],
            projection_dim=config.projection_dim,
            projection_hidden_act=config.projection_hidden_act,
            logit_scale_init_value=1 / config.temperature,
        )
    )

    tensors = model.state_dict()
    tensors["logit_scale_a"] = tensors["logit_scale_t"] = tensors.pop("logit_scale").reshape(())
    fill_exactly(clap, tensors, "the SupCLAPModel")
    return clap.eval()


def processor_from_clap(processor: ClapProcessor) -> SupCLAPProcessor:
    """CLAP's feature extractor and tokenizer under our processor, which makes them deterministic.

    CLAP's feature extractor alone takes a random part of a clip longer than 10 s, and for fused checkpoints calls one
    clip of each batch long at random. Under ours every clip is short: the first 10 s, or in training the 10 s that the
    collator drew. So a fused checkpoint works too, but its fusion is never used and gets no gradient. Recordings of
    other rates than its 48 kHz are resampled when the collator reads them; the processor itself refuses them.

    Args:
        processor: CLAP's own processor.
    """
    return SupCLAPProcessor(processor.feature_extractor, processor.tokenizer)
