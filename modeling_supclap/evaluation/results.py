"""The results of a model: its scores, the protocol they were measured under, and the outcome of every query.

An evaluation, a training run and a post-training end in the same `Results`. They are a folder of two files:
`results.json` holds what people and scripts read, `outcomes.npz` what each single query did, so that two results can be
compared query by query. What a metric is called, and how its value is written, stands in `metrics/names.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import atomic_write, write_json
from modeling_supclap.datasets_scripts.public_names import redact
from modeling_supclap.metrics.bootstrap import bootstrap_intervals, paired_test
from modeling_supclap.metrics.names import MetricName, get_metric

from .. import __version__
from .cache import pack_arrays

SCHEMA = "supclap-results/2"
DIRECTIONS = {"t2a": "text to audio", "a2t": "audio to text"}
"""The directions of retrieval and what people call them."""

NUM_CLASSES = {"esc50": 50, "urbansound8k": 10, "vggsound": 309}
"""Of datasets whose classes the papers name: what was measured on fewer of them is another task."""

_PACKAGES = ("torch", "torchaudio", "transformers", "datasets", "accelerate", "numpy")
_MUST_AGREE = ("dataset_hash", "positives", "caption_handling")
_SHOULD_AGREE = ("audio", "missing_clips", "intervals")


@dataclass(frozen=True)
class Intervals:
    """How intervals are drawn: percentile bootstrap over source recordings.

    Attributes:
        num_resamples: How often; 0 gives no intervals.
        confidence: The part of draws inside.
        seed: The seed of the draws.
    """

    num_resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0

    def draw(
        self, outcomes: Mapping[str, np.ndarray], clusters: Sequence[Any] | np.ndarray
    ) -> dict[str, tuple[float, float] | None]:
        """The interval of each mean; None where there are too few recordings to draw from.

        Args:
            outcomes: By name, (Q,).
            clusters: The recording that each query is about, (Q,); queries of one are drawn together.
        """
        clusters = np.asarray(clusters)
        if self.num_resamples == 0 or (clusters == clusters[0]).all():
            return dict.fromkeys(outcomes)
        return {**bootstrap_intervals(outcomes, clusters.tolist(), **asdict(self))}


def score(
    value: float,
    interval: tuple[float, float] | None = None,
    chance: float | None = None,
    order_blind: float | None = None,
) -> dict[str, float | None]:
    """A score as results hold it: the fields of `Score` but for its place.

    >>> score(0.5, (0.4, 0.6), 0.1)
    {'value': 0.5, 'low': 0.4, 'high': 0.6, 'chance': 0.1}
    """
    low, high = (None, None) if interval is None else (float(interval[0]), float(interval[1]))
    found = {"value": float(value), "low": low, "high": high, "chance": None if chance is None else float(chance)}
    return found if order_blind is None else {**found, "order_blind": float(order_blind)}


@dataclass(frozen=True)
class Score:
    """One number of the results, with where it stands in them.

    Attributes:
        place: Task, language, what lies between, and the metric, such as `("retrieval", "eng", "t2a", "R@1")`.
        value: The score, a share in 0..1 where its metric is one.
        low: The lower end of its interval, or None.
        high: The upper end.
        chance: What random answers would score, or None.
        order_blind: What a model scores that hears nothing of the order of sounds, or None.
    """

    place: tuple[str, ...]
    value: float
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    order_blind: float | None = None

    @property
    def metric(self) -> MetricName:
        """How the metric is shown."""
        return get_metric(self.place[-1])

    def cells(self) -> list[str]:
        """Value, interval, chance and the level of an order-blind model as text; empty where there is none."""
        form = self.metric.format
        interval = "" if self.low is None or self.high is None else f"{form(self.low)} to {form(self.high)}"
        chance = "" if self.chance is None else form(self.chance)
        blind = "" if self.order_blind is None else form(self.order_blind)
        return [form(self.value), interval, chance, blind]


@dataclass
class Results:
    """What an evaluation, a training run or a post-training leaves.

    Attributes:
        content: What `results.json` holds: "schema", "model", "protocol", "scores", "versions", "run", the only part in
            which two equal evaluations differ, and of a training run "training". Scores stand under their task, their
            language ("mean" and "all" for several), what lies between, and their metric:
            "retrieval" (language, direction, metric), "multilingual" (language, metric), "zero_shot" (language,
            template set, metric), "zste" (language, task) and "temporal" (language, stage, metric).
        arrays: What `outcomes.npz` holds: "clips/..." and "captions/<language>/..." say what was evaluated; beside the
            place of a score stand the outcome of each query, its "query_id" and its source recording, "cluster".
    """

    content: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, Any]:
        """The scores, by task."""
        return self.content["scores"]

    @property
    def protocol(self) -> dict[str, Any]:
        """What was measured, and how."""
        return self.content["protocol"]

    def save(self, folder: str | Path) -> Path:
        """Writes both files, each whole or not at all, `results.json` last: it names the outcomes that it belongs to.

        Args:
            folder: Made if need be.

        Returns:
            The path of `results.json`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        packed = pack_arrays(self.arrays)
        content = redact({**self.content, "outcomes_sha256": hashlib.sha256(packed).hexdigest()})
        json.dumps(content, allow_nan=False)  # what cannot be written is met before anything is replaced

        with atomic_write(folder / "outcomes.npz") as unfinished:
            unfinished.write_bytes(packed)
        write_json(folder / "results.json", content, indent=2, allow_nan=False)
        return folder / "results.json"

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Reads results.

        Args:
            path: Their folder, or their `results.json`.

        Raises:
            FileNotFoundError: There are none.
            ValueError: The file is something else, or its outcomes are those of another run.
        """
        path = Path(path)
        path = path / "results.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"there are no results {path}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON ({error}); give the folder of results, or its results.json") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            seen = content.get("schema") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{path} holds no results of this version: its schema is {seen!r}, not {SCHEMA!r}")

        outcomes = path.with_name("outcomes.npz")
        if not outcomes.is_file():
            raise FileNotFoundError(f"{outcomes} is missing; it belongs beside {path.name}")
        packed = outcomes.read_bytes()
        if hashlib.sha256(packed).hexdigest() != content.pop("outcomes_sha256", None):
            raise ValueError(f"{outcomes} and {path.name} are of two runs, of which one was stopped; evaluate again")
        with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
            return cls(content, dict(stored))

    def table(self) -> str:
        """All scores as text for a terminal, shares in percent, with interval and chance level."""
        lines = [["score", "value", "interval", "chance", "order-blind"]]
        for each in flat_scores(self.scores):
            lines.append([" ".join(each.place), *each.cells()])
        if not any(line[-1] for line in lines[1:]):
            lines = [line[:-1] for line in lines]
        return _align(lines)

    def _repr_html_(self) -> str:
        """All scores as a table for a notebook."""
        rows = ["<tr><th>score</th><th>value</th><th>interval</th><th>chance</th><th>order-blind</th></tr>"]
        for each in flat_scores(self.scores):
            cells = "</td><td>".join(map(escape, each.cells()))
            rows.append(f"<tr><th>{escape(' '.join(each.place))}</th><td>{cells}</td></tr>")
        return f"<table>{''.join(rows)}</table>"


def flat_scores(scores: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[Score]:
    """Every score of a tree of them, with its place.

    >>> [found.place for found in flat_scores({"zste": {"eng": {"3A": score(0.5)}}})]
    [('zste', 'eng', '3A')]
    """
    for name, value in scores.items():
        if isinstance(value, Mapping) and {"value", "low", "high", "chance"} <= value.keys():
            yield Score((*prefix, name), **value)
        elif isinstance(value, Mapping):
            yield from flat_scores(value, (*prefix, name))


def _align(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    written = []
    for first, *others in lines:
        cells = map(str.rjust, others, widths[1:])
        written.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(written)


def get_dataset_name(protocol: Mapping[str, Any]) -> str:
    """The dataset that was evaluated; of a part of its classes, such as ESC-10, this too.

    >>> get_dataset_name({"dataset": "esc50", "classes": 10})
    'esc50, 10 of 50 classes'
    """
    name = str(protocol.get("origin") or protocol["dataset"])
    every, classes = NUM_CLASSES.get(name), protocol.get("classes") or 0
    return f"{name}, {classes} of {every} classes" if every and 0 < classes < every else name


def compare(
    first: Results, second: Results, num_resamples: int = 1000, seed: int = 0, allow_different: bool = False
) -> list[dict[str, Any]]:
    """Tests, query by query, whether two results differ.

    Args:
        first: One result.
        second: Another, on the same data under the same protocol.
        num_resamples: Draws of the bootstrap.
        seed: The seed of the bootstrap.
        allow_different: Goes on, with a warning, where the protocols differ, on the queries that both have.

    Returns:
        For each score that both have: "score" (its place), "first" and "second" (means), "difference" (second minus
        first), its interval "low" and "high", "p_value", and "queries". Ranks start at 1.

    Raises:
        ValueError: The data or the protocols differ, or no score is in both.

    Warns:
        UserWarning: What was heard of the recordings differs, as it does between models that take other lengths.
    """
    _check_protocols(first, second, allow_different)
    table = []
    for prefix in sorted(_queried(first) & _queried(second)):
        asked, asked_of_second = _number_queries(first, prefix), _number_queries(second, prefix)
        shared = list(filter(asked_of_second.__contains__, asked))
        if len(shared) < max(len(asked), len(asked_of_second)) and not allow_different:
            raise ValueError(
                f"{prefix}: the results asked {len(asked)} and {len(asked_of_second)} queries, {len(shared)} alike"
            )
        if not shared:
            continue

        # Each query of the one beside the same query of the other.
        own, other = list(map(asked.__getitem__, shared)), list(map(asked_of_second.__getitem__, shared))
        clusters = first.arrays[f"{prefix}/cluster"][own].tolist()

        outcomes = _get_outcomes(first, prefix, own)
        others = _get_outcomes(second, prefix, other)
        names = list(filter(others.__contains__, outcomes))

        tested: dict[str, Any] = {}
        if len(set(clusters)) > 1:
            pairs = {name: others[name] for name in names}, {name: outcomes[name] for name in names}
            tested = paired_test(*pairs, clusters, num_resamples=num_resamples, seed=seed)

        for name in names:
            place = prefix.split("/")
            own_mean, other_mean = float(outcomes[name].mean()), float(others[name].mean())
            row: dict[str, Any] = {"score": " ".join(place if place[-1] == name else [*place, name])}
            row |= {"first": own_mean, "second": other_mean, "difference": other_mean - own_mean}
            row |= {"low": None, "high": None, "p_value": None, **tested.get(name, {}), "queries": len(shared)}
            table.append(row)
    if not table:
        raise ValueError(f"the results have no score in common: {list(first.scores)} and {list(second.scores)}")
    return table


def format_comparison(table: Sequence[Mapping[str, Any]]) -> str:
    """What `compare` gives as a table for a terminal; shares in percent."""

    def signed(value: float) -> str:
        text = get_metric(row["score"].split()[-1]).format(value)
        return text if text.startswith("-") else f"+{text}"

    lines = [["score", "first", "second", "difference", "interval", "p"]]
    for row in table:
        form = get_metric(row["score"].split()[-1]).format
        means = [form(row["first"]), form(row["second"]), signed(row["difference"])]
        interval = "" if row["low"] is None else f"{signed(row['low'])} to {signed(row['high'])}"
        p_value = "" if row["p_value"] is None else f"{row['p_value']:.3f}"
        lines.append([row["score"], *means, interval, p_value])
    return _align(lines)


def paper_results(**wanted: str | None) -> list[dict[str, Any]]:
    """The numbers of the papers' tables, in the units of our scores: shares as fractions, MRV, Gap and Dis as printed.

    Args:
        **wanted: Only entries with these values of "paper", "table", "task", "dataset", "model", "language",
            "direction" or "metric".

    Returns:
        Entries of these keys and "value".

    Raises:
        ValueError: An unknown key.

    >>> [entry["value"] for entry in paper_results(paper="ATRI", table="3", dataset="clotho", metric="MRV")]
    [347.34, 274.87, 263.15]
    """
    stored = json.loads(Path(__file__).with_name("paper_results.json").read_text(encoding="utf-8"))
    columns = stored["columns"]
    unknown = sorted(wanted.keys() - set(columns))
    if unknown:
        raise ValueError(f"unknown keys {unknown}; the entries have {columns}")

    entries = []
    for row in stored["rows"]:
        entry = dict(zip(columns, row, strict=True))
        if wanted.items() <= entry.items():
            entries.append(entry)
    return entries


def package_versions() -> dict[str, str]:
    """The versions of what made a result."""
    packages = dict(zip(_PACKAGES, map(version, _PACKAGES), strict=True))
    return {"python": platform.python_version(), **packages, "supclap": __version__}


def _check_protocols(first: Results, second: Results, allow_different: bool) -> None:
    """Refuses, or warns of, results that were not measured alike."""
    differing = []
    for key in (*_MUST_AGREE, "zero_shot", "zste", "temporal"):
        one, other = _get_protocol(first, key), _get_protocol(second, key)
        is_asked = key in _MUST_AGREE or (key in first.scores and key in second.scores)
        if is_asked and one != other:
            differing.append(f"{key}: {_short(one)} and {_short(other)}")
    if differing:
        told = "the results were not measured alike; " + "; ".join(differing)
        if not allow_different:
            raise ValueError(f"{told}. Evaluate both on the same data, or allow the difference")
        warnings.warn(told, stacklevel=3)

    for key in _SHOULD_AGREE:
        one, other = first.protocol.get(key), second.protocol.get(key)
        if one != other:
            warnings.warn(f"the results differ in {key}: {_short(one)} and {_short(other)}", stacklevel=3)


def _get_protocol(results: Results, key: str) -> Any:
    part = results.protocol.get(key)
    if isinstance(part, dict):  # how much is heard of a clip follows from how much a model takes at once
        part = {**part, "clip_seconds": None}
    return part


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _queried(results: Results) -> set[str]:
    """Places of the outcomes of single queries, such as "retrieval/eng/t2a"."""
    found = set()
    for name in results.arrays:
        place, _, last = name.rpartition("/")
        if last == "query_id" and place != "multilingual":
            found.add(place)
    return found


def _number_queries(results: Results, prefix: str) -> dict[tuple[str, int], int]:
    """The place of each query by its name, and by how often the name came before: a set may ask one thing twice."""
    places: dict[tuple[str, int], int] = {}
    times: Counter[str] = Counter()
    for place, name in enumerate(results.arrays[f"{prefix}/query_id"].tolist()):
        places[name, times[name]] = place
        times[name] += 1
    return places


def _get_outcomes(results: Results, prefix: str, places: Sequence[Any]) -> dict[str, np.ndarray]:
    """What some queries contribute to the scores of a place, by metric."""
    found: dict[str, np.ndarray] = {}
    for name, values in results.arrays.items():
        place, _, last = name.rpartition("/")
        if place != prefix or last in ("query_id", "cluster", "top", "predicted", "truth", "confusion"):
            continue
        if last == "rank":
            found["mean_rank"] = values[places] + 1
        elif last == "score":  # of a task of ZSTE, whose place ends in its metric
            found[prefix.rpartition("/")[2]] = values[places]
        else:
            found[last] = values[places]
    return found
