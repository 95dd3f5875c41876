"""Tiny translation models and sentence encoders with random weights, saved in the layout of the Hub."""

from pathlib import Path

import builders
import torch
from transformers import BertConfig, BertModel, M2M100Config, M2M100ForConditionalGeneration

SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 128}


def seq2seq_config(config_class, vocab_size, **fields):
    """Return a configuration of one layer each, width 16; large weights make the output depend on the input."""
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return config_class(vocab_size=vocab_size, init_std=0.3, dropout=0.0, **{**SIZES, **HEADS, **special, **fields})


def save(folder: Path, model, tokenizer) -> str:
    """Save a model and a tokenizer, and return the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_nllb(folder: Path, seed: int = 4) -> str:
    """Save an NLLB model with nine languages, and return the folder."""
    tokenizer = builders.nllb_tokenizer()
    torch.manual_seed(seed)
    model = M2M100ForConditionalGeneration(seq2seq_config(M2M100Config, len(tokenizer)))
    return save(folder, model, tokenizer)


def save_encoder(folder: Path) -> str:
    """Save a BERT model as a sentence encoder, and return the folder."""
    tokenizer = builders.bert_tokenizer()
    torch.manual_seed(0)
    fields = {name: value for name, value in builders.bert_config().items() if name != "model_type"}
    return save(folder, BertModel(BertConfig(**fields, initializer_range=0.3)), tokenizer)
