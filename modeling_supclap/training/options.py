"""Options for contrastive training, in addition to the Trainer arguments.

This file does not import torch, so that `--help` takes only a tenth of a second. The class docstrings are printed by
`--help`; they are the only description of the options.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field
from numbers import Real
from typing import Any

MULTILINGUAL_LOSSES = ("kcl", "cacl")
LOSSES = ("infonce", "siglip", "reweighted", *MULTILINGUAL_LOSSES)

_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm"), (0, math.inf)),
    **dict.fromkeys(("svr_alpha", "svr_beta", "radius_ratio", "temporal_beta"), (0, math.inf)),
    "radius_init": (0, 2),  # a distance between unit vectors
    "radius_num_similarities": (2, math.inf),
    "max_audio_seconds": (0.001, math.inf),
    **dict.fromkeys(("mask_time_prob", "mask_feature_prob", "background_prob"), (0, 1)),
    **dict.fromkeys(("mask_time_length", "mask_feature_length"), (1, math.inf)),
    "random_gain_db": (0, 40),  # larger values look like integer samples without scaling
    "background_snr_db": (-100, 100),
    "ema_decay": (0, math.nextafter(1, 0)),  # 1 would keep the weights of the first step
    **dict.fromkeys(("loss_chunk_size", "cached_chunk_size", "kept_tokens"), (1, math.inf)),
    "feature_cache_gib": (0, math.inf),
    "negatives_per_clip": (0, 1000),
    "hard_negatives_per_batch": (0, math.inf),
    "matryoshka_widths": (1, math.inf),
    "early_stopping_patience": (1, math.inf),
}
"""Smallest and largest valid value of each option. None is always valid, for options that may be off."""

_LISTS = ("background_snr_db", "matryoshka_widths")

Rules = Iterator[tuple[Any, str]]
"""Conditions that must not hold, each with its message. A condition may rely on the earlier ones."""


def refuse(rules: Iterable[tuple[Any, str]]) -> None:
    """Raise ValueError with the message of the first condition that holds."""
    for condition, message in rules:
        if condition:
            raise ValueError(message)


def range_rules(options: Any) -> Rules:
    """Yield the refusals of options that are outside their range, or are not finite numbers."""
    for name, (low, high) in _RANGES.items():
        value = getattr(options, name, None)
        if value is None:
            continue
        is_list = name in _LISTS
        yield is_list and not isinstance(value, (list, tuple)), f"{name} is {value!r}; pass a list of numbers"
        most = f" and at most {high:g}" if math.isfinite(high) else ""
        if high == math.nextafter(1, 0):
            most = " and below 1"
        for number in value if is_list else [value]:
            yield not isinstance(number, Real), f"{name} has the value {number!r}; expected a number"
            is_valid = math.isfinite(number) and low <= number <= high
            yield not is_valid, f"{name} is {number}; it must be at least {low:g}{most}"
    snr_db = getattr(options, "background_snr_db", [0, 0])
    yield len(snr_db) != 2, f"background_snr_db is {snr_db}; expected two numbers, the lowest and the highest"


def captions_per_clip(
    loss: str, languages: Sequence[str], languages_per_clip: int | None = None, negatives_per_clip: int = 0
) -> int:
    """Return the number of captions of a clip in a training step, with its negatives.

    The arguments are those of `ContrastiveOptions`.

    >>> captions_per_clip("kcl", ["eng", "fra", "deu"], None), captions_per_clip("infonce", ["eng", "fra"], None)
    (3, 1)
    """
    return {"kcl": languages_per_clip or len(languages), "cacl": 2}.get(loss, 1) + negatives_per_clip


def clips_per_batch(args: Any) -> int:
    """Return the number of clips in a batch of all processes. A pair of sounds of TeminAL has 2 or 3 clips."""
    clips_per_pair = {"a": 2, "b": 3}[args.stage] if isinstance(args, TemporalOptions) else 1
    return clips_per_pair * args.train_batch_size * args.world_size


def chance_loss(args: Any) -> float | None:
    """Return the loss of random embeddings, or None if it is not known: 2 ln N for N clips in a batch.

    `kcl` and `cacl` are means over both directions, ln N. Support vectors, negatives, nested widths and TeminAL's
    alphas below 1 have other values.
    """
    is_temporal = isinstance(args, TemporalOptions)
    if args.negatives_per_clip or args.matryoshka_widths:
        return None
    if is_temporal:
        directions = None if min(args.alphas.values()) < 1 else 1 + args.stage_beta
    else:
        directions = {"infonce": 2.0, "kcl": 1.0, "cacl": 1.0}.get(args.loss) if args.svr == "none" else None
    return None if directions is None else directions * math.log(clips_per_batch(args))


def get_default(option: Field[Any]) -> Any:
    """Return the default of a dataclass field, or `dataclasses.MISSING` if the field has no default."""
    return option.default if option.default_factory is MISSING else option.default_factory()


@dataclass
class LossOptions:
    """Loss.

    Args:
        loss: Base loss. `infonce`, `siglip` and `reweighted` (SimpleReweight, SupCLAP E.4) use one caption per clip,
            in a random language. `kcl` uses captions in all languages. `cacl` uses captions in the anchor language (the
            first of `languages`) and one other. `module:name` is your own `nn.Module` or function, with one caption
            per clip.
        languages: ISO 639-3 codes of the captions to train on.
        languages_per_clip: Number of languages in which `kcl` embeds a clip's caption, drawn at random for each clip
            and epoch. Fewer languages cost less time, but the negatives of a caption are then in random languages, not
            in its own. Defaults to all `languages`, as in the paper.
        eval_languages: Languages to evaluate. Defaults to `languages`.
        positives: Captions that count as correct for a clip. `clip`: its own captions, as in the papers. `captions`:
            its own captions, and those of clips with exactly the same captions. Use `captions` if captions are
            generated from class names.
        every_caption: In each epoch, repeat each clip for each of its captions in the first language. By default, an
            epoch contains each clip once, with a random caption.
        negatives_per_clip: Number M of wrong captions of each clip in a step, drawn from `negatives` of its row
            (see `supclap mine`). They are further columns of the audio-to-text softmax of `infonce`, or pairs of
            `siglip`. 0: none.
        hard_negatives_per_batch: Number K of hard negatives in each batch of all devices. A batch contains a clip and
            the K clips with the most similar captions among 720 random ones. The initial text encoder computes the
            similarities, before the first step. 0: batches are random.
        matryoshka_widths: Widths of shorter embeddings to train: the loss is also computed on the first values of all
            embeddings, and summed over the widths (Kusupati et al., 2022, arXiv 2205.13147). By default, none.
    """

    loss: str = "infonce"
    languages: list[str] = field(default_factory=lambda: ["eng"])
    languages_per_clip: int | None = None
    eval_languages: list[str] = field(default_factory=list)
    positives: str = "clip"
    every_caption: bool = False
    negatives_per_clip: int = 0
    hard_negatives_per_batch: int = 0
    matryoshka_widths: list[int] = field(default_factory=list)


@dataclass
class SupportVectorOptions:
    """Support vectors (SVR).

    Args:
        svr: Support Vector Regularization (SVR): `none`, or a static or dynamic radius in one direction (`uni-static`,
            `uni-dynamic`) or both (`bi-static`, `bi-dynamic`). For control experiments: `uni-fixed` and `bi-fixed`.
            `within-modality` has no support vectors: it contrasts each clip with all other clips, and each text with
            all other texts. CrossCLR has such negatives too (Zolfaghari et al., 2021, arXiv 2109.14910).
        svr_alpha: Weight of the SVR term, relative to the sum of both directions of the base loss (SupCLAP eq. 6).
        svr_beta: Weight of the constraint on dynamic radii (SupCLAP eq. 9).
        radius_init: Initial radius. By default, the mean distance of the positive pairs in the first batch is used. A
            radius that starts near 0 has little effect in a short run, because it grows slowly.
        radius_num_similarities: Number of similarities used to predict a dynamic radius: the positive and the hardest
            negatives. The paper uses the batch size.
    """

    svr: str = "none"
    svr_alpha: float = 1.0
    svr_beta: float = 0.01
    radius_init: float | None = None
    radius_num_similarities: int = 16


@dataclass
class PaperOptions:
    """Variants, controls and measurements of the papers.

    Args:
        reweighting: Quantity that the learned weight of `reweighted` multiplies: `pull`, the force of the positive, or
            `probability`, P+ in the gradient, as printed in the paper (see `losses.reweighted_info_nce`).
        svr_decoupled: Exclude the positive from the denominator of the SVR term, as printed in SupCLAP eq. 6.
        radius_ratio: Radius of `uni-fixed` and `bi-fixed`, as a fraction of the distance of each pair. 0: the SVR term
            is InfoNCE. 1: `bi-fixed` is `within-modality`.
        radius_order: Order of these negatives: `sorted` by similarity, or as in the `batch`, as in the paper. With
            `batch`, the radius of a pair depends on the order of the batch.
        radius_gradients: Let the gradient of a dynamic radius reach the encoders through these similarities, as printed
            in the paper. By default, it trains only the radius.
        constraint_gradients: Let the constraint on dynamic radii also move the embeddings, as printed in SupCLAP
            eq. 9. By default, it trains only the radius.
        shared_radius: Use one radius in both directions of `bi-static` or `bi-dynamic`. SupCLAP 3.2 describes a single
            radius for `bi-static`. By default, each direction has its own.
        track_drift: Log the drift, radius and positive similarity of the last batch (`callbacks.DriftCallback`), and
            draw them in `drift.png`. By default, they are drawn only with `svr`.
        track_language_errors: Log the errors from training on only some of `languages` per step (see
            `callbacks.LanguageErrorsCallback`). Each log then costs as much as a KCL training step.
    """

    reweighting: str = "pull"
    svr_decoupled: bool = False
    radius_ratio: float = 1.0
    radius_order: str = "sorted"
    radius_gradients: bool = False
    constraint_gradients: bool = False
    shared_radius: bool = False
    track_drift: bool | None = None
    track_language_errors: bool = False


@dataclass
class RecordingOptions:
    """Recordings.

    Args:
        max_audio_seconds: Maximum duration of a recording. Longer recordings are cropped: at a random position in
            training, to their beginning in evaluation.
        pad_short_clips: Append silence to clips that are shorter than the model's minimum, such as 0.15 s for CED. By
            default they are unusable.
        on_bad_audio: Action for unusable recordings. `error`: stop at the first one. `skip`: check all recordings
            before training and skip the unusable ones. `report`: skip them, and list them in the log.
    """

    max_audio_seconds: float = 30.0
    pad_short_clips: bool = False
    on_bad_audio: str = "error"


@dataclass
class AugmentationOptions:
    """Augmentation.

    Args:
        apply_spec_augment: Replace random frames and mel bands of spectrograms by the mean of the clip in training.
            The masking in encoders such as wav2vec 2.0 is set in their own configurations.
        mask_time_prob: Fraction of the frames to mask, if spans do not overlap; 0 masks no frames.
        mask_time_length: Number of frames of a masked span.
        mask_feature_prob: Fraction of the mel bands to mask, if spans do not overlap; 0 masks no bands.
        mask_feature_length: Number of mel bands of a masked span.
        random_gain_db: Maximum random change of the level of a training clip, up or down, in dB.
        background_dir: Folder of recordings to mix with the clips in training.
        background_snr_db: Lowest and highest level of a clip above its background, in dB.
        background_prob: Probability of a background for each clip.
    """

    apply_spec_augment: bool = False
    mask_time_prob: float = 0.05
    mask_time_length: int = 10
    mask_feature_prob: float = 0.0
    mask_feature_length: int = 10
    random_gain_db: float = 0.0
    background_dir: str | None = None
    background_snr_db: list[float] = field(default_factory=lambda: [3.0, 30.0])
    background_prob: float = 0.5


@dataclass
class MemoryOptions:
    """Memory and speed.

    Args:
        cached_chunk_size: Number of clips, and number of texts, with activations in memory at a time (gradient
            caching). Batches of any size then train with exact gradients in the memory needed for one chunk, but take
            a third more time. By default, `kept_tokens` limits the activations instead.
        kept_tokens: Maximum number of text tokens with activations in memory; for audio, the number of frames is four
            times as large. Other activations are recomputed in the backward pass. By default, one text and one clip per
            row are kept, and on a GPU at least 16,384 tokens. With several languages, a larger number saves time, and a
            smaller one saves memory: 1 recomputes all texts.
        loss_chunk_size: Number of similarity matrix rows to compute at a time, and again in the backward pass. Memory
            is then linear in the global batch size. By default, all rows are computed at once, or 1,024 for a global
            batch of 4,096 clips or more.
        cache_frozen: Whether frozen towers run in evaluation mode, without dropout, and compute each output only once
            (`always`), or keep their dropout (`never`). The outputs of towers with sharded weights are not kept.
        feature_cache: Folder for the features of clips and the outputs of frozen towers, which are computed only once.
            Other runs can share it. By default, a temporary folder that is deleted at the end.
        feature_cache_gib: Maximum size of this cache in GiB. 0: nothing is kept.
        features_on_device: Compute spectrograms on the training device, one batch at a time, instead of in the data
            loader workers. On by default on a GPU with the feature extractors of CED, CLAP and CLAP2.
        attn_implementation: Attention of both towers: `sdpa`, `eager`, or `flash_attention_2`, which requires the
            package flash-attn and training in bf16 or fp16. Defaults to that of the loaded model, usually `sdpa`.
        keep_weight_dtype: Train weights that were saved in bfloat16 or float16 as they are. By default they are
            converted to float32, because small updates would be rounded away.
    """

    cached_chunk_size: int | None = None
    kept_tokens: int | None = None
    loss_chunk_size: int | None = None
    cache_frozen: str = "always"
    feature_cache: str | None = None
    feature_cache_gib: float = 2.0
    features_on_device: bool | None = None
    attn_implementation: str | None = None
    keep_weight_dtype: bool = False


@dataclass
class RunOptions:
    """Steps, evaluations and checkpoints.

    Args:
        output_dir: Folder of the model, the results and the checkpoints.
        learning_rate: Peak learning rate.
        learning_rates: Learning rates of parts of the model, `{part: rate}`, as JSON on the command line. A part is the
            beginning of names of parameters, such as `text_model`, `audio_projection` or `audio_model.blocks.11`. Other
            parameters have `learning_rate`. The schedule applies to all.
        num_train_epochs: Number of epochs.
        max_steps: Number of training steps; overrides `num_train_epochs` if it is positive.
        per_device_train_batch_size: Number of clips per device in a training step.
        per_device_eval_batch_size: Number of clips per device in an evaluation step.
        gradient_accumulation_steps: Number of batches in a training step. Clips are contrasted within a batch, so
            `cached_chunk_size` is usually better.
        bf16: Compute in bfloat16, on GPUs that support it.
        seed: Random seed.
        resume_from_checkpoint: Checkpoint to continue from; `last`: the newest in `output_dir`.
        ema_decay: Decay of an exponential moving average of the trained weights, such as 0.999. It averages over about
            1 / (1 - decay) steps. Evaluations and saved models use the average. Off by default.
        eval_strategy: When to evaluate: `no`, `steps` or `epoch`.
        save_strategy: When to save: `no`, `steps`, `epoch` or `best`.
        save_total_limit: Maximum number of checkpoints to keep, including the best one.
        load_best_model_at_end: Load the best checkpoint at the end of the run.
        metric_for_best_model: Metric used to select the best checkpoint; any metric logged by an evaluation.
        early_stopping_patience: Number of evaluations without a better `metric_for_best_model` after which the run
            stops. Off by default.
        logging_steps: Number of steps between two logs.
    """

    output_dir: str | None = None
    learning_rate: float = 5e-5
    learning_rates: dict[str, Any] | str | None = None
    num_train_epochs: float = 10.0
    max_steps: int = -1
    per_device_train_batch_size: int = 24
    per_device_eval_batch_size: int = 32
    gradient_accumulation_steps: int = 1
    bf16: bool = False
    seed: int = 42
    resume_from_checkpoint: str | None = None
    ema_decay: float | None = None
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = True
    metric_for_best_model: str | None = "mean_recall"
    early_stopping_patience: int | None = None
    logging_steps: float = 10


@dataclass
class ContrastiveOptions(
    RunOptions, MemoryOptions, AugmentationOptions, RecordingOptions, PaperOptions, SupportVectorOptions, LossOptions
):
    """All options of contrastive training, in addition to those of transformers' `TrainingArguments`."""


@dataclass
class TemporalOptions(ContrastiveOptions):
    """Order of sounds (TeminAL).

    Args:
        stage: TeminAL stage. `a`: single sounds against pairs of sounds. `b`: pairs in forward order, in reversed
            order, and overlaid.
        temporal_beta: Weight of the text-to-audio direction, relative to audio-to-text (TeminAL eq. 3).
        temporal_beta_a: The same weight in stage a, beta_A in TeminAL eq. 26. Defaults to `temporal_beta`.
        alpha_same: Stage a: weight between a single sound and a pair that contains its class (TeminAL eq. 22-26).
        alpha_diff: Stage a: weight between a single sound and a pair that does not contain its class.
        alpha_same_time: Stage b: weight of the same pair in reversed order (TeminAL eq. 3-7).
        alpha_cross_time: Stage b: weight of other pairs in reversed order.
        alpha_same_overlay: Stage b: weight of the same pair overlaid.
        alpha_cross_overlay: Stage b: weight of other pairs overlaid.
        two_term_overlay: Stage b: use the overlay term of the appendix (TeminAL eq. 14 and 20), which weights the
            forward and the reversed pair by `alpha_same_overlay`.
        text_scheme: Caption languages. `random`: one random language per pair. `kcl`: all languages at once.
        match_loudness: Match the loudness of two consecutive clips.
        match_overlay_loudness: Match the loudness of two overlaid clips. The paper does not state whether it does.
        per_device_train_batch_size: Number of class pairs per device in a training step. Stage b has three clips for
            each pair, and stage a has two. The default of 85 pairs is 255 clips in stage b; the paper's batch is 256
            (TeminAL B.5).
        learning_rate: Peak learning rate.
        metric_for_best_model: Metric used to select the best checkpoint.
    """

    stage: str = "b"
    temporal_beta: float = 1.0
    temporal_beta_a: float | None = None
    alpha_same: float = 1.0
    alpha_diff: float = 1.0
    alpha_same_time: float = 1.0
    alpha_cross_time: float = 1.0
    alpha_same_overlay: float = 1.0
    alpha_cross_overlay: float = 1.0
    two_term_overlay: bool = False
    text_scheme: str = "random"
    match_loudness: bool = False
    match_overlay_loudness: bool = True
    per_device_train_batch_size: int = 85
    learning_rate: float = 1e-4
    metric_for_best_model: str | None = "temporal_accuracy"


@dataclass
class AllStagesOptions(TemporalOptions):
    """Options shared by all stages of post-training. `stage` is not an option, because all stages are trained."""

    stage: str = field(default="b", init=False)
