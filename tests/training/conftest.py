"""Fixtures for the training tests."""

import pytest
from recordings import tone_rows


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Rows of twelve tones with two captions each in English and French."""
    return tone_rows(tmp_path_factory.mktemp("tones"), count=12)
