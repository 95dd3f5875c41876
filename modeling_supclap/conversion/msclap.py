"""Convert Microsoft's CLAP (`microsoft/msclap`) to `SupCLAPModel`.

The 2023 version (Elizalde et al., arXiv 2309.05767) has HTSAT and GPT-2 with last-token pooling. The 2022 version
(arXiv 2206.04769) has CNN14 and BERT with first-token pooling. Both have residual projections.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tokenizers import processors
from transformers import BertConfig, ClapAudioConfig, GPT2Config, PreTrainedConfig, PreTrainedTokenizerBase

from ..configuration_supclap import CNN14Config, SupCLAPConfig
from ..feature_extraction_msclap import MSCLAPFeatureExtractor
from ..modeling_supclap import SupCLAPModel
from .laion import FILTERS, bert_fields, htsat_from_tensors
from .tensors import Tensors, under

AUDIO = "audio_encoder.base."
HTSAT = "audio_encoder.base.htsat."
TEXT = "caption_encoder.base."
# Unused tensors that old versions of PANNs and transformers saved with the weights.
CNN14_ASIDE = {
    r"fc_audioset\.": "tagging head",
    r"(spectrogram_extractor|logmel_extractor)\.": "front end (same as ours)",
}
TEXT_ASIDE = {
    r"h\.\d+\.attn\.(masked_)?bias$": "attention masks (recomputed)",
    r"embeddings\.position_ids$": "position ids",
    r"pooler\.": "pooler (unused)",
}
# PANNs numbers its blocks from 1.
CNN14_NAMES = tuple((rf"^conv_block{number}\.", f"conv_blocks.{number - 1}.") for number in range(1, 7))
NAMES = (
    (r"^audio_encoder\.projection\.", "audio_projection."),
    (r"^caption_encoder\.projection\.", "text_projection."),
)
# Texts are padded with "!" (id 0) and end with a blank and an end token.
GPT2_PADDING, GPT2_BLANK, GPT2_END = "!", "Ġ", "<|endoftext|>"


def supclap_from_msclap(tensors: Tensors) -> tuple[SupCLAPModel, MSCLAPFeatureExtractor]:
    """Build a `SupCLAPModel` and its feature extractor from the tensors in the entry "model" of an MS-CLAP file.

    The model is in float32, in evaluation mode.
    """
    audio, audio_config, extractor = _audio_tower(tensors)
    text = tensors.below(TEXT).set_aside(TEXT_ASIDE)
    is_decoder = "wte.weight" in text
    whole = tensors.without(AUDIO, TEXT).rename(NAMES)
    whole["logit_scale"] = scale = whole["logit_scale"].reshape(1)
    whole |= under("audio_model.", audio) | under("text_model.", text)
    config = SupCLAPConfig(
        audio_config=audio_config,
        text_config=_gpt2_config(text) if is_decoder else BertConfig(**bert_fields(text)),
        projection_dim=whole["audio_projection.linear1.weight"].shape[0],
        projection_type="residual",
        projection_hidden_act="gelu",
        text_pooling="last" if is_decoder else "cls",
        temperature=math.exp(-scale),
    )
    return whole.build(SupCLAPModel, config), extractor


def prepare_gpt2_tokenizer(tokenizer: PreTrainedTokenizerBase, config: Any = None) -> None:
    """Set MS-CLAP 2023's padding and end tokens, in place. Raise ValueError if the tokenizer is not GPT-2's.

    `config`, the configuration of the text tower, is not used.
    """
    vocabulary = tokenizer.get_vocab()
    if vocabulary.get(GPT2_PADDING) != 0 or not {GPT2_BLANK, GPT2_END} <= vocabulary.keys():
        raise ValueError(f"this {type(tokenizer).__name__} is not GPT-2's; use the tokenizer openai-community/gpt2")

    tokenizer.add_special_tokens({"pad_token": GPT2_PADDING})
    # With a template, truncation keeps the end token of a long text. An end token in the text itself would be cut off.
    special = [(GPT2_BLANK, vocabulary[GPT2_BLANK]), (GPT2_END, vocabulary[GPT2_END])]
    template = processors.TemplateProcessing(single=f"$A {GPT2_BLANK} {GPT2_END}", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template


def _audio_tower(tensors: Tensors) -> tuple[dict[str, torch.Tensor], PreTrainedConfig, MSCLAPFeatureExtractor]:
    """Convert the audio tower. Return its tensors, configuration and feature extractor."""
    htsat = tensors.below(HTSAT)
    if htsat:
        # The mel filters are those for 32 kHz, because the authors' code uses HTSAT's settings for them.
        extractor, prefix = MSCLAPFeatureExtractor(), HTSAT
        audio, fields = htsat_from_tensors(htsat)
        config: PreTrainedConfig = ClapAudioConfig(**fields)
    else:
        extractor, prefix = MSCLAPFeatureExtractor(filter_rate_hz=None, max_length_s=5), AUDIO
        cnn14 = tensors.below(AUDIO).set_aside(CNN14_ASIDE).rename(CNN14_NAMES)
        num_blocks = cnn14.count_layers("conv_blocks.")
        channels = [cnn14[f"conv_blocks.{index}.conv1.weight"].shape[0] for index in range(num_blocks)]
        width, n_mels = cnn14["fc1.weight"].shape[0], cnn14["bn0.weight"].shape[0]
        audio, config = cnn14, CNN14Config(hidden_size=width, channels=channels, n_mels=n_mels)

    expected = torch.from_numpy(extractor.mel_filters_slaney).float()
    advice = "MS-CLAP expects 44.1 kHz, 1,024 samples and 64 Slaney mel bands from 50 to 14,000 Hz"
    tensors.check_constant(prefix + FILTERS, expected, advice)
    return audio, config, extractor


def _gpt2_config(text: Tensors) -> GPT2Config:
    vocabulary, width = text["wte.weight"].shape
    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=text.count_layers("h."),
        n_head=text.count_heads(width),
        n_inner=text["h.0.mlp.c_fc.weight"].shape[1],
        n_positions=text["wpe.weight"].shape[0],
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
        pad_token_id=0,
    )
