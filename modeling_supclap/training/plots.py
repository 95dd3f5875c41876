"""Draws the numbers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Shown when a run logged them: panel title, then the keys drawn in it.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("training loss", ("loss",)),
    ("validation recall", ("eval_mean_recall", "eval_{language}_t2a_R@1", "eval_{language}_a2t_R@1")),
    ("temperature", ("temperature",)),
    ("semantic radius", ("radius_t2a", "radius_a2t")),
    ("throughput (clips per second)", ("clips_per_second",)),
)
_DRIFT_CURVES = {
    "drift_cosine": "InfoNCE, text to audio",
    "drift_cosine_svr": "with support vectors",
    "drift_cosine_objective": "whole objective",
}

Curve = tuple[str, Sequence[Sequence[Mapping[str, Any]]]]
"""A logged name, and what was logged, one history a seed."""


def plot_training_curves(log_history: Sequence[Mapping[str, Any]], path: str | Path, language: str = "eng") -> None:
    """Draws loss, validation recall, temperature, radius and throughput over the steps of a run.

    Args:
        log_history: What was logged, `trainer.state.log_history`.
        path: The picture to write, in the format of its suffix: .png, .pdf, .svg ...
        language: The language whose recall is drawn.

    Raises:
        ValueError: The history holds none of these.
    """
    logged = set().union(*log_history)
    panels: dict[str, dict[str, Curve]] = {}
    for title, keys in _PANELS:
        for template in keys:
            key = template.format(language=language)
            if key in logged:
                panels.setdefault(title, {})[key.removeprefix("eval_")] = key, [log_history]
    if not panels:
        raise ValueError(f"the log history of {len(log_history)} entries holds no training numbers to draw")
    plot_runs(panels, path)


def plot_drift(log_history: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draws what `callbacks.DriftCallback` logged, after the SupCLAP paper's figures 1, 3 and 4.

    Left, the drift cosine over the steps (1 is no drift). Middle, where the run has a radius, its mean and one standard
    deviation within the batch. Right, how the cosine of the positive pairs is distributed at the start, in the middle
    and at the end of the run, each from a tenth of the logged batches.

    Args:
        log_history: What was logged, `trainer.state.log_history`.
        path: The picture to write, in the format of its suffix: .png, .pdf, .svg ...

    Raises:
        ValueError: No drift was logged.
    """
    tracked = [entry for entry in log_history if "drift_cosine" in entry]
    if not tracked:
        raise ValueError(
            f"the log history of {len(log_history)} entries holds no drift; train with track_drift, "
            "for logging_steps or more"
        )

    panels: dict[str, dict[str, Curve]] = {"drift (cosine of update and pull)": {}}
    for key, label in _DRIFT_CURVES.items():
        if key in tracked[0]:
            panels["drift (cosine of update and pull)"][label] = key, [tracked]
    for direction in ("t2a", "a2t"):
        if f"radius_mean_{direction}" in tracked[0]:
            panels.setdefault("semantic radius", {})[direction] = f"radius_mean_{direction}", [tracked]

    window = max(1, len(tracked) // 10)
    pairs = panels["positive pairs (share of the batch)"] = {}
    for label, first in (("start", 0), ("middle", (len(tracked) - window) // 2), ("end", len(tracked) - window)):
        pairs[label] = "positive_similarity_histogram", [tracked[first : first + window]]
    plot_runs(panels, path)


def plot_runs(panels: Mapping[str, Mapping[str, Curve]], path: str | Path) -> None:
    """Draws several runs in one picture, after the SupCLAP paper's figures 1, 3, 4 and 5.

    Args:
        panels: By the title of a panel, and by the label in it, what is drawn. A curve is the mean over the seeds, its
            band reaches from the least to the largest; that of the mean radius of one seed is one standard deviation
            within the batch. Histograms are added up.
        path: The picture to write, in the format of its suffix: .png, .pdf, .svg ...

    Raises:
        ValueError: No run of a panel has logged what it draws.
    """
    from matplotlib.figure import Figure  # takes a second, which a run should not wait for before its first step

    rows, columns = -(-len(panels) // 3), min(len(panels), 3)
    figure = Figure(figsize=(4.5 * columns, 3.6 * rows), layout="constrained")
    for place, (title, curves) in enumerate(panels.items(), start=1):
        _draw_panel(figure.add_subplot(rows, columns, place), title, curves)
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, format=Path(path).suffix.removeprefix(".") or "png", dpi=120)


def _draw_panel(axes: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    xlabel = "step"
    for label, (key, seeds) in curves.items():
        drawn = []
        for history in seeds:
            steps, values = _curve(history, key)
            if steps:
                drawn.append((steps, values))
        if not drawn:
            continue

        if isinstance(drawn[0][1][0], Mapping):
            _draw_histogram(axes, [histogram for _, values in drawn for histogram in values], label)
            xlabel = "cosine"
            continue

        # The mean of the seeds, as far as the shortest run goes.
        steps = min((steps for steps, _ in drawn), key=len)
        several = np.array([values[: len(steps)] for _, values in drawn])  # (seeds, length)
        axes.plot(steps, several.mean(axis=0), marker="." if len(steps) < 40 else None, label=label)

        if len(seeds) > 1:
            axes.fill_between(steps, several.min(axis=0), several.max(axis=0), alpha=0.15)
        elif key.startswith("radius_mean_"):
            spread = np.array(_curve(seeds[0], key.replace("mean", "std"))[1])
            axes.fill_between(steps, several[0] - spread, several[0] + spread, alpha=0.15)

    if not axes.has_data():
        names = " or ".join(sorted({key for key, _ in curves.values()}))
        raise ValueError(f"none of the runs {list(curves)} has logged {names}")
    axes.set(title=title, xlabel=xlabel)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_histogram(axes: Axes, histograms: Sequence[Mapping[str, Any]], label: str) -> None:
    """Draws the sum of histograms of equal bins, from the first bin that holds anything to the last."""
    counts = np.sum([histogram["counts"] for histogram in histograms], axis=0)
    edges = np.linspace(histograms[0]["low"], histograms[0]["high"], len(counts) + 1)

    held = np.flatnonzero(counts)
    shown = slice(held[0], held[-1] + 1)
    axes.stairs(counts[shown] / counts.sum(), edges[held[0] : held[-1] + 2], label=label)


def _curve(log_history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[Any]]:
    """Gives the steps at which something was logged and its values there."""
    steps: list[int] = []
    values: list[Any] = []
    for entry in log_history:
        if key in entry:
            steps.append(entry["step"])
            values.append(entry[key])
    return steps, values
