"""CED audio encoder: a vision transformer on log-mel spectrogram patches (Dinkel et al., 2023, arXiv 2308.11957).

CED uses patches of 16 mel bands x 16 frames. Dasheng (arXiv 2406.06992) is the same encoder with patches of 64 x 4.

The parameters have the same names as in the published checkpoints. Unlike the published code, this model accepts a
padding mask, so that the embedding of a clip does not depend on the other clips in the batch.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward
from transformers.models.clap.modeling_clap import ClapDropPath
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .auto_classes import register
from .configuration_supclap import CEDConfig
from .frames import count_frames
from .strict_loading import StrictLoadingMixin


class CEDAttention(nn.Module):
    """Multi-head self-attention. One linear layer computes queries, keys and values, in this order."""

    def __init__(self, config: CEDConfig) -> None:
        super().__init__()
        self.config = config
        self.is_causal = False
        self.head_dim = config.embed_dim // config.num_heads
        self.scaling = self.head_dim**-0.5
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=config.qkv_bias)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)
        self.proj_drop = nn.Dropout(config.drop_rate)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, N, D) and the attention weights. The weights are None with SDPA or flash attention."""
        batch, tokens, width = hidden_states.shape
        qkv = self.qkv(hidden_states).view(batch, tokens, 3, -1, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        implementation = self.config._attn_implementation
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        options = {"dropout": self.config.attn_drop_rate if self.training else 0.0, "scaling": self.scaling, **kwargs}
        mixed, weights = attend(self, query, key, value, attention_mask, **options)
        return self.proj_drop(self.proj(mixed.reshape(batch, tokens, width))), weights


class CEDBlock(GradientCheckpointingLayer):
    """Pre-norm transformer block: x += attention(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self, config: CEDConfig, drop_path_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps)
        self.attn = CEDAttention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps)
        inner = int(config.embed_dim * config.mlp_ratio)
        mlp = OrderedDict(  # named as in the checkpoints
            fc1=nn.Linear(config.embed_dim, inner),
            act=nn.GELU(),  # not the tanh approximation
            drop1=nn.Dropout(config.drop_rate),
            fc2=nn.Linear(inner, config.embed_dim),
            drop2=nn.Dropout(config.drop_rate),
        )
        self.mlp = nn.Sequential(mlp)
        # stochastic depth, Huang et al., 2016, arXiv 1603.09382
        self.drop_path = ClapDropPath(drop_path_rate)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        attended, _ = self.attn(self.norm1(hidden_states), attention_mask, **kwargs)
        hidden_states = hidden_states + self.drop_path(attended)
        return hidden_states + self.drop_path(self.mlp(self.norm2(hidden_states)))


class CEDBatchNorm(nn.BatchNorm1d):
    """Batch norm over mel bands that always uses the running statistics, even during training."""

    def forward(self, features: Tensor) -> Tensor:
        """Convert (B, mels, T) to the dtype of the weights, and normalise each mel band."""
        features = features.to(self.weight.dtype)
        return nn.functional.batch_norm(
            features, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


class CEDPatchConv2d(nn.Conv2d):
    """Convolution with stride = kernel size, as one matrix product. This makes the gradient 6 x faster on a CPU.

    Use the weights only inside `forward`. With a `device_map`, they may be on disk until `forward` is called.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to patches (B, D, rows, columns), channels last in memory, as `nn.Conv2d` does."""
        height, width = self.kernel_size
        rows, columns = images.shape[2] // height, images.shape[3] // width
        images = images[:, :, : rows * height, : columns * width]

        # (B, C, H, W) -> (B, C, rows, height, columns, width) -> (B, rows, columns, C * height * width)
        patches = images.unflatten(2, (rows, height)).unflatten(4, (columns, width)).permute(0, 2, 4, 1, 3, 5)
        return nn.functional.linear(patches.flatten(3), self.weight.flatten(1), self.bias).movedim(-1, 1)


class CEDModel(StrictLoadingMixin, PreTrainedModel):
    """CED encoder that computes one embedding per clip from a log-mel spectrogram of any length.

    A clip of up to `target_length` frames (10.12 s) is encoded as one sequence of floor(frames / 16) x 4 patches. A
    longer clip is split into ceil(frames / target_length) chunks, and attention is computed within each chunk. The last
    chunk is padded with zeros after normalisation. The attention includes this padding, as in the published code. With
    `pad_last=False`, an incomplete last chunk is dropped. The embedding is the mean over the tokens of all chunks.

    The mel bands are normalised with the statistics stored in the checkpoint, even during training (the published code
    updates them with each batch). Therefore the embedding of a clip does not depend on the other clips in the batch.
    Before training from scratch, call `fit_normalisation` to set the statistics.

    Example:
        >>> model = CEDModel(CEDConfig(embed_dim=8, depth=1, num_heads=2)).eval()
        >>> model(torch.zeros(2, 64, 101)).pooler_output.shape
        torch.Size([2, 8])
    """

    config: CEDConfig
    # In the published checkpoints, the encoder has the prefix "encoder."; the tagging head has "outputlayer.".
    base_model_prefix = "encoder"
    _keys_to_ignore_on_load_unexpected = [r"^outputlayer\."]  # noqa: RUF012, as in transformers
    main_input_name = "input_features"
    _input_embed_layer = "patch_embed"
    input_modalities = ["audio"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _no_split_modules = ["CEDBlock"]  # noqa: RUF012
    # Half precision is too coarse to normalise decibels from -100 to 40.
    _keep_in_fp32_modules_strict = ["init_bn"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": CEDBlock, "attentions": CEDAttention}  # noqa: RUF012

    def __init__(self, config: CEDConfig) -> None:
        super().__init__(config)
        self.patch_mels, self.patch_frames = patch = (config.patch_mels, config.patch_frames)
        rows, columns = config.n_mels // self.patch_mels, config.target_length // self.patch_frames
        self.init_bn = CEDBatchNorm(config.n_mels)
        conv = CEDPatchConv2d(1, config.embed_dim, kernel_size=patch, stride=patch)
        # "proj", as in the checkpoints
        self.patch_embed = nn.Sequential(OrderedDict(proj=conv))
        self.time_pos_embed = nn.Parameter(torch.empty(1, config.embed_dim, 1, columns))
        self.freq_pos_embed = nn.Parameter(torch.empty(1, config.embed_dim, rows, 1))
        self.pos_drop = nn.Dropout(config.drop_rate)
        steps = max(config.depth - 1, 1)
        rates = [config.drop_path_rate * index / steps for index in range(config.depth)]
        self.blocks = nn.ModuleList(CEDBlock(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
        elif isinstance(module, CEDModel):
            init.normal_(module.time_pos_embed, std=std)
            init.normal_(module.freq_pos_embed, std=std)

    @torch.no_grad()
    def fit_normalisation(self, input_features: Tensor, audio_attention_mask: Tensor | None = None) -> None:
        """Set the mean and variance of each mel band from a few hundred clips. The arguments are as in `forward`."""
        frames = input_features.transpose(1, 2)
        frames = frames.flatten(0, 1) if audio_attention_mask is None else frames[audio_attention_mask.bool()]
        variance, mean = torch.var_mean(frames.double(), dim=0, correction=0)
        self.init_bn.load_state_dict({"running_mean": mean, "running_var": variance}, strict=False)

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
            Output with `pooler_output` (B, D), and `last_hidden_state` (B, chunks * tokens per chunk, D). Tokens are
            ordered by chunk, patch row (mel) and patch column (time); padding tokens are zero. The first axis of
            `hidden_states` and `attentions` is the index of a chunk: all chunks of clip 0, then of clip 1, and so on.
            Chunks with only padding are excluded, except in a compiled model.

        Raises:
            ValueError: The input or mask has a wrong shape, the mask is not ones followed by zeros, or a clip is
                shorter than one patch. The mask values are not checked in training or in a compiled model.
        """
        mels, patch = self.config.n_mels, self.patch_frames
        n_frames = count_frames(input_features, audio_attention_mask, mels, patch, self.training)
        frames = self.init_bn(input_features).transpose(1, 2)  # (B, T, mels)
        if audio_attention_mask is not None:
            frames = frames.masked_fill(audio_attention_mask.unsqueeze(-1) == 0, 0.0)
        chunks = self._split(frames.to(self.time_pos_embed.dtype))
        token_mask = self._token_mask(n_frames, *chunks.shape[1:3])

        # (B, chunks, ...) -> (N, ...), without chunks of padding, except in a traced graph, which has fixed shapes
        inputs, mask, live = chunks.flatten(0, 1), token_mask.flatten(0, 1), None
        is_padded = audio_attention_mask is not None
        if is_padded and not torch.compiler.is_compiling():
            # in training, the CPU waits for a GPU only here
            counts = mask.sum(dim=-1).tolist()
            is_padded = any(0 < count < mask.shape[1] for count in counts)
            if 0 in counts:
                live = torch.tensor([chunk for chunk, count in enumerate(counts) if count])
                live = live.to(mask.device, non_blocking=True)
                inputs, mask = inputs.index_select(0, live), mask.index_select(0, live)

        # (N, frames, mels) -> (N, D, rows, columns) -> (N, tokens, D)
        patches = self.patch_embed(inputs.transpose(1, 2).unsqueeze(1))
        patches = patches + self.time_pos_embed[..., : patches.shape[-1]] + self.freq_pos_embed
        tokens = self.pos_drop(patches.flatten(2).transpose(1, 2))
        attention_mask = None
        if is_padded:
            attention_mask = create_bidirectional_mask(self.config, tokens, mask, allow_is_bidirectional_skip=False)

        for block in self.blocks:
            tokens = block(tokens, attention_mask, **kwargs)

        # (N, tokens, D) -> (B, chunks, tokens, D), with zeros for the chunks that were not computed
        hidden = self.norm(tokens)
        if live is not None:
            zeros = hidden.new_zeros(token_mask.shape[:2].numel(), *hidden.shape[1:])
            hidden = zeros.index_copy(0, live, hidden)
        hidden = hidden.unflatten(0, chunks.shape[:2])

        weights = token_mask.unsqueeze(-1).to(hidden.dtype)
        hidden = (hidden * weights).flatten(1, 2)
        pooled = hidden.sum(dim=1) / weights.sum(dim=(1, 2))

        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def _split(self, frames: Tensor) -> Tensor:
        """Split frames (B, T, mels) into chunks (B, chunks, frames per chunk, mels)."""
        length = self.config.target_length
        # A traced graph keeps an incomplete chunk; the token mask excludes it from the mean.
        if not self.config.pad_last and frames.shape[1] > length and not torch.compiler.is_compiling():
            frames = frames[:, : frames.shape[1] // length * length]

        # No branch on T: T is symbolic in a traced graph, so that one graph works for every T.
        n_frames = frames.shape[1]
        n_chunks = (n_frames + length - 1) // length
        chunk_frames = torch.sym_min(n_frames, length)
        frames = nn.functional.pad(frames, (0, 0, 0, n_chunks * chunk_frames - n_frames))
        return frames.reshape(frames.shape[0], n_chunks, chunk_frames, frames.shape[2])

    def _token_mask(self, n_frames: Tensor, n_chunks: int, chunk_frames: int) -> Tensor:
        """Return a mask (B, chunks, tokens per chunk), True for tokens of the clip and False for padding."""
        length, patch = self.config.target_length, self.patch_frames
        whole = n_frames // length * length
        filled = whole + (n_frames > whole) * length if self.config.pad_last else whole
        ends = torch.where(n_frames > length, filled, n_frames)
        starts = torch.arange(n_chunks, device=n_frames.device) * length
        clip_columns = (ends.unsqueeze(1) - starts).clamp(0, chunk_frames) // patch
        columns = torch.arange(chunk_frames // patch, device=n_frames.device) < clip_columns.unsqueeze(-1)
        return columns.repeat(1, 1, self.config.n_mels // self.patch_mels)


register(AutoModel, CEDConfig, CEDModel)
