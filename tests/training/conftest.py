"""What the tests of training share."""

import pytest
from recordings import tone_rows


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Twelve tones with two captions each in English and French."""
    return tone_rows(tmp_path_factory.mktemp("tones"), count=12)
