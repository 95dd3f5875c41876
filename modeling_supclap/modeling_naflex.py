"""NaFlex audio encoder of CLAP2: a vision transformer on log-mel patches of recordings of any length.

The architecture is that of `NaFlexVit` in timm with 2-D rotary positions, as OpenCLIP uses it for audio
(`audio_cfg.model_type = "naflexvit"`). The parameters have the same names as in OpenCLIP's checkpoints, without their
prefix `audio.encoder.vit.`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .auto_classes import register
from .configuration_supclap import NaFlexConfig
from .frames import count_frames
from .pooling import mean_pool
from .rotary import AttentionPool, RotaryAttention, Rotation, build_norm, rotary_angles
from .strict_loading import StrictLoadingMixin

SILENCE_DB = -100.0


class NaFlexPatches(nn.Module):
    """Linear embedding of patches, and the learned class and register tokens before them."""

    def __init__(self, config: NaFlexConfig) -> None:
        super().__init__()
        width = config.embed_dim
        self.proj = nn.Linear(config.patch_freq * config.patch_time, width, bias=not config.pre_norm)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, config.reg_tokens, width)) if config.reg_tokens else None

    def forward(self, patches: Tensor) -> Tensor:
        """Map patches (B, N, patch values) to tokens (B, prefix + N, D)."""
        prefix = []
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                prefix.append(token.expand(patches.shape[0], -1, -1))
        embedded = self.proj(patches.to(self.proj.weight.dtype))
        return torch.cat([*prefix, embedded], dim=1)


class NaFlexMLP(nn.Module):
    """Two-layer perceptron with GELU, or with SwiGLU: fc2(silu(gate(x)) * up(x)) (Shazeer, 2020, arXiv 2002.05202).

    Without a norm between its layers, SwiGLU has one matrix for both parts, with the gate in its first half.
    """

    def __init__(self, config: NaFlexConfig) -> None:
        super().__init__()
        width, inner = config.embed_dim, int(config.embed_dim * config.mlp_ratio)
        self.is_gated, self.is_packed = config.swiglu_mlp, not config.scale_mlp_norm
        if self.is_gated and not self.is_packed:
            self.fc1_g, self.fc1_x = nn.Linear(width, inner), nn.Linear(width, inner)
        else:
            self.fc1 = nn.Linear(width, inner * 2 if self.is_gated else inner)
        self.norm = build_norm(config, inner, config.scale_mlp_norm)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        if not self.is_gated:
            inner = nn.functional.gelu(self.fc1(hidden_states))
        elif self.is_packed:
            gate, up = self.fc1(hidden_states).chunk(2, dim=-1)
            inner = nn.functional.silu(gate) * up
        else:
            inner = nn.functional.silu(self.fc1_g(hidden_states)) * self.fc1_x(hidden_states)
        return self.fc2(self.norm(inner))


class NaFlexBlock(GradientCheckpointingLayer):
    """Pre-norm transformer block: x += gamma_1 * attention(norm1(x)); x += gamma_2 * mlp(norm2(x))."""

    def __init__(self, config: NaFlexConfig) -> None:
        super().__init__()
        width, has_scale = config.embed_dim, config.init_values is not None
        has_mlp_scale = has_scale and not config.attn_only_layer_scale
        self.norm1 = build_norm(config, width)
        has_norm = config.scale_attn_inner_norm
        self.attn = RotaryAttention(
            config, True, config.qkv_bias, in_halves=config.rope_rotate_half, has_norm=has_norm
        )
        self.gamma_1 = nn.Parameter(torch.empty(width)) if has_scale else None
        self.norm2 = build_norm(config, width)
        self.mlp = NaFlexMLP(config)
        self.gamma_2 = nn.Parameter(torch.empty(width)) if has_mlp_scale else None

    def forward(self, hidden_states: Tensor, rotation: Rotation, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        attended, *_ = self.attn(self.norm1(hidden_states), rotation, attention_mask, **kwargs)
        hidden_states = hidden_states + (attended if self.gamma_1 is None else self.gamma_1 * attended)
        mapped = self.mlp(self.norm2(hidden_states))
        return hidden_states + (mapped if self.gamma_2 is None else self.gamma_2 * mapped)


class NaFlexAttentionPool(AttentionPool):
    """Attention pooling, and an MLP on the result: o = proj(attention); o + mlp(norm(o))."""

    def __init__(self, config: NaFlexConfig) -> None:
        width = config.embed_dim
        super().__init__(width, config.attn_pool_num_heads or config.num_heads, bias=True)
        inner = int(width * (config.attn_pool_mlp_ratio or config.mlp_ratio))
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.proj = nn.Linear(width, width)
        self.norm = build_norm(config, width)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, hidden_states: Tensor, token_mask: Tensor | None) -> Tensor:
        """Pool tokens (B, N, D) where the mask (B, N) is True to one vector per clip, (B, D)."""
        pooled = self.proj(self.attend(self.latent, hidden_states, token_mask))
        return pooled + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.norm(pooled))))


class NaFlexModel(StrictLoadingMixin, PreTrainedModel):
    """NaFlex encoder that computes one embedding per clip from a log-mel spectrogram of any length.

    A clip becomes one sequence of ceil(frames / `patch_time`) x (n_mels / `patch_freq`) patches with 2-D rotary
    positions (row, column). Attention covers the whole clip, so its cost grows with the square of the length; CLAP2 was
    trained on clips of at most 30 s. Padding does not change the embedding of a clip.

    Example:
        >>> config = NaFlexConfig(embed_dim=16, depth=1, num_heads=2, patch_freq=16, patch_time=20)
        >>> NaFlexModel(config).eval()(torch.zeros(2, 64, 101)).pooler_output.shape
        torch.Size([2, 16])
    """

    config: NaFlexConfig
    base_model_prefix = "naflex"
    main_input_name = "input_features"
    _input_embed_layer = "embeds"
    input_modalities = ["audio"]  # noqa: RUF012, as in transformers
    supports_gradient_checkpointing = True
    _no_split_modules = ["NaFlexBlock"]  # noqa: RUF012
    # Half precision is too coarse for decibels from -100 to 40.
    _keep_in_fp32_modules_strict = ["embeds"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": NaFlexBlock, "attentions": RotaryAttention}  # noqa: RUF012

    def __init__(self, config: NaFlexConfig) -> None:
        super().__init__(config)
        is_mean = config.global_pool == "avg"
        self.embeds = NaFlexPatches(config)
        self.norm_pre = build_norm(config, config.embed_dim, config.pre_norm)
        self.blocks = nn.ModuleList(NaFlexBlock(config) for _ in range(config.depth))
        self.norm = build_norm(config, config.embed_dim, not is_mean)
        self.attn_pool = None if is_mean else NaFlexAttentionPool(config)
        self.fc_norm = build_norm(config, config.embed_dim, is_mean)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
        elif isinstance(module, NaFlexBlock):
            for scale in (module.gamma_1, module.gamma_2):
                if scale is not None:
                    init.constant_(scale, float(self.config.init_values or 0))
        elif isinstance(module, NaFlexPatches):
            for token in (module.cls_token, module.reg_token):
                if token is not None:
                    init.normal_(token, std=std)
        elif isinstance(module, NaFlexAttentionPool):
            init.trunc_normal_(module.latent, std=self.config.embed_dim**-0.5)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, input_features: Tensor, audio_attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Encode a batch of clips.

        Args:
            input_features: Log-mel energies in decibels, (B, n_mels, T), as computed by `CEDFeatureExtractor`.
            audio_attention_mask: (B, T), 1 for frames of the clip, 0 for padding on the right. Padded frames do not
                affect the output. None: no padding.
            **kwargs: `output_hidden_states`, `output_attentions` and `return_dict`, as in transformers.

        Returns:
            Output with `pooler_output` (B, D), and `last_hidden_state` (B, rows * columns, D), the tokens of the
            patches, ordered by row (mel) and column (time); padding tokens are zero.

        Raises:
            ValueError: The input or mask has a wrong shape, the mask is not ones followed by zeros, or a clip has no
                frame. The mask values are not checked in training or in a compiled model.
        """
        config = self.config
        n_frames = count_frames(input_features, audio_attention_mask, config.n_mels, 1, self.training)
        patches, rows, columns = self._patchify(input_features, n_frames)

        # (B, rows * columns), True for the patches of the clip; None if no clip is padded
        token_mask, attention_mask = None, None
        if audio_attention_mask is not None:
            clip_columns = (n_frames + config.patch_time - 1) // config.patch_time
            is_clip = torch.arange(columns, device=n_frames.device) < clip_columns.unsqueeze(1)
            token_mask = is_clip.repeat(1, rows)
            if not torch.compiler.is_compiling() and bool(token_mask.all()):
                token_mask = None

        first_block: Any = self.blocks[0]
        tokens = self.norm_pre(self.embeds(patches).to(first_block.norm1.weight.dtype))
        if token_mask is not None:
            whole_mask = nn.functional.pad(token_mask, (config.prefix_tokens, 0), value=True)
            attention_mask = create_bidirectional_mask(config, tokens, whole_mask, allow_is_bidirectional_skip=False)
        rotation = self._rotation(rows, columns, tokens.device)
        for block in self.blocks:
            tokens = block(tokens, rotation, attention_mask, **kwargs)

        hidden = self.norm(tokens)
        pooled = self._pool(hidden, token_mask)
        patches_out = hidden[:, config.prefix_tokens :]
        if token_mask is not None:
            patches_out = patches_out * token_mask.unsqueeze(-1)
        return BaseModelOutputWithPooling(last_hidden_state=patches_out, pooler_output=pooled)

    def _patchify(self, features: Tensor, n_frames: Tensor) -> tuple[Tensor, int, int]:
        """Cut spectrograms (B, mels, T) into patches (B, rows * columns, patch_freq * patch_time).

        The last patch of a clip is filled as in `patch_pad_mode`. Return the patches, and the numbers of rows and
        columns.
        """
        config = self.config
        height, width = config.patch_freq, config.patch_time
        features = nn.functional.pad(features, (0, -features.shape[2] % width))
        frames = torch.arange(features.shape[2], device=features.device)
        is_clip = (frames < n_frames.unsqueeze(1)).unsqueeze(1)  # (B, 1, T)

        fill: Any = SILENCE_DB
        if config.patch_pad_mode == "floor":  # the lowest level of the clip
            fill = features.masked_fill(~is_clip, torch.inf).amin(dim=(1, 2), keepdim=True)
        elif config.patch_pad_mode == "repeat":  # the last frame of the clip
            last = (n_frames - 1)[:, None, None].expand(-1, features.shape[1], 1)
            fill = features.gather(2, last)
        features = torch.where(is_clip, features, fill)

        # (B, mels, T) -> (B, rows, height, columns, width) -> (B, rows * columns, height * width)
        patches = features.unflatten(1, (-1, height)).unflatten(3, (-1, width)).transpose(2, 3)
        return patches.flatten(3).flatten(1, 2), patches.shape[1], patches.shape[2]

    def _rotation(self, rows: int, columns: int, device: torch.device) -> Rotation:
        """Return the rotary angles of a grid of patches: half of them for the row, half for the column.

        The class and register tokens before the patches are not rotated: their angles are 0.
        """
        config = self.config
        quarter = config.embed_dim // config.num_heads // 4
        by_row = rotary_angles(rows, quarter, config.rope_temperature, device)  # (rows, head_dim / 4)
        by_column = rotary_angles(columns, quarter, config.rope_temperature, device)

        # (rows, columns, head_dim / 2) -> (prefix + rows * columns, head_dim / 2)
        by_row = by_row.unsqueeze(1).expand(-1, columns, -1)
        by_column = by_column.unsqueeze(0).expand(rows, -1, -1)
        angles = torch.cat([by_row, by_column], dim=-1).flatten(0, 1)
        angles = nn.functional.pad(angles, (0, 0, config.prefix_tokens, 0))
        return angles.cos(), angles.sin()

    def _pool(self, hidden: Tensor, token_mask: Tensor | None) -> Tensor:
        """Pool the output of the last block (B, prefix + N, D) to (B, D), with or without the prefix tokens."""
        prefix = self.config.prefix_tokens
        if not self.config.pool_include_prefix:
            hidden = hidden[:, prefix:]
        elif token_mask is not None:
            token_mask = nn.functional.pad(token_mask, (prefix, 0), value=True)
        return self.pool_tokens(hidden, token_mask)

    def pool_tokens(self, hidden: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Pool the tokens (B, N, D) where the mask (B, N) is True, by attention or by their mean, to (B, D)."""
        if self.attn_pool is None:
            return self.fc_norm(mean_pool(hidden, token_mask))
        return self.attn_pool(hidden, token_mask)


register(AutoModel, NaFlexConfig, NaFlexModel)
