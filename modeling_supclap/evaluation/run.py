"""The whole evaluation of a model: what is measured and how, the run, and what its results say of both.

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
    """What is measured, and how; the protocol of results.

    Attributes:
        tasks: Some of "retrieval", "zero_shot" and "zste"; the last two need clips with exactly one label.
        languages: The languages of retrieval, ISO 639-3 codes; with several also MRV, Gap and Dis, the last two towards
            English.
        positives: Who answers whom, see `schema.group_id`.
        caption_handling: "all", and each clip must have as many captions in every language; "parallel", those that
            exist in all; or "each", all that a language has.
        on_bad_audio: What to do about recordings that are not there or cannot be read: "error" or "skip".
        audio: What is heard of a recording.
        template_sets: Class prompts by name.
        zero_shot_languages: The languages of zero-shot classification.
        zste: What ZSTE asks; None, the tasks and numbers of the paper.
        zste_languages: The languages of ZSTE; with several also MRV.
        intervals: How intervals are drawn.
        batch_size: Clips or texts that go through the model at once; changes no result.
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
            raise ValueError(f"tasks is {list(self.tasks)}; give some of {', '.join(TASKS)}")
        for name, allowed in (("positives", ("clip", "captions")), ("caption_handling", CAPTION_HANDLINGS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(allowed)}")

        for name in ("languages", "zero_shot_languages", "zste_languages"):
            given = list(getattr(self, name))
            if isinstance(getattr(self, name), str) or not given or len(set(given)) < len(given):
                raise ValueError(f"{name} is {getattr(self, name)!r}; give a list of codes, each once, such as ['eng']")


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
    """Evaluates a model on a split.

    Args:
        model: Anything that `models.load_embedding_model` takes.
        rows: Rows of the schema.
        options: What is measured; None, English retrieval.
        cache: Where embeddings are kept; None, Hugging Face's cache folder. `EmbeddingCache(None)` keeps none.
        phrases: See `score_split`, as the three that follow.
        classes: See there.
        folds: See there.
        data: See there.
        **changes: Fields of `EvaluationOptions` to change, such as `tasks=["retrieval", "zste"]`.

    Returns:
        The results.

    Raises:
        ValueError: The split is empty, or what the tasks raise.

    Warns:
        UserWarning: The model's embeddings are not of unit norm; they are normalised.
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
    """Scores a split that is embedded, by `embed_split` or by the Trainer.

    Args:
        split: The embedded split.
        options: What is measured.
        phrases: `phrases[label][language]`, for classes in other languages than English.
        classes: What zero-shot classification chooses from; None, the labels of the split.
        folds: The fold of each clip by its id, where the split joins several.
        data: What the protocol says of where the rows are from, such as "dataset" and "split".
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
        found, kept, protocol["captions"] = evaluate_retrieval(
            split, options.languages, options.positives, options.caption_handling, options.intervals
        )
        scores |= found
        arrays |= kept

    if "zero_shot" in options.tasks:
        found, kept, protocol["zero_shot"] = evaluate_zero_shot(
            split, options.template_sets, options.zero_shot_languages, classes, phrases, folds, options.intervals
        )
        scores |= found
        arrays |= kept

    if "zste" in options.tasks:
        found, kept, protocol["zste"] = evaluate_zste(
            split, options.zste, options.zste_languages, phrases, options.intervals
        )
        scores |= found
        arrays |= kept

    return make_results(split.model, scores, arrays, protocol, split.clips.embeds.shape[1])


def make_results(
    model: EmbeddingModel,
    scores: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    protocol: Mapping[str, Any],
    embedding_dim: int | None = None,
) -> Results:
    """Puts together what was measured, with the model, the versions and the machine.

    Args:
        model: What was measured.
        scores: By task, see `Results`.
        arrays: The outcome of each query, see `Results`.
        protocol: How it was measured, and on what.
        embedding_dim: The width of the embeddings.
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
