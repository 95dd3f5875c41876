"""Read and write CLAP2 and its precursors in OpenCLIP's format.

A folder contains `open_clip_config.json` and `open_clip_model.safetensors`.

The code follows the published format of OpenCLIP 4.2.0.dev0 and was compared with it on random weights. It has not been
run with LAION's published weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from ..configuration_supclap import ModernTextConfig, NaFlexConfig, SupCLAPConfig
from ..feature_extraction_ced import CEDFeatureExtractor
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from ..strict_loading import apply_umask, find_file
from .files import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, is_open_clip_audio, read_checkpoint
from .folders import copy_origin, writing_folder
from .tensors import Tensors

# Training clips of CLAP2 last at most 30 s, and the cost of attention grows with the square of the length.
CHUNK_SECONDS = 30
# GPT-2's byte-level BPE: tiktoken's "r50k_base" has the same ids.
GPT2 = "openai-community/gpt2"

# Fields of `audio_cfg` -> fields of CEDFeatureExtractor.
_MEL_FIELDS = {
    "sample_rate": "sampling_rate",
    "mel_bins": "feature_size",
    "window_size": "win_size",
    "hop_size": "hop_size",
    "fmin": "f_min",
    "fmax": "f_max",
}
_MEL_DEFAULTS = {
    "sample_rate": 48000,
    "mel_bins": 64,
    "window_size": 1024,
    "hop_size": 480,
    "fmin": 50,
    "fmax": 14000,
}
# Fields of `audio_cfg` and of `naflexvit_cfg` -> fields of NaFlexConfig, with the same names.
_PATCH_FIELDS = {"patch_freq": "patch_freq", "patch_time": "patch_time", "patch_pad_mode": "patch_pad_mode"}
_OWN_FIELDS = {"model_type", "n_mels", "layer_norm_eps", "initializer_range", *_PATCH_FIELDS}
_VIT_NAMES = sorted(NaFlexConfig.__annotations__.keys() - _OWN_FIELDS)
_VIT_FIELDS = dict(zip(_VIT_NAMES, _VIT_NAMES, strict=True))
# Fields of `text_cfg` -> fields of ModernTextConfig.
_TEXT_FIELDS = {
    "context_length": "max_position_embeddings",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "pad_id": "pad_token_id",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
}
# Fields of `text_cfg` with the same names in ModernTextConfig.
_SAME_TEXT_FIELDS = (
    *(
        "vocab_size",
        "mlp_ratio",
        "mlp_type",
        "pool_type",
        "attention_mode",
        "norm_type",
        "norm_eps",
        "norm_placement",
    ),
    *(
        "pre_norm",
        "qk_norm",
        "attn_gated",
        "attention_bias",
        "mlp_bias",
        "gate_bias",
        "value_residual",
        "reg_tokens",
    ),
    *("ls_init_value", "rope_temperature"),
)
_TEXT_FIELDS |= dict(zip(_SAME_TEXT_FIELDS, _SAME_TEXT_FIELDS, strict=True))
# These fields change the embeddings but no shape, and OpenCLIP's defaults may change: they must be in the file.
_TEXT_REQUIRED = ("heads", "pool_type", "attention_mode", "mlp_type", "norm_type", "norm_eps")

# Other fields with the only values that are supported.
_AUDIO_FIXED = {"model_type": "naflexvit", "in_chans": 1, "rope_type": "axial", "enable_fusion": False}
_VIT_FIXED: dict[str, Any] = {
    "act_layer": None,
    "attn_layer": None,
    "attn_type": "standard",
    "block_fn": None,
    "embed_norm_layer": None,
    "embed_proj_type": "linear",
    "enable_patch_interpolator": False,
    "fc_norm": None,
    "final_norm": True,
    "input_norm_layer": None,
    "mlp_layer": None,
    "num_kv_heads": None,
    "pos_embed": "none",
    "proj_bias": True,
    "qkv_fused": True,
    "rope_grid_indexing": "ij",
    "rope_grid_offset": 0.0,
    "rope_mrope_section": None,
    "rope_ref_feat_shape": None,
    "rope_type": "axial",
    "swiglu_align_to": 0,
}
_TEXT_FIXED: dict[str, Any] = {"text_arch": "modern", "pos_embed": "rope"}
# Fields without an effect on embeddings: of HTSAT, of training, and of OpenCLIP's own preprocessing.
_AUDIO_IGNORED = {
    "audio_length", "audio_seq_len", "class_num", "clip_samples", "fusion_type", "model_name", "naflexvit_cfg",
    "pre_norm", "pretrained", "proj_act", "training_head",
}  # fmt: skip
_VIT_IGNORED = {
    "attn_drop_rate", "drop_path_rate", "drop_rate", "dynamic_img_pad", "fix_init", "patch_drop_rate",
    "patchify_channels_last", "pos_drop_rate", "pos_embed_align_corners", "pos_embed_antialias",
    "pos_embed_ar_preserving", "pos_embed_grid_size", "pos_embed_interp_mode", "pos_embed_use_grid_sample",
    "proj_drop_rate", "rope_jitter_coords", "rope_rescale_coords", "rope_shift_coords", "use_key_only_attn_mask",
    "weight_init", "zero_init_residual",
}  # fmt: skip
_TEXT_IGNORED = {
    "hf_tokenizer_name", "proj_bias", "tiktoken_name", "tokenizer_kwargs", "tokenizer_type", "variable_text",
}  # fmt: skip
_HF_FIELDS = {
    "hf_model_name",
    "hf_pooler_type",
    "hf_proj_type",
    "hf_model_pretrained",
    "context_length",
    "vocab_size",
}
_POOLERS = {"mean_pooler": "mean", "cls_last_hidden_state_pooler": "cls", "cls_pooler": "pooler"}
_TOP_IGNORED = {
    "embed_dim", "audio_cfg", "text_cfg", "custom_text", "init_logit_bias", "init_logit_scale", "model_type",
    "nonscalar_logit_scale", "output_dict",
}  # fmt: skip

AUDIO_NAMES = (
    (r"^audio\.encoder\.vit\.", "audio_model."),
    (r"^audio\.proj\.0\.", "audio_projection.linear1."),
    (r"^audio\.proj\.2\.", "audio_projection.linear2."),
)
TEXT_NAMES = ((r"^text\.text_projection\.", "text_projection.linear1."), (r"^text\.", "text_model."))
HF_TEXT_NAMES = (
    (r"^text\.transformer\.", "text_model."),
    (r"^text\.proj\.weight", "text_projection.linear1.weight"),
    (r"^text\.proj\.0\.", "text_dense.0.linear."),
    (r"^text\.proj\.2\.", "text_projection.linear1."),
)


def is_open_clip(name: str) -> bool:
    """Return whether a folder or Hub repository contains an audio model in OpenCLIP's format."""
    path = find_file(name, OPEN_CLIP_CONFIG)
    return path is not None and is_open_clip_audio(Path(path).parent)


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
    model, extractor = supclap_from_open_clip(checkpoint.tensors, checkpoint.config, checkpoint.origin)
    # the model card names the source of each tower
    for part in (model, model.audio_model, model.text_model):
        part.name_or_path = part.config.name_or_path = str(name)
    words = load_open_clip_tokenizer(str(checkpoint.folder), checkpoint.config, tokenizer)
    prepare_open_clip_tokenizer(words, model.config.text_config)
    return model, SupCLAPProcessor(extractor, words)


def load_open_clip_processor(name: str | Path) -> SupCLAPProcessor:
    """Build the processor of an audio model in OpenCLIP's format, without loading its weights."""
    path = Path(str(cached_file(name, OPEN_CLIP_CONFIG)))
    settings = json.loads(path.read_text(encoding="utf-8"))
    model_cfg = _get_model_cfg(settings, str(name))
    words = load_open_clip_tokenizer(str(name), settings)
    text_cfg = model_cfg["text_cfg"]
    if not text_cfg.get("hf_model_name"):
        prepare_open_clip_tokenizer(words, _read_text(text_cfg, str(name))[0])
    return SupCLAPProcessor(_read_audio(model_cfg["audio_cfg"], str(name))[1], words)


def supclap_from_open_clip(
    tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any], origin: str
) -> tuple[SupCLAPModel, CEDFeatureExtractor]:
    """Convert the tensors of an OpenCLIP audio model to a `SupCLAPModel`, and build its feature extractor.

    Args:
        settings: Content of `open_clip_config.json`.
        origin: Name of the checkpoint for error messages.

    Raises:
        ValueError: A field of the settings is unknown or has an unsupported value, or the tensors do not fit.
    """
    model_cfg = _get_model_cfg(settings, origin)
    audio_cfg, text_cfg = model_cfg["audio_cfg"], model_cfg["text_cfg"]
    audio_config, extractor = _read_audio(audio_cfg, origin)
    whole = Tensors(tensors, origin)
    _refuse_old_patches(whole, audio_config)
    is_hf = bool(text_cfg.get("hf_model_name"))
    text_config, options = (_read_hf_text if is_hf else _read_text)(text_cfg, origin)
    # hf_proj_type "mlp": linear, GELU, linear, without biases
    if is_hf and "text.proj.0.weight" in whole:
        inner = whole.get_shape("text.proj.0.weight", 2)[0]
        options["text_dense"] = [{"out_features": inner, "activation": "gelu", "bias": False}]

    renamed = whole.rename([*AUDIO_NAMES, *(HF_TEXT_NAMES if is_hf else TEXT_NAMES)])
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
    model_cfg = settings.get("model_cfg")
    if not isinstance(model_cfg, Mapping) or not {"audio_cfg", "text_cfg", "embed_dim"} <= model_cfg.keys():
        raise ValueError(
            f"{origin} has no {OPEN_CLIP_CONFIG} with audio_cfg, text_cfg and embed_dim; pass the whole folder"
        )
    _refuse_fields(model_cfg, {}, _TOP_IGNORED, f"{origin}: model_cfg")
    return model_cfg


def _read_audio(audio_cfg: Mapping[str, Any], origin: str) -> tuple[NaFlexConfig, CEDFeatureExtractor]:
    """Read `audio_cfg` with its `naflexvit_cfg`."""
    vit_cfg = audio_cfg.get("naflexvit_cfg") or {}
    known = {*_AUDIO_IGNORED, *_MEL_FIELDS, *_PATCH_FIELDS}
    _refuse_fields(audio_cfg, _AUDIO_FIXED, known, f"{origin}: audio_cfg")
    _refuse_fields(vit_cfg, _VIT_FIXED, {*_VIT_IGNORED, *_VIT_FIELDS}, f"{origin}: naflexvit_cfg")

    fields = _to_our_names(vit_cfg, _VIT_FIELDS) | _to_our_names(audio_cfg, _PATCH_FIELDS)
    extractor = extractor_from_audio_cfg(audio_cfg)
    return NaFlexConfig(n_mels=extractor.feature_size, **fields), extractor


def extractor_from_audio_cfg(audio_cfg: Mapping[str, Any]) -> CEDFeatureExtractor:
    """Build the feature extractor for the mel fields of an `audio_cfg`. Missing fields have OpenCLIP's defaults."""
    mel = {**_MEL_DEFAULTS, **audio_cfg}
    return CEDFeatureExtractor(
        n_fft=mel["window_size"],
        top_db=1000.0,  # no limit: the floor of the power is 110 dB below full scale
        min_frames=1,
        pad_to_samples=mel["window_size"],
        chunk_length=CHUNK_SECONDS,
        **_to_our_names(mel, _MEL_FIELDS),
    )


def _read_text(text_cfg: Mapping[str, Any], origin: str) -> tuple[ModernTextConfig, dict[str, Any]]:
    """Read the `text_cfg` of a text tower with `text_arch = "modern"`."""
    where = f"{origin}: text_cfg"
    if "text_arch" not in text_cfg:
        raise ValueError(
            f"{where} has neither text_arch nor hf_model_name: CLIP's own text tower is not supported"
        )
    _refuse_fields(text_cfg, _TEXT_FIXED, {*_TEXT_IGNORED, *_TEXT_FIELDS}, where)
    if lacking := [name for name in _TEXT_REQUIRED if name not in text_cfg]:
        raise ValueError(
            f"{where} lacks {', '.join(lacking)}; add the values with which the model was trained"
        )

    fields = _to_our_names(text_cfg, _TEXT_FIELDS)
    if fields["pool_type"] == "argmax":
        fields["pool_type"] = "eos"
    projection = "linear_bias" if text_cfg.get("proj_bias") else "linear"
    return ModernTextConfig(**fields), {"text_pooling": "pooler", "text_projection_type": projection}


def _read_hf_text(text_cfg: Mapping[str, Any], origin: str) -> tuple[Any, dict[str, Any]]:
    """Read the `text_cfg` of a text tower of transformers. Its configuration is loaded by `hf_model_name`."""
    where = f"{origin}: text_cfg"
    _refuse_fields(text_cfg, {}, {*_TEXT_IGNORED, *_HF_FIELDS, "pad_id", "bos_id", "eos_id"}, where)
    pooler = text_cfg.get("hf_pooler_type", "mean_pooler")
    if pooler not in _POOLERS:
        raise ValueError(f"{where} has hf_pooler_type={pooler!r}; supported are {', '.join(_POOLERS)}")
    options = {"text_pooling": _POOLERS[pooler], "text_projection_type": "linear"}
    return AutoConfig.from_pretrained(text_cfg["hf_model_name"]), options


def _to_our_names(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of OpenCLIP's settings that exist, under our names. `names` is `{their name: our name}`."""
    fields = {}
    for theirs, ours in names.items():
        if theirs in settings:
            fields[ours] = settings[theirs]
    return fields


def _to_their_names(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return attributes of a configuration under OpenCLIP's names. `names` is `{their name: our name}`."""
    fields = {}
    for theirs, ours in names.items():
        fields[theirs] = getattr(config, ours)
    return fields


def _refuse_fields(fields: Mapping[str, Any], fixed: Mapping[str, Any], known: Any, where: str) -> None:
    """Raise ValueError for unknown fields that are set, and for known fields with an unsupported value."""
    for name, value in fields.items():
        if name in fixed:
            if value != fixed[name]:
                raise ValueError(f"{where} has {name}={value!r}; only {fixed[name]!r} is supported")
        elif name not in known and value not in (None, False, "", [], {}):
            raise ValueError(
                f"{where} has the unknown field {name}={value!r}, which may change the embeddings; convert this model "
                "with a newer version of this package, or report the field"
            )


def _refuse_old_patches(tensors: Tensors, config: NaFlexConfig) -> None:
    """Raise ValueError if the patch embedding has OpenCLIP's layout from before 24 June 2026.

    A patch is stored by mel band and frame, and was stored by frame and mel band. Trained weights are smooth along both
    axes, so the step from one row of the stored patch to the next is larger than a step within a row. The number of
    values between large steps reveals the layout. Random weights have no such pattern and are accepted.
    """
    rows, columns = config.patch_freq, config.patch_time
    weight = tensors["audio.encoder.vit.embeds.proj.weight"].float()
    steps = weight.diff(dim=1).square().mean(dim=0)
    if rows == columns or 1 in (rows, columns) or len(steps) != rows * columns - 1:
        return
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


def prepare_open_clip_tokenizer(tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Add BOS, EOS and PAD to GPT-2's tokenizer, and check the ids of a tokenizer that has them, in place.

    Raises:
        ValueError: The special tokens or the vocabulary differ from `config`, the configuration of the text tower.
    """
    if config.model_type != ModernTextConfig.model_type:
        return
    if len(tokenizer) == config.vocab_size - 3 and not hasattr(tokenizer, "src_lang"):
        _add_special_tokens(tokenizer)
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    tokenizer.padding_side = "right"

    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    expected = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    if ids != expected or len(tokenizer) != config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the ids {ids} for BOS, EOS and PAD, the text tower "
            f"{config.vocab_size} and {expected}; pass the tokenizer of the checkpoint, or {GPT2}"
        )
    probe = tokenizer("a")["input_ids"]
    if (probe[0], probe[-1]) != expected[:2]:
        raise ValueError(
            f"the tokenizer encodes 'a' as {probe}, without BOS {expected[0]} and EOS {expected[1]}"
        )


def _add_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the three special tokens in the order of OpenCLIP, and put BOS and EOS around each text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"})
    names = ("<bos>", "<eos>")
    marks = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=marks)


def load_open_clip_tokenizer(
    folder: str, settings: Mapping[str, Any], name: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer `name`, or that of an OpenCLIP checkpoint.

    Without `name`, it is the tokenizer in the folder or Hub repository, else `hf_tokenizer_name`, else GPT-2's for
    tiktoken's r50k_base.

    Raises:
        ValueError: The tokenizer is unknown, or OpenCLIP changes captions before tokenization.
    """
    text_cfg = settings["model_cfg"]["text_cfg"]
    options = text_cfg.get("tokenizer_kwargs") or {}
    neutral = {"add_bos": True, "add_eos": True, "clean": None}
    for option, value in options.items():
        if value not in (neutral.get(option), None, ""):
            raise ValueError(f"{folder}: tokenizer_kwargs has {option}={value!r}, which is not supported")

    own = find_file(folder, "tokenizer.json")
    has_config = find_file(folder, "tokenizer_config.json") is not None
    if name is None and own is not None and not has_config:
        return PreTrainedTokenizerFast(tokenizer_file=own)
    names = [
        name,
        folder if has_config else None,
        text_cfg.get("hf_tokenizer_name"),
        text_cfg.get("hf_model_name"),
    ]
    names.append(GPT2 if text_cfg.get("tiktoken_name") == "r50k_base" else None)
    for candidate in names:
        if candidate is not None:
            return AutoTokenizer.from_pretrained(candidate)
    kind = text_cfg.get("tiktoken_name") or text_cfg.get("tokenizer_type")
    raise ValueError(
        f"{folder} has no tokenizer.json, and its tokenizer {kind!r} is unknown; pass --tokenizer"
    )


def save_open_clip(model: SupCLAPModel, processor: SupCLAPProcessor, folder: str | Path) -> None:
    """Save a model in OpenCLIP's format, with its tokenizer. It is the inverse of `supclap_from_open_clip`.

    The folder must be empty, or must not exist; it is written completely or not at all. If the model was loaded from a
    folder, the files on its origin and its training recordings are copied.

    Raises:
        ValueError: The towers are not those of CLAP2, or the folder is not empty.
    """
    config: Any = model.config
    kinds = (config.audio_config.model_type, config.text_config.model_type)
    if kinds != (NaFlexConfig.model_type, ModernTextConfig.model_type):
        raise ValueError(
            f"OpenCLIP's format is written for CLAP2's towers (naflex, modern_text), not {kinds}"
        )

    audio, text, extractor = config.audio_config, config.text_config, processor.feature_extractor
    audio_cfg = _to_their_names(extractor, _MEL_FIELDS) | _to_their_names(audio, _PATCH_FIELDS)
    audio_cfg |= {**_AUDIO_FIXED, "proj_act": config.projection_hidden_act}
    del audio_cfg["enable_fusion"]
    audio_cfg["naflexvit_cfg"] = _to_their_names(audio, _VIT_FIELDS)
    text_cfg = _to_their_names(text, _TEXT_FIELDS)
    has_bias = config.text_projection_type == "linear_bias"
    text_cfg |= {**_TEXT_FIXED, "variable_text": True, "proj_bias": has_bias}
    text_cfg |= {"tokenizer_type": "tiktoken", "tiktoken_name": "r50k_base"}

    model_cfg = {"embed_dim": config.projection_dim, "audio_cfg": audio_cfg, "text_cfg": text_cfg}
    settings = json.dumps({"model_cfg": model_cfg, "preprocess_cfg": {}}, indent=2)
    with writing_folder(folder) as written:
        (written / OPEN_CLIP_CONFIG).write_text(settings, encoding="utf-8")
        save_file(open_clip_tensors(model), written / OPEN_CLIP_WEIGHTS[0])
        apply_umask(written)
        processor.tokenizer.save_pretrained(written)
        copy_origin(model, written)


def compare_with_open_clip(
    folder: str | Path, model: SupCLAPModel, processor: SupCLAPProcessor
) -> dict[str, float]:
    """Embed a tone and a text with OpenCLIP and with our model. Return the cosine of each pair.

    Args:
        folder: Folder in OpenCLIP's format, from which the model was loaded.

    Raises:
        ImportError: `open_clip_torch` is not installed, or older than 4.2.
    """
    import open_clip

    rate_hz = processor.feature_extractor.sampling_rate
    wave = torch.sin(2 * torch.pi * 440 * torch.arange(2 * rate_hz) / rate_hz)
    theirs, _, preprocess = open_clip.create_model_and_transforms(
        f"local-dir:{folder}", require_pretrained=True
    )
    clip = preprocess(max_seq_len=None)((wave.unsqueeze(0), rate_hz))
    inputs = processor(audio=wave.numpy(), sampling_rate=rate_hz, text="a high tone", return_tensors="pt")
    with torch.no_grad():
        ours = model(**inputs)
        batch = {key: value.unsqueeze(0) for key, value in clip.items()}
        audio = theirs.eval().encode_audio(batch, normalize=True)
        text = theirs.encode_text(inputs["input_ids"], normalize=True)
    return {
        "audio": float(torch.cosine_similarity(audio, ours.audio_embeds)),
        "text": float(torch.cosine_similarity(text, ours.text_embeds)),
    }


def open_clip_tensors(model: SupCLAPModel) -> dict[str, torch.Tensor]:
    """Return the weights of a model with CLAP2's towers, under OpenCLIP's names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        for ours, theirs in _NAMES_BACK:
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        tensors[name] = value.reshape(()) if name.startswith("logit_") else value.contiguous()
    return tensors


_NAMES_BACK = (
    ("audio_model.", "audio.encoder.vit."),
    ("audio_projection.linear1.", "audio.proj.0."),
    ("audio_projection.linear2.", "audio.proj.2."),
    ("text_projection.linear1.", "text.text_projection."),
    ("text_model.", "text."),
)
