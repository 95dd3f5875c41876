"""Hand-written phrases and templates."""

import itertools
import re

import pytest

from modeling_supclap.datasets_scripts.builders.captions import label_phrases, read_phrases, render_captions
from modeling_supclap.languages import LANGUAGES

DATASETS = ("esc50", "recordings", "synthetic", "urbansound8k")
TEMPLATES = read_phrases("templates")

# The categories as meta/esc50.csv spells them, by target number.
ESC50 = """
    dog rooster pig cow frog cat hen insects sheep crow
    rain sea_waves crackling_fire crickets chirping_birds water_drops wind pouring_water toilet_flush thunderstorm
    crying_baby sneezing clapping breathing coughing footsteps laughing brushing_teeth snoring drinking_sipping
    door_wood_knock mouse_click keyboard_typing door_wood_creaks can_opening washing_machine vacuum_cleaner clock_alarm
    clock_tick glass_breaking helicopter chainsaw siren car_horn engine train church_bells airplane fireworks hand_saw
"""
# The classes as UrbanSound8K.csv spells them, by class number.
URBANSOUND8K = """
    air_conditioner car_horn children_playing dog_bark drilling engine_idling gun_shot jackhammer siren street_music
"""

# Letters allowed in the phrases of a language; Japanese and Chinese phrases contain no Latin letters.
LATIN = r"[A-Za-zÀ-ÖØ-öø-ÿß'\- ]+"
LETTERS = dict.fromkeys(LANGUAGES, LATIN) | {"jpn": r"[ぁ-んァ-ヶー一-龯]+", "zho": r"[一-龯]+"}


@pytest.mark.parametrize(("name", "labels"), [("esc50", ESC50), ("urbansound8k", URBANSOUND8K)])
def test_every_class_of_the_dataset_has_phrases(name, labels):
    assert sorted(label_phrases(name)) == sorted(labels.split())


@pytest.mark.parametrize("name", DATASETS)
def test_phrases_are_complete_clean_and_distinct(name):
    phrases = label_phrases(name)
    for label, by_language in phrases.items():
        assert list(by_language) == list(LANGUAGES), label
        for language, phrase in by_language.items():
            assert re.fullmatch(LETTERS[language], phrase), (label, language, phrase)
            assert phrase == " ".join(phrase.split()), (label, language, phrase)
    for language in LANGUAGES:
        assert len({by_language[language] for by_language in phrases.values()}) == len(phrases), language


@pytest.mark.parametrize("name", DATASETS)
def test_phrases_of_languages_with_articles_agree_in_gender(name):
    wrong = {
        "fra": r"\bun (?:série|sirène|personne|machine|poule|vache)\b|\bune (?:son|bruit|chien|chat|moteur)\b",
        "deu": r"\bein \w+e [A-ZÄÖÜ]|\beine \w+(?:er|es) [A-ZÄÖÜ]",
        "spa": r"\bun (?:serie|sirena|persona|campanada|breve ráfaga)\b|\buna (?:tono|sonido|zumbido|perro)\b",
        "nld": r"\bhet \w+ing\b|\been (?:laag|hoog) (?:toon|sirene|klokslag)\b",
        "cat": r"\bun (?:sèrie|sirena|persona|bonior|campanada)\b|\buna (?:to|so|gos|brunzit)\b",
    }
    for by_language, (language, pattern) in itertools.product(label_phrases(name).values(), wrong.items()):
        assert not re.search(pattern, by_language[language]), by_language[language]


def test_templates_hold_the_phrase_once_in_every_language():
    for kind, by_language in TEMPLATES.items():
        assert list(by_language) == list(LANGUAGES), kind
        for texts in by_language.values():
            assert len(texts) == len(set(texts)) >= 4
            assert all(text.count("{phrase}") == 1 for text in texts)


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("fra", "de à que du"),  # de + le = du, de + un = d'un, que + un = qu'un
        ("spa", "de a del al"),  # de + el = del
        ("cat", "de a per"),  # de + el = del, per + el = pel
        # These require a case other than the nominative.
        ("deu", "mit von aus bei nach vor neben zu auf durch einen hört enthält"),
    ],
)
def test_no_word_before_a_phrase_inflects_it(language, words):
    for by_language in (*TEMPLATES.values(), *read_phrases("temporal").values()):
        assert not [
            text for text in by_language[language] if re.search(rf"(?i)\b({words.replace(' ', '|')}) {{", text)
        ]


@pytest.mark.parametrize("name", DATASETS)
def test_no_caption_describes_two_labels_or_two_positions(name):
    for language in LANGUAGES:
        texts = [
            text
            for phrases, kind in itertools.product(label_phrases(name).values(), TEMPLATES)
            for text in render_captions(phrases, [language], kind)[language]
        ]
        assert len(texts) == len(set(texts)), language


def test_example_captions():
    phrases = label_phrases("synthetic")["low_siren"]
    rendered = render_captions(phrases, templates="sound_at_end")
    assert rendered["fra"][2] == "L'enregistrement se termine par une sirène grave à deux tons."
    assert rendered["deu"][1] == "Am Ende ist eine tiefe Zweitonsirene zu hören."
    assert rendered["jpn"][1] == "最後に低い二音のサイレンが聞こえる。"
    assert rendered["zho"][2] == "录音以低沉的双音警笛声结束。"
    assert all(text[0].isupper() for language in LANGUAGES[:6] for text in rendered[language])


def test_a_language_without_phrase_is_named():
    with pytest.raises(ValueError, match=r"'fra'.*'eng'"):
        render_captions({"eng": "a dog barking"}, ["eng", "fra"])


@pytest.mark.parametrize("name", ["vggsound", "templates", "../schema"])
def test_a_dataset_without_phrases_is_refused(name):
    with pytest.raises(ValueError, match=r"\['esc50', 'recordings', 'synthetic', 'urbansound8k'\]"):
        label_phrases(name)
