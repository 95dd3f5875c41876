"""Plot the logs of training runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Panel titles and the log keys of their curves; keys that a run did not log are skipped.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("training loss", ("loss",)),
    ("validation recall", ("eval_mean_recall", "eval_{language}_t2a_R@1", "eval_{language}_a2t_R@1")),
    ("temperature", ("temperature",)),
    ("semantic radius", ("radius_t2a", "radius_a2t")),
)
_LEAST_SPAN = 0.1  # of the vertical axis, as a share of its middle
_DRIFT_CURVES = {
    "drift_cosine": "InfoNCE, text to audio",
    "drift_cosine_svr": "with support vectors",
    "drift_cosine_objective": "whole objective",
}

Curve = tuple[str, Sequence[Sequence[Mapping[str, Any]]]]
"""Tuple of a log key and a list of log histories, one per seed."""


def plot_training_curves(log_history: Sequence[Mapping[str, Any]], path: str | Path, language: str = "eng") -> None:
    """Plot loss, validation recall with its chance level, temperature and radius over the training steps.

    Args:
        log_history: Training log, `trainer.state.log_history`.
        path: Output path. The suffix sets the format (.png, .pdf, .svg ...). The file is written atomically.

    Raises:
        ValueError: The log contains none of these values.
    """
    logged = set().union(*log_history)
    panels: dict[str, dict[str, Curve]] = {}
    for title, keys in _PANELS:
        for template in keys:
            key = template.format(language=language)
            if key in logged:
                panels.setdefault(title, {})[key.removeprefix("eval_")] = key, [log_history]
    if not panels:
        raise ValueError(f"the log history of {len(log_history)} entries contains no value to plot")
    plot_runs(panels, path)


def plot_drift(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Plot the values logged by `callbacks.DriftCallback`, as in figures 1, 3 and 4 of the SupCLAP paper.

    The first three panels show the drift cosine over the steps (1 means no drift), each in one reading of the paper's
    figure 1 (see `drift.drift_cosine`). The next panel shows the mean radius in the last batch before each log, if it
    was logged. The last panel shows histograms of the cosine similarity of positive pairs at the start, middle and end
    of the run. Each histogram contains a tenth of the logged batches. The arguments are as in `plot_training_curves`.

    Raises:
        ValueError: The log contains no drift values.
    """
    tracked = [entry for entry in log_history if "drift_cosine" in entry]
    if not tracked:
        raise ValueError(f"the {len(log_history)} entries of the log contain no drift_cosine; train with track_drift")
    panels: dict[str, dict[str, Curve]] = {}
    for title, suffix in (
        ("drift, along the sphere (SupCLAP fig. 1)", ""),
        ("drift, along a - t", "_difference"),
        ("drift, along a+ (eq. 4)", "_target"),
    ):
        for name, label in _DRIFT_CURVES.items():
            if f"{name}{suffix}" in tracked[0]:
                panels.setdefault(title, {})[label] = f"{name}{suffix}", [tracked]
    for direction in ("t2a", "a2t"):
        if f"radius_mean_{direction}" in tracked[0]:
            panels.setdefault("semantic radius", {})[direction] = f"radius_mean_{direction}", [tracked]

    window = max(1, len(tracked) // 10)
    pairs = panels["positive pairs (share of the batch)"] = {}
    for label, first in (("start", 0), ("middle", (len(tracked) - window) // 2), ("end", len(tracked) - window)):
        pairs[label] = "positive_similarity_histogram", [tracked[first : first + window]]
    plot_runs(panels, path)


def epoch_means(log_history: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Average logged values over each epoch, as in figure 3 of the SupCLAP paper.

    Returns:
        Log entries `{"step": last step of the epoch, "epoch_NAME": mean}` for each name and epoch that has been logged.

    >>> first, second = {"step": 1, "epoch": 0.5, "R": 1.0}, {"step": 2, "epoch": 1.0, "R": 0.5}
    >>> epoch_means([first, second, {"step": 3, "epoch": 1.5, "R": 0.25}], ["R"])
    [{'step': 2, 'epoch_R': 0.75}, {'step': 3, 'epoch_R': 0.25}]
    """
    means = []
    for name in names:
        epochs: dict[int, list[Mapping[str, Any]]] = {}
        for entry in log_history:
            if name in entry:
                epochs.setdefault(math.ceil(entry["epoch"]), []).append(entry)
        for entries in epochs.values():
            mean = np.mean([entry[name] for entry in entries])
            means.append({"step": entries[-1]["step"], f"epoch_{name}": float(mean)})
    return means


def plot_runs(panels: Mapping[str, Mapping[str, Curve]], path: str | Path) -> None:
    """Plot several runs in one figure, as in figures 1, 3, 4 and 5 of the SupCLAP paper.

    A curve shows the mean over the seeds, with a band from minimum to maximum. With one seed, the mean radius has a
    band of one standard deviation within the batch. Histograms are summed over the seeds and logged batches.

    `panels` is `{panel title: {curve label: (log key, log histories)}}`, with one log history per seed. Raise
    ValueError if no run has logged the keys of a panel.
    """
    # the import takes a second, which would delay the first training step
    from matplotlib.figure import Figure

    rows, columns = -(-len(panels) // 3), min(len(panels), 3)
    figure = Figure(figsize=(4.5 * columns, 3.6 * rows), layout="constrained")
    for position, (title, curves) in enumerate(panels.items(), start=1):
        _draw_panel(figure.add_subplot(rows, columns, position), title, curves)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=Path(path).suffix.removeprefix(".") or "png", dpi=120)


def _draw_panel(axes: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    xlabel = "step"
    for label, (key, seeds) in curves.items():
        logged = []
        for history in seeds:
            entries = [entry for entry in history if key in entry]
            if entries:
                logged.append(entries)
        if not logged:
            continue

        if isinstance(logged[0][0][key], Mapping):
            _draw_histogram(axes, label, [entry[key] for entry in chain.from_iterable(logged)])
            xlabel = "cosine"
        else:
            _draw_curve(axes, label, key, logged, has_seeds=len(seeds) > 1)

    if not axes.has_data():
        names = " or ".join(sorted({key for key, _ in curves.values()}))
        raise ValueError(f"none of the runs {list(curves)} has logged {names}")
    axes.set(title=title, xlabel=xlabel)
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    half = _LEAST_SPAN * abs(middle) / 2
    if xlabel == "step" and high - low < 2 * half:  # otherwise, a change in the fourth digit looks like a swing
        axes.set_ylim(middle - half, middle + half)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_histogram(axes: Axes, label: str, histograms: Sequence[Mapping[str, Any]]) -> None:
    """Draw the sum of histograms with equal bins, from the first to the last non-empty bin."""
    counts = np.sum([histogram["counts"] for histogram in histograms], axis=0)
    edges = np.linspace(histograms[0]["low"], histograms[0]["high"], len(counts) + 1)
    first, last = np.flatnonzero(counts)[[0, -1]]
    axes.stairs(counts[first : last + 1] / counts.sum(), edges[first : last + 2], label=label)


def _draw_curve(axes: Axes, label: str, key: str, logged: Sequence[Sequence[Any]], has_seeds: bool) -> None:
    """Draw the mean over the runs in `logged`, up to the last step of the shortest run, and its band."""
    shortest = min(logged, key=len)
    steps = [entry["step"] for entry in shortest]
    values = []
    for entries in logged:
        values.append([entry[key] for entry in entries[: len(steps)]])
    by_seed = np.array(values)  # (seeds, length)
    (line,) = axes.plot(steps, by_seed.mean(axis=0), marker="." if len(steps) < 40 else None, label=label)
    if f"{key}_chance" in shortest[-1]:
        level = shortest[-1][f"{key}_chance"]
        axes.axhline(level, color=line.get_color(), linestyle=":", label=f"chance of {label}")

    if has_seeds:
        axes.fill_between(steps, by_seed.min(axis=0), by_seed.max(axis=0), alpha=0.15)
    elif key.startswith("radius_mean_"):
        std = np.array([entry[key.replace("mean", "std")] for entry in shortest])
        axes.fill_between(steps, by_seed[0] - std, by_seed[0] + std, alpha=0.15)
