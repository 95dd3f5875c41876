"""The pictures of the report: drawn from the receipt's numbers, or left out and said so."""

import numpy as np
import pytest
from made_receipt import NUM_CLIPS, made_receipt

from modeling_supclap.evaluation import report_figures
from modeling_supclap.evaluation.receipts import Receipt
from modeling_supclap.evaluation.report import render_report


@pytest.fixture
def receipt(tmp_path):
    return made_receipt(tmp_path)


def test_figures_are_drawn_from_the_numbers(receipt):
    drawn = dict(report_figures.figures(receipt))
    assert all(drawn["similarity"].count(name) for name in ("right, eng", "right, fra", "wrong, eng"))
    assert all(svg.startswith("<svg") for svg in drawn.values())
    moved = Receipt(receipt.content, {**receipt.arrays, "similarity/fra/positive": np.full(NUM_CLIPS, -0.9)})
    assert dict(report_figures.figures(moved))["similarity"] != drawn["similarity"]


def test_without_scikit_learn_the_page_says_what_is_left_out(receipt, monkeypatch):
    monkeypatch.setattr(report_figures, "find_spec", lambda name: None)
    page = render_report(receipt)
    assert "The embedding space" not in page
    assert "scikit-learn (the extra <code>report</code>)" in page
