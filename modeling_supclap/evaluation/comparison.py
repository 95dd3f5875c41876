"""Comparison of results: check that two results are comparable, and compute differences with intervals.

`metrics/comparison.py` computes the intervals. This module pairs the queries of the results. `tabulate` compares
several models with several seeds, and `comparison_tables` arranges these scores as tables.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.metrics.bootstrap import NUM_RESAMPLES, count_units, describe_units, list_units
from modeling_supclap.metrics.comparison import Cell, Difference, difference, summarize
from modeling_supclap.metrics.names import get_metric

from .results import SECTIONS, Results, Score, flat_scores
from .tables import Table, arrange, find_metric

if TYPE_CHECKING:
    import pandas

    Key = int | tuple[int, int]  # seed, or fold and seed
    Runs = Mapping[Any, Results]  # results of a model by `Key`

COMPARISON_CAPTION = (
    "Fractions in percent. In brackets: 95 % interval over the resampled units. With fewer than 10 there is none; with "
    "few units (at most 30), it is too narrow. With several seeds or folds: mean ± standard deviation, t-interval over "
    "the seeds, or over the folds after averaging their seeds. Differences to the first model follow; they are paired "
    "by query, by seed and query, or by fold. Validation: best score of the split that selects the checkpoint; choose "
    "settings by it, not by the other columns."
)
_MUST_AGREE = ("dataset_hash", "positives", "caption_handling")
_NO_OUTCOMES = ("query_id", "cluster", "top", "predicted", "truth", "confusion")
_DIFFERENCE_FIELDS = {"difference": "value", "difference_low": "low", "difference_high": "high", "p_value": "p_value"}
_SHOULD_AGREE = ("audio", "missing_clips", "intervals", "selected_on")


def compare(
    first: Results, second: Results, num_resamples: int = NUM_RESAMPLES, seed: int = 0, allow_different: bool = False
) -> list[dict[str, Any]]:
    """Compare two results, paired by query, with a randomisation test and bootstrap intervals (see `difference`).

    Args:
        second: Second results, on the same data and with the same evaluation settings.
        num_resamples: Number of bootstrap resamples, and of random sign patterns of the test.
        allow_different: Whether to warn and compare the shared queries if the data or settings differ. A different
            audio policy, missing clips and different interval options never raise; they cause a warning.

    Returns:
        One dict per shared score, with "score" (its path), "first" and "second" (means; ranks start at 1), "difference"
        (second - first), "low" and "high" (confidence interval of the difference), "p_value", "queries" (their number),
        and "units" and "unit" (number and name of the resampled units).

    Raises:
        ValueError: The data or the settings differ, or the results have no score in common.
    """
    check_protocols(first, second, allow_different)
    import pandas

    units = {score.place: score.unit for score in flat_scores(second.scores)}
    table = []
    for name in filter(second.arrays.__contains__, first.arrays):
        prefix, metric = _parent(name), name.rpartition("/")[2]
        if f"{prefix}/query_id" not in first.arrays or prefix == "multilingual" or metric in _NO_OUTCOMES:
            continue

        # Pair the queries of both results.
        outcomes, others = _by_query(first, name), _by_query(second, name)
        columns = [outcomes, others, _by_query(first, f"{prefix}/cluster")]
        paired = pandas.concat(columns, axis=1, join="inner", keys=["first", "second", "cluster"])
        if len(paired) < max(len(outcomes), len(others)) and not allow_different:
            raise ValueError(
                f"{prefix}: the results have {len(outcomes)} and {len(others)} queries, {len(paired)} shared; evaluate "
                "both on the same data, or pass allow_different"
            )
        if not len(paired):
            continue
        # ZSTE: the last part of the path is the metric
        place = prefix.split("/") + {"rank": ["mean_rank"], "score": []}.get(metric, [metric])
        before, after = (paired[column].to_numpy() + (metric == "rank") for column in ("first", "second"))
        means, clusters = (float(before.mean()), float(after.mean())), paired["cluster"].tolist()
        found = difference([means[1]], [means[0]], after, before, clusters, num_resamples, seed)
        row = {"score": " ".join(place), "first": means[0], "second": means[1], "difference": found.value}
        row |= {"low": found.low, "high": found.high, "p_value": found.p_value, "queries": len(paired)}
        row |= {"units": count_units(clusters), "unit": units.get(tuple(place), "units")}
        table.append(row)
    if not table:
        raise ValueError(f"the results have no score in common: {list(first.scores)} and {list(second.scores)}")
    return table


def format_comparison(table: Sequence[Mapping[str, Any]]) -> str:
    """Format the result of `compare` as a text table. Fractions are shown as percentages."""
    lines = [["score", "first", "second", "difference", "interval", "p", "resampled units"]]
    for row in table:
        metric = get_metric(row["score"].split()[-1])
        cell = Cell(row["difference"], row["low"], row["high"])
        means = [metric.format(row["first"]), metric.format(row["second"]), metric.format(cell.value, signed=True)]
        p_value = "" if row["p_value"] is None else f"{row['p_value']:.3f}"
        units = describe_units(row["units"], row["unit"])
        lines.append([row["score"], *means, cell.format_interval(metric, signed=True), p_value, units])
    return Table(lines).to_text()


def tabulate(models: Mapping[str, Runs], allow_different: bool = False) -> list[dict[str, Any]]:
    """Collect the scores of several models on the same data, with their differences to the first model.

    Args:
        models: Results of each model by seed, or by (fold, seed). The seeds of a fold are averaged.
        allow_different: Whether to only warn if the protocols differ.

    Returns:
        One dict per model and score with "score" (its path), "model", "seeds" and "folds" (their numbers),
        "validation_metric" and "validation" (mean score of the split that selects the checkpoint), "value" (mean),
        "std", "low", "high", "chance", "units" and "unit" (number and name of the resampled units of the first run),
        "difference", "difference_low", "difference_high" and "p_value". Unknown values are None.

    Raises:
        ValueError: The protocols differ.
    """
    baseline = next(iter(models.values()))
    of_baseline = _scores_by_place(baseline)
    records = []
    for model, runs in models.items():
        paired = {} if runs is baseline else _pair_queries(runs, baseline, allow_different)
        folds = {key[0] for key in runs if isinstance(key, tuple)}
        about: dict[str, Any] = {"model": model, "seeds": len(runs) // max(1, len(folds)), "folds": len(folds) or None}
        about["validation_metric"], about["validation"] = _mean_validation(runs)
        for place, scores in _scores_by_place(runs).items():
            first = next(iter(scores.values()))
            values = average_folds({key: score.value for key, score in scores.items()})
            recordings = first.cell.interval if len(values) == 1 else None
            cell = summarize(list(values.values()), recordings, is_share=first.metric.percent)
            record = {"score": " ".join(place), **about, "value": cell.value, "std": cell.std}
            record |= {"low": cell.low, "high": cell.high, "chance": first.chance}
            record |= {"units": first.units, "unit": first.unit}

            found = paired.get(record["score"])
            if found is None and runs is not baseline:
                others = {key: score.value for key, score in of_baseline.get(place, {}).items()}
                found = compare_seeds(runs, baseline, place, values, average_folds(others))
            for key, field in _DIFFERENCE_FIELDS.items():
                record[key] = getattr(found, field, None)
            records.append(record)
    return records


def comparison_tables(dataset: str, records: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Arrange the records of `tabulate` as tables, one for each task and language, with one row for each model."""
    index = ["model"]
    for key, least in (("seeds", 2), ("folds", 1), ("validation", -math.inf)):
        if any(record[key] is not None and record[key] >= least for record in records):
            index.append(key)
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        task, language, *_ = record["score"].split()
        name = task if task == "multilingual" else f"{task}, {language}"
        shown = dict(record)
        if record["validation"] is not None:
            metric = find_metric(f"log {record['validation_metric']} last")
            shown["validation"] = metric.format(record["validation"])
        groups.setdefault(f"{dataset}: {name.replace('_', ' ')}", []).append(shown)
    tables = []
    for title, group in groups.items():
        units = list_units((record["units"], record["unit"]) for record in group)
        tables.append(arrange(group, index, title, units))
    return tables


def average_folds(values: Mapping[Any, float]) -> dict[Any, float]:
    """Average the seeds of each fold, for keys (fold, seed). Values by seed are returned unchanged.

    >>> average_folds({(1, 0): 0.5, (1, 1): 0.7, (2, 0): 0.2}), average_folds({0: 0.5})
    ({1: 0.6, 2: 0.2}, {0: 0.5})
    """
    groups: dict[Any, list[float]] = {}
    for key, value in values.items():
        groups.setdefault(key[0] if isinstance(key, tuple) else key, []).append(value)
    return {key: float(np.mean(group)) for key, group in groups.items()}


def _mean_validation(runs: Runs) -> tuple[str | None, float | None]:
    """Return the metric that selects the checkpoint of training runs, and its mean. (None, None) if a run has none."""
    name, values = None, []
    for results in runs.values():
        best = (results.content.get("training") or {}).get("best_validation") or {None: None}
        name, value = next(iter(best.items()))
        if value is None or "selected_on" in results.protocol:
            return None, None
        values.append(value)
    return name, float(np.mean(values))


def _scores_by_place(runs: Runs) -> dict[tuple[str, ...], dict[Any, Score]]:
    """Return the scores of the tables, `{path: {key of the run: score}}`."""
    scores: dict[tuple[str, ...], dict[Any, Score]] = {}
    for key, results in runs.items():
        for score in flat_scores(results.scores):
            task, metric = score.place[0], score.place[-1]
            if metric in SECTIONS[task].metrics or task == "multilingual":
                scores.setdefault(score.place, {})[key] = score
    return scores


def _pair_queries(runs: Runs, baseline: Runs, allow_different: bool) -> dict[str, Difference]:
    """Compare two models with one run each by query, `{score: difference}`. For more runs, only check the protocols."""
    reference = next(iter(baseline.values()))
    first = next(iter(runs.values()))
    paired: dict[str, Difference] = {}
    if len(runs) > 1 or len(baseline) > 1 or "mteb" in first.scores:
        for key, results in runs.items():
            check_protocols(baseline.get(key, reference), results, allow_different)
        return paired
    with suppress(ValueError) if allow_different else nullcontext():  # no query in common
        for row in compare(reference, first, allow_different=allow_different):
            paired[row["score"]] = Difference(row["difference"], row["low"], row["high"], p_value=row["p_value"])
    return paired


def compare_seeds(
    runs: Runs, baseline: Runs, place: Sequence[str], values: Mapping[Any, float], baseline_values: Mapping[Any, float]
) -> Difference | None:
    """Compare a score of two models on their common seeds or folds, paired by seed and, if possible, by query.

    Pairing by query requires values per query, and the same two or more recordings in all runs.

    Args:
        runs: Results by seed.
        baseline: Results of the baseline, by seed.
        place: Path of the score, such as `("retrieval", "eng", "t2a", "R@1")`. The language "mean" averages over
            languages.
        values: Score of each run, or mean score of each fold.
        baseline_values: The same of the baseline.

    Returns:
        The mean difference with its interval, or None without a common seed or fold.
    """
    keys = [key for key in values if key in baseline_values]
    if not keys:
        return None
    scores: list[np.ndarray] = []
    clusters: dict[str, np.ndarray] = {}
    for results in (runs, baseline):
        for key in keys:
            outcomes = get_outcomes(results[key], place) if key in results else None
            if outcomes is not None:
                scores.append(outcomes[0])
                clusters.setdefault(str(outcomes[1].tolist()), outcomes[1])

    pairing: tuple[Any, ...] = ()
    if len(scores) == 2 * len(keys) and len(clusters) == 1:
        first, second = np.split(np.stack(scores), 2)  # (seeds, Q) each
        pairing = (first, second, *clusters.values())
    return difference([values[key] for key in keys], [baseline_values[key] for key in keys], *pairing)


def get_outcomes(results: Results, place: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
    """Load the value of a score for each query (Q,), and the recording that each query belongs to (Q,).

    For the language "mean", the values of a query are averaged over languages. Return None if the results contain no
    values per query, or if the number of queries differs between languages.
    """
    arrays = results.arrays
    if place[-1] in ("MRV", "MSR"):
        if "multilingual/ranks" not in arrays:
            return None
        ranks = arrays["multilingual/ranks"].astype(float)
        outcomes = ranks.var(axis=1) if place[-1] == "MRV" else (ranks**2).mean(axis=1)
        return outcomes, arrays["multilingual/cluster"]

    task, language, *rest = place
    languages = results.protocol.get("languages", []) if language == "mean" else [language]
    names = []
    for code in languages:
        name = "/".join((task, code, *rest))
        names.append(name if name in arrays else f"{name}/score")
    columns = [arrays.get(name, ()) for name in names]
    clusters = arrays.get(f"{_parent(names[0])}/cluster") if names else None
    if clusters is None or not all(map(len, columns)) or len(set(map(len, columns))) != 1:
        return None
    return np.mean(columns, axis=0), clusters


def check_protocols(first: Results, second: Results, allow_different: bool) -> None:
    """Raise or warn if two results were evaluated on different data or with different settings."""
    differing = []
    for key in (*_MUST_AGREE, *filter(second.scores.__contains__, first.scores)):
        settings = []
        for results in (first, second):
            part = results.protocol.get(key)
            # The length of composed clips depends on the model.
            settings.append({**part, "clip_seconds": None} if isinstance(part, dict) else part)
        if settings[0] != settings[1]:
            differing.append(f"{key}: {' and '.join(map(_short, settings))}")
    if differing:
        message = "the results are not comparable; " + "; ".join(differing)
        if not allow_different:
            raise ValueError(f"{message}; evaluate both with the same data and protocol, or pass allow_different")
        warnings.warn(message, stacklevel=3)

    for key in _SHOULD_AGREE:
        settings = [first.protocol.get(key), second.protocol.get(key)]
        if settings[0] != settings[1]:
            warnings.warn(f"the results differ in {key}: {' and '.join(map(_short, settings))}", stacklevel=3)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _by_query(results: Results, name: str) -> pandas.Series[Any]:
    """Return an array of the results with the index (query id, occurrence), because a query id can occur again."""
    import pandas

    ids = pandas.Series(results.arrays[f"{_parent(name)}/query_id"])
    return pandas.Series(list(results.arrays[name]), [ids, ids.groupby(ids).cumcount()])
