"""The Hugging Face Trainer with a contrastive objective. It moves tensors and logs them; it holds no formula."""

from __future__ import annotations

import copy
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from modeling_supclap.datasets_scripts.atomic_files import apply_umask, folder_lock
from modeling_supclap.datasets_scripts.bad_audio import exit_with_parent
from modeling_supclap.datasets_scripts.schema import group_id, require_captions, warn_of_shared_captions, without_audio
from modeling_supclap.datasets_scripts.stream import EpochBatches, EpochRows, RowStream
from modeling_supclap.datasets_scripts.temporal.items import RenderOptions, TemporalItems

from ..encoding import max_window_seconds
from ..evaluation.embed import in_row_order
from ..evaluation.retrieval import retrieval_metrics
from ..feature_extraction_ced import CEDFeatureExtractor
from ..losses.support_vector import DynamicRadius
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from .callbacks import (
    Averages,
    BestCheckpointCallback,
    DriftCallback,
    EpochCallback,
    LanguageErrorsCallback,
    LineCallback,
    SupCLAPProgressCallback,
    ThroughputCallback,
)
from .checkpoints import last_checkpoint, refuse_another_run, write_run_file
from .collator import EvaluationCollator, IndexedRows, TemporalCollator, TrainingCollator, filter_bad_audio
from .contrastive_module import ContrastiveModule
from .drift import radius_by_hard_negatives
from .objectives import SupportVectorRegularizer, TemporalObjective, build_objective
from .training_args import SupCLAPTrainingArguments, TemporalTrainingArguments

UNFINISHED = "unfinished"
"""The folder, in the output folder, in which a checkpoint is written."""


class SupCLAPTrainer(Trainer):
    """Trains a `SupCLAPModel` with a contrastive objective on rows of `datasets_scripts/schema.py`.

    Where there are captions in two languages or more, `loss` says how they train: `infonce` on a language drawn for
    each clip and epoch (ML-CLAP's scheme), `kcl` on all at once, `cacl` on the anchor language and another; `svr` adds
    support vectors to any of them [ATRI; S table 8]. Evaluation then also measures how the languages agree (MRV).

    Args:
        model: The model to train; `trainer.clap` is the same object, `trainer.model` holds it and its objective.
        args: See `SupCLAPTrainingArguments`.
        train_dataset: The rows to train on: map-style, or a `stream.RowStream`, whose rows are read as they are needed;
            a resumed run sees the same batches of either. A set of `datasets` with a column of type `Audio` and one of
            captions is read by `builders.hf.as_rows`, which knows other names of columns too. What `args.on_bad_audio`
            leaves out is left out here: `trainer.train_rows` and `trainer.eval_rows` are the rest.
        eval_dataset: The rows to evaluate on, map-style, treated alike; or a dict of several such sets by name, whose
            metrics are then called `eval_<name>_...`.
        processing_class: The model's processor.
        objective: An objective of your own; by default `build_objective(args)`.
        callbacks: As the Trainer's.
        optimizers: As the Trainer's.

    Raises:
        ValueError: The processor is missing, the training split is smaller than a batch or a stream of another kind,
            siglip finds no bias in the model, or one process was started on a machine with several GPUs, where each GPU
            would contrast only its own part of the batch.
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
        if objective is None and args.loss == "siglip" and model.logit_bias is None:
            raise ValueError(
                "loss siglip needs a model with a bias, and this one has none; a new model gets one by "
                "--logit_bias -10 --temperature 0.1"
            )

        extractor = processing_class.feature_extractor
        self._min_seconds = getattr(extractor, "min_samples", 0) / extractor.sampling_rate
        train_dataset = self._usable(train_dataset, args)
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: self._usable(rows, args) for name, rows in eval_dataset.items()}
        else:
            eval_dataset = self._usable(eval_dataset, args)
        batch = args.train_batch_size * args.world_size
        if train_dataset is not None and len(train_dataset) < batch:
            raise ValueError(
                f"the training split has {len(train_dataset)} clips, fewer than one batch of {batch}; "
                "lower per_device_train_batch_size"
            )

        if (args.gradient_accumulation_steps > 1 or args.auto_find_batch_size) and args.process_index == 0:
            warnings.warn(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps} and auto_find_batch_size "
                f"{args.auto_find_batch_size}: clips are contrasted only with those of the same smaller batch. To save "
                "memory with all negatives, set cached_chunk_size instead",
                stacklevel=2,
            )

        collator, self.evaluation_collator = self._collators(processing_class, args)
        if args.features_on_device and not isinstance(extractor, CEDFeatureExtractor):
            raise ValueError(
                f"features_on_device wants a CEDFeatureExtractor, which can do without the CPU; the model's is a "
                f"{type(extractor).__name__}"
            )
        collator.gives_samples = self.evaluation_collator.gives_samples = args.features_on_device
        self.has_own_objective = objective is not None and not isinstance(objective, TemporalObjective)
        objective = build_objective(args) if objective is None else objective

        sharded = args.fsdp or args.deepspeed  # a forward pass then wants all processes
        self.module = ContrastiveModule(
            model, objective, args.cached_chunk_size, "never" if sharded else args.cache_frozen
        )
        self.train_rows, self.eval_rows = train_dataset, eval_dataset

        indexed: Any = None
        epochs: list[Any] = [collator]
        self._batches: EpochBatches | None = None
        if isinstance(train_dataset, RowStream):
            own_rows = train_dataset.shuffle(args.seed).shard(args.process_index, args.world_size)
            indexed = EpochRows(own_rows)
            self._batches = EpochBatches(own_rows, args.train_batch_size, args.dataloader_num_workers)
            epochs.append(self._batches)
        elif train_dataset is not None:
            indexed = IndexedRows(train_dataset, args.languages[0] if args.every_caption else None)

        super().__init__(
            model=self.module,
            args=args,
            data_collator=collator,
            train_dataset=indexed,
            eval_dataset=_indexed(eval_dataset),
            processing_class=processing_class,
            callbacks=[EpochCallback(*epochs), BestCheckpointCallback(), *(callbacks or [])],
            optimizers=optimizers,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # their parameters cannot be set in the first step
            for part in objective.modules():
                if isinstance(part, SupportVectorRegularizer):
                    part.start_radii(math.sqrt(2))  # the distance of embeddings that know nothing of each other

        self.clap = model
        self.processor = processing_class

        self._saving = False  # whether a checkpoint is being written
        self._logs = Averages()
        self._recent: list[tuple[int, torch.Tensor, dict[str, torch.Tensor], torch.Tensor]] = []  # since the last test
        if args.track_drift:
            self.add_callback(DriftCallback(self.module.objective, self._logs))
        if args.track_language_errors and train_dataset is not None:
            light = without_audio(train_dataset)
            require_captions(light, args.languages, "kcl", "train")
            self.add_callback(LanguageErrorsCallback(self.module, collator, light, self._logs))
        self.add_callback(ThroughputCallback(self._logs))
        has_bar = self.pop_callback(ProgressCallback) is not None and sys.stderr.isatty()
        self.pop_callback(PrinterCallback)  # which prints all 40 numbers of a log where bars are disabled
        self.add_callback(SupCLAPProgressCallback() if has_bar else LineCallback())

    def _collators(self, processor: SupCLAPProcessor, args: SupCLAPTrainingArguments) -> tuple[TrainingCollator, Any]:
        """Makes what turns rows into batches, in training and in evaluation."""
        shared: dict[str, Any] = {"positives": args.positives, "max_audio_seconds": args.max_audio_seconds}
        return (
            TrainingCollator(processor, args.languages, seed=args.seed, scheme=args.caption_scheme, **shared),
            EvaluationCollator(processor, args.eval_languages, **shared),
        )

    def _usable(self, rows: Any, args: SupCLAPTrainingArguments) -> Any:
        """Takes out of a split what `on_bad_audio` leaves out; shared captions are counted."""
        if rows is None:
            return None
        if not hasattr(rows, "__len__"):
            raise ValueError(
                f"got a stream of rows ({type(rows).__name__}), of which a resumed run would not see the same batches; "
                "the trainer reads the streams of load_splits(..., streaming=True), and all rows that it can number"
            )

        if isinstance(rows, RowStream):
            if args.on_bad_audio != "error" or args.every_caption or args.track_language_errors:
                raise ValueError(
                    "a stream is read as it is needed, and on_bad_audio (but error), every_caption and "
                    "track_language_errors want all rows before: leave them out; prepare.py leaves out of a set what "
                    "cannot be used"
                )
            return rows

        if "clip_id" not in (getattr(rows, "column_names", None) or ("clip_id",)):
            from modeling_supclap.datasets_scripts.builders.hf import as_rows

            rows = as_rows(rows, caption_language=args.languages[0])
        rows = filter_bad_audio(rows, args, self._min_seconds)

        if args.positives == "clip" and args.process_index == 0:
            warn_of_shared_captions(rows)
        return rows

    def _metrics_of(self, rows: IndexedRows) -> Callable[[Any], dict[str, float]]:
        """Makes the `compute_metrics` of a split: retrieval, and what hard negatives make of a predicted radius."""
        retrieval = retrieval_metrics(rows, self.args.eval_languages, self.args.positives)
        regularizer = getattr(self.module.objective, "regularizer", None)
        radii = dict(regularizer.radii) if isinstance(regularizer, SupportVectorRegularizer) else {}
        radius = radii.get("t2a")
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if not self.args.track_drift or is_sharded or not isinstance(radius, DynamicRadius):
            return retrieval

        def with_radii(prediction: Any) -> dict[str, float]:
            device = self.clap.logit_scale.device
            audio_embeds, text_embeds = (torch.from_numpy(embeds).to(device) for embeds in in_row_order(prediction))
            groups = [group_id(row, self.args.positives) for row in without_audio(rows.rows)]
            radii = radius_by_hard_negatives(
                radius,
                audio_embeds,
                text_embeds[:, 0],
                self.clap.logit_scale.exp(),
                torch.tensor(groups, device=device),
            )
            return retrieval(prediction) | {name: value.item() for name, value in radii.items()}

        return with_radii

    # ---- training ----

    def get_train_dataloader(self) -> DataLoader:
        """As the Trainer's; of a stream, the batches of this process, whose workers read parts of it of their own."""
        if self._batches is None:
            return super().get_train_dataloader()

        # Not prepared by accelerate, which would deal the batches of one loader out to the processes.
        workers, rows = self.args.dataloader_num_workers, self.train_dataset
        assert isinstance(rows, EpochRows)
        return DataLoader(
            rows,
            batch_sampler=self._batches,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=workers > 0 and self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            worker_init_fn=exit_with_parent,
        )

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As the Trainer's; spectrograms are made here of samples, where the collator gives samples."""
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        if "samples" in prepared:
            samples, counts = prepared.pop("samples"), prepared.pop("sample_counts")
            prepared |= self.processor.feature_extractor.on_device(samples, counts)
        return prepared

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """As the Trainer's, with workers that end when this process is killed."""
        loader = super()._get_dataloader(*args, **kwargs)
        base = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
        base.worker_init_fn = partial(exit_with_parent, then=base.worker_init_fn)
        return loader

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Run the module, which computes its loss; a loss that is not finite stops the run at the next log."""
        outputs = model(**inputs)
        if model.training:
            step = self.state.global_step + 1
            self._recent.append((step, outputs.loss.detach(), outputs.logs, inputs["clip_index"]))
            if len(self._recent) >= 1000:  # a run without logs
                self._require_finite_losses()
        self._logs.add(outputs.logs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def _require_finite_losses(self) -> None:
        """Test the losses since the last call at once, because each test waits for the GPU.

        Raises:
            FloatingPointError: A loss is not finite; the message names its step, its terms and the clips.
        """
        recent, self._recent = self._recent, []
        if not recent or torch.isfinite(torch.stack([loss for _, loss, _, _ in recent])).all():
            return

        step, loss, logs, indices = next(entry for entry in recent if not torch.isfinite(entry[1]))
        broken = [name for name, value in logs.items() if not torch.isfinite(value)]
        clips = indices.tolist()
        if self._batches is None:
            clips = [self.train_rows[index]["clip_id"] for index in clips]
        raise FloatingPointError(
            f"the loss is {loss.item()} at step {step}, from {broken or 'the total'}, on clips {clips}; "
            "the last checkpoint is untouched, a lower learning rate or fp32 may help"
        )

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "SupCLAPTrainer does not support hyperparameter_search, because its model and objective are made once; "
            "make a new trainer for each trial"
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does, as the only run in its folder, and resumes only what is whole and its own.

        Args:
            resume_from_checkpoint: The folder of a checkpoint, or True for the newest whole one of the output folder.
            *args: As the Trainer's.
            **kwargs: As the Trainer's.

        Raises:
            RuntimeError: Another run trains in the output folder.
            ValueError: The checkpoint is not whole, or of a run with other settings, which are named.
        """
        folder = self.args.output_dir or "."
        with folder_lock(folder) if self.is_world_process_zero() else nullcontext():
            if resume_from_checkpoint is True:
                resume_from_checkpoint = last_checkpoint(folder, resumes=True)
            if resume_from_checkpoint:
                refuse_another_run(resume_from_checkpoint, self.args, self.module, self._batches)
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the objective's numbers and the throughput to those of the Trainer."""
        self._require_finite_losses()
        if "loss" in logs:
            logs = {**logs, **self._logs.drain()}
            logs["clips_per_second"] = 1 / logs.pop("seconds_per_clip")
        super().log(logs, start_time)

    # ---- evaluation ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Score retrieval on a split, in both directions and each language; see `evaluation.retrieval_metrics`.

        Metrics of your own, `trainer.compute_metrics = f`, are added to these.

        Args:
            eval_dataset: Rows, a dict of several sets of rows, or the name of one of the trainer's own; by default all
                of the trainer's own.
            ignore_keys: As the Trainer's.
            metric_key_prefix: As the Trainer's.
        """
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, dict):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # calls this for each of them

        if isinstance(rows, str):
            sets: Any = self.eval_dataset
            rows = sets[rows]
        rows = _indexed(rows)
        with self._evaluating(rows):
            return super().evaluate(rows, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """As the Trainer's: `predictions` holds the audio `(N, d)` and text `(N, K, d)` embeddings."""
        rows: Any = _indexed(test_dataset)
        with self._evaluating(rows):
            return super().predict(rows, ignore_keys, metric_key_prefix)

    @contextmanager
    def _evaluating(self, rows: IndexedRows) -> Iterator[None]:
        """Use the collator without random draws, the last incomplete batch and our metrics."""
        self._require_finite_losses()
        before = self.data_collator, self.args.dataloader_drop_last, self.compute_metrics
        self.data_collator = self.evaluation_collator
        self.args.dataloader_drop_last = False
        own, ours = self.compute_metrics, self._metrics_of(rows)
        self.compute_metrics = ours if own is None else lambda prediction: ours(prediction) | own(prediction)

        try:
            yield
        finally:
            self.data_collator, self.args.dataloader_drop_last, self.compute_metrics = before

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, Any, Any]:
        """Gives embeddings only: a loss over the batches would depend on how the split is cut into them."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        return None, (outputs.audio_embeds.float(), outputs.text_embeds.float()), inputs["clip_index"]

    # ---- saving ----

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / UNFINISHED) if self._saving else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads a whole checkpoint; the Trainer calls this too early, when it is still `unfinished`."""
        if not self._saving:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes a checkpoint beside the others, and gives it its name when it is whole and all processes are done."""
        self._require_finite_losses()
        folder = Path(self._get_output_dir(trial))
        unfinished, name = folder / UNFINISHED, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)  # what a killed run has left
        self.accelerator.wait_for_everyone()

        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        except BaseException:
            if self.args.should_save:
                shutil.rmtree(unfinished, ignore_errors=True)  # room again, where the disk is full
            raise
        finally:
            self._saving = False

        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder / name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # Without the place of the best: it is known by its step wherever the folder of the run has gone since.
            state = replace(self.state, best_model_checkpoint=None)
            state.save_to_json(str(unfinished / name / TRAINER_STATE_NAME))
            write_run_file(unfinished / name, self.args, self.module, self._batches)
            if (folder / name).exists():
                os.replace(folder / name, unfinished / "replaced")
            os.replace(unfinished / name, folder / name)
            shutil.rmtree(unfinished)
            rotate_checkpoints(str(folder), self.args.save_total_limit, self.state.best_model_checkpoint, True)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder / name))

    def save_state(self) -> None:
        """Saves what the run logged, as the Trainer does, without the place of the best checkpoint on this machine."""
        best, self.state.best_model_checkpoint = self.state.best_model_checkpoint, None
        super().save_state()
        self.state.best_model_checkpoint = best

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Writes a folder for `from_pretrained`; a checkpoint of the run holds the objective's parameters as well."""
        folder = Path(output_dir or self.args.output_dir or ".")
        weights = self.module.state_dict() if state_dict is None else state_dict
        broken = [name for name, w in weights.items() if w.is_floating_point() and not w.isfinite().all()]
        if broken:
            raise FloatingPointError(
                f"after step {self.state.global_step}, {len(broken)} of the weights are not finite, such as "
                f"{broken[0]}; they are not saved, and the last checkpoint is untouched"
            )

        if folder.name.startswith(PREFIX_CHECKPOINT_DIR):
            super()._save(str(folder), state_dict)
            if self.args.should_save:
                self.clap.config.save_pretrained(folder)
                apply_umask(folder)

        elif self.args.should_save:
            inference = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.")}
            if getattr(self.clap, "peft_config", None):  # an adapter folder has no place for the temperature
                from .lora import merge_lora  # and with it peft, which other runs do without

                merge_lora(copy.deepcopy(self.clap)).save_pretrained(folder)
            else:
                self.clap.save_pretrained(folder, state_dict=inference)
            self.processor.save_pretrained(folder)
            apply_umask(folder)

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Writes README.md into the output folder, see `model_card`; the arguments are the Trainer's.

        `push_to_hub` calls it. A card that somebody has edited stays as it is.
        """
        if self.is_world_process_zero():
            named = {"languages": language, "tags": tags, "dataset": dataset_tags or dataset}
            facts: dict[str, Any] = {"name": model_name, "license": license, "base_model": finetuned_from}
            facts |= {name: [value] if isinstance(value, str) else value for name, value in named.items()}
            from ..model_card import write_card_of_run

            write_card_of_run(self, **facts)


class TemporalTrainer(SupCLAPTrainer):
    """Post-trains a model on the order of sounds: one stage of TeminAL [T 3.2].

    Evaluation asks of each held-out item which of its pair's captions is its own: `temporal_accuracy`.

    Args:
        model: The model to post-train; freeze what should stay as it is beforehand, see `lora.py`.
        args: The stage, its weights and the rest.
        train_items: Draws the items to train on, from the training part of a labelled set.
        eval_items: Draws those to evaluate on, always the same ones.
        **kwargs: As `SupCLAPTrainer`.
    """

    args: TemporalTrainingArguments

    def __init__(
        self,
        model: SupCLAPModel,
        args: TemporalTrainingArguments,
        train_items: TemporalItems,
        eval_items: TemporalItems | None = None,
        **kwargs: Any,
    ) -> None:
        self.train_items = train_items
        self.eval_items = train_items if eval_items is None else eval_items
        self._model_config = model.config
        super().__init__(
            model,
            args,
            train_dataset=_numbered(train_items),
            eval_dataset=None if eval_items is None else _numbered(eval_items),
            objective=TemporalObjective(args.stage, args.temporal_beta, **args.alphas),
            **kwargs,
        )

    def _collators(self, processor: SupCLAPProcessor, args: SupCLAPTrainingArguments) -> tuple[TrainingCollator, Any]:
        assert isinstance(args, TemporalTrainingArguments)
        collator = partial(
            TemporalCollator,
            processor,
            stage=args.stage,
            options=RenderOptions(args.crossfade_seconds, args.gap_seconds, args.match_loudness),
            max_audio_seconds=args.max_audio_seconds,
            seed=args.seed,
            window_seconds=max_window_seconds(self._model_config, processor.feature_extractor),
        )
        return (
            collator(items=self.train_items, languages=args.languages, scheme=args.text_scheme),
            collator(items=self.eval_items, languages=args.eval_languages[:1]),
        )

    def _usable(self, rows: Any, args: SupCLAPTrainingArguments) -> Any:
        return rows  # numbers of pairs, whose items hold the recordings

    def _metrics_of(self, rows: IndexedRows) -> Callable[[Any], dict[str, float]]:
        from ..evaluation.zste import temporal_metrics

        return temporal_metrics


def _indexed(rows: Any) -> Any:
    """Return rows, or each set of a dict of them, with the index of a row in it."""
    if isinstance(rows, dict):
        return {name: _indexed(each) for name, each in rows.items()}
    return rows if rows is None or isinstance(rows, IndexedRows) else IndexedRows(rows)


def _numbered(items: TemporalItems) -> list[dict[str, str]]:
    return [{"clip_id": f"pair {number}"} for number in range(len(items))]
