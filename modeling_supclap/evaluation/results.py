"""Evaluation results: scores, protocol (description of the data and the settings), and the outcome of each query.

Evaluation, training and post-training all produce `Results`. `metrics/names.py` defines the names of the metrics.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import atomic_write, write_json
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.metrics.bootstrap import NUM_RESAMPLES, bootstrap_intervals, count_units, describe_units
from modeling_supclap.metrics.comparison import Cell
from modeling_supclap.metrics.names import DIRECTIONS as DIRECTIONS
from modeling_supclap.metrics.names import METRICS, MORE_RETRIEVAL_METRICS, RETRIEVAL_METRICS, MetricName, get_metric

from .. import __version__
from .cache import Arrays, pack_arrays
from .tables import Table

SCHEMA = "supclap-results/2"
NUM_CLASSES = {"esc50": 50, "urbansound8k": 10, "vggsound": 309}
"""Number of classes used in the papers; scores on fewer classes are not comparable with the published scores."""

ZSTE_TASKS = {
    "1A": "one sound: it is recognised",
    "2A": "two consecutive sounds: both are recognised",
    "2B": "two consecutive sounds: at least one is recognised",
    "2C": "two simultaneous sounds: both are recognised",
    "2D": "two simultaneous sounds: at least one is recognised",
    "3A": "two consecutive sounds: first before second, second before first, or simultaneous",
    "3A_order": "two consecutive sounds: correct order against reversed order, without the third answer",
    "3B": "two simultaneous sounds: simultaneous, or one before the other",
    "4A": "as 3A, with many candidate sentences",
    "4A_order": "as 3A_order, on the clips of 4A",
    "4B": "as 3B, with many candidate sentences",
    "5A": "two consecutive sounds: which is first, and which is second",
    "5B": "two simultaneous sounds: which two, with many candidate sentences",
}


class Section(NamedTuple):
    """Section of a task in the report (title, table columns, summary, text above the table) and on the model card.

    `summary` contains the main metric, and a phrase that explains its value. The phrase may contain `{language}`.
    """

    title: str
    metrics: tuple[str, ...]
    summary: tuple[str, str] = ("", "")
    card_metrics: tuple[str, ...] = ()
    card_title: str = ""
    note: str = ""


AUDIO_TASKS = ("linear_probe", "few_shot", "audio_to_audio")
"""Tasks without texts; the second key of their scores is a setting, such as "5_per_class", and not a language."""

CLASS_METRICS = ("top1", "top5", "mean_per_class", "mean_over_folds", "mAP")

SECTIONS = {
    "retrieval": Section(
        "Retrieval",
        (*RETRIEVAL_METRICS, *MORE_RETRIEVAL_METRICS),
        ("R@1", "captions in {language} retrieve their clip at rank 1"),
        RETRIEVAL_METRICS,
    ),
    "multilingual": Section("Agreement between languages", ("MRV",)),
    "distances": Section("Distance to the caption embeddings in", ("Gap", "Dis")),
    "zero_shot": Section(
        "Zero-shot classification",
        CLASS_METRICS,
        ("top1", "clips are assigned the correct class"),
        ("top1", "mAP"),
        "zero-shot",
    ),
    "zste": Section(
        "Zero-shot temporal evaluation (ZSTE)",
        tuple(ZSTE_TASKS),
        ("3A", "the order of two consecutive sounds is recognised"),
        tuple(ZSTE_TASKS),
    ),
    "linear_probe": Section(
        "Linear probe",
        CLASS_METRICS,
        ("top1", "a linear probe assigns clips the correct class"),
        ("top1", "mAP"),
        "linear probe",
        "Logistic regression on the audio embeddings of all training clips.",
    ),
    "few_shot": Section(
        "Few-shot probe",
        CLASS_METRICS,
        ("top1", "few-shot, {language}: clips are assigned the correct class"),
        ("top1", "mAP"),
        "few-shot probe",
        "Logistic regression on the audio embeddings of a few training clips per class; mean over random draws. "
        "Intervals combine the draws and the tested recordings.",
    ),
    "audio_to_audio": Section(
        "Audio-to-audio retrieval",
        RETRIEVAL_METRICS,
        ("R@1", "clips retrieve a clip with one of their labels at rank 1"),
        RETRIEVAL_METRICS,
        "audio to audio",
        "Candidates are the clips of other recordings; those that share a label with the query are correct. mAP@10 "
        "divides by the number of correct clips, so it cannot reach 100 with more than ten of them.",
    ),
    "temporal": Section(
        "The order of sounds",
        tuple(METRICS),
        ("temporal_accuracy", "an item is closest to its own caption within its pair"),
        ("temporal_accuracy", "order_accuracy"),
        "order of sounds",
        "Temporal accuracy: how often an item of a pair is closest to its own caption. Order accuracy compares only "
        "the forward and the reversed item and their captions. An order-blind model recognises every sound and "
        "detects overlap, but ignores order.",
    ),
    "mteb": Section("Tasks of mteb", ("main_score",)),
}
"""Tasks in `results.json`, in the order of the report; "distances" is the part of "multilingual" with Gap and Dis."""

Scores = dict[str, Any]
"""Nested dict of scores, as in `Results`."""

TaskResult = tuple[Scores, Arrays, dict[str, Any]]
"""Result of a task: its part of the scores, of the arrays and of the protocol of `Results`."""

_PACKAGES = ("torch", "torchaudio", "transformers", "datasets", "accelerate", "numpy")


class Interval(NamedTuple):
    """Confidence interval of a score.

    Attributes:
        low: Lower end, or None with too few units (see `describe_units`).
        high: Upper end, or None.
        units: Number of resampled units.
        unit: Name of the units, such as "recordings".
    """

    low: float | None
    high: float | None
    units: int
    unit: str


@dataclass
class Intervals:
    """Confidence intervals, computed by percentile bootstrap over source recordings.

    With `positives="captions"`, recordings with the same captions are resampled together. There is no interval with
    fewer than 10 of these units.

    Attributes:
        num_resamples: Number of bootstrap resamples; 0 disables intervals.
        confidence: Confidence level of the bootstrap intervals.
        seed: Seed of the bootstrap; in `supclap evaluate`, also of ZSTE's items.
    """

    num_resamples: int = NUM_RESAMPLES
    confidence: float = 0.95
    seed: int = 0

    def draw(
        self, outcomes: Mapping[str, np.ndarray], clusters: Sequence[Any] | np.ndarray, unit: str
    ) -> dict[str, Interval | None]:
        """Compute an interval for the mean of each metric over Q queries, from its outcomes (Q,).

        The bootstrap resamples whole clusters (Q,), such as recordings, or both recordings of each pair (Q, 2). `unit`
        is the name of the clusters. All values are None if `num_resamples` is 0.
        """
        if self.num_resamples == 0:
            return dict.fromkeys(outcomes)
        count = count_units(clusters)
        intervals: dict[str, Interval | None] = {}
        for name, ends in bootstrap_intervals(outcomes, np.asarray(clusters).tolist(), **asdict(self)).items():
            low, high = ends or (None, None)
            intervals[name] = Interval(low, high, count, unit)
        return intervals


def score(
    value: float,
    interval: Interval | tuple[float, float] | None = None,
    chance: float | None = None,
    order_blind: float | None = None,
) -> dict[str, Any]:
    """Create a score dict as stored in `results.json`, with the fields of `Score` except `place`.

    >>> score(0.5, (0.4, 0.6), 0.1)
    {'value': 0.5, 'low': 0.4, 'high': 0.6, 'chance': 0.1}
    >>> score(0.5, Interval(None, None, 2, "recordings"))
    {'value': 0.5, 'low': None, 'high': None, 'chance': None, 'units': 2, 'unit': 'recordings'}
    """
    low, high, *units = interval or (None, None)
    chance = None if chance is None else float(chance)
    fields: dict[str, Any] = {"value": float(value), "low": low, "high": high, "chance": chance}
    fields |= zip(("units", "unit"), units, strict=False)
    return fields if order_blind is None else {**fields, "order_blind": float(order_blind)}


def score_outcomes(
    outcomes: Arrays,
    clusters: Sequence[Any] | np.ndarray,
    unit: str,
    intervals: Intervals,
    chance: Mapping[str, float] = {},
    order_blind: Mapping[str, float] = {},
) -> Scores:
    """Create the scores of several metrics, `{metric: score dict}`, from the outcomes of Q queries, (Q,).

    A score is the mean outcome, with the interval of `Intervals.draw`. `chance` and `order_blind` contain the levels of
    the metrics that have one.
    """
    interval_of = intervals.draw(outcomes, clusters, unit)
    scores = {}
    for name, outcome in outcomes.items():
        scores[name] = score(outcome.mean(), interval_of[name], chance.get(name), order_blind.get(name))
    return scores


def under(place: str, arrays: Arrays) -> Arrays:
    """Return arrays with the path of a score before each name."""
    return {f"{place}/{name}": values for name, values in arrays.items()}


@dataclass(frozen=True)
class Score:
    """A score with its confidence interval, its reference levels and its path in the results.

    Attributes:
        place: Keys from the task to the metric, such as `("retrieval", "eng", "t2a", "R@1")`.
        value: The score; accuracies and recalls are fractions in [0, 1].
        chance: Expected score of random answers, or None.
        order_blind: Score of a model that ignores the order of sounds, or None.
        units: Number of units that the interval resamples, or None if unknown. With too few, there is no interval.
        unit: Name of these units, such as "recordings".
    """

    place: tuple[str, ...]
    value: float
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    order_blind: float | None = None
    units: int | None = None
    unit: str = "units"

    @property
    def metric(self) -> MetricName:
        """Display name and format of the metric."""
        return get_metric(self.place[-1])

    def cells(self) -> list[str]:
        """Format value, interval, chance level and order-blind score as strings. A missing value is an empty string."""
        form = self.metric.format
        chance = "" if self.chance is None else form(self.chance)
        blind = "" if self.order_blind is None else form(self.order_blind)
        return [form(self.value), self.cell.format_interval(self.metric), chance, blind]

    @property
    def cell(self) -> Cell:
        """Value and interval."""
        return Cell(self.value, self.low, self.high)


@dataclass
class Results:
    """Results of an evaluation or of a training run.

    The scores are a nested dict. The keys from outer to inner are ("retrieval", language, direction, metric),
    ("multilingual", language, metric), ("zero_shot", language, template set, metric), ("zste", language, task),
    ("linear_probe", "few_shot" or "audio_to_audio", setting, metric), ("temporal", language, stage, metric) or
    ("mteb", metric of the task, "main_score"). The language "mean" is the mean over languages, and "all" contains
    scores that compare languages.

    Attributes:
        content: Content of `results.json`: "schema", "model", "protocol", "scores", "versions", "run" (time and device;
            only this part differs between repeated evaluations), "training" for a training run, and "groups" with the
            column and the scores of each of its values, if `group_by` is set.
        arrays: Content of `outcomes.npz`. "clips/..." and "captions/<language>/..." describe the data. The other names
            start with the path of a score, such as "retrieval/eng/t2a/", and contain the outcome of each query, the
            query ids ("query_id") and the bootstrap clusters ("cluster").
        seed: Seed of the run, if `load_results` knows it; it is not saved.
    """

    content: dict[str, Any]
    arrays: Arrays = field(default_factory=dict)
    seed: int | None = None

    @property
    def scores(self) -> Scores:
        """Nested dict of scores. The first key is the task."""
        return self.content["scores"]

    @property
    def protocol(self) -> dict[str, Any]:
        """Data and settings of the evaluation."""
        return self.content["protocol"]

    def save(self, folder: str | Path) -> Path:
        """Save the results as `results.json` and `outcomes.npz`, and return the path of `results.json`.

        Both writes are atomic. `results.json` is written last and contains the hash of `outcomes.npz`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        packed = pack_arrays(self.arrays)
        content = redact({**self.content, "outcomes_sha256": hashlib.sha256(packed).hexdigest()})
        json.dumps(content, allow_nan=False)  # raise before replacing any file

        with atomic_write(folder / "outcomes.npz") as unfinished:
            unfinished.write_bytes(packed)
        write_json(folder / "results.json", content, indent=2, allow_nan=False)
        return folder / "results.json"

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Load saved results from their folder, or from the path of `results.json`.

        Raises:
            FileNotFoundError: `results.json` or `outcomes.npz` does not exist.
            ValueError: The format is not supported, or the two files are from different runs.
        """
        path = Path(path)
        path = path / "results.json" if path.is_dir() else path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{path} is not JSON ({error}); pass the folder of results or its results.json"
            ) from error
        schema = content.get("schema") if isinstance(content, dict) else type(content).__name__
        if schema != SCHEMA:
            raise ValueError(
                f"{path} has the schema {schema!r}, expected {SCHEMA!r}; evaluate again with this version"
            )

        outcomes = path.with_name("outcomes.npz")
        packed = outcomes.read_bytes()
        if hashlib.sha256(packed).hexdigest() != content.pop("outcomes_sha256", None):
            raise ValueError(f"{outcomes} and {path.name} come from different runs; evaluate again")
        with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
            return cls(content, dict(stored))

    def group_scores(self) -> Iterator[tuple[str, Score]]:
        """Iterate over the main scores of each group, if `group_by` was set, as (value of the column, score)."""
        for value, scores in self.content.get("groups", {"scores": {}})["scores"].items():
            for each in flat_scores(scores):
                if each.place[-1] in SECTIONS[each.place[0]].card_metrics:
                    yield value, each

    def table(self) -> str:
        """Format all scores as a text table with intervals and chance levels. Fractions are shown as percentages."""
        lines = [["score", "value", "interval", "chance", "order-blind", "resampled units"]]
        for each in flat_scores(self.scores):
            lines.append([" ".join(each.place), *each.cells(), describe_units(each.units, each.unit)])
        for value, each in self.group_scores():
            place = " ".join([self.content["groups"]["column"], f"{value}:", *each.place])
            lines.append([place, *each.cells(), describe_units(each.units, each.unit)])
        used = [column for column, cells in enumerate(zip(*lines, strict=True)) if column < 4 or any(cells[1:])]
        return Table([[line[column] for column in used] for line in lines]).to_text()

    def _repr_html_(self) -> str:
        """Show `table` in notebooks."""
        return f"<pre>{escape(self.table())}</pre>"


def flat_scores(scores: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[Score]:
    """Iterate over all scores in a nested dict.

    >>> [each.place for each in flat_scores({"zste": {"eng": {"3A": score(0.5)}}})]
    [('zste', 'eng', '3A')]
    """
    for name, value in scores.items():
        if isinstance(value, Mapping) and {"value", "low", "high", "chance"} <= value.keys():
            yield Score((*prefix, name), **value)
        elif isinstance(value, Mapping):
            yield from flat_scores(value, (*prefix, name))


def get_dataset_name(protocol: Mapping[str, Any]) -> str:
    """Return the dataset name. For a subset of the classes, such as ESC-10, append the number of classes.

    >>> get_dataset_name({"dataset": "esc50", "classes": 10})
    'esc50, 10 of 50 classes'
    """
    name = str(protocol.get("origin") or protocol["dataset"] or "unnamed data")
    num_all, num_classes = NUM_CLASSES.get(name), protocol.get("classes") or 0
    return f"{name}, {num_classes} of {num_all} classes" if num_all and 0 < num_classes < num_all else name


def paper_results(**filters: str | None) -> list[dict[str, Any]]:
    """Load published scores from the tables of the SupCLAP, ATRI and TeminAL papers.

    Args:
        **filters: Values to select by: "paper", "table", "task", "dataset", "model", "language", "direction" or
            "metric".

    Returns:
        One dict per score, with the keys above and "value". Percentages are converted to fractions; MRV, Gap and Dis
        are as printed in the paper.

    Raises:
        ValueError: A filter name is unknown.

    >>> [entry["value"] for entry in paper_results(paper="ATRI", table="3", dataset="clotho", metric="MRV")]
    [347.34, 274.87, 263.15]
    """
    stored = json.loads(Path(__file__).with_name("paper_results.json").read_text(encoding="utf-8"))
    columns = stored["columns"]
    unknown = sorted(filters.keys() - set(columns))
    if unknown:
        raise ValueError(f"unknown keys {unknown}; the entries have {columns}")

    entries = []
    for row in stored["rows"]:
        entry = dict(zip(columns, row, strict=True))
        if filters.items() <= entry.items():
            entries.append(entry)
    return entries


def package_versions() -> dict[str, str]:
    """Return the versions of Python and the main packages, `{name: version}`."""
    packages = dict(zip(_PACKAGES, map(version, _PACKAGES), strict=True))
    return {"python": platform.python_version(), **packages, "supclap": __version__}
