"""Text encoder of CLAP2: a transformer with rotary positions, gated attention and pooling.

It is OpenCLIP's text tower `text_arch = "modern"`. The parameters have the same names as in OpenCLIP's checkpoints,
without their prefix `text.`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .auto_classes import register
from .configuration_supclap import ModernTextConfig
from .pooling import last_pool, mean_pool
from .rotary import AttentionPool, RotaryAttention, Rotation, build_norm, rotary_angles
from .strict_loading import StrictLoadingMixin


class ModernTextMLP(nn.Module):
    """Two-layer perceptron with SwiGLU, squared ReLU or GELU. The gate is the second half of SwiGLU's first layer."""

    def __init__(self, config: ModernTextConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, int(config.hidden_size * config.mlp_ratio), config.mlp_bias
        self.mlp_type = config.mlp_type
        if config.mlp_type == "swiglu":
            self.w12, self.w3 = nn.Linear(width, 2 * inner, bias=bias), nn.Linear(inner, width, bias=bias)
        else:
            self.c_fc, self.c_proj = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        if self.mlp_type == "swiglu":
            up, gate = self.w12(hidden_states).chunk(2, dim=-1)
            return self.w3(up * nn.functional.silu(gate))
        inner = self.c_fc(hidden_states)
        is_relu2 = self.mlp_type == "relu2"
        return self.c_proj(inner.relu().square() if is_relu2 else nn.functional.gelu(inner))


class LayerScale(nn.Module):
    """Learned scale of each element (Touvron et al., 2021, arXiv 2103.17239)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Scale (B, N, D)."""
        return hidden_states * self.gamma


class ModernTextBlock(GradientCheckpointingLayer):
    """Transformer block: x += ls1(norm1_post(attention(norm1(x)))); x += ls2(norm2_post(mlp(norm2(x)))).

    The norms after attention and MLP exist only with `norm_placement="sandwich"`, the scales with `ls_init_value`.
    """

    def __init__(self, config: ModernTextConfig, is_first: bool) -> None:
        super().__init__()
        width, is_sandwich = config.hidden_size, config.norm_placement == "sandwich"
        has_scale = config.ls_init_value is not None
        self.norm1 = build_norm(config, width)
        bias = config.attention_bias
        gate_bias = bias if config.gate_bias is None else config.gate_bias
        has_residual, is_causal = config.value_residual and not is_first, config.attention_mode == "causal"
        self.attn = RotaryAttention(config, bias, gate_bias, has_residual, is_causal=is_causal)
        self.norm1_post = build_norm(config, width, is_sandwich)
        self.ls1 = LayerScale(width) if has_scale else nn.Identity()
        self.norm2 = build_norm(config, width)
        self.mlp = ModernTextMLP(config)
        self.norm2_post = build_norm(config, width, is_sandwich)
        self.ls2 = LayerScale(width) if has_scale else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation,
        attention_mask: Any = None,
        first_value: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Map (B, N, D) to (B, N, D). Also return the attention values of this block."""
        attended, _, value = self.attn(self.norm1(hidden_states), rotation, attention_mask, first_value, **kwargs)
        hidden_states = hidden_states + self.ls1(self.norm1_post(attended))
        mapped = self.mlp(self.norm2(hidden_states))
        return hidden_states + self.ls2(self.norm2_post(mapped)), value


class ModernTextPool(AttentionPool):
    """Attention pooling with optional norms of query and keys."""

    def __init__(self, config: ModernTextConfig) -> None:
        width, heads = config.hidden_size, config.num_attention_heads
        super().__init__(width, heads, config.attention_bias)
        self.query = nn.Parameter(torch.empty(1, 1, width))
        self.q_norm = build_norm(config, width // heads, config.qk_norm)
        self.k_norm = build_norm(config, width // heads, config.qk_norm)

    def forward(self, hidden_states: Tensor, token_mask: Tensor) -> Tensor:
        """Pool tokens (B, N, D) where the mask (B, N) is True to one vector per text, (B, D)."""
        return self.attend(self.query, hidden_states, token_mask)


class ModernTextModel(StrictLoadingMixin, PreTrainedModel):
    """Text encoder of CLAP2 that computes one embedding per text.

    Example:
        >>> config = ModernTextConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...                           pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> ModernTextModel(config).eval()(torch.tensor([[1, 5, 6, 2]])).pooler_output.shape
        torch.Size([1, 8])
    """

    config: ModernTextConfig
    base_model_prefix = "modern_text"
    main_input_name = "input_ids"
    _input_embed_layer = "token_embedding"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ModernTextBlock"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(ModernTextBlock, index=0),
        "attentions": OutputRecorder(RotaryAttention, index=1),
    }

    def __init__(self, config: ModernTextConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.token_embedding = nn.Embedding(config.vocab_size, width)
        self.reg_tokens = nn.Parameter(torch.empty(1, config.reg_tokens, width)) if config.reg_tokens else None
        self.norm_pre = build_norm(config, width, config.pre_norm)
        self.blocks = nn.ModuleList(ModernTextBlock(config, index == 0) for index in range(config.num_hidden_layers))
        self.ln_final = build_norm(config, width)
        self.pool = ModernTextPool(config) if config.pool_type == "map" else None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, LayerScale):
            init.constant_(module.gamma, float(self.config.ls_init_value or 0))
        elif isinstance(module, RotaryAttention) and module.vr_lambda is not None:
            init.ones_(module.vr_lambda)
        elif isinstance(module, ModernTextPool):
            init.normal_(module.query, std=std)
        elif isinstance(module, ModernTextModel) and module.reg_tokens is not None:
            init.normal_(module.reg_tokens, std=std)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Encode a batch of texts. Each text is BOS, its tokens and EOS, with padding on the right.

        Args:
            input_ids: Token ids, (B, N).
            attention_mask: (B, N), 1 for real tokens, 0 for padding; None masks the padding tokens in `input_ids`.

        Returns:
            Output with `last_hidden_state` (B, N, D), and `pooler_output` (B, D), pooled as in `config.pool_type`.
        """
        config = self.config
        if attention_mask is None:
            padding = -1 if config.pad_token_id is None else config.pad_token_id
            attention_mask = input_ids.ne(padding)
        token_mask = attention_mask.bool()

        tokens = self.token_embedding(input_ids)
        whole_mask = token_mask
        if self.reg_tokens is not None:
            tokens = torch.cat([self.reg_tokens.expand(tokens.shape[0], -1, -1), tokens], dim=1)
            whole_mask = nn.functional.pad(token_mask, (config.reg_tokens, 0), value=True)
        tokens = self.norm_pre(tokens)

        if config.attention_mode == "causal":
            mask = create_causal_mask(config, tokens, whole_mask, None)  # no cache
        else:
            mask = create_bidirectional_mask(config, tokens, whole_mask)
        bands = config.hidden_size // config.num_attention_heads // 2
        angles = rotary_angles(tokens.shape[1], bands, config.rope_temperature, tokens.device)
        rotation = angles.cos(), angles.sin()
        first_value = None
        for block in self.blocks:
            tokens, value = block(tokens, rotation, mask, first_value, **kwargs)
            first_value = value if first_value is None else first_value

        hidden = self.ln_final(tokens)[:, config.reg_tokens :]
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden, pooler_output=self._pool(hidden, token_mask, input_ids)
        )

    def _pool(self, hidden: Tensor, token_mask: Tensor, input_ids: Tensor) -> Tensor:
        """Pool tokens (B, N, D) to (B, D). Without an EOS token, "eos" selects the last real token."""
        if self.pool is not None:
            return self.pool(hidden, token_mask)
        if self.config.pool_type == "mean":
            return mean_pool(hidden, token_mask)
        is_eos = (input_ids == self.config.eos_token_id) & token_mask
        first = hidden[torch.arange(hidden.shape[0], device=hidden.device), is_eos.int().argmax(dim=1)]
        return torch.where(is_eos.any(dim=1, keepdim=True), first, last_pool(hidden, token_mask))


register(AutoModel, ModernTextConfig, ModernTextModel)
