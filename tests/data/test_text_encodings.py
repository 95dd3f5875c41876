"""Encodings of tables: read if they are certain, refused otherwise."""

import logging

import pytest

from modeling_supclap.datasets_scripts.builders.columns import warn_once
from modeling_supclap.datasets_scripts.builders.text_encodings import decode_text
from modeling_supclap.languages import LANGUAGES

TEXTS = {
    "zho": ("gb18030", "a.wav,大雨落在屋顶上\nb.wav,一只狗在叫，孩子们在笑\n"),
    "jpn": ("cp932", "a.wav,雨が屋根に降っている\nb.wav,犬がほえる\n"),
    "kor": ("cp949", "a.wav,비가 내린다\n"),
    "rus": ("cp1251", "a.wav,Сильный дождь стучит по крыше\n"),
    "pol": ("cp1250", "a.wav,Deszcz pada na żółty dach\nb.wav,dźwięk dzwonów\n"),
    "ell": ("cp1253", "a.wav,Δυνατή βροχή\n"),
    "fra": ("cp1252", "a.wav,La pluie tombe sur un toit en tôle – là-bas, «fort»\n"),
    "deu": ("cp1252", "a.wav,Ein Hund bellt über die Straße\n"),
    "tur": ("cp1254", "a.wav,Şiddetli yağmur çatıya düşüyor, köpek havlıyor\n"),
    "lit": ("cp1257", "a.wav,Stiprus lietus beldžia į žalią stogą, šuo tyliai loja\n"),
}


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_is_read_in_the_encoding_of_its_language(language, caplog):
    encoding, text = TEXTS[language]
    content = text.encode(encoding)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert decode_text(content, "a.csv", ["eng", language]) == text
    assert encoding in caplog.text
    assert decode_text(content, "a.csv", ["eng"], encoding) == text
    if language in LANGUAGES:
        assert decode_text(content, "a.csv", LANGUAGES) == text


def test_punctuation_alone_is_the_same_in_all_encodings_of_the_languages(caplog):
    warn_once.cache_clear()
    for where in ("texts/a.txt", "texts/b.txt"):
        assert decode_text(b"a \x93dog\x94 barks\x85", where, ["pol", "eng"]) == "a “dog” barks…"
    (message,) = caplog.messages  # once for the texts of a folder
    assert message.startswith("texts: texts are not UTF-8 and are read as cp1250; ")
    with pytest.raises(ValueError, match="plausible not in any other; save"):
        decode_text(b"a \x93dog\x94", "a.txt", ["tha"])


@pytest.mark.parametrize(
    ("language", "others"),
    {
        "zho": "jpn kor rus pol eng ell tur lit",
        "jpn": "zho kor rus pol eng ell tur lit",
        "kor": "jpn pol eng ell tur lit",
        "rus": "zho jpn kor pol eng tur lit",
        "pol": "zho jpn kor rus eng ell tur lit",
        "ell": "zho jpn kor pol eng tur lit",
        "fra": "zho jpn kor rus ell",
        "deu": "zho jpn kor rus ell",
        "tur": "zho jpn kor rus ell eng",
        "lit": "zho jpn kor rus ell eng",
    }.items(),
)
def test_a_text_in_none_of_the_languages_is_refused(language, others):
    encoding, text = TEXTS[language]
    for other in others.split():
        with pytest.raises(ValueError, match=r"a\.csv is not UTF-8, and plausible not in .*encoding"):
            decode_text(text.encode(encoding), "a.csv", [other])
    with pytest.raises(ValueError, match=r"a\.csv is not UTF-8, and plausible not in cp932, cp949; save"):
        decode_text(TEXTS["pol"][1].encode("cp1250"), "a.csv", ["kor", "jpn"])


def test_koi8_is_not_taken_for_cp1251():
    text = "file_name,caption\na.wav,сильный дождь стучит по крыше\n"
    assert decode_text(text.encode("cp1251"), "a.csv", ["rus"]) == text
    with pytest.raises(ValueError, match=r"a\.csv.*cp1251"):
        decode_text(text.encode("koi8-r"), "a.csv", ["rus"])
    assert decode_text(text.encode("koi8-r"), "a.csv", ["rus"], "koi8-r") == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_unicode_needs_no_language(encoding, caplog):
    text = TEXTS["zho"][1]
    content = ("\ufeff" * (encoding == "utf-16-be") + text).encode(encoding)
    assert decode_text(content, "a.csv", ["eng"]) == text
    assert decode_text(content, "a.csv", ["eng"], encoding.removesuffix("-sig")) == text  # without the mark
    assert not caplog.messages


@pytest.mark.parametrize(
    ("content", "encoding", "message"),
    [
        (b"\xff\xfea", None, r"a\.txt is not utf-16"),
        (b"a\0b\0", None, r"a\.txt.*zero bytes"),
        (b"\xe9", "ascii", r"a\.txt is not ascii.*byte 0"),
        (b"a", "utf-99", "'utf-99'"),
        (b"p\xeatla", None, r"a\.txt is not UTF-8.*cp1250 and cp1252"),  # plausible as Polish and as French
    ],
)
def test_an_invalid_text_is_named(content, encoding, message):
    with pytest.raises(ValueError, match=message):
        decode_text(content, "a.txt", ["pol", "fra"] if encoding is None else ["eng"], encoding)
