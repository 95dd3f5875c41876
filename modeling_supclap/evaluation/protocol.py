"""The whole evaluation of a model: what is measured and how, the run, and what its receipt says of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from .clip_embeddings import AudioPolicy
from .embedded_split import EmbeddedSplit, embed_split
from .embedding_cache import EmbeddingCache
from .embedding_models import EmbeddingModel, load_embedding_model
from .receipts import SCHEMA, Intervals, Receipt, package_versions
from .retrieval import evaluate_retrieval
from .zero_shot import TEMPLATE_SETS, Phrases, evaluate_zero_shot, prompts_hash
from .zste import ZSTEOptions, evaluate_zste

TASKS = ("retrieval", "zero_shot", "zste")
_SAMPLED_CLIPS = 1000


@dataclass(frozen=True)
class EvaluationOptions:
    """What is measured, and how; the protocol of a receipt.

    Attributes:
        tasks: Some of "retrieval", "zero_shot" and "zste"; the last two need clips with exactly one label.
        languages: Of retrieval, ISO 639-3 codes; with several also MRV, Gap and Dis, the last two towards English.
        positives: Who answers whom, see `schema.group_id`.
        caption_handling: "all", and each clip must have as many captions in every language; or "parallel".
        missing: What to do about recordings that are not there or unreadable: "error" or "skip".
        audio: What is heard of a recording.
        template_sets: Class prompts by name.
        zero_shot_languages: Of zero-shot classification.
        zste: What ZSTE asks.
        zste_languages: Of ZSTE; with several also MRV.
        intervals: How intervals are drawn.
        batch_size: Clips or texts that go through the model at once; changes no result.
    """

    tasks: Sequence[str] = ("retrieval",)
    languages: Sequence[str] = ("eng",)
    positives: str = "clip"
    caption_handling: str = "all"
    missing: str = "error"
    audio: AudioPolicy = field(default_factory=AudioPolicy)
    template_sets: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"supclap": TEMPLATE_SETS["supclap"]})
    zero_shot_languages: Sequence[str] = ("eng",)
    zste: ZSTEOptions = field(default_factory=ZSTEOptions)
    zste_languages: Sequence[str] = ("eng",)
    intervals: Intervals = field(default_factory=Intervals)
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name, given, valid in (
            ("tasks", self.tasks, TASKS),
            ("positives", [self.positives], ("clip", "captions")),
        ):
            unknown = [value for value in given if value not in valid]
            if unknown or not given:
                raise ValueError(f"{name} is {list(given)}; give some of {', '.join(valid)}")
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
) -> Receipt:
    """Evaluates a model on a split.

    Args:
        model: Anything that `embedding_models.load_embedding_model` takes.
        rows: Rows of the schema.
        options: What is measured; None, English retrieval.
        cache: Where embeddings are kept; None, Hugging Face's cache folder. `EmbeddingCache(None)` keeps none.
        phrases: `phrases[label][language]`, for classes in other languages than English.
        classes: For zero-shot classification; None, the labels of the split.
        folds: The fold of each clip by its id, where the split joins several.
        data: What the protocol says of where the rows are from, such as "dataset" and "split".
        **changes: Fields of `EvaluationOptions` to change, such as `tasks=["retrieval", "zste"]`.

    Returns:
        The receipt.

    Raises:
        ValueError: The split is empty, or what the tasks raise.

    Warns:
        UserWarning: The model's embeddings are not of unit norm; they are normalised.
    """
    started = time.perf_counter()
    options = EvaluationOptions(**{**vars(options or EvaluationOptions()), **changes})
    cache = EmbeddingCache.default() if cache is None else cache
    adapted = load_embedding_model(model)
    split = embed_split(adapted, rows, options.audio, cache, options.missing, options.batch_size)
    embedded = time.perf_counter()
    scores: dict[str, Any] = {}
    arrays = _clips(split)
    protocol = _protocol(split, options, classes, folds, data or {})
    if "retrieval" in options.tasks:
        found, kept = evaluate_retrieval(
            split, options.languages, options.positives, options.caption_handling, options.intervals
        )
        scores |= found
        arrays |= kept | _embedding_sample(split, kept, options.languages)
        protocol["captions"] = {one: len(kept[f"captions/{one}/text"]) for one in options.languages}
    if "zero_shot" in options.tasks:
        found, kept = evaluate_zero_shot(
            split, options.template_sets, options.zero_shot_languages, classes, phrases, folds, options.intervals
        )
        scores |= found
        arrays |= kept
        protocol["classes"] = len(kept["zero_shot/classes"])
        protocol["zero_shot"]["prompts_hash"] = prompts_hash(
            kept["zero_shot/classes"].tolist(), options.template_sets, options.zero_shot_languages, phrases
        )
    if "zste" in options.tasks:
        found, kept, protocol["zste"] = evaluate_zste(
            split, options.zste, options.zste_languages, phrases, options.intervals
        )
        scores |= found
        arrays |= kept
    content = {
        "schema": SCHEMA,
        "model": {**adapted.describe(), "embedding_dim": split.clips.embeds.shape[1]},
        "protocol": protocol,
        "scores": scores,
        "versions": package_versions(),
        "run": _run(adapted, cache, embedded - started, time.perf_counter() - started),
    }
    return Receipt(content, arrays)


def _protocol(
    split: EmbeddedSplit,
    options: EvaluationOptions,
    classes: Sequence[str] | None,
    folds: Mapping[str, int] | None,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    labels = {label for row in split.rows for label in row.get("labels") or ()}
    protocol: dict[str, Any] = {
        "dataset": None,
        "origin": data.get("dataset"),
        "dataset_config": {},
        "split": None,
        "folds": None if folds is None else sorted(set(folds.values())),
        "shared_sources": None,
        "without_rows": None,
        **data,
        "dataset_hash": split.dataset_hash,
        "clips": len(split.rows),
        "captions": {},
        "classes": len(labels if classes is None else classes),
        "missing_clips": split.missing,
        "missing": options.missing,
        "positives": options.positives,
        "caption_handling": options.caption_handling,
        "languages": list(options.languages),
        "audio": {
            "sampling_rate_hz": split.model.sampling_rate_hz,
            **vars(split.policy),
            "policy": split.policy.sentence(),
        },
        "intervals": options.intervals.describe(),
        "seed": options.intervals.seed,
    }
    if "zero_shot" in options.tasks:
        protocol["zero_shot"] = {
            "templates": {name: list(templates) for name, templates in options.template_sets.items()},
            "languages": list(options.zero_shot_languages),
            "classes": None if classes is None else list(classes),
        }
    return protocol


def _run(model: EmbeddingModel, cache: EmbeddingCache, embed_seconds: float, all_seconds: float) -> dict[str, Any]:
    return {
        "seconds": {"embed": round(embed_seconds, 3), "all": round(all_seconds, 3)},
        "device": model.device,
        "dtype": model.dtype,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "cache": {"read": cache.read, "embedded": cache.embedded},
    }


def _clips(split: EmbeddedSplit) -> dict[str, np.ndarray]:
    return {
        "clips/id": np.array([row["clip_id"] for row in split.rows]),
        "clips/audio_path": np.array([str(row["audio_path"]) for row in split.rows]),
        "clips/source": split.sources,
        "clips/label": np.array([next(iter(row.get("labels") or ()), "") for row in split.rows]),
    }


def _embedding_sample(
    split: EmbeddedSplit, kept: Mapping[str, np.ndarray], languages: Sequence[str]
) -> dict[str, np.ndarray]:
    """The embeddings of some clips, evenly spaced, and of their first captions, for pictures of the space."""
    step = -(-len(split.rows) // _SAMPLED_CLIPS)
    clips = np.arange(0, len(split.rows), step)
    sample = {"embeddings/audio": split.clips.select(clips).mean, "embeddings/audio_clip": clips}
    for language in languages:
        firsts = np.unique(kept[f"captions/{language}/clip"], return_index=True)
        own = np.isin(firsts[0], clips)
        texts = kept[f"captions/{language}/text"][firsts[1][own]].tolist()
        # All texts of the language again: they are in the cache already, or at hand.
        every = split.texts(sorted(set(kept[f"captions/{language}/text"].tolist())), language)
        place = {text: row for row, text in enumerate(sorted(set(kept[f"captions/{language}/text"].tolist())))}
        sample[f"embeddings/text/{language}"] = every[[place[text] for text in texts]]
        sample[f"embeddings/text_clip/{language}"] = firsts[0][own]
    return sample
