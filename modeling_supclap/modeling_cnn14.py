"""CNN14 audio encoder: a convolutional network on log-mel spectrograms (PANNs: Kong et al., 2020, arXiv 1912.10211).

MS-CLAP 2022 uses CNN14 as its audio encoder. The parameters have the same names as in the published checkpoints, except
that blocks are numbered from 0: `conv_block1` is called `conv_blocks.0`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from .auto_classes import register
from .configuration_supclap import CNN14Config
from .strict_loading import StrictLoadingMixin


class CNN14Block(GradientCheckpointingLayer):
    """Two 3 x 3 convolutions, each with batch norm and ReLU, then `pool` x `pool` average pooling and dropout."""

    def __init__(self, channels_in: int, channels_out: int, pool: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.pool = nn.AvgPool2d(pool)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, channels_in, T, mels) to (B, channels_out, T / pool, mels / pool)."""
        hidden_states = self.bn1(self.conv1(hidden_states)).relu()
        hidden_states = self.bn2(self.conv2(hidden_states)).relu()
        return self.dropout(self.pool(hidden_states))


class CNN14Model(StrictLoadingMixin, PreTrainedModel):
    """CNN14 encoder that computes one embedding per clip from a log-mel spectrogram.

    The convolution features are averaged over mel bands; then the maximum and the mean over time are added. A linear
    layer with ReLU computes the embedding. All clips in a batch must have the same length;
    `MSCLAPFeatureExtractor` repeats shorter clips.

    Example:
        >>> model = CNN14Model(CNN14Config(hidden_size=8, channels=[4, 8])).eval()
        >>> model(torch.zeros(2, 1, 101, 64)).pooler_output.shape
        torch.Size([2, 8])
    """

    config: CNN14Config
    base_model_prefix = "cnn14"
    main_input_name = "input_features"
    input_modalities = ["audio"]  # noqa: RUF012, as in transformers
    supports_gradient_checkpointing = True
    _no_split_modules = ["CNN14Block"]  # noqa: RUF012
    # Half precision is too coarse to normalise decibels from -100 to 40.
    _keep_in_fp32_modules_strict = ["bn0"]  # noqa: RUF012

    def __init__(self, config: CNN14Config) -> None:
        super().__init__(config)
        self.bn0 = nn.BatchNorm1d(config.n_mels)
        self.conv_blocks = nn.ModuleList()
        channels_in = 1

        for index, channels in enumerate(config.channels, start=1):
            pool = 1 if index == len(config.channels) else 2
            self.conv_blocks.append(CNN14Block(channels_in, channels, pool, config.dropout))
            channels_in = channels

        self.fc1 = nn.Linear(channels_in, config.hidden_size)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # He initialisation keeps the scale through all blocks; batch norms with fixed statistics do not restore it.
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            init.kaiming_uniform_(module.weight)

    def get_input_embeddings(self) -> nn.Module:
        """Return the first convolution block."""
        return self.conv_blocks[0]

    @can_return_tuple
    def forward(self, input_features: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """Encode log-mel spectrograms in decibels, (B, 1, T, n_mels), of clips that all have the same length.

        Returns:
            Output with `pooler_output` (B, hidden_size), and `last_hidden_state` (B, T', channels), averaged over mel
            bands. T' = floor(T / 2**(blocks - 1)), which is T / 32 for the six blocks of the published model.

        Raises:
            ValueError: The input has a wrong shape, or fewer than 2**(blocks - 1) frames.
        """
        shape, mels = tuple(input_features.shape), self.config.n_mels
        if len(shape) != 4 or shape[1::2] != (1, mels):
            raise ValueError(f"input_features must be (batch, 1, frames, {mels} mel bands), got {shape}")
        least = 2 ** (len(self.conv_blocks) - 1)
        if shape[2] < least:
            raise ValueError(f"clips have {shape[2]} frames; CNN14 needs at least {least}")

        # (B, 1, T, mels) -> (B, mels, T), normalised -> (B, 1, T, mels)
        hidden = self.bn0(input_features.squeeze(1).transpose(1, 2).to(self.bn0.weight.dtype))
        hidden = hidden.transpose(1, 2).unsqueeze(1).to(self.fc1.weight.dtype)

        for block in self.conv_blocks:
            hidden = block(hidden)

        # (B, channels, T', mels') -> (B, T', channels)
        hidden = hidden.mean(dim=3).transpose(1, 2)
        pooled = hidden.amax(dim=1) + hidden.mean(dim=1)
        pooled = self.dropout(self.fc1(self.dropout(pooled)).relu())

        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


register(AutoModel, CNN14Config, CNN14Model)
