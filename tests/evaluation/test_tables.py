"""One writer of tables: text, Markdown, HTML, LaTeX and CSV, with one row for each model."""

import csv
import io

import pytest

from modeling_supclap.evaluation.tables import Table, arrange, find_metric, format_cell, to_html, write_tables

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
    _, first, second = table.to_text().splitlines()
    assert first.startswith("first   ")
    ends = [line.index(cell) + len(cell) for line, cell in ((first, lines[0][1]), (second, lines[1][1]))]
    assert ends[0] == ends[1]  # numbers are aligned to the right


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


def test_all_files_contain_the_same_scores(tmp_path):
    stem = tmp_path / "new" / "table"
    printed = write_tables(stem, "Comparison", [arrange(RECORDS[:2]), arrange(RECORDS[2:])], RECORDS[:1], "A caption.")
    assert printed == stem.with_suffix(".md").read_text()
    for suffix in (".md", ".html", ".tex"):
        text = stem.with_suffix(suffix).read_text()
        assert "25.0" in text
        assert "50.0" in text
    assert printed.count("A caption.") == 1
    assert stem.with_suffix(".html").read_text().count("A caption.") == 1
    assert stem.with_suffix(".csv").read_text().splitlines()[1].startswith('"first",')


def test_a_cell_states_deviation_difference_seeds_and_the_printed_number():
    record = {"score": R1, "value": 0.5, "std": 0.01, "difference": -0.1, "up": "0 of 2 up", "paper": 0.41}
    assert format_cell(record) == "50.0 ± 1.0; -10.0, 0 of 2 up; paper 41.0"
    assert find_metric("log eval_eng_t2a_R@1 last").percent
    assert not find_metric("training peak_memory_mib").percent
