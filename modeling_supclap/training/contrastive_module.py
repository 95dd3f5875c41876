"""A model and its objective as one module: what a step of training, of the Trainer or of a loop of yours, runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from ..modeling_supclap import SupCLAPModel
from .distributed import gather
from .grad_cache import embed_in_chunks, refuse_batch_statistics


@dataclass
class ContrastiveOutput(ModelOutput):
    """What a training step returns.

    Args:
        loss: the objective on the global batch, `()`; absent when the module is in evaluation mode.
        audio_embeds: unit norm, `(B, d)`, or `(B, R, d)` with R clips a row.
        text_embeds: unit norm, `(B, K, d)`, K texts a clip.
        logs: detached scalars of the objective, by name.
    """

    loss: torch.Tensor | None = None
    audio_embeds: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None
    logs: dict[str, torch.Tensor] | None = None


class ContrastiveModule(nn.Module):
    """A model and its objective as one module, so that the parameters of a loss train, clip and save like any other.

    Its checkpoints hold `model.*` and `objective.*`; `SupCLAPModel.from_pretrained` reads the first and leaves out the
    second, which inference does not need.

    Args:
        model: what embeds.
        objective: what turns embeddings into a loss, see `objectives.py`.
        chunk_size: clips, and texts, to hold the activations of, see `grad_cache.py`; None holds the whole batch's.
    """

    accepts_loss_kwargs = False

    def __init__(self, model: SupCLAPModel, objective: nn.Module, chunk_size: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.chunk_size = chunk_size
        if chunk_size is not None:
            refuse_batch_statistics(model)

    def forward(
        self,
        input_features: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        audio_attention_mask: torch.Tensor | None = None,
        is_longer: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        group_ids: torch.Tensor | None = None,
        class_ids: torch.Tensor | None = None,
        clip_index: torch.Tensor | None = None,
    ) -> ContrastiveOutput:
        """Embeds B rows of R clips and K texts each; in training also gathers all processes' and computes the loss."""
        audio = {
            "input_features": input_features,
            "audio_attention_mask": audio_attention_mask,
            "is_longer": is_longer,
        }
        audio_embeds = self._embed(self.model.get_audio_features, audio)
        texts = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        flat = {name: tensor.flatten(0, 1) for name, tensor in texts.items() if tensor is not None}
        text_embeds = self._embed(self.model.get_text_features, flat, mask="attention_mask")
        text_embeds = text_embeds.unflatten(0, input_ids.shape[:2])
        if len(audio_embeds) > len(text_embeds):
            audio_embeds = audio_embeds.unflatten(0, (len(text_embeds), -1))
        if not self.training:
            return ContrastiveOutput(audio_embeds=audio_embeds, text_embeds=text_embeds)
        loss, logs = self.objective(
            gather(audio_embeds),
            gather(text_embeds),
            logit_scale=self.model.logit_scale.exp().squeeze(),
            logit_bias=None if self.model.logit_bias is None else self.model.logit_bias.squeeze(),
            group_ids=None if group_ids is None else gather(group_ids),
            **({} if class_ids is None else {"class_ids": gather(class_ids)}),
        )
        logs = {**logs, "temperature": 1 / self.model.logit_scale.detach().exp().squeeze()}
        return ContrastiveOutput(loss=loss, audio_embeds=audio_embeds, text_embeds=text_embeds, logs=logs)

    def _embed(
        self, tower: Callable[..., Any], inputs: Mapping[str, torch.Tensor | None], mask: str | None = None
    ) -> torch.Tensor:
        given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        if self.chunk_size is None:
            return tower(**given).pooler_output
        return embed_in_chunks(lambda rows: tower(**rows).pooler_output, given, self.chunk_size, mask)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Passes the Trainer's request on to both towers, under the name of transformers 5.23 and later."""
        self.model.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Passes the Trainer's request on to both towers, under the name up to transformers 5.22."""
        self.model.gradient_checkpointing_enable(**kwargs)
