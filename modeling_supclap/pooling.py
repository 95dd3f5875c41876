"""Pool token embeddings to one vector per sequence, and apply a dense layer to it."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling


def mean_pool(last_hidden_state: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Average the token embeddings (B, N, D) of each sequence over the tokens where the mask (B, N) is 1.

    Returns:
        Sequence embeddings (B, D). The embedding of a sequence with only padding is zero.

    Example:
        >>> mean_pool(torch.tensor([[[1.0], [3.0], [100.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[2.]])
    """
    if attention_mask is None:
        return last_hidden_state.mean(dim=1)
    real = attention_mask.bool().unsqueeze(-1)
    total = last_hidden_state.masked_fill(~real, 0).sum(dim=1)
    return total / real.sum(dim=1).clamp(min=1).to(total.dtype)


def last_pool(last_hidden_state: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the embedding of the last token of each sequence that is not padding, (B, N, D) -> (B, D).

    In decoders, only this token attends to all others. The mask (B, N) may have padding on the left or right.

    Example:
        >>> last_pool(torch.tensor([[[1.0], [3.0], [100.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[3.]])
    """
    if attention_mask is None:
        return last_hidden_state[:, -1]
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = (positions * attention_mask.bool()).argmax(dim=1)
    return last_hidden_state[torch.arange(last.shape[0], device=last.device), last]


def replace_pooled(outputs: Any, pooled: Tensor) -> BaseModelOutputWithPooling:
    """Copy the output of an encoder and replace its `pooler_output`."""
    return BaseModelOutputWithPooling(
        last_hidden_state=outputs.last_hidden_state,
        pooler_output=pooled,
        hidden_states=outputs.get("hidden_states"),
        attentions=outputs.get("attentions"),
    )


class SentenceDense(nn.Sequential):
    """Dense layer after the pooling of a text tower, as in sentence-transformers: (B, width) -> (B, out_features)."""

    def __init__(self, width: int, out_features: int, activation: str = "tanh", bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out_features, bias=bias)
        self.activation = ACT2FN[activation]
