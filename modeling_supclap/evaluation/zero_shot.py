"""Zero-shot classification: predict the class whose prompt has the highest cosine (SupCLAP section 4.2.2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from modeling_supclap.datasets_scripts.builders.captions import render_captions
from modeling_supclap.metrics.bootstrap import MIN_UNITS
from modeling_supclap.metrics.recall.ranking import average_precision, chance_scores, retrieval_outcomes

from .cache import Arrays, digest_of
from .embed import EmbeddedSplit, Row
from .options import EvaluationOptions, Phrases
from .results import Scores, TaskResult, score, score_outcomes, under


def class_texts(
    classes: Sequence[str], templates: Sequence[str], language: str = "eng", phrases: Phrases | None = None
) -> list[list[str]]:
    """Build the prompts of each class: one list per class, all of the same length.

    Args:
        classes: Class names. Underscores are replaced by spaces.
        templates: English templates, such as `"This is a sound of {}"`; each `{}` is replaced by the class name. Other
            languages use the sentences in `datasets_scripts/phrases/templates.json`.
        language: ISO 639-3 code.
        phrases: Class phrases for languages other than English, as `phrases[label][language]`.

    Raises:
        ValueError: `templates` is empty, a template contains no `{}`, two class names are equal, a class has no phrase
            in `language`, or `classes` is a string.
    """
    if isinstance(classes, str):
        raise ValueError(f"classes is the string {classes!r}; pass a list of class names")
    templates = [templates] if isinstance(templates, str) else templates
    if not templates or not all("{}" in template for template in templates):
        raise ValueError(f"every template needs a {{}} for the label, got {list(templates)}")

    texts: dict[str, list[str]] = {}
    missing = []
    for label in classes:
        name, translations = label.replace("_", " "), (phrases or {}).get(label, {})
        if name in texts:
            raise ValueError(f"the classes contain {name!r} twice; list each class once")
        if language == "eng":
            texts[name] = [template.replace("{}", name) for template in templates]
        elif language in translations:
            texts[name] = render_captions({**translations}, [language])[language]
        else:
            texts[name] = []
            missing.append(label)
    if missing:
        raise ValueError(f"the classes {missing[:3]} have no phrase in {language!r}; pass phrases[label][language]")
    return list(texts.values())


def class_means(text_embeds: np.ndarray, num_classes: int) -> np.ndarray:
    """Average the unit-norm prompt embeddings (C * prompts, d) of C classes, and normalise the means (C, d)."""
    # (C * prompts, d) -> (C, prompts, d) -> (C, d)
    means = text_embeds.reshape(num_classes, -1, text_embeds.shape[1]).astype(np.float64).mean(axis=1)
    return (means / np.linalg.norm(means, axis=1, keepdims=True)).astype(np.float32)


def evaluate_zero_shot(split: EmbeddedSplit, options: EvaluationOptions) -> TaskResult:
    """Classify the clips of a split with each template set in each language.

    A tie between the correct class and another class counts as wrong. If clips have several labels, the score is mAP:
    each class ranks all clips, and the average precision of this ranking is averaged over the classes.

    Returns:
        Tuple of the scores `{"zero_shot": ...}`, the arrays for `Results`, and the prompt settings for its protocol.

    Raises:
        ValueError: A clip has no label, a label is not in `classes`, or `class_texts` raises.
    """
    truth, names = label_matrix(split.rows, options.classes)
    scores: Scores = {}
    arrays: Arrays = {"zero_shot/classes": np.array(names)}
    prompts: dict[str, list[list[str]]] = {}
    for language in options.zero_shot_languages:
        scores[language] = {}
        # Other languages have a single prompt set, built from the caption templates.
        sets = options.template_sets if language == "eng" else {"captions": ["{}"]}
        for name, templates in sets.items():
            texts = prompts[f"{language} {name}"] = class_texts(names, templates, language, options.phrases)
            embeds = class_means(split.texts(list(itertools.chain(*texts)), language), len(names))
            cosines = split.clips.similarity(embeds)[:].T
            scores[language][name], outcomes = score_classes(cosines, truth, names, split, options)
            arrays |= under(f"zero_shot/{language}/{name}", outcomes)

    protocol = {
        "templates": dict(options.template_sets),
        "languages": list(options.zero_shot_languages),
        "classes": None if truth.any(axis=0).all() else names,  # None: each class has a clip
        # Hash the prompts, because `templates` does not include the phrases of other languages.
        "prompts_hash": digest_of(prompts),
    }
    return {"zero_shot": scores}, arrays, {"zero_shot": protocol}


def label_matrix(rows: Sequence[Row], classes: Sequence[str] | None = None) -> tuple[np.ndarray, list[str]]:
    """Return the labels of N clips as a bool matrix (N, C), and the names of the C classes.

    If `classes` is None, the classes are the labels of the clips, sorted.

    Raises:
        ValueError: A clip has no label, or a label is not in `classes`.
    """
    labels = [list(row.get("labels") or ()) for row in rows]
    if not all(labels):
        raise ValueError(f"clip {rows[labels.index([])]['clip_id']} has no label; each clip needs one or more labels")
    names = sorted(set(itertools.chain(*labels))) if classes is None else list(classes)
    unknown = sorted(set(itertools.chain(*labels)).difference(names))
    if unknown:
        raise ValueError(f"the labels {unknown[:5]} are not among the {len(names)} classes")

    columns = {name: column for column, name in enumerate(names)}
    truth = np.zeros((len(rows), len(names)), dtype=bool)
    for row, of_clip in zip(truth, labels, strict=True):
        row[[columns[label] for label in of_clip]] = True
    return truth, names


def get_unit(metrics: Iterable[str], split: EmbeddedSplit) -> str:
    """Return the name of the resampled units of classification: those of the split, or "classes" for mAP."""
    is_enough = len(np.unique(split.sources)) >= MIN_UNITS
    return "classes" if "mAP" in metrics and is_enough else split.unit


def score_classes(
    similarity: np.ndarray, truth: np.ndarray, classes: Sequence[str], split: EmbeddedSplit, options: EvaluationOptions
) -> tuple[Scores, Arrays]:
    """Score zero-shot predictions.

    Args:
        similarity: (N, C), cosine similarity of N clips and C classes.
        truth: bool (N, C), the labels of the clips.

    Returns:
        Tuple of the scores and the arrays for `Results`. With one label per clip, the scores are accuracies over all
        clips, per class and per fold. The arrays are the top-1 and top-5 hits, the true and the predicted class of each
        clip, and the confusion matrix. With several labels per clip, the scores are the average precision of each class
        with at least one clip, and their mean, mAP. The arrays are the average precisions.
    """
    if (truth.sum(axis=1) > 1).any():
        return _score_multi_label(similarity, truth, classes, split, options)
    targets = truth.argmax(axis=1)
    outcomes = retrieval_outcomes(similarity, targets[:, None])
    levels = chance_scores(targets[:, None], len(classes))
    hits, chance = {}, {}
    for name, recall in (("top1", "R@1"), ("top5", "R@5")):
        hits[name], chance[name] = outcomes[recall], levels[recall]

    # A tie counts as wrong, as in top1: the predicted class is then the best of the other classes.
    rivals = np.where(truth, -np.inf, similarity)
    predicted = np.where(outcomes["rank"] == 0, targets, rivals.argmax(axis=1))
    confusion = np.zeros((len(classes), len(classes)), dtype=np.int64)
    np.add.at(confusion, (targets, predicted), 1)

    def mean_over(groups: np.ndarray, name_of: Callable[[int], str]) -> tuple[Scores, dict[str, float]]:
        means = {name_of(group): float(hits["top1"][groups == group].mean()) for group in np.unique(groups).tolist()}
        return score(float(np.mean(list(means.values()))), None, chance["top1"]), means

    scores = score_outcomes(hits, split.sources, split.unit, options.intervals, chance)
    scores["mean_per_class"], per_class = mean_over(targets, classes.__getitem__)
    scores |= {"num_clips": len(targets), "per_class": per_class}
    if options.folds is not None:
        clip_folds = np.array(list(map(options.folds.__getitem__, split.ids.tolist())))
        scores["mean_over_folds"], scores["per_fold"] = mean_over(clip_folds, str)
    queries = {"query_id": split.ids, "cluster": split.sources, "truth": targets}
    return scores, {**hits, "predicted": predicted, "confusion": confusion, **queries}


def _score_multi_label(
    similarity: np.ndarray, truth: np.ndarray, classes: Sequence[str], split: EmbeddedSplit, options: EvaluationOptions
) -> tuple[Scores, Arrays]:
    """Compute mAP over the classes with at least one clip. Its bootstrap interval resamples the classes.

    With fewer than 10 recordings, these are the clusters, so that there is no interval.
    """
    names, num_clips = np.array(classes)[truth.any(axis=0)], len(truth)
    precisions = class_precisions(similarity, truth)
    unit = get_unit(["mAP"], split)
    clusters = names if unit == "classes" else np.resize(np.unique(split.sources), len(names))
    relevant = list(map(range, filter(None, truth.sum(axis=0).tolist())))
    chance = chance_scores(relevant, num_clips, map_cutoff=num_clips)[f"mAP@{num_clips}"]
    scores = score_outcomes({"mAP": precisions}, clusters, unit, options.intervals, {"mAP": chance})
    per_class = dict(zip(names.tolist(), precisions.tolist(), strict=True))
    scores |= {"num_clips": num_clips, "per_class": per_class}
    return scores, {"mAP": precisions, "query_id": names, "cluster": clusters}


def class_precisions(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Compute the average precision of each class with at least one clip, from scores (N, C) and labels (N, C)."""
    columns = np.flatnonzero(truth.any(axis=0))
    return np.array([average_precision(scores[:, column], truth[:, column]) for column in columns])
