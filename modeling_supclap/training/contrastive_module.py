"""Module that combines a model and its objective, for the Trainer or your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.utils import ModelOutput

from ..configuration_supclap import AUDIO_TOWERS
from ..modeling_supclap import SupCLAPModel
from .distributed import distributed_tiles, gather
from .grad_cache import Rows, embed_in_chunks, real_lengths
from .kept import KeptValues
from .objectives import as_objective, name_of, split_loss

_MASKS = {"text": "attention_mask", "audio": "audio_attention_mask"}

_MIN_CHUNK_CELLS = {"text": 128, "audio": 1000}
"""Minimum tokens or frames per chunk on a CPU; for smaller chunks an extra call costs more than padding."""

_KEPT_TOKENS = {"cuda": 16384}
"""Minimum tokens with activations in memory on a GPU, where an extra call costs more than padding."""

_CELLS_PER_TOKEN = {"text": 1, "audio": 4}
"""Tokens or frames with activations in memory for each kept token."""

_ROWS_WITHOUT_GRADIENT = {"text": 64, "audio": 4}
"""Texts or clips per chunk on a CPU without a backward pass; larger activations cost page faults."""


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
        objective: Module or function that computes the loss from the embeddings (see `objectives.py`).
        chunk_size: Number of clips, and number of texts, with activations in memory at a time. None: `kept_tokens` is
            used instead.
        kept_tokens: Maximum number of tokens with activations in memory; four frames count as one token. Texts or clips
            that form one chunk always keep their activations. None: the default described above.
        kept: Store for the outputs of frozen towers. None: nothing is stored.
        frozen_dropout: Whether frozen towers keep their dropout in training. By default they are in evaluation mode.
    """

    accepts_loss_kwargs = False

    def __init__(
        self,
        model: SupCLAPModel,
        objective: Callable[..., Any],
        chunk_size: int | None = None,
        kept_tokens: int | None = None,
        kept: KeptValues | None = None,
        frozen_dropout: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = as_objective(objective)
        self.chunk_size, self.kept_tokens = chunk_size, kept_tokens
        self.kept, self.frozen_dropout = kept, frozen_dropout
        # In a plain list, so that they are not registered a second time.
        self._batch_norms = [(name, part) for name, part in model.named_modules() if isinstance(part, _BatchNorm)]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"trainer.model is a ContrastiveModule, which has no {name!r}; the model itself is trainer.clap, and "
                "trainer.save_model(folder) saves it with its processor"
            ) from None

    @property
    def _no_split_modules(self) -> list[str]:
        """Class names of the repeated blocks of both towers, which FSDP wraps by default."""
        return sorted({type(block).__name__ for block in self._blocks()})

    def _blocks(self) -> Iterator[nn.Module]:
        for part in self.model.modules():
            yield from part if isinstance(part, nn.ModuleList) else ()

    @property
    def objective_name(self) -> str:
        """Name of the class or the function of the objective."""
        return name_of(self.objective)

    def get_tower(self, kind: str) -> nn.ModuleList:
        """Return the modules that compute the input of a projection: the tower, and the dense layers after it."""
        parts = [self.model.get_submodule(f"{kind}_model")]
        return nn.ModuleList([*parts, self.model.text_dense] if kind == "text" else parts)

    def get_version(self, kind: str) -> int | None:
        """Return a number that changes with the weights of a frozen tower. None: some of its parameters are trained."""
        tower = self.get_tower(kind)
        tensors = [*tower.parameters(), *tower.buffers()]
        if any(tensor.requires_grad for tensor in tensors):
            return None
        return sum(tensor._version for tensor in tensors)

    def train(self, mode: bool = True) -> ContrastiveModule:
        """Set training or evaluation mode. Frozen towers stay in evaluation mode, unless `frozen_dropout` is set."""
        super().train(mode)
        for kind in ("audio", "text"):
            if not self.frozen_dropout and self.get_version(kind) is not None:
                self.model.get_submodule(f"{kind}_model").eval()
        return self

    def forward(
        self,
        input_features: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        audio_attention_mask: torch.Tensor | None = None,
        is_longer: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        group_ids: torch.Tensor | None = None,
        class_ids: torch.Tensor | None = None,
        negative_mask: torch.Tensor | None = None,
        clip_index: torch.Tensor | None = None,
        audio_lengths: Sequence[int] | None = None,
        text_lengths: Sequence[int] | None = None,
        kept_audio: Mapping[str, Any] | None = None,
        kept_text: Mapping[str, Any] | None = None,
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
            kept_audio, kept_text: Outputs of a frozen tower that are known (see `collator.ContrastiveCollator`). The
                features, or the token ids `(U, L)`, are then only those of U clips or texts whose output is not known.

        Raises:
            ValueError: A batch norm is in training mode. It would normalise each part of the batch separately. Or the
                weights of a frozen tower have changed since the batch was read.
        """
        for name, layer in self._batch_norms:
            if layer.training:
                raise ValueError(
                    f"{name} is in training mode and would use the statistics of a chunk; call its eval()"
                )

        texts = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        if kept_text is None:
            assert input_ids is not None
            count, shape = len(input_ids), input_ids.shape[:2]
            # (B, K, L) -> (B K, L)
            texts = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in texts.items()}
        else:
            assert clip_index is not None
            count, shape = len(clip_index), (len(clip_index), -1)

        # Texts first: the backward pass begins with the clips and frees their activations before it reaches the texts.
        text_embeds = self._embed("text", texts, count, text_lengths, kept_text)
        # (B K, d) -> (B, K, d)
        text_embeds = text_embeds.unflatten(0, shape)

        audio = {
            "input_features": input_features,
            "audio_attention_mask": audio_attention_mask,
            "is_longer": is_longer,
        }
        audio_embeds = self._embed("audio", audio, count, audio_lengths, kept_audio)
        if len(audio_embeds) > count:
            audio_embeds = audio_embeds.unflatten(0, (count, -1))  # (B R, d) -> (B, R, d)
        if not self.training:
            return ContrastiveOutput(audio_embeds=audio_embeds, text_embeds=text_embeds)

        further = {}
        for name, tensor in (("class_ids", class_ids), ("negative_mask", negative_mask)):
            if tensor is not None:
                further[name] = gather(tensor.long())  # gloo gathers no booleans
        with distributed_tiles():
            result = self.objective(
                gather(audio_embeds),
                gather(text_embeds),
                logit_scale=self.model.logit_scale.exp().squeeze(),
                logit_bias=None if self.model.logit_bias is None else self.model.logit_bias.squeeze(),
                group_ids=None if group_ids is None else gather(group_ids),
                **further,
            )
        loss, logs = split_loss(self.objective, result)
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
        kept: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Embed all clips or texts of `count` rows, with R clips or texts per row: `(count R, ...) -> (count R, d)`."""
        if kept is not None and (self.kept is None or self.kept.versions.get(kind) != self.get_version(kind)):
            raise ValueError(
                f"the {kind} tower has changed or is trained since this batch was read; set cache_frozen to never"
            )
        present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        run_tower, project = getattr(self.model, f"run_{kind}_tower"), self.model.get_submodule(f"{kind}_projection")

        def pool(chunk: Rows) -> torch.Tensor:
            pooled: torch.Tensor = run_tower(**chunk).pooler_output  # (n, ...) -> (n, width)
            return pooled

        if not present:
            return project(self._add_kept(kind, [], kept))
        rows = next(iter(present.values()))
        # Chunks are shortened along the last axis, if it is the time axis. In spectrograms of transformers encoders, it
        # may contain mel bands or have a fixed length (Whisper); `run_encoder` removes their padding instead.
        is_own = kind == "text" or self.model.audio_model.config.model_type in AUDIO_TOWERS
        if _MASKS[kind] not in present or not (is_own or rows.ndim == 2):
            lengths = None
        elif lengths is None:
            lengths = real_lengths(present[_MASKS[kind]])

        if not torch.is_grad_enabled() or self.get_version(kind) is not None:
            size = _ROWS_WITHOUT_GRADIENT[kind] if rows.device.type == "cpu" else len(rows)
            with torch.no_grad():
                pooled = embed_in_chunks(pool, present, self.chunk_size or size, lengths)
            return project(pooled if kept is None else self._add_kept(kind, [pooled], kept))
        return embed_in_chunks(
            lambda chunk: project(pool(chunk)),
            present,
            lengths=lengths,
            tokens=self.model.text_model.get_input_embeddings() if kind == "text" else None,
            parameters=self._get_parameters(kind),
            **self._get_limits(kind, lengths, len(rows), count, rows.device.type),
        )

    def _add_kept(self, kind: str, new: list[torch.Tensor], kept: Mapping[str, Any] | None) -> torch.Tensor:
        """Store the new outputs of a frozen tower, (U, width), and return those of all rows, with the known ones."""
        assert self.kept is not None
        assert kept is not None
        for outputs in new:
            self.kept.add({key: {"output": row} for key, row in zip(kept["keys"], outputs.cpu(), strict=True)})
        known = [kept["outputs"]] if "outputs" in kept else []
        return torch.cat([*known, *new])[kept["rows"]]

    def _get_limits(
        self, kind: str, lengths: Sequence[int] | None, rows: int, count: int, device: str
    ) -> dict[str, int | None]:
        """Return the limits of `embed_in_chunks` for clips or texts of these lengths. None: they are not shortened.

        By default, they keep the activations of one clip or text per row, those of `kept_tokens`, or the minimum for a
        GPU.
        """
        if self.chunk_size is not None:
            return {"chunk_size": self.chunk_size}
        one_per_row = kept_cells = count * (1 if lengths is None else max(1, *lengths[:: rows // count]))
        if lengths is not None:
            least = max(one_per_row, _KEPT_TOKENS.get(device, 0) * _CELLS_PER_TOKEN[kind])
            kept_cells = least if self.kept_tokens is None else self.kept_tokens * _CELLS_PER_TOKEN[kind]
            if device in _KEPT_TOKENS and kept_cells >= one_per_row:
                return {"chunk_size": None, "kept_cells": kept_cells}
        return {"chunk_size": count, "kept_cells": kept_cells, "fewest_cells": _MIN_CHUNK_CELLS[kind]}

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
        for block in self._blocks():
            block.compile(dynamic=True, **options)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Enable activation checkpointing in both towers. Called by the Trainer of transformers 5.23 and later."""
        self.model.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Enable activation checkpointing in both towers. Called by the Trainer of transformers 5.22 and earlier."""
        self.model.gradient_checkpointing_enable(**kwargs)
