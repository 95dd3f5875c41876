"""Numbers of the runs of a table: scores, logged values and costs, and their differences to a baseline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.evaluation.comparison import compare_seeds
from modeling_supclap.metrics.comparison import summarize
from modeling_supclap.recipes.runs import Step
from modeling_supclap.training.options import captions_per_clip

if TYPE_CHECKING:
    from modeling_supclap.evaluation.results import Results

    Run = tuple[Results, list[dict[str, Any]]]  # results and training log, from `load_run`


def load_run(run: Sequence[Step]) -> Run:
    """Load the results of a run, and the log of its last training (in post-training, stage B).

    The section "training" of the results comes from the last training. "left_out" contains the ids of the clips with
    unusable recordings, for each split that a step has read. The mean radii of each epoch are appended to the log and,
    if the results contain the cosines of matching test pairs, their histogram.
    """
    import torch

    from modeling_supclap.evaluation.results import Results
    from modeling_supclap.training.drift import similarity_histogram
    from modeling_supclap.training.plots import epoch_means

    log: list[dict[str, Any]] = []
    training: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for step in run:
        if step.recipe == "negatives":  # writes a table, and no results
            continue
        results = Results.load(step.folder)
        training = results.content.get("training") or training
        for split, clips in results.content.get("left_out", {}).items():
            left_out[f"{step.settings.get('dataset', 'synthetic')} {split}"] = clips
        for folder in (step.folder, step.folder / "stage_b"):
            path = folder / "trainer_state.json"
            if path.is_file():
                log = json.loads(path.read_text(encoding="utf-8"))["log_history"]

    results.content |= {"training": training, "left_out": {name: clips for name, clips in left_out.items() if clips}}
    log += epoch_means(log, ("radius_t2a", "radius_a2t"))
    cosines = results.arrays.get("similarity/eng/positive")
    if cosines is not None:
        histogram = similarity_histogram(torch.from_numpy(cosines).float())
        log.append({"step": log[-1]["step"] if log else 0, "test_similarity": histogram})
    return results, log


def get_value(results: Results, log: Sequence[Mapping[str, Any]], place: Sequence[str]) -> float | None:
    """Look up the value of one table column in the results and training log of a run. Return None if it is missing.

    `place` is the column name, split into words. The columns are:

    - `retrieval eng t2a R@1`, for example: A score in the results. The language "mean" averages over languages.
    - `training KEY`: An entry of the "training" section of the results. `training epoch_runtime` is the mean time of an
      epoch, with its evaluation.
    - `similarity positive` or `similarity negative`: Mean cosine of matching or non-matching test pairs.
    - `similarity separation`: Difference of these two means, divided by the standard deviation of non-matching pairs.
    - `captions relative_distance`: Result of `get_relative_distance`.
    - `log NAME mean`, `log NAME first` or `log NAME last`: A value from the training log.
    """
    from modeling_supclap.evaluation.results import flat_scores

    if place[0] == "training":
        training = results.content["training"]
        logged = {**training.get("last_logs", {}), **training}
        if place[1] == "epoch_runtime" and "train_runtime" in logged:
            return logged["train_runtime"] / logged["epoch"]
        return logged.get(place[1])
    if place[0] == "similarity":
        positive, negative = (results.arrays["similarity/eng/positive"], results.arrays["similarity/eng/negative"])
        separation = (positive.mean() - negative.mean()) / negative.std()
        return float({"positive": positive.mean(), "negative": negative.mean(), "separation": separation}[place[1]])
    if place[0] == "captions":
        return get_relative_distance(results)
    if place[0] == "log":
        values = [entry[place[1]] for entry in log if place[1] in entry]
        if not values:
            return None
        return {"mean": float(np.mean(values)), "first": values[0], "last": values[-1]}[place[2]]

    scores = {score.place: score.value for score in flat_scores(results.scores)}
    if tuple(place) in scores or place[1] != "mean":
        return scores.get(tuple(place))
    task, _, *rest = place
    of_languages = [value for path, value in scores.items() if path[0] == task and [*path[2:]] == rest]
    return float(np.mean(of_languages)) if of_languages else None


def get_relative_distance(results: Results) -> float:
    """Compute the mean distance between translations and their English captions, relative to unrelated captions.

    The reference is the mean distance between two English captions. 0 means that the languages agree. 1 means that a
    translation is as far from its English caption as an unrelated one. Unlike the distance in ATRI eq. 15, the value is
    not small for a collapsed model with almost equal embeddings.
    """
    from scipy.spatial.distance import pdist

    others = results.protocol["languages"][1:]
    to_english = np.mean([results.arrays[f"multilingual/distance/{language}"] for language in others])
    return float(to_english / pdist(results.arrays["embeddings/text/eng"]).mean())


def get_values(runs: Mapping[int, Run], place: Sequence[str]) -> dict[int, float]:
    """Return a score by seed, for the runs that have it."""
    values = {}
    for seed, run in runs.items():
        value = get_value(*run, place)
        if value is not None:
            values[seed] = value
    return values


def summarize_runs(runs: Mapping[int, Run], baseline: Mapping[int, Run], place: Sequence[str]) -> dict[str, Any]:
    """Return "values", "mean" and "std" of a score over the runs that have this score, `{seed: run}`.

    With runs of a baseline, add "differences", "low", "high" and "recordings", as `gather` describes.
    """
    values, others = get_values(runs, place), get_values(baseline, place)
    if not values:
        return {"values": []}
    cell = summarize(list(values.values()))
    summary: dict[str, Any] = {"values": list(values.values()), "mean": cell.value, "std": cell.std}

    results = {seed: run[0] for seed, run in runs.items()}
    baseline_results = {seed: run[0] for seed, run in baseline.items()}
    found = compare_seeds(results, baseline_results, place, values, others)
    if found is not None:
        summary["differences"] = list(found.values)
        if found.recordings is not None:
            summary["recordings"] = found.recordings
        if found.low is not None:
            summary |= {"low": found.low, "high": found.high}
    return summary


def get_cost(runs: Sequence[Run]) -> dict[str, float]:
    """Compute the mean training costs of several runs: "steps", "captions", and "seconds" of processor time.

    "captions" is the number of captions that the text encoder embeds: steps * clips per step * texts per clip. The
    training of the model that a run starts from is not included. A cost is missing if no run has recorded it.
    """
    costs: dict[str, list[float]] = {"steps": [], "captions": [], "seconds": []}
    for results, _ in runs:
        training = results.content["training"]
        if "steps" in training:
            costs["steps"].append(training["steps"])
        if "captions" in training:  # of post-training
            costs["captions"].append(training["captions"])
        elif "steps" in training:
            arguments = training["arguments"]
            texts = captions_per_clip(
                arguments["loss"],
                arguments["languages"],
                arguments.get("languages_per_clip"),  # not in older results
                arguments.get("negatives_per_clip", 0),
            )
            clips = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
            clips *= training.get("processes", 1)
            costs["captions"].append(training["steps"] * clips * texts)
        if training:
            costs["seconds"].append(training.get("process_seconds", training["seconds"]))
    return {name: float(np.mean(values)) for name, values in costs.items() if values}
