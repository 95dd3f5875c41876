"""The languages that the project has captions in: the one table of their codes and names."""

import re
from typing import NamedTuple


class Language(NamedTuple):
    """How others call a language.

    Attributes:
        name: The English name, which instructions to language models go by.
        iso_639_1: The two-letter code, which the Hub, M2M100, mBART, MADLAD and OPUS-MT go by.
        flores: The code of FLORES-200 with the script, which NLLB and SONAR go by.
    """

    name: str
    iso_639_1: str
    flores: str


# By ISO 639-3 code: the eight languages of ML-CLAP and ATRI.
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
"""Their ISO 639-3 codes. The first is the anchor of the multilingual objectives."""


def require_language_code(language: str) -> None:
    """Raise unless a language is given by its ISO 639-3 code, or by that of FLORES-200.

    Args:
        language: The code, of any language, such as "deu" or "deu_Latn".

    Raises:
        ValueError: It is a two-letter code or a name; the message suggests a code.

    Example:
        >>> require_language_code("de")
        Traceback (most recent call last):
        ValueError: language 'de' is no ISO 639-3 code; did you mean 'deu'?
    """
    if re.fullmatch("[a-z]{3}(_[A-Z][a-z]{3})?", language):
        return
    asked = language.lower()
    known = [code for code, about in LANGUAGE_TABLE.items() if asked in (about.iso_639_1, about.name.lower())]
    hint = f"did you mean {known[0]!r}?" if known else f"give three letters, such as {', '.join(LANGUAGES)}"
    raise ValueError(f"language {language!r} is no ISO 639-3 code; {hint}")


def get_language_name(language: str) -> str:
    """The English name of a language.

    Args:
        language: Its ISO 639-3 code. One that is not in the table is described by its code.

    Example:
        >>> get_language_name("jpn"), get_language_name("qaa")
        ('Japanese', 'the language with ISO 639-3 code qaa')
    """
    known = LANGUAGE_TABLE.get(language)
    return known.name if known else f"the language with ISO 639-3 code {language}"


def get_iso_639_1(language: str) -> str:
    """The two-letter code of a language.

    Args:
        language: Its ISO 639-3 code.

    Raises:
        ValueError: The language is not in the table.

    Example:
        >>> get_iso_639_1("jpn")
        'ja'
    """
    if language not in LANGUAGE_TABLE:
        raise ValueError(f"no ISO 639-1 code of {language!r} is known here; those of {list(LANGUAGES)} are")
    return LANGUAGE_TABLE[language].iso_639_1


def get_flores_code(language: str) -> str:
    """The code of a language in FLORES-200, such as "fra_Latn" for "fra".

    Args:
        language: Its ISO 639-3 code; any other code, such as one of FLORES already, comes back as it is.
    """
    return LANGUAGE_TABLE[language].flores if language in LANGUAGE_TABLE else language
