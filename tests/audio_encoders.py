"""Tiny audio encoders of transformers with their feature extractors, saved in folders like published encoders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTModel,
    Data2VecAudioConfig,
    Data2VecAudioModel,
    HubertConfig,
    HubertModel,
    SeamlessM4TFeatureExtractor,
    SEWConfig,
    SEWModel,
    UniSpeechSatConfig,
    UniSpeechSatModel,
    Wav2Vec2BertConfig,
    Wav2Vec2BertModel,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
    WavLMConfig,
    WavLMModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
# 320 samples per frame, as in the published encoders. On CPUs with AMX, torch 2.13 computes bfloat16 convolutions with
# few channels and an even kernel wrongly, but not those of the published encoders.
WAVES: dict[str, Any] = {
    **SIZES,
    "feat_proj_dropout": 0.0,
    "conv_dim": (8, 8, 8),
    "conv_kernel": (10, 9, 9),
    "conv_stride": (5, 8, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 1,
}
AST: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if "dropout" not in name},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_length": 100,
    "num_mel_bins": 32,
}
WHISPER: dict[str, Any] = {
    "vocab_size": 60,
    "num_mel_bins": 32,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_source_positions": 50,
    "dropout": 0.0,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
}
GROUP = Wav2Vec2FeatureExtractor
LAYER: dict[str, Any] = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}

ENCODERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "ast": lambda: (ASTModel(ASTConfig(**AST)), ASTFeatureExtractor(max_length=100, num_mel_bins=32)),
    "whisper": lambda: (
        WhisperModel(WhisperConfig(**WHISPER)),
        WhisperFeatureExtractor(feature_size=32, chunk_length=1),
    ),
    "wav2vec2": lambda: (Wav2Vec2Model(Wav2Vec2Config(**WAVES)), GROUP(return_attention_mask=False)),
    "wav2vec2-layer": lambda: (Wav2Vec2Model(Wav2Vec2Config(**WAVES, **LAYER)), GROUP(return_attention_mask=True)),
    "hubert": lambda: (HubertModel(HubertConfig(**WAVES)), GROUP()),
    "wavlm": lambda: (WavLMModel(WavLMConfig(**WAVES)), GROUP()),
    "data2vec": lambda: (
        Data2VecAudioModel(Data2VecAudioConfig(**WAVES, conv_pos_kernel_size=5)),
        GROUP(return_attention_mask=True),
    ),
    "unispeech-sat": lambda: (UniSpeechSatModel(UniSpeechSatConfig(**WAVES)), GROUP()),
    "sew": lambda: (SEWModel(SEWConfig(**WAVES, squeeze_factor=2)), GROUP()),
    "wav2vec2-bert": lambda: (
        Wav2Vec2BertModel(Wav2Vec2BertConfig(**SIZES, conv_depthwise_kernel_size=7, feature_projection_input_dim=64)),
        SeamlessM4TFeatureExtractor(feature_size=32, num_mel_bins=32, stride=2),
    ),
}


def make_encoder(name: str) -> tuple[Any, Any]:
    """Return the model, in evaluation mode, and its feature extractor."""
    torch.manual_seed(5)
    model, extractor = ENCODERS[name]()
    return model.eval(), extractor


def save_encoder(name: str, folder: Path) -> tuple[Any, Any]:
    """Save the output of `make_encoder` in one folder, and return it."""
    parts = make_encoder(name)
    for part in parts:
        part.save_pretrained(folder)
    return parts
