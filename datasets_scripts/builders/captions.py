"""Captions from class names: hand-written phrases and sentence templates in eight languages.

`phrases/<dataset>.json` holds a noun phrase for each label and language ("a dog barking", "un chien qui aboie"),
and `phrases/templates.json` the sentences around it. The templates are chosen so that no phrase needs inflection:
French ones have no "de" or "à" before the phrase (de + le = du), German ones keep it in the nominative, and where a
verb agrees with the phrase, the language's phrases are singular. So a new phrase is good when it is a singular noun
phrase in the nominative, with its article.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..schema import LANGUAGES

_FOLDER = Path(__file__).parents[1] / "phrases"
_SENTENCES = {"templates", "temporal"}  # files of sentences, which hold no phrases of labels


def label_phrases(dataset_name: str) -> dict[str, dict[str, str]]:
    """The phrases of a dataset's labels.

    Args:
        dataset_name: "esc50", "synthetic" or "urbansound8k": a file in `phrases/`.

    Returns:
        `phrases[label][language]`, each label in all of `LANGUAGES`.

    Raises:
        ValueError: There are no phrases of that name; the message lists those there are.

    >>> label_phrases("esc50")["dog"]["fra"]
    'un chien qui aboie'
    """
    names = sorted({path.stem for path in _FOLDER.glob("*.json")} - _SENTENCES)
    if dataset_name not in names:
        raise ValueError(f"no label phrases for {dataset_name!r}; there are phrases for {names}")
    return read_phrases(dataset_name)


def render_captions(
    phrase_by_language: Mapping[str, str], languages: Sequence[str] = LANGUAGES, templates: str = "sound"
) -> dict[str, list[str]]:
    """Writes the captions of one clip: every template of every language around the language's phrase.

    Args:
        phrase_by_language: The noun phrase of what sounds, by language.
        languages: The languages to write in.
        templates: Which sentences of `templates.json`: "sound", "sound_at_beginning" or "sound_at_end".

    Returns:
        `captions[language]`, in the order of the file, so that caption i of two clips has the same template.

    Raises:
        ValueError: A language has no phrase.

    >>> render_captions({"deu": "ein bellender Hund"}, ["deu"])["deu"][:2]
    ['Ein bellender Hund', 'Zu hören ist ein bellender Hund.']
    """
    sentences = read_phrases("templates")[templates]

    captions: dict[str, list[str]] = {}
    for language in languages:
        if language not in phrase_by_language:
            raise ValueError(f"no phrase in {language!r}; there are phrases in {list(phrase_by_language)}")
        captions[language] = []
        for sentence in sentences[language]:
            text = sentence.format(phrase=phrase_by_language[language])
            captions[language].append(text[:1].upper() + text[1:])
    return captions


def check_languages(languages: Sequence[str]) -> tuple[str, ...]:
    """Some of `LANGUAGES`, or one of them, as a tuple in the order given.

    Raises:
        ValueError: There is none, one repeats, or the phrases lack one.

    >>> check_languages(["eng", "fra"]), check_languages("eng")
    (('eng', 'fra'), ('eng',))
    """
    if isinstance(languages, str):  # as a YAML file says it of one language
        languages = [languages]

    unknown = set(languages) - set(LANGUAGES)
    if unknown:
        raise ValueError(f"no captions in {sorted(unknown)}; the languages are {list(LANGUAGES)} (ISO 639-3)")
    if not languages or len(set(languages)) < len(languages):
        raise ValueError(f"languages is {list(languages)}; name at least one, each once")
    return tuple(languages)


def read_caption_columns(given: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the language of each column from `["deu=Beschreibung", ...]` or `{"deu": "Beschreibung", ...}`.

    Raises:
        ValueError: An entry is not `LANGUAGE=COLUMN`, with a language as ISO 639-3 code.

    >>> read_caption_columns(["deu=Beschreibung", "eng=English"])
    {'Beschreibung': 'deu', 'English': 'eng'}
    """
    texts = [given] if isinstance(given, str) else given
    pairs = texts.items() if isinstance(texts, Mapping) else [text.partition("=")[::2] for text in texts]
    columns = {}
    for language, column in pairs:
        if not re.fullmatch("[a-z]{3}", language) or not column:
            raise ValueError(
                f"caption_columns is {given!r}; give LANGUAGE=COLUMN with languages as ISO 639-3 codes, such as "
                "deu=Beschreibung"
            )
        columns[column] = language
    return columns


def check_merged_languages(unmarked: Sequence[str], language: str, marked: Mapping[str, str]) -> None:
    """Raise if captions whose column names no language would join those of a column that names `language`.

    Args:
        unmarked: The columns without a language in their names.
        language: The language that these are taken for.
        marked: The language of each other column.
    """
    merged = [column for column, of_column in marked.items() if of_column == language]
    if unmarked and merged:
        raise ValueError(
            f"columns {[*unmarked, *merged]} would all be captions in {language!r}; if {unmarked[0]!r} is in another "
            f"language, name it with --caption_language, else list the columns: --caption_columns "
            f"{language}={unmarked[0]} {language}={merged[0]}"
        )


@cache
def read_phrases(name: str) -> dict[str, Any]:
    """What a file of `phrases/` holds; the same object each time, to be left as it is."""
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
