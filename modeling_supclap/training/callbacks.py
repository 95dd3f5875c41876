"""Trainer callbacks: progress, throughput, checkpoints, weight averaging, drift and language errors."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import has_length

from ..losses.multilingual import alignment_direction_error, data_distribution_error, weight_error_term
from ..losses.similarity import at_least_float32
from .checkpoints import find_checkpoint
from .collator import TrainingCollator
from .contrastive_module import ContrastiveModule
from .distributed import gather
from .drift import drift_cosines, drift_statistics, radius_statistics, similarity_histogram
from .objectives import SupportVectorRegularizer
from .options import clips_per_batch

logger = logging.getLogger(__name__)

LANGUAGE_ERRORS = ("data_distribution_error", "alignment_direction_error", "weight_error")
"""Log keys of `LanguageErrorsCallback`."""

TRAINED_WEIGHTS = "trained_weights.pt"
"""Checkpoint file with the trained weights of a run with `ema_decay`. The model file contains their average."""

STARVED = 0.5
"""Share of the time until the first log that is spent waiting for data, above which a warning names the remedies."""

MOST_WATCHED = 4096
"""Maximum number of batch samples for drift statistics, which need the full similarity matrix of these samples."""


class StartCallback(TrainerCallback):
    """Callback that prints the size of a run before its first step, and warns if the launcher started one process only.

    `accelerate launch --cpu --num_processes 2` starts one process. A batch then has half the negatives.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        processes = f"{args.world_size} process{'es' if args.world_size > 1 else ''}"
        steps = f"{state.max_steps} steps"
        if args.gradient_accumulation_steps > 1:
            steps += f" of {args.gradient_accumulation_steps} batches"
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"
        batch = f"{clips_per_batch(args)} clips in a batch"
        print(f"training: {processes}, {batch}, {steps}, {args.device.type}, {precision}", flush=True)
        # accelerate sets the address for several processes, and the processes of a launcher have a number
        if args.world_size == 1 and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
            logger.warning(
                "the launcher was asked for several processes, and one runs; on CPUs, start them with "
                "`torchrun --nproc_per_node N recipes/train_supclap.py`"
            )


class SupCLAPProgressCallback(ProgressCallback):
    """Progress bar with loss and clips per second, and one printed line per evaluation."""

    def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "clips_per_second" in logs:
            self.training_bar.set_postfix_str(_format_log(logs), refresh=False)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        line = _format_evaluation(args, state, metrics)
        if self.training_bar is not None and line:
            self.training_bar.write(line)


class LineCallback(TrainerCallback):
    """Callback that prints one line per log and per evaluation, and lines during long evaluations.

    It is used if there is no progress bar. `chance` is the loss of random embeddings, for the first line; None: it is
    not known.
    """

    def __init__(self, chance: float | None = None) -> None:
        self.batches: Any = None  # progress of the present evaluation
        self._chance = chance

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self.batches is None:
            from modeling_supclap.datasets_scripts.progress import progress

            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self.batches = progress((), "evaluating", total, "batches", quiet=not state.is_world_process_zero)
        self.batches.update()

    def on_predict(self, *args: Any, **kwargs: Any) -> None:
        self.batches = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "clips_per_second" in logs:
            hint = "" if self._chance is None else f" (random embeddings: loss {self._chance:.3f})"
            self._chance = None
            print(f"step {state.global_step} of {state.max_steps}: {_format_log(logs)}{hint}", flush=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.batches = None
        line = _format_evaluation(args, state, metrics)
        if state.is_world_process_zero and line:
            print(line, flush=True)


def _format_log(logs: Mapping[str, Any]) -> str:
    rate = logs["clips_per_second"]
    return f"loss {logs['loss']:.3f}, {rate:{'.0f' if rate >= 9.5 else '.2g'}} clips/s"


def _format_evaluation(args: Any, state: Any, metrics: Mapping[str, float]) -> str:
    """Format the score used to select the best checkpoint. Return an empty string if the metrics do not contain it."""
    name = (args.metric_for_best_model or "mean_recall").removeprefix("eval_")
    if f"eval_{name}" not in metrics:
        return ""

    value = metrics[f"eval_{name}"]
    previous = value if state.best_metric is None else state.best_metric
    best = max(value, previous) if args.greater_is_better else min(value, previous)
    equal = sum(entry.get(f"eval_{name}") == best for entry in state.log_history)
    ties = f" in {equal} equal evaluations, of which the last counts" if equal > 1 else ""
    chance = f", chance {metrics[f'eval_{name}_chance']:.3f}" if f"eval_{name}_chance" in metrics else ""
    split = getattr(args, "selection_split", "validation")  # not an argument of transformers
    return f"epoch {state.epoch:g}: {split} {name} {value:.3f} (best {best:.3f}{ties}{chance})"


class Averages:
    """Means of named scalars between two logs. Values stay on their device, so that `add` does not wait for the GPU."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, int]] = {}  # sum and number of the values

    def add(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            total, count = self._sums.get(name, (0, 0))
            self._sums[name] = total + value, count + 1

    def drain(self) -> dict[str, float]:
        """Return `{name: mean}`, and delete the collected values. All tensors are transferred together."""
        sums, self._sums = self._sums, {}
        means = {name: total / count for name, (total, count) in sums.items()}
        tensors = {name: mean for name, mean in means.items() if isinstance(mean, Tensor)}
        if tensors:
            means |= zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True)
        return means


class EpochCallback(TrainerCallback):
    """Callback that passes the epoch to collators and streamed batches, because their random numbers depend on it.

    `prepare` is called before the workers of an epoch start. A source may be None.
    """

    def __init__(self, prepare: Callable[[], None], sources: Sequence[Any]) -> None:
        self.prepare, self.sources = prepare, sources

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch to the number of completed epochs, including those before a run was resumed."""
        self.prepare()
        for source in filter(None, self.sources):
            source.set_epoch(int(state.epoch or 0))


class BestCheckpointCallback(TrainerCallback):
    """Callback that rebuilds the path of the best checkpoint from its step, in case the output folder was moved.

    If `forgets` is set, a resumed run forgets the best score, because its own scores are not comparable with it.
    """

    forgets = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.forgets:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        best = find_checkpoint(args.output_dir or ".", state.best_global_step)
        if best is not None:
            state.best_model_checkpoint = str(best)


class SigtermCallback(JITCheckpointCallback):
    """Callback for SIGTERM: save a checkpoint at the end of the current step, and end the run.

    Several processes save at the same step: the next one with a log, because asking all of them in each step would make
    the CPU wait for the GPU. The callback of transformers may save at a different step in each process, or within one.
    A run that resumes from the middle of a step does not draw the same random numbers as a run without interruption.
    """

    def __init__(self, jit_manager: Any) -> None:
        super().__init__()
        self.jit_manager: Any = jit_manager

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        requested = self.jit_manager.is_checkpoint_requested
        if args.world_size > 1:
            requested = control.should_log and gather(torch.tensor([float(requested)], device=args.device)).any()
        if requested:
            control.should_save = control.should_training_stop = True

    def _wait(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because `on_step_end` saves the checkpoint."""

    on_step_begin = on_pre_optimizer_step = on_epoch_end = _wait


class EMACallback(TrainerCallback):
    """Callback that averages the trained weights after each step: average = decay * average + (1 - decay) * weights.

    The average starts with the weights after the first step, as in torch. Evaluations, saved models and checkpoints use
    the averaged weights. To resume, a checkpoint also contains the trained weights (file `TRAINED_WEIGHTS`).

    Inside `with callback:`, the model has the averaged weights. `checkpoint` is the folder to resume from, or None.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module = module
        self.checkpoint: str | None = None
        self._update = get_ema_multi_avg_fn(decay)
        # empty before the first step and after the last one
        self._average: list[Tensor] = []

    def trained(self) -> dict[str, Tensor]:
        """Return the trainable weights, `{name: weight}`."""
        return {name: weight.data for name, weight in self.module.named_parameters() if weight.requires_grad}

    def _exchange(self, *_: object) -> None:
        for weight, average in zip(self.trained().values(), self._average, strict=False):
            trained = weight.clone()
            weight.copy_(average)
            average.copy_(trained)

    __enter__ = __exit__ = _exchange

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        weights = self.trained()
        for name, weight in weights.items():
            if torch.finfo(weight.dtype).bits < 32:
                raise ValueError(f"ema_decay needs float32 weights, but {name} is {weight.dtype}; load it in float32")
        if self.checkpoint is not None:
            self._average = [weight.clone() for weight in weights.values()]
            for name, value in torch.load(Path(self.checkpoint, TRAINED_WEIGHTS), "cpu", weights_only=True).items():
                weights[name].copy_(value)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        weights = list(self.trained().values())
        self._average = self._average or [weight.clone() for weight in weights]
        self._update(self._average, weights, 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.load_best_model_at_end or state.best_model_checkpoint is None:
            self._exchange()
        self._average = []


class ThroughputCallback(TrainerCallback):
    """Callback that measures the CPU time of the process, and the wall-clock time per training clip.

    The time per clip excludes evaluation and saving. If most of the time until the first log is spent waiting for data,
    a warning names the remedies.
    """

    # CPU time logged by earlier processes of a resumed run
    earlier_seconds = 0.0
    _since = _started = 0.0
    # seconds of all steps but the first, before which the workers start, and those spent waiting for data
    _spent = _waited = _waits = 0.0
    _is_warm = _has_logged = False

    def __init__(self, averages: Averages) -> None:
        self.averages = averages

    @property
    def process_seconds(self) -> float:
        """CPU time since the start of training in seconds, including earlier processes of a resumed run."""
        return self.earlier_seconds + time.process_time() - self._started

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logged = [entry["process_seconds"] for entry in state.log_history if "process_seconds" in entry]
        self.earlier_seconds = logged[-1] if logged else 0.0
        self._since, self._started = time.perf_counter(), time.process_time()

    def _restart(self, *args: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    on_evaluate = on_save = _restart

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._waits = time.perf_counter() - self._since

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        clips = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.averages.add({"seconds_per_clip": (now - self._since) / clips})
        if self._is_warm:
            self._spent, self._waited = self._spent + now - self._since, self._waited + self._waits
        self._since, self._is_warm = now, True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._has_logged or self._spent == 0 or "clips_per_second" not in logs:
            return
        self._has_logged = True
        if self._waited > STARVED * self._spent and state.is_world_process_zero:
            logger.warning(
                f"the training waits for data in {self._waited / self._spent:.0%} of the time; raise "
                f"dataloader_num_workers (now {args.dataloader_num_workers}) up to the number of free cores, or store "
                "the data as int16 (supclap prepare --storage int16). Later epochs reuse the features that fit into "
                "feature_cache_gib"
            )


class LanguageErrorsCallback(TrainerCallback):
    """Callback that logs the errors from training on only some languages per step (ATRI 3.2, eq. 6).

    The errors are computed on the last batch before each log, without dropout, from the captions in all K languages.
    Each log costs as much compute as a KCL training step. With several processes, only the values of the first one are
    logged.

    - `data_distribution_error`: Result of `losses.data_distribution_error`, 0 to 2. If all similarities are equal, it
      is 0 for KCL, 2(1 - 2/K) for CACL, and 2(1 - 1/K) for one language per clip.
    - `alignment_direction_error`: Result of `losses.alignment_direction_error`, in degrees.
    - `weight_error`: Distance between the weights after one SGD step on the trained languages and after one SGD step on
      all languages, divided by the learning rate. It is the norm of the gradient of `losses.weight_error_term` with
      respect to all trainable weights.
    """

    def __init__(self, module: ContrastiveModule, collator: TrainingCollator, rows: Any, averages: Averages) -> None:
        self.module, self.collator, self.rows, self.averages = module, collator, rows, averages
        self._batch: Mapping[str, Tensor] = {}
        module.register_forward_pre_hook(self._keep_batch, with_kwargs=True)

    def _keep_batch(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            self._batch = kwargs

    @torch.enable_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not control.should_log:
            return
        model = self.module.model
        model.eval()
        rows = [self.rows[index] for index in self._batch["clip_index"].tolist()]
        trained, captions = zip(*map(self.collator.drawn_among_all, rows), strict=True)
        languages, texts = map(list, zip(*chain.from_iterable(captions), strict=True))

        audio_embeds = self.module.embed("audio", self._batch)
        tokens = self.collator.processor(text=texts, language=languages, return_tensors="pt")
        text_embeds = model.get_text_features(**tokens.to(audio_embeds.device)).pooler_output
        # (N K, d) -> (N, K, d)
        text_embeds = text_embeds.unflatten(0, (len(trained), -1))

        mask = torch.tensor(trained, device=audio_embeds.device)
        scale = model.logit_scale.exp().squeeze()
        term = weight_error_term(audio_embeds, text_embeds, scale, mask)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(term, weights, materialize_grads=True)
        errors = (
            data_distribution_error(audio_embeds, text_embeds, scale, mask),
            alignment_direction_error(audio_embeds, text_embeds, mask),
            torch.stack([gradient.norm() for gradient in gradients]).norm(),
        )
        self.averages.add(dict(zip(LANGUAGE_ERRORS, errors, strict=True)))
        model.train()

    on_epoch_end = on_step_end


class DriftCallback(TrainerCallback):
    """Callback that logs drift, radius and positive similarity (SupCLAP fig. 1, 3 and 4).

    The statistics are computed at logging steps only, in each process, from the last global batch. They do not affect
    training. The callback logs the values of `drift_statistics` for the text-to-audio direction of the loss. The keys
    of the radius and of the SVR factor end with the direction, `_t2a` or `_a2t`. The callback also logs:

    - `drift_cosine_objective`, `drift_cosine_objective_difference`, `drift_cosine_objective_target`: `drift_cosines` of
      the update by the whole objective, with both directions and all terms. They are not logged if no gradient reaches
      the texts.
    - `positive_similarity_p10`, `_p50`, `_p90`: Quantiles of the cosine similarity of positive pairs.
    - `positive_similarity_histogram`: Histogram of this similarity (SupCLAP fig. 4). It is stored only in
      `state.log_history`, because `report_to` services accept only scalars.

    If captions are in K languages, only the first one of each clip is used: the anchor language, or a random one with
    `languages_per_clip`. If each sample has R recordings, with audio embeddings `(N, R, d)` and text embeddings
    `(N, R K, d)`, the statistics treat the R N pairs as one batch. They ignore group ids and TeminAL's candidate
    weights. Only the first 4,096 samples of a batch are used. Radii are logged if the `regularizer` of the objective
    is a `SupportVectorRegularizer`. `ideal_progress` and `noise_penalty` are those of a step of `learning_rate` on the
    text embeddings.
    """

    def __init__(self, objective: nn.Module, averages: Averages, learning_rate: float = 1.0) -> None:
        self.objective, self.averages, self.learning_rate = objective, averages, learning_rate
        self._batch: dict[str, Tensor] = {}
        self._cosines = torch.empty(0)
        objective.register_forward_hook(self._keep_batch, with_kwargs=True)

    def _keep_batch(self, objective: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        names = ("audio_embeds", "text_embeds", "logit_scale", "logit_bias")
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        batch = {name: inputs[name].detach() for name in names if inputs.get(name) is not None}
        self._batch = batch
        if inputs["text_embeds"].requires_grad:
            # The gradient is copied, because autograd may change it in place.
            inputs["text_embeds"].register_hook(
                lambda gradient: batch.update(text_gradient=self._pairs(gradient).clone())
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_log:
            self.averages.add(self._numbers())

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "drift_cosine" in logs:
            state.log_history[-1]["positive_similarity_histogram"] = similarity_histogram(self._cosines)

    def _pairs(self, embeds: Tensor) -> Tensor:
        """Reshape embeddings (N, d) or (N, R K, d) to (R N, d), and keep only the first of the K languages."""
        audio_embeds = self._batch["audio_embeds"]
        roles = audio_embeds.shape[1] if audio_embeds.ndim == 3 else 1
        if embeds.ndim == 2:
            embeds = embeds.unsqueeze(1)
        return embeds[:MOST_WATCHED, :: embeds.shape[1] // roles].transpose(0, 1).flatten(0, 1)

    @torch.no_grad()
    def _numbers(self) -> dict[str, Tensor]:
        """Compute the statistics of the last batch, `{name: 0-d tensor}`."""
        batch, scale = self._batch, self._batch["logit_scale"]
        audio, text = at_least_float32(self._pairs(batch["audio_embeds"]), self._pairs(batch["text_embeds"]))
        options: dict[str, Any] = {}
        radii: dict[str, Tensor] = {}
        if getattr(self.objective, "loss", None) == "siglip":
            options["logit_bias"] = batch.get("logit_bias")
        regularizer = getattr(self.objective, "regularizer", None)
        if isinstance(regularizer, SupportVectorRegularizer):
            options |= {name: getattr(regularizer, name) for name in ("alpha", "similarity", "decoupled")}
            for direction, radius in regularizer.batch_radii.items():
                radii[direction] = radius.flatten()[: len(text)]  # of the first language

        options["learning_rate"] = self.learning_rate
        numbers = drift_statistics(audio, text, scale, radii.get("t2a"), **options)
        for direction, radius in radii.items():
            for name, value in radius_statistics(text, audio, radius).items():
                numbers.pop(name, None)
                numbers[f"{name}_{direction}"] = value
        if "text_gradient" in batch:
            numbers |= drift_cosines("drift_cosine_objective", -batch["text_gradient"], text, audio)

        self._cosines = (audio * text).sum(dim=-1)  # (P,)
        for percent in (10, 50, 90):
            numbers[f"positive_similarity_p{percent}"] = self._cosines.quantile(percent / 100)
        return numbers
