"""Scores of the embeddings that the Trainer collects: its `compute_metrics`, and the table at the end of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.schema import without_audio
from modeling_supclap.metrics.mrv import mean_rank_variance
from modeling_supclap.metrics.recall.ranking import LazySimilarity, best_ranks, retrieval_outcomes

from .receipts import Intervals
from .retrieval import DIRECTIONS, CaptionTable, K, caption_table, clips_alike, parallel_captions


def retrieval_metrics_of(dataset: Any, languages: Sequence[str], positives: str) -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` for the Trainer, for one split.

    Args:
        dataset: the split, as `collator.IndexedRows`.
        languages: those that the collator embeds, in its order.
        positives: see `schema.group_id`.

    Returns:
        A function of the Trainer's `EvalPrediction` (predictions: audio and text embeddings; label ids: clip indices)
        to `{"eng_t2a_R@1": ..., ..., "mean_recall": ...}`. `mean_recall` is the mean of R@1, R@5 and R@10 over both
        directions and all languages. With several languages also `MRV`, over the clips with parallel captions.
    """

    def compute_metrics(prediction: Any) -> dict[str, float]:
        audio_embeds, text_embeds = in_row_order(prediction)
        light = without_audio(dataset.rows)
        rows = [light[index] for index in range(len(dataset))]
        report = retrieval_report(audio_embeds, text_embeds, rows, languages, positives)
        flat = {
            f"{language}_{direction}_{name}": value
            for language, scores in report.items()
            for direction in DIRECTIONS
            for name, value in scores[direction].items()
        }
        flat["mean_recall"] = float(np.mean([value for name, value in flat.items() if "_R@" in name]))
        if len(languages) > 1:
            ranks = parallel_ranks(audio_embeds, text_embeds, rows, languages, positives)
            flat |= {"MRV": mean_rank_variance(ranks)} if len(ranks) else {}
        return flat

    return compute_metrics


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


def retrieval_report(
    audio_embeds: np.ndarray,
    text_embeds: np.ndarray,
    rows: Sequence[Mapping[str, Any]],
    languages: Sequence[str],
    positives: str,
    intervals: Intervals | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """The scores of every language.

    Args:
        audio_embeds: `(N, d)`, in the order of `rows`.
        text_embeds: `(N, K, d)`: the captions of each row, as `EvaluationCollator` lays them out.
        rows: the split.
        languages: all that were embedded, in order.
        positives: see `schema.group_id`.
        intervals: how intervals are drawn; None draws none.

    Returns:
        `{"eng": {"t2a": {...}, "a2t": {...}, "t2a_chance": {...}, "a2t_chance": {...}}, ...}`, with intervals also
        `"t2a_interval"` and `"a2t_interval"`: both ends of each score.

    Raises:
        ValueError: no clip has a caption in one of the languages.
    """
    counts = np.array([[len(row["captions"].get(language) or ()) for language in languages] for row in rows])
    firsts = np.cumsum(counts, axis=1) - counts
    report = {}
    for place, language in enumerate(languages):
        table = caption_table(rows, language, positives)
        texts = text_embeds[table.text_rows, firsts[table.text_rows, place] + table.text_numbers]
        clips = audio_embeds[table.clips]
        pairs = {"t2a": (texts, clips), "a2t": (clips, texts)}
        similarity = {way: LazySimilarity(*pair) for way, pair in pairs.items()}
        report[language] = table.scores(similarity)
        if intervals is not None:
            report[language] |= _intervals(table, similarity, rows, positives, intervals)
    return report


def _intervals(
    table: CaptionTable,
    similarity: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    positives: str,
    intervals: Intervals,
) -> dict[str, dict[str, Any]]:
    clusters = table.clusters(np.array([str(row.get("source") or row["clip_id"]) for row in rows]), positives)
    drawn = {}
    for way in DIRECTIONS:
        outcomes = retrieval_outcomes(similarity[way], table.relevant(way), k=K)
        del outcomes["rank"]
        drawn[f"{way}_interval"] = intervals.of(outcomes, clusters[way])
    return drawn


def parallel_ranks(
    audio_embeds: np.ndarray,
    text_embeds: np.ndarray,
    rows: Sequence[Mapping[str, Any]],
    languages: Sequence[str],
    positives: str,
) -> np.ndarray:
    """The rank of its clip for each caption that exists in all languages, text to audio; what MRV compares.

    Args:
        audio_embeds: `(N, d)`, in the order of `rows`.
        text_embeds: `(N, K, d)`, as `EvaluationCollator` lays them out.
        rows: the split.
        languages: all that were embedded, in order.
        positives: see `schema.group_id`.

    Returns:
        0-based ranks `(queries, languages)`, int64; no row where no clip has captions in all of them.
    """
    clips, numbers = parallel_captions(rows, languages)
    if not len(clips):
        return np.empty((0, len(languages)), dtype=np.int64)
    counts = np.array([[len(row["captions"].get(language) or ()) for language in languages] for row in rows])
    firsts = (np.cumsum(counts, axis=1) - counts)[clips]
    relevant = clips_alike(rows, clips, positives)
    columns = [
        best_ranks(LazySimilarity(text_embeds[clips, firsts[:, place] + numbers], audio_embeds), relevant)
        for place in range(len(languages))
    ]
    return np.stack(columns, axis=1)


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


def format_report(report: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A retrieval report as a table in percent, with the chance level under each direction."""
    names = [f"R@{k}" for k in K] + ["mAP@10"]
    lines = [f"{'language':<10}{'direction':<15}" + "".join(f"{name:>9}" for name in names)]
    for language, scores in report.items():
        for key, title in (("t2a", "text to audio"), ("a2t", "audio to text")):
            for label, values in ((title, scores[key]), ("  chance", scores[f"{key}_chance"])):
                lines.append(f"{language:<10}{label:<15}" + "".join(f"{100 * values[name]:>9.1f}" for name in names))
    return "\n".join(lines)
