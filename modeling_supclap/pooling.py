"""Pooling of token vectors, and the dense layers after it."""

import torch
from torch import nn
from transformers.activations import ACT2FN


def mean_pool(last_hidden_state: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean over the real tokens of each sequence.

    Args:
        last_hidden_state: (B, N, D).
        attention_mask: (B, N), 1 for real tokens, 0 for padding; None means no padding.

    Returns:
        (B, D); zero for a sequence without real tokens.

    Example:
        >>> mean_pool(torch.tensor([[[1.0], [3.0], [100.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[2.]])
    """
    if attention_mask is None:
        return last_hidden_state.mean(dim=1)
    real = attention_mask.bool().unsqueeze(-1)
    total = last_hidden_state.masked_fill(~real, 0).sum(dim=1)
    return total / real.sum(dim=1).clamp(min=1).to(total.dtype)


def last_pool(last_hidden_state: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the last real token of each sequence, for decoders, where only this token attends to all others.

    Args:
        last_hidden_state: (B, N, D).
        attention_mask: (B, N), 1 for real tokens, 0 for padding on either side; None means no padding.

    Returns:
        (B, D); the first token of a sequence without real tokens.

    Example:
        >>> last_pool(torch.tensor([[[1.0], [3.0], [100.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[3.]])
    """
    if attention_mask is None:
        return last_hidden_state[:, -1]
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = (positions * attention_mask.bool()).argmax(dim=1)
    return last_hidden_state[torch.arange(len(last), device=last.device), last]


class SentenceDense(nn.Module):
    """Linear layer and activation between the pooling and the projection of a text tower.

    Args:
        width: Number of input features.
        out_features: Number of output features.
        activation: Name of the activation in transformers.
        bias: Whether the layer has a bias.
    """

    def __init__(self, width: int, out_features: int, activation: str = "tanh", bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out_features, bias=bias)
        self.activation = ACT2FN[activation]

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map (B, width) to (B, out_features)."""
        return self.activation(self.linear(pooled))
