"""How other models and people name the languages: ISO 639-1 codes and English names."""

# ISO 639-1 code, which M2M100, mBART, MADLAD and OPUS-MT go by, and English name, which prompts go by.
ISO_639_1_AND_NAME = {
    "eng": ("en", "English"),
    "fra": ("fr", "French"),
    "deu": ("de", "German"),
    "spa": ("es", "Spanish"),
    "nld": ("nl", "Dutch"),
    "cat": ("ca", "Catalan"),
    "jpn": ("ja", "Japanese"),
    "zho": ("zh", "Chinese"),
}


def iso_639_1(language: str) -> str:
    """The two-letter code of a language given by its ISO 639-3 code; a ValueError where none is known here."""
    if language not in ISO_639_1_AND_NAME:
        raise ValueError(f"no ISO 639-1 code of {language!r} is known here; those of {list(ISO_639_1_AND_NAME)} are")
    return ISO_639_1_AND_NAME[language][0]


def language_name(language: str) -> str:
    """The English name of a language given by its ISO 639-3 code, or a description by the code."""
    return ISO_639_1_AND_NAME.get(language, ("", f"the language with ISO 639-3 code {language}"))[1]
