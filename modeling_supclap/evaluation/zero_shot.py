"""Zero-shot classification: a recording belongs to the class whose text it is closest to [S 4.2.2]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.builders.captions import render_captions
from modeling_supclap.metrics.recall.ranking import chance_scores, retrieval_outcomes

from .. import encoding
from .clip_embeddings import ClipEmbeddings, matrix_of
from .embedded_split import EmbeddedSplit
from .embedding_cache import digest_of
from .receipts import Intervals, score

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
    if not templates or any("{}" not in template for template in templates):
        raise ValueError(f"every template needs a {{}} for the label, got {list(templates)}")
    named = [name.replace("_", " ") for name in classes]
    repeated = sorted({name for name in named if named.count(name) > 1})
    if repeated:
        raise ValueError(f"the label set repeats {repeated}; name each class once")
    if language == "eng":
        return [[template.format(name) for template in templates] for name in named]
    without = [label for label in classes if language not in (phrases or {}).get(label, {})]
    if without:
        raise ValueError(f"the classes {without[:3]} have no phrase in {language!r}; pass phrases[label][language]")
    return [render_captions({**(phrases or {})[label]}, [language])[language] for label in classes]


def prompts_hash(
    classes: Sequence[str],
    template_sets: Mapping[str, Sequence[str]],
    languages: Sequence[str],
    phrases: Phrases | None = None,
) -> str:
    """A name of all class prompts, which outside English follow from tables of phrases and not from the templates.

    Args:
        classes: See `class_texts`, as the others.
        template_sets: English templates by name.
        languages: ISO 639-3 codes.
        phrases: `phrases[label][language]`.
    """
    return digest_of(
        {
            f"{language} {name}": class_texts(classes, templates, language, phrases)
            for language in languages
            for name, templates in sets_of(language, template_sets).items()
        }
    )


def sets_of(language: str, template_sets: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The sets of prompts of a language: other languages than English have one, from the tables of captions."""
    return template_sets if language == "eng" else {"captions": ["{}"]}


def class_means(text_embeds: np.ndarray, num_classes: int) -> np.ndarray:
    """The normalised mean of the embeddings of each class's prompts.

    Args:
        text_embeds: `(num_classes * prompts, d)`, class by class, unit norm.
        num_classes: C.

    Returns:
        `(C, d)`, unit norm.
    """
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
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Classifies the clips of a split with each set of templates, in each language.

    Args:
        split: The embedded split; each clip has exactly one label.
        template_sets: English templates by name; None, `TEMPLATE_SETS["supclap"]`. Other languages have one set,
            "captions".
        languages: ISO 639-3 codes.
        classes: The classes to choose from; None, the labels of the split.
        phrases: See `class_texts`.
        folds: The fold of each clip, by its id, for an accuracy of each.
        intervals: How intervals are drawn.

    Returns:
        The part "zero_shot" of a receipt's scores, and its arrays.

    Raises:
        ValueError: A clip has no label or several, or one that is none of the classes; or as `class_texts`.
    """
    template_sets = template_sets or {"supclap": TEMPLATE_SETS["supclap"]}
    labels = single_labels(split.rows)
    classes = sorted(set(labels)) if classes is None else list(classes)
    unknown = sorted(set(labels) - set(classes))
    if unknown:
        raise ValueError(f"the labels {unknown[:5]} are none of the {len(classes)} classes")
    truth = np.array([classes.index(label) for label in labels])
    scores: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {"zero_shot/classes": np.array(classes)}
    for language in languages:
        scores[language] = {}
        for name, templates in sets_of(language, template_sets).items():
            texts = class_texts(classes, templates, language, phrases)
            class_embeds = class_means(split.texts([text for each in texts for text in each], language), len(classes))
            outcome = _classify(split.clips, class_embeds, truth)
            found = _summary(outcome, truth, classes, split, folds, intervals or Intervals())
            scores[language][name] = found
            prefix = f"zero_shot/{language}/{name}"
            ids = np.array([row["clip_id"] for row in split.rows])
            named = {**outcome, "clip_id": ids, "cluster": split.sources, "truth": truth}
            arrays |= {f"{prefix}/{key}": values for key, values in named.items()}
    return {"zero_shot": scores}, arrays


def single_labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The label of each clip.

    Raises:
        ValueError: A clip has none, or several.
    """
    for row in rows:
        if len(row.get("labels") or ()) != 1:
            raise ValueError(f"clip {row['clip_id']} has the labels {row.get('labels')}; this needs exactly one")
    return [row["labels"][0] for row in rows]


def zero_shot_report(
    model: Any,
    processor: Any,
    audio_embeds: np.ndarray,
    labels: Sequence[str],
    templates: Sequence[str],
    language: str = "eng",
) -> dict[str, Any]:
    """Classification by the nearest class text; a class is the mean of its templates' embeddings.

    Args:
        model: embeds the class texts.
        processor: of the model.
        audio_embeds: unit norm, `(N, d)`.
        labels: the right class of each clip, `N` names; underscores read as blanks.
        templates: such as `"This is a sound of {}"`.
        language: of the templates.

    Returns:
        `top1`, `top5`, their `chance`, accuracy `per_class` and the `confusion` counts (rows: truth) in the order of
        `classes`.

    Raises:
        ValueError: there is no template, or one has no place for the label; there are more or fewer labels than clips.
    """
    if len(labels) != len(audio_embeds):
        raise ValueError(f"got {len(labels)} labels for {len(audio_embeds)} clips; give one each")
    classes = sorted(set(labels))
    texts = [text for each in class_texts(classes, templates) for text in each]
    class_embeds = class_means(encoding.encode_text(model, texts, processor, language=language), len(classes))
    truth = np.array([classes.index(label) for label in labels])
    clips = ClipEmbeddings(audio_embeds, np.ones(len(labels), np.int64), np.zeros(len(labels)))
    outcome = _classify(clips, class_embeds, truth)
    return {
        "top1": float(outcome["top1"].mean()),
        "top5": float(outcome["top5"].mean()),
        "chance": 1 / len(classes),
        "classes": classes,
        "per_class": _per_class(outcome["confusion"], classes),
        "confusion": outcome["confusion"].tolist(),
        "templates": list(templates),
    }


def _classify(clips: ClipEmbeddings, class_embeds: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
    """Whether each clip's class is the nearest or among the five nearest, and what was taken for what."""
    similarity = clips.similarity(class_embeds, "audio")
    outcomes = retrieval_outcomes(similarity, truth[:, None].tolist(), k=(1, 5))
    # A tie counts as wrong, here as in top1: the best of the other classes is then what was answered.
    rivals = matrix_of(similarity).copy()
    rivals[np.arange(len(truth)), truth] = -np.inf
    predicted = np.where(outcomes["rank"] == 0, truth, rivals.argmax(axis=1))
    confusion = np.zeros((len(class_embeds), len(class_embeds)), dtype=np.int64)
    np.add.at(confusion, (truth, predicted), 1)
    return {"top1": outcomes["R@1"], "top5": outcomes["R@5"], "predicted": predicted, "confusion": confusion}


def _per_class(confusion: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """The accuracy of each class that has clips."""
    totals = confusion.sum(axis=1)
    return {name: float(confusion[row, row] / totals[row]) for row, name in enumerate(classes) if totals[row]}


def _summary(
    outcome: Mapping[str, np.ndarray],
    truth: np.ndarray,
    classes: Sequence[str],
    split: EmbeddedSplit,
    folds: Mapping[str, int] | None,
    intervals: Intervals,
) -> dict[str, Any]:
    hits = {name: outcome[name] for name in ("top1", "top5")}
    drawn = intervals.of(hits, split.sources)
    chance = chance_scores(truth[:, None].tolist(), len(classes), k=(1, 5))
    per_class = _per_class(outcome["confusion"], classes)
    found: dict[str, Any] = {
        "top1": score(hits["top1"].mean(), drawn["top1"], chance["R@1"]),
        "top5": score(hits["top5"].mean(), drawn["top5"], chance["R@5"]),
        "mean_per_class": score(float(np.mean(list(per_class.values()))), None, chance["R@1"]),
        "num_clips": len(truth),
        "per_class": per_class,
    }
    if folds is not None:
        own = np.array([folds[row["clip_id"]] for row in split.rows])
        found["per_fold"] = {str(fold): float(hits["top1"][own == fold].mean()) for fold in sorted(set(own.tolist()))}
        found["mean_over_folds"] = score(float(np.mean(list(found["per_fold"].values()))), None, chance["R@1"])
    return found
