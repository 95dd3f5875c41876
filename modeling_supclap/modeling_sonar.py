"""SONAR text encoder: the NLLB encoder with mean pooling (Duquenne et al., 2023, arXiv 2308.11466)."""

from typing import Any

from torch import Tensor
from transformers import M2M100Config
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder
from transformers.utils.generic import can_return_tuple

from .pooling import mean_pool
from .strict_loading import StrictLoadingMixin


class SonarTextModel(StrictLoadingMixin, M2M100Encoder):
    """SONAR text encoder: an M2M100 encoder with mean pooling over all tokens except padding.

    The mean includes the language token and EOS. Checkpoints that contain only the encoder, such as
    `cointegrated/SONAR_200_text_encoder`, load directly. The default `M2M100Config` enables LayerDrop in training.
    SONAR does not use it, so `encoder_layerdrop` is set to 0.

    Example:
        >>> import torch
        >>> config = M2M100Config(vocab_size=9, d_model=8, encoder_layers=1, encoder_attention_heads=2)
        >>> SonarTextModel(config)(torch.tensor([[5, 6, 2]])).pooler_output.shape
        torch.Size([1, 8])
    """

    def __init__(self, config: M2M100Config) -> None:
        config.encoder_layerdrop = 0.0
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch of texts. Each text is a language token, the tokens of the text, and `</s>`.

        Args:
            input_ids: Token ids, (B, N). SONAR was trained with at most 514 tokens.
            attention_mask: (B, N), 1 for real tokens, 0 for padding; None masks the padding tokens in `input_ids`.
            inputs_embeds: Token embeddings (B, N, D), as an alternative to `input_ids`.

        Returns:
            Output with `last_hidden_state` (B, N, D), and `pooler_output` (B, D), the mean over the tokens.
        """
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = input_ids.ne(self.config.pad_token_id).long()
        outputs = super().forward(input_ids, attention_mask, inputs_embeds, return_dict=True, **kwargs)
        return BaseModelOutputWithPooling(
            pooler_output=mean_pool(outputs.last_hidden_state, attention_mask), **outputs
        )
