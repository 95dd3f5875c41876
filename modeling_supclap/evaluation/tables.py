"""Tables of scores: headings, number formats, and one writer for text, Markdown, HTML, LaTeX and CSV.

A score is a record (a dict) with "score" (its path, such as "retrieval eng t2a R@1"), "value", and optionally "std",
"low", "high", "chance", "order_blind", "difference", "difference_low", "difference_high", "up" and "paper".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modeling_supclap.datasets_scripts.atomic_files import write_text
from modeling_supclap.datasets_scripts.csv_text import to_csv
from modeling_supclap.datasets_scripts.public_names import inline_markdown
from modeling_supclap.metrics.comparison import Cell
from modeling_supclap.metrics.names import DIRECTIONS, NUMBER, MetricName, get_metric

Record = Mapping[str, Any]

_LATEX = str.maketrans({letter: f"\\{letter}" for letter in "&%$#_{}"})
_LATEX |= str.maketrans({"\\": r"\textbackslash ", "~": r"\textasciitilde ", "^": r"\textasciicircum "})


@dataclass(frozen=True)
class Table:
    """Table of text cells.

    Attributes:
        lines: Rows of cells, heading first. The first cell of a row is its name.
        title: Title above the table.
        caption: Sentences below the table.
        is_markdown: Whether cells are Markdown. Otherwise the Markdown characters of cells are escaped.
    """

    lines: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    is_markdown: bool = False

    def to_text(self) -> str:
        """Format the lines as aligned text: the first column to the left, the others to the right."""
        widths = [max(map(len, column)) for column in zip(*self.lines, strict=True)]
        written = []
        for first, *others in self.lines:
            cells = map(str.rjust, others, widths[1:])
            written.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        return "\n".join(written)

    def to_markdown(self) -> str:
        """Format title, lines and caption as Markdown."""
        written = []
        for line in self.lines:
            cells = line if self.is_markdown else map(inline_markdown, line)
            written.append(f"| {' | '.join(cells)} |")
        written.insert(1, f"|{'---|' * len(self.lines[0])}")
        title = f"### {inline_markdown(self.title)}" if self.title else ""
        return "\n\n".join(filter(None, [title, "\n".join(written), self.caption]))

    def to_latex(self) -> str:
        r"""Format the lines for LaTeX, with the rules of booktabs. A cell with an interval has two lines.

        >>> print(Table([["model", "R@1 (chance 5.0)"], ["a_b", "50.0 (40.0 to 60.0)"]]).to_latex().splitlines()[5])
        a\_b & \shortstack[r]{\rule{0pt}{3ex}50.0\\\scriptsize 40.0 to 60.0} \\
        """
        heading, *rows = (f"{' & '.join(map(_latex_cell, line))} \\\\" for line in self.lines)
        columns = "l" + "r" * (len(self.lines[0]) - 1)
        rules = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", heading, r"\midrule", *rows, r"\bottomrule"]
        tabular = "\n".join([*rules, r"\end{tabular}"])
        # wide tables become smaller
        width = r"\ifdim\width>\textwidth\textwidth\else\width\fi"
        head = f"% {' '.join(self.title.split())}\n" if self.title else ""
        return f"{head}\\resizebox{{{width}}}{{!}}{{%\n{tabular}}}\n"


def _latex_cell(cell: str) -> str:
    stacked = []
    for part in cell.split("; "):
        found = re.fullmatch(r"(.+) \((.+)\)", part)
        texts = found.groups() if found else [part]
        stacked += [
            prefix + text.translate(_LATEX) for prefix, text in zip(("", r"\scriptsize "), texts, strict=False)
        ]
    joined = r"\\".join(stacked)
    return joined if len(stacked) == 1 else rf"\shortstack[r]{{\rule{{0pt}}{{3ex}}{joined}}}"


def to_markdown(tables: Sequence[Table]) -> str:
    """Format tables as Markdown."""
    return "\n\n".join(table.to_markdown() for table in tables) + "\n"


def to_latex(tables: Sequence[Table]) -> str:
    """Format tables for LaTeX, with a comment that names the packages."""
    packages = "% needs \\usepackage{booktabs, graphicx}\n"
    return packages + "\n\n".join(table.to_latex() for table in tables)


def to_html(title: str, tables: Sequence[Table], claim: str = "", figure: str | None = None) -> str:
    """Format tables as an HTML page. `figure` is the file name of an image to include."""
    import jinja2

    source = Path(__file__).with_name("table.html.j2").read_text(encoding="utf-8")
    template = jinja2.Template(source, autoescape=True, trim_blocks=True)
    return template.render(title=title, tables=tables, claim=claim, figure=figure)


def write_tables(stem: Path, title: str, tables: Sequence[Table], records: Sequence[Record], caption: str = "") -> str:
    """Write tables as `.md`, `.html` and `.tex`, and their records as `.csv`. Return the Markdown.

    `caption` is written below the last table, after the table's own.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    tables = [*tables[:-1], replace(tables[-1], caption=f"{tables[-1].caption} {caption}".strip())]
    markdown = to_markdown(tables)
    write_text(stem.with_suffix(".csv"), to_csv(records, list(records[0])))
    write_text(stem.with_suffix(".md"), markdown)
    write_text(stem.with_suffix(".html"), to_html(title, tables))
    write_text(stem.with_suffix(".tex"), to_latex(tables))
    return markdown


def arrange(records: Sequence[Record], index: Sequence[str] = ("model",), title: str = "", caption: str = "") -> Table:
    """Arrange scores as a table with one row for each value of the keys `index`, and one column for each score."""
    columns = dict.fromkeys(record["score"] for record in records)
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        name = tuple("" if record.get(key) is None else str(record[key]) for key in index)
        rows.setdefault(name, dict.fromkeys(columns, ""))[record["score"]] = format_cell(record)

    headings = [format_heading(column) + _format_levels(column, records) for column in columns]
    lines = [[*index, *headings], *([*name, *cells.values()] for name, cells in rows.items())]
    return Table(lines, title, caption)


def format_cell(record: Record) -> str:
    """Format a score: value, deviation and interval, then the difference to the first model, and the paper's number.

    >>> record = {"score": "retrieval eng t2a R@1", "value": 0.5, "std": 0.01, "paper": 0.41}
    >>> format_cell({**record, "difference": 0.1, "difference_low": 0.05, "difference_high": 0.15, "up": "2 of 2 up"})
    '50.0 ± 1.0; +10.0 (+5.0 to +15.0), 2 of 2 up; paper 41.0'
    """
    metric = find_metric(record["score"])
    found = record.get("difference")
    parts = [Cell(record["value"], record.get("low"), record.get("high"), record.get("std")).format(metric)]
    if found is not None:
        change = Cell(found, record.get("difference_low"), record.get("difference_high")).format(metric, signed=True)
        parts.append(", ".join(filter(None, [change, record.get("up")])))
    if record.get("paper") is not None:
        parts.append(f"paper {metric.format(record['paper'])}")
    return "; ".join(parts)


def _format_levels(column: str, records: Sequence[Record]) -> str:
    """Format the scores at chance and of an order-blind model for a heading. Each distinct value is shown once."""
    parts = []
    for level in ("chance", "order_blind"):
        values = [record.get(level) for record in records if record["score"] == column]
        texts = dict.fromkeys(find_metric(column).format(value) for value in values if value is not None)
        if texts:
            parts.append(f"{level.replace('_', '-')} {' / '.join(texts)}")
    return f" ({', '.join(parts)})" if parts else ""


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
    words = {**DIRECTIONS, "eng": "", "eval": "", "ms": "milliseconds", "objective": "of the objective"}
    words |= {"difference": "along a - t", "target": "along a+"}
    spelled = []
    for word in name.replace("_", " ").split():
        if other := words.get(word, word):
            spelled.append(other)
    return " ".join(spelled)
