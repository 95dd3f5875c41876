"""The scores of a model card: those of `results.json` as one table, and as the Hub's model index."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult

from modeling_supclap.metrics.names import RETRIEVAL_METRICS

from ..evaluation.results import DIRECTIONS, SCHEMA, Score, flat_scores, get_dataset_name

_SHOWN = {"zero_shot": ("top1",), "temporal": ("temporal_accuracy", "order_accuracy"), "retrieval": RETRIEVAL_METRICS}


@dataclass(frozen=True)
class CardScore:
    """One number of a card.

    Args:
        task: Such as "text to audio".
        metric: Such as "R@1".
        score: The number, with its interval and its levels.
        dataset: What it was measured on.
        split: The split of it.
        language: ISO 639-3 code of the texts.
        confidence: The confidence of the interval.
    """

    task: str
    metric: str
    score: Score
    dataset: str = ""
    split: str = "test"
    language: str = ""
    confidence: float | None = None

    def as_eval_result(self) -> EvalResult:
        """The score in the Hub's model index."""
        is_zero_shot = self.task.startswith("zero-shot")
        arguments: dict[str, Any] | None = None
        if self.score.low is not None and self.score.high is not None:
            ends = [round(self.score.low, 4), round(self.score.high, 4)]
            arguments = {"interval": ends, "confidence": self.confidence}

        # A model index tells results of one task apart by the type of their metric, which so has to hold the direction.
        kind = f"{self.task} {self.metric}".lower().replace("@", " at ")
        return EvalResult(
            task_type="zero-shot-audio-classification" if is_zero_shot else "audio-text-retrieval",
            task_name=f"{'zero-shot' if is_zero_shot else 'retrieval'} {self.language}".strip(),
            dataset_type=re.sub(r"[^\w/.-]+", "-", self.dataset) or "unknown",
            dataset_name=self.dataset or "unknown",
            dataset_config=self.language or None,
            dataset_split=self.split,
            metric_type="accuracy" if is_zero_shot else re.sub(r"[^a-z0-9]+", "_", kind),
            metric_name=f"{self.task} {self.metric}",
            metric_value=round(self.score.value, 4),
            metric_args=arguments,
        )


def get_card_scores(content: Mapping[str, Any]) -> list[CardScore]:
    """The scores of a `results.json` that a card shows.

    Args:
        content: What it holds; see `evaluation.Results`.

    Returns:
        Retrieval by direction and language, zero-shot classification, ZSTE, and the stages of a post-training; none
        where the mapping is something else.
    """
    if content.get("schema") != SCHEMA:
        return []
    protocol = content["protocol"]
    confidence = (protocol.get("intervals") or {}).get("confidence")

    found = []
    for score in flat_scores(content["scores"]):
        task, language, *between, metric = score.place
        if language in ("mean", "all") or metric not in _SHOWN.get(task, (metric,) if task == "zste" else ()):
            continue

        title = {
            "retrieval": DIRECTIONS.get(between[0], "") if between else "",
            "zero_shot": f"zero-shot, {' '.join(between)}",
            "zste": score.metric.display,
            "temporal": f"order of sounds, {' '.join(between).replace('_', ' ')}",
        }[task]
        place: dict[str, Any] = {"dataset": get_dataset_name(protocol), "split": protocol["split"]}
        place |= {"language": language, "confidence": confidence if score.low is not None else None}
        found.append(CardScore(title, "accuracy" if task == "zste" else metric, score, **place))
    return found


def format_card_scores(scores: Sequence[CardScore]) -> str:
    """Scores as tables in percent: interval in square brackets, chance in round ones, an order-blind model's in braces.

    >>> from modeling_supclap.evaluation.results import Score
    >>> found = Score(("retrieval", "eng", "t2a", "R@1"), 0.5, 0.4, 0.6, 0.1)
    >>> print(format_card_scores([CardScore("text to audio", "R@1", found, "esc50", "test", "eng", 0.95)]))
    In percent; [intervals of 95 %], (chance).
    <BLANKLINE>
    | data | task | language | R@1 |
    |---|---|---|---|
    | esc50, test | text to audio | eng | 50.0 [40.0, 60.0] (10.0) |
    """
    groups: dict[Any, list[CardScore]] = {}
    for each in scores:  # retrieval has its metrics in columns, and each of the others a table of its own
        groups.setdefault("retrieval" if each.metric in RETRIEVAL_METRICS else each.metric, []).append(each)

    tables = []
    for group in sorted(groups.values(), key=lambda own: own[0].metric not in RETRIEVAL_METRICS):
        metrics: dict[str, str] = {}
        rows: dict[tuple[str, str, str], dict[str, str]] = {}
        for each in group:
            place = (f"{each.dataset}, {each.split}".strip(", "), each.task, each.language)
            rows.setdefault(place, {})[each.metric] = _cell(each.score)
            metrics[each.metric] = ""

        lines = [f"| data | task | language | {' | '.join(metrics)} |", "|---" * (3 + len(metrics)) + "|"]
        for place, cells in rows.items():
            lines.append(f"| {' | '.join([*place, *{**metrics, **cells}.values()])} |")
        tables.append("\n".join(lines))

    told: dict[str, None] = {}  # what stands beside the values, each once
    for each in scores:
        if each.confidence:
            told[f"[intervals of {100 * each.confidence:g} %]"] = None
        if each.score.chance is not None:
            told["(chance)"] = None
        if each.score.order_blind is not None:
            told["{a model that is blind to order}"] = None
    notes = sorted(told, key=lambda note: "[({".index(note[0]))
    return "\n\n".join([f"In percent; {', '.join(notes)}." if notes else "In percent.", *tables])


def _cell(score: Score) -> str:
    form = score.metric.format
    ends = "" if score.low is None or score.high is None else f" [{form(score.low)}, {form(score.high)}]"
    chance = "" if score.chance is None else f" ({form(score.chance)})"
    blind = "" if score.order_blind is None else f" {{{form(score.order_blind)}}}"
    return f"{form(score.value)}{ends}{chance}{blind}"
