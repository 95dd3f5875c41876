"""A converted checkpoint to a folder for `from_pretrained`: whole and proved, or not there at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from .layouts import Conversion
from .provenance import write_provenance

# SONAR's tokenizer is NLLB's, which has English here. Of a folder with its bare SentencePiece file, transformers makes
# one without languages, or with all of them one too high.
NLLB_VOCABULARY = 256_206
NLLB_ENGLISH = ("eng_Latn", 256_047)


def save_conversion(
    conversion: Conversion, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, verify: bool = False
) -> None:
    """Writes a model, its processor (or what there is of it) and where its parts come from.

    All is written beside the folder and then renamed to it, so that the folder is there as a whole or not at all.

    Args:
        conversion: What to write.
        folder: It must not exist, or be empty.
        tokenizer: That of the text tower, which is changed in place to what the checkpoint was trained with; without
            one, a model of two towers has no processor, but only its feature extractor.
        verify: Before the renaming, load what was written and compare it, as `verify_saved` does.

    Raises:
        ValueError: The folder is in use, the tokenizer is not the text tower's, or the written model is not the same.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is in use; give a folder that is empty or does not exist")
    if tokenizer is not None:
        prepare_tokenizer(conversion, tokenizer)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        written = Path(temporary) / "folder"
        conversion.model.save_pretrained(written)
        _save_inputs(conversion, written, tokenizer)
        write_provenance(written, conversion.parts)
        if verify:
            verify_saved(conversion, written)
        os.replace(written, folder)


def prepare_tokenizer(conversion: Conversion, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a tokenizer, in place, what the text tower was trained with, and refuses one that numbers otherwise.

    Args:
        conversion: A model of two towers, or a text tower, and its layout.
        tokenizer: What would be saved with the model.

    Raises:
        ValueError: The model has no text tower, or its tokens are others.
    """
    config: Any = getattr(conversion.model.config, "text_config", conversion.model.config)
    if not conversion.reads_text:
        raise ValueError(f"a {type(conversion.model).__name__} reads no text; give no tokenizer")
    if conversion.layout.prepare_tokenizer is not None:
        conversion.layout.prepare_tokenizer(tokenizer)
    if conversion.layout.max_tokens is not None:
        tokenizer.model_max_length = min(conversion.layout.max_tokens, tokenizer.model_max_length)

    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens and the text tower {config.vocab_size}")
    if tokenizer.pad_token_id != config.pad_token_id:
        raise ValueError(
            f"the tokenizer pads with {tokenizer.pad_token_id} and the text tower with {config.pad_token_id}"
        )
    english = tokenizer.convert_tokens_to_ids(NLLB_ENGLISH[0])
    if config.vocab_size == NLLB_VOCABULARY and english != NLLB_ENGLISH[1]:
        raise ValueError(
            f"the tokenizer has {NLLB_ENGLISH[0]} at {english}, SONAR at {NLLB_ENGLISH[1]}; give "
            "cointegrated/SONAR_200_text_encoder, a folder with its tokenizer_config.json, or Meta's SentencePiece file"
        )


def _save_inputs(conversion: Conversion, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """The processor of a model of two towers; of a tower, or without a tokenizer, the one part that there is."""
    extractor = conversion.feature_extractor
    if isinstance(conversion.model, SupCLAPModel) and extractor is not None and tokenizer is not None:
        processor = SupCLAPProcessor(extractor, tokenizer, plain_captions=conversion.layout.plain_captions)
        processor.save_pretrained(folder)
    elif extractor is not None:
        extractor.save_pretrained(folder)
    elif tokenizer is not None:
        tokenizer.save_pretrained(folder)


def verify_saved(conversion: Conversion, folder: str | Path) -> None:
    """Loads a written model again and compares it with the one that was written: weights to the bit, then embeddings.

    Args:
        conversion: What was written.
        folder: Where it was written.

    Raises:
        ValueError: Something was not found in the folder, or differs, or an embedding is not finite.
    """
    model: Any = conversion.model
    name = type(model).__name__
    expected = _embed_probe(model, conversion.feature_extractor)
    for part, value in expected.items():
        if not value.isfinite().all():
            raise ValueError(f"the {part} embedding is not finite; the weights of the checkpoint are damaged")

    # BERT's configuration does not say whether its pooler was left out.
    options = {"add_pooling_layer": False} if getattr(model, "pooler", "none known") is None else {}
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True, **options)
    for fault, names in report.items():
        if names:
            raise ValueError(f"{name} does not load from the written folder: {fault} {sorted(map(str, names))[:3]}")

    written = loaded.state_dict()
    for key, value in model.state_dict().items():
        if not torch.equal(written[key], value):
            raise ValueError(f"the {name} in the written folder has other weights than were converted, such as {key}")
    seen = _embed_probe(loaded.eval(), conversion.feature_extractor)
    for part, value in expected.items():
        if not torch.allclose(seen[part], value, 1e-4, 1e-5):
            raise ValueError(f"the {name} in the written folder has another {part} embedding")


@torch.no_grad()
def _embed_probe(model: Any, extractor: Any) -> dict[str, torch.Tensor]:
    """An embedding of each tower that a model has: of a second of 440 Hz, and of a few tokens."""
    found: dict[str, torch.Tensor] = {}
    whole = isinstance(model, SupCLAPModel)
    if extractor is not None:
        rate_hz = extractor.sampling_rate
        tone = np.sin(2 * np.pi * 440 * np.arange(rate_hz) / rate_hz).astype(np.float32)
        features = extractor([tone], sampling_rate=rate_hz, return_tensors="pt")
        inputs = {"input_features": features["input_features"]}
        if "is_longer" in features:
            # CLAP's extractor calls a clip of a batch long at random, where none is.
            inputs["is_longer"] = torch.zeros(1, 1, dtype=torch.bool)
        found["audio"] = (model.get_audio_features if whole else model)(**inputs).pooler_output

    if whole or extractor is None:
        outputs = (model.get_text_features if whole else model)(input_ids=torch.tensor([[3, 5, 6, 7, 2]]))
        found["text"] = outputs.pooler_output if "pooler_output" in outputs else outputs.last_hidden_state
    return found
