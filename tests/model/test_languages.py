"""The table of languages, compared with tables of other projects."""

import re
import sys

import pytest
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as M2M100_CODES
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB_CODES

from modeling_supclap.languages import (
    LANGUAGE_TABLE,
    LANGUAGES,
    get_flores_code,
    get_iso_639_1,
    get_language_name,
    require_language_code,
)


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


def test_other_languages_have_the_names_and_codes_of_iso_639():
    assert [get_language_name(code) for code in ("ita", "cmn")] == ["Italian", "Mandarin Chinese"]
    assert [get_iso_639_1(code) for code in ("ita", "cmn")] == ["it", "cmn"]
    assert get_language_name("qaa") == "the language with ISO 639-3 code qaa"


def test_other_languages_have_the_only_code_of_a_tokenizer():
    assert NLLB_CODES.count("ita_Latn") == 1
    assert get_flores_code("ita", NLLB_CODES) == "ita_Latn"
    assert get_flores_code("zho", ["zho_Hant", "zho_Hans"]) == "zho_Hans"
    assert get_flores_code("ace", NLLB_CODES) == "ace"  # two scripts
    assert get_flores_code("ita") == "ita"
    assert get_flores_code("por_Latn") == "por_Latn"


@pytest.mark.parametrize(
    ("language", "hint"),
    [("it", "did you mean 'ita'?"), ("Italian", "did you mean 'ita'?"), ("ita_latn", "such as eng, fra, deu, spa, ")],
)
def test_errors_suggest_codes(language, hint):
    with pytest.raises(ValueError, match=rf"{language}.*ISO 639-3.*{re.escape(hint)}"):
        require_language_code(language)
    require_language_code("ita")
    require_language_code("ita_Latn")


def test_older_three_letter_codes_are_refused():
    with pytest.raises(ValueError, match="'deu'"):
        require_language_code("ger")


def test_models_from_folders_need_no_names_of_languages(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycountry", None)
    assert (get_language_name("deu"), get_iso_639_1("deu"), get_iso_639_1("ita")) == ("German", "de", "ita")
    with pytest.raises(ValueError, match="three letters"):
        require_language_code("de")
