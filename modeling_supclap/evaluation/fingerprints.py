"""Identify the weights and the settings of a model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

# Fields of configurations that can differ between copies of a model. Fields that begin with "_" can, too.
INCIDENTAL = ("transformers_version", "auto_map", "architectures", "processor_class", "dtype")


def weights_fingerprint(model: torch.nn.Module, *parts: str) -> str:
    """Hash a model's weights and buffers (names, shapes, dtypes, values), and additional strings `parts`."""
    digest = hashlib.sha256("\n".join([type(model).__name__, *parts]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def settings_text(settings: Any) -> str:
    """Serialise settings as JSON, without fields that can differ between copies of a model.

    These are paths, versions and the location of code, at any depth.
    """
    return json.dumps(json.loads(json.dumps(settings, default=str), object_hook=_drop_incidental))


def tokenizer_text(tokenizer: Any) -> str:
    """Serialise the vocabulary and the rules of a tokenizer as JSON.

    The backend also stores the padding and truncation of its last call, so these are excluded.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = {"vocabulary": tokenizer.get_vocab()} if backend is None else json.loads(backend.to_str())
    return json.dumps({**words, "padding": None, "truncation": None})


def _drop_incidental(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key in sorted(fields):
        if not key.startswith("_") and key not in INCIDENTAL:
            kept[key] = fields[key]
    return kept
