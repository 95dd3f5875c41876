"""CSV cells that no spreadsheet runs."""

import csv
import io

import pytest

from modeling_supclap.datasets_scripts.csv_text import to_csv


@pytest.mark.parametrize("text", ["=1+1", "+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1"])
def test_texts_that_spreadsheets_run_are_quoted(text):
    (row,) = csv.DictReader(io.StringIO(to_csv([{"file": text, "score": -0.5}], ["file", "score"]), newline=""))
    assert row == {"file": f"'{text}", "score": "-0.5"}


def test_other_texts_are_written_as_they_are():
    text = 'a "b", c\nd=e'
    written = to_csv([{"file": text, "left out": 1}], ["file"])
    assert list(csv.reader(io.StringIO(written, newline=""))) == [["file"], [text]]
    assert to_csv([], ["file", "score"]) == '"file","score"\n'
