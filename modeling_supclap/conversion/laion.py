"""LAION's own CLAP files (`lukewys/laion_clap`) to a transformers `ClapModel`, which `supclap_from_clap` then takes.

The files of HTSAT with RoBERTa are read. They hold more than a `ClapModel`: a tagging head, two transforms that no
embedding passes through, masks of the shifted windows, and the constants of a front end, which must be the one that
`laion_feature_extractor` computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel
from transformers.initialization import no_init_weights

from .ced import FRONT_END_TOLERANCE
from .tensors import Tensors, count_layers, fill_exactly, rename_all, shape_of

# Parts of names, and what a ClapModel calls them; the first that fits is taken.
NAMES = (
    (r"^text_branch\.", "text_model."),
    (r"^audio_branch\.bn0\.", "audio_model.audio_encoder.batch_norm."),
    (r"^audio_branch\.", "audio_model.audio_encoder."),
    (r"^(audio|text)_projection\.0\.", r"\1_projection.linear1."),
    (r"^(audio|text)_projection\.2\.", r"\1_projection.linear2."),
)
BLOCK_NAMES = (
    (r"(\.blocks\.\d+\.)norm1\.", r"\1layernorm_before."),
    (r"(\.blocks\.\d+\.)norm2\.", r"\1layernorm_after."),
    (r"(\.blocks\.\d+\.)attn\.proj\.", r"\1attention.output.dense."),
    (r"(\.blocks\.\d+\.)attn\.", r"\1attention.self."),
    (r"(\.blocks\.\d+\.)mlp\.fc1\.", r"\1intermediate.dense."),
    (r"(\.blocks\.\d+\.)mlp\.fc2\.", r"\1output.dense."),
)
# What no embedding depends on, as regular expressions, with the reason.
UNUSED = {
    r"audio_branch\.(tscam_conv|head)\.": "tagging head",
    r"(audio|text)_transform\.": "transforms behind the embeddings",
    r"audio_branch\.layers\.\d+\.blocks\.\d+\.attn_mask$": "masks, which are computed",
    r"audio_branch\.(spectrogram_extractor|logmel_extractor)\.": "front end",
    r"text_branch\.embeddings\.position_ids$": "numbers of the positions",
}
FILTERS = "audio_branch.logmel_extractor.melW"
# roberta-base has heads of this width and this epsilon, which no tensor shows.
TEXT_HEAD_DIM = 64
TEXT_LAYER_NORM_EPS = 1e-5
# Of HTSAT, in its published form.
SPEC_SIZE = 256
PATCH_SIZE = 4


def clap_from_laion(tensors: Tensors, source: str) -> tuple[ClapModel, dict[str, torch.Tensor]]:
    """The model in a file of LAION, its `module.` prefix taken off.

    Args:
        tensors: all of the file's state dict.
        source: what they come from, for the message of an error.

    Returns:
        The model in float32, in evaluation mode, and the tensors that it has no place for.

    Raises:
        ValueError: the file is of another layout (a PANN audio tower, another text tower), or was trained on another
            front end.
    """
    aside = {name: value for name, value in tensors.items() if any(re.match(each, name) for each in UNUSED)}
    kept = rename_all({name: tensors[name] for name in tensors.keys() - aside.keys()}, _our_name, source)
    _check_filters(aside, source)
    kept = _split_attention(kept)
    config: Any = _config_from_shapes(kept, source)
    positions = config.text_config.max_position_embeddings
    # Of the constants that transformers keeps beside the weights, LAION's files have no copy.
    kept["text_model.embeddings.position_ids"] = torch.arange(positions).unsqueeze(0)
    kept["text_model.embeddings.token_type_ids"] = torch.zeros(1, positions, dtype=torch.long)
    with no_init_weights():
        model = ClapModel(config)
    fill_exactly(model, kept, source)
    return model.eval(), aside


def laion_feature_extractor(fused: bool = False) -> ClapFeatureExtractor:
    """The front end of LAION's checkpoints: 10 s at 48 kHz, 64 mel bands from 50 to 14,000 Hz.

    Args:
        fused: whether the model has the fusion of long clips, which goes with other mel filters.
    """
    return ClapFeatureExtractor(frequency_min=50, frequency_max=14_000, truncation="fusion" if fused else "rand_trunc")


def reasons(set_aside: Tensors) -> Mapping[str, int]:
    """How many tensors were set aside for which reason."""
    counts = {why: sum(bool(re.match(each, name)) for name in set_aside) for each, why in UNUSED.items()}
    return {why: count for why, count in counts.items() if count}


def _our_name(name: str) -> str:
    for pattern, replacement in NAMES:
        if re.match(pattern, name):
            name = re.sub(pattern, replacement, name)
            break
    if not name.startswith("audio_model."):
        return name
    for pattern, replacement in BLOCK_NAMES:
        if re.search(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def _split_attention(tensors: Tensors) -> dict[str, torch.Tensor]:
    """HTSAT's fused projections in three; their rows are queries, keys, values in this order."""
    split: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if ".attention.self.qkv." not in name:
            split[name] = value
            continue
        for part, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
            split[name.replace(".qkv.", f".{part}.")] = rows
    return split


def _check_filters(set_aside: Tensors, source: str) -> None:
    expected = torch.from_numpy(laion_feature_extractor().mel_filters_slaney).float()
    seen = set_aside.get(FILTERS)
    if seen is None or seen.shape != expected.shape:
        shape = None if seen is None else tuple(seen.shape)
        raise ValueError(f"{source} has mel filters {FILTERS} of shape {shape}; LAION's have {tuple(expected.shape)}")
    # The filters of Slaney have unit area, so their peaks lie near 0.03.
    if not (error := (seen.float() - expected).abs().max() / expected.max()) <= FRONT_END_TOLERANCE:
        raise ValueError(
            f"{source}: its mel filters differ from LAION's by {error:.2g} of their maximum: it was trained on other "
            "spectrograms (48 kHz, 1024 samples, 64 Slaney mel bands from 50 to 14,000 Hz are LAION's)"
        )


def _config_from_shapes(tensors: Tensors, source: str) -> ClapConfig:
    return ClapConfig(
        audio_config=_audio_config(tensors, source),
        text_config=_text_config(tensors, source),
        projection_dim=shape_of(tensors, "audio_projection.linear1.weight", 2, source)[0],
    )


def _audio_config(tensors: Tensors, source: str) -> dict[str, Any]:
    encoder = "audio_model.audio_encoder."
    if f"{encoder}conv_block1.conv1.weight" in tensors:
        raise ValueError(
            f"{source} has the audio tower PANN (Cnn14), which transformers' CLAP does not have; only HTSAT"
        )
    width = shape_of(tensors, f"{encoder}patch_embed.proj.weight", 4, source)[0]
    stages = count_layers(tensors, f"{encoder}layers.")
    table = ".blocks.0.attention.self.relative_position_bias_table"
    heads = [shape_of(tensors, f"{encoder}layers.{stage}{table}", 2, source)[1] for stage in range(stages)]
    places = shape_of(tensors, f"{encoder}layers.0{table}", 2, source)[0]
    config: dict[str, Any] = {
        "patch_embeds_hidden_size": width,
        "hidden_size": width * 2 ** (stages - 1),
        "depths": [count_layers(tensors, f"{encoder}layers.{stage}.blocks.") for stage in range(stages)],
        "num_attention_heads": heads,
        "num_hidden_layers": stages,
        "num_mel_bins": shape_of(tensors, f"{encoder}batch_norm.weight", 1, source)[0],
        # (2 window - 1)^2 relative places
        "window_size": (math.isqrt(places) + 1) // 2,
        "spec_size": SPEC_SIZE,
        "patch_size": PATCH_SIZE,
        "enable_fusion": f"{encoder}patch_embed.mel_conv2d.weight" in tensors,
    }
    if config["enable_fusion"]:
        inner = shape_of(tensors, f"{encoder}patch_embed.fusion_model.local_att.0.weight", 4, source)[0]
        config |= {"fusion_type": "aff_2d", "aff_block_r": width // inner}
    return config


def _text_config(tensors: Tensors, source: str) -> dict[str, Any]:
    embeddings = "text_model.embeddings."
    vocabulary, width = shape_of(tensors, f"{embeddings}word_embeddings.weight", 2, source)
    if width % TEXT_HEAD_DIM:
        raise ValueError(f"{source} has a text tower {width} wide; RoBERTa's heads are {TEXT_HEAD_DIM} wide")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": count_layers(tensors, "text_model.encoder.layer."),
        "num_attention_heads": width // TEXT_HEAD_DIM,
        "intermediate_size": shape_of(tensors, "text_model.encoder.layer.0.intermediate.dense.weight", 2, source)[0],
        "max_position_embeddings": shape_of(tensors, f"{embeddings}position_embeddings.weight", 2, source)[0],
        "type_vocab_size": shape_of(tensors, f"{embeddings}token_type_embeddings.weight", 2, source)[0],
        "layer_norm_eps": TEXT_LAYER_NORM_EPS,
    }
