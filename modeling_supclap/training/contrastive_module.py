"""Module that combines a model and its objective, for the Trainer or your own training loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.utils import ModelOutput

from ..configuration_supclap import AUDIO_TOWERS
from ..modeling_supclap import SupCLAPModel
from .distributed import distributed_tiles, gather
from .grad_cache import Rows, embed_in_chunks, real_lengths
from .kept import KeptValues, Key, Values
from .objectives import as_objective, name_of, split_loss

_INPUTS = {
    "text": ("input_ids", "attention_mask", "token_type_ids"),
    "audio": ("input_features", "audio_attention_mask", "is_longer"),
}
"""Inputs of a tower; the second is the mask."""

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

    loss: Tensor | None = None
    audio_embeds: Tensor | None = None
    text_embeds: Tensor | None = None
    logs: dict[str, Tensor] | None = None


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
        self.kept, self.frozen_dropout = kept or KeptValues(), frozen_dropout
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
        if any(parameter.requires_grad for parameter in tower.parameters()):
            return None
        tensors = chain(tower.parameters(), tower.buffers())
        return hash(tuple((tensor.data_ptr(), tensor._version) for tensor in tensors))  # `.double()` moves the data

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. Frozen towers stay in evaluation mode, unless `frozen_dropout` is set."""
        super().train(mode)
        for kind in ("audio", "text"):
            if not self.frozen_dropout and self.get_version(kind) is not None:
                self.model.get_submodule(f"{kind}_model").eval()
        return self

    def forward(self, **batch: Any) -> ContrastiveOutput:
        """Embed B rows with R clips and K texts each. In training mode, also compute the loss on the global batch.

        Args:
            input_features: `(B R, ...)`, audio features of the clips.
            audio_attention_mask: `(B R, frames)`, 1 for real frames. Optional, as all following inputs of the clips.
            is_longer: `(B R, 1)`, input for HTSAT towers.
            audio_lengths: Number of real frames of each of the B R clips. Without it, it is computed from the mask,
                which makes the CPU wait for the GPU.
            audio_keys, given_keys: Lists of the keys of all clips, and of those whose features are in the batch, for a
                frozen tower whose outputs are kept (see `ContrastiveCollator`).
            input_ids, attention_mask: `(B, K, L)`, token ids, and 1 for real tokens.
            token_type_ids, text_lengths, text_keys: The same for the B K texts. Optional.
            group_ids, class_ids, negative_mask: Optional inputs of the objective: group ids of the clips, class ids in
                TeminAL stage a, and `(B, M)`, which of the last M texts of each row are wrong captions.

        Raises:
            ValueError: A batch norm is in training mode. It would normalise each part of the batch separately. Or the
                weights of a frozen tower have changed since the batch was read.
        """
        for name, layer in self._batch_norms:
            if layer.training:
                raise ValueError(
                    f"{name} is in training mode and would use the statistics of a chunk; call its eval()"
                )

        count, texts = batch["input_ids"].shape[:2]
        # Texts first: the backward pass begins with the clips and frees their activations before it reaches the texts.
        text_embeds = self.embed("text", batch).unflatten(0, (count, texts))  # (B K, d) -> (B, K, d)
        audio_embeds = self.embed("audio", batch)
        if len(audio_embeds) > count:
            audio_embeds = audio_embeds.unflatten(0, (count, -1))  # (B R, d) -> (B, R, d)
        if not self.training:
            return ContrastiveOutput(audio_embeds=audio_embeds, text_embeds=text_embeds)

        inputs: dict[str, Tensor | None] = {"group_ids": None}
        for name in ("group_ids", "class_ids", "negative_mask"):
            if batch.get(name) is not None:
                inputs[name] = gather(batch[name].long())  # gloo gathers no booleans
        with distributed_tiles():
            result = self.objective(
                gather(audio_embeds),
                gather(text_embeds),
                logit_scale=self.model.logit_scale.exp().squeeze(),
                logit_bias=None if self.model.logit_bias is None else self.model.logit_bias.squeeze(),
                **inputs,
            )
        loss, logs = split_loss(self.objective, result)
        if self.model.logit_bias is not None:
            # Most objectives do not use the bias; DistributedDataParallel would fail if it had no gradient.
            loss = loss + 0 * self.model.logit_bias.sum()
        logs = {**logs, "temperature": 1 / self.model.logit_scale.detach().exp().squeeze()}
        return ContrastiveOutput(loss=loss, audio_embeds=audio_embeds, text_embeds=text_embeds, logs=logs)

    def embed(self, kind: str, batch: Mapping[str, Any]) -> Tensor:
        """Embed all clips ("audio") or texts ("text") of a batch of `forward`: (B R, d) or (B K, d)."""
        inputs = {name: batch[name] for name in _INPUTS[kind] if batch.get(name) is not None}
        if kind == "text":
            inputs = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}  # (B, K, L) -> (B K, L)
        # Chunks are shortened along the last axis, if it is the time axis. In spectrograms of transformers encoders, it
        # may contain mel bands or have a fixed length (Whisper); `run_encoder` removes their padding instead.
        is_own = kind == "text" or self.model.audio_model.config.model_type in AUDIO_TOWERS
        mask, lengths = inputs.get(_INPUTS[kind][1]), None
        if mask is not None and (is_own or inputs["input_features"].ndim == 2):
            lengths = batch.get(f"{kind}_lengths") or real_lengths(mask)

        keys, version = batch.get(f"{kind}_keys"), self.get_version(kind)
        is_current = self.kept.versions.get(kind) == version
        if kind == "audio" and keys is not None and not is_current:
            raise ValueError("the audio tower has changed since this batch was read; set cache_frozen to never")
        project: Any = self.model.get_submodule(f"{kind}_projection")
        if keys is not None and is_current:
            given = batch["given_keys"] if kind == "audio" else keys
            return project(self._recall(kind, inputs, lengths, keys, given))
        if version is not None or not torch.is_grad_enabled():
            return project(self._pool_in_chunks(kind, inputs, lengths))
        rows = next(iter(inputs.values()))
        tokens: Any = self.model.text_model.get_input_embeddings() if kind == "text" else None
        return embed_in_chunks(
            lambda chunk: project(self._pool(kind, chunk)),
            inputs,
            lengths=lengths,
            tokens=tokens,
            parameters=self._get_parameters(kind),
            **self._get_limits(kind, lengths, len(rows), len(batch["input_ids"]), rows.device.type),
        )

    def _pool(self, kind: str, inputs: Rows) -> Tensor:
        pooled: Tensor = getattr(self.model, f"run_{kind}_tower")(**inputs).pooler_output  # (n, width)
        return pooled

    @torch.no_grad()
    def _pool_in_chunks(self, kind: str, inputs: Rows, lengths: Sequence[int] | None) -> Tensor:
        """Run a tower without a backward pass, `(N, ...) -> (N, width)`."""
        rows = next(iter(inputs.values()))
        size = _ROWS_WITHOUT_GRADIENT[kind] if rows.device.type == "cpu" else len(rows)
        return embed_in_chunks(partial(self._pool, kind), inputs, self.chunk_size or size, lengths)

    def _recall(
        self, kind: str, inputs: Rows, lengths: Sequence[int] | None, keys: Sequence[Key], given: Sequence[Key]
    ) -> Tensor:
        """Return the outputs of a frozen tower for N `keys`, (N, width). It runs on those inputs that are not stored.

        `given` are the keys of the inputs.
        """
        tower, projection = self.kept.towers[kind], self.model.get_submodule(f"{kind}_projection")
        known = self.kept.find(dict.fromkeys(keys), tower)
        places = {key: place for place, key in enumerate(given) if key not in known}
        if places:
            rows = list(places.values())
            chosen = {name: tensor[rows] for name, tensor in inputs.items()}
            pooled = self._pool_in_chunks(kind, chosen, lengths and [lengths[row] for row in rows])
            outputs = pooled.to(torch.promote_types(pooled.dtype, torch.float32)).cpu().numpy()
            new: Values = {key: {"output": output} for key, output in zip(places, outputs, strict=True)}
            self.kept.add(new, tower)
            known |= new
        stacked = torch.from_numpy(np.stack([known[key]["output"] for key in keys]))
        return stacked.to(next(projection.parameters()), non_blocking=True)

    def _get_limits(
        self, kind: str, lengths: Sequence[int] | None, rows: int, count: int, device: str
    ) -> dict[str, Any]:
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
