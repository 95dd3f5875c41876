"""Fixtures for the tests of recipes."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def reports_without_figures():
    """Leave t-SNE and histograms out of the reports; test_report.py and test_report_figures.py check them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modeling_supclap.evaluation.report.figures", lambda results: {})
        yield
