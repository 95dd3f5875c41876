"""Embeddings to similarity to scores to results.json. Formulas of the scores live in `metrics/`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metrics.mrv import mean_rank_variance
from metrics.recall.ranking import LazySimilarity, best_ranks, chance_scores, retrieval_scores

from .collator import all_captions, group_id
from .modeling_supclap import SupCLAPModel
from .processing_supclap import SupCLAPProcessor

K = (1, 5, 10)


@dataclass
class RetrievalSet:
    """Clips and captions of one language, embedded, and who answers whom.

    Captions that equal clips share are kept once, so that no answer is counted twice.

    Args:
        audio_embeds: unit norm, `(N, d)`.
        text_embeds: unit norm, `(M, d)`.
        clip_groups: `(N,)`; a caption and a clip belong together when their groups are equal.
        text_groups: `(M,)`.
    """

    audio_embeds: np.ndarray
    text_embeds: np.ndarray
    clip_groups: np.ndarray
    text_groups: np.ndarray

    def scores(self) -> dict[str, dict[str, float]]:
        """Recall and mAP of both directions, each beside what a random order would reach.

        Returns:
            `{"t2a": {"R@1": ..., ...}, "a2t": {...}, "t2a_chance": {...}, "a2t_chance": {...}}`, as fractions.
        """
        audio, text = (self.audio_embeds, self.clip_groups), (self.text_embeds, self.text_groups)
        scores = {}
        for name, (queries, asked), (candidates, offered) in (("t2a", text, audio), ("a2t", audio, text)):
            relevant = [np.flatnonzero(offered == group).tolist() for group in asked]
            scores[name] = retrieval_scores(LazySimilarity(queries, candidates), relevant, k=K)
            scores[f"{name}_chance"] = chance_scores(relevant, len(candidates), k=K)
        return scores


def retrieval_set(
    audio_embeds: np.ndarray,
    text_embeds: np.ndarray,
    rows: Sequence[Mapping[str, Any]],
    language: str,
    languages: Sequence[str],
    positives: str,
) -> RetrievalSet:
    """Picks one language out of the embeddings of a split.

    Args:
        audio_embeds: `(N, d)`, in the order of `rows`.
        text_embeds: `(N, K, d)`: the captions of each row, as `EvaluationCollator` lays them out.
        rows: the split.
        language: the language of the queries and candidates.
        languages: all that were embedded, in order.
        positives: see `collator.group_id`.

    Returns:
        The clips that have a caption in the language, and those captions.

    Raises:
        ValueError: no clip has a caption in this language.
    """
    clips: list[int] = []
    seen: dict[tuple[int, str], np.ndarray] = {}
    groups: list[int] = []
    for index, row in enumerate(rows):
        captions = all_captions(row, languages)
        places = [place for place, (spoken, _) in enumerate(captions) if spoken == language]
        if places:
            clips.append(index)
            groups.append(group_id(row, positives))
        for place in places:
            seen.setdefault((groups[-1], captions[place][1]), text_embeds[index, place])
    if not clips:
        raise ValueError(f"no clip of this split has a caption in {language!r}")
    return RetrievalSet(
        audio_embeds=audio_embeds[clips],
        text_embeds=np.stack(list(seen.values())),
        clip_groups=np.array(groups),
        text_groups=np.array([group for group, _ in seen]),
    )


def retrieval_report(
    audio_embeds: np.ndarray,
    text_embeds: np.ndarray,
    rows: Sequence[Mapping[str, Any]],
    languages: Sequence[str],
    positives: str,
) -> dict[str, dict[str, dict[str, float]]]:
    """The scores of every language: `{"eng": {"t2a": {...}, "a2t": {...}, ...}, ...}`; arguments as `retrieval_set`."""
    return {
        language: retrieval_set(audio_embeds, text_embeds, rows, language, languages, positives).scores()
        for language in languages
    }


def parallel_ranks(
    audio_embeds: np.ndarray,
    text_embeds: np.ndarray,
    rows: Sequence[Mapping[str, Any]],
    languages: Sequence[str],
    positives: str,
) -> np.ndarray:
    """The rank of its clip for each caption that exists in all languages, text to audio; what MRV compares.

    Captions with the same place in two languages are taken for translations of each other.

    Args:
        audio_embeds: `(N, d)`, in the order of `rows`.
        text_embeds: `(N, K, d)`, as `EvaluationCollator` lays them out.
        rows: the split.
        languages: all that were embedded, in order.
        positives: see `collator.group_id`.

    Returns:
        0-based ranks `(queries, languages)`, int64; no row where no clip has captions in all of them.
    """
    clips, places = [], []
    for index, row in enumerate(rows):
        counts = [len(row["captions"].get(language) or ()) for language in languages]
        starts = np.cumsum([0, *counts[:-1]])
        for number in range(min(counts)):
            clips.append(index)
            places.append(starts + number)
    if not clips:
        return np.empty((0, len(languages)), dtype=np.int64)
    groups = np.array([group_id(row, positives) for row in rows])
    relevant = [np.flatnonzero(groups == groups[clip]).tolist() for clip in clips]
    texts = text_embeds[np.array(clips)[:, None], np.array(places)]
    return np.stack([best_ranks(LazySimilarity(texts[:, k], audio_embeds), relevant) for k in range(len(languages))], 1)


def retrieval_metrics_of(dataset: Any, languages: Sequence[str], positives: str) -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` for the Trainer, for one split.

    Args:
        dataset: the split, as `collator.IndexedRows`.
        languages: those that the collator embeds, in its order.
        positives: see `collator.group_id`.

    Returns:
        A function of the Trainer's `EvalPrediction` (predictions: audio and text embeddings; label ids: clip indices)
        to `{"eng_t2a_R@1": ..., ..., "mean_recall": ...}`. `mean_recall` is the mean of R@1, R@5 and R@10 over both
        directions and all languages. With several languages also `MRV`, over the clips with parallel captions.
    """

    def compute_metrics(prediction: Any) -> dict[str, float]:
        audio_embeds, text_embeds = in_row_order(prediction)
        rows = [dataset.rows[index] for index in range(len(dataset))]
        report = retrieval_report(audio_embeds, text_embeds, rows, languages, positives)
        flat = {
            f"{language}_{direction}_{name}": value
            for language, scores in report.items()
            for direction in ("t2a", "a2t")
            for name, value in scores[direction].items()
        }
        flat["mean_recall"] = float(np.mean([value for name, value in flat.items() if "_R@" in name]))
        if len(languages) > 1:
            ranks = parallel_ranks(audio_embeds, text_embeds, rows, languages, positives)
            flat |= {"MRV": mean_rank_variance(ranks)} if len(ranks) else {}
        return flat

    return compute_metrics


def temporal_metrics(prediction: Any) -> dict[str, float]:
    """Which of a pair's captions is an item's own? Chance is one in as many as the pair has items.

    Args:
        prediction: the Trainer's: audio `(N, R, d)` and text `(N, R, d)` embeddings of N pairs in R roles.

    Returns:
        `temporal_accuracy`, and the accuracy of each role; a tie with a wrong caption is wrong.
    """
    audio_embeds, text_embeds = in_row_order(prediction)
    similarity = np.einsum("nrd,nsd->nrs", audio_embeds, text_embeds)
    own = np.einsum("nrr->nr", similarity)
    right = (similarity >= own[:, :, None]).sum(axis=2) == 1
    roles = ("single", "combined") if right.shape[1] == 2 else ("forward", "reversed", "overlaid")
    by_role = {f"{role}_accuracy": float(share) for role, share in zip(roles, right.mean(axis=0), strict=True)}
    return {"temporal_accuracy": float(right.mean()), **by_role}


def in_row_order(prediction: Any) -> tuple[np.ndarray, np.ndarray]:
    """Undoes the order in which several processes saw a split.

    Args:
        prediction: the Trainer's `EvalPrediction` or `PredictionOutput`.

    Returns:
        Audio `(N, d)` and text `(N, K, d)` embeddings in the order of the rows.

    Raises:
        ValueError: a clip is missing or came twice.
    """
    order = np.argsort(prediction.label_ids)
    if not np.array_equal(prediction.label_ids[order], np.arange(len(order))):
        raise ValueError(f"expected each of {len(order)} clips once, got indices {prediction.label_ids[order]}")
    audio_embeds, text_embeds = prediction.predictions
    return audio_embeds[order], text_embeds[order]


def zero_shot_report(
    model: SupCLAPModel,
    processor: SupCLAPProcessor,
    audio_embeds: np.ndarray,
    labels: Sequence[str],
    templates: Sequence[str],
    language: str = "eng",
) -> dict[str, Any]:
    """Classification by the nearest class text; a class is the mean of its templates' embeddings [S 4.2.2].

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
        ValueError: there is no template, or one has no place for the label.
    """
    if not templates or any("{}" not in template for template in templates):
        raise ValueError(f"every template needs a {{}} for the label, got {list(templates)}")
    classes = sorted(set(labels))
    texts = [template.format(name.replace("_", " ")) for name in classes for template in templates]
    inputs = processor(text=texts, language=language, return_tensors="pt").to(model.device)
    model.eval()
    with torch.no_grad():
        text_embeds = model.get_text_features(**inputs).pooler_output.float()
    class_embeds = torch.nn.functional.normalize(text_embeds.unflatten(0, (len(classes), -1)).mean(1), dim=-1)
    class_vectors = class_embeds.cpu().numpy()
    truth = np.array([classes.index(label) for label in labels])
    scores = retrieval_scores(LazySimilarity(audio_embeds, class_vectors), truth[:, None].tolist(), k=(1, 5))
    confusion = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(confusion, (truth, (audio_embeds @ class_vectors.T).argmax(1)), 1)
    return {
        "top1": scores["R@1"],
        "top5": scores["R@5"],
        "chance": 1 / len(classes),
        "classes": classes,
        "per_class": dict(zip(classes, (confusion.diagonal() / confusion.sum(1)).tolist(), strict=True)),
        "confusion": confusion.tolist(),
        "templates": list(templates),
    }


def format_report(report: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A retrieval report as a table in percent, with the chance level under each direction."""
    names = [f"R@{k}" for k in K] + ["mAP@10"]
    lines = [f"{'language':<10}{'direction':<15}" + "".join(f"{name:>9}" for name in names)]
    for language, scores in report.items():
        for key, title in (("t2a", "text to audio"), ("a2t", "audio to text")):
            for label, values in ((title, scores[key]), ("  chance", scores[f"{key}_chance"])):
                lines.append(f"{language:<10}{label:<15}" + "".join(f"{100 * values[name]:>9.1f}" for name in names))
    return "\n".join(lines)


def write_results(path: str | Path, results: Mapping[str, Any]) -> None:
    """Writes `results.json` whole or not at all, with the versions of what made it."""
    packages = ("torch", "torchaudio", "transformers", "datasets", "accelerate", "supclap")
    content = {**results, "versions": {name: version(name) for name in packages}}
    target = Path(path)
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, target)
