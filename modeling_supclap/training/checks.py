"""Combinations of model, arguments and data that a trainer refuses before it reads recordings or changes anything."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from modeling_supclap.datasets_scripts.schema import EXPECTED_COUNT, SAMPLING
from modeling_supclap.datasets_scripts.stream import RowStream

from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from .training_args import SupCLAPTrainingArguments

logger = logging.getLogger(__name__)


def refuse_unsupported(
    model: SupCLAPModel,
    args: SupCLAPTrainingArguments,
    processor: SupCLAPProcessor | None,
    objective: Any,
    train_rows: Any,
    eval_rows: Any,
) -> None:
    """Raise ValueError if a `SupCLAPTrainer` cannot train this model with these arguments and rows.

    The arguments are those of `SupCLAPTrainer`. Nothing is changed, and no row is read.
    """
    if not isinstance(model, SupCLAPModel):
        kind = type(model).__name__
        advice = "convert it with modeling_supclap.conversion.supclap_from_clap" if "Clap" in kind else "pass one"
        raise ValueError(f"the model is a {kind}, but SupCLAPTrainer trains a SupCLAPModel; {advice}")
    if not isinstance(args, SupCLAPTrainingArguments):
        raise ValueError(f"args is {type(args).__name__}; pass SupCLAPTrainingArguments, with the same arguments")
    if processor is None:
        raise ValueError("processing_class is missing; pass the SupCLAPProcessor of the model")
    _refuse_options(model, args, processor, has_own_objective=objective is not None)
    _refuse_datasets(train_rows, eval_rows, args)


def _refuse_options(
    model: SupCLAPModel, args: SupCLAPTrainingArguments, processor: SupCLAPProcessor, has_own_objective: bool
) -> None:
    """Raise ValueError if the arguments do not fit the model, its processor or the launch. Warn of fewer negatives."""
    if (args.gradient_accumulation_steps > 1 or args.auto_find_batch_size) and args.process_index == 0:
        warnings.warn(
            "gradient_accumulation_steps and auto_find_batch_size leave fewer negatives, because clips are "
            "contrasted within a smaller batch; to save memory, set cached_chunk_size instead",
            stacklevel=4,
        )
    if args.n_gpu > 1:
        raise ValueError(f"one process sees {args.n_gpu} GPUs; start one process per GPU with `accelerate launch`")
    if args.loss == "siglip" and not has_own_objective and model.logit_bias is None:
        raise ValueError("loss='siglip' needs a model with a bias: --logit_bias -10 --temperature 0.1")
    if args.features_on_device and not processor.runs_on_device:
        kind = type(processor.feature_extractor).__name__
        raise ValueError(f"features_on_device supports the feature extractors of CED and CLAP, got {kind}")

    wide = [width for width in args.matryoshka_widths if width >= model.config.projection_dim]
    if wide:
        raise ValueError(
            f"matryoshka_widths has {wide}; they must be below projection_dim {model.config.projection_dim}"
        )
    config: Any = args.accelerator_config
    if config.dispatch_batches:
        raise ValueError("dispatch_batches is true, but the clips of two batches differ in length; leave it out")

    if args.sharding == "fsdp" and args.track_language_errors:
        raise ValueError("track_language_errors does not support FSDP; set it to false")
    if args.sharding is not None and args.hard_negatives_per_batch:
        raise ValueError("hard_negatives_per_batch does not support FSDP and DeepSpeed; leave it out")
    if args.sharding is not None and args.ema_decay is not None:
        raise ValueError("ema_decay does not support FSDP and DeepSpeed, which shard the weights; leave it out")


def _refuse_datasets(train_rows: Any, eval_rows: Any, args: SupCLAPTrainingArguments) -> None:
    """Raise ValueError if the rows cannot be used with the arguments."""
    if isinstance(train_rows, Mapping):
        raise ValueError(
            f"train_dataset is a dict of {list(train_rows)[:5]}; join several datasets with "
            "modeling_supclap.datasets_scripts.mixture.mix"
        )
    if args.negatives_per_clip and train_rows is not None and not _has_negatives(train_rows):
        raise ValueError(
            "negatives_per_clip is set, but no training row has `negatives`; write them with `supclap mine`"
        )
    if eval_rows is None and args.eval_strategy != "no":
        raise ValueError(
            "there are no evaluation rows; pass eval_dataset, or set eval_strategy='no' and "
            "load_best_model_at_end=False to keep the last weights"
        )
    eval_sets = eval_rows.values() if isinstance(eval_rows, Mapping) else [eval_rows]
    for rows in (train_rows, *eval_sets):
        _refuse_rows(rows, args)
    columns = getattr(train_rows, "column_names", None) or ()
    for name in ("track_language_errors", "hard_negatives_per_batch"):
        if getattr(args, name) and not {EXPECTED_COUNT, SAMPLING}.isdisjoint(columns):
            raise ValueError(f"got {name} for rows with expected counts; leave it out")
    if isinstance(eval_rows, Mapping) and args.load_best_model_at_end:
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        if not metric.startswith(tuple(f"{name}_" for name in eval_rows)):
            first = f"{next(iter(eval_rows), '')}_{metric}"
            raise ValueError(
                f"metric_for_best_model is {metric!r}; name one of the evaluation sets, such as {first!r}"
            )


def _has_negatives(rows: Any) -> bool:
    """Return whether rows may have negatives: they have the column, or one of a list has the key."""
    columns = getattr(rows, "column_names", None)
    if columns is not None:
        return "negatives" in columns
    return not isinstance(rows, RowStream) and any("negatives" in row for row in rows)


def refuse_unknown_metric(metric: str, names: Sequence[str], prefixes: Collection[str]) -> None:
    """Raise ValueError if no evaluation has the metric that selects the best checkpoint.

    Args:
        metric: Value of `metric_for_best_model`.
        names: Names of the metrics of an evaluation, the most important first.
        prefixes: Names of evaluation sets and of datasets in a mixture, which may be before a name.
    """
    name = metric.removeprefix("eval_")
    # those of drift, which depend on the loss
    if name in names or re.search("(?:^|_)(?:perpendicular|radius)_", name):
        return
    if any(name.removeprefix(f"{prefix}_") in names for prefix in prefixes):
        return
    reason = "; it has no loss, because a contrastive loss depends on the batches" if name == "loss" else ""
    examples = ", ".join(names[:4])
    raise ValueError(f"metric_for_best_model is {metric!r}, which no evaluation has{reason}; choose one of {examples}")


def idle_parameters(module: nn.Module) -> list[str]:
    """Return the names of the trainable parameters without gradient after a backward pass."""
    return [name for name, weight in module.named_parameters() if weight.requires_grad and weight.grad is None]


def to_float32(model: SupCLAPModel) -> None:
    """Convert a model to float32 if it trains weights of less precision, unless it is quantised. Log it."""
    half = [weight for weight in model.parameters() if weight.requires_grad and weight.element_size() < 4]
    if half and not getattr(model, "is_quantized", False):
        logger.warning(
            f"the weights are {half[0].dtype}, in which small updates are rounded away; they are converted to float32. "
            "To train them as they are, set keep_weight_dtype; to compute in half precision, set bf16 or fp16"
        )
        model.float()


def _refuse_rows(rows: Any, args: SupCLAPTrainingArguments) -> None:
    if rows is not None and not hasattr(rows, "__len__"):
        name = type(rows).__name__
        raise ValueError(f"{name} has no length; use a map-style dataset or load_splits(..., streaming=True)")
    needs_all = args.on_bad_audio != "error" or args.every_caption or args.track_language_errors
    if isinstance(rows, RowStream) and (needs_all or args.hard_negatives_per_batch):
        raise ValueError(
            "streaming does not support on_bad_audio='skip' or 'report', every_caption, track_language_errors or "
            "hard_negatives_per_batch, which need the whole split; run prepare.py first to filter bad recordings"
        )
