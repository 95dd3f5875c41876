"""Format reproduced tables as Markdown for the docs and as HTML pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modeling_supclap.evaluation.results import DIRECTIONS
from modeling_supclap.metrics.names import get_metric

CASES = "For each language: the rank of the caption's own clip, counted from 1, and the label of the top-ranked clip."


def format_value(column: str, value: float, signed: bool = False) -> str:
    """Format a value in the usual unit of its metric, for example recall in percent.

    >>> format_value("retrieval eng t2a R@1", 0.4187), format_value("log eval_eng_t2a_R@1 last", 0.021, signed=True)
    ('41.9', '+2.1')
    """
    kind, *place = column.split()
    logged = place[0].removeprefix("eval_") if kind == "log" else ""
    name = logged.rpartition("_")[2] if "@" in logged else logged or column.split()[-1]
    try:
        text = get_metric(name).format(abs(value))
    except KeyError:  # a logged number, or a count
        text = f"{abs(value):,.0f}" if abs(value) >= 1000 else f"{abs(value):.3g}"
    return f"{'-' if value < 0 else '+' if signed else ''}{text}"


def format_cell(column: str, score: Mapping[str, Any]) -> str:
    """Format a score as mean ± standard deviation. If there is a baseline, add the difference to it in brackets.

    >>> score = {"mean": 0.5, "std": 0.01, "difference": 0.1, "low": 0.05, "high": 0.15, "differences": [0.1, 0.1]}
    >>> format_cell("retrieval eng t2a R@1", score)
    '50.0 ± 1.0 (+10.0, +5.0 to +15.0; 2 of 2 up)'
    """
    text = format_value(column, score["mean"])
    if score.get("std") is not None:
        text += f" ± {format_value(column, score['std'])}"
    differences = score.get("differences")
    if not differences:
        return text

    mean = format_value(column, sum(differences) / len(differences), signed=True)
    interval = ""
    if "low" in score:
        interval = ", " + " to ".join(format_value(column, score[end], signed=True) for end in ("low", "high"))
    up = sum(difference > 0 for difference in differences)
    return f"{text} ({mean}{interval}; {up} of {len(differences)} up)"


def table_lines(content: Mapping[str, Any]) -> list[list[str]]:
    """Format a table from `reproduce.gather` as rows of text, heading first. Cells include the paper's numbers."""
    rows = content["rows"]
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row["scores"])
    has_datasets = len({row["dataset"] for row in rows}) > 1
    costs = [name for name in ("steps", "captions", "seconds") if any(name in row.get("cost", {}) for row in rows)]

    headings = [format_heading(column) + _format_levels(column, rows) for column in columns]
    lines = [["row", *(["data"] if has_datasets else []), *costs, *headings]]
    for row in rows:
        line = [row["model"], *([row["dataset"]] if has_datasets else [])]
        line += [f"{row['cost'][name]:,.0f}" if name in row.get("cost", {}) else "" for name in costs]
        for column in columns:
            score = row["scores"].get(column)
            text = "" if score is None else format_cell(column, score)
            if score is not None and score["paper"] is not None:
                text += f"; paper {format_value(column, score['paper'])}"
            line.append(text)
        lines.append(line)
    return lines


def _format_levels(column: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the scores at chance and of an order-blind model for a heading. Each distinct value is shown once."""
    parts = []
    for level in ("chance", "order_blind"):
        values = [row["scores"][column].get(level) for row in rows if column in row["scores"]]
        texts = dict.fromkeys(format_value(column, value) for value in values if value is not None)
        if texts:
            parts.append(f"{level.replace('_', '-')} {' / '.join(texts)}")
    return f" ({', '.join(parts)})" if parts else ""


def format_heading(column: str) -> str:
    """Format a column name as a heading.

    >>> format_heading("retrieval eng t2a R@1"), format_heading("multilingual fra Gap")
    ('text to audio R@1', 'gap to English, fra')
    >>> format_heading("zste eng 3A"), format_heading("log radius_mean_t2a first")
    ('ZSTE 3A', 'radius mean text to audio, first')
    """
    kind, *place = column.split()
    if kind == "log":
        return f"{_spell(place[0])}, {place[1]}"
    if kind not in ("retrieval", "multilingual", "zste", "zero_shot"):
        return _spell(column.removeprefix("training "))

    language, *between, metric = place
    name = metric if "@" in metric else get_metric(metric).display
    if kind == "zero_shot":
        name += f", prompts of {between.pop()}"
    suffixes = {"eng": "", "all": "", "mean": ", mean of the languages"}
    return " ".join([*map(_spell, between), name]) + suffixes.get(language, f", {language}")


def _spell(name: str) -> str:
    words = {**DIRECTIONS, "eng": "", "eval": "", "ms": "milliseconds", "objective": "of the objective"}
    spelled = (words.get(word, word) for word in name.replace("_", " ").split())
    return " ".join(filter(None, spelled))


def caption(content: Mapping[str, Any]) -> str:
    """Return the caption of a table, which explains its numbers."""
    rows = content["rows"]
    seeds = ", ".join(map(str, sorted({seed for row in rows for seed in row["seeds"]})))
    fewest = min((len(row["seeds"]) for row in rows), default=0)
    text = f"Scale {content['scale']}, seeds {seeds}: mean ± standard deviation over the seeds."
    if content.get("settings"):
        text += f" Changed settings: {_list_settings(content)}."
    text += " In brackets: the difference to the row's baseline"
    if fewest == 1:
        text += " and its 95 % interval over recordings. **One seed**: "
        text += "the interval does not cover the variation between seeds."
    else:
        text += ", its 95 % interval over seeds and recordings, and the number of seeds with a difference above 0."
        text += note_few_seeds(fewest)
    if any(row.get("cost") for row in rows):
        text += " Captions: number of captions that the text encoder embeds in training. Seconds: processor time."
    return text


def note_few_seeds(count: int) -> str:
    """Return a sentence for the caption of a table with fewer than five seeds, else an empty text."""
    return f" **Fewer than five seeds** ({count}): an indication, not evidence." if count < 5 else ""


def full_title(content: Mapping[str, Any]) -> str:
    """Return the name, changed settings (if any) and title of a table."""
    settings = f" with {_list_settings(content)}" if content.get("settings") else ""
    return f"{content['table']}{settings}: {content['title']}"


def _list_settings(content: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in content["settings"].items())


def markdown_table(content: Mapping[str, Any]) -> str:
    """Format a table from `reproduce.gather` as Markdown, with its title and claim."""
    written = [f"### {full_title(content)}", "", f"Claim: {content['claim']}", ""]
    written += [*markdown_lines(table_lines(content)), "", caption(content), ""]
    if "cases" in content:
        written += [*markdown_lines(content["cases"]), "", CASES, ""]
    return "\n".join(written)


def markdown_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells, heading first, as the lines of a Markdown table."""
    heading, *lines = (f"| {' | '.join(line)} |" for line in table)
    return [heading, f"|{'---|' * len(table[0])}", *lines]


def html_table(content: Mapping[str, Any], figure: str | None = None) -> str:
    """Format a table from `reproduce.gather` as an HTML page. `figure` is the file name of an image to include."""
    return html_page(full_title(content), table_lines(content), caption(content), content, figure)


def html_page(
    title: str,
    lines: Sequence[Sequence[str]],
    caption: str,
    content: Mapping[str, Any] | None = None,
    figure: str | None = None,
) -> str:
    """Format rows of cells, heading first, as an HTML page. `content` may contain a "claim" and "cases"."""
    import jinja2

    source = Path(__file__).with_name("table.html.j2").read_text(encoding="utf-8")
    template = jinja2.Template(source, autoescape=True, trim_blocks=True)
    return template.render(content=content or {}, title=title, lines=lines, caption=caption, cases=CASES, figure=figure)
