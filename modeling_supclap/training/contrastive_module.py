"""Module that combines a model and its objective, for the Trainer or your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from ..modeling_supclap import SupCLAPModel, unit_norm
from .distributed import distributed_tiles, gather
from .frozen import FrozenCache
from .grad_cache import embed_in_chunks, real_lengths, refuse_batch_statistics

_MIN_CHUNK_CELLS = {"attention_mask": 128, "audio_attention_mask": 1000}
"""Minimum tokens or frames per chunk on a CPU; for smaller chunks an extra call costs more than padding."""

_GPU_CELLS = {"attention_mask": 16384, "audio_attention_mask": 65536}
"""Tokens or frames that keep their activations on a GPU, where an extra call costs more than padding."""


@dataclass
class ContrastiveOutput(ModelOutput):
    """Output of a training step.

    Args:
        loss: Loss on the global batch, `()`; None in evaluation mode.
        audio_embeds: `(B, d)`, unit norm; `(B, R, d)` if each row has R clips.
        text_embeds: `(B, K, d)`, unit norm, K texts per row.
        logs: Dict from name to a detached scalar: the logged values of the objective, and the temperature. None in
            evaluation mode.
    """

    loss: torch.Tensor | None = None
    audio_embeds: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None
    logs: dict[str, torch.Tensor] | None = None


class ContrastiveModule(nn.Module):
    """A model and its objective in one module, so that the loss parameters are also trained, clipped and saved.

    Checkpoints contain the keys `model.*` and `objective.*`. `SupCLAPModel.from_pretrained` loads `model.*` and ignores
    `objective.*`, because inference does not need the objective.

    The rows of a batch are sorted by length and embedded in chunks, see `grad_cache.py`. If a row has several texts or
    clips, a training step keeps the activations for one text and one clip per row, and recomputes the others in the
    backward pass. Training on eight languages then needs no more memory than on one. On a GPU, the step keeps the
    activations of at least 16,384 tokens and 65,536 frames; set a smaller `chunk_size` to save memory.

    Args:
        model: Model that computes the embeddings.
        objective: Module that computes the loss from the embeddings, see `objectives.py`.
        chunk_size: Number of clips, and number of texts, with activations in memory at a time. None: one clip and one
            text per row; on a GPU at least the numbers above.
        cache_frozen: When to cache the outputs of towers without trainable parameters. "auto": if the tower uses no
            random numbers, such as dropout, see `frozen.py`. "always": also put the tower in evaluation mode, so that
            it has no dropout. "never": no caching.
    """

    accepts_loss_kwargs = False

    def __init__(
        self, model: SupCLAPModel, objective: nn.Module, chunk_size: int | None = None, cache_frozen: str = "auto"
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.chunk_size = chunk_size
        self.cache_frozen = cache_frozen
        self._caches = {
            "audio": FrozenCache([model.audio_model]),
            "text": FrozenCache([model.text_model, model.text_dense]),
        }
        refuse_batch_statistics(model)

    def train(self, mode: bool = True) -> ContrastiveModule:
        """Set training or evaluation mode; with `cache_frozen="always"`, frozen towers stay in evaluation mode."""
        super().train(mode)
        for kind, cache in self._caches.items():
            if self.cache_frozen == "always" and cache.is_frozen():
                self.model.get_submodule(f"{kind}_model").eval()
        return self

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
        audio_lengths: Sequence[int] | None = None,
        text_lengths: Sequence[int] | None = None,
    ) -> ContrastiveOutput:
        """Embed B rows with R clips and K texts each. In training mode, also compute the loss on the global batch.

        Args:
            input_features: `(B R, ...)`, audio features of the clips.
            input_ids: `(B, K, L)`, token ids.
            attention_mask: `(B, K, L)`, 1 for real tokens.
            audio_attention_mask: `(B R, frames)`, 1 for real frames.
            is_longer: `(B R, 1)`, input for HTSAT towers.
            token_type_ids: `(B, K, L)`.
            group_ids: Group ids of the clips, passed to the objective.
            class_ids: Class ids for TeminAL stage a, passed to the objective; None: not passed.
            clip_index: Not used.
            audio_lengths: Number of real frames of each of the B R clips. None: computed from the mask, which makes the
                CPU wait for the GPU.
            text_lengths: Number of real tokens of each of the B K texts. None: computed from the mask.
        """
        count = len(input_ids)
        texts = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        for name, tensor in texts.items():
            texts[name] = None if tensor is None else tensor.flatten(0, 1)  # (B, K, L) -> (B K, L)

        # Texts first: the backward pass begins with the clips and frees their activations before it reaches the texts.
        text_embeds = self._embed(self.model.get_text_features, texts, "attention_mask", count, text_lengths)
        text_embeds = text_embeds.unflatten(0, input_ids.shape[:2])  # (B K, d) -> (B, K, d)

        audio = {"input_features": input_features, "audio_attention_mask": audio_attention_mask, "is_longer": is_longer}
        audio_embeds = self._embed(self.model.get_audio_features, audio, "audio_attention_mask", count, audio_lengths)
        if len(audio_embeds) > count:
            audio_embeds = audio_embeds.unflatten(0, (count, -1))  # (B R, d) -> (B, R, d)
        if not self.training:
            return ContrastiveOutput(audio_embeds=audio_embeds, text_embeds=text_embeds)

        with distributed_tiles():
            loss, logs = self.objective(
                gather(audio_embeds),
                gather(text_embeds),
                logit_scale=self.model.logit_scale.exp().squeeze(),
                logit_bias=None if self.model.logit_bias is None else self.model.logit_bias.squeeze(),
                group_ids=None if group_ids is None else gather(group_ids),
                **({} if class_ids is None else {"class_ids": gather(class_ids)}),
            )
        if self.model.logit_bias is not None:
            # Most objectives do not use the bias; DistributedDataParallel would fail if it had no gradient.
            loss = loss + 0 * self.model.logit_bias.sum()
        logs = {**logs, "temperature": 1 / self.model.logit_scale.detach().exp().squeeze()}
        return ContrastiveOutput(loss=loss, audio_embeds=audio_embeds, text_embeds=text_embeds, logs=logs)

    def _embed(
        self,
        tower: Callable[..., Any],
        inputs: Mapping[str, torch.Tensor | None],
        mask: str,
        count: int,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Embed all clips or texts of `count` rows, R per row: `(count R, ...) -> (count R, d)`."""
        present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        options: dict[str, Any] = {"mask": mask if mask in present else None}

        kind = "text" if "input_ids" in present else "audio"
        cache, pool = self._caches[kind], getattr(self, f"_pool_{kind}")
        if self.training and self.cache_frozen != "never" and cache.is_usable(pool, present):
            in_chunks = partial(embed_in_chunks, pool, chunk_size=self.chunk_size or count, **options)
            pooled = cache(in_chunks, present, **options)  # (count R, width)
            return unit_norm(self.model.get_submodule(f"{kind}_projection")(pooled))

        if "input_ids" in present:
            options["tokens"] = self.model.get_input_embeddings()

        if mask in present:
            options["lengths"] = lengths = real_lengths(present[mask]) if lengths is None else lengths
        chunk_size = self.chunk_size
        if chunk_size is None:
            rows = next(iter(present.values()))
            longest = 1 if lengths is None else max(1, *lengths[:: len(rows) // count])
            chunk_size, options["kept_cells"] = count, count * longest
            options["fewest_cells"] = _MIN_CHUNK_CELLS[mask]
            if mask in present and _is_on_gpu(rows):
                chunk_size, options["kept_cells"] = None, max(count * longest, _GPU_CELLS[mask])
                options["fewest_cells"] = None

        def embed(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return tower(**rows).pooler_output

        return embed_in_chunks(embed, present, chunk_size, **options)

    def _pool_audio(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        pooled: torch.Tensor = self.model.run_audio_tower(**rows).pooler_output
        return pooled

    def _pool_text(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.model.run_text_tower(**rows)[1]

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Enable activation checkpointing in both towers; called by the Trainer of transformers 5.23 and later."""
        self.model.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Enable activation checkpointing in both towers; called by the Trainer up to transformers 5.22."""
        self.model.gradient_checkpointing_enable(**kwargs)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda
