"""Zero-shot classification: predict the class whose prompt has the highest cosine (SupCLAP section 4.2.2)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.builders.captions import render_captions
from modeling_supclap.metrics.recall.ranking import chance_scores, retrieval_outcomes

from .cache import digest_of
from .embed import EmbeddedSplit, Row
from .results import Intervals, score

TEMPLATE_SETS: dict[str, list[str]] = {
    "supclap": ["This is a sound of {}"],
    "teminal": ["The sound of {}"],
    "label": ["{}"],
    "ensemble": ["This is a sound of {}", "The sound of {}", "A recording of {}", "I can hear {}", "{}"],
}
"""Class prompt templates by name: two from the papers, the label alone, and an ensemble (averaged embeddings)."""

Phrases = Mapping[str, Mapping[str, str]]


def class_texts(
    classes: Sequence[str], templates: Sequence[str], language: str = "eng", phrases: Phrases | None = None
) -> list[list[str]]:
    """Build the prompts of each class.

    Args:
        classes: Class names; underscores are replaced by spaces.
        templates: English templates, such as `"This is a sound of {}"`. Other languages use the sentences in
            `datasets_scripts/phrases/templates.json`.
        language: ISO 639-3 code.
        phrases: Class phrases for languages other than English, as `phrases[label][language]`.

    Returns:
        One list of prompts per class, all of the same length.

    Raises:
        ValueError: `templates` is empty, a template contains no `{}`, two class names are equal, or a class has no
            phrase in `language`.
    """
    if not templates or not all("{}" in template for template in templates):
        raise ValueError(f"every template needs a {{}} for the label, got {list(templates)}")

    texts: dict[str, list[str]] = {}
    missing = []
    for label in classes:
        name, translations = label.replace("_", " "), (phrases or {}).get(label, {})
        if name in texts:
            raise ValueError(f"the classes contain {name!r} twice; list each class once")
        if language == "eng":
            texts[name] = [template.format(name) for template in templates]
        elif language in translations:
            texts[name] = render_captions({**translations}, [language])[language]
        else:
            texts[name] = []
            missing.append(label)
    if missing:
        raise ValueError(f"the classes {missing[:3]} have no phrase in {language!r}; pass phrases[label][language]")
    return list(texts.values())


def class_means(text_embeds: np.ndarray, num_classes: int) -> np.ndarray:
    """Average the prompt embeddings of each class and normalise the means.

    Args:
        text_embeds: Prompt embeddings with unit norm, sorted by class, (num_classes * prompts, d).
        num_classes: Number of classes C.

    Returns:
        Class embeddings with unit norm, (C, d).
    """
    # (C * prompts, d) -> (C, prompts, d) -> (C, d)
    means = text_embeds.reshape(num_classes, -1, text_embeds.shape[1]).astype(np.float64).mean(axis=1)
    return (means / np.linalg.norm(means, axis=1, keepdims=True)).astype(np.float32)


def evaluate_zero_shot(
    split: EmbeddedSplit,
    template_sets: Mapping[str, Sequence[str]] | None = None,
    languages: Sequence[str] = ("eng",),
    classes: Sequence[str] | None = None,
    phrases: Phrases | None = None,
    folds: Mapping[str, int] | None = None,
    intervals: Intervals | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Classify the clips of a split with each template set in each language.

    A tie between the correct class and another class counts as wrong.

    Args:
        split: Embedded split; each clip must have exactly one label.
        template_sets: Dict from set name to English templates; None uses `TEMPLATE_SETS["supclap"]`. Other languages
            always use a single set named "captions".
        languages: ISO 639-3 codes.
        classes: Candidate classes; None uses the labels of the split.
        phrases: Class phrases for languages other than English, as `phrases[label][language]`.
        folds: Dict from clip id to cross-validation fold; adds the accuracy per fold and the mean over folds.
        intervals: Confidence interval options; None uses the defaults.

    Returns:
        Tuple of the scores `{"zero_shot": ...}`, the arrays for `Results`, and the prompt settings to store in the
        results.

    Raises:
        ValueError: A clip does not have exactly one label, a label is not in `classes`, or `class_texts` fails.
    """
    template_sets = template_sets or {"supclap": TEMPLATE_SETS["supclap"]}
    intervals = intervals or Intervals()
    labels = single_labels(split.rows)
    names = sorted(set(labels)) if classes is None else list(classes)
    unknown = sorted(set(labels) - set(names))
    if unknown:
        raise ValueError(f"the labels {unknown[:5]} are not among the {len(names)} classes")
    truth = np.array(list(map(names.index, labels)))

    scores: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {"zero_shot/classes": np.array(names)}
    prompts: dict[str, list[list[str]]] = {}
    for language in languages:
        scores[language] = {}
        # Other languages have a single prompt set, built from the caption templates.
        sets = template_sets if language == "eng" else {"captions": ["{}"]}
        for name, templates in sets.items():
            texts = prompts[f"{language} {name}"] = class_texts(names, templates, language, phrases)
            embeds = class_means(split.texts(list(itertools.chain(*texts)), language), len(names))
            outcomes = _classify(split, embeds, truth)
            scores[language][name] = _summarize(split, outcomes, truth, names, folds, intervals)
            query_arrays = {**outcomes, "query_id": split.ids, "cluster": split.sources, "truth": truth}
            for key, values in query_arrays.items():
                arrays[f"zero_shot/{language}/{name}/{key}"] = values

    protocol = {
        "templates": dict(template_sets),
        "languages": list(languages),
        "classes": None if classes is None else list(classes),
        # Hash the prompts, because `templates` does not include the phrases of other languages.
        "prompts_hash": digest_of(prompts),
    }
    return {"zero_shot": scores}, arrays, protocol


def single_labels(rows: Sequence[Row]) -> list[str]:
    """Return the single label of each row, in row order.

    Raises:
        ValueError: A clip does not have exactly one label.
    """
    labels = []
    for row in rows:
        if len(row.get("labels") or ()) != 1:
            raise ValueError(
                f"clip {row['clip_id']} has the labels {row.get('labels')}; zero-shot classification and ZSTE need "
                "exactly one label per clip"
            )
        labels += row["labels"]
    return labels


def _classify(split: EmbeddedSplit, class_embeds: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """Compute top-1 and top-5 hits, the predicted class of each clip, and the confusion matrix."""
    cosines = split.clips.similarity(class_embeds, "a2t")[:]
    outcomes = retrieval_outcomes(cosines, truth[:, None], k=(1, 5))

    # A tie counts as wrong, as in top1: the predicted class is then the best of the other classes.
    rivals = cosines.copy()
    rivals[np.arange(len(truth)), truth] = -np.inf
    predicted = np.where(outcomes["rank"] == 0, truth, rivals.argmax(axis=1))
    confusion = np.zeros((len(class_embeds), len(class_embeds)), dtype=np.int64)
    np.add.at(confusion, (truth, predicted), 1)
    return {"top1": outcomes["R@1"], "top5": outcomes["R@5"], "predicted": predicted, "confusion": confusion}


def _summarize(
    split: EmbeddedSplit,
    outcomes: Mapping[str, np.ndarray],
    truth: np.ndarray,
    classes: Sequence[str],
    folds: Mapping[str, int] | None,
    intervals: Intervals,
) -> dict[str, Any]:
    """Compute the scores for one prompt set: over all clips, per class and per fold."""
    hits = {"top1": outcomes["top1"], "top5": outcomes["top5"]}
    interval_of = intervals.draw(hits, split.sources)
    chance = chance_scores(truth[:, None], len(classes), k=(1, 5))
    per_class = {}
    for index in np.unique(truth).tolist():
        per_class[classes[index]] = float(hits["top1"][truth == index].mean())

    scores: dict[str, Any] = {
        "top1": score(hits["top1"].mean(), interval_of["top1"], chance["R@1"]),
        "top5": score(hits["top5"].mean(), interval_of["top5"], chance["R@5"]),
        "mean_per_class": score(float(np.mean(list(per_class.values()))), None, chance["R@1"]),
        "num_clips": len(truth),
        "per_class": per_class,
    }
    if folds is not None:
        clip_folds = np.array(list(map(folds.__getitem__, split.ids.tolist())))
        scores["per_fold"] = {}
        for fold in np.unique(clip_folds).tolist():
            scores["per_fold"][str(fold)] = float(hits["top1"][clip_folds == fold].mean())
        scores["mean_over_folds"] = score(float(np.mean(list(scores["per_fold"].values()))), None, chance["R@1"])
    return scores
