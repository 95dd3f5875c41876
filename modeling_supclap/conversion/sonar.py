"""SONAR's published layouts to `SonarTextModel` and back: fairseq2, legacy fairseq and the Hub's M2M100 encoder.

fairseq2 numbers the four control tokens as pad, unk, bos, eos; fairseq and the Hub as bos, pad, eos, unk. Going from
one to the other therefore exchanges rows of the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import M2M100Config
from transformers.initialization import no_init_weights

from ..configuration_supclap import SONAR_TEXT_CONFIG
from ..modeling_sonar import SonarTextModel
from .tensors import Tensors, count_layers, fill_exactly, rename_all, shape_of

EMBEDDING = "embed_tokens.weight"
FAIRSEQ2_EMBEDDING = "encoder_frontend.embed.weight"
# What a layer of fairseq2 calls differently; all else keeps its name.
FAIRSEQ2_LAYER_NAMES = {
    "self_attn.output_proj.": "self_attn.out_proj.",
    "ffn.inner_proj.": "fc1.",
    "ffn.output_proj.": "fc2.",
    "ffn_layer_norm.": "final_layer_norm.",
}
# Row i of the Hub's embedding is this row of fairseq2's, and the other way round.
FROM_FAIRSEQ2_ROWS = (2, 0, 3, 1)
TO_FAIRSEQ2_ROWS = (1, 3, 0, 2)
# Of legacy fairseq: the number of its format, and a device marker of the sinusoids, which are computed.
LEGACY_CONSTANTS = ("version", "embed_positions._float_tensor")
# SONAR has 16 heads at a width of 1024.
HEAD_DIM = 64


def sonar_from_fairseq2(tensors: Tensors, source: str, config: M2M100Config | None = None) -> SonarTextModel:
    """The encoder in Meta's `sonar_text_encoder.pt` (387 tensors at 24 layers).

    Args:
        tensors: all of the file's.
        source: what they come from, for the message of an error.
        config: shape of the encoder; None reads it off the tensors, with heads that are 64 wide.

    Returns:
        The encoder in float32, in evaluation mode.

    Raises:
        ValueError: the file is of another layout.
    """
    renamed = rename_all(tensors, _from_fairseq2_name, source)
    shape_of(renamed, EMBEDDING, 2, source)
    renamed[EMBEDDING] = _exchange_rows(renamed[EMBEDDING], FROM_FAIRSEQ2_ROWS)
    return _fill(renamed, source, config)


def sonar_from_legacy(
    tensors: Tensors, source: str, config: M2M100Config | None = None
) -> tuple[SonarTextModel, dict[str, torch.Tensor]]:
    """The encoder in a file of fairseq 1: the Hub's names and order of rows, and two constants.

    Args:
        tensors: all of the file's, the embedding among them.
        source: what they come from, for the message of an error.
        config: as for `sonar_from_fairseq2`.

    Returns:
        The encoder in float32, in evaluation mode, and the constants that it has no place for.

    Raises:
        ValueError: the file is of another layout.
    """
    aside = {name: tensors[name] for name in LEGACY_CONSTANTS if name in tensors}
    return _fill({name: tensors[name] for name in tensors.keys() - aside.keys()}, source, config), aside


def sonar_from_hub(tensors: Tensors, source: str, config: Mapping[str, Any] | None = None) -> SonarTextModel:
    """The encoder in a checkpoint of transformers' `M2M100Encoder` (387 tensors at 24 layers), or below `encoder.`.

    Args:
        tensors: all of the checkpoint's.
        source: what they come from, for the message of an error.
        config: its `config.json`; None or empty reads the shape of the encoder off the tensors.

    Returns:
        The encoder in float32, in evaluation mode.

    Raises:
        ValueError: the checkpoint is of another layout, or the configuration is not its own.
    """
    fields = dict(config or {})
    if fields and (kind := fields.pop("model_type", None)) != M2M100Config.model_type:
        raise ValueError(f"{source} has a config.json of {kind!r} beside weights of an M2M100 encoder")
    renamed = rename_all(tensors, lambda name: name.removeprefix("encoder."), source)
    return _fill(renamed, source, M2M100Config(**fields) if fields else None)


def fairseq2_from_sonar(model: SonarTextModel) -> dict[str, torch.Tensor]:
    """The way back to fairseq2's layout.

    Args:
        model: the encoder.
    """
    tensors = {_to_fairseq2_name(name): value.clone() for name, value in model.state_dict().items()}
    tensors[FAIRSEQ2_EMBEDDING] = _exchange_rows(tensors[FAIRSEQ2_EMBEDDING], TO_FAIRSEQ2_ROWS)
    return tensors


def _from_fairseq2_name(name: str) -> str:
    if name == FAIRSEQ2_EMBEDDING:
        return EMBEDDING
    if not (layer := re.match(r"encoder\.(layers\.\d+\.)(.+)", name)):
        return name
    for theirs, ours in FAIRSEQ2_LAYER_NAMES.items():
        if layer[2].startswith(theirs):
            return layer[1] + ours + layer[2].removeprefix(theirs)
    return layer[1] + layer[2]


def _to_fairseq2_name(name: str) -> str:
    if name == EMBEDDING:
        return FAIRSEQ2_EMBEDDING
    if not (layer := re.match(r"(layers\.\d+\.)(.+)", name)):
        return name
    for theirs, ours in FAIRSEQ2_LAYER_NAMES.items():
        if layer[2].startswith(ours):
            return f"encoder.{layer[1]}{theirs}{layer[2].removeprefix(ours)}"
    return f"encoder.{name}"


def _exchange_rows(embedding: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """A copy of the embedding with these as its first rows."""
    exchanged = embedding.clone()
    exchanged[: len(rows)] = embedding[list(rows)]
    return exchanged


def _fill(encoder: Tensors, source: str, config: M2M100Config | None) -> SonarTextModel:
    with no_init_weights():
        model = SonarTextModel(config or _config_from_shapes(encoder, source))
    fill_exactly(model, encoder, source)
    return model.eval()


def _config_from_shapes(encoder: Tensors, source: str) -> M2M100Config:
    vocabulary, width = shape_of(encoder, EMBEDDING, 2, source)
    if width % HEAD_DIM:
        raise ValueError(f"{source} is {width} wide; SONAR's heads are {HEAD_DIM} wide. Give a folder with config.json")
    fields = {
        **SONAR_TEXT_CONFIG,
        "vocab_size": vocabulary,
        "d_model": width,
        "encoder_layers": count_layers(encoder, "layers."),
        "encoder_ffn_dim": shape_of(encoder, "layers.0.fc1.weight", 2, source)[0],
        "encoder_attention_heads": width // HEAD_DIM,
    }
    return M2M100Config(**{name: value for name, value in fields.items() if name != "model_type"})
