"""Options of contrastive training, in addition to those of the Trainer.

This file does not import torch, so that `--help` takes a tenth of a second. The docstring of a class is the only
description of its options, and `--help` prints it.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field
from typing import Any

MULTILINGUAL_LOSSES = ("kcl", "cacl")
LOSSES = ("infonce", "siglip", "reweighted", *MULTILINGUAL_LOSSES)
SUPPORT_VECTORS = ("none", "uni-static", "bi-static", "uni-dynamic", "bi-dynamic")
POSITIVES = ("clip", "captions")
CACHE_FROZEN = ("auto", "always", "never")


def get_default(option: Field) -> Any:
    """Return the default of a dataclass field, `dataclasses.MISSING` if it has none."""
    return option.default if option.default_factory is MISSING else option.default_factory()


@dataclass
class ContrastiveOptions:
    """Training options.

    Args:
        loss: Base loss. `infonce`, `siglip` and `reweighted` (SimpleReweight [S E.4]) use one caption per clip, in a
            random language; `kcl` uses captions in all languages; `cacl` uses the anchor language, the first of
            `languages`, and one other.
        svr: Support Vector Regularization: `none`, or a direction and a radius: `uni-static`, `bi-static`,
            `uni-dynamic`, `bi-dynamic`.
        svr_alpha: Weight of the SVR term, relative to the sum of both directions of the base loss [S eq. 6].
        svr_beta: Weight of the constraint on a dynamic radius [S eq. 9].
        svr_similarity: Similarity of the support vectors: `cosine` or `dot`. `dot` needs a dynamic radius, because only
            its constraint keeps the radius from growing.
        svr_decoupled: Leave the positive out of the denominator of SVR, as eq. 6 is printed.
        radius_init: Initial radius. By default the mean distance of the pairs of the first batch; a radius that starts
            near 0 is still growing at the end of a short run and has little effect.
        radius_num_similarities: Number of similarities that a dynamic radius is predicted from: the positive and the
            largest negatives.
        languages: ISO 639-3 codes of the captions to train on.
        eval_languages: Languages to evaluate; by default `languages`.
        positives: Correct answers: `clip`, the captions of the clip (the protocol of the papers), or `captions`, also
            those of clips with exactly the same captions, as in sets with captions made from class names.
        every_caption: Repeat a clip once per epoch for each of its captions in the first language. By default an epoch
            contains each clip once, with a random caption.
        max_audio_seconds: Maximum duration of a recording. Longer ones are cropped: at random in training, to their
            beginning in evaluation.
        on_bad_audio: Action for unusable recordings: `error`, stop at the first; `skip`, read all recordings before the
            run and leave out the bad ones; `report`, also list them in the log.
        features_on_device: Compute spectrograms on the training device, a batch at a time, instead of in the workers;
            for GPUs that wait for their workers.
        track_drift: Log drift, radius and positive similarity of the batch at each log, see `callbacks.DriftCallback`.
        track_language_errors: Log the errors of training on some of `languages` at a time, see
            `callbacks.LanguageErrorsCallback`. A log then costs as much as a step of KCL.
        loss_chunk_size: Rows of the similarity matrix computed at a time, and again in the backward pass; memory is
            then linear in the global batch size. By default all rows.
        cached_chunk_size: Number of clips (and texts) with activations in memory at a time, by gradient caching. A
            batch of any size then trains with exact gradients in the memory of this many clips, for a third more time.
            By default one text and one clip per row; on a GPU at least 16,384 tokens and 65,536 frames.
        cache_frozen: Cache the outputs of frozen towers by their input, up to 2 GiB: `auto`, for towers without
            dropout; `always`, with frozen towers in evaluation mode; `never`. Sharded weights are never cached.
        per_device_train_batch_size: Clips per device in a training step.
        per_device_eval_batch_size: Clips per device in evaluation.
        num_train_epochs: Passes over the training split.
        eval_strategy: When to evaluate: `no`, `steps` or `epoch`.
        save_strategy: When to save: `no`, `steps`, `epoch` or `best`.
        save_total_limit: Number of checkpoints to keep, including the best.
        load_best_model_at_end: Load the best checkpoint at the end of the run.
        metric_for_best_model: Metric that selects the best checkpoint, any value that an evaluation logs.
        greater_is_better: Whether a higher value of that metric is better; by default inferred from the metric.
        logging_steps: Steps between two logs.
        logging_nan_inf_filter: Filter NaN from the log. Off, because NaN stops the run with an error.
        remove_unused_columns: Drop columns that the model does not use. Must stay off, because the collator needs them.
        dataloader_drop_last: Drop the last incomplete training batch, because the loss depends on the number of
            negatives.
        ddp_find_unused_parameters: Look for parameters without gradients; none are expected.
        label_names: Key of the clip indices in a batch.
    """

    loss: str = "infonce"
    svr: str = "none"
    svr_alpha: float = 1.0
    svr_beta: float = 0.01
    svr_similarity: str = "cosine"
    svr_decoupled: bool = False
    radius_init: float | None = None
    radius_num_similarities: int = 16
    languages: list[str] = field(default_factory=lambda: ["eng"])
    eval_languages: list[str] = field(default_factory=list)
    positives: str = "clip"
    every_caption: bool = False
    max_audio_seconds: float = 30.0
    on_bad_audio: str = "error"
    features_on_device: bool = False
    track_drift: bool = True
    track_language_errors: bool = False
    loss_chunk_size: int | None = None
    cached_chunk_size: int | None = None
    cache_frozen: str = "auto"

    per_device_train_batch_size: int = 24
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 10.0
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = True
    metric_for_best_model: str | None = "mean_recall"
    greater_is_better: bool | None = None
    logging_steps: float = 10
    logging_nan_inf_filter: bool = False
    remove_unused_columns: bool = False
    dataloader_drop_last: bool = True
    ddp_find_unused_parameters: bool | None = False
    label_names: list[str] | None = field(default_factory=lambda: ["clip_index"])


@dataclass
class TemporalOptions(ContrastiveOptions):
    """Post-training options.

    Args:
        stage: `a`, single sounds against pairs, or `b`, pairs forward, reversed and overlaid.
        temporal_beta: Weight of the text-to-audio direction, relative to audio-to-text [T eq. 3].
        alpha_same: Stage a, weight of candidates across the blocks that share a class [T eq. 22-26].
        alpha_diff: Stage a, weight of candidates across the blocks without a common class.
        alpha_same_time: Stage b, weight of the reversal of the same pair [T eq. 3-7].
        alpha_cross_time: Stage b, weight of the reversals of other pairs.
        alpha_same_overlay: Stage b, weight of the overlay of the same pair.
        alpha_cross_overlay: Stage b, weight of the overlays of other pairs.
        text_scheme: Captions of an item: `random`, in one random language, or `kcl`, in all of them at once.
        crossfade_seconds: Overlap of two consecutive clips.
        gap_seconds: Silence between two consecutive clips.
        match_loudness: Bring two consecutive clips to the same level; overlaid ones always are.
        per_device_train_batch_size: Pairs per device in a training step.
        learning_rate: Peak learning rate.
        metric_for_best_model: Metric that selects the best checkpoint.
    """

    stage: str = "b"
    temporal_beta: float = 1.0
    alpha_same: float = 1.0
    alpha_diff: float = 1.0
    alpha_same_time: float = 1.0
    alpha_cross_time: float = 1.0
    alpha_same_overlay: float = 1.0
    alpha_cross_overlay: float = 1.0
    text_scheme: str = "random"
    crossfade_seconds: float = 0.0
    gap_seconds: float = 0.0
    match_loudness: bool = False
    per_device_train_batch_size: int = 256
    learning_rate: float = 1e-4
    metric_for_best_model: str | None = "temporal_accuracy"


@dataclass
class AllStagesOptions(TemporalOptions):
    """Options shared by all stages of a post-training; `stage` is set for each of them."""

    stage: str = field(default="b", init=False)
