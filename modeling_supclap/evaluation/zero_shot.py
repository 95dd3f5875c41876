"""Zero-shot classification: a recording belongs to the class whose text it is closest to [S 4.2.2]."""

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
"""Class prompts by name: the papers' own, the bare name, and several whose embeddings are averaged."""

Phrases = Mapping[str, Mapping[str, str]]


def class_texts(
    classes: Sequence[str], templates: Sequence[str], language: str = "eng", phrases: Phrases | None = None
) -> list[list[str]]:
    """The prompts of each class.

    Args:
        classes: Names; underscores read as blanks.
        templates: Such as `"This is a sound of {}"`, for English. Other languages take the sentences of
            `datasets_scripts/phrases/templates.json` around the class's phrase, which needs no inflection there.
        language: ISO 639-3 code.
        phrases: `phrases[label][language]`, for other languages than English.

    Returns:
        One list a class, all of one length.

    Raises:
        ValueError: There is no template or one has no place for the label, a class repeats or two read the same, or a
            class has no phrase in the language.
    """
    if not templates or not all("{}" in template for template in templates):
        raise ValueError(f"every template needs a {{}} for the label, got {list(templates)}")

    texts: dict[str, list[str]] = {}
    without = []
    for label in classes:
        name, spoken = label.replace("_", " "), (phrases or {}).get(label, {})
        if name in texts:
            raise ValueError(f"the label set repeats {[name]}; name each class once")
        if language == "eng":
            texts[name] = [template.format(name) for template in templates]
        elif language in spoken:
            texts[name] = render_captions({**spoken}, [language])[language]
        else:
            texts[name] = []
            without.append(label)
    if without:
        raise ValueError(f"the classes {without[:3]} have no phrase in {language!r}; pass phrases[label][language]")
    return list(texts.values())


def class_means(text_embeds: np.ndarray, num_classes: int) -> np.ndarray:
    """The normalised mean of the embeddings of each class's prompts.

    Args:
        text_embeds: (num_classes * prompts, d), class by class, unit norm.
        num_classes: C.

    Returns:
        (C, d), unit norm.
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
    """Classifies the clips of a split with each set of templates, in each language.

    Args:
        split: The embedded split; each clip has exactly one label.
        template_sets: English templates by name; None, `TEMPLATE_SETS["supclap"]`. Other languages have one set,
            "captions".
        languages: ISO 639-3 codes.
        classes: What to choose from; None, the labels of the split.
        phrases: `phrases[label][language]`, for other languages than English.
        folds: The fold of each clip by its id; adds the accuracy of each fold, and their mean.
        intervals: How intervals are drawn.

    Returns:
        The scores "zero_shot", the arrays of `Results`, and what the protocol says of the prompts. A clip whose class
        ties with another is wrong.

    Raises:
        ValueError: A clip has no label or several, or one that is none of the classes; or as `class_texts`.
    """
    template_sets = template_sets or {"supclap": TEMPLATE_SETS["supclap"]}
    intervals = intervals or Intervals()
    labels = single_labels(split.rows)
    names = sorted(set(labels)) if classes is None else list(classes)
    unknown = sorted(set(labels) - set(names))
    if unknown:
        raise ValueError(f"the labels {unknown[:5]} are none of the {len(names)} classes")
    truth = np.array(list(map(names.index, labels)))

    scores: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {"zero_shot/classes": np.array(names)}
    prompts: dict[str, list[list[str]]] = {}
    for language in languages:
        scores[language] = {}
        # Other languages than English have one set of prompts, from the tables of captions.
        sets = template_sets if language == "eng" else {"captions": ["{}"]}
        for name, templates in sets.items():
            texts = prompts[f"{language} {name}"] = class_texts(names, templates, language, phrases)
            embeds = class_means(split.texts(list(itertools.chain(*texts)), language), len(names))
            outcomes = _classify(split, embeds, truth)
            scores[language][name] = _summarize(split, outcomes, truth, names, folds, intervals)
            kept = {**outcomes, "query_id": split.ids, "cluster": split.sources, "truth": truth}
            for key, values in kept.items():
                arrays[f"zero_shot/{language}/{name}/{key}"] = values

    protocol = {
        "templates": dict(template_sets),
        "languages": list(languages),
        "classes": None if classes is None else list(classes),
        # Outside English prompts follow from tables of phrases and not from the templates.
        "prompts_hash": digest_of(prompts),
    }
    return {"zero_shot": scores}, arrays, protocol


def single_labels(rows: Sequence[Row]) -> list[str]:
    """The label of each clip.

    Raises:
        ValueError: A clip has none, or several.
    """
    labels = []
    for row in rows:
        if len(row.get("labels") or ()) != 1:
            raise ValueError(
                f"zero-shot classification needs one label of each clip; {row['clip_id']} has {row.get('labels')}"
            )
        labels += row["labels"]
    return labels


def _classify(split: EmbeddedSplit, class_embeds: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """Whether each clip's class is the nearest or among the five nearest, and what was taken for what."""
    cosines = split.clips.similarity(class_embeds, "a2t")[:]
    outcomes = retrieval_outcomes(cosines, truth[:, None], k=(1, 5))

    # A tie counts as wrong, here as in top1: the best of the other classes is then what was answered.
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
    """The scores of one set of prompts: over all clips, class by class, and fold by fold."""
    hits = {"top1": outcomes["top1"], "top5": outcomes["top5"]}
    drawn = intervals.draw(hits, split.sources)
    chance = chance_scores(truth[:, None], len(classes), k=(1, 5))
    per_class = {}
    for place in np.unique(truth).tolist():
        per_class[classes[place]] = float(hits["top1"][truth == place].mean())

    found: dict[str, Any] = {
        "top1": score(hits["top1"].mean(), drawn["top1"], chance["R@1"]),
        "top5": score(hits["top5"].mean(), drawn["top5"], chance["R@5"]),
        "mean_per_class": score(float(np.mean(list(per_class.values()))), None, chance["R@1"]),
        "num_clips": len(truth),
        "per_class": per_class,
    }
    if folds is not None:
        own = np.array(list(map(folds.__getitem__, split.ids.tolist())))
        found["per_fold"] = {}
        for fold in np.unique(own).tolist():
            found["per_fold"][str(fold)] = float(hits["top1"][own == fold].mean())
        found["mean_over_folds"] = score(float(np.mean(list(found["per_fold"].values()))), None, chance["R@1"])
    return found
