"""Names and codes of the caption languages."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple


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


def _find(**code: str) -> Any:
    """Return an entry of ISO 639-3, such as `_find(alpha_3="ita")`, or None if there is none."""
    try:
        import pycountry
    except ImportError:  # not needed by a model that was loaded from a folder without this package
        return None
    return pycountry.languages.get(**code)


def find_language_code(text: str) -> str:
    """Return the ISO 639-3 code for a two-letter code, an older three-letter code or an English name, or "".

    Example:
        >>> find_language_code("it"), find_language_code("Italian"), find_language_code("?")
        ('ita', 'ita', '')
    """
    match = _find(bibliographic=text) or _find(alpha_2=text) or _find(name=text)
    return match.alpha_3 if match else ""


def require_language_code(language: str) -> None:
    """Raise ValueError if a string does not have the format of a language code, such as "deu" or "deu_Latn".

    For a two-letter code, a language name or an older three-letter code, the message suggests the code of ISO 639-3.

    Example:
        >>> require_language_code("it")
        Traceback (most recent call last):
        ValueError: language 'it' is not an ISO 639-3 code; did you mean 'ita'?
    """
    if re.fullmatch("[a-z]{3}(_[A-Z][a-z]{3})?", language) and _find(bibliographic=language) is None:
        return
    code = find_language_code(language)
    hint = f"did you mean {code!r}?" if code else f"pass three letters, such as {', '.join(LANGUAGES)}"
    raise ValueError(f"language {language!r} is not an ISO 639-3 code; {hint}")


def get_language_name(language: str) -> str:
    """Return the English name for an ISO 639-3 code. For codes without an entry, the name contains the code.

    Example:
        >>> get_language_name("jpn"), get_language_name("ita"), get_language_name("qaa")
        ('Japanese', 'Italian', 'the language with ISO 639-3 code qaa')
    """
    entry = LANGUAGE_TABLE.get(language) or _find(alpha_3=language)
    return entry.name if entry else f"the language with ISO 639-3 code {language}"


def get_iso_639_1(language: str) -> str:
    """Convert an ISO 639-3 code to the two-letter ISO 639-1 code. Return it unchanged if there is no such code.

    Example:
        >>> get_iso_639_1("jpn"), get_iso_639_1("ita"), get_iso_639_1("cmn")
        ('ja', 'it', 'cmn')
    """
    if language in LANGUAGE_TABLE:
        return LANGUAGE_TABLE[language].iso_639_1
    return getattr(_find(alpha_3=language), "alpha_2", language)


def get_flores_code(language: str, codes: Collection[str] = ()) -> str:
    """Convert an ISO 639-3 code such as "fra" to the FLORES-200 code "fra_Latn".

    A language outside `LANGUAGE_TABLE` gets its code in `codes`, such as those of a tokenizer, if there is exactly one.
    Other codes are returned unchanged.

    Example:
        >>> codes = ["ita_Latn", "ace_Arab", "ace_Latn"]
        >>> get_flores_code("fra"), get_flores_code("ita", codes), get_flores_code("ace", codes)
        ('fra_Latn', 'ita_Latn', 'ace')
    """
    if language in LANGUAGE_TABLE:
        return LANGUAGE_TABLE[language].flores
    matching = [code for code in codes if code.startswith(f"{language}_")]
    return matching[0] if len(matching) == 1 else language
