"""The keys of a contrastive run, apart from the Trainer's own: what `--help` shows without loading torch, in a tenth of
a second instead of eight.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field
from typing import Any

MULTILINGUAL_LOSSES = ("kcl", "cacl")
LOSSES = ("infonce", "siglip", "reweighted", *MULTILINGUAL_LOSSES)
SUPPORT_VECTORS = ("none", "uni-static", "bi-static", "uni-dynamic", "bi-dynamic")
POSITIVES = ("clip", "captions")
CACHE_FROZEN = ("auto", "always", "never")


def key(default: Any, told: str) -> Any:
    """A field of a dataclass of keys.

    Args:
        default: Its default; each instance has a list of its own.
        told: What `--help` says of it.
    """
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": told})
    return field(default=default, metadata={"help": told})


def get_default(option: Field) -> Any:
    """The default of a field of a dataclass, `dataclasses.MISSING` where it has none."""
    return option.default if option.default_factory is MISSING else option.default_factory()


@dataclass
class ContrastiveOptions:
    """How to train.

    Args:
        loss: The base loss: `infonce`, `siglip` or `reweighted` (the SimpleReweight baseline of [S E.4]) on one caption
            a clip, in a language that is drawn; `kcl` on its caption in all languages; `cacl` on the anchor language's,
            the first of `languages`, and one other.
        svr: Support Vector Regularisation on top of it: `none`, or a direction and a radius: `uni-static`,
            `bi-static`, `uni-dynamic`, `bi-dynamic`.
        svr_alpha: The weight of the SVR term, relative to the sum of both directions of the base loss [S eq. 6].
        svr_beta: The weight of the constraint on a dynamic radius [S eq. 9].
        svr_similarity: `cosine` (the support vector is normalised again) or `dot`, with which only the constraint keeps
            a radius from growing, so that it wants a dynamic one.
        svr_decoupled: Whether to leave the positive out of SVR's denominator, as eq. 6 is printed.
        radius_init: Where a radius starts; by default at the mean distance of the pairs of the first batch, from where
            it falls with the distance. From near 0 it only rises, for the whole of a short run, and gains little.
        radius_num_similarities: The similarities that a dynamic radius sees: the positive and the largest negatives.
        languages: ISO 639-3 codes of the captions to train on.
        eval_languages: The languages to evaluate, by default all of `languages`.
        positives: `clip`, each clip has its own captions (the papers' protocol), or `captions`, clips with exactly
            the same captions are right answers to each other, as where captions are made from class names.
        every_caption: Whether an epoch holds a clip once for each of its captions (five times, in Clotho), by those of
            the first language; by default it holds each clip once, with a caption that is drawn.
        max_audio_seconds: Longer recordings are cropped, at random in training, to their beginning in evaluation.
        on_bad_audio: What to do with recordings that cannot be used: `error`, stop and name the first that is met;
            `skip`, read all once before the run and leave them out; `report`, also name each in the log.
        features_on_device: Whether spectrograms are made on the training device, all of a batch at once, from samples
            that the workers read, in 16 bits where they are stored so. For a GPU whose workers cannot keep up with it.
        track_drift: Whether to log drift, radius and positive similarity of the batch in which a log falls, see
            `callbacks.DriftCallback`.
        track_language_errors: Whether to log what training on some of `languages` at a time misses, see
            `callbacks.LanguageErrorsCallback`; a log then costs as much as a step of KCL.
        loss_chunk_size: So many rows of the similarities exist at a time, made once more in the backward pass: memory
            linear in the global batch, for batches whose N x N matrix does not fit. By default they are one matrix.
        cached_chunk_size: With gradient caching, the clips (and texts) whose activations are in memory at a time: a
            batch of any size trains in the memory of one of this size, with its own exact gradients, for about a
            third more time. By default those of one text and one clip a row.
        cache_frozen: Whether what a tower says of which nothing trains is remembered by its input, 2 GiB of it at most,
            so that a caption, or recording, goes through it once: `auto`, where no dropout acts in it, with the results
            of the run without; `always`, where frozen towers are in evaluation mode; `never`. Not with sharded weights.
    """

    loss: str = key("infonce", f"Base loss, one of {', '.join(LOSSES)}.")
    svr: str = key("none", f"Support vectors, one of {', '.join(SUPPORT_VECTORS)}.")
    svr_alpha: float = key(1.0, "Weight of the SVR term.")
    svr_beta: float = key(0.01, "Weight of the radius constraint.")
    svr_similarity: str = key("cosine", "cosine or dot.")
    svr_decoupled: bool = key(False, "Leave the positive out of SVR's denominator.")
    radius_init: float | None = key(None, "Initial radius; by default, the distance of the pairs of the first batch.")
    radius_num_similarities: int = key(16, "Similarities that a dynamic radius sees.")
    languages: list[str] = key(["eng"], "Languages of the captions.")
    eval_languages: list[str] = key([], "Languages to evaluate.")
    positives: str = key("clip", f"One of {', '.join(POSITIVES)}.")
    every_caption: bool = key(False, "A clip comes once an epoch for each caption.")
    max_audio_seconds: float = key(30.0, "Longer recordings are cropped to this.")
    on_bad_audio: str = key("error", "error, skip or report.")
    features_on_device: bool = key(False, "Spectrograms on the GPU, not in the workers.")
    track_drift: bool = key(True, "Log drift, radius and positive similarity.")
    track_language_errors: bool = key(False, "Log ATRI's errors of the languages.")
    loss_chunk_size: int | None = key(None, "Similarities in chunks of so many rows.")
    cached_chunk_size: int | None = key(None, "Gradient caching in chunks of this size.")
    cache_frozen: str = key("auto", f"One of {', '.join(CACHE_FROZEN)}.")

    per_device_train_batch_size: int = key(24, "Clips per device in a training step.")
    per_device_eval_batch_size: int = key(32, "Clips per device in evaluation.")
    num_train_epochs: float = key(10.0, "Passes over the training split.")
    eval_strategy: str = key("epoch", "When to evaluate: no, steps or epoch.")
    save_strategy: str = key("epoch", "When to save: no, steps, epoch or best.")
    save_total_limit: int | None = key(2, "Checkpoints to keep, the best among them.")
    load_best_model_at_end: bool = key(True, "End with the best checkpoint.")
    metric_for_best_model: str | None = key("mean_recall", "What best means.")
    greater_is_better: bool | None = key(None, "Whether more of it is better; by default what the metric is known for.")
    logging_steps: float = key(10, "Steps between two logs.")
    logging_nan_inf_filter: bool = key(False, "NaN is an error here, never filtered.")
    remove_unused_columns: bool = key(False, "The collator reads the whole row.")
    dataloader_drop_last: bool = key(True, "Drop the last incomplete training batch.")
    ddp_find_unused_parameters: bool | None = key(False, "Every parameter is used.")
    label_names: list[str] | None = key(["clip_index"], "How embeddings find their clip again.")


@dataclass
class TemporalOptions(ContrastiveOptions):
    """How to post-train.

    Args:
        stage: `a`, single sounds against pairs, or `b`, pairs forward, reversed and overlaid.
        temporal_beta: The weight of the direction from text to audio, relative to that from audio to text [T eq. 3].
        alpha_same: Stage a, candidates across the blocks that share a class [T eq. 22-26].
        alpha_diff: Stage a, candidates across the blocks that share none.
        alpha_same_time: Stage b, the reversal of the same pair [T eq. 3-7].
        alpha_cross_time: Stage b, the reversals of other pairs.
        alpha_same_overlay: Stage b, the overlay of the same pair.
        alpha_cross_overlay: Stage b, the overlays of other pairs.
        text_scheme: `random`, each item's caption in one language that is drawn, or `kcl`, in all of them at once.
        crossfade_seconds: The overlap of two clips that follow each other.
        gap_seconds: The silence between two clips that follow each other.
        match_loudness: Whether to bring two clips that follow each other to the same level; overlaid ones always are.
    """

    stage: str = key("b", "a or b.")
    temporal_beta: float = key(1.0, "Weight of the text-to-audio direction.")
    alpha_same: float = key(1.0, "Stage a, across blocks with a class in common.")
    alpha_diff: float = key(1.0, "Stage a, across blocks without.")
    alpha_same_time: float = key(1.0, "Stage b, reversal of the same pair.")
    alpha_cross_time: float = key(1.0, "Stage b, reversals of other pairs.")
    alpha_same_overlay: float = key(1.0, "Stage b, overlay of the same pair.")
    alpha_cross_overlay: float = key(1.0, "Stage b, overlays of other pairs.")
    text_scheme: str = key("random", "random or kcl.")
    crossfade_seconds: float = key(0.0, "Overlap of consecutive clips.")
    gap_seconds: float = key(0.0, "Silence between consecutive clips.")
    match_loudness: bool = key(False, "Bring consecutive clips to one level.")
    per_device_train_batch_size: int = key(256, "Pairs per device in a training step.")
    learning_rate: float = key(1e-4, "Peak learning rate.")
    metric_for_best_model: str | None = key("temporal_accuracy", "What best means.")


@dataclass
class AllStagesOptions(TemporalOptions):
    """Options shared by all stages of a post-training; `stage` is set for each of them."""

    stage: str = field(default="b", init=False)
