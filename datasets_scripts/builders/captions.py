"""Generate captions from class names with hand-written phrases and sentence templates in eight languages.

`phrases/<dataset>.json` contains a noun phrase for each label and language ("a dog barking", "un chien qui aboie").
`phrases/templates.json` contains the sentence templates. A new phrase must be a singular noun phrase in the nominative,
with its article, because the templates do not inflect phrases.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from modeling_supclap.languages import LANGUAGES

_FOLDER = Path(__file__).parents[1] / "phrases"
_SENTENCES = {"scenes", "templates", "temporal"}  # files with sentences instead of label phrases


def label_phrases(dataset_name: str) -> dict[str, dict[str, str]]:
    """Load the noun phrases of a dataset as `phrases[label][language]`, with all `LANGUAGES` for each label.

    Raises ValueError with the valid names if the dataset is unknown.

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
    """Generate the captions of a clip by inserting the phrase of each language into the templates of that language.

    `templates` is a key in `templates.json`: "sound", "sound_at_beginning" or "sound_at_end". The result is
    `{language: [caption, ...]}`; caption i uses template i. A missing phrase raises ValueError.

    >>> render_captions({"deu": "ein bellender Hund"}, ["deu"])["deu"][:2]
    ['Ein bellender Hund', 'Zu hören ist ein bellender Hund.']
    """
    sentences = read_phrases("templates")[templates]

    captions: dict[str, list[str]] = {}
    for language in languages:
        if language not in phrase_by_language:
            raise ValueError(f"no phrase in {language!r}; there are phrases in {list(phrase_by_language)}")
        phrase = phrase_by_language[language]
        captions[language] = [capitalize(sentence.format(phrase=phrase)) for sentence in sentences[language]]
    return captions


def capitalize(text: str) -> str:
    """Convert the first letter to upper case; unlike `str.capitalize`, leave the others unchanged."""
    return text[:1].upper() + text[1:]


def caption_classes(labels: Sequence[str]) -> dict[str, list[str]]:
    """Generate English captions of a clip from all its class names. A clip without a class gets no captions.

    >>> caption_classes(["Acoustic_guitar", "Guitar", "Speech"])["eng"][1]
    'This is the sound of acoustic guitar, guitar and speech.'
    """
    names = [label.replace("_", " ") for label in labels]
    names = [name[:1].lower() + name[1:] for name in names]
    phrase = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return render_captions({"eng": phrase}, ["eng"]) if phrase else {}


def check_languages(languages: Sequence[str]) -> tuple[str, ...]:
    """Convert one or several language codes to a tuple.

    Raises ValueError if there is no code, or if a code is repeated or unknown.

    >>> check_languages(["eng", "fra"]), check_languages("eng")
    (('eng', 'fra'), ('eng',))
    """
    if isinstance(languages, str):  # one language in a YAML file
        languages = [languages]

    unknown = set(languages) - set(LANGUAGES)
    if unknown:
        raise ValueError(
            f"no captions in {sorted(unknown)}; the supported languages are {list(LANGUAGES)} (ISO 639-3)"
        )
    if not languages or len(set(languages)) < len(languages):
        raise ValueError(f"languages is {list(languages)}; expected at least one, without repeats")
    return tuple(languages)


def read_caption_columns(given: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Parse the option `caption_columns`, `LANGUAGE=COLUMN` with ISO 639-3 codes; return `{column: language}`.

    >>> read_caption_columns(["deu=Beschreibung", "eng=English"])
    {'Beschreibung': 'deu', 'English': 'eng'}
    """
    texts = [given] if isinstance(given, str) else given
    pairs = texts.items() if isinstance(texts, Mapping) else [text.partition("=")[::2] for text in texts]
    columns = {}
    for language, column in pairs:
        if not re.fullmatch("[a-z]{3}", language) or not column:
            raise ValueError(f"caption_columns is {given!r}; expected LANGUAGE=COLUMN, such as deu=Beschreibung")
        columns[column] = language
    return columns


def merge_captions(parts: Sequence[Mapping[str, Sequence[str]]], languages: Sequence[str]) -> dict[str, list[str]]:
    """Merge captions of one recording from several lines, `{language: [caption, ...]}` each, without repeats.

    Captions with the same index in two languages count as translations. Therefore, lines with equally many captions in
    all languages of the recording come first.

    >>> merge_captions([{"eng": ["Rain"]}, {"eng": ["A dog"], "fra": ["Un chien"]}], ["eng", "fra"])
    {'eng': ['A dog', 'Rain'], 'fra': ['Un chien']}
    """
    present = []
    for language in languages:
        if any(part.get(language) for part in parts):
            present.append(language)
    parallel: dict[tuple[str, ...], None] = {}
    others: list[tuple[str, str]] = []
    for part in parts:
        texts = [part.get(language, ()) for language in present]
        if len(set(map(len, texts))) == 1:
            parallel |= dict.fromkeys(zip(*texts, strict=True))
        else:
            for language, of_language in zip(present, texts, strict=True):
                others += [(language, text) for text in of_language]

    merged: dict[str, list[str]] = {language: [] for language in languages}
    merged |= {language: list(texts) for language, texts in zip(present, zip(*parallel, strict=True), strict=False)}
    distinct = {language: set(texts) for language, texts in merged.items()}
    for language, text in others:
        if text not in distinct[language]:
            merged[language].append(text)
            distinct[language].add(text)
    return merged


def check_merged_languages(unmarked: Sequence[str], language: str, marked: Mapping[str, str]) -> None:
    """Raise ValueError if caption columns with and without a language in their name have the same language.

    `unmarked` contains the columns without a language in their name; their language is `language`. `marked` contains
    the other columns, as `{column: language}`.
    """
    merged = [column for column, of_column in marked.items() if of_column == language]
    if unmarked and merged:
        advice = f"set --caption_language, or --caption_columns {language}={unmarked[0]} {language}={merged[0]}"
        raise ValueError(f"columns {[*unmarked, *merged]} would all be captions in {language!r}; {advice}")


@cache
def read_phrases(name: str) -> dict[str, Any]:
    """Load `phrases/<name>.json`; the result is cached and must not be modified."""
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
