"""One writer of tables: text, Markdown, HTML, LaTeX and CSV, with one row for each model."""

import csv
import io

import pytest

from modeling_supclap.evaluation.tables import (
    Table,
    arrange,
    find_metric,
    format_cell,
    format_heading,
    to_html,
    write_tables,
)

R1, RANK = "retrieval eng t2a R@1", "retrieval eng t2a mean_rank"
RECORDS = [
    {"model": "first", "score": R1, "value": 0.25, "low": 0.1, "high": 0.4, "chance": 0.05},
    {"model": "first", "score": RANK, "value": 7.0},
    {"model": "=cmd()", "score": R1, "value": 0.5, "difference": 0.25, "difference_low": 0.2, "difference_high": 0.3},
]


def test_a_row_is_a_model_and_a_column_is_a_score():
    table = arrange(RECORDS, title="esc50")
    heading, *lines = table.lines
    assert heading == ["model", "text to audio R@1 (chance 5.0)", "text to audio mean rank"]
    assert lines == [["first", "25.0 (10.0 to 40.0)", "7.0"], ["=cmd()", "50.0; +25.0 (+20.0 to +30.0)", ""]]
    text = """\
model   text to audio R@1 (chance 5.0)  text to audio mean rank
first              25.0 (10.0 to 40.0)                      7.0
=cmd()    50.0; +25.0 (+20.0 to +30.0)"""
    assert table.to_text() == text


def test_a_row_has_a_name_for_each_key_and_a_heading_all_its_levels():
    records = [
        {"model": "a", "seeds": 2, "score": "zste eng 3A", "value": 0.5, "chance": 1 / 3, "order_blind": 0.5},
        {"model": "a", "seeds": None, "score": "zste eng 3A", "value": 0.25, "chance": 0.25, "order_blind": 0.5},
        {"model": "b", "seeds": 2, "score": "zste eng 3A", "value": 0.75, "chance": None},
        {"model": "b", "seeds": 2, "score": R1, "value": 1.0},
    ]
    assert arrange(records, ("model", "seeds")).lines == [
        ["model", "seeds", "ZSTE 3A (chance 33.3 / 25.0, order-blind 50.0)", "text to audio R@1"],
        ["a", "2", "50.0", ""],
        ["a", "", "25.0", ""],
        ["b", "2", "75.0", "100.0"],
    ]


@pytest.mark.parametrize(
    ("column", "heading", "half"),
    [
        ("retrieval fra a2t mean_rank", "audio to text mean rank, fra", "0.5"),
        ("retrieval mean t2a mAP@10", "text to audio mAP@10, mean of the languages", "50.0"),
        ("multilingual all MRV", "mean rank variance", "0.50"),
        ("zste fra 3A_order", "ZSTE 3A, order only, fra", "50.0"),
        ("zero_shot jpn captions mAP", "mean average precision, prompts of captions, jpn", "50.0"),
        ("linear_probe logistic_regression top5", "linear probe logistic regression top5", "50.0"),
        ("training peak_memory_mib", "peak memory mib", "0"),
        ("log eval_eng_t2a_R@1 last", "text to audio R@1, last", "50.0"),
        ("log eval_mean_recall best", "mean recall, best", "50.0"),
        ("log objective_ms first", "of the objective milliseconds, first", "0.5"),
        ("log pull_difference last", "pull along a - t, last", "0.5"),
        ("log pull_target last", "pull along a+, last", "0.5"),
    ],
)
def test_a_column_has_a_heading_and_a_format(column, heading, half):
    assert (format_heading(column), find_metric(column).format(0.5)) == (heading, half)


def test_texts_of_users_are_escaped_in_each_format():
    name = "a|b *c* <i> & 5% _x_ $y$"
    table = Table([["model", "score"], [name, "1.0"]], title="t")
    assert table.to_markdown().splitlines()[2:4] == ["| model | score |", "|---|---|"]
    (row,) = [line for line in table.to_markdown().splitlines() if line.startswith("| a")]
    assert row.count("|") - row.count("\\|") == 3
    assert "*c*" not in row.replace("\\*", "")
    assert r"a|b *c* <i> \& 5\% \_x\_ \$y\$ & 1.0 \\" in table.to_latex()
    page = to_html("x < y", [table])
    assert "&lt;i&gt; &amp; 5%" in page
    assert "<title>x &lt; y" in page


def test_a_title_cannot_leave_its_line(tmp_path):
    table = Table([["model"], ["a"]], title="a\n\\input{x}\n# <b> b")
    assert table.to_markdown().splitlines()[0] == "### a \\\\input{x} \\# &lt;b&gt; b"
    assert table.to_latex().startswith("% a \\input{x} # <b> b\n\\resizebox")


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_no_cell_of_a_csv_file_is_run_as_a_formula(tmp_path, start):
    record = {"model": f"{start}1+1", "score": R1, "value": -0.5, "note": None}
    write_tables(tmp_path / "table", "Comparison", [arrange([record])], [record])
    _, row = csv.reader(io.StringIO((tmp_path / "table.csv").read_text(), newline=""))
    assert row == [f"'{start}1+1", R1, "-0.5", ""]


MARKDOWN = """\
### esc50

| model | text to audio R@1 (chance 5.0) | text to audio mean rank |
|---|---|---|
| first | 25.0 (10.0 to 40.0) | 7.0 |

10 units.

| model | text to audio R@1 |
|---|---|
| =cmd() | 50.0; +25.0 (+20.0 to +30.0) |

20 units. A caption.
"""
LATEX = r"""% needs \usepackage{booktabs, graphicx}
% esc50
\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%
\begin{tabular}{lrr}
\toprule
model & \shortstack[r]{\rule{0pt}{3ex}text to audio R@1\\\scriptsize chance 5.0} & text to audio mean rank \\
\midrule
first & \shortstack[r]{\rule{0pt}{3ex}25.0\\\scriptsize 10.0 to 40.0} & 7.0 \\
\bottomrule
\end{tabular}}


\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%
\begin{tabular}{lr}
\toprule
model & text to audio R@1 \\
\midrule
=cmd() & \shortstack[r]{\rule{0pt}{3ex}50.0\\+25.0\\\scriptsize +20.0 to +30.0} \\
\bottomrule
\end{tabular}}
"""
PAGE = """\
<h1>esc50</h1>
<table>
<tr><th>model</th><th>text to audio R@1 (chance 5.0)</th><th>text to audio mean rank</th></tr>
<tr><td>first</td><td>25.0 (10.0 to 40.0)</td><td>7.0</td></tr>
</table>
<p>10 units.</p>
<table>
<tr><th>model</th><th>text to audio R@1</th></tr>
<tr><td>=cmd()</td><td>50.0; +25.0 (+20.0 to +30.0)</td></tr>
</table>
<p>20 units. A caption.</p>
</html>"""
CSV = """\
"model","score","value"
"first","retrieval eng t2a R@1",0.25
"""


def test_tables_are_written_in_each_format(tmp_path):
    tables = [arrange(RECORDS[:2], ("model",), "esc50", "10 units."), arrange(RECORDS[2:], caption="20 units.")]
    stem, records = tmp_path / "new" / "one" / "table", [{key: RECORDS[0][key] for key in ("model", "score", "value")}]
    assert write_tables(stem, "esc50", tables, records, "A caption.") == MARKDOWN
    written = {path.suffix: path.read_text() for path in stem.parent.iterdir()}
    page = written.pop(".html")
    assert written == {".md": MARKDOWN, ".tex": LATEX, ".csv": CSV}
    assert page[page.index("<h1>") :] == PAGE
    assert "<title>esc50</title>" in page

    page = to_html("Memory", [tables[0]], "It fits", "memory.svg")
    assert "<h1>Memory</h1>\n<p>Claim: It fits</p>\n<h2>esc50</h2>\n<table>" in page
    assert page.endswith('<img src="memory.svg" alt="Memory"></html>')


def test_a_cell_states_deviation_difference_seeds_and_the_printed_number():
    record = {"score": R1, "value": 0.5, "std": 0.01, "difference": -0.1, "up": "0 of 2 up", "paper": 0.41}
    assert format_cell(record) == "50.0 ± 1.0; -10.0, 0 of 2 up; paper 41.0"
    assert find_metric("log eval_eng_t2a_R@1 last").percent
    assert not find_metric("training peak_memory_mib").percent
