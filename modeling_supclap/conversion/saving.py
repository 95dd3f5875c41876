"""Save a converted checkpoint as a model folder, atomically, and verify the saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from .folders import writing_folder
from .layouts import Conversion
from .provenance import write_provenance

# SONAR uses NLLB's tokenizer, and English has this id. If a folder contains only the SentencePiece file, transformers
# builds a tokenizer without language tokens, or with language ids that are too high by one.
NLLB_VOCABULARY = 256_206
NLLB_ENGLISH = ("eng_Latn", 256_047)


def save_conversion(
    conversion: Conversion, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, verify: bool = False
) -> None:
    """Save a converted model with its processor and `provenance.json`, atomically.

    Args:
        folder: Output folder; it must be empty, or must not exist.
        tokenizer: Tokenizer of the text tower, changed in place. If None, a two-tower model is saved with its feature
            extractor but without a processor.
        verify: Whether to reload the saved model and compare it with the converted one (see `verify_saved`).

    Raises:
        ValueError: The folder is not empty, the tokenizer does not match the text tower, or the saved model differs.
    """
    with writing_folder(folder) as written:
        if tokenizer is not None:
            prepare_tokenizer(conversion, tokenizer)
        conversion.model.save_pretrained(written)
        extractor = conversion.feature_extractor
        if isinstance(conversion.model, SupCLAPModel) and extractor is not None and tokenizer is not None:
            processor = SupCLAPProcessor(extractor, tokenizer, plain_captions=conversion.layout.plain_captions)
            processor.save_pretrained(written)
        elif extractor is not None:
            extractor.save_pretrained(written)
        elif tokenizer is not None:
            tokenizer.save_pretrained(written)
        write_provenance(written, conversion.parts)
        if verify:
            verify_saved(conversion, written)


def prepare_tokenizer(conversion: Conversion, tokenizer: PreTrainedTokenizerBase) -> None:
    """Apply the checkpoint's settings to the tokenizer, in place. Raise ValueError if it does not fit the tower."""
    config: Any = getattr(conversion.model.config, "text_config", conversion.model.config)
    if not conversion.reads_text:
        raise ValueError(f"a {type(conversion.model).__name__} has no text tower; leave out the tokenizer")
    if conversion.layout.prepare_tokenizer is not None:
        conversion.layout.prepare_tokenizer(tokenizer, config)
    if conversion.layout.max_tokens is not None:
        tokenizer.model_max_length = min(conversion.layout.max_tokens, tokenizer.model_max_length)

    if (padding := tokenizer.pad_token_id) != config.pad_token_id:
        raise ValueError(f"the tokenizer has pad_token_id {padding} and the text tower {config.pad_token_id}")
    english = tokenizer.convert_tokens_to_ids(NLLB_ENGLISH[0])
    if config.vocab_size == NLLB_VOCABULARY and english != NLLB_ENGLISH[1]:
        raise ValueError(
            f"the tokenizer has {NLLB_ENGLISH[0]} at id {english}, SONAR at {NLLB_ENGLISH[1]}; give "
            "cointegrated/SONAR_200_text_encoder, a folder with its tokenizer_config.json, or Meta's SentencePiece file"
        )


def verify_saved(conversion: Conversion, folder: str | Path) -> None:
    """Reload a saved model and raise ValueError unless it equals the converted one.

    Weights must be equal. Embeddings of a test input must be close (rtol 1e-4, atol 1e-5).
    """
    model: Any = conversion.model
    name, loaded = type(model).__name__, type(model).from_pretrained(folder)
    written = loaded.state_dict()
    for key, value in model.state_dict().items():
        if not torch.equal(written[key], value):
            raise ValueError(f"the saved {name} differs from the converted model in its weights, for example {key}")
    saved = _embed_probe(loaded.eval(), conversion.feature_extractor)
    for part, value in _embed_probe(model, conversion.feature_extractor).items():
        if not torch.allclose(saved[part], value, 1e-4, 1e-5):
            raise ValueError(f"the {part} embedding of the saved {name} differs from that of the converted model")


@torch.no_grad()
def _embed_probe(model: Any, extractor: Any) -> dict[str, torch.Tensor]:
    """Embed a test input with each tower: one second of a 440 Hz tone (audio), and a few tokens (text)."""
    embeddings: dict[str, torch.Tensor] = {}
    whole = isinstance(model, SupCLAPModel)
    if extractor is not None:
        rate_hz = extractor.sampling_rate
        tone = np.sin(2 * np.pi * 440 * np.arange(rate_hz) / rate_hz).astype(np.float32)
        inputs = extractor([tone], sampling_rate=rate_hz, return_tensors="pt")
        if "is_longer" in inputs:
            # If no clip is long, CLAP's extractor marks a random one as long.
            inputs["is_longer"] = torch.zeros(1, 1, dtype=torch.bool)
        embeddings["audio"] = (model.get_audio_features if whole else model)(**inputs).pooler_output
    if whole or extractor is None:
        tokens = torch.tensor([[3, 5, 6, 7, 2]])
        embeddings["text"] = (model.get_text_features if whole else model)(input_ids=tokens).pooler_output
    return embeddings
