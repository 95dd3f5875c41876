"""The pictures of an evaluation report, drawn from results as SVG elements."""

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
    """Name and SVG of each picture that the results have the numbers for.

    Args:
        results: Of an evaluation with retrieval.

    Yields:
        "similarity", and where scikit-learn is installed and there are three clips, "projection"; then also
        "class_colors", the classes, where they have the colours of that picture.
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
    """Cosine of right pairs by language, and of wrong pairs of the first language [S fig. 4]."""
    figure, axes = _figure(3.4)
    right = {language: results.arrays[f"similarity/{language}/positive"] for language in languages}
    wrong = results.arrays[f"similarity/{languages[0]}/negative"]
    edges = np.histogram_bin_edges(np.concatenate([*right.values(), wrong]), bins=40)
    for number, (language, cosines) in enumerate(right.items(), start=1):  # audio has the first colour below
        _draw_share(axes, cosines, edges, f"right, {language}", color=f"C{number}")
    _draw_share(axes, wrong, edges, f"wrong, {languages[0]}", color="black", linestyle="--")
    axes.set(xlabel="cosine of clip and caption", ylabel="share of the pairs")
    _legend(axes)
    return _svg(figure, f"Histograms of the cosine of right pairs in {', '.join(languages)} and of wrong pairs")


def _draw_share(axes: Any, cosines: np.ndarray, edges: np.ndarray, label: str, **style: Any) -> None:
    counts, _ = np.histogram(cosines, edges)
    axes.stairs(counts / max(len(cosines), 1), edges, label=label, **style)


def projection_figure(results: Results, languages: Sequence[str], classes: Sequence[str] = ()) -> str:
    """Clips and their captions in two dimensions by t-SNE, a line joining what belongs together [A fig. 3 and 4].

    Args:
        results: Of an evaluation with retrieval.
        languages: Whose captions are drawn.
        classes: Where there are any, they have the colours, and the languages have shapes.
    """
    figure, axes = _figure(4.6)
    _draw_projection(axes, results, languages, classes)
    _legend(axes)
    told = f", coloured by class: {', '.join(classes)}" if classes else ""
    return _svg(figure, f"Map of the embeddings of clips and of their captions in {', '.join(languages)}{told}")


def save_projections(several: Mapping[str, Results], path: str | Path) -> None:
    """Draws the embedding spaces of several models side by side, as `projection_figure` does [A fig. 3 and 4].

    Args:
        several: The results of each, by its name.
        path: The PNG to write; it appears whole or not at all.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(several), 4.6), layout="constrained")
    for number, (name, results) in enumerate(several.items(), start=1):
        axes = figure.add_subplot(1, len(several), number, title=name)
        _draw_projection(axes, results, results.protocol["languages"])
    figure.axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)


def _draw_projection(axes: Any, results: Results, languages: Sequence[str], classes: Sequence[str] = ()) -> None:
    arrays = results.arrays
    shown = arrays["embeddings/audio_clip"][:MAX_PROJECTED_CLIPS]
    groups = {"audio": (arrays["embeddings/audio"][: len(shown)], shown)}
    for language in languages:
        clips = arrays[f"embeddings/text_clip/{language}"]
        kept = np.isin(clips, shown)
        groups[language] = (arrays[f"embeddings/text/{language}"][kept], clips[kept])

    embeds, owners = zip(*groups.values(), strict=True)
    places = np.split(_tsne(np.concatenate(embeds)), np.cumsum(list(map(len, owners)))[:-1])
    audio_places = dict(zip(shown.tolist(), places[0], strict=True))

    for number, ((name, (_, clips)), points) in enumerate(zip(groups.items(), places, strict=True)):
        style: dict[str, Any] = {"s": 60 if name == "audio" else 14, "zorder": 2}
        style["marker"] = "*" if name == "audio" else ("osD^vPX<>"[(number - 1) % 9] if classes else "o")
        if name != "audio":
            # One line with gaps, not one for each caption: half the bytes of the picture.
            starts = np.array(list(map(audio_places.__getitem__, clips.tolist())))
            ends = np.stack([starts, points, np.full_like(points, np.nan)], axis=1)  # (captions, 3, 2)
            axes.plot(*ends.reshape(-1, 2).T, color="0.6", linewidth=0.5, zorder=1)

        if not classes:
            axes.scatter(points[:, 0], points[:, 1], label=name, **style)
            continue
        labels = arrays["clips/label"][clips]
        for place, label in enumerate(classes):
            own = points[labels == label]
            axes.scatter(own[:, 0], own[:, 1], color=f"C{place}", label=label if name == "audio" else None, **style)

    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _tsne(embeds: np.ndarray) -> np.ndarray:
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(embeds) - 1) / 3)
    # The other half of the 1,000 steps that are usual lowers the divergence by 2 %, which no eye sees.
    return TSNE(perplexity=perplexity, init="pca", random_state=0, metric="cosine", max_iter=500).fit_transform(embeds)


def _figure(height: float) -> tuple[Any, Any]:
    """Of few inches, so that the letters can still be read where a telephone makes it narrower."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Any) -> None:
    """Beside the axes, where it hides nothing."""
    axes.legend(fontsize="medium", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.2)


def _svg(figure: Any, label: str) -> str:
    """The figure as an SVG element whose text stays text, with a name; the same figure gives the same string."""
    import matplotlib

    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", metadata=_NO_METADATA, transparent=True)
    return f'<svg role="img" aria-label="{escape(label)}"' + drawn.getvalue().partition("<svg")[2]
