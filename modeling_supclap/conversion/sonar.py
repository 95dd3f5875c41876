"""Convert SONAR to `SonarTextModel`, from a fairseq2 file, a legacy fairseq file or an M2M100 encoder on the Hub.

The order of the control tokens is pad, unk, bos, eos in fairseq2, and bos, pad, eos, unk in fairseq and on the Hub.
Therefore the first four embedding rows of a fairseq2 file are permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import M2M100Config

from ..configuration_supclap import SONAR_TEXT_CONFIG
from ..modeling_sonar import SonarTextModel
from .tensors import Tensors

EMBEDDING = "embed_tokens.weight"
FAIRSEQ2_EMBEDDING = "encoder_frontend.embed.weight"
# Rules to rename fairseq2's tensors. The last rule only removes the prefix.
FAIRSEQ2_NAMES = (
    (r"^encoder_frontend\.embed\.", "embed_tokens."),
    (r"^encoder\.(layers\.\d+)\.self_attn\.output_proj\.", r"\1.self_attn.out_proj."),
    (r"^encoder\.(layers\.\d+)\.ffn\.inner_proj\.", r"\1.fc1."),
    (r"^encoder\.(layers\.\d+)\.ffn\.output_proj\.", r"\1.fc2."),
    (r"^encoder\.(layers\.\d+)\.ffn_layer_norm\.", r"\1.final_layer_norm."),
    (r"^encoder\.", ""),
)
# Row i of the Hub embedding is row FROM_FAIRSEQ2_ROWS[i] of the fairseq2 embedding.
FROM_FAIRSEQ2_ROWS = [2, 0, 3, 1]
# The format version, and a placeholder for the sinusoidal positions. The model computes these positions itself.
ASIDE = {r"(version|embed_positions\._float_tensor)$": "fairseq constants"}


def sonar_from_tensors(tensors: Tensors, config: Mapping[str, Any] | None = None) -> SonarTextModel:
    """Build a `SonarTextModel` from Meta's `sonar_text_encoder.pt` or a transformers `M2M100Encoder` checkpoint.

    `config` is the content of `config.json`. If it is None or empty, the configuration is derived from the tensor
    shapes.

    Returns:
        The encoder (float32, evaluation mode).
    """
    fields = dict(config or {})
    if fields and (kind := fields.pop("model_type", None)) != M2M100Config.model_type:
        raise ValueError(
            f"{tensors.origin} has weights of an M2M100 encoder, but its config.json has model_type {kind!r}"
        )

    is_fairseq2 = FAIRSEQ2_EMBEDDING in tensors
    used = tensors.set_aside({} if is_fairseq2 else ASIDE)
    encoder = used.rename(FAIRSEQ2_NAMES if is_fairseq2 else FAIRSEQ2_NAMES[-1:])
    if is_fairseq2:
        embedding = encoder[EMBEDDING]
        encoder[EMBEDDING] = torch.cat([embedding[FROM_FAIRSEQ2_ROWS], embedding[4:]])

    own_config = M2M100Config(**fields) if fields else _config_from_shapes(encoder)
    return encoder.build(SonarTextModel, own_config)


def _config_from_shapes(encoder: Tensors) -> M2M100Config:
    vocabulary, width = encoder[EMBEDDING].shape
    fields = {
        **SONAR_TEXT_CONFIG,
        "vocab_size": vocabulary,
        "d_model": width,
        "encoder_layers": encoder.count_layers("layers."),
        "encoder_ffn_dim": encoder["layers.0.fc1.weight"].shape[0],
        "encoder_attention_heads": encoder.count_heads(width),
    }
    fields.pop("model_type")
    return M2M100Config(**fields)
