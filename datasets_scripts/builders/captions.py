"""Generate captions from class names with hand-written phrases and sentence templates in eight languages.

`phrases/<dataset>.json` contains a noun phrase for each label and language ("a dog barking", "un chien qui aboie").
`phrases/templates.json` contains the sentence templates. A new phrase must be a singular noun phrase in the nominative,
with its article, because the templates do not inflect phrases.
"""

import json
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


@cache
def read_phrases(name: str) -> dict[str, Any]:
    """Load `phrases/<name>.json`; the result is cached and must not be modified."""
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
