"""Module that combines a model and its objective, for the Trainer or your own training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.utils import ModelOutput

from ..configuration_supclap import AUDIO_TOWERS
from ..modeling_supclap import SupCLAPModel
from .distributed import distributed_tiles, gather
from .frozen import FrozenCache
from .grad_cache import Rows, embed_in_chunks, real_lengths

_MASKS = {"text": "attention_mask", "audio": "audio_attention_mask"}

_MIN_CHUNK_CELLS = {"text": 128, "audio": 1000}
"""Minimum tokens or frames per chunk on a CPU; for smaller chunks an extra call costs more than padding."""

_KEPT_TOKENS = {"cuda": 16384}
"""Minimum tokens with activations in memory on a GPU, where an extra call costs more than padding."""

_CELLS_PER_TOKEN = {"text": 1, "audio": 4}
"""Tokens or frames with activations in memory for each kept token."""


@dataclass
class ContrastiveOutput(ModelOutput):
    """Output of a training step.

    Args:
        loss: Loss on the global batch, `()`, or None in evaluation mode.
        audio_embeds: `(B, d)`, unit norm, or `(B, R, d)` if each row has R clips.
        text_embeds: `(B, K, d)`, unit norm, K texts per row.
        logs: Logged values of the objective, and the temperature: detached scalars. None in evaluation mode.
    """

    loss: torch.Tensor | None = None
    audio_embeds: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None
    logs: dict[str, torch.Tensor] | None = None


class ContrastiveModule(nn.Module):
    """A model and its objective in one module, so that the loss parameters are also trained, clipped and saved.

    Checkpoints contain the keys `model.*` and `objective.*`. `SupCLAPModel.from_pretrained` loads `model.*` only.

    The rows of a batch are sorted by length and embedded in chunks (see `grad_cache.py`). By default, a training step
    keeps the activations for one text and one clip per row, and on a GPU for at least 16,384 tokens and 65,536 frames.
    It recomputes the others in the backward pass, so that eight languages need no more memory than one.

    Args:
        objective: Module that computes the loss from the embeddings (see `objectives.py`).
        chunk_size: Number of clips, and number of texts, with activations in memory at a time. None: `kept_tokens` is
            used instead.
        cache_frozen: When to cache the outputs of towers without trainable parameters. "auto": if the tower is
            deterministic in training mode (no dropout, for example). "always": put the tower in evaluation mode, which
            disables dropout. "never": no caching.
        kept_tokens: Maximum number of tokens with activations in memory; four frames count as one token. Texts or clips
            that form one chunk always keep their activations. None: the default described above.
    """

    accepts_loss_kwargs = False

    def __init__(
        self,
        model: SupCLAPModel,
        objective: nn.Module,
        chunk_size: int | None = None,
        cache_frozen: str = "auto",
        kept_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.chunk_size, self.kept_tokens = chunk_size, kept_tokens
        self.cache_frozen = cache_frozen
        self.caches = {
            "audio": FrozenCache([model.audio_model]),
            "text": FrozenCache([model.text_model, model.text_dense]),
        }
        # In a plain list, so that they are not registered a second time.
        self._batch_norms = [(name, part) for name, part in model.named_modules() if isinstance(part, _BatchNorm)]

    def train(self, mode: bool = True) -> ContrastiveModule:
        """Set training or evaluation mode. With `cache_frozen="always"`, frozen towers stay in evaluation mode."""
        super().train(mode)
        for kind, cache in self.caches.items():
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
        negative_mask: torch.Tensor | None = None,
        clip_index: torch.Tensor | None = None,
        audio_lengths: Sequence[int] | None = None,
        text_lengths: Sequence[int] | None = None,
        text_keys: Sequence[bytes] | None = None,
    ) -> ContrastiveOutput:
        """Embed B rows with R clips and K texts each. In training mode, also compute the loss on the global batch.

        Args:
            input_features: `(B R, ...)`, audio features of the clips.
            input_ids: `(B, K, L)`, token ids.
            attention_mask: `(B, K, L)`, 1 for real tokens.
            audio_attention_mask: `(B R, frames)`, 1 for real frames.
            is_longer: `(B R, 1)`, input for HTSAT towers.
            group_ids, class_ids: Inputs of the objective: group ids of the clips, and class ids in TeminAL stage a.
            negative_mask: `(B, M)`, input of the objective, passed only if set: which of the last M texts of each row
                are wrong captions.
            audio_lengths: Number of real frames of each of the B R clips. None: computed from the mask, which makes the
                CPU wait for the GPU.
            text_lengths: Number of real tokens of each of the B K texts, like `audio_lengths`.
            text_keys: `frozen.content_keys` of the B K texts, for a frozen text tower. None: computed if needed, which
                makes the CPU wait for the GPU.

        Raises:
            ValueError: A batch norm is in training mode. It would normalise each part of the batch separately.
        """
        for name, layer in self._batch_norms:
            if layer.training:
                raise ValueError(
                    f"{name} is in training mode and would use the statistics of a chunk; call its eval()"
                )

        count = len(input_ids)
        texts = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        for name, tensor in texts.items():
            # (B, K, L) -> (B K, L)
            texts[name] = None if tensor is None else tensor.flatten(0, 1)

        # Texts first: the backward pass begins with the clips and frees their activations before it reaches the texts.
        text_embeds = self._embed("text", texts, count, text_lengths, text_keys)
        # (B K, d) -> (B, K, d)
        text_embeds = text_embeds.unflatten(0, input_ids.shape[:2])

        audio = {
            "input_features": input_features,
            "audio_attention_mask": audio_attention_mask,
            "is_longer": is_longer,
        }
        audio_embeds = self._embed("audio", audio, count, audio_lengths)
        if len(audio_embeds) > count:
            audio_embeds = audio_embeds.unflatten(0, (count, -1))  # (B R, d) -> (B, R, d)
        if not self.training:
            return ContrastiveOutput(audio_embeds=audio_embeds, text_embeds=text_embeds)

        further = {}
        for name, tensor in (("class_ids", class_ids), ("negative_mask", negative_mask)):
            if tensor is not None:
                further[name] = gather(tensor.long())  # gloo gathers no booleans
        with distributed_tiles():
            loss, logs = self.objective(
                gather(audio_embeds),
                gather(text_embeds),
                logit_scale=self.model.logit_scale.exp().squeeze(),
                logit_bias=None if self.model.logit_bias is None else self.model.logit_bias.squeeze(),
                group_ids=None if group_ids is None else gather(group_ids),
                **further,
            )
        if self.model.logit_bias is not None:
            # Most objectives do not use the bias; DistributedDataParallel would fail if it had no gradient.
            loss = loss + 0 * self.model.logit_bias.sum()
        logs = {**logs, "temperature": 1 / self.model.logit_scale.detach().exp().squeeze()}
        return ContrastiveOutput(loss=loss, audio_embeds=audio_embeds, text_embeds=text_embeds, logs=logs)

    def _embed(
        self,
        kind: str,
        inputs: Mapping[str, torch.Tensor | None],
        count: int,
        lengths: Sequence[int] | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> torch.Tensor:
        """Embed all clips or texts of `count` rows, with R clips or texts per row: `(count R, ...) -> (count R, d)`."""
        present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        rows = next(iter(present.values()))
        # Chunks are shortened along the last axis, if it is the time axis. In spectrograms of transformers encoders, it
        # may contain mel bands or have a fixed length (Whisper); `run_encoder` removes their padding instead.
        is_own = kind == "text" or self.model.audio_model.config.model_type in AUDIO_TOWERS
        is_cut = _MASKS[kind] in present and (is_own or rows.ndim == 2)
        options: dict[str, Any] = {"mask": _MASKS[kind] if is_cut else None}
        lengths = lengths if is_cut else None

        cache, run_tower = self.caches[kind], getattr(self.model, f"run_{kind}_tower")
        project = self.model.get_submodule(f"{kind}_projection")
        if self.training and self.cache_frozen != "never" and cache.is_frozen():

            def pool(chunk: Rows) -> torch.Tensor:
                return run_tower(**chunk).pooler_output  # (n, ...) -> (n, width)

            if cache.is_repeatable(pool, present):
                in_chunks = partial(embed_in_chunks, pool, chunk_size=self.chunk_size or count, **options)
                # (count R, width) -> (count R, d)
                return project(cache(in_chunks, present, keys=keys, **options))

        if kind == "text":
            options["tokens"] = self.model.text_model.get_input_embeddings()
        if options["mask"] is not None:
            options["lengths"] = lengths = real_lengths(present[_MASKS[kind]]) if lengths is None else lengths

        chunk_size = self.chunk_size
        if chunk_size is None:
            # Keep the activations of one clip or text per row, those of `kept_tokens`, or the minimum for a GPU.
            one_per_row = kept_cells = count * (1 if lengths is None else max(1, *lengths[:: len(rows) // count]))
            on_gpu = rows.device.type in _KEPT_TOKENS
            if is_cut and self.kept_tokens is not None:
                kept_cells = self.kept_tokens * _CELLS_PER_TOKEN[kind]
            elif is_cut and on_gpu:
                kept_cells = max(one_per_row, _KEPT_TOKENS[rows.device.type] * _CELLS_PER_TOKEN[kind])

            options["kept_cells"] = kept_cells
            if not (is_cut and on_gpu) or kept_cells < one_per_row:
                chunk_size, options["fewest_cells"] = count, _MIN_CHUNK_CELLS[kind]

        return embed_in_chunks(
            lambda chunk: project(run_tower(**chunk).pooler_output),
            present,
            chunk_size,
            parameters=self._get_parameters(kind),
            **options,
        )

    def _get_parameters(self, kind: str) -> list[nn.Parameter] | None:
        """Return the trainable parameters of a tower and its projection, or None if they are sharded."""
        parameters = []
        for name, parameter in self.model.named_parameters():
            if name.startswith(f"{kind}_") and parameter.requires_grad:
                parameters.append(parameter)
        # FSDP has its own types; DeepSpeed leaves empty parameters.
        is_whole = all(type(part) is nn.Parameter and part.numel() for part in parameters)
        return parameters if is_whole else None

    def compile_blocks(self, **options: Any) -> None:
        """Compile the repeated blocks of both towers, for any batch size and length, with options of `torch.compile`.

        The step is not compiled as a whole, because it would be compiled again for each new combination of lengths.
        """
        for part in self.model.modules():
            for block in part if isinstance(part, nn.ModuleList) else ():
                block.compile(dynamic=True, **options)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Enable activation checkpointing in both towers. Called by the Trainer of transformers 5.23 and later."""
        self.model.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Enable activation checkpointing in both towers. Called by the Trainer of transformers 5.22 and earlier."""
        self.model.gradient_checkpointing_enable(**kwargs)
