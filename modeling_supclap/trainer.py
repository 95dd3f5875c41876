"""The Hugging Face Trainer with a contrastive objective. It moves tensors and logs them; it holds no formula."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ModelOutput

from .collator import EvaluationCollator, IndexedRows, TrainingCollator
from .distributed import gather
from .evaluation import retrieval_metrics_of
from .modeling_supclap import SupCLAPModel
from .objectives import build_objective
from .processing_supclap import SupCLAPProcessor
from .training_args import SupCLAPTrainingArguments


@dataclass
class ContrastiveOutput(ModelOutput):
    """What a training step returns.

    Args:
        loss: the objective on the global batch, `()`; absent when the module is in evaluation mode.
        audio_embeds: unit norm, `(B, d)`.
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
    """

    accepts_loss_kwargs = False

    def __init__(self, model: SupCLAPModel, objective: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(
        self,
        input_features: torch.Tensor,
        audio_attention_mask: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        group_ids: torch.Tensor | None = None,
        clip_index: torch.Tensor | None = None,
    ) -> ContrastiveOutput:
        """Embeds B clips and their K texts each; in training also gathers all processes' and computes the loss."""
        audio_embeds = self.model.get_audio_features(
            input_features=input_features, audio_attention_mask=audio_attention_mask
        ).pooler_output
        texts = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        flat = {name: tensor.flatten(0, 1) for name, tensor in texts.items() if tensor is not None}
        text_embeds = self.model.get_text_features(**flat).pooler_output.unflatten(0, input_ids.shape[:2])
        if not self.training:
            return ContrastiveOutput(audio_embeds=audio_embeds, text_embeds=text_embeds)
        loss, logs = self.objective(
            gather(audio_embeds),
            gather(text_embeds),
            logit_scale=self.model.logit_scale.exp(),
            logit_bias=self.model.logit_bias,
            group_ids=None if group_ids is None else gather(group_ids),
        )
        logs = {**logs, "temperature": 1 / self.model.logit_scale.detach().exp()}
        return ContrastiveOutput(loss=loss, audio_embeds=audio_embeds, text_embeds=text_embeds, logs=logs)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Passes the Trainer's request on to both towers, under the name of transformers 5.23 and later."""
        self.model.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Passes the Trainer's request on to both towers, under the name up to transformers 5.22."""
        self.model.gradient_checkpointing_enable(**kwargs)


class SupCLAPTrainer(Trainer):
    """Trains a `SupCLAPModel` with a contrastive objective on rows of `datasets_scripts/schema.py`.

    Args:
        model: the model to train; `trainer.clap` is the same object, `trainer.model` holds it and its objective.
        args: see `SupCLAPTrainingArguments`.
        train_dataset: rows to train on, map-style, so that a resumed run sees the same batches.
        eval_dataset: rows to evaluate on.
        processing_class: the model's processor.
        objective: an objective of your own; by default `build_objective(args)`.
        callbacks: as the Trainer's.
        optimizers: as the Trainer's.

    Raises:
        ValueError: the processor is missing, the training split is smaller than a batch, or one process was started
            on a machine with several GPUs, where each GPU would contrast only its own part of the batch.
    """

    args: SupCLAPTrainingArguments
    loss_is_scaled_for_ga = False  # transformers 5.23 and later: the loss of a step is a mean, not a sum

    def __init__(
        self,
        model: SupCLAPModel,
        args: SupCLAPTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: SupCLAPProcessor | None = None,
        objective: nn.Module | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        if processing_class is None:
            raise ValueError("processing_class is missing; pass the SupCLAPProcessor that goes with the model")
        if args.n_gpu > 1:
            raise ValueError(f"one process sees {args.n_gpu} GPUs; start one process a GPU with `accelerate launch`")
        _require_a_full_batch(train_dataset, args)
        shared: dict[str, Any] = {"positives": args.positives, "max_audio_seconds": args.max_audio_seconds}
        collator = TrainingCollator(processing_class, args.languages, seed=args.seed, **shared)
        self.module = ContrastiveModule(model, build_objective(args) if objective is None else objective)
        self.train_rows = train_dataset
        super().__init__(
            model=self.module,
            args=args,
            data_collator=collator,
            train_dataset=None if train_dataset is None else IndexedRows(train_dataset),
            eval_dataset=None if eval_dataset is None else IndexedRows(eval_dataset),
            processing_class=processing_class,
            callbacks=[_EpochCallback(collator), *(callbacks or [])],
            optimizers=optimizers,
        )
        self.clap = model
        self.processor = processing_class
        self._evaluation_collator = EvaluationCollator(processing_class, args.eval_languages, **shared)
        self._logs = _Averages()
        self.add_callback(_ThroughputCallback(self._logs))
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(SupCLAPProgressCallback())

    # ---- training ----

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The module's own loss; NaN stops the run and names the clips."""
        outputs = model(**inputs)
        if not torch.isfinite(outputs.loss):
            raise FloatingPointError(self._describe_broken_step(outputs.loss.item(), outputs.logs, inputs))
        self._logs.add(outputs.logs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def _describe_broken_step(
        self, loss: float, logs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> str:
        broken = [name for name, value in logs.items() if not torch.isfinite(value)]
        clips = [self.train_rows[int(index)]["clip_id"] for index in inputs["clip_index"]]
        return (
            f"the loss is {loss} at step {self.state.global_step + 1}, from {broken or 'the total'}, on clips {clips}; "
            "the last checkpoint is untouched, a lower learning rate or fp32 may help"
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the objective's numbers and the throughput to those of the Trainer."""
        if "loss" in logs:
            logs = {**logs, **self._logs.drain()}
            logs["clips_per_second"] = 1 / logs.pop("seconds_per_clip")
        super().log(logs, start_time)

    # ---- evaluation ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Retrieval scores of a split, both directions, each language; see `evaluation.retrieval_metrics_of`."""
        rows: Any = self.eval_dataset if eval_dataset is None else IndexedRows(eval_dataset)
        with self._evaluating(rows):
            return super().evaluate(rows, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """As the Trainer's: `predictions` holds the audio `(N, d)` and text `(N, K, d)` embeddings."""
        rows: Any = IndexedRows(test_dataset)
        with self._evaluating(rows):
            return super().predict(rows, ignore_keys, metric_key_prefix)

    @contextmanager
    def _evaluating(self, rows: IndexedRows) -> Iterator[None]:
        """Swaps in what evaluation needs: the collator that draws nothing, the last incomplete batch, our metrics."""
        before = self.data_collator, self.args.dataloader_drop_last, self.compute_metrics
        self.data_collator = self._evaluation_collator
        self.args.dataloader_drop_last = False
        self.compute_metrics = retrieval_metrics_of(rows, self.args.eval_languages, self.args.positives)
        try:
            yield
        finally:
            self.data_collator, self.args.dataloader_drop_last, self.compute_metrics = before

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Any, Any]:
        """Embeddings only: a loss over the batches of evaluation would depend on how the split is cut into them."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        return None, (outputs.audio_embeds.float(), outputs.text_embeds.float()), inputs["clip_index"]

    # ---- saving ----

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Writes a folder for `from_pretrained`; a checkpoint of the run holds the objective's parameters as well."""
        folder = Path(output_dir or self.args.output_dir or ".")
        if folder.name.startswith(PREFIX_CHECKPOINT_DIR):
            super()._save(str(folder), state_dict)
            if self.args.should_save:
                self.clap.config.save_pretrained(folder)
        elif self.args.should_save:
            whole = self.module.state_dict() if state_dict is None else state_dict
            inference = {name.removeprefix("model."): w for name, w in whole.items() if name.startswith("model.")}
            self.clap.save_pretrained(folder, state_dict=inference)
            self.processor.save_pretrained(folder)


class SupCLAPProgressCallback(ProgressCallback):
    """One bar with loss and clips per second, and one line an evaluation."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Shows the last loss on the bar."""
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix_str(
                f"loss {logs['loss']:.3f}, {logs['clips_per_second']:.0f} clips/s", refresh=False
            )

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Prints the validation recall above the bar."""
        super().on_evaluate(args, state, control, **kwargs)
        key = f"eval_{(args.metric_for_best_model or 'mean_recall').removeprefix('eval_')}"
        if self.training_bar is not None and metrics and key in metrics:
            best = max(metrics[key], state.best_metric or 0.0)
            self.training_bar.write(
                f"epoch {state.epoch:g}: validation {key.removeprefix('eval_')} {metrics[key]:.3f} (best {best:.3f})"
            )


class _Averages:
    """Means of named scalars since the last look, kept on their device so that adding never waits for it."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def drain(self) -> dict[str, float]:
        means = {name: float(sum(values) / len(values)) for name, values in self._values.items()}
        self._values = {}
        return means


class _EpochCallback(TrainerCallback):
    """Tells the collator which epoch it draws for."""

    def __init__(self, collator: TrainingCollator) -> None:
        self.collator = collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.set_epoch(int(state.epoch or 0))


class _ThroughputCallback(TrainerCallback):
    """Clips per second of training, evaluation and saving left out."""

    def __init__(self, averages: _Averages) -> None:
        self.averages = averages
        self._since = time.perf_counter()

    def _restart(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    on_train_begin = on_evaluate = on_save = _restart

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        clips = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.averages.add({"seconds_per_clip": (now - self._since) / clips})
        self._since = now


def _require_a_full_batch(train_dataset: Any, args: SupCLAPTrainingArguments) -> None:
    if train_dataset is None:
        return
    batch = args.train_batch_size * args.world_size
    if len(train_dataset) < batch:
        raise ValueError(
            f"the training split has {len(train_dataset)} clips, fewer than one batch of {batch}; "
            "lower per_device_train_batch_size"
        )
