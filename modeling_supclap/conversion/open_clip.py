"""Read and write CLAP2 and its precursors in OpenCLIP's format.

A folder contains `open_clip_config.json` and `open_clip_model.safetensors`.

The code follows the published format of OpenCLIP 4.2.0.dev0 and was compared with it on random weights. It has not been
run with LAION's published weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.utils import cached_file

from ..configuration_supclap import ModernTextConfig, NaFlexConfig, SupCLAPConfig
from ..feature_extraction_ced import CEDFeatureExtractor
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from .files import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, read_checkpoint, read_json
from .folders import copy_origin, writing_folder
from .open_clip_tokenizer import (
    CONTEXT_LENGTH,
    get_tokenizer_fields,
    load_open_clip_tokenizer,
    prepare_open_clip_tokenizer,
)
from .tensors import Tensors

# Training clips of CLAP2 last at most 30 s, and the cost of attention grows with the square of the length.
CHUNK_SECONDS = 30

# Fields of OpenCLIP that are fields of our configurations, with OpenCLIP's defaults for fields that a file lacks.
_MEL_DEFAULTS = {
    "sample_rate": 48000, "mel_bins": 64, "window_size": 1024, "hop_size": 480, "fmin": 50, "fmax": 14000,
}  # fmt: skip
_PATCH_DEFAULTS = {"patch_freq": 64, "patch_time": 4, "patch_pad_mode": "floor"}
# NaFlexConfig has the names and defaults of `naflexvit_cfg`, which is timm's NaFlexVitCfg.
_OWN_FIELDS = {"model_type", "n_mels", "layer_norm_eps", "initializer_range", *_PATCH_DEFAULTS}
_VIT_NAMES = sorted(NaFlexConfig.__annotations__.keys() - _OWN_FIELDS)
_VIT_DEFAULTS = {name: getattr(NaFlexConfig(), name) for name in _VIT_NAMES}
_TEXT_DEFAULTS: dict[str, Any] = {
    "context_length": CONTEXT_LENGTH, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0,
    "mlp_type": "swiglu", "pool_type": "argmax", "attention_mode": "causal", "rope_temperature": 10000.0,
    "pad_id": 0, "bos_id": None, "eos_id": None, "reg_tokens": 0, "value_residual": False, "ls_init_value": None,
    "norm_type": "rmsnorm", "norm_eps": 1e-6, "norm_placement": "pre", "pre_norm": False, "qk_norm": False,
    "attn_gated": False, "attention_bias": False, "mlp_bias": False, "gate_bias": None,
}  # fmt: skip
# Their names -> our names, where they differ.
_OUR_NAMES = {
    "sample_rate": "sampling_rate", "mel_bins": "feature_size", "window_size": "win_size", "fmin": "f_min",
    "fmax": "f_max", "context_length": "max_position_embeddings", "width": "hidden_size",
    "heads": "num_attention_heads", "layers": "num_hidden_layers", "pad_id": "pad_token_id",
    "bos_id": "bos_token_id", "eos_id": "eos_token_id",
}  # fmt: skip

# Fields that change the embeddings, with the only values that are supported.
_AUDIO_ONLY: dict[str, Any] = {
    "model_type": ("naflexvit",), "in_chans": (1,), "rope_type": ("axial",), "pre_norm": (False,),
    "training_head": (False,), "proj_act": ("gelu", "relu"),
}  # fmt: skip
_VIT_ONLY: dict[str, Any] = {
    "act_layer": (None, "gelu"), "attn_layer": (None,), "attn_type": ("standard", "rope"), "block_fn": (None,),
    "embed_norm_layer": (None,), "embed_proj_type": ("linear",), "enable_patch_interpolator": (False,),
    "final_norm": (True,), "input_norm_layer": (None,), "mlp_layer": (None,), "num_kv_heads": (None,),
    "pos_embed": ("none", ""), "proj_bias": (True,), "qkv_fused": (True,), "rope_grid_indexing": ("ij",),
    "rope_grid_offset": (0,), "rope_mrope_section": (None,), "rope_ref_feat_shape": (None,), "rope_type": ("axial",),
    "swiglu_align_to": (0,),
}  # fmt: skip
_TEXT_ONLY: dict[str, Any] = {
    "text_arch": ("modern",), "pos_embed": ("rope",), "proj_type": ("linear",), "proj_bias": (False, True),
    "hf_model_name": (None, ""), "tokenizer_mode": (None, ""),
}  # fmt: skip
_POOLERS = {"mean_pooler": "mean", "cls_last_hidden_state_pooler": "cls", "cls_pooler": "pooler"}
_HF_ONLY: dict[str, Any] = {
    "text_arch": ("clip",), "hf_proj_type": ("linear", "mlp"), "hf_pooler_type": tuple(_POOLERS),
    "tokenizer_mode": (None, ""),
}  # fmt: skip

# Fields without an effect on embeddings: of training, of other towers, of images, and of tokenizers, which are checked
# by their ids; and the parts that are read on their own.
_IGNORED = {
    "model_cfg", "preprocess_cfg", "audio_cfg", "text_cfg", "naflexvit_cfg", "embed_dim", "custom_text",
    "init_logit_bias", "init_logit_scale", "nonscalar_logit_scale", "output_dict", "quick_gelu", "audio_length",
    "audio_seq_len", "class_num", "clip_samples", "enable_fusion", "fusion_type", "model_name", "pretrained",
    "attn_drop_rate", "drop_path_rate", "drop_rate", "dynamic_img_pad", "fix_init", "patch_drop_rate",
    "patchify_channels_last", "pos_drop_rate", "pos_embed_align_corners", "pos_embed_antialias",
    "pos_embed_ar_preserving", "pos_embed_grid_size", "pos_embed_interp_mode", "pos_embed_use_grid_sample",
    "proj_drop_rate", "rope_jitter_coords", "rope_rescale_coords", "rope_shift_coords", "use_key_only_attn_mask",
    "weight_init", "zero_init_residual", "act_kwargs", "block_type", "correct_cls_mask", "embed_cls",
    "final_ln_after_pool", "freeze_pad_embed", "hf_model_config", "hf_model_pretrained", "hf_pooler_type",
    "hf_proj_type", "hf_tokenizer_name", "no_causal_mask", "norm_kwargs", "output_tokens", "scale_attn",
    "scale_attn_inner", "scale_fc", "scale_heads", "scaled_cosine_attn", "tiktoken_name", "tokenizer_kwargs",
    "tokenizer_type", "use_pad_mask", "variable_text",
}  # fmt: skip

# Settings of our models that OpenCLIP's format has no field for, with the values that it implies.
_MODEL_ONLY = {
    "projection_type": ("mlp",), "projection_hidden_act": _AUDIO_ONLY["proj_act"], "text_dense": (None, []),
    "text_normalize": (False,), "text_pooling": ("pooler",), "text_projection_type": ("linear", "linear_bias"),
}  # fmt: skip
_TOWER_ONLY = {"layer_norm_eps": (1e-6,)}
_PROCESSOR_ONLY = {"caption_prefix": ("",), "plain_captions": (False,), "resampling_method": ("sinc_interp_hann",)}

# Beginnings of tensor names, theirs and ours.
_AUDIO_NAMES = {
    "audio.encoder.vit.": "audio_model.",
    "audio.proj.0.": "audio_projection.linear1.",
    "audio.proj.2.": "audio_projection.linear2.",
}
_TEXT_NAMES = {"text.text_projection.": "text_projection.linear1.", "text.": "text_model."}
_HF_TEXT_NAMES = {
    "text.transformer.": "text_model.",
    "text.proj.weight": "text_projection.linear1.weight",
    "text.proj.0.": "text_dense.0.linear.",
    "text.proj.2.": "text_projection.linear1.",
}


def load_open_clip(name: str | Path, tokenizer: str | None = None) -> tuple[SupCLAPModel, SupCLAPProcessor]:
    """Load an audio model in OpenCLIP's format from a folder or Hub id, and build its processor.

    Args:
        tokenizer: Hub id or folder of the tokenizer. None: the tokenizer of the checkpoint.

    Returns:
        The model in float32, in evaluation mode, and its processor.

    Raises:
        OSError: The folder, repository or tokenizer does not exist.
        ValueError: The settings are not supported, or tensors or tokenizer do not fit.
    """
    checkpoint = read_checkpoint(name)
    model, _ = supclap_from_open_clip(Tensors(checkpoint.tensors, checkpoint.origin), checkpoint.config)
    # the model card names the source of each tower
    for part in (model, model.audio_model, model.text_model):
        part.name_or_path = part.config.name_or_path = str(name)
    return model, load_open_clip_processor(checkpoint.folder, tokenizer)


def load_open_clip_processor(name: str | Path, tokenizer: str | None = None) -> SupCLAPProcessor:
    """Build the processor of an audio model in OpenCLIP's format, without loading its weights."""
    settings = read_json(Path(str(cached_file(name, OPEN_CLIP_CONFIG))))
    model_cfg = _get_model_cfg(settings, str(name))
    words = load_open_clip_tokenizer(str(name), settings, tokenizer)
    prepare_open_clip_tokenizer(words, _read_text(model_cfg["text_cfg"], str(name))[0])
    return SupCLAPProcessor(_read_audio(model_cfg["audio_cfg"], str(name))[1], words)


def supclap_from_open_clip(tensors: Tensors, settings: Mapping[str, Any]) -> tuple[SupCLAPModel, CEDFeatureExtractor]:
    """Convert the tensors of an OpenCLIP audio model to a `SupCLAPModel`, and build its feature extractor.

    Args:
        settings: Content of `open_clip_config.json`.

    Raises:
        ValueError: A field of the settings is unknown or has an unsupported value, or the tensors do not fit.
    """
    model_cfg = _get_model_cfg(settings, tensors.origin)
    audio_cfg, text_cfg = model_cfg["audio_cfg"], model_cfg["text_cfg"]
    audio_config, extractor = _read_audio(audio_cfg, tensors.origin)
    text_config, options = _read_text(text_cfg, tensors.origin)
    _refuse_old_patches(tensors, audio_config)
    # hf_proj_type "mlp": linear, GELU, linear, without biases
    if text_cfg.get("hf_model_name") and "text.proj.0.weight" in tensors:
        inner = tensors["text.proj.0.weight"].shape[0]
        options["text_dense"] = [{"out_features": inner, "activation": "gelu", "bias": False}]

    text_names = _HF_TEXT_NAMES if text_cfg.get("hf_model_name") else _TEXT_NAMES
    prefixes = {**_AUDIO_NAMES, **text_names}
    renamed = tensors.rename([("^" + re.escape(theirs), ours) for theirs, ours in prefixes.items()])
    for name in ("logit_scale", "logit_bias"):
        if name in renamed:
            renamed[name] = renamed[name].reshape(1)
    for name in list(renamed):
        if name.endswith(".position_ids"):  # a constant buffer of older versions
            del renamed[name]
    config = SupCLAPConfig(
        audio_config=audio_config,
        text_config=text_config,
        projection_dim=model_cfg["embed_dim"],
        projection_hidden_act=audio_cfg.get("proj_act", "gelu"),
        temperature=float((-renamed["logit_scale"]).exp()) if "logit_scale" in renamed else 0.07,
        logit_bias=float(renamed["logit_bias"]) if "logit_bias" in renamed else None,
        **options,
    )
    return renamed.build(SupCLAPModel, config), extractor


def _get_model_cfg(settings: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """Return the `model_cfg` of OpenCLIP's settings. Raise ValueError if a part is missing or unknown."""
    model_cfg = settings.get("model_cfg") or {}
    towers = (model_cfg.get("audio_cfg"), model_cfg.get("text_cfg"))
    if not all(isinstance(tower, Mapping) for tower in towers) or "embed_dim" not in model_cfg:
        raise ValueError(
            f"{origin} has no {OPEN_CLIP_CONFIG} with audio_cfg, text_cfg and embed_dim; pass the whole folder"
        )
    _read_fields(settings, {}, {}, f"{origin}: {OPEN_CLIP_CONFIG}")
    _read_fields(model_cfg, {}, {}, f"{origin}: model_cfg")
    return model_cfg


def _read_audio(audio_cfg: Mapping[str, Any], origin: str) -> tuple[NaFlexConfig, CEDFeatureExtractor]:
    """Read `audio_cfg` with its `naflexvit_cfg`."""
    vit_cfg = audio_cfg.get("naflexvit_cfg") or {}
    audio_cfg = {"model_type": "HTSAT", **audio_cfg}
    fields = _read_fields(audio_cfg, _PATCH_DEFAULTS, _AUDIO_ONLY, f"{origin}: audio_cfg", _MEL_DEFAULTS)
    where = f"{origin}: naflexvit_cfg"
    only = {**_VIT_ONLY, "fc_norm": (None, vit_cfg.get("global_pool") == "avg")}
    fields |= _read_fields(vit_cfg, _VIT_DEFAULTS, only, where)
    if fields["norm_layer"] == "layernorm":
        fields["norm_layer"] = None
    extractor = extractor_from_audio_cfg(audio_cfg)
    return _build_config(NaFlexConfig, where, n_mels=extractor.feature_size, **fields), extractor


def extractor_from_audio_cfg(audio_cfg: Mapping[str, Any]) -> CEDFeatureExtractor:
    """Build the feature extractor for the mel fields of an `audio_cfg`."""
    fields = _read_fields(audio_cfg, _MEL_DEFAULTS, {}, "audio_cfg", audio_cfg)
    return CEDFeatureExtractor(
        n_fft=fields["win_size"],
        top_db=1000.0,  # no limit: the floor of the power is 110 dB below full scale
        min_frames=1,
        pad_to_samples=fields["win_size"],
        chunk_length=CHUNK_SECONDS,
        **fields,
    )


def _read_text(text_cfg: Mapping[str, Any], origin: str) -> tuple[Any, dict[str, Any]]:
    """Read `text_cfg`. Return the configuration of the text tower, and options of SupCLAPConfig."""
    where = f"{origin}: text_cfg"
    text_cfg = {"text_arch": "clip", **text_cfg}
    if text_cfg.get("hf_model_name"):
        _read_fields(text_cfg, {}, _HF_ONLY, where, {*_TEXT_DEFAULTS, *_TEXT_ONLY})
        options = {
            "text_pooling": _POOLERS[text_cfg.get("hf_pooler_type", "mean_pooler")],
            "text_projection_type": "linear",
        }
        # Some repositories pin a half precision.
        changes = {**(text_cfg.get("hf_model_config") or {}), "dtype": None}
        return AutoConfig.from_pretrained(text_cfg["hf_model_name"], trust_remote_code=False, **changes), options

    fields = _read_fields(text_cfg, _TEXT_DEFAULTS, _TEXT_ONLY, where)
    if fields["pool_type"] == "argmax":
        fields["pool_type"] = "eos"
    if fields["pool_type"] == "eos" and fields["eos_token_id"] is None:
        raise ValueError(f"{where} lacks eos_id, which the pooling requires")
    projection = "linear_bias" if text_cfg.get("proj_bias") else "linear"
    options = {"text_pooling": "pooler", "text_projection_type": projection}
    return _build_config(ModernTextConfig, where, **fields), options


def _build_config(config_class: Any, where: str, **fields: Any) -> Any:
    """Build a configuration. Raise ValueError, with the place of the fields, for an unsupported value."""
    try:
        return config_class(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"{where} is not supported: {error}") from error


def _read_fields(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    only: Mapping[str, tuple[Any, ...]],
    where: str,
    others: Container[str] = (),
) -> dict[str, Any]:
    """Return the fields of a part of OpenCLIP's settings under our names, with OpenCLIP's defaults.

    Args:
        defaults: `{their name: their default}` of the fields to return. The default also replaces null.
        only: `{their name: supported values}`.
        where: Name of the part for error messages.
        others: Names of further known fields, beside those of `_IGNORED`.

    Raises:
        ValueError: A field is unknown, or has an unsupported value.
    """
    for name, value in given.items():
        if name in only and value not in only[name]:
            supported = ", ".join(map(repr, only[name]))
            raise ValueError(f"{where} has {name}={value!r}; supported: {supported}")
        if not any(name in known for known in (only, defaults, others, _IGNORED)):
            raise ValueError(
                f"{where} has the unknown field {name}={value!r}, which may change the embeddings; convert this model "
                "with a newer version of this package, or report the field"
            )

    ours = {}
    for name, default in defaults.items():
        value = given.get(name)
        ours[_OUR_NAMES.get(name, name)] = default if value is None else value
    return ours


def _refuse_old_patches(tensors: Tensors, config: NaFlexConfig) -> None:
    """Raise ValueError if the patch embedding has OpenCLIP's layout from before 24 June 2026.

    A patch is stored by mel band and frame, and was stored by frame and mel band. Trained weights are smooth along both
    axes, so the step from one row of the stored patch to the next is larger than a step within a row. The number of
    values between large steps reveals the layout. Random weights have no such pattern and are accepted.
    """
    rows, columns = config.patch_freq, config.patch_time
    name = "audio.encoder.vit.embeds.proj.weight"
    if tensors[name].shape[1] != rows * columns:
        return
    steps = tensors[name].float().diff(dim=1).square().mean(dim=0)
    ratios = []
    for length in (columns, rows):
        is_border = torch.arange(1, rows * columns) % length == 0
        ratios.append(steps[is_border].mean() / steps[~is_border].mean())
    now, before = ratios
    if before > 3 and before > 2 * now:
        raise ValueError(
            f"{tensors.origin} seems to store patches by frame and mel band, OpenCLIP's layout before 24 June 2026; "
            f"reorder embeds.proj.weight from (width, {columns}, {rows}) to (width, {rows}, {columns})"
        )


def save_open_clip(model: SupCLAPModel, processor: SupCLAPProcessor, folder: str | Path) -> None:
    """Save a model in OpenCLIP's format, with its tokenizer. It is the inverse of `supclap_from_open_clip`.

    The folder must be empty, or must not exist; it is written completely or not at all. If the model was loaded from a
    folder, the files on its origin and its training recordings are copied.

    Raises:
        ValueError: OpenCLIP has no such model or front end, or the folder is not empty.
    """
    config: Any = model.config
    audio, text = config.audio_config, config.text_config
    kinds = (audio.model_type, text.model_type)
    if kinds != (NaFlexConfig.model_type, ModernTextConfig.model_type):
        raise ValueError(f"OpenCLIP's format is written for CLAP2's towers (naflex, modern_text), not {kinds}")
    _refuse_settings(config, _MODEL_ONLY)
    _refuse_settings(audio, _TOWER_ONLY)
    _refuse_settings(processor, _PROCESSOR_ONLY)

    audio_cfg = {"model_type": "naflexvit", "in_chans": 1, "rope_type": "axial"}
    audio_cfg |= _get_fields(processor.feature_extractor, _MEL_DEFAULTS)
    front_end = extractor_from_audio_cfg(audio_cfg).to_dict()
    del front_end["chunk_length"]
    _refuse_settings(processor.feature_extractor, {name: (value,) for name, value in front_end.items()})
    audio_cfg |= _get_fields(audio, _PATCH_DEFAULTS)
    audio_cfg |= {"naflexvit_cfg": _get_fields(audio, _VIT_DEFAULTS), "proj_act": config.projection_hidden_act}
    text_cfg = {"text_arch": "modern", "pos_embed": "rope", "variable_text": True}
    text_cfg |= _get_fields(text, _TEXT_DEFAULTS)
    text_cfg["context_length"] = min(text_cfg["context_length"], processor.tokenizer.model_max_length)
    text_cfg |= {
        "proj_bias": config.text_projection_type == "linear_bias",
        **get_tokenizer_fields(processor.tokenizer),
    }

    model_cfg = {"embed_dim": config.projection_dim, "audio_cfg": audio_cfg, "text_cfg": text_cfg}
    if model.logit_bias is not None:
        model_cfg["init_logit_bias"] = config.logit_bias
    settings = json.dumps({"model_cfg": model_cfg, "preprocess_cfg": {}}, indent=2)
    with writing_folder(folder) as written:
        (written / OPEN_CLIP_CONFIG).write_text(settings, encoding="utf-8")
        save_file(open_clip_tensors(model), written / OPEN_CLIP_WEIGHTS[0])
        processor.tokenizer.save_pretrained(written)
        copy_origin(model, written)


def _refuse_settings(part: Any, only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for an attribute that does not have one of the values which OpenCLIP's format implies."""
    for name, values in only.items():
        value = getattr(part, name, values[0])
        if value not in values:
            implied = " or ".join(map(repr, values))
            raise ValueError(f"OpenCLIP's format implies {name}={implied}, and {type(part).__name__} has {value!r}")


def _get_fields(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes of a configuration under OpenCLIP's names."""
    fields = {}
    for name in names:
        fields[name] = getattr(config, _OUR_NAMES.get(name, name))
    return fields


def open_clip_tensors(model: SupCLAPModel) -> dict[str, torch.Tensor]:
    """Return the weights of a model with CLAP2's towers, under OpenCLIP's names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        for theirs, ours in {**_AUDIO_NAMES, **_TEXT_NAMES}.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        tensors[name] = value.reshape(()) if name.startswith("logit_") else value.contiguous()
    return tensors
