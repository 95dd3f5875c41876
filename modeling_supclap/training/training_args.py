"""Training arguments for contrastive training and TeminAL."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.utils.generic import strtobool
from transformers.utils.import_utils import is_torch_tf32_available

from modeling_supclap.datasets_scripts.bad_audio import ON_BAD_AUDIO
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.metrics.names import METRICS

from ..languages import require_language_code
from . import options
from .parameter_groups import as_rates

_UNSUPPORTED = {
    "neftune_noise_alpha": (None, "noise is not added to the embeddings of captions"),
    "label_smoothing_factor": (0.0, "a contrastive loss has no labels to smooth"),
    "train_sampling_strategy": ("random", "batches are drawn at random from all clips"),
    "remove_unused_columns": (False, "the collator reads the whole row"),
    "batch_eval_metrics": (False, "ranks are computed among all clips, not within a batch"),
    "eval_do_concat_batches": (True, "ranks are computed among all clips, not within a batch"),
}
"""Trainer arguments that contrastive training does not support, with the only valid value and the reason."""

INTERNAL = {
    *_UNSUPPORTED,
    "label_names",
    "dataloader_drop_last",
    "ddp_find_unused_parameters",
    "logging_nan_inf_filter",
}
"""Trainer arguments that a user does not set. The command line accepts them, and its help leaves them out."""

_CHOICES = {
    "loss": options.LOSSES,
    "svr": (
        "none",
        "uni-static",
        "bi-static",
        "uni-dynamic",
        "bi-dynamic",
        "uni-fixed",
        "bi-fixed",
        "within-modality",
    ),
    "radius_order": ("sorted", "batch"),
    "reweighting": ("pull", "probability"),
    "positives": ("clip", "captions"),
    "on_bad_audio": ON_BAD_AUDIO,
    "cache_frozen": ("always", "never"),
    "stage": ("a", "b"),
    "text_scheme": ("random", "kcl"),
}


_ERRORS = "track_language_errors"


@dataclass
class SupCLAPTrainingArguments(options.ContrastiveOptions, TrainingArguments):
    """Training arguments for contrastive training: `TrainingArguments` plus `options.ContrastiveOptions`.

    The defaults follow the SupCLAP paper (SupCLAP 4.1.2): Adam without weight decay, learning rate 5e-5, batch size 24,
    10 epochs. Each epoch ends with an evaluation and a checkpoint, and the checkpoint with the best *validation* recall
    is loaded at the end. By default, `dataloader_pin_memory` is True if a GPU is available, and `tf32` is True if the
    GPU supports TF32. With TF32, float32 matrix products round their inputs to 10 bits of mantissa. Workers of the data
    loader persist from epoch to epoch. From pinned memory, batches are copied to the GPU without waiting.

    Attributes:
        training_data: Name and options of the training data, recorded by the recipes. A resumed run must use the same
            data.
        selection_split: Name of the split that is evaluated during training, for the log; set by the recipes.
    """

    dataloader_drop_last: bool = True  # the loss depends on the number of negatives
    remove_unused_columns: bool = False
    label_names: list[str] | None = field(default_factory=lambda: ["clip_index"])
    logging_nan_inf_filter: bool = False  # a NaN loss stops the run
    ddp_find_unused_parameters: bool | None = False
    dataloader_pin_memory: bool = field(default_factory=torch.cuda.is_available)
    dataloader_persistent_workers: bool = True
    training_data: dict[str, Any] | None = field(default=None, init=False)
    selection_split: str = field(default="validation", init=False)

    def __post_init__(self) -> None:
        self._set_metric_direction()
        super().__post_init__()  # the process joins the others here
        self._set_defaults()
        options.refuse(_rules(self))
        self.eval_languages = self.eval_languages or list(self.languages)

    def _set_metric_direction(self) -> None:
        """Set `greater_is_better` from the name of the metric that selects the best checkpoint."""
        if self.greater_is_better is not None or self.metric_for_best_model is None:
            return
        lower_is_better = ["loss", *(name for name, metric in METRICS.items() if not metric.higher_is_better)]
        suffixes = tuple(f"_{name}" for name in lower_is_better)
        self.greater_is_better = not f"_{self.metric_for_best_model}".endswith(suffixes)

    def _set_defaults(self) -> None:
        """Set the defaults that depend on other arguments or on the device of this process."""
        # these schedules follow the metric for the best model, not the loss
        if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            direction = {"mode": "max" if self.greater_is_better else "min"}
            given: Any = self.lr_scheduler_kwargs or {}
            self.lr_scheduler_kwargs = {**direction, **given}
        self.dataloader_persistent_workers &= self.dataloader_num_workers > 0
        accelerator_config: Any = self.accelerator_config
        accelerator_config.non_blocking = self.dataloader_pin_memory
        if self.tf32 is None and not self.use_cpu and is_torch_tf32_available():
            self.tf32 = True
        if self.cache_frozen == "auto":
            warnings.warn("cache_frozen is always or never; auto is always now", FutureWarning, stacklevel=4)
            self.cache_frozen = "always"

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Device of this process. The Trainer joins the launched processes here; on CPUs it ignores `ddp_timeout`."""
        uses_cpus = self.use_cpu or strtobool(os.environ.get("ACCELERATE_USE_CPU", "false"))
        if uses_cpus and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # transformers 5.17 cannot resume on cpu:0
            os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
        return super()._setup_devices

    @property
    def sharding(self) -> str | None:
        """ "fsdp" or "deepspeed" if the weights are sharded, by an argument or by accelerate's launcher. Else None."""
        for name in ("fsdp", "deepspeed"):
            if getattr(self, name) or strtobool(os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false")):
                return name
        return None

    @contextmanager
    def public_in_files(self) -> Iterator[None]:
        """Context manager in which the Trainer writes `training_args.bin`, without the Hub token and local paths."""
        self._is_public = True
        try:
            yield
        finally:
            del self._is_public

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if state.pop("_is_public", False):
            state = {name: redact(value) if isinstance(value, str) else value for name, value in state.items()}
            state["hub_token"] = None
        return state

    @property
    def caption_scheme(self) -> str:
        """Caption sampling that the loss requires. It is passed as `scheme` to `collator.TrainingCollator`."""
        return self.loss if self.loss in options.MULTILINGUAL_LOSSES else "random"


def _rules(args: SupCLAPTrainingArguments) -> options.Rules:
    """Yield what a training refuses before it knows its model and data: values, then combinations."""
    launched, size = int(os.environ.get("WORLD_SIZE", "1")), args.world_size
    # otherwise, each process would train alone and write the same files
    yield launched > size, f"only {size} of {launched} processes train together; on CPUs, set --use_cpu true"
    for name, (only, reason) in _UNSUPPORTED.items():
        value = getattr(args, name)
        yield value != only, f"{name} is {value!r}, but {reason}; leave it at {only!r}"
    for name in ("languages", "eval_languages"):
        value = getattr(args, name)
        yield isinstance(value, str), f"{name} is the string {value!r}; pass a list, such as ['eng']"
        for language in value:
            require_language_code(language)
    yield not args.languages, "languages is empty; set at least one, such as eng"
    is_class = bool(re.fullmatch(r"[\w.]+:\w+", args.loss))
    for name, valid in _CHOICES.items():
        value = getattr(args, name, valid[0])
        is_valid = value in valid or (name == "loss" and is_class)
        yield not is_valid, f"{name} is {value!r}; it must be one of {', '.join(valid)}"
    yield from options.range_rules(args)
    as_rates(args.learning_rates)

    yield (
        is_class and args.svr != "none",
        f"svr is {args.svr!r}, but {args.loss} replaces loss and svr; set svr to none",
    )
    epochs = args.num_train_epochs
    yield (
        args.max_steps <= 0 and epochs <= 0,
        f"num_train_epochs is {epochs}; set it or max_steps to a positive value",
    )
    count, drawn = len(args.languages), args.languages_per_clip
    for name, needs in (
        (f"loss {args.loss}", args.loss in options.MULTILINGUAL_LOSSES),
        (_ERRORS, args.track_language_errors),
    ):
        yield needs and count < 2, f"{name} needs two languages or more, got {args.languages}"
    yield (
        drawn is not None and (args.loss != "kcl" or not 2 <= drawn <= count),
        f"languages_per_clip is {drawn} with loss {args.loss} and {count} languages; it must be 2 or more, at most the "
        "number of languages, and requires loss kcl",
    )
    yield (
        args.negatives_per_clip and args.loss not in ("infonce", "siglip") and not is_class,
        f"negatives_per_clip is set with loss {args.loss}; it requires infonce or siglip",
    )
    for name in ("every_caption", "negatives_per_clip"):
        both = args.track_language_errors and getattr(args, name)
        yield both, f"got {_ERRORS} with {name}; leave out one of them"
    yield (
        args.early_stopping_patience is not None and not args.load_best_model_at_end,
        "early_stopping_patience requires load_best_model_at_end; set it to true",
    )
    hard, batch = args.hard_negatives_per_batch, args.per_device_train_batch_size * size
    both = hard and args.auto_find_batch_size
    yield both, "got hard_negatives_per_batch with auto_find_batch_size; leave out one of them"
    yield hard >= batch, f"hard_negatives_per_batch is {hard}; it must be less than the batch of all devices, {batch}"
    yield (
        batch < 2,
        f"per_device_train_batch_size is {args.per_device_train_batch_size}; it must be 2 or more, to have negatives",
    )


@dataclass
class TemporalTrainingArguments(options.TemporalOptions, SupCLAPTrainingArguments):
    """Training arguments for one TeminAL stage.

    The defaults follow the paper: 85 class pairs, which are 255 audio-text pairs in stage b, and a learning rate of
    1e-4 (TeminAL B.5). The options `alpha_...` are the weights of candidates in the denominator of the softmax, 0 to 1.
    A candidate with weight 0 is left out.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        defined = ("loss", "loss_chunk_size", "svr", "every_caption", _ERRORS)
        for name in (*defined, "negatives_per_clip", "hard_negatives_per_batch"):
            value, default = getattr(self, name), getattr(options.ContrastiveOptions, name)
            reason = "TeminAL defines its loss and captions; leave it out"
            options.refuse([(value != default, f"{name} is {value!r}, but {reason}")])

    @property
    def stage_beta(self) -> float:
        """Weight of the text-to-audio direction in this stage."""
        is_other = self.stage == "a" and self.temporal_beta_a is not None
        return self.temporal_beta_a if is_other else self.temporal_beta  # type: ignore[return-value]

    @property
    def alphas(self) -> dict[str, float]:
        """Candidate weights of this stage, `{option name: weight}`."""
        names = ("same", "diff") if self.stage == "a" else ("same_time", "cross_time", "same_overlay", "cross_overlay")
        return {f"alpha_{name}": getattr(self, f"alpha_{name}") for name in names}


@dataclass
class AllStagesArguments(options.AllStagesOptions, TemporalTrainingArguments):
    """Training arguments shared by all stages of TeminAL post-training."""
