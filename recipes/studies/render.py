"""Format reproduced tables as Markdown for the docs and as HTML pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modeling_supclap.datasets_scripts.builders.recordings import listing
from modeling_supclap.metrics.comparison import Cell
from modeling_supclap.recipes.result_tables import find_metric, format_heading, html_page, markdown_lines

CASES = (
    "For each language: the rank of the caption's own clip, counted from 1, and the label of the top-ranked clip, or "
    "its first caption."
)


def format_score(column: str, score: Mapping[str, Any]) -> str:
    """Format a score as mean ± standard deviation, difference to the baseline (if any), and the paper's number.

    >>> score = {"mean": 0.5, "std": 0.01, "difference": 0.1, "low": 0.05, "high": 0.15, "differences": [0.1, 0.1]}
    >>> format_score("retrieval eng t2a R@1", {**score, "paper": 0.41})
    '50.0 ± 1.0; +10.0 (+5.0 to +15.0), 2 of 2 up; paper 41.0'
    """
    metric = find_metric(column)
    parts = [Cell(score["mean"], std=score.get("std")).format(metric)]
    differences = score.get("differences")
    if differences:
        mean = float(np.mean(differences))
        up = sum(difference > 0 for difference in differences)
        text = Cell(mean, score.get("low"), score.get("high")).format(metric, signed=True)
        parts.append(f"{text}, {up} of {len(differences)} up")
    if score.get("paper") is not None:
        parts.append(f"paper {metric.format(score['paper'])}")
    return "; ".join(parts)


def table_lines(content: Mapping[str, Any]) -> list[list[str]]:
    """Format a table from `gather` as rows of text, heading first. Cells include the paper's numbers."""
    rows = content["rows"]
    columns: dict[str, None] = {}
    recorded: set[str] = set()
    for row in rows:
        columns |= dict.fromkeys(row["scores"])
        recorded.update(row.get("cost", {}))
    has_datasets = len({row["dataset"] for row in rows}) > 1
    costs = [name for name in ("steps", "captions", "seconds") if name in recorded]

    headings = [format_heading(column) + _format_levels(column, rows) for column in columns]
    lines = [["row", *(["data"] if has_datasets else []), *costs, *headings]]
    for row in rows:
        line = [row["model"], *([row["dataset"]] if has_datasets else [])]
        line += [f"{row['cost'][name]:,.0f}" if name in row.get("cost", {}) else "" for name in costs]
        for column in columns:
            line.append(format_score(column, row["scores"][column]) if column in row["scores"] else "")
        lines.append(line)
    return lines


def _format_levels(column: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the scores at chance and of an order-blind model for a heading. Each distinct value is shown once."""
    parts = []
    for level in ("chance", "order_blind"):
        values = [row["scores"][column].get(level) for row in rows if column in row["scores"]]
        texts = dict.fromkeys(find_metric(column).format(value) for value in values if value is not None)
        if texts:
            parts.append(f"{level.replace('_', '-')} {' / '.join(texts)}")
    return f" ({', '.join(parts)})" if parts else ""


def caption(content: Mapping[str, Any]) -> str:
    """Return the caption of a table, which explains its numbers."""
    rows = content["rows"]
    all_seeds = set[int]().union(*(row["seeds"] for row in rows))
    seeds = ", ".join(map(str, sorted(all_seeds)))
    fewest = min((len(row["seeds"]) for row in rows), default=0)
    text = f"Scale {content['scale']}, seeds {seeds}: mean ± standard deviation over the seeds."
    if content.get("settings"):
        settings = ", ".join(f"{key} {value}" for key, value in content["settings"].items())
        text += f" Changed settings: {settings}."
    text += " Then the difference to the row's baseline"
    if fewest == 1:
        text += " and its 95 % interval over recordings. **One seed**: "
        text += "the interval does not cover the variation between seeds."
    else:
        text += ", its 95 % interval over seeds and recordings, and the number of seeds with a difference above 0."
        text += note_few_seeds(fewest)
    overlaps: dict[str, None] = {}
    for row in rows:
        overlap = row.get("overlap", {})
        for kind, what in (("trained", "are scored"), ("excluded", "are left out")):
            if overlap.get(kind):
                trained = f"{overlap[kind]:,} of {overlap['clips']:,} clips of {row['dataset']}"
                overlaps[f" **Trained on**: {trained} are in the training data of {row['model']} and {what}."] = None
        for split, clips in row.get("left_out", {}).items():
            overlaps[f" **Left out**: {len(clips):,} unusable recordings of {split} ({listing(clips)})."] = None
    text += "".join(overlaps)
    if any(row.get("cost") for row in rows):
        text += " Captions: number of captions that the text encoder embeds in training. Seconds: processor time."
    return text


def note_few_seeds(count: int) -> str:
    """Return a sentence for the caption of a table with fewer than five seeds, else an empty text."""
    return f" **Fewer than five seeds** ({count}): an indication, not evidence." if count < 5 else ""


def markdown_table(content: Mapping[str, Any]) -> str:
    """Format a table from `gather` as Markdown, with its title and claim."""
    written = [f"### {content['table']}: {content['title']}", "", f"Claim: {content['claim']}", ""]
    written += [*markdown_lines(table_lines(content)), "", caption(content), ""]
    if "cases" in content:
        written += [*markdown_lines(content["cases"]), "", CASES, ""]
    return "\n".join(written)


def html_table(content: Mapping[str, Any], figure: str | None = None) -> str:
    """Format a table from `gather` as an HTML page. `figure` is the file name of an image to include."""
    tables = [(table_lines(content), caption(content))]
    if "cases" in content:
        tables.append((content["cases"], CASES))
    return html_page(f"{content['table']}: {content['title']}", tables, content["claim"], figure)
