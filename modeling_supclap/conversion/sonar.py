"""SONAR's published layouts to `SonarTextModel`: fairseq2, legacy fairseq and the Hub's M2M100 encoder.

fairseq2 numbers the four control tokens as pad, unk, bos, eos; fairseq and the Hub as bos, pad, eos, unk. Going from
one to the other therefore exchanges rows of the embedding.
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
# What fairseq2 calls differently; all else keeps its name, without the prefix.
FAIRSEQ2_NAMES = (
    (r"^encoder_frontend\.embed\.", "embed_tokens."),
    (r"^encoder\.(layers\.\d+)\.self_attn\.output_proj\.", r"\1.self_attn.out_proj."),
    (r"^encoder\.(layers\.\d+)\.ffn\.inner_proj\.", r"\1.fc1."),
    (r"^encoder\.(layers\.\d+)\.ffn\.output_proj\.", r"\1.fc2."),
    (r"^encoder\.(layers\.\d+)\.ffn_layer_norm\.", r"\1.final_layer_norm."),
    (r"^encoder\.", ""),
)
# Row i of the Hub's embedding is this row of fairseq2's.
FROM_FAIRSEQ2_ROWS = [2, 0, 3, 1]
# The number of the format, and a device marker of the sinusoids, which are computed.
ASIDE = {r"(version|embed_positions\._float_tensor)$": "constants of fairseq"}
# SONAR has 16 heads at a width of 1024.
HEAD_DIM = 64


def sonar_from_tensors(
    tensors: Mapping[str, torch.Tensor], origin: str, config: Mapping[str, Any] | None = None
) -> tuple[SonarTextModel, dict[str, int]]:
    """The encoder in Meta's `sonar_text_encoder.pt` or in a checkpoint of transformers' `M2M100Encoder`.

    Args:
        tensors: All of the checkpoint's: 387 at 24 layers.
        origin: What they come from, for the message of an error.
        config: The `config.json` beside them; None or empty reads the shape of the encoder off the tensors, with heads
            that are 64 wide.

    Returns:
        The encoder in float32, in evaluation mode, and how many tensors it has no place for, by what they were.

    Raises:
        ValueError: The checkpoint is of another layout, or the configuration is not its own.
    """
    fields = dict(config or {})
    if fields and (kind := fields.pop("model_type", None)) != M2M100Config.model_type:
        raise ValueError(f"{origin} has a config.json of {kind!r} beside weights of an M2M100 encoder")

    whole = Tensors(tensors, origin)
    if FAIRSEQ2_EMBEDDING in whole:
        aside: dict[str, int] = {}
        encoder = whole.rename(FAIRSEQ2_NAMES)
        encoder.get_shape(EMBEDDING, 2)
        embedding = encoder[EMBEDDING].clone()
        embedding[:4] = encoder[EMBEDDING][FROM_FAIRSEQ2_ROWS]
        encoder[EMBEDDING] = embedding
    else:
        kept, aside = whole.set_aside(ASIDE)
        encoder = kept.rename(((r"^encoder\.", ""),))

    own_config = M2M100Config(**fields) if fields else _config_from_shapes(encoder)
    return encoder.build(SonarTextModel, own_config), aside


def _config_from_shapes(encoder: Tensors) -> M2M100Config:
    vocabulary, width = encoder.get_shape(EMBEDDING, 2)
    fields = {
        **SONAR_TEXT_CONFIG,
        "vocab_size": vocabulary,
        "d_model": width,
        "encoder_layers": encoder.count_layers("layers."),
        "encoder_ffn_dim": encoder.get_shape("layers.0.fc1.weight", 2)[0],
        "encoder_attention_heads": encoder.count_heads(width, HEAD_DIM),
    }
    fields.pop("model_type")
    return M2M100Config(**fields)
