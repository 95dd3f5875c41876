"""Write tables as Markdown and HTML, with the headings and number formats of scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modeling_supclap.evaluation.results import DIRECTIONS
from modeling_supclap.metrics.names import NUMBER, MetricName, get_metric


def find_metric(column: str) -> MetricName:
    """Return the number format of a column: that of its metric, or `NUMBER` for a logged number or a count.

    >>> find_metric("retrieval eng t2a R@1").format(0.4187), find_metric("log eval_eng_t2a_R@1 last").format(0.021)
    ('41.9', '2.1')
    """
    kind, *place = column.split()
    name = column.split()[-1]
    if kind == "log":
        logged = place[0].removeprefix("eval_")
        name = logged.rpartition("_")[2] if "@" in logged else logged
    try:
        return get_metric(name)
    except KeyError:
        return NUMBER


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
    words = {
        **DIRECTIONS,
        "eng": "",
        "eval": "",
        "ms": "milliseconds",
        "objective": "of the objective",
        "difference": "along a - t",
        "target": "along a+",
    }
    spelled = []
    for word in name.replace("_", " ").split():
        if other := words.get(word, word):
            spelled.append(other)
    return " ".join(spelled)


def markdown_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells, heading first, as the lines of a Markdown table."""
    heading, *lines = (f"| {' | '.join(line)} |" for line in table)
    return [heading, f"|{'---|' * len(table[0])}", *lines]


def html_page(
    title: str, tables: Sequence[tuple[Sequence[Sequence[str]], str]], claim: str = "", figure: str | None = None
) -> str:
    """Format tables, each with its caption, as an HTML page. `figure` is the file name of an image to include.

    A table consists of rows of cells, heading first.
    """
    import jinja2

    source = Path(__file__).with_name("table.html.j2").read_text(encoding="utf-8")
    template = jinja2.Template(source, autoescape=True, trim_blocks=True)
    return template.render(title=title, tables=tables, claim=claim, figure=figure)
