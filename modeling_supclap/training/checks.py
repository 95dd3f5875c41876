"""Combinations of model, arguments and data that a trainer refuses before it reads recordings or changes anything."""

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
from .options import Rules, refuse
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

    Warn if they leave fewer negatives than the user may expect.
    The arguments are those of `SupCLAPTrainer`. Nothing is changed, and no row is read.
    """
    refuse(_type_rules(model, args, processor))
    assert processor is not None
    refuse(_model_rules(model, args, processor, has_own_objective=objective is not None))
    refuse(_row_rules(train_rows, eval_rows, args))
    if (args.gradient_accumulation_steps > 1 or args.auto_find_batch_size) and args.process_index == 0:
        warnings.warn(
            "gradient_accumulation_steps and auto_find_batch_size leave fewer negatives, because clips are "
            "contrasted within a smaller batch; to save memory, set cached_chunk_size instead",
            stacklevel=3,
        )


def _type_rules(model: Any, args: Any, processor: Any) -> Rules:
    """Yield what a trainer refuses because of the types of its arguments."""
    kind, given = type(model).__name__, type(args).__name__
    advice = "convert it with modeling_supclap.conversion.supclap_from_clap" if "Clap" in kind else "pass one"
    is_other = not isinstance(model, SupCLAPModel)
    yield is_other, f"the model is a {kind}, but SupCLAPTrainer trains a SupCLAPModel; {advice}"
    is_other = not isinstance(args, SupCLAPTrainingArguments)
    yield is_other, f"args is {given}; pass SupCLAPTrainingArguments, with the same arguments"
    is_other, given = not isinstance(processor, SupCLAPProcessor), type(processor).__name__
    yield is_other, f"processing_class is {given}; pass the SupCLAPProcessor of the model"


def _model_rules(
    model: SupCLAPModel, args: SupCLAPTrainingArguments, processor: SupCLAPProcessor, has_own_objective: bool
) -> Rules:
    """Yield what a trainer refuses because of its model, its processor or the launch."""
    gpus, width, sharding = args.n_gpu, model.config.projection_dim, args.sharding
    yield gpus > 1, f"one process sees {gpus} GPUs; start one process per GPU with `accelerate launch`"
    without_bias = args.loss == "siglip" and not has_own_objective and model.logit_bias is None
    yield without_bias, "loss='siglip' needs a model with a bias: --logit_bias -10 --temperature 0.1"
    extractor = type(processor.feature_extractor).__name__
    yield (
        args.features_on_device and not processor.runs_on_device,
        f"features_on_device supports the feature extractors of CED and CLAP, got {extractor}",
    )
    wide = [each for each in args.matryoshka_widths if each >= width]
    yield wide, f"matryoshka_widths has {wide}; they must be below projection_dim {width}"
    config: Any = args.accelerator_config
    dispatches = config.dispatch_batches
    yield dispatches, "dispatch_batches is true, but the clips of two batches differ in length; leave it out"
    fsdp = sharding == "fsdp" and args.track_language_errors
    yield fsdp, "track_language_errors does not support FSDP; set it to false"
    for name in ("hard_negatives_per_batch", "ema_decay"):
        is_sharded = sharding is not None and getattr(args, name)
        yield is_sharded, f"{name} does not support FSDP and DeepSpeed, which shard the weights; leave it out"


def _row_rules(train_rows: Any, eval_rows: Any, args: SupCLAPTrainingArguments) -> Rules:
    """Yield what a trainer refuses because of its rows."""
    if isinstance(train_rows, Mapping):
        advice = "join several datasets with modeling_supclap.datasets_scripts.mixture.mix"
        yield True, f"train_dataset is a dict of {list(train_rows)[:5]}; {advice}"
    yield (
        args.negatives_per_clip and train_rows is not None and not _has_negatives(train_rows),
        "negatives_per_clip is set, but no training row has `negatives`; write them with `supclap mine`",
    )
    has_sets = isinstance(eval_rows, Mapping)
    sets = eval_rows if has_sets else {"": eval_rows}
    needs_all = args.on_bad_audio != "error" or args.every_caption or args.track_language_errors
    for rows in (train_rows, *sets.values()):
        has_length = rows is None or hasattr(rows, "__len__")
        advice = "use a map-style dataset or load_splits(..., streaming=True)"
        yield not has_length, f"{type(rows).__name__} has no length; {advice}"
        yield (
            isinstance(rows, RowStream) and (needs_all or args.hard_negatives_per_batch),
            "streaming does not support on_bad_audio='skip' or 'report', every_caption, track_language_errors or "
            "hard_negatives_per_batch, which need the whole split; run prepare.py first to filter bad recordings",
        )
    columns = getattr(train_rows, "column_names", None) or ()
    has_counts = not {EXPECTED_COUNT, SAMPLING}.isdisjoint(columns)
    for name in ("track_language_errors", "hard_negatives_per_batch"):
        yield has_counts and getattr(args, name), f"got {name} for rows with expected counts; leave it out"
    metric = str(args.metric_for_best_model).removeprefix("eval_")
    first, names_a_set = next(iter(sets), ""), metric.startswith(tuple(f"{name}_" for name in sets))
    is_of_none = has_sets and args.load_best_model_at_end and not names_a_set
    advice = f"name one of the evaluation sets, such as '{first}_{metric}'"
    yield is_of_none, f"metric_for_best_model is {metric!r}; {advice}"
    yield (
        eval_rows is None and args.eval_strategy != "no",
        "there are no evaluation rows; pass eval_dataset, or set eval_strategy='no' and load_best_model_at_end=False "
        "to keep the last weights",
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
