"""The table of languages, compared with tables of other projects."""

import pytest
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as M2M100_CODES
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB_CODES

from modeling_supclap.languages import LANGUAGE_TABLE, LANGUAGES, get_flores_code, get_iso_639_1, get_language_name


def test_the_papers_have_eight_and_english_is_the_anchor():
    assert {"eng", "fra", "deu", "spa", "nld", "cat", "jpn", "zho"} <= set(LANGUAGES)
    assert LANGUAGES[0] == "eng"


@pytest.mark.parametrize("language", LANGUAGES)
def test_translation_models_know_each_by_its_codes(language):
    assert get_iso_639_1(language) in M2M100_CODES["m2m100"]
    assert get_flores_code(language) in NLLB_CODES
    assert get_flores_code(language).split("_")[0] == language


def test_codes_and_names_are_unique():
    for column in zip(*LANGUAGE_TABLE.values(), strict=True):
        assert len(set(column)) == len(LANGUAGES)


def test_an_unknown_language_has_a_description_but_no_code():
    assert "qaa" in get_language_name("qaa")
    assert get_flores_code("por_Latn") == "por_Latn"
    with pytest.raises(ValueError, match="'qaa'"):
        get_iso_639_1("qaa")
