"""Convert CED and Dasheng checkpoints to `CEDModel`, from the authors' files or `mispeech/ced-*` on the Hub.

All these checkpoints use the same tensor names, except for a prefix and the batch norm. The authors' files also contain
the front-end constants (window and mel filters), which must match `CEDFeatureExtractor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..configuration_supclap import CEDConfig
from ..feature_extraction_ced import CEDFeatureExtractor, mel_filters, window_function
from ..modeling_ced import CEDModel
from .tensors import Tensors

FRONT_END = "CED expects 16 kHz, 512 samples and 64 HTK mel bands from 0 to 8,000 Hz"
ASIDE = {r"outputlayer\.": "tagging head", r"front_end\.": "front end (same as ours)"}
NAMES = ((r"^(encoder\.)?init_bn\.1\.", "init_bn."), (r"^encoder\.", ""))
# (number of time positions, frames per patch) -> frames per chunk.
TARGET_LENGTHS = {(63, 16): 1012, (252, 4): 1008}


def ced_from_tensors(tensors: Tensors, config: Mapping[str, Any] | None = None) -> CEDModel:
    """Build a `CEDModel` from the tensors of the authors' files, a Hub checkpoint or a saved `CEDModel`.

    Args:
        tensors: A model with 12 blocks has 161 tensors in the authors' files and 159 on the Hub.
        config: Content of `config.json`. If None or empty, the configuration is derived from the tensor shapes.

    Returns:
        The encoder (float32, evaluation mode).
    """
    _check_front_end(tensors)
    encoder = tensors.set_aside(ASIDE).rename(NAMES)
    own_config = _config_from_file(config, tensors.origin) if config else _config_from_shapes(encoder)
    return encoder.build(CEDModel, own_config)


def _check_front_end(tensors: Tensors) -> None:
    """Raise ValueError if the checkpoint contains front-end constants that differ from ours."""
    ours = CEDFeatureExtractor()
    filters = mel_filters(ours.n_fft, ours.f_min, ours.f_max, ours.feature_size, ours.sampling_rate)
    window = window_function(ours.n_fft, ours.win_size)
    expected = {"front_end.0.spectrogram.window": window, "front_end.0.mel_scale.fb": filters}

    names = {name for name in tensors if name.startswith("front_end.")}
    if names - expected.keys():
        raise ValueError(f"{tensors.origin} has front-end tensors {sorted(names)}; expected {sorted(expected)}")
    for name, value in expected.items() if names else ():
        tensors.check_constant(name, value, FRONT_END)


def _config_from_file(config: Mapping[str, Any], origin: str) -> CEDConfig:
    fields = dict(config)
    kind = fields.pop("model_type", None)
    if kind not in ("ced", "dasheng"):
        raise ValueError(f"{origin} has weights of CED, but its config.json has model_type {kind!r}")

    fields.pop("auto_map", None)
    fields |= fields.pop("encoder_kwargs", {})  # Dasheng stores the encoder sizes here
    return CEDConfig(**fields)


def _config_from_shapes(encoder: Tensors) -> CEDConfig:
    width, _, *patch = encoder["patch_embed.proj.weight"].shape
    columns = encoder["time_pos_embed"].shape[3]
    if (columns, patch[1]) not in TARGET_LENGTHS:
        lengths = f"{columns} time positions and {patch[1]} frames per patch"
        raise ValueError(f"{encoder.origin} has {lengths}; give a folder with a config.json that sets target_length")

    inner = encoder["blocks.0.mlp.fc1.weight"].shape[0]
    return CEDConfig(
        embed_dim=width,
        num_heads=encoder.count_heads(width, 80 if width == 1280 else 64),  # Dasheng 0.6B has 16 heads
        depth=encoder.count_layers("blocks."),
        mlp_ratio=inner / width,
        qkv_bias="blocks.0.attn.qkv.bias" in encoder,
        patch_size=patch[0] if patch[0] == patch[1] else patch,
        target_length=TARGET_LENGTHS[columns, patch[1]],
    )
