"""Attention with rotary positions, and pooling by attention: the parts that the two towers of CLAP2 share.

The configuration is a `NaFlexConfig` or a `ModernTextConfig`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

# Cosine and sine of the angles, (N, head_dim / 2) each.
Rotation = tuple[Tensor, Tensor]


def build_norm(config: Any, width: int, exists: bool = True) -> nn.Module:
    """Build a layer norm, or an RMS norm if `config.norm_layer` is "rmsnorm". If it does not exist, do nothing."""
    if not exists:
        return nn.Identity()
    norm_class = nn.RMSNorm if config.norm_layer == "rmsnorm" else nn.LayerNorm
    return norm_class(width, eps=config.layer_norm_eps)


def rotary_angles(count: int, num_bands: int, temperature: float, device: torch.device) -> Tensor:
    """Return the angles of positions 0 to `count` - 1, (count, num_bands), for temperature^(-j / num_bands)."""
    exponents = torch.arange(num_bands, dtype=torch.float32, device=device) / num_bands
    return torch.arange(count, device=device)[:, None] * temperature**-exponents


def rotate(vectors: Tensor, rotation: Rotation, in_halves: bool = False) -> Tensor:
    """Rotate pairs of elements by the angles of their positions (RoPE: Su et al., 2021, arXiv 2104.09864).

    Args:
        vectors: Queries or keys, (B, heads, N, head_dim).
        in_halves: Whether element j is paired with j + head_dim / 2. False: pairs are neighbours, 2j and 2j + 1.
    """
    cos, sin = (part.to(vectors.dtype) for part in rotation)
    first, second = vectors.chunk(2, dim=-1) if in_halves else (vectors[..., 0::2], vectors[..., 1::2])
    rotated = [first * cos - second * sin, first * sin + second * cos]
    return torch.cat(rotated, dim=-1) if in_halves else torch.stack(rotated, dim=-1).flatten(-2)


class RotaryAttention(nn.Module):
    """Multi-head self-attention with rotary positions, and an optional gate on its output.

    Args:
        proj_bias, gate_bias: Whether the output layer and the gate have a bias.
        has_residual: Whether to use value residuals (Zhou et al., 2024, arXiv 2410.17897): the values v of a block are
            replaced by v_0 + lambda (v - v_0), where v_0 are the values of the first block.
        in_halves: As in `rotate`.
        is_causal: Whether a token attends only to itself and to earlier tokens.
        has_norm: Whether there is a norm before the gate.
    """

    def __init__(
        self,
        config: Any,
        proj_bias: bool,
        gate_bias: bool,
        has_residual: bool = False,
        in_halves: bool = False,
        is_causal: bool = False,
        has_norm: bool = False,
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.in_halves, self.is_causal = in_halves, is_causal
        self.head_dim = width // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.q_norm = build_norm(config, self.head_dim, config.qk_norm)
        self.k_norm = build_norm(config, self.head_dim, config.qk_norm)
        self.gate = nn.Linear(width, width, bias=gate_bias) if config.attn_gated else None
        self.vr_lambda = nn.Parameter(torch.empty(1)) if has_residual else None
        self.norm = build_norm(config, width, has_norm)
        self.proj = nn.Linear(width, width, bias=proj_bias)

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation,
        attention_mask: Any = None,
        first_value: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the output (B, N, D), the attention weights (None with SDPA), and the values of this block."""
        batch, tokens, width = hidden_states.shape
        # (B, N, 3 D) -> three times (B, heads, N, head_dim)
        qkv = self.qkv(hidden_states).view(batch, tokens, 3, -1, self.head_dim)
        query, key, own_value = qkv.permute(2, 0, 3, 1, 4)
        query = rotate(self.q_norm(query), rotation, self.in_halves)
        key = rotate(self.k_norm(key), rotation, self.in_halves)
        value = own_value
        if self.vr_lambda is not None and first_value is not None:
            value = torch.lerp(first_value, value, self.vr_lambda.to(value.dtype))

        implementation = self.config._attn_implementation
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        options = {"dropout": 0.0, "scaling": self.scaling, **kwargs}
        mixed, weights = attend(self, query, key, value, attention_mask, **options)
        mixed = self.norm(mixed.reshape(batch, tokens, width))
        if self.gate is not None:
            mixed = mixed * self.gate(hidden_states).sigmoid()
        return self.proj(mixed), weights, own_value


class AttentionPool(nn.Module):
    """Attention pooling with one learned query: softmax(q k / sqrt(head_dim)) v, without an output layer."""

    def __init__(self, width: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * width, bias=bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()

    def attend(self, query: Tensor, hidden: Tensor, token_mask: Tensor | None) -> Tensor:
        """Pool tokens (B, N, D) where the mask (B, N) is True, by a query (1, 1, D), to one vector each, (B, D)."""
        # (B, N, 2 D) -> (B, heads, N, head_dim)
        key, value = self.kv(hidden).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query = self.q(query.expand(hidden.shape[0], -1, -1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        mask = None if token_mask is None else token_mask[:, None, None]
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(query), self.k_norm(key), value, attn_mask=mask)
        return mixed.flatten(1)
