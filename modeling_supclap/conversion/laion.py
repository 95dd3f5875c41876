"""Convert LAION's own CLAP files (`lukewys/laion_clap`) to a transformers `ClapModel`, for `supclap_from_clap`.

Only files with HTSAT and RoBERTa are supported. Their mel filters must match `laion_feature_extractor`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

from .tensors import Tensors, under

# Rename HTSAT tensors to ClapAudioModel names; the first matching rule applies.
HTSAT_NAMES = (
    (r"^bn0\.", "batch_norm."),
    (r"(\.blocks\.\d+\.)norm1\.", r"\1layernorm_before."),
    (r"(\.blocks\.\d+\.)norm2\.", r"\1layernorm_after."),
    (r"(\.blocks\.\d+\.)attn\.proj\.", r"\1attention.output.dense."),
    (r"(\.blocks\.\d+\.)attn\.", r"\1attention.self."),
    (r"(\.blocks\.\d+\.)mlp\.fc1\.", r"\1intermediate.dense."),
    (r"(\.blocks\.\d+\.)mlp\.fc2\.", r"\1output.dense."),
)
HTSAT_ASIDE = {
    r"(tscam_conv|head)\.": "tagging head",
    r"layers\.\d+\.blocks\.\d+\.attn_mask$": "attention masks (recomputed)",
    r"(spectrogram_extractor|logmel_extractor)\.": "front end (same as ours)",
}
HTSAT = "audio_branch."
ROBERTA = "text_branch."
FILTERS = "logmel_extractor.melW"
FRONT_END = "LAION's CLAP expects 48 kHz, 1,024 samples and 64 Slaney mel bands from 50 to 14,000 Hz"
ASIDE = {r"(audio|text)_transform\.": "transforms (unused)", r"text_branch\.embeddings\.position_ids$": "position ids"}
NAMES = (
    (r"^(audio|text)_projection\.0\.", r"\1_projection.linear1."),
    (r"^(audio|text)_projection\.2\.", r"\1_projection.linear2."),
)


def clap_from_laion(tensors: Tensors) -> ClapModel:
    """Build a `ClapModel` from the tensors of a LAION-CLAP file."""
    used = tensors.set_aside(ASIDE)
    expected = torch.from_numpy(laion_feature_extractor().mel_filters_slaney).float()
    used.check_constant(HTSAT + FILTERS, expected, FRONT_END)
    audio, audio_config = htsat_from_tensors(used.below(HTSAT))
    text = used.below(ROBERTA)
    # LAION trained from roberta-base, with this epsilon; transformers' default is 1e-12.
    text_config = {**bert_fields(text), "layer_norm_eps": 1e-5}

    whole = used.without(HTSAT, ROBERTA).rename(NAMES)
    whole |= under("audio_model.", audio) | under("text_model.", text)
    # Add the constant buffers of transformers, because LAION's files do not contain them.
    positions = text_config["max_position_embeddings"]
    whole["text_model.embeddings.position_ids"] = torch.arange(positions).unsqueeze(0)
    whole["text_model.embeddings.token_type_ids"] = torch.zeros(1, positions, dtype=torch.long)

    width = whole["audio_projection.linear1.weight"].shape[0]
    config = ClapConfig(audio_config=audio_config, text_config=text_config, projection_dim=width)
    return whole.build(ClapModel, config)


def laion_feature_extractor(fused: bool = False) -> ClapFeatureExtractor:
    """Return the feature extractor of LAION's checkpoints: 10 s at 48 kHz, 64 mel bands from 50 to 14,000 Hz.

    Args:
        fused: Whether the model has fusion layers for long clips; these models use different mel filters.
    """
    return ClapFeatureExtractor(frequency_min=50, frequency_max=14_000, truncation="fusion" if fused else "rand_trunc")


def htsat_from_tensors(tensors: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Convert the tensors of an HTSAT audio tower to those of `ClapAudioModel`. Return also configuration fields."""
    encoder = tensors.set_aside(HTSAT_ASIDE).rename(HTSAT_NAMES)
    for fused in list(encoder):
        if ".attention.self.qkv." not in fused:
            continue
        # Split the fused projection into query, key and value: (3 d, ...) -> three times (d, ...)
        for part, rows in zip(("query", "key", "value"), encoder.pop(fused).chunk(3), strict=True):
            encoder[fused.replace(".qkv.", f".{part}.")] = rows

    return under("audio_encoder.", encoder), _htsat_fields(encoder)


def _htsat_fields(encoder: Tensors) -> dict[str, Any]:
    width = encoder["patch_embed.proj.weight"].shape[0]
    stages = encoder.count_layers("layers.")
    table = "blocks.0.attention.self.relative_position_bias_table"
    offsets = encoder[f"layers.0.{table}"].shape[0]
    depths, heads = [], []
    for stage in range(stages):
        depths.append(encoder.count_layers(f"layers.{stage}.blocks."))
        heads.append(encoder[f"layers.{stage}.{table}"].shape[1])

    config: dict[str, Any] = {
        # spec_size and patch_size are the published values; tensor shapes do not determine them
        "spec_size": 256,
        "patch_size": 4,
        "patch_embeds_hidden_size": width,
        "hidden_size": width * 2 ** (stages - 1),
        "depths": depths,
        "num_attention_heads": heads,
        "num_hidden_layers": stages,
        "num_mel_bins": encoder["batch_norm.weight"].shape[0],
        # A window has (2 window_size - 1)^2 relative positions.
        "window_size": (math.isqrt(offsets) + 1) // 2,
        "enable_fusion": "patch_embed.mel_conv2d.weight" in encoder,
    }
    if config["enable_fusion"]:
        inner = encoder["patch_embed.fusion_model.local_att.0.weight"].shape[0]
        config |= {"fusion_type": "aff_2d", "aff_block_r": width // inner}
    return config


def bert_fields(tensors: Tensors) -> dict[str, Any]:
    """Derive the configuration of a BERT-like encoder from its tensor shapes."""
    vocabulary, width = tensors["embeddings.word_embeddings.weight"].shape
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": tensors.count_layers("encoder.layer."),
        "num_attention_heads": tensors.count_heads(width),
        "intermediate_size": tensors["encoder.layer.0.intermediate.dense.weight"].shape[0],
        "max_position_embeddings": tensors["embeddings.position_embeddings.weight"].shape[0],
        "type_vocab_size": tensors["embeddings.token_type_embeddings.weight"].shape[0],
    }
