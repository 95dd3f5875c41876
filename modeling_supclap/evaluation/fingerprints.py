"""Identify the weights of a model."""

from __future__ import annotations

import hashlib

import torch


def weights_fingerprint(model: torch.nn.Module, *parts: str) -> str:
    """Hash a model's weights and buffers (names, shapes, dtypes, values), and additional strings `parts`."""
    digest = hashlib.sha256("\n".join([type(model).__name__, *parts]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
