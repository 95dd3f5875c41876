"""Evaluate a model on a dataset split.

rows --+-- embed_split (this file's `evaluate`) -----------+
       +-- trainer.predict, then split_from_predictions ---+--> EmbeddedSplit --> `score_split` --> Results
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modeling_supclap.datasets_scripts.builders.hf import ensure_rows
from modeling_supclap.datasets_scripts.schema import without_audio

from .audio_to_audio import evaluate_audio_to_audio
from .cache import EmbeddingCache
from .embed import EmbeddedSplit, embed_split, hash_dataset, hash_recordings
from .models import EmbeddingModel, load_embedding_model
from .options import EvaluationOptions
from .probes import evaluate_few_shot, evaluate_linear_probe
from .results import SCHEMA, Results, package_versions
from .retrieval import evaluate_retrieval
from .zero_shot import evaluate_zero_shot
from .zste import evaluate_zste

# Each task is a function from an embedded split and the options to its scores, its arrays and its part of the protocol.
# `options.TASK_NAMES` lists the same names.
TASKS = {
    "retrieval": evaluate_retrieval,
    "zero_shot": evaluate_zero_shot,
    "zste": evaluate_zste,
    "linear_probe": evaluate_linear_probe,
    "few_shot": evaluate_few_shot,
    "audio_to_audio": evaluate_audio_to_audio,
}


def evaluate(
    model: Any,
    rows: Any,
    options: EvaluationOptions | None = None,
    cache: EmbeddingCache | None = None,
    **changes: Any,
) -> Results:
    """Evaluate a model on a dataset split, and return the scores, the settings and the outcome of each query.

    Args:
        model: Model, folder, Hub id or `"module:function"`, as in `models.load_embedding_model`.
        rows: Dataset rows (see `datasets_scripts.schema` for the columns). A `datasets.Dataset` with other columns is
            converted by `builders.hf.as_rows`.
        options: Tasks, languages and other options. None: evaluate English retrieval.
        cache: Embedding cache. None: use the Hugging Face cache folder. `EmbeddingCache(None)` writes nothing to disk.
        **changes: Fields of `EvaluationOptions` to override, such as `tasks=["retrieval", "zste"]`.

    Raises:
        ValueError: The split is empty, or `embed_split` or one of the tasks raises `ValueError`.
    """
    started = time.perf_counter()
    options = replace(options or EvaluationOptions(), **changes)
    cache = EmbeddingCache.default() if cache is None else cache

    settings = options.audio, cache, options.on_bad_audio, options.batch_size
    language = options.languages[0]
    split = embed_split(load_embedding_model(model), ensure_rows(rows, language), *settings)
    if options.train_rows is not None and {"linear_probe", "few_shot"} & set(options.tasks):
        assert split.model is not None
        split.train = embed_split(split.model, ensure_rows(options.train_rows, language), *settings)
    embedded = time.perf_counter()

    results = score_split(split, options)
    seconds = {"embed": round(embedded - started, 3), "all": round(time.perf_counter() - started, 3)}
    results.content["run"] |= {"seconds": seconds, "cache": {"read": cache.read, "embedded": cache.embedded}}
    return results


def score_split(split: EmbeddedSplit, options: EvaluationOptions) -> Results:
    """Run the evaluation tasks on an embedded split, from `embed_split` or `split_from_predictions`."""
    assert split.model is not None
    if options.classes is None:
        # Clips without readable recordings count, because fewer candidates would be easier.
        labels: set[str] = set()
        for rows in (split.rows if split.dataset is None else split.dataset, options.train_rows or ()):
            for row in without_audio(rows):
                labels.update(row.get("labels") or ())
        options = replace(options, classes=sorted(labels))
    protocol: dict[str, Any] = {
        "dataset": None,
        "origin": options.data.get("dataset"),
        "dataset_config": {},
        "split": None,
        "folds": None if options.folds is None else sorted(set(options.folds.values())),
        "shared_sources": None,
        "without_rows": None,
        **options.data,
        "dataset_hash": hash_dataset(split.rows, split.files or hash_recordings(split.dataset)),
        "clips": len(split.rows),
        "captions": {},
        "classes": len(options.classes or ()),
        "missing_clips": split.missing,
        "on_bad_audio": options.on_bad_audio,
        "positives": options.positives,
        "caption_handling": options.caption_handling,
        "languages": list(options.languages),
        "audio": {
            "sampling_rate_hz": split.model.sampling_rate_hz,
            "max_audio_seconds": split.policy.max_audio_seconds,
            "chunk_seconds": split.policy.chunk_seconds,
            "pooling": split.policy.pooling,
            "policy": split.policy.sentence(),  # contains `pad_short_clips`, which older results lack
        },
        "intervals": {"method": "percentile bootstrap over source recordings", **vars(options.intervals)},
        "seed": options.intervals.seed,
    }

    scores: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {
        "clips/id": split.ids,
        "clips/audio_path": np.array([Path(row["audio_path"]).name for row in split.rows]),
        "clips/source": split.sources,
        "clips/label": np.array([", ".join(row.get("labels") or ()) for row in split.rows]),
    }
    for task, evaluate_task in TASKS.items():
        if task in options.tasks:
            task_scores, task_arrays, settings = evaluate_task(split, options)
            scores |= task_scores
            arrays |= task_arrays
            protocol |= settings

    results = make_results(split.model, scores, arrays, protocol, split.clips.embeds.shape[1])
    if options.group_by is not None:
        results.content["groups"] = {
            "column": options.group_by,
            "scores": score_groups(split, options, options.group_by),
        }
    return results


def score_groups(split: EmbeddedSplit, options: EvaluationOptions, column: str) -> dict[str, dict[str, Any]]:
    """Score the clips of each value of a column of the rows alone. Return `{value: scores}`.

    Only retrieval and zero-shot classification are scored. The candidates of retrieval are the clips of the group, and
    languages without captions in it are left out.

    Raises:
        ValueError: The rows have no such column.
    """
    for row in split.rows:
        if column not in row:
            raise ValueError(
                f"group_by is {column!r}, but the rows have the columns {sorted(row)}; name one of them, or add a "
                "column of this name to the table or with rows.add_column"
            )
    scores: dict[str, dict[str, Any]] = {}
    for value, part in split.group_by(column).items():
        scores[value] = {}
        if "retrieval" in options.tasks and (languages := part.languages(options.languages)):
            scores[value] |= evaluate_retrieval(part, replace(options, languages=languages))[0]
        if "zero_shot" in options.tasks:
            scores[value] |= evaluate_zero_shot(part, options)[0]
    return scores


def make_results(
    model: EmbeddingModel,
    scores: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    protocol: Mapping[str, Any],
    embedding_dim: int | None = None,
) -> Results:
    """Create `Results` from its parts, and add the model description, package versions, device and time."""
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
            "resampling_method": model.resampling_method,
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
