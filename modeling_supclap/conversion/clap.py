"""Convert the transformers `ClapModel` to `SupCLAPModel` and back."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor, PreTrainedConfig

from ..configuration_supclap import SupCLAPConfig
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor, forget_last_call
from ..strict_loading import naming_damaged_files
from .folders import copy_origin, writing_folder
from .tensors import fill_exactly


def load_clap(name: str | Path) -> ClapModel:
    """Load a `ClapModel` (float32, evaluation mode) from a Hub id or folder, and check that its weights are complete.

    Raises:
        OSError: The folder or id does not exist, or a weight file is damaged.
        ValueError: The checkpoint is not a CLAP model, or its weights are missing, unexpected or differ in shape.
    """
    fields, _ = PreTrainedConfig.get_config_dict(str(name))
    if fields.get("model_type") != ClapConfig.model_type:
        raise ValueError(f"{name} has model_type {fields.get('model_type')!r}; pass a CLAP model (model_type 'clap')")
    with naming_damaged_files(name):
        loaded: Any = ClapModel.from_pretrained(name, dtype=torch.float32, output_loading_info=True)

    model, report = loaded
    # Position and token type ids are constant buffers; only some versions of transformers save them.
    constants = {name for name, _ in model.named_buffers() if name.endswith("_ids")}
    if faults := sorted(report["unexpected_keys"] | set(report["missing_keys"]) - constants):
        raise ValueError(f"{name} does not fit ClapModel: it lacks, or has too many, {', '.join(faults[:3])}")
    return model.eval()


def supclap_from_clap(clap: ClapModel) -> SupCLAPModel:
    """Convert a transformers `ClapModel` to a `SupCLAPModel` with the same embeddings.

    CLAP has one logit scale per direction. SupCLAP has a single logit scale, which is copied from CLAP's audio
    direction. `logits_per_audio` is the same as in CLAP, and `logits_per_text` is its transpose.

    Raises:
        ValueError: The tensors differ from those of a plain `ClapModel`, for example because the model has adapters.

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
    # the model card names the source of each tower
    for tower in (model.audio_model, model.text_model):
        tower.config.name_or_path = clap.name_or_path
    return model.eval()


def clap_from_supclap(model: SupCLAPModel) -> ClapModel:
    """Convert a `SupCLAPModel` to a transformers `ClapModel`. The logit scale is copied to both directions.

    Args:
        model: Result of `supclap_from_clap`, or a model with the same tower types, `text_pooling="pooler"` and no logit
            bias. Its weights are copied. Merge adapters first.

    Raises:
        ValueError: `ClapModel` does not support the towers, the pooling or the logit bias of the model.
    """
    config: Any = model.config
    parts = (config.audio_config.model_type, config.text_config.model_type, config.text_pooling, config.logit_bias)
    if parts != (expected := ("clap_audio_model", "clap_text_model", "pooler", None)):
        raise ValueError(f"audio tower, text tower, pooling and bias are {parts}; a ClapModel has {expected}")

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


def save_clap(model: SupCLAPModel, processor: SupCLAPProcessor, folder: str | Path) -> None:
    """Save a model as a `ClapModel` with its `ClapProcessor`, a folder that needs no code of this package.

    If the model was loaded from a folder, the files on its origin and its training recordings are copied.

    Args:
        folder: Output folder; it must be empty, or must not exist. It is written completely or not at all.

    Raises:
        ValueError: `ClapModel` does not support the model, `ClapProcessor` does not support the captions of the
            processor, or the folder is not empty.
    """
    clap = clap_from_supclap(model)
    if processor.plain_captions or processor.caption_prefix:
        fields = f"plain_captions={processor.plain_captions}, caption_prefix={processor.caption_prefix!r}"
        raise ValueError(f"the captions of the model have {fields}, which a ClapProcessor does not apply")

    extractor: Any = processor.feature_extractor
    if type(extractor) is not ClapFeatureExtractor:
        raise ValueError(f"the model has a {type(extractor).__name__}; a ClapProcessor needs a ClapFeatureExtractor")
    forget_last_call(processor.tokenizer)
    with writing_folder(folder) as written:
        clap.save_pretrained(written)
        ClapProcessor(extractor, processor.tokenizer).save_pretrained(written)
        copy_origin(model, written)


def processor_from_clap(processor: ClapProcessor) -> SupCLAPProcessor:
    """Build a deterministic `SupCLAPProcessor` from CLAP's feature extractor and tokenizer.

    CLAP's feature extractor crops clips longer than 10 s at random positions; our processor takes their first 10 s. All
    clips are marked as short, so the fusion layers of fused checkpoints are not used. Audio is resampled to 48 kHz.
    """
    return SupCLAPProcessor(processor.feature_extractor, processor.tokenizer)
