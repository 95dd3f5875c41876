"""Numbers of a run to pictures for people."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Shown when a run logged them: panel title, then the keys drawn in it.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("training loss", ("loss",)),
    ("validation recall", ("eval_mean_recall", "eval_{language}_t2a_R@1", "eval_{language}_a2t_R@1")),
    ("temperature", ("temperature",)),
    ("semantic radius", ("radius_t2a", "radius_a2t")),
    ("throughput (clips per second)", ("clips_per_second",)),
)


def plot_training_curves(log_history: Sequence[Mapping[str, Any]], path: str | Path, language: str = "eng") -> None:
    """Draws loss, validation recall, temperature, radius and throughput over the steps of a run.

    Args:
        log_history: `trainer.state.log_history`.
        path: the PNG to write; it appears whole or not at all.
        language: whose recall is drawn.

    Raises:
        ValueError: the history holds none of these.
    """
    panels = []
    for title, keys in _PANELS:
        named = [key.format(language=language) for key in keys]
        curves = {key: _curve(log_history, key) for key in named if any(key in entry for entry in log_history)}
        if curves:
            panels.append((title, curves))
    if not panels:
        raise ValueError(f"the log history of {len(log_history)} entries holds no training numbers to draw")
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for key, (steps, values) in curves.items():
            axes.plot(steps, values, marker="." if len(steps) < 40 else None, label=key.removeprefix("eval_"))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    temporary = f"{path}.tmp"
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)


def _curve(log_history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
    return [step for step, _ in points], [value for _, value in points]
