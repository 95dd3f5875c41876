"""Names and codes of the caption languages."""

import re
from typing import NamedTuple


class Language(NamedTuple):
    """Name and codes of one language.

    Attributes:
        name: English name, used in prompts to language models.
        iso_639_1: Two-letter code, used by the Hub, M2M100, mBART, MADLAD and OPUS-MT.
        flores: FLORES-200 code with the script, used by NLLB and SONAR.
    """

    name: str
    iso_639_1: str
    flores: str


# From ISO 639-3 code to language, for the eight languages of ML-CLAP and ATRI.
LANGUAGE_TABLE = {
    "eng": Language("English", "en", "eng_Latn"),
    "fra": Language("French", "fr", "fra_Latn"),
    "deu": Language("German", "de", "deu_Latn"),
    "spa": Language("Spanish", "es", "spa_Latn"),
    "nld": Language("Dutch", "nl", "nld_Latn"),
    "cat": Language("Catalan", "ca", "cat_Latn"),
    "jpn": Language("Japanese", "ja", "jpn_Jpan"),
    "zho": Language("Chinese", "zh", "zho_Hans"),
}

LANGUAGES = tuple(LANGUAGE_TABLE)
"""ISO 639-3 codes of all languages. The multilingual losses use the first (English) as the anchor language."""


def require_language_code(language: str) -> None:
    """Raise ValueError if a string does not have the format of a language code, such as "deu" or "deu_Latn".

    Languages outside `LANGUAGE_TABLE` are accepted. For a two-letter code or a language name, the message suggests the
    three-letter code.

    Example:
        >>> require_language_code("de")
        Traceback (most recent call last):
        ValueError: language 'de' is not an ISO 639-3 code; did you mean 'deu'?
    """
    if re.fullmatch("[a-z]{3}(_[A-Z][a-z]{3})?", language):
        return
    name = language.lower()
    matches = [code for code, entry in LANGUAGE_TABLE.items() if name in (entry.iso_639_1, entry.name.lower())]
    hint = f"did you mean {matches[0]!r}?" if matches else f"pass three letters, such as {', '.join(LANGUAGES)}"
    raise ValueError(f"language {language!r} is not an ISO 639-3 code; {hint}")


def get_language_name(language: str) -> str:
    """Return the English name for an ISO 639-3 code. For codes outside `LANGUAGE_TABLE`, the name contains the code.

    Example:
        >>> get_language_name("jpn"), get_language_name("qaa")
        ('Japanese', 'the language with ISO 639-3 code qaa')
    """
    entry = LANGUAGE_TABLE.get(language)
    return entry.name if entry else f"the language with ISO 639-3 code {language}"


def get_iso_639_1(language: str) -> str:
    """Convert an ISO 639-3 code to the two-letter ISO 639-1 code. Raise ValueError if it is not in `LANGUAGE_TABLE`.

    Example:
        >>> get_iso_639_1("jpn")
        'ja'
    """
    if language not in LANGUAGE_TABLE:
        raise ValueError(f"unknown language {language!r}; pass one of {list(LANGUAGES)}")
    return LANGUAGE_TABLE[language].iso_639_1


def get_flores_code(language: str) -> str:
    """Convert an ISO 639-3 code such as "fra" to the FLORES-200 code "fra_Latn". Other codes are returned unchanged."""
    return LANGUAGE_TABLE[language].flores if language in LANGUAGE_TABLE else language
