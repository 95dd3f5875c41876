"""Detect the order of sounds in a mixture or in a caption, and make rows for sampling."""

import math
import re

import numpy as np

RATE_HZ = 8000
GOOD = np.full(80, 0.1)

# Patterns for captions by language: the phrase named first sounds first, the phrase named second sounds first, or both
# sound together. Latin words are case-sensitive: "Après X, on entend Y".
ORDER_WORDS = {
    "eng": (r" before | followed by |, then |^After ", r" after | preceded by ", r" while | same time| together "),
    "fra": (r" avant |, puis |, et ensuite |^Après ", r" après ", r" pendant | en même temps| à la fois "),
    "deu": (
        r", bevor |, danach | und dann |^Nachdem ",
        r", nachdem |, davor ",
        r", während | zugleich | zur selben Zeit",
    ),
    "spa": (
        r" antes que | y luego |; después, |^Tras ",
        r" tras |, y antes ",
        r" mientras | a la vez | mismo tiempo ",
    ),
    "nld": (r" vóór | gevolgd | daarna |^Na ", r" na | voorafgegaan ", r" terwijl | tegelijk | samen "),
    "cat": (
        r" abans que | i després | tot seguit, |^Un cop ",
        r" un cop |, i abans ",
        r" mentre | alhora | mateix temps ",
    ),
    "jpn": (r"に続いて|、それから|の後に|終わってから", r"の前に", r"重なって|とともに|一緒に"),
    "zho": (r"在.+之前$|，然后是|^先听到.+再|之后传来", r"在.+之后$|，此前是", r"伴随着|重叠|一起"),
}


def tone(frequency_hz, seconds=1.0, amplitude=0.3):
    return amplitude * np.sin(2 * np.pi * frequency_hz * np.arange(round(seconds * RATE_HZ)) / RATE_HZ)


def noise(seed, seconds=1.0, amplitude=0.1):
    return amplitude * np.random.default_rng(seed).standard_normal(round(seconds * RATE_HZ))


def strength_db(samples, frequency_hz):
    """Return the level in dB of a sine in the samples, by projection."""
    phase = 2j * np.pi * frequency_hz * np.arange(samples.size) / RATE_HZ
    return 20 * math.log10(2 * abs(np.mean(samples * np.exp(-phase))) + 1e-12)


def make_rows(labels=("cat", "cow", "dog", "rain"), sources=3, takes=2):
    return [
        {"clip_id": f"{label}-{source}{take}", "labels": [label], "source": f"freesound:{label}-{source}"}
        for label in labels
        for source in range(sources)
        for take in "AB"[:takes]
    ]


def read_order(language, text, one, other):
    """Return the phrase that sounds first in a caption of two phrases, or "both"."""
    (verdict,) = [number for number, words in enumerate(ORDER_WORDS[language]) if re.search(words, text)]
    named = sorted((one, other), key=lambda phrase: text.lower().index(phrase.lower()))
    return "both" if verdict == 2 else named[verdict]
