"""Probes: logistic regression on frozen audio embeddings, with scikit-learn.

A probe never trains on a recording that it classifies. A fifth of the training recordings is held out to choose C, the
inverse of the regularisation strength. If clips have several labels, one binary classifier per class is trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from modeling_supclap.metrics.comparison import summarize

from .cache import Arrays
from .embed import EmbeddedSplit, hash_dataset
from .options import EvaluationOptions
from .results import CLASS_METRICS, Intervals, Scores, TaskResult, score_outcomes, under
from .zero_shot import class_precisions, get_unit, label_matrix, score_classes

STRENGTHS = (1.0, 10.0, 100.0, 1000.0)  # candidates for C
HELD_OUT = 0.2
REPEATS = 5  # draws of a few-shot probe


class Part(NamedTuple):
    """Training clips and test clips of one fold."""

    embeds: np.ndarray  # embeddings of the T clips of the training split, (T, d)
    truth: np.ndarray  # labels of these clips, (T, C), bool
    fitted: np.ndarray  # indices of the clips to train on, among the T clips
    held: np.ndarray  # indices of the clips held out to choose C, among the T clips
    tested: np.ndarray  # indices of the clips to classify, in the evaluated split
    tested_embeds: np.ndarray  # embeddings of the clips to classify
    is_single: bool  # whether all clips have one label


def evaluate_linear_probe(split: EmbeddedSplit, options: EvaluationOptions) -> TaskResult:
    """Train a linear probe on the training clips, and classify the clips of a split.

    The regularisation parameter C is chosen on held-out training clips. The probe is then trained on all
    training clips.

    Returns:
        Tuple of the scores `{"linear_probe": ...}`, the arrays for `Results`, and the settings to store with them.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: There are no training clips or fewer than two classes, or a clip has no label.
    """
    truth, classes, parts, settings = prepare_parts(split, options)
    similarity, chosen = np.zeros(truth.shape), []
    for part in parts:
        chosen.append(_fit_best(part, part.fitted)[0])
        clips = np.concatenate([part.fitted, part.held])
        similarity[part.tested] = _classify(part, clips, part.tested_embeds, chosen[-1])
    scores, outcomes = score_classes(similarity, truth, classes, split, options)
    arrays = under("linear_probe/logistic_regression", outcomes)
    return {"linear_probe": {"logistic_regression": {**scores, "C": chosen}}}, arrays, {"linear_probe": settings}


def evaluate_few_shot(split: EmbeddedSplit, options: EvaluationOptions) -> TaskResult:
    """Train a linear probe on k clips per class, for each k in `options.shots`, and average over five random draws.

    Intervals combine the variance over the draws and over the test recordings. If a class has fewer than k clips, all
    of them are drawn, with a UserWarning. Return the same types of values and raise the same errors as
    `evaluate_linear_probe`.
    """
    truth, classes, parts, settings = prepare_parts(split, options)
    scores: Scores = {}
    arrays: Arrays = {}
    for shots in options.shots:
        runs = []
        for repeat in range(REPEATS):
            rng, similarity = (np.random.default_rng((options.intervals.seed, shots, repeat)), np.zeros(truth.shape))
            for part in parts:
                drawn = part.fitted[draw_shots(part.truth[part.fitted], classes, shots, rng)]
                similarity[part.tested] = _fit_best(part, drawn)[1]
            runs.append(score_classes(similarity, truth, classes, split, replace(options, intervals=Intervals(0))))

        (first, queries), key = runs[0], f"{shots}_per_class"
        outcomes: Arrays = {}
        chance: dict[str, float] = {}
        for name in filter(queries.__contains__, CLASS_METRICS):
            outcomes[name] = np.mean([of_queries[name] for _, of_queries in runs], axis=0)
            chance[name] = first[name]["chance"]
        unit = get_unit(outcomes, split)
        scores[key] = score_outcomes(outcomes, queries["cluster"], unit, options.intervals, chance)
        for name, fields in scores[key].items():
            values = [run[0][name]["value"] for run in runs]
            fields["value"] = float(np.mean(values))
            if fields["low"] is not None:
                ends = fields["low"], fields["high"]
                cell = summarize(values, ends, options.intervals.confidence, is_share=True)
                fields |= {"low": cell.low, "high": cell.high}
        scores[key]["num_clips"] = len(truth)
        outcomes |= {"query_id": queries["query_id"], "cluster": queries["cluster"]}
        arrays |= under(f"few_shot/{key}", outcomes)
    return {"few_shot": scores}, arrays, {"few_shot": {**settings, "shots": list(options.shots), "repeats": REPEATS}}


def draw_shots(truth: np.ndarray, classes: Sequence[str], shots: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `shots` clips of each class from labels (N, C), and return their indices. Skip classes without clips."""
    drawn = []
    for column in np.flatnonzero(truth.any(axis=0)).tolist():
        members = np.flatnonzero(truth[:, column])
        if len(members) < shots:
            warnings.warn(
                f"class {classes[column]!r} has {len(members)} training clips that are not held out, not {shots}; all "
                "are drawn, set smaller --shots for equal numbers",
                stacklevel=2,
            )
        drawn.append(rng.permutation(members)[:shots])
    return np.unique(np.concatenate(drawn))


def prepare_parts(
    split: EmbeddedSplit, options: EvaluationOptions
) -> tuple[np.ndarray, list[str], list[Part], dict[str, Any]]:
    """Return the labels (N, C) of the split, the class names, one `Part` per fold, and the probe settings."""
    try:
        from sklearn.model_selection import GroupShuffleSplit
    except ImportError as error:
        raise ImportError('probes need scikit-learn: pip install "supclap[report]"') from error

    train = split if options.folds is not None else split.train
    if train is None:
        raise ValueError("there are no training clips; pass train_rows (--train_split train), or all folds (--folds)")
    truth, classes = label_matrix([*split.rows, *train.rows], options.classes)
    is_single = bool((truth.sum(axis=1) == 1).all())
    truth, train_truth = truth[: len(split.rows)], truth[len(split.rows) :]

    splitter = GroupShuffleSplit(1, test_size=HELD_OUT, random_state=options.intervals.seed)
    folds = np.array([(options.folds or {}).get(clip_id, 0) for clip_id in split.ids.tolist()])
    parts = []
    for fold in np.unique(folds):
        tested = np.flatnonzero(folds == fold)
        allowed = np.flatnonzero(~np.isin(train.sources, split.sources[tested]))
        if len(set(train.sources[allowed].tolist())) < 2 or train_truth[allowed].any(axis=0).sum() < 2:
            raise ValueError(
                f"{len(allowed)} training clips come from other recordings than the {len(tested)} clips to classify; a "
                "probe needs clips of two or more recordings and classes: set another --train_split, or all --folds"
            )
        ((fitted, held),) = splitter.split(allowed, groups=train.sources[allowed])
        indices = allowed[fitted], allowed[held], tested
        parts.append(Part(train.clips.mean, train_truth, *indices, split.clips.mean[tested], is_single))

    train_hash = None if train is split else hash_dataset(train.rows, train.files)
    return (truth, classes, parts, {"strengths": list(STRENGTHS), "held_out": HELD_OUT, "train_hash": train_hash})


def _classify(part: Part, clips: np.ndarray, embeds: np.ndarray, strength: float) -> np.ndarray:
    """Train on the given clips with C = `strength`, and return the scores of N embeddings, (N, C)."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=1000)
    truth, scores = part.truth[clips], np.zeros((len(embeds), part.truth.shape[1]))
    # the other classes cannot be learned
    columns = np.flatnonzero(truth.any(axis=0) & ~truth.all(axis=0))
    if part.is_single and len(columns):
        model.fit(part.embeds[clips], truth.argmax(axis=1))
        scores[:, model.classes_] = model.predict_proba(embeds)
        return scores
    for column in columns:
        scores[:, column] = model.fit(part.embeds[clips], truth[:, column]).decision_function(embeds)
    return scores


def _fit_best(part: Part, clips: np.ndarray) -> tuple[float, np.ndarray]:
    """Choose the C with the highest mAP on the held-out clips (on a tie, the smallest).

    Return this C and the class scores of the clips to classify.
    """
    results, truth = [], part.truth[part.held]
    embeds = np.concatenate([part.embeds[part.held], part.tested_embeds])
    for strength in STRENGTHS:
        held_scores, test_scores = np.split(_classify(part, clips, embeds, strength), [len(truth)])
        results.append((class_precisions(held_scores, truth).mean(), strength, test_scores))
    return max(results, key=lambda result: result[0])[1:]
