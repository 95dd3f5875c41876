"""CED, a vision transformer on patches of a log-mel spectrogram (Dinkel et al., 2023, arXiv 2308.11957).

Its patches are 16 mel bands x 16 frames; with patches of 64 x 4 the same encoder is Dasheng (arXiv 2406.06992).

Parameter names are those of the published checkpoints. Unlike the published code this one takes a mask: whatever
shares a batch with a clip, its embedding is the one it has alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .auto_classes import register
from .configuration_supclap import CEDConfig
from .strict_loading import StrictLoadingMixin


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scaling + mask) v, spelled out so that the weights can be returned.

    Query, key and value are (B, heads, N, head_dim), the mask is broadcastable to (B, heads, N, N). Returns the mixed
    values (B, N, heads, head_dim) and the weights (B, heads, N, N). The arguments are those of all implementations
    that transformers knows.
    """
    scores = query @ key.transpose(-2, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


class CEDAttention(nn.Module):
    """Multi-head self-attention with one fused projection, whose rows are queries, keys, values in this order."""

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
        self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, N, D) to (B, N, D), and the weights where the implementation returns them."""
        batch, tokens, width = hidden_states.shape
        qkv = self.qkv(hidden_states).view(batch, tokens, 3, -1, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.attn_drop_rate if self.training else 0.0
        mixed, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )

        return self.proj_drop(self.proj(mixed.reshape(batch, tokens, width))), weights


class CEDMLP(nn.Module):
    """Linear, exact GELU, Linear."""

    def __init__(self, config: CEDConfig) -> None:
        super().__init__()
        inner = int(config.embed_dim * config.mlp_ratio)
        self.fc1 = nn.Linear(config.embed_dim, inner)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(inner, config.embed_dim)
        self.drop = nn.Dropout(config.drop_rate)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, N, D) to (B, N, D)."""
        return self.drop(self.fc2(self.drop(self.act(self.fc1(hidden_states)))))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016, arXiv 1603.09382): skips a branch for whole samples, in training.

    Args:
        rate: Probability that a sample's branch is dropped; what is kept is scaled by 1 / (1 - rate).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        """Any shape with the batch first; the shape is kept."""
        if not self.training or self.rate == 0:
            return branch
        keep = branch.new_empty(len(branch), *[1] * (branch.ndim - 1)).bernoulli_(1 - self.rate)
        return branch * keep / (1 - self.rate)


class CEDBlock(GradientCheckpointingLayer):
    """One pre-norm transformer block: x += attention(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self, config: CEDConfig, drop_path_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps)
        self.attn = CEDAttention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps)
        self.mlp = CEDMLP(config)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        """(B, N, D) to (B, N, D)."""
        attended, _ = self.attn(self.norm1(hidden_states), attention_mask, **kwargs)
        hidden_states = hidden_states + self.drop_path(attended)
        return hidden_states + self.drop_path(self.mlp(self.norm2(hidden_states)))


class CEDBatchNorm(nn.BatchNorm1d):
    """Normalises mel bands by the statistics of the checkpoint, in training too."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features (B, mels, T) of any type to its own."""
        features = features.to(self.weight.dtype)
        return nn.functional.batch_norm(
            features, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


class CEDPatchConv2d(nn.Conv2d):
    """A convolution of patches that do not overlap, as one product: on a CPU its gradient takes a sixth of the time."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 1, mels, T) to (N, D, rows, columns), the D numbers of a patch side by side in memory."""
        height, width = self.weight.shape[2:]
        rows, columns = images.shape[2] // height, images.shape[3] // width
        images = images[:, 0, : rows * height, : columns * width]

        # (N, mels, T) -> (N, rows, height, columns, width) -> (N, rows, columns, height * width)
        patches = images.unflatten(1, (rows, height)).unflatten(3, (columns, width)).transpose(2, 3).flatten(3)
        return nn.functional.linear(patches, self.weight.flatten(1), self.bias).movedim(-1, 1)


class CEDPatchEmbed(nn.Module):
    """Cuts a spectrogram into patches and embeds each."""

    def __init__(self, config: CEDConfig) -> None:
        super().__init__()
        patch = (config.patch_mels, config.patch_frames)
        self.proj = CEDPatchConv2d(1, config.embed_dim, kernel_size=patch, stride=patch)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (B, T, mels) to patches (B, D, rows, floor(T / frames of a patch))."""
        return self.proj(frames.transpose(1, 2).unsqueeze(1))


class CEDPreTrainedModel(StrictLoadingMixin, PreTrainedModel):
    """What transformers needs to know about CED in order to load, place and initialise it."""

    config: CEDConfig
    # The published checkpoints keep the encoder under "encoder." and their tagging head beside it.
    base_model_prefix = "encoder"
    _keys_to_ignore_on_load_unexpected = [r"^outputlayer\."]  # noqa: RUF012, as in transformers
    main_input_name = "input_features"
    input_modalities = ["audio"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _no_split_modules = ["CEDBlock"]  # noqa: RUF012
    # Decibels from -100 to 40 need more bits than a half-precision normalisation has.
    _keep_in_fp32_modules_strict = ["init_bn"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": CEDBlock, "attentions": CEDAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
        elif isinstance(module, CEDModel):
            init.normal_(module.time_pos_embed, std=std)
            init.normal_(module.freq_pos_embed, std=std)


class CEDModel(CEDPreTrainedModel):
    """The CED encoder: log-mel frames to one vector per clip, whatever the clip's length and its batch mates.

    A clip of up to `target_length` frames (10.12 s) is one sequence of floor(frames / 16) x 4 patches. A longer one
    is cut in ceil(frames / target_length) chunks that do not see each other; the last is filled with zeros after
    normalisation and attended to entirely, as the published weights were used. The clip's vector is the mean over
    the tokens of all its chunks.

    The statistics that normalise the mel bands are those of the checkpoint, in training too (the published code lets
    them follow the batches): so a clip's embedding and gradient never depend on its batch mates, on how a batch is
    split over processes, or on gradient caching. Before training from scratch, set them with `fit_normalisation`.

    Args:
        config: Shape of the encoder.

    Example:
        >>> model = CEDModel(CEDConfig(embed_dim=8, depth=1, num_heads=2)).eval()
        >>> model(torch.zeros(2, 64, 101)).pooler_output.shape
        torch.Size([2, 8])
    """

    def __init__(self, config: CEDConfig) -> None:
        super().__init__(config)
        rows, columns = config.n_mels // config.patch_mels, config.target_length // config.patch_frames
        self.init_bn = CEDBatchNorm(config.n_mels)
        self.patch_embed = CEDPatchEmbed(config)
        self.time_pos_embed = nn.Parameter(torch.empty(1, config.embed_dim, 1, columns))
        self.freq_pos_embed = nn.Parameter(torch.empty(1, config.embed_dim, rows, 1))
        self.pos_drop = nn.Dropout(config.drop_rate)
        steps = max(config.depth - 1, 1)
        self.blocks = nn.ModuleList(
            CEDBlock(config, config.drop_path_rate * index / steps) for index in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The layer that makes tokens of the input."""
        return self.patch_embed

    @torch.no_grad()
    def fit_normalisation(self, input_features: torch.Tensor, audio_attention_mask: torch.Tensor | None = None) -> None:
        """Sets the statistics that normalise each mel band to those of some clips; for training from scratch.

        Args:
            input_features: (B, n_mels, T), a few hundred clips.
            audio_attention_mask: (B, T), 1 for a clip's own frames; None means that there is no padding.
        """
        frames = input_features.transpose(1, 2)
        own = frames.flatten(0, 1) if audio_attention_mask is None else frames[audio_attention_mask.bool()]
        variance, mean = torch.var_mean(own.double(), dim=0, correction=0)
        self.init_bn.load_state_dict({"running_mean": mean, "running_var": variance}, strict=False)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, input_features: torch.Tensor, audio_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Encodes a batch of clips.

        Args:
            input_features: Log-mel energies in decibels, (B, n_mels, T), as `CEDFeatureExtractor` makes them.
            audio_attention_mask: (B, T), 1 for a clip's own frames and 0 for the padding after them. Padding takes
                part in nothing. None means that there is no padding.
            **kwargs: `output_hidden_states`, `output_attentions` and `return_dict`, as in transformers.

        Returns:
            `pooler_output` (B, D), and `last_hidden_state` (B, chunks * tokens of a chunk, D) in the order chunk,
            mel row, time column; tokens of padding are zero. `hidden_states` and `attentions` have one entry on
            their first axis for each chunk that holds sound (when compiled for every chunk): chunk by chunk, clip
            after clip.

        Raises:
            ValueError: The input has another shape, the mask is not ones followed by zeros, or a clip is shorter
                than one patch.
        """
        n_frames = self._count_frames(input_features, audio_attention_mask)
        frames = self._normalise(input_features, audio_attention_mask)
        chunks = self._split(frames)
        token_mask = self._token_mask(n_frames, *chunks.shape[1:3])

        # (B, chunks); None where all are computed. While a graph is traced that is always so: its shapes are fixed.
        one_chunk = audio_attention_mask is None or chunks.shape[1] == 1
        live = None if one_chunk or torch.compiler.is_compiling() else token_mask.any(dim=-1)

        tokens = self._embed(_take(chunks, live))
        attention_mask = None
        if audio_attention_mask is not None:
            attention_mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=tokens, attention_mask=_take(token_mask, live)
            )

        for block in self.blocks:
            tokens = block(tokens, attention_mask, **kwargs)

        hidden = _put_back(self.norm(tokens), live, chunks.shape[:2])

        weights = token_mask.unsqueeze(-1).to(hidden.dtype)
        hidden = (hidden * weights).flatten(1, 2)
        pooled = hidden.sum(dim=1) / weights.sum(dim=(1, 2))

        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def _count_frames(self, features: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """How many frames each clip has, (B,); or an error where this can be no batch of spectrograms with its mask."""
        if features.ndim != 3 or features.shape[1] != self.config.n_mels:
            raise ValueError(
                f"input_features must be (batch, {self.config.n_mels} mel bands, frames), got {tuple(features.shape)}"
            )
        # Sizes by `shape`: `torch.export` takes the length of a tensor for a constant.
        if mask is not None and mask.shape != (features.shape[0], features.shape[2]):
            raise ValueError(
                f"audio_attention_mask must have one number a frame, {(len(features), features.shape[2])}, "
                f"got {tuple(mask.shape)}"
            )

        # Values are not known while a graph is traced (torch.compile, torch.export), and reading them in each training
        # step would wait for the GPU: the feature extractor makes no other masks.
        is_unchecked = torch.compiler.is_compiling() or self.training
        if mask is None:
            n_frames, shortest = torch.full((features.shape[0],), features.shape[2]), features.shape[2]
        else:
            if not is_unchecked and (mask[:, 1:] > mask[:, :-1]).any():
                raise ValueError("audio_attention_mask must be ones followed by zeros; pad clips on the right")
            n_frames = mask.sum(dim=1)
            shortest = self.config.patch_frames if is_unchecked else int(n_frames.min())
        if shortest < self.config.patch_frames:
            raise ValueError(
                f"clip {int(n_frames.argmin())} has {shortest} frames, fewer than the {self.config.patch_frames} of "
                "one patch; give longer clips"
            )

        return n_frames.to(features.device)

    def _normalise(self, features: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Features (B, mels, T) to normalised frames (B, T, mels); padding becomes 0, a band's mean."""
        frames = self.init_bn(features).transpose(1, 2)
        if mask is not None:
            frames = frames.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        return frames.to(self.patch_embed.proj.weight.dtype)

    def _split(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (B, T, mels) to chunks (B, chunks, frames of a chunk, mels)."""
        length = self.config.target_length
        # A traced graph keeps an incomplete chunk, to which the mask of tokens gives no weight.
        if not self.config.pad_last and frames.shape[1] > length and not torch.compiler.is_compiling():
            frames = frames[:, : frames.shape[1] // length * length]

        # Arithmetic and no branch: while a graph is traced T is a symbol, and the graph serves every T.
        n_frames = frames.shape[1]
        n_chunks = (n_frames + length - 1) // length
        chunk_frames = torch.sym_min(n_frames, length)
        frames = nn.functional.pad(frames, (0, 0, 0, n_chunks * chunk_frames - n_frames))

        return frames.reshape(frames.shape[0], n_chunks, chunk_frames, frames.shape[2])

    def _token_mask(self, n_frames: torch.Tensor, n_chunks: int, chunk_frames: int) -> torch.Tensor:
        """Which tokens of each chunk are a clip's own, (B, chunks, tokens of a chunk)."""
        length, patch = self.config.target_length, self.config.patch_frames
        whole = n_frames // length * length
        filled = whole + (n_frames > whole) * length if self.config.pad_last else whole
        ends = torch.where(n_frames > length, filled, n_frames)
        starts = torch.arange(n_chunks, device=n_frames.device) * length
        own_columns = (ends.unsqueeze(1) - starts).clamp(0, chunk_frames) // patch
        columns = torch.arange(chunk_frames // patch, device=n_frames.device) < own_columns.unsqueeze(-1)

        return columns.repeat(1, 1, self.config.n_mels // self.config.patch_mels)

    def _embed(self, chunks: torch.Tensor) -> torch.Tensor:
        """Chunks (N, frames, mels) to tokens with their positions (N, tokens, D), time running fastest."""
        patches = self.patch_embed(chunks)
        patches = patches + self.time_pos_embed[..., : patches.shape[-1]] + self.freq_pos_embed
        return self.pos_drop(patches.flatten(2).transpose(1, 2))


def _take(chunks: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """The live ones of (B, chunks, ...) one after the other, (N, ...)."""
    return chunks.flatten(0, 1) if live is None else chunks[live]


def _put_back(tokens: torch.Tensor, live: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """The inverse of `_take`, (N, ...) to (B, chunks, ...), zero where a clip has no such chunk."""
    if live is None:
        return tokens.unflatten(0, shape)
    grid = tokens.new_zeros(*shape, *tokens.shape[1:])
    grid[live] = tokens
    return grid


register(AutoModel, CEDConfig, CEDModel)
