"""SVG figures for the evaluation report."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.atomic_files import atomic_write

from .results import Results

MAX_PROJECTED_CLIPS = 100
MAX_COLORS = 10
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def figures(results: Results) -> Iterator[tuple[str, str]]:
    """Draw the figures for which the results contain data.

    Yields:
        Pairs of figure name and SVG: "similarity", and "projection" if scikit-learn is installed and there are at least
        three clips. If the projection is coloured by class, the last pair is ("class_colors", class names).
    """
    arrays = results.arrays
    languages = [name for name in results.protocol["languages"] if f"similarity/{name}/positive" in arrays]
    if languages:
        yield "similarity", similarity_figure(results, languages)
    if len(arrays.get("embeddings/audio", ())) >= 3 and find_spec("sklearn"):
        classes = sorted(set(results.arrays["clips/label"].tolist()) - {""})
        has_colors = 1 < len(classes) <= MAX_COLORS
        yield "projection", projection_figure(results, languages, classes if has_colors else ())
        if has_colors:
            yield "class_colors", ", ".join(classes)


def similarity_figure(results: Results, languages: Sequence[str]) -> str:
    """Draw histograms of the cosine similarity of clip-caption pairs (SupCLAP figure 4) as an SVG string.

    Each language has a panel with its correct pairs, and with the wrong pairs in the first language.
    """
    from matplotlib.figure import Figure

    correct = {name: results.arrays[f"similarity/{name}/positive"] for name in languages}
    wrong = results.arrays[f"similarity/{languages[0]}/negative"]
    together = np.concatenate([wrong, *correct.values()]).astype(np.float64)
    low, high = together.min(), together.max()
    middle = (low + high) / 2  # of a collapsed model, all cosines are equal
    edges = np.linspace(min(low, middle - 5e-4), max(high, middle + 5e-4), 41)

    columns = min(len(correct), 2)  # legible on a phone
    rows = -(-len(correct) // columns)
    figure = Figure(figsize=(5.6, 2.2 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (language, cosines) in zip(panels, correct.items(), strict=False):
        for label, values, style in (
            ("correct", cosines, {"fill": True, "color": "C0", "alpha": 0.5}),
            ("wrong", wrong, {"color": "black"}),
        ):
            counts, _ = np.histogram(values, edges)
            axes.stairs(counts / max(len(values), 1), edges, label=f"{label} pairs", **style)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(language, fontsize="medium")
    for axes in panels[len(correct) :]:
        axes.remove()
    figure.supxlabel("cosine of clip and caption", fontsize="medium")
    figure.supylabel("share of pairs", fontsize="medium")
    panels[0].legend(frameon=False, fontsize="small")
    return _svg(figure, f"Histograms of the cosine of correct pairs in {', '.join(languages)} and of wrong pairs")


def projection_figure(results: Results, languages: Sequence[str], classes: Sequence[str] = ()) -> str:
    """Draw a t-SNE projection of clips and captions as an SVG string (ATRI figures 3 and 4).

    A line connects each caption with its clip. If `classes` are passed, colours show the class and markers show the
    language. Otherwise colours show the language.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.6), layout="constrained")  # small, so that its text is legible on a phone
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    _draw_projection(axes, results, languages, classes)
    axes.legend(fontsize="medium", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.2)
    colors = f", coloured by class: {', '.join(classes)}" if classes else ""
    return _svg(figure, f"Projection of the embeddings of clips and captions in {', '.join(languages)}{colors}")


def save_projections(several: Mapping[str, Results], path: str | Path, num_clips: int = MAX_PROJECTED_CLIPS) -> None:
    """Draw t-SNE projections of several models side by side (ATRI figures 3, 4). The suffix sets the image format.

    `num_clips` clips with their captions are drawn at random from those with stored embeddings, equal for all models.
    """
    from matplotlib.figure import Figure

    stored = next(iter(several.values())).arrays["embeddings/audio_clip"]
    chosen = np.sort(np.random.default_rng(0).permutation(len(stored))[:num_clips])
    figure = Figure(figsize=(4.6 * len(several), 4.6), layout="constrained")
    for number, (name, results) in enumerate(several.items(), start=1):
        axes = figure.add_subplot(1, len(several), number, title=name)
        _draw_projection(axes, results, results.protocol["languages"], chosen=chosen)
    figure.axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, format=Path(path).suffix.removeprefix(".") or "png", dpi=120)


def _draw_projection(
    axes: Any,
    results: Results,
    languages: Sequence[str],
    classes: Sequence[str] = (),
    chosen: Any = slice(MAX_PROJECTED_CLIPS),
) -> None:
    arrays = results.arrays
    shown_clips = arrays["embeddings/audio_clip"][chosen]
    groups = {"audio": (arrays["embeddings/audio"][chosen], shown_clips)}
    for language in languages:
        clips = arrays[f"embeddings/text_clip/{language}"]
        is_shown = np.isin(clips, shown_clips)
        groups[language] = (arrays[f"embeddings/text/{language}"][is_shown], clips[is_shown])

    embeds, owners = zip(*groups.values(), strict=True)
    positions = np.split(_tsne(np.concatenate(embeds)), np.cumsum(list(map(len, owners)))[:-1])
    audio_positions = dict(zip(shown_clips.tolist(), positions[0], strict=True))

    for number, ((name, (_, clips)), points) in enumerate(zip(groups.items(), positions, strict=True)):
        style: dict[str, Any] = {"s": 60 if name == "audio" else 14, "zorder": 2}
        style["marker"] = "*" if name == "audio" else ("osD^vPX<>"[(number - 1) % 9] if classes else "o")
        if name != "audio":
            # One line with NaN gaps instead of one line per caption halves the size of the SVG.
            starts = np.array(list(map(audio_positions.__getitem__, clips.tolist())))
            # (captions, 3, 2)
            ends = np.stack([starts, points, np.full_like(points, np.nan)], axis=1)
            axes.plot(*ends.reshape(-1, 2).T, color="0.6", linewidth=0.5, zorder=1)

        if not classes:
            axes.scatter(points[:, 0], points[:, 1], label=name, **style)
            continue
        labels = arrays["clips/label"][clips]
        for number, label in enumerate(classes):
            class_points = points[labels == label]
            axes.scatter(
                class_points[:, 0],
                class_points[:, 1],
                color=f"C{number}",
                label=label if name == "audio" else None,
                **style,
            )

    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _tsne(embeds: np.ndarray) -> np.ndarray:
    from sklearn.manifold import TSNE

    # scikit-learn divides by the spread of the points, and crashes if they are all equal.
    if np.ptp(embeds, axis=0).max() < 1e-6:
        return np.zeros((len(embeds), 2))
    perplexity = min(30.0, (len(embeds) - 1) / 3)
    # With the default of 1,000 steps the divergence is only 2 % lower.
    return TSNE(perplexity=perplexity, init="pca", random_state=0, metric="cosine", max_iter=500).fit_transform(embeds)


def _svg(figure: Any, label: str) -> str:
    """Convert a figure to SVG with selectable text. The output is deterministic."""
    import matplotlib

    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", metadata=_NO_METADATA, transparent=True)
    return f'<svg role="img" aria-label="{escape(label)}"' + drawn.getvalue().partition("<svg")[2]
