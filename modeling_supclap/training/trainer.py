"""Hugging Face Trainers for contrastive training. The losses are in `objectives.py` and `losses/`."""

import inspect
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from modeling_supclap.datasets_scripts.atomic_files import folder_lock
from modeling_supclap.datasets_scripts.bad_audio import exit_with_parent
from modeling_supclap.datasets_scripts.schema import group_id, without_audio

from ..losses.support_vector import DynamicRadius
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from ..strict_loading import apply_umask
from .augmentation import SpecAugment, WaveformAugmentation
from .callbacks import (
    TRAINED_WEIGHTS,
    Averages,
    BestCheckpointCallback,
    DriftCallback,
    EMACallback,
    EpochCallback,
    LanguageErrorsCallback,
    LineCallback,
    SigtermCallback,
    StartCallback,
    SupCLAPProgressCallback,
    ThroughputCallback,
)
from .checkpoints import (
    CheckpointFolder,
    describe_run,
    last_checkpoint,
    refuse_another_run,
    selects_otherwise,
    uploads_checkpoints,
    write_frozen,
    write_run_file,
)
from .checks import idle_parameters, refuse_unknown_metric, refuse_unsupported, to_float32
from .collator import EvaluationCollator, IndexedRows, TrainingCollator
from .contrastive_module import ContrastiveModule
from .drift import perpendicular_components, radius_by_hard_negatives
from .kept import KeptValues
from .objectives import MatryoshkaObjective, SupportVectorRegularizer, build_objective, load_objective, start_radii
from .options import chance_loss
from .parameter_groups import as_rates, decays, split_by_rate
from .rows import as_plain_rows, dataset_names, make_usable, map_sets, plain_rows, read_in_epochs
from .training_args import SupCLAPTrainingArguments

logger = logging.getLogger(__name__)

UNFINISHED = "unfinished"
"""Subfolder of the output folder for checkpoints that are not fully written yet."""


class SupCLAPTrainer(Trainer):
    """Hugging Face Trainer for a `SupCLAPModel` with a contrastive objective.

    Datasets contain rows as described in `datasets_scripts/schema.py`. If captions are in several languages,
    `args.loss` selects the languages of each step: `infonce` uses one random language per clip and epoch (ML-CLAP),
    `kcl` uses all languages at once, and `cacl` uses the anchor language and one other (ATRI). Multilingual evaluation
    also measures the consistency across languages (MRV).

    Args:
        model: Model to train. `trainer.clap` is the same object; `trainer.model` wraps it together with its objective.
        train_dataset: Training rows: a map-style dataset, or a `stream.RowStream`, which reads rows on the fly. A
            Hugging Face `datasets.Dataset` with an `Audio` column and a caption column is converted by
            `builders.hf.as_rows`. `trainer.train_rows` and `trainer.eval_rows` are the rows left after
            `args.on_bad_audio` is applied. The column `schema.EXPECTED_COUNT` sets how often an epoch contains a row.
        eval_dataset: Map-style evaluation rows, converted in the same way, or a dict `{name: rows}`. The metrics of a
            dict are named `eval_<name>_...`, as are the metrics of each dataset in a mixture (`mixture.mix`).
        objective: Custom objective (see `objectives.py`): a module, or a function of the embeddings, such as
            `objective(audio_embeds, text_embeds, logit_scale)`, that returns the loss. None: `build_objective(args)`.
        compute_metrics: Function from an `EvalPrediction` to further metrics, or to None.

    Raises:
        ValueError: The processor is missing. The training split is smaller than one batch, would end with a batch of
            one clip, or is an unsupported type of stream. `metric_for_best_model` is of none of the evaluation sets.
            The loss is `siglip`, and the model has no bias. `features_on_device` is set, and the feature extractor
            runs only on the CPU. One process has several GPUs, which would not share their negatives.
            `track_language_errors` is set with FSDP, or `ema_decay` with FSDP or DeepSpeed.
    """

    args: SupCLAPTrainingArguments
    # transformers 5.23 and later: the loss of a step is a mean, not a sum
    loss_is_scaled_for_ga = False
    _hard_batches: Any = None

    def __init__(
        self,
        model: SupCLAPModel,
        args: SupCLAPTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: SupCLAPProcessor | None = None,
        objective: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        compute_metrics: Callable[[Any], Any] | None = None,
        compute_loss_func: None = None,
    ) -> None:
        if compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func has no labels to compare with; pass objective=f, with f(audio_embeds, text_embeds, "
                "logit_scale), which returns the loss of the batch of all processes"
            )
        if getattr(model, "peft_config", None):
            from .lora import unwrap_adapters

            model = unwrap_adapters(model)
        given = {"train": train_dataset, "validation": eval_dataset}
        refuse_unsupported(model, args, processing_class, objective, *plain_rows(given).values())
        assert processing_class is not None
        if optimizers[0] is not None and args.learning_rates:
            raise ValueError("got learning_rates and an optimizer; set the rates of its groups instead")
        if not args.keep_weight_dtype:
            to_float32(model)
        if args.attn_implementation is not None:
            model.set_attn_implementation(args.attn_implementation)
        self.clap, self.processor = model, processing_class
        self.has_own_objective = objective is not None or ":" in args.loss
        self.kept = KeptValues.open(args)
        self.module = self._build_module(args, objective)
        self._spec_augment = SpecAugment(processing_class, args) if args.apply_spec_augment else None
        self._ema = EMACallback(self.module, args.ema_decay or 0)
        # file of frozen weights and its hash, see `write_frozen`
        self._frozen: dict[str, str] = {}
        self._logs = Averages()
        # loss, logs and clips of the steps since the last check, and the sum of the losses before
        self._recent: list[tuple[int, Tensor, Mapping[str, Any], Tensor]] = []
        self._step_logs: Mapping[str, Any] = {}
        self._loss_sum = 0.0
        self.throughput, self._best = ThroughputCallback(self._logs), BestCheckpointCallback()
        self._own_optimizer, self._own_scheduler = optimizers
        self._has_checked_gradients = False

        self.data = make_usable(given, args, processing_class)
        self.train_rows, self.eval_rows = plain_rows(self.data).values()
        train_rows, self._batches = read_in_epochs(self.data["train"], args)
        collator, self.evaluation_collator = self._build_collators(args)
        super().__init__(
            model=self.module,
            args=args,
            data_collator=collator,
            train_dataset=train_rows,
            eval_dataset=map_sets(IndexedRows, self.eval_rows),
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=self._build_callbacks(
                args, [collator, train_rows if self._batches is None else self._batches], callbacks or []
            ),
            optimizers=optimizers,
        )
        self._replace_launch_settings(args)
        if args.hard_negatives_per_batch and train_rows is not None:
            from .hard_batches import order_by_captions  # here, because few runs need it

            self._hard_batches = order_by_captions(self.clap, self.processor, train_rows, args)

    def _build_module(self, args: SupCLAPTrainingArguments, objective: Any) -> ContrastiveModule:
        """Combine the model with its objective: by default, the one of `args.loss`."""
        if objective is None:
            objective = load_objective(args.loss) if ":" in args.loss else build_objective(args)
        # sharded parameters cannot be set in the first step
        if args.sharding is not None:
            start_radii(objective, math.sqrt(2))  # the distance of orthogonal embeddings
        if args.matryoshka_widths:
            objective = MatryoshkaObjective(objective, args.matryoshka_widths)
            self.clap.config.matryoshka_widths = sorted({*args.matryoshka_widths, self.clap.config.projection_dim})
        return ContrastiveModule(
            self.clap,
            objective,
            args.cached_chunk_size,
            args.kept_tokens,
            self.kept,
            frozen_dropout=args.cache_frozen == "never",
        )

    def _build_collators(self, args: Any) -> tuple[TrainingCollator, Any]:
        """Build the collators of training and of evaluation."""
        shared = self._collator_options(args)
        training = TrainingCollator(
            self.processor,
            args.languages,
            scheme=args.caption_scheme,
            languages_per_clip=args.languages_per_clip,
            negatives_per_clip=args.negatives_per_clip,
            **self._training_options(args),
            **shared,
        )
        return training, EvaluationCollator(self.processor, args.eval_languages, **shared)

    def _collator_options(self, args: Any) -> dict[str, Any]:
        """Return the options of any collator."""
        on_device = args.features_on_device
        if on_device is None:
            on_device = args.device.type == "cuda" and self.processor.runs_on_device
        return {
            "positives": args.positives,
            "max_audio_seconds": args.max_audio_seconds,
            "pad_short_clips": args.pad_short_clips,
            "gives_samples": on_device,
            "kept": self.kept,
        }

    def _training_options(self, args: Any) -> dict[str, Any]:
        """Return the further options of any collator of training: seed and augmentation."""
        augmentation = None
        if args.random_gain_db or args.background_dir is not None:
            augmentation = WaveformAugmentation(args, self.processor.feature_extractor.sampling_rate)
        return {"seed": args.seed, "augmentation": augmentation, "changes_features": args.apply_spec_augment}

    def _build_callbacks(self, args: Any, sources: list[Any], own: Sequence[TrainerCallback]) -> list[TrainerCallback]:
        """Return the callbacks of this trainer and `own`, those of the user.

        `sources` are the training collator, and the rows or batches, or None; their random numbers depend on the epoch.
        """
        built: list[TrainerCallback] = [StartCallback(), self._best, *own]
        if args.ema_decay is not None:
            built.append(self._ema)
        if args.early_stopping_patience is not None:
            built.append(EarlyStoppingCallback(args.early_stopping_patience))
        if args.track_drift is not False:
            built.append(DriftCallback(self.module.objective, self._logs, args.learning_rate))
        if args.track_language_errors and self.train_rows is not None:
            light = without_audio(self.train_rows)
            built.append(LanguageErrorsCallback(self.module, sources[0], light, self._logs))
        return [*built, self.throughput, EpochCallback(self._begin_epoch, sources)]

    def _replace_launch_settings(self, args: Any) -> None:
        """Compile blocks instead of steps, save on SIGTERM between two steps, and print one line per log."""
        if args.torch_compile:
            # the accelerator would compile whole steps
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
            self.module.compile_blocks(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        jit: Any = self.pop_callback(JITCheckpointCallback)
        if jit is not None:
            # checkpoints appear only when they are complete, so a kill is harmless
            jit.jit_manager.kill_wait = 0
            self.add_callback(SigtermCallback(jit.jit_manager))
        has_bar = self.pop_callback(ProgressCallback) is not None and sys.stderr.isatty()
        # without bars, this callback would print all 40 values of a log
        self.pop_callback(PrinterCallback)
        chance = None if self.has_own_objective else chance_loss(args)
        self.add_callback(SupCLAPProgressCallback() if has_bar else LineCallback(chance))

    def _metrics_of(self, rows: IndexedRows) -> Callable[[Any], dict[str, float]]:
        """Build `compute_metrics` for a split: retrieval metrics, and those of `drift` on all of its pairs."""
        from ..evaluation.embed import in_row_order

        # imported here, because only runs that evaluate need it
        from ..evaluation.retrieval import retrieval_metrics

        retrieval = retrieval_metrics(rows, self.args.eval_languages, self.args.positives)
        regularizer = getattr(self.module.objective, "regularizer", None)
        radius = regularizer.radius_of("t2a") if isinstance(regularizer, SupportVectorRegularizer) else None
        if self.args.track_drift is False or self.args.sharding is not None:
            return retrieval

        def with_drift(prediction: Any) -> dict[str, float]:
            device = self.clap.logit_scale.device
            audio_embeds, text_embeds = (torch.from_numpy(embeds).to(device) for embeds in in_row_order(prediction))
            groups = [group_id(row, self.args.positives) for row in without_audio(rows.rows)]
            scale, group_ids = self.clap.logit_scale.exp(), torch.tensor(groups, device=device)
            pairs = audio_embeds, text_embeds[:, 0], scale
            batch = self.args.train_batch_size * self.args.world_size
            numbers = perpendicular_components(*pairs, batch, group_ids)
            if isinstance(radius, DynamicRadius):
                numbers |= radius_by_hard_negatives(radius, *pairs, group_ids)
            return retrieval(prediction) | {name: value.item() for name, value in numbers.items()}

        return with_drift

    # ---- training ----

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training DataLoader. For a stream, it loads only the batches of this process."""
        args, rows = self.args, self.train_dataset
        if rows is None:
            raise ValueError("train_dataset is missing; pass training rows to the trainer")
        persistent = {"persistent_workers": args.dataloader_persistent_workers}
        if self._batches is not None:
            # Not prepared by accelerate, which would split the batches of one loader between the processes.
            return self._build_loader(rows, self.data_collator, batch_sampler=self._batches, **persistent)
        options = {"batch_size": self._train_batch_size, "drop_last": args.dataloader_drop_last, **persistent}
        sampler = RandomSampler(rows) if self._hard_batches is None else self._hard_batches  # type: ignore[arg-type]
        return self.accelerator.prepare(self._build_loader(rows, self.data_collator, sampler=sampler, **options))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the DataLoader of `evaluate`. `eval_dataset` is as there, except that a dict is not accepted."""
        sets: Any = self.eval_dataset
        rows = sets if eval_dataset is None else eval_dataset
        rows = sets[rows] if isinstance(rows, str) else rows
        if rows is None or isinstance(rows, dict):
            raise ValueError("pass eval_dataset: evaluation rows, or the name of an evaluation set of this trainer")
        return self.get_test_dataloader(rows)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return a DataLoader of rows as `evaluate` and `predict` read them: each clip once, with all its captions."""
        rows = as_plain_rows(test_dataset, self.args)
        rows = rows if isinstance(rows, IndexedRows) else IndexedRows(rows)
        loader = self._build_loader(rows, self.evaluation_collator, batch_size=self.args.eval_batch_size)
        return self.accelerator.prepare(loader)

    def _build_loader(self, rows: Any, collator: Any, **options: Any) -> DataLoader[Any]:
        """Build a loader whose workers exit if this process is killed.

        The loader has its own generator for the seeds of its workers. A resumed run starts the workers once more, which
        would otherwise change its dropout masks.
        """
        args = self.args
        self._set_kept_towers()
        return DataLoader(
            rows,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
            worker_init_fn=exit_with_parent,
            generator=torch.Generator().manual_seed(args.seed),
            **options,
        )

    def _begin_epoch(self) -> None:
        self._has_checked_gradients = False
        self._set_kept_towers()

    def _set_kept_towers(self) -> None:
        """Set the keys of the frozen towers whose outputs are kept, before a loader starts its workers.

        Resuming and DistributedDataParallel write weights after the training loader is built, so this is also called at
        the beginning of each epoch.
        """
        args, config = self.args, self.clap.config.to_dict()
        # with sharded weights, each pass needs all processes
        is_off = args.cache_frozen == "never" or args.sharding is not None or args.bf16_full_eval
        is_off |= args.fp16_full_eval or self.kept.folder is None
        for kind in ("audio", "text"):
            tower: Any = self.module.get_tower(kind)
            version = None if is_off else self.module.get_version(kind)
            settings: list[Any] = [(name, value) for name, value in config.items() if name.startswith(f"{kind}_")]
            settings += [tower[0].config._attn_implementation, self.accelerator.mixed_precision, args.tf32]
            self.kept.set_tower(kind, version, tower.state_dict(), settings, args.device.type)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move the inputs to the device, compute spectrograms from audio samples, and apply SpecAugment in training."""
        # Batches of a stream are still on the CPU.
        inputs = send_to_device(inputs, self.args.device, non_blocking=self.args.dataloader_pin_memory)
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        if "samples" in prepared:
            prepared |= self.processor.on_device(prepared.pop("samples"), prepared.pop("sample_counts"))
        if self._spec_augment is not None and self.module.training:
            mask = prepared.get("audio_attention_mask")
            prepared["input_features"] = self._spec_augment(prepared["input_features"], mask, self.state.global_step)
        return prepared

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as in the Trainer. Callbacks get the model without its objective, so that trackers can save it."""
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.callback_handler.model = self.clap
        return prepared

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay (see `parameter_groups.decays`)."""
        parameters = dict(model.named_parameters())
        return [name for name in super().get_decay_parameter_names(model) if decays(name, parameters[name])]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer as in the Trainer. `args.learning_rates` then replaces the rates of some parameters."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if rates := as_rates(self.args.learning_rates):
            model: Any = self.model
            split_by_rate(optimizer, model.named_parameters(), rates)
        return optimizer

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Run the forward pass and return the loss. If the loss is not finite, the run stops at the next log."""
        outputs = model(**inputs)
        self._step_logs = outputs.logs
        self._logs.add(outputs.logs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def _require_finite_losses(self) -> None:
        """Raise FloatingPointError if a loss since the last call is not finite."""
        # All losses are checked at once, because a check waits for the GPU.
        recent, self._recent = self._recent, []
        losses = torch.stack([loss for _, loss, _, _ in recent]).tolist() if recent else []
        self._loss_sum += sum(losses)
        if all(map(math.isfinite, losses)):
            return

        step, loss, logs, indices = next(entry for entry in recent if not torch.isfinite(entry[1]))
        broken = [name for name, value in logs.items() if not torch.isfinite(torch.as_tensor(value))]
        clips = indices.tolist()
        if self._batches is None:
            clips = [self.train_rows[index]["clip_id"] for index in clips]
        raise FloatingPointError(
            f"the loss is {loss.item()} at step {step}, from {broken or 'the total'}, on clips {clips}; "
            "the last checkpoint is unchanged, try a lower learning rate or fp32"
        )

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, because a trainer has one model and one objective, and cannot create new ones."""
        raise NotImplementedError("hyperparameter_search is not supported; create a new trainer for each trial")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Lock the output folder, check the checkpoint to resume from, and train as in the Trainer.

        `resume_from_checkpoint` is a checkpoint folder, or True for the newest complete one in the output folder. None:
        that of the arguments, where "last" is the newest one, if there is any. False: start a new run.

        If the validation rows, the metric or the evaluated languages have changed, a resumed run forgets the best
        score, because scores before and after the change are not comparable.

        Raises:
            RuntimeError: Another run is using the output folder.
            ValueError: There is no checkpoint, it is incomplete, or it was saved with different settings or training
                rows. The message lists the differences. Or a new run would start in a folder with checkpoints, or all
                weights are frozen.
        """
        if not any(weight.requires_grad for weight in self.module.parameters()):
            raise ValueError("all weights of the model are frozen; set requires_grad of those to train")
        folder = self.args.output_dir or "."
        with folder_lock(folder) if self.is_world_process_zero() else nullcontext():
            checkpoint = self._find_checkpoint(folder, resume_from_checkpoint)
            self._recent, self._loss_sum = [], 0.0
            if checkpoint is not None:
                run = self._describe_run()
                saved = refuse_another_run(checkpoint, run)
                self._loss_sum = saved.get("loss_sum", math.nan)
                self._best.forgets = selects_otherwise(saved, run)
                if self._best.forgets:
                    logger.warning(
                        "the validation rows or the metric have changed; the earlier best score is forgotten"
                    )
            self._refuse_unknown_metric()
            self._ema.checkpoint = checkpoint
            self._set_precision()
            # evaluation names the model by it, not by its start
            self.clap.trained_in = Path(folder).absolute().name
            names = [kind for kind in ("audio", "text") if self.module.get_version(kind) is not None]
            if names and self.args.cache_frozen == "always" and self.is_world_process_zero():
                logger.warning(
                    f"frozen towers run without dropout, and their outputs are computed once: {' and '.join(names)}; "
                    "cache_frozen='never' keeps the dropout"
                )
            output = super().train(checkpoint, *args, **kwargs)
            return output._replace(training_loss=output.metrics["train_loss"])

    def _refuse_unknown_metric(self) -> None:
        """Raise ValueError before the first step if `metric_for_best_model` is of no evaluation of this trainer."""
        args = self.args
        is_used = args.eval_strategy != "no" and self.eval_rows is not None and args.metric_for_best_model is not None
        # the user's own metrics have any names
        if not is_used or self.compute_metrics is not None:
            return
        sets = self.eval_rows if isinstance(self.eval_rows, dict) else {"": self.eval_rows}
        prefixes: set[str] = set()
        for name, rows in sets.items():
            datasets = dataset_names(rows)
            prefixes |= {name, *datasets, *(f"{name}_{dataset}" for dataset in datasets)}
        refuse_unknown_metric(str(args.metric_for_best_model), self._metric_names(), prefixes)

    def _metric_names(self) -> list[str]:
        """Return the names of the metrics of an evaluation, without the names of sets and datasets."""
        from ..evaluation.retrieval import retrieval_metric_names

        return retrieval_metric_names(self.args.eval_languages)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Train on one batch as in the Trainer. In the first step of an epoch, warn of parameters that do not train.

        They have no gradient, or are not in the optimizer, because they were unfrozen later or it is the user's own.

        Raises:
            ValueError: A parameter has no gradient in several processes, where DistributedDataParallel would fail in
                the second step, or with reentrant checkpointing, which gives none to parameters behind frozen ones.
        """
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._recent.append((self.state.global_step + 1, loss, self._step_logs, inputs["clip_index"]))
        if len(self._recent) >= 1000:  # a run without logs
            self._require_finite_losses()
        if not self._has_checked_gradients:
            self._has_checked_gradients = True
            self._check_gradients()
        return loss

    def _check_gradients(self) -> None:
        args, idle = self.args, idle_parameters(self.module)
        if args.sharding is not None:  # the optimizer has other tensors
            return
        optimized: set[int] = set()
        for group in self.optimizer.param_groups:  # type: ignore[union-attr]
            optimized.update(map(id, group["params"]))
        weights = self.module.named_parameters()
        left_out = [name for name, weight in weights if weight.requires_grad and id(weight) not in optimized]
        if left_out:
            warnings.warn(
                f"{len(left_out)} trainable parameters are not in the optimizer, such as {left_out[0]}, and will not "
                "change; unfreeze parameters before the training, or pass all of them to your own optimizer",
                stacklevel=2,
            )
        if not idle:
            return
        message = f"{len(idle)} trainable parameters have no gradient in the first step, such as {idle[0]}"
        checkpointing: Any = args.gradient_checkpointing_kwargs or {}
        if checkpointing.get("use_reentrant"):
            raise ValueError(f"{message}; set use_reentrant to false in gradient_checkpointing_kwargs")
        advice = "freeze them with requires_grad_(False)"
        if args.world_size > 1 and not args.ddp_find_unused_parameters:
            raise ValueError(
                f"{message}; {advice}, or set ddp_find_unused_parameters to true if other batches use them"
            )
        warnings.warn(f"{message}; they are not trained, unless other batches use them, {advice}", stacklevel=2)

    def _find_checkpoint(self, folder: str, given: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, or None for a new run."""
        named = self.args.resume_from_checkpoint if given is None else given
        if named not in (True, "last"):
            return str(named) if named else last_checkpoint(folder, resumes=False)
        last = last_checkpoint(folder, resumes=True)
        if last is None and named is True:
            raise ValueError(f"{folder} contains no checkpoint; call train() to start a new run")
        return last

    @property
    def used_arguments(self) -> dict[str, Any]:
        """Arguments that this run has used with other values than those of `args`.

        The user's own optimizer and scheduler replace some, and `auto_find_batch_size` lowers the batch.
        """
        used: dict[str, Any] = {}
        if self._own_optimizer is not None:
            used = {"optim": type(self._own_optimizer).__name__}
            own = {"learning_rate": "lr", "weight_decay": "weight_decay"}
            used |= {
                name: self._own_optimizer.defaults[key]
                for name, key in own.items()
                if key in self._own_optimizer.defaults
            }
        if self._own_scheduler is not None:
            used["lr_scheduler_type"] = type(self._own_scheduler).__name__
        if self._train_batch_size != self.args.train_batch_size:
            used["per_device_train_batch_size"] = self._train_batch_size
        return used

    def _describe_run(self) -> dict[str, Any]:
        records = map_sets(lambda usable: usable.record, self.data)
        return describe_run(self.args, self.module, records, self._batches, self._own_optimizer)

    def _set_precision(self) -> None:
        """Apply `args.tf32`. The setter of transformers is cached: its second call with a value has no effect."""
        if self.args.tf32 is not None:
            torch.backends.fp32_precision = "tf32" if self.args.tf32 else "ieee"  # type: ignore[attr-defined]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as in the Trainer, and add the objective's values and the throughput."""
        self._require_finite_losses()
        # from the Trainer, not from `compute_loss` of a subclass
        if {"loss", "learning_rate"} <= logs.keys():
            logs = {**logs, **self._logs.drain()}
            logs["clips_per_second"] = 1 / logs.pop("seconds_per_clip")
            logs["process_seconds"] = self.throughput.process_seconds
        # at the end of `train`, which also returns this dict; the Trainer leaves out the steps before it was resumed
        if "train_loss" in logs and math.isfinite(self._loss_sum) and not self.args.auto_find_batch_size:
            logs["train_loss"] = self._loss_sum / max(1, self.state.global_step)
        super().log(logs, start_time)

    # ---- evaluation ----

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Run the loop of `evaluate` and `predict`, with the averaged weights of `ema_decay`.

        The metrics are those of `evaluation.retrieval_metrics`, in both directions and each language, and those of
        `compute_metrics`. The `predictions` are audio `(N, d)` and text embeddings `(N, K, d)`.
        """
        self._require_finite_losses()
        self._set_precision()
        custom = self.compute_metrics
        rows: Any = dataloader.dataset
        self.compute_metrics = partial(_add_metrics, self._metrics_of(rows), custom)
        try:
            with self._ema:
                return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.compute_metrics = custom

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Any, Any]:
        # No loss, because a contrastive loss depends on how the split is batched.
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        return None, (outputs.audio_embeds.float(), outputs.text_embeds.float()), inputs["clip_index"]

    # ---- saving ----

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Select the best checkpoint as in the Trainer, but among equal scores the last one, which is trained more."""
        name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        if self.state.best_metric is not None and metrics.get(name) == self.state.best_metric:
            self.state.best_metric = None
        return super()._determine_best_metric(metrics, trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint to a temporary folder, and rename the folder after all processes have finished writing."""
        self._require_finite_losses()
        output = Path(self.args.output_dir or ".")
        unfinished, folder = output / UNFINISHED, output / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed run
        self.accelerator.wait_for_everyone()
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)

        try:
            self._write_checkpoint(CheckpointFolder(unfinished / folder.name))
        except BaseException:
            if self.args.should_save:
                # frees space if the disk is full
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

        if self.args.should_save:
            if folder.exists():
                os.replace(folder, unfinished / "replaced")
            os.replace(unfinished / folder.name, folder)
            shutil.rmtree(unfinished)
            rotate_checkpoints(str(output), self.args.save_total_limit, self.state.best_model_checkpoint, True)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            with self.args.public_in_files():
                self._push_from_checkpoint(str(folder))

    def _write_checkpoint(self, folder: CheckpointFolder) -> None:
        """Write all files of a checkpoint, each process its own. `RUN_FILE` is the last, because it contains hashes."""
        args = self.args
        self.save_model(folder, _internal_call=True)
        if not args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
        self.accelerator.wait_for_everyone()
        if not args.should_save:
            return

        for part in (*self.callback_handler.callbacks, self.control):
            if isinstance(part, ExportableState):
                states: Any = self.state.stateful_callbacks
                name = type(part).__name__
                states[name] = [*states[name], part.state()] if isinstance(states[name], list) else part.state()
        # The path of the best checkpoint is left out: its step identifies it, even if the folder is moved.
        replace(self.state, best_model_checkpoint=None).save_to_json(str(Path(folder, TRAINER_STATE_NAME)))
        if args.save_only_model:  # a run cannot resume without its optimizer
            return
        if args.ema_decay is not None:
            torch.save(self._ema.trained(), Path(folder, TRAINED_WEIGHTS))
        write_run_file(folder, {**self._describe_run(), "loss_sum": self._loss_sum}, self._frozen)

    def save_state(self) -> None:
        """Save the state as in the Trainer, except the local path of the best checkpoint."""
        best, self.state.best_model_checkpoint = self.state.best_model_checkpoint, None
        super().save_state()
        self.state.best_model_checkpoint = best

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as in the Trainer. With FSDP's SHARDED_STATE_DICT, also save the whole model at the end."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        is_sharded = plugin is not None and "SHARDED_STATE_DICT" in str(plugin.state_dict_type)
        if is_sharded and not isinstance(output_dir, CheckpointFolder):
            self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        with self._ema:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the weights: to a `CheckpointFolder` for resuming, and to any other folder for `from_pretrained`.

        `state_dict` contains the gathered weights of a sharded model. None: use those of this process.
        """
        weights = self.module.state_dict() if state_dict is None else state_dict
        # The extrema are NaN or infinite if any value is. Unlike isfinite, they need no memory.
        filled = {name: weight for name, weight in weights.items() if weight.numel()}
        broken = [name for name, weight in filled.items() if not torch.stack(weight.aminmax()).isfinite().all()]
        if broken:
            step = self.state.global_step
            raise FloatingPointError(f"step {step}: {len(broken)} weights are not finite, e.g. {broken[0]}; not saved")

        if isinstance(output_dir, CheckpointFolder):
            self._save_to_resume(output_dir, weights, is_gathered=state_dict is not None)
        elif self.args.should_save:
            self._save_for_inference(Path(output_dir or self.args.output_dir or "."), weights)

    def _save_to_resume(self, folder: CheckpointFolder, weights: dict[str, Tensor], is_gathered: bool) -> None:
        """Save the weights of the model and of the objective.

        A checkpoint contains only the trained weights, and `write_frozen` writes the frozen ones to the output folder.
        If the checkpoint is uploaded, or if the model is sharded, it contains all weights.
        """
        is_whole = is_gathered or self.args.save_only_model or self.args.push_to_hub or uploads_checkpoints()
        parameters = [] if is_whole else self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, weight in parameters if name in weights and not weight.requires_grad}
        if sum(weights[name].nbytes for name in frozen) < 0.01 * sum(weight.nbytes for weight in weights.values()):
            frozen = set()  # a few idle weights are not worth a second file
        with self.args.public_in_files():
            super()._save(folder, {name: w for name, w in weights.items() if name not in frozen})
        if self.args.should_save:
            output = Path(self.args.output_dir or ".")
            self._frozen = write_frozen(Path(folder), output, weights, frozen, self._frozen) if frozen else {}
            if self.args.push_to_hub:  # the Trainer uploads the weights from `output`
                self.clap.save_code(output)
            self.clap.config.save_pretrained(folder)
            apply_umask(folder)
            if getattr(self.clap, "peft_config", None):
                from .lora import save_configs

                save_configs(self.clap, folder)

    def _save_for_inference(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Save the model without its objective, and its processor. Adapters are merged in the saved model."""
        inference = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.")}
        adapters = getattr(self.clap, "peft_config", None)
        if adapters:
            # here, because only adapters need peft
            from .lora import active_adapters, merged_copy, whole_weights

            whole = whole_weights(self.clap, inference)
            merged_copy(self.clap.config, adapters, whole, active_adapters(self.clap)).save_pretrained(folder)
        else:
            self.clap.save_pretrained(folder, state_dict=inference)
        self.processor.save_pretrained(folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card `README.md` as in the Trainer. A card that was edited by hand is not overwritten."""
        if self.is_world_process_zero():
            from ..model_card import write_card_of_run

            given = inspect.signature(Trainer.create_model_card).bind(self, *args, **kwargs).arguments.get
            lists = {"languages": given("language"), "tags": given("tags")}
            lists["dataset"] = given("dataset_tags") or given("dataset")
            facts: dict[str, Any] = {name: [v] if isinstance(v, str) else v for name, v in lists.items()}
            facts |= {"name": given("model_name"), "license": given("license"), "base_model": given("finetuned_from")}
            write_card_of_run(self, **facts)


def _add_metrics(ours: Callable[[Any], dict[str, float]], custom: Any, prediction: Any) -> dict[str, Any]:
    """Return our metrics, and those of the user's `compute_metrics`, which may be None or return None."""
    added = {} if custom is None else custom(prediction)
    if added is not None and not isinstance(added, Mapping):
        raise TypeError(f"compute_metrics returned a {type(added).__name__}; return a dict of metrics, or None")
    return {**ours(prediction), **(added or {})}
