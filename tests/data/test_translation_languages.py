"""Other names of the eight languages."""

import pytest

from modeling_supclap.datasets_scripts.schema import LANGUAGES
from modeling_supclap.datasets_scripts.translation.languages import iso_639_1, language_name


def test_every_language_of_ours_has_a_code_and_a_name():
    assert [iso_639_1(language) for language in LANGUAGES] == ["en", "fr", "de", "es", "nl", "ca", "ja", "zh"]
    assert language_name("jpn") == "Japanese"


def test_a_stranger_has_a_description_but_no_code():
    assert language_name("por") == "the language with ISO 639-3 code por"
    with pytest.raises(ValueError, match="no ISO 639-1 code of 'por' is known"):
        iso_639_1("por")
