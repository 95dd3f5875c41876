"""The training arguments of a contrastive run, on top of the Trainer's."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments
from transformers.utils.generic import strtobool

from modeling_supclap.datasets_scripts.bad_audio import ON_BAD_AUDIO
from modeling_supclap.metrics.names import METRICS

from .distributed import first_process_first, join_processes_on_cpus, require_the_launched_processes
from .frozen import CACHE_FROZEN

MULTILINGUAL_LOSSES = ("kcl", "cacl")
LOSSES = ("infonce", "siglip", "reweighted", *MULTILINGUAL_LOSSES)
SUPPORT_VECTORS = ("none", "uni-static", "bi-static", "uni-dynamic", "bi-dynamic")
POSITIVES = ("clip", "captions")


@dataclass
class SupCLAPTrainingArguments(TrainingArguments):
    """Arguments of a contrastive run: the Trainer's, with the SupCLAP paper's defaults, and those below.

    Inherited defaults that differ: Adam without weight decay, learning rate 5e-5, batch 24, 10 epochs [S 4.1.2];
    evaluation and a checkpoint each epoch, the best by *validation* recall is loaded at the end; the last incomplete
    training batch is dropped, since a loss over fewer negatives is another loss. A process that waits ten minutes for
    another in a step ends the run (`ddp_timeout`); for the first one to read the data it waits as long as that takes.

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

    loss: str = field(default="infonce", metadata={"help": f"Base loss, one of {', '.join(LOSSES)}."})
    svr: str = field(default="none", metadata={"help": f"Support vectors, one of {', '.join(SUPPORT_VECTORS)}."})
    svr_alpha: float = field(default=1.0, metadata={"help": "Weight of the SVR term."})
    svr_beta: float = field(default=0.01, metadata={"help": "Weight of the radius constraint."})
    svr_similarity: str = field(default="cosine", metadata={"help": "cosine or dot."})
    svr_decoupled: bool = field(default=False, metadata={"help": "Leave the positive out of SVR's denominator."})
    radius_init: float | None = field(
        default=None, metadata={"help": "Initial radius; by default, the distance of the pairs of the first batch."}
    )
    radius_num_similarities: int = field(default=16, metadata={"help": "Similarities that a dynamic radius sees."})
    languages: list[str] = field(default_factory=lambda: ["eng"], metadata={"help": "Languages of the captions."})
    eval_languages: list[str] = field(default_factory=list, metadata={"help": "Languages to evaluate."})
    positives: str = field(default="clip", metadata={"help": f"One of {', '.join(POSITIVES)}."})
    every_caption: bool = field(default=False, metadata={"help": "A clip comes once an epoch for each caption."})
    max_audio_seconds: float = field(default=30.0, metadata={"help": "Longer recordings are cropped to this."})
    on_bad_audio: str = field(default="error", metadata={"help": f"One of {', '.join(ON_BAD_AUDIO)}."})
    track_drift: bool = field(default=True, metadata={"help": "Log drift, radius and positive similarity."})
    track_language_errors: bool = field(default=False, metadata={"help": "Log ATRI's errors of the languages."})
    loss_chunk_size: int | None = field(default=None, metadata={"help": "Similarities in chunks of so many rows."})
    cached_chunk_size: int | None = field(default=None, metadata={"help": "Gradient caching in chunks of this size."})

    cache_frozen: str = field(default="auto", metadata={"help": f"One of {', '.join(CACHE_FROZEN)}."})

    per_device_train_batch_size: int = field(default=24, metadata={"help": "Clips per device in a training step."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Clips per device in evaluation."})
    num_train_epochs: float = field(default=10.0, metadata={"help": "Passes over the training split."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate: no, steps or epoch."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to save: no, steps, epoch or best."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep, the best among them."})
    load_best_model_at_end: bool = field(default=True, metadata={"help": "End with the best checkpoint."})
    metric_for_best_model: str | None = field(default="mean_recall", metadata={"help": "What best means."})
    greater_is_better: bool | None = field(
        default=None, metadata={"help": "Whether more of it is better; by default what the metric is known for."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Steps between two logs."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "NaN is an error here, never filtered."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "The collator reads the whole row."})
    dataloader_drop_last: bool = field(default=True, metadata={"help": "Drop the last incomplete training batch."})
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Pin batches; by default where there is a GPU."}
    )
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every parameter is used."})
    ddp_timeout: int = field(default=600, metadata={"help": "Seconds that a step waits for another process."})
    label_names: list[str] | None = field(
        default_factory=lambda: ["clip_index"], metadata={"help": "How embeddings find their clip again."}
    )

    def __post_init__(self) -> None:
        if self.use_cpu or strtobool(os.environ.get("ACCELERATE_USE_CPU", "false")):
            join_processes_on_cpus(self.ddp_backend, self.ddp_timeout)
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = _is_better_higher(self.metric_for_best_model)
        super().__post_init__()
        require_the_launched_processes(self.world_size)

        _require_one_of("loss", self.loss, LOSSES)
        _require_one_of("svr", self.svr, SUPPORT_VECTORS)
        _require_one_of("svr_similarity", self.svr_similarity, ("cosine", "dot"))
        _require_one_of("positives", self.positives, POSITIVES)
        _require_one_of("on_bad_audio", self.on_bad_audio, ON_BAD_AUDIO)
        _require_one_of("cache_frozen", self.cache_frozen, CACHE_FROZEN)

        if not self.languages:
            raise ValueError("languages is empty; name at least one, such as eng")
        several = f"loss {self.loss}" if self.loss in MULTILINGUAL_LOSSES else "track_language_errors"
        if (self.loss in MULTILINGUAL_LOSSES or self.track_language_errors) and len(self.languages) < 2:
            raise ValueError(f"{several} needs two languages or more, got {self.languages}")
        if self.max_audio_seconds <= 0:
            raise ValueError(f"max_audio_seconds is {self.max_audio_seconds}; it must be positive")
        for name in ("loss_chunk_size", "cached_chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more, or left out")
        if self.per_device_train_batch_size * self.world_size < 2:
            raise ValueError(
                "a batch of one clip has nothing to contrast with: per_device_train_batch_size must be 2 or more"
            )

        self.eval_languages = self.eval_languages or list(self.languages)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Lets the first process of each machine, or of all, run a block before the others, however long it takes.

        Args:
            local: Whether each machine has a first process, as where each has its own disk.
            desc: What the block does, for the log of those that wait.
        """
        index, place = (self.local_process_index, platform.node()) if local else (self.process_index, "all")
        with first_process_first(desc, is_first=index == 0, place=place):
            yield

    @property
    def caption_scheme(self) -> str:
        """The captions of a clip that the loss takes, as the `scheme` of `collator.TrainingCollator`."""
        return self.loss if self.loss in MULTILINGUAL_LOSSES else "random"


@dataclass
class TemporalTrainingArguments(SupCLAPTrainingArguments):
    """Arguments of a stage of TeminAL, with the paper's defaults: batch 256, learning rate 1e-4 [T B.2].

    The weights alpha lie between 0, a candidate is left out of the denominator, and 1.

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

    stage: str = field(default="b", metadata={"help": "a or b."})
    temporal_beta: float = field(default=1.0, metadata={"help": "Weight of the text-to-audio direction."})
    alpha_same: float = field(default=1.0, metadata={"help": "Stage a, across blocks with a class in common."})
    alpha_diff: float = field(default=1.0, metadata={"help": "Stage a, across blocks without."})
    alpha_same_time: float = field(default=1.0, metadata={"help": "Stage b, reversal of the same pair."})
    alpha_cross_time: float = field(default=1.0, metadata={"help": "Stage b, reversals of other pairs."})
    alpha_same_overlay: float = field(default=1.0, metadata={"help": "Stage b, overlay of the same pair."})
    alpha_cross_overlay: float = field(default=1.0, metadata={"help": "Stage b, overlays of other pairs."})
    text_scheme: str = field(default="random", metadata={"help": "random or kcl."})
    crossfade_seconds: float = field(default=0.0, metadata={"help": "Overlap of consecutive clips."})
    gap_seconds: float = field(default=0.0, metadata={"help": "Silence between consecutive clips."})
    match_loudness: bool = field(default=False, metadata={"help": "Bring consecutive clips to one level."})
    per_device_train_batch_size: int = field(default=256, metadata={"help": "Pairs per device in a training step."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    metric_for_best_model: str | None = field(default="temporal_accuracy", metadata={"help": "What best means."})

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_of("stage", self.stage, ("a", "b"))
        _require_one_of("text_scheme", self.text_scheme, ("random", "kcl"))
        if self.loss != "infonce" or self.svr != "none" or self.track_language_errors:
            raise ValueError(
                f"TeminAL has a loss of its own; leave loss, svr and track_language_errors alone, got {self.loss}, "
                f"{self.svr} and {self.track_language_errors}"
            )

    @property
    def alphas(self) -> dict[str, float]:
        """The weights of this stage, by name."""
        names = ("same", "diff") if self.stage == "a" else ("same_time", "cross_time", "same_overlay", "cross_overlay")
        return {f"alpha_{name}": getattr(self, f"alpha_{name}") for name in names}


def _is_better_higher(name: str) -> bool:
    """Whether a logged number, such as "eval_mean_recall" or "eng_t2a_mean_rank", is better when it is higher."""
    lower = ["loss"]
    for metric, about in METRICS.items():
        if not about.higher_is_better:
            lower.append(metric)
    return not f"_{name}".endswith(tuple(f"_{metric}" for metric in lower))


def _require_one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(valid)}")
