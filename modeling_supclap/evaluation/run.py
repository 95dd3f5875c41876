"""Evaluate a model on a dataset split.

rows --+-- embed_split (this file's `evaluate`) -----------+
       +-- trainer.predict, then split_from_predictions ---+--> EmbeddedSplit --> `score_split` --> Results
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .cache import EmbeddingCache
from .embed import AudioPolicy, EmbeddedSplit, embed_split, hash_dataset, hash_recordings
from .models import EmbeddingModel, load_embedding_model
from .results import SCHEMA, Intervals, Results, package_versions
from .retrieval import CAPTION_HANDLINGS, evaluate_retrieval
from .zero_shot import TEMPLATE_SETS, Phrases, evaluate_zero_shot
from .zste import ZSTEOptions, evaluate_zste

TASKS = ("retrieval", "zero_shot", "zste")


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation options.

    Attributes:
        tasks: Any of "retrieval", "zero_shot" and "zste" (zero-shot temporal evaluation). The last two require clips
            with exactly one label.
        languages: Retrieval languages, ISO 639-3 codes. With several languages, MRV, Gap and Dis are computed; Gap and
            Dis are relative to English, or to the first language if English is not included.
        positives: "clip" matches each clip only with its own captions; "captions" also matches clips with identical
            captions.
        caption_handling: "all" uses every caption and requires the same number in each language; "parallel" uses the
            captions that exist in all languages; "each" uses all captions of each language.
        on_bad_audio: Missing or unreadable recordings: "error" raises, "skip" skips them.
        audio: Truncation, chunking and pooling settings.
        template_sets: Dict from set name to class prompt templates.
        zero_shot_languages: Languages for zero-shot classification.
        zste: ZSTE options; None uses the defaults of `ZSTEOptions`.
        zste_languages: Languages for ZSTE; with several languages, MRV is computed.
        intervals: Confidence interval options.
        batch_size: Clips or texts per batch.
    """

    tasks: Sequence[str] = ("retrieval",)
    languages: Sequence[str] = ("eng",)
    positives: str = "clip"
    caption_handling: str = "all"
    on_bad_audio: str = "error"
    audio: AudioPolicy = field(default_factory=AudioPolicy)
    template_sets: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"supclap": TEMPLATE_SETS["supclap"]})
    zero_shot_languages: Sequence[str] = ("eng",)
    zste: ZSTEOptions | None = None
    zste_languages: Sequence[str] = ("eng",)
    intervals: Intervals = field(default_factory=Intervals)
    batch_size: int = 32

    def __post_init__(self) -> None:
        if not self.tasks or set(self.tasks) - set(TASKS):
            raise ValueError(f"tasks is {list(self.tasks)}; choose from {', '.join(TASKS)}")
        for name, allowed in (("positives", ("clip", "captions")), ("caption_handling", CAPTION_HANDLINGS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")

        for name in ("languages", "zero_shot_languages", "zste_languages"):
            codes = list(getattr(self, name))
            if isinstance(getattr(self, name), str) or not codes or len(set(codes)) < len(codes):
                raise ValueError(f"{name} is {getattr(self, name)!r}; pass a list of distinct codes, such as ['eng']")


def evaluate(
    model: Any,
    rows: Any,
    options: EvaluationOptions | None = None,
    cache: EmbeddingCache | None = None,
    phrases: Phrases | None = None,
    classes: Sequence[str] | None = None,
    folds: Mapping[str, int] | None = None,
    data: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Results:
    """Evaluate a model on a dataset split.

    Args:
        model: Model, folder, Hub id or `"module:function"`, see `models.load_embedding_model`.
        rows: Dataset rows, see `datasets_scripts.schema`.
        options: Tasks, languages and other options; None evaluates English retrieval.
        cache: Embedding cache; None uses the Hugging Face cache folder. `EmbeddingCache(None)` writes nothing to disk.
        phrases: Class phrases for languages other than English, as `phrases[label][language]`.
        classes: Candidate classes for zero-shot classification; None uses the labels of the split.
        folds: Dict from clip id to cross-validation fold, if `rows` contains several folds.
        data: Description of the data to store in the results, such as "dataset" and "split".
        **changes: Fields of `EvaluationOptions` to override, such as `tasks=["retrieval", "zste"]`.

    Returns:
        Scores, evaluation settings and the outcome of each query.

    Raises:
        ValueError: The split is empty, or `embed_split` or one of the tasks raises `ValueError`.

    Warns:
        UserWarning: The model's embeddings do not have unit norm; they are normalised.
    """
    started = time.perf_counter()
    options = EvaluationOptions(**{**vars(options or EvaluationOptions()), **changes})
    cache = EmbeddingCache.default() if cache is None else cache
    adapted = load_embedding_model(model)

    split = embed_split(adapted, rows, options.audio, cache, options.on_bad_audio, options.batch_size)
    embedded = time.perf_counter()

    results = score_split(split, options, phrases, classes, folds, data)
    seconds = {"embed": round(embedded - started, 3), "all": round(time.perf_counter() - started, 3)}
    results.content["run"] |= {"seconds": seconds, "cache": {"read": cache.read, "embedded": cache.embedded}}
    return results


def score_split(
    split: EmbeddedSplit,
    options: EvaluationOptions,
    phrases: Phrases | None = None,
    classes: Sequence[str] | None = None,
    folds: Mapping[str, int] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Results:
    """Run the evaluation tasks on an embedded split.

    Args:
        split: Split from `embed_split` or `split_from_predictions`.
        options: Tasks, languages and other options.
        phrases: Class phrases for languages other than English, as `phrases[label][language]`.
        classes: Candidate classes for zero-shot classification; None uses the labels of the split.
        folds: Dict from clip id to cross-validation fold, if the split contains several folds.
        data: Description of the data to store in the results, such as "dataset" and "split".
    """
    assert split.model is not None
    labels: set[str] = set()
    for row in split.rows:
        labels.update(row.get("labels") or ())

    protocol: dict[str, Any] = {
        "dataset": None,
        "origin": (data or {}).get("dataset"),
        "dataset_config": {},
        "split": None,
        "folds": None if folds is None else sorted(set(folds.values())),
        "shared_sources": None,
        "without_rows": None,
        **(data or {}),
        "dataset_hash": hash_dataset(split.rows, split.files or hash_recordings(split.dataset, split.cache)),
        "clips": len(split.rows),
        "captions": {},
        "classes": len(labels if classes is None else classes),
        "missing_clips": split.missing,
        "on_bad_audio": options.on_bad_audio,
        "positives": options.positives,
        "caption_handling": options.caption_handling,
        "languages": list(options.languages),
        "audio": {
            "sampling_rate_hz": split.model.sampling_rate_hz,
            **vars(split.policy),
            "policy": split.policy.sentence(),
        },
        "intervals": {"method": "percentile bootstrap over source recordings", **vars(options.intervals)},
        "seed": options.intervals.seed,
    }

    scores: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {
        "clips/id": split.ids,
        "clips/audio_path": np.array([Path(row["audio_path"]).name for row in split.rows]),
        "clips/source": split.sources,
        "clips/label": np.array([next(iter(row.get("labels") or ()), "") for row in split.rows]),
    }

    if "retrieval" in options.tasks:
        task_scores, task_arrays, protocol["captions"] = evaluate_retrieval(
            split, options.languages, options.positives, options.caption_handling, options.intervals
        )
        scores |= task_scores
        arrays |= task_arrays

    if "zero_shot" in options.tasks:
        task_scores, task_arrays, protocol["zero_shot"] = evaluate_zero_shot(
            split, options.template_sets, options.zero_shot_languages, classes, phrases, folds, options.intervals
        )
        scores |= task_scores
        arrays |= task_arrays

    if "zste" in options.tasks:
        task_scores, task_arrays, protocol["zste"] = evaluate_zste(
            split, options.zste, options.zste_languages, phrases, options.intervals
        )
        scores |= task_scores
        arrays |= task_arrays

    return make_results(split.model, scores, arrays, protocol, split.clips.embeds.shape[1])


def make_results(
    model: EmbeddingModel,
    scores: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    protocol: Mapping[str, Any],
    embedding_dim: int | None = None,
) -> Results:
    """Create `Results` from scores and settings; adds the model description, package versions and device.

    Args:
        model: Evaluated model.
        scores: Nested dict of scores by task, see `Results`.
        arrays: Outcome of each query, see `Results`.
        protocol: Description of the data and the evaluation settings.
        embedding_dim: Embedding dimension.
    """
    parameters = None
    if isinstance(model.model, torch.nn.Module):
        parameters = sum(map(torch.numel, model.model.parameters()))

    content = {
        "schema": SCHEMA,
        "model": {
            "name": model.name,
            "kind": model.kind,
            "class": type(model.model).__name__,
            "fingerprint": model.fingerprint,
            "parameters": parameters,
            "embedding_dim": embedding_dim,
        },
        "protocol": dict(protocol),
        "scores": dict(scores),
        "versions": package_versions(),
        "run": {
            "device": model.device,
            "dtype": model.dtype,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }
    return Results(content, dict(arrays))
