"""Convert the scores in `results.json` to model card tables and to the Hub's model index."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult

from modeling_supclap.metrics.bootstrap import list_units
from modeling_supclap.metrics.names import RETRIEVAL_METRICS

from ..evaluation.results import AUDIO_TASKS, DIRECTIONS, SCHEMA, SECTIONS, Score, flat_scores, get_dataset_name
from ..evaluation.tables import Table


@dataclass(frozen=True)
class CardScore:
    """Score in a model card."""

    task: str  # such as "text to audio"
    metric: str  # such as "R@1"
    score: Score
    dataset: str = ""
    split: str = "test"
    language: str = ""
    confidence: float | None = None  # confidence level of the interval of `score`

    def as_eval_result(self) -> EvalResult:
        """Convert the score to an `EvalResult` for the Hub's model index."""
        is_retrieval = self.metric in RETRIEVAL_METRICS
        is_probe = "probe" in self.task
        hub_task = "audio-classification" if is_probe else "zero-shot-audio-classification"
        if is_retrieval:
            hub_task = "audio-retrieval" if self.task.startswith("audio to audio") else "audio-text-retrieval"
        name = "retrieval" if is_retrieval else self.task if is_probe else "zero-shot"
        arguments: dict[str, Any] | None = None
        if self.score.low is not None and self.score.high is not None:
            ends = [round(self.score.low, 4), round(self.score.high, 4)]
            arguments = {"interval": ends, "confidence": self.confidence}
            arguments |= {} if self.score.units is None else {self.score.unit: self.score.units}

        # The model index identifies results by task and metric type, so include the name of our task in the type.
        kind = f"{self.task} {self.metric}".lower().replace("@", " at ")
        return EvalResult(
            task_type=hub_task,
            task_name=f"{name} {self.language}".strip(),
            dataset_type=re.sub(r"[^\w/.-]+", "-", self.dataset) or "unknown",
            dataset_name=self.dataset or "unknown",
            dataset_config=self.language or None,
            dataset_split=self.split,
            metric_type="accuracy" if self.metric == "top1" and not is_probe else re.sub(r"[^a-z0-9]+", "_", kind),
            metric_name=f"{self.task} {self.metric}",
            metric_value=round(self.score.value, 4),
            metric_args=arguments,
        )


def get_card_scores(content: Mapping[str, Any]) -> list[CardScore]:
    """Select the scores for a model card from the content of `results.json`.

    The scores are the metrics in `SECTIONS[task].card_metrics` of each task, for each language separately. The list is
    empty if the content has a different schema version.
    """
    if content.get("schema") != SCHEMA:
        return []
    protocol = content["protocol"]
    confidence = (protocol.get("intervals") or {}).get("confidence")

    scores = []
    for score in flat_scores(content["scores"]):
        task, language, *between, metric = score.place
        if language in ("mean", "all") or metric not in SECTIONS[task].card_metrics:
            continue

        title = ", ".join([SECTIONS[task].card_title, *between]).replace("_", " ")
        if task in AUDIO_TASKS:
            title, language = f"{SECTIONS[task].card_title}, {language}".replace("_", " "), ""
        elif task == "retrieval":
            title = DIRECTIONS[between[0]]
        elif task == "zste":
            title, metric = score.metric.display, "accuracy"
        level = confidence if score.low is not None else None
        scores.append(CardScore(title, metric, score, get_dataset_name(protocol), protocol["split"], language, level))
    return scores


def format_card_scores(scores: Sequence[CardScore]) -> str:
    """Format scores as Markdown tables, in percent.

    Intervals are in parentheses. For temporal tasks, "order-blind" is the score of a model that ignores the order of
    sounds.

    >>> from modeling_supclap.evaluation.results import Score
    >>> score = Score(("retrieval", "eng", "t2a", "R@1"), 0.5, 0.4, 0.6, 0.1)
    >>> print(format_card_scores([CardScore("text to audio", "R@1", score, "esc50", "test", "eng", 0.95)]))
    In percent, with intervals of 95 %.
    <BLANKLINE>
    | data | task | language | R@1 |
    |---|---|---|---|
    | esc50, test | text to audio | eng | 50.0 (40.0 to 60.0); chance 10.0 |
    """
    groups: dict[str, list[CardScore]] = {"retrieval": []}
    # one table with all retrieval metrics, and one table per other metric
    for each in scores:
        groups.setdefault("retrieval" if each.metric in RETRIEVAL_METRICS else each.metric, []).append(each)

    tables = []
    for group in filter(None, groups.values()):
        metrics = {each.metric: "" for each in group}
        rows: dict[tuple[str, str, str], dict[str, str]] = {}
        for each in group:
            data = f"{each.dataset}, {each.split}".strip(", ")
            place = (data, each.task, each.language)
            _, _, *levels = each.score.cells()
            text = each.score.cell.format(each.score.metric)
            for name, level in zip(("chance", "order-blind"), levels, strict=True):
                text += f"; {name} {level}" if level else ""
            rows.setdefault(place, dict(metrics))[each.metric] = text

        lines = [["data", "task", "language", *metrics], *([*place, *cells.values()] for place, cells in rows.items())]
        tables.append(Table(lines).to_markdown())

    levels = sorted({f"{100 * each.confidence:g}" for each in scores if each.confidence})
    intervals = f", with intervals of {' and '.join(levels)} %" if levels else ""
    units = list_units((each.score.units, each.score.unit) for each in scores)
    return "\n\n".join([f"In percent{intervals}. {units}".strip(), *tables])
