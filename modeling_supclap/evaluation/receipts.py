"""The receipt of an evaluation: scores, the protocol they were measured under, and the outcome of every query.

A receipt is a folder of two files. `results.json` holds what people and scripts read; `outcomes.npz` what each single
query did, so that two receipts can be compared query by query. Names of scores and arrays are in `Receipt`.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import write_json
from modeling_supclap.datasets_scripts.manifest import installed_versions
from modeling_supclap.metrics.bootstrap import bootstrap_intervals, paired_test

from .embedding_cache import write_arrays

SCHEMA = "supclap-evaluation/1"
_PACKAGES = ("torch", "torchaudio", "transformers", "datasets", "accelerate", "numpy", "supclap")
_STYLE: dict[str, Any] = {"indent": 2, "allow_nan": False}  # other readers of JSON do not know NaN
# Outcomes that two receipts are compared by, for each task.
_COMPARED = {
    "retrieval": ("R@1", "R@5", "R@10", "mAP@10", "rank"),
    "zero_shot": ("top1", "top5"),
    "zste": ("score",),
}
_MUST_AGREE = ("dataset_hash", "positives", "caption_handling")
_SHOULD_AGREE = ("audio", "missing_clips", "intervals")


@dataclass(frozen=True)
class Intervals:
    """How intervals are drawn: percentile bootstrap over source recordings.

    Attributes:
        num_resamples: Draws; 0 gives no intervals.
        confidence: The part of draws inside.
        seed: Of the draws.
    """

    num_resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0

    def of(
        self, outcomes: Mapping[str, np.ndarray], clusters: Sequence[Any] | np.ndarray
    ) -> dict[str, tuple[float, float] | None]:
        """The interval of each mean; None where there are too few recordings to draw from.

        Args:
            outcomes: By name, (Q,).
            clusters: The recording that each query is about, (Q,); queries of one are drawn together.
        """
        if self.num_resamples == 0 or len(set(np.asarray(clusters).tolist())) < 2:
            return dict.fromkeys(outcomes)
        return {**bootstrap_intervals(outcomes, np.asarray(clusters).tolist(), **asdict(self))}

    def describe(self) -> dict[str, Any]:
        """What a receipt says of them."""
        return {"method": "percentile bootstrap over source recordings", **asdict(self)}


def score(
    value: float, interval: tuple[float, float] | None = None, chance: float | None = None
) -> dict[str, float | None]:
    """A score as receipts hold it.

    >>> score(0.5, (0.4, 0.6), 0.1)
    {'value': 0.5, 'low': 0.4, 'high': 0.6, 'chance': 0.1}
    """
    low, high = (None, None) if interval is None else (float(interval[0]), float(interval[1]))
    return {"value": float(value), "low": low, "high": high, "chance": None if chance is None else float(chance)}


@dataclass
class Receipt:
    """What an evaluation leaves.

    Attributes:
        content: `results.json`: "schema", "model", "protocol", "scores", "versions" and "run", the only part in which
            two equal evaluations differ. A score is a mapping of "value", "low", "high" and "chance"; scores stand
            under "retrieval" (language, direction, name), "multilingual", "zero_shot" (language, template set, name)
            and "zste" (language, task).
        arrays: `outcomes.npz`: "clips/..." and "captions/<language>/..." say what was evaluated,
            "retrieval/<language>/<direction>/...", "zero_shot/<language>/<set>/..." and "zste/<language>/<task>/..."
            hold the outcome of each query with its id and its source recording.
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
        """Writes both files, each whole or not at all, `results.json` last.

        Args:
            folder: Made if need be.

        Returns:
            The path of `results.json`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_arrays(folder / "outcomes.npz", self.arrays)
        write_json(folder / "results.json", self.content, **_STYLE)
        return folder / "results.json"

    @classmethod
    def load(cls, path: str | Path) -> Receipt:
        """Reads a receipt.

        Args:
            path: Its folder, or its `results.json`.

        Raises:
            FileNotFoundError: There is none.
            ValueError: The file is something else.
        """
        path = Path(path)
        path = path / "results.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"there is no receipt {path}")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            seen = content.get("schema") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{path} is no receipt of an evaluation: its schema is {seen!r}, not {SCHEMA!r}")
        outcomes = path.with_name("outcomes.npz")
        if not outcomes.is_file():
            raise FileNotFoundError(f"{outcomes} is missing; it belongs beside {path.name}")
        with np.load(outcomes, allow_pickle=False) as stored:
            return cls(content, {name: stored[name] for name in stored.files})

    def table(self) -> str:
        """All scores as text for a terminal, in percent, with interval and chance level."""
        return format_scores(self.scores)


def flat_scores(scores: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict]]:
    """Every score with its place, such as `("retrieval", "eng", "t2a", "R@1")`.

    >>> list(flat_scores({"zste": {"eng": {"3A": score(0.5)}}}))[0][0]
    ('zste', 'eng', '3A')
    """
    for name, value in scores.items():
        if isinstance(value, Mapping) and {"value", "low", "high", "chance"} <= value.keys():
            yield (*prefix, name), dict(value)
        elif isinstance(value, Mapping):
            yield from flat_scores(value, (*prefix, name))


def format_scores(scores: Mapping[str, Any]) -> str:
    """The scores of a receipt as a table for a terminal."""
    places = [(" ".join(place), place[-1], value) for place, value in flat_scores(scores)]
    width = max((len(name) for name, _, _ in places), default=0)
    lines = [f"{'score':<{width}}  {'value':>8}  {'interval':>17}  {'chance':>7}"]
    for name, last, value in places:
        # Shares are read in percent; ranks, variances and distances are not shares.
        is_share = last not in ("mean_rank", "median_rank") and not {"MRV", "Gap", "Dis"} & set(name.split())
        factor = 100 if is_share else 1
        low, high, chance = (None if value[key] is None else factor * value[key] for key in ("low", "high", "chance"))
        interval = "" if low is None or high is None else f"{low:.2f} to {high:.2f}"
        beside = "" if chance is None else f"{chance:.2f}"
        lines.append(f"{name:<{width}}  {factor * value['value']:>8.2f}  {interval:>17}  {beside:>7}".rstrip())
    return "\n".join(lines)


def compare(
    first: Receipt, second: Receipt, num_resamples: int = 1000, seed: int = 0, allow_different: bool = False
) -> list[dict[str, Any]]:
    """Tests, query by query, whether two receipts differ.

    Args:
        first: One receipt.
        second: Another, on the same data under the same protocol.
        num_resamples: Of the bootstrap.
        seed: Of the bootstrap.
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
    for prefix in sorted(_compared_groups(first) & _compared_groups(second)):
        table += _compare_group(first, second, prefix, num_resamples, seed, allow_different)
    if not table:
        raise ValueError(f"the receipts have no score in common: {list(first.scores)} and {list(second.scores)}")
    return table


def format_comparison(table: Sequence[Mapping[str, Any]]) -> str:
    """What `compare` gives as a table for a terminal; shares in percent."""
    width = max(len(row["score"]) for row in table)
    lines = [f"{'score':<{width}}  {'first':>8}  {'second':>8}  {'difference':>10}  {'interval':>17}  {'p':>6}"]
    for row in table:
        factor = 1 if row["score"].endswith("rank") else 100
        interval = "" if row["low"] is None else f"{factor * row['low']:+.2f} to {factor * row['high']:+.2f}"
        p_value = "" if row["p_value"] is None else f"{row['p_value']:.3f}"
        lines.append(
            f"{row['score']:<{width}}  {factor * row['first']:>8.2f}  {factor * row['second']:>8.2f}  "
            f"{factor * row['difference']:>+10.2f}  {interval:>17}  {p_value:>6}".rstrip()
        )
    return "\n".join(lines)


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
    unknown = [key for key in wanted if key not in columns]
    if unknown:
        raise ValueError(f"unknown keys {unknown}; the entries have {columns}")
    entries = [dict(zip(columns, row, strict=True)) for row in stored["rows"]]
    return [entry for entry in entries if all(entry[key] == value for key, value in wanted.items())]


def package_versions() -> dict[str, str]:
    """The versions of what made a result; those of packages that are not installed are left out."""
    return {"python": platform.python_version(), **installed_versions(_PACKAGES)}


def write_results(path: str | Path, results: Mapping[str, Any]) -> None:
    """Writes a `results.json` whole or not at all, with the versions of what made it."""
    write_json(path, {**results, "versions": package_versions()}, **_STYLE)


def _check_protocols(first: Receipt, second: Receipt, allow_different: bool) -> None:
    tasks = [task for task in ("zero_shot", "zste") if task in first.scores and task in second.scores]
    differing = [
        f"{key}: {_short(asked[0])} and {_short(asked[1])}"
        for key in (*_MUST_AGREE, *tasks)
        if (asked := [_asked(receipt, key) for receipt in (first, second)])[0] != asked[1]
    ]
    if differing:
        told = "the receipts were not measured alike; " + "; ".join(differing)
        if not allow_different:
            raise ValueError(f"{told}. Evaluate both on the same data, or allow the difference")
        warnings.warn(told, stacklevel=3)
    for key in _SHOULD_AGREE:
        if first.protocol.get(key) != second.protocol.get(key):
            seen = f"{_short(first.protocol.get(key))} and {_short(second.protocol.get(key))}"
            warnings.warn(f"the receipts differ in {key}: {seen}", stacklevel=3)


def _asked(receipt: Receipt, key: str) -> Any:
    """A part of the protocol, without what follows from how much a model takes at once."""
    part = receipt.protocol.get(key)
    return {name: value for name, value in part.items() if name != "clip_seconds"} if isinstance(part, dict) else part


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _compared_groups(receipt: Receipt) -> set[str]:
    """Prefixes of the arrays that hold one query's outcomes, such as "retrieval/eng/t2a"."""
    return {
        name.rpartition("/")[0]
        for name in receipt.arrays
        if name.rpartition("/")[2] in _COMPARED.get(name.split("/")[0], ())
    }


def _compare_group(
    first: Receipt, second: Receipt, prefix: str, num_resamples: int, seed: int, allow_different: bool
) -> list[dict[str, Any]]:
    names = _COMPARED[prefix.split("/")[0]]
    ids = [_ids(receipt, prefix) for receipt in (first, second)]
    shared = [one for one in ids[0] if one in ids[1]]
    if (len(shared) < len(ids[0]) or len(shared) < len(ids[1])) and not allow_different:
        raise ValueError(f"{prefix}: the receipts asked {len(ids[0])} and {len(ids[1])} queries, {len(shared)} alike")
    if not shared:
        return []
    places = [[each[one] for one in shared] for each in ids]
    outcomes = [
        {name: receipt.arrays[f"{prefix}/{name}"][own] + (name == "rank") for name in names}
        for receipt, own in zip((first, second), places, strict=True)
    ]
    clusters = first.arrays[f"{prefix}/cluster"][places[0]]
    tested: dict[str, Any] = {}
    if len(set(clusters.tolist())) > 1:
        tested = paired_test(outcomes[1], outcomes[0], clusters.tolist(), num_resamples=num_resamples, seed=seed)
    rows = []
    for name in names:
        means = [float(np.mean(outcome[name])) for outcome in outcomes]
        found = tested.get(name, {"low": None, "high": None, "p_value": None})
        rows.append(
            {
                "score": prefix.replace("/", " ") + ("" if name == "score" else f" {name}"),
                "first": means[0],
                "second": means[1],
                "difference": means[1] - means[0],
                **{key: found[key] for key in ("low", "high", "p_value")},
                "queries": len(shared),
            }
        )
    return rows


def _ids(receipt: Receipt, prefix: str) -> dict[str, int]:
    for name in ("query_id", "clip_id", "question_id"):
        if f"{prefix}/{name}" in receipt.arrays:
            return {one: place for place, one in enumerate(receipt.arrays[f"{prefix}/{name}"].tolist())}
    raise ValueError(f"the receipt of {receipt.content['model']['name']} does not name the queries of {prefix}")
