"""Results of a recipe or of an evaluation receipt as one flat list of scores, for the model card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult

RETRIEVAL_METRICS = ("R@1", "R@5", "R@10", "mAP@10")
_DIRECTIONS = {"t2a": "text to audio", "a2t": "audio to text"}


@dataclass(frozen=True)
class Score:
    """One number of a card.

    Args:
        task: such as `text to audio`.
        metric: such as `R@1`.
        value: a fraction.
        dataset: it was measured on.
        split: of it.
        language: ISO 639-3 code of the texts; empty where it is none in particular.
        interval: lower and upper end.
        confidence: of the interval.
        chance: what guessing reaches.
    """

    task: str
    metric: str
    value: float
    dataset: str = ""
    split: str = "test"
    language: str = ""
    interval: tuple[float, float] | None = None
    confidence: float | None = None
    chance: float | None = None

    def as_eval_result(self) -> EvalResult:
        """The score in the Hub's model index."""
        is_zero_shot = self.task.startswith("zero-shot")
        arguments: dict[str, Any] | None = None
        if self.interval is not None:
            arguments = {"interval": [round(end, 4) for end in self.interval], "confidence": self.confidence}
        # A model index tells results of one task apart by the type of their metric, which so has to hold the direction.
        kind = f"{self.task} {self.metric}".lower().replace("@", " at ")
        return EvalResult(
            task_type="zero-shot-audio-classification" if is_zero_shot else "audio-text-retrieval",
            task_name=" ".join(word for word in ("zero-shot" if is_zero_shot else "retrieval", self.language) if word),
            dataset_type=self.dataset or "unknown",
            dataset_name=self.dataset or "unknown",
            dataset_config=self.language or None,
            dataset_split=self.split,
            metric_type="accuracy" if is_zero_shot else re.sub(r"[^a-z0-9]+", "_", kind),
            metric_name=f"{self.task} {self.metric}",
            metric_value=round(self.value, 4),
            metric_args=arguments,
        )


def scores_of(results: Mapping[str, Any], dataset: Sequence[str] = ()) -> list[Score]:
    """Flattens the contents of a `results.json`.

    Args:
        results: of `train_supclap.py` or `posttrain_teminal.py`, or an evaluation receipt (schema
            `supclap-evaluation/1`).
        dataset: what to call the data where the results do not say.

    Returns:
        Retrieval by direction and language, zero-shot classification, temporal understanding; none where the mapping
        holds nothing of the kind.

    >>> chance = {"R@1": 0.1}
    >>> scores_of({"test": {"retrieval": {"eng": {"t2a": {"R@1": 0.5}, "t2a_chance": chance}}}})[0].value
    0.5
    """
    if is_receipt(results):
        return list(_of_receipt(results))
    name = str(results.get("origin") or results.get("arguments", {}).get("dataset") or " ".join(dataset))
    return [*_of_training(results.get("test", {}), name), *_of_post_training(results.get("scores", {}), name)]


def is_receipt(results: Mapping[str, Any]) -> bool:
    """Whether the contents of a `results.json` are those of an evaluation receipt."""
    return str(results.get("schema", "")).startswith("supclap-evaluation/")


def table_of(scores: Sequence[Score]) -> str:
    """Scores as a table in percent: interval in square brackets, chance in round ones.

    >>> print(table_of([Score("text to audio", "R@1", 0.5, "esc50", "test", "eng", (0.4, 0.6), 0.95, 0.1)]))
    In percent; [intervals of 95 %], (chance).
    <BLANKLINE>
    | data | task | language | R@1 |
    |---|---|---|---|
    | esc50, test | text to audio | eng | 50.0 [40.0, 60.0] (10.0) |
    """
    tables = []
    for group in _by_metrics(scores):
        metrics = list(dict.fromkeys(score.metric for score in group))
        lines = [f"| data | task | language | {' | '.join(metrics)} |", "|---" * (3 + len(metrics)) + "|"]
        rows: dict[tuple[str, str, str], dict[str, Score]] = {}
        for score in group:
            place = (f"{score.dataset}, {score.split}".strip(", "), score.task, score.language)
            rows.setdefault(place, {})[score.metric] = score
        for place, row in rows.items():
            cells = [_cell(row[metric]) if metric in row else "" for metric in metrics]
            lines.append(f"| {' | '.join([*place, *cells])} |")
        tables.append("\n".join(lines))
    return "\n\n".join([_legend(scores), *tables])


def _of_receipt(receipt: Mapping[str, Any]) -> Iterator[Score]:
    protocol, scores = receipt["protocol"], receipt["scores"]
    shared: dict[str, Any] = {"dataset": protocol.get("origin") or protocol["dataset"], "split": protocol["split"]}
    confidence = (protocol.get("intervals") or {}).get("confidence")

    def score(task: str, metric: str, found: Mapping[str, Any], language: str) -> Score:
        ends = (found.get("low"), found.get("high"))
        interval = None if None in ends else ends
        rest: dict[str, Any] = {"interval": interval, "confidence": confidence if interval else None}
        rest["chance"] = found.get("chance")
        return Score(task, metric, found["value"], **shared, language=language, **rest)

    for language, directions in scores.get("retrieval", {}).items():
        for direction, title in _DIRECTIONS.items():
            found = directions.get(direction, {})
            yield from (score(title, m, found[m], language) for m in RETRIEVAL_METRICS if m in found)
    for language, sets in scores.get("zero_shot", {}).items():
        for name, found in sets.items():
            yield score(f"zero-shot, {name}", "top1", found["top1"], language)
    for language, tasks in scores.get("zste", {}).items():
        if language != "MRV":
            yield from (score(f"ZSTE {task}", "accuracy", found, language) for task, found in tasks.items())


def _of_training(test: Mapping[str, Any], dataset: str) -> Iterator[Score]:
    confidence = test.get("intervals", {}).get("confidence")
    for language, found in test.get("retrieval", {}).items():
        for direction, title in _DIRECTIONS.items():
            chances, intervals = (found.get(f"{direction}_{kind}", {}) for kind in ("chance", "interval"))
            for metric in RETRIEVAL_METRICS:
                if metric in found.get(direction, {}):
                    yield Score(
                        title,
                        metric,
                        found[direction][metric],
                        dataset,
                        "test",
                        language,
                        interval=tuple(intervals.get(metric) or ()) or None,
                        confidence=confidence if intervals.get(metric) else None,
                        chance=chances.get(metric),
                    )
    if "zero_shot" in test:
        found = test["zero_shot"]
        yield Score("zero-shot", "top1", found["top1"], dataset, "test", "eng", chance=found.get("chance"))


def _of_post_training(stages: Mapping[str, Any], dataset: str) -> Iterator[Score]:
    for stage, found in stages.items():
        if isinstance(found, Mapping) and "temporal_accuracy" in found:
            task = f"order of sounds, {stage.replace('_', ' ')}"
            yield Score(task, "accuracy", found["temporal_accuracy"], dataset, "held out")


def _by_metrics(scores: Sequence[Score]) -> list[list[Score]]:
    """Scores that share columns: retrieval, and the rest."""
    retrieval = [score for score in scores if score.metric in RETRIEVAL_METRICS]
    others: dict[str, list[Score]] = {}
    for score in scores:
        if score.metric not in RETRIEVAL_METRICS:
            others.setdefault(score.metric, []).append(score)
    return [group for group in (retrieval, *others.values()) if group]


def _legend(scores: Sequence[Score]) -> str:
    confidences = sorted({score.confidence for score in scores if score.confidence})
    told = ["[intervals of " + ", ".join(f"{100 * each:g} %" for each in confidences) + "]"] if confidences else []
    told += ["(chance)"] if any(score.chance is not None for score in scores) else []
    return f"In percent; {', '.join(told)}." if told else "In percent."


def _cell(score: Score) -> str:
    ends = "" if score.interval is None else f" [{100 * score.interval[0]:.1f}, {100 * score.interval[1]:.1f}]"
    chance = "" if score.chance is None else f" ({100 * score.chance:.1f})"
    return f"{100 * score.value:.1f}{ends}{chance}"
