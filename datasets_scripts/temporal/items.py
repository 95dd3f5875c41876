"""Build training items for TeminAL on the fly from rows with one label each.

An item has one or two recordings, and captions that describe them. Random choices depend only on the seed, the epoch
and the index of the item, not on the number of workers or the row order. The caption templates are in
`phrases/temporal.json`, where `{first}` is the first sound in the audio.

TeminAL and ZSTE are from the paper "Temporal Enhancement of Contrastive Audio-Language Models through Self-Supervised
Post-Training with Text-Audio Pairs".
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from modeling_supclap.languages import LANGUAGES

from ..builders.captions import capitalize, check_languages, read_phrases
from ..schema import without_audio
from .mixing import RenderOptions, compose

RELATIONS = ("before", "after", "while", "single", "combined")

Row = Mapping[str, Any]
Phrases = Mapping[str, Mapping[str, str]]
T = TypeVar("T")

# `default` converts numpy integers, which samplers return and JSON does not support.
_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=int).encode


def describe(
    relation: str,
    phrases_first: Mapping[str, str],
    phrases_second: Mapping[str, str] | None,
    languages: Sequence[str] = LANGUAGES,
    exchange: bool = False,
) -> dict[str, list[str]]:
    """Write the captions of a clip with one or two sounds, in all phrasings and languages.

    Args:
        relation: "before" ("first before second"), "after" ("second after first", the same order in time), "while"
            (both at the same time), "single" (only the first sound), or "combined" (both sounds, without their order).
        phrases_first: `{language: noun phrase of the first sound}`.
        phrases_second: `{language: noun phrase of the second sound}`; None for "single".
        exchange: Whether to exchange the two sounds before writing (operator T in TeminAL eq. 1).

    Returns:
        `{language: [caption, ...]}`. The first English caption uses the phrasing of the paper.

    Raises:
        ValueError: The relation or a language is unknown, the number of sounds is wrong, or a phrase is missing.

    >>> dog, rain = {"eng": "a dog barking"}, {"eng": "rain"}
    >>> [describe(relation, dog, rain, ["eng"])["eng"][0] for relation in ("before", "after")]
    ['A dog barking before rain', 'Rain after a dog barking']
    >>> describe("before", dog, rain, ["eng"], exchange=True)["eng"][0]
    'Rain before a dog barking'
    """
    if relation not in RELATIONS:
        raise ValueError(f"unknown relation {relation!r}; the relations are {', '.join(RELATIONS)}")

    sounds = [phrases_first] if phrases_second is None else [phrases_first, phrases_second]
    if len(sounds) != (1 if relation == "single" else 2):
        raise ValueError(f"got {len(sounds)} sounds for {relation!r}; 'single' takes one, the others take two")
    if exchange:
        sounds.reverse()

    captions: dict[str, list[str]] = {}
    for language in check_languages(languages):
        phrases = [sound.get(language, "") for sound in sounds]
        if not all(phrases):
            raise ValueError(f"no phrase in {language!r}; there are phrases in {list(map(list, sounds))}")
        captions[language] = write_sentence(relation, language, phrases)
    return captions


def label_phrase(label: str, language: str = "eng", phrases: Phrases | None = None) -> str:
    """Return the noun phrase `phrases[label][language]`; raise ValueError if there is none.

    If `phrases` is None, the label itself is its English phrase, with spaces for underscores.

    >>> label_phrase("crying_baby")
    'crying baby'
    """
    if phrases is None and language == "eng":
        return label.replace("_", " ")
    if phrases is None or language not in phrases.get(label, {}):
        raise ValueError(f"label {label!r} has no phrase in {language!r}; give phrases[{label!r}][{language!r}]")
    return phrases[label][language]


def write_sentence(sentence: str, language: str, sounds: Sequence[str]) -> list[str]:
    """Insert one or two noun phrases into all phrasings of a sentence in `temporal.json`, and capitalise the texts."""
    phrasings = read_phrases("temporal")[sentence][language]
    return [capitalize(phrasing.format(first=sounds[0], second=sounds[-1])) for phrasing in phrasings]


@dataclass(frozen=True)
class TemporalItem:
    """Training item: one or two recordings, how to combine them, and captions.

    Attributes:
        role: How the recordings are combined, such as "forward" (see `mixing.ROLES`).
        rows: Dataset rows of the recordings, in the order of playback.
        labels: Class of each recording.
        captions: `{language: [caption, ...]}`; all captions have the same meaning.
        clip_id: Id of the item, made of the role and the clip ids of the recordings; unique within an epoch.
    """

    role: str
    rows: tuple[Row, ...]
    labels: tuple[str, ...]
    captions: dict[str, list[str]]
    clip_id: str

    @property
    def meaning(self) -> str:
        """String that is equal for items with the same sounds in the same temporal relation.

        For example, a is played before b in the forward item of the pair (a, b) and the reversed item of (b, a).
        """
        if self.role in ("forward", "reversed"):
            return f"sequence:{'+'.join(self.labels)}"
        return f"{self.role}:{'+'.join(sorted(self.labels))}"

    def __post_init__(self) -> None:
        if len(set(self.labels)) < len(self.rows):
            raise ValueError(f"{self.clip_id} has {self.labels[0]!r} twice; a pair must have two different classes")


def render(
    item: TemporalItem,
    read_waveform: Callable[[Row], np.ndarray],
    sampling_rate_hz: int,
    options: RenderOptions | None = None,
) -> np.ndarray:
    """Render the audio of an item with `mixing.compose`: (samples,) float32, peak at most 0.99.

    `read_waveform` returns the waveform of a row, (samples,) float. Errors of `compose` contain the clip ids.
    """
    try:
        return compose(item.role, list(map(read_waveform, item.rows)), sampling_rate_hz, options)
    except ValueError as error:
        raise ValueError(f"cannot render {item.clip_id}: {error}") from error


class TemporalItems:
    """TeminAL training items for all ordered pairs of different classes, with new random recordings in each epoch.

    For example, 50 classes have 50 * 49 = 2,450 ordered pairs and 7,350 items in `triple` (TeminAL B.2).

    Args:
        rows: Dataset rows with one label each. Pass only the training split (see `split_by_source`).
        seed: Random seed.
        phrases: Noun phrases as `{label: {language: phrase}}` (see `captions.label_phrases`). None: use the labels as
            English phrases.
        languages: Caption languages; the first is the anchor language.
        pairs_per_epoch: Number of class pairs per epoch. None: all pairs. Each epoch continues where the previous one
            stopped in a fixed random order of all pairs, and restarts at its end.
        use_after: Whether "c_j after c_i" replaces "c_i before c_j" in a random half of the items.
        num_phrasings: Number of phrasings per sentence. 1: the paper's "X before Y", as in ZSTE. None: all phrasings.
        random_order: Whether to exchange the two sounds in the captions of a random half of the pairs. This makes the
            order words unrelated to the audio, as a control experiment.

    Raises ValueError if a row does not have exactly one label, an id is duplicated, there are fewer than two classes, a
    label has no phrase, or `pairs_per_epoch` or `num_phrasings` is below 1.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        phrases: Phrases | None = None,
        languages: Sequence[str] = ("eng",),
        pairs_per_epoch: int | None = None,
        use_after: bool = True,
        num_phrasings: int | None = None,
        random_order: bool = False,
    ) -> None:
        self.rows, self._seed, self._use_after, self._num_phrasings = rows, seed, use_after, num_phrasings
        self._random_order = random_order
        self.recordings = recordings_by_label(rows)
        self.languages = check_languages(languages)
        self.labels = tuple(self.recordings)  # sorted
        if len(self.labels) < 2:
            raise ValueError(f"the rows have the labels {list(self.labels)}; give rows of two or more classes")

        self._phrases: dict[str, dict[str, str]] = {}
        for label in self.labels:
            self._phrases[label] = {}
            for language in self.languages:
                self._phrases[label][language] = label_phrase(label, language, phrases)

        self.pairs = shuffled(itertools.permutations(self.labels, 2), seed, "pairs")
        self._length = len(self.pairs) if pairs_per_epoch is None else pairs_per_epoch
        if self._length < 1 or (num_phrasings is not None and num_phrasings < 1):
            raise ValueError(f"pairs_per_epoch is {pairs_per_epoch}, num_phrasings is {num_phrasings}; give 1 or more")

    def __len__(self) -> int:
        """Return the number of pairs per epoch."""
        return self._length

    def triple(self, epoch: int, index: int) -> tuple[TemporalItem, TemporalItem, TemporalItem]:
        """Build the three items of pair `index` in an epoch for TeminAL stage B (section 3.2), from two recordings.

        These are the forward item `a_i + a_j`, "c_i before c_j"; the reversed item `a_j + a_i`, "c_j before c_i"; and
        the overlaid item `a_i ^ a_j`, "c_i while c_j".
        """
        rows = self.draw_rows("triple", epoch, index)
        relations = ("before", "after") if self._use_after else ("before",)
        is_wrong = self._random_order and drawn((False, True), self._seed, "wrong order", epoch, index)
        items = []
        for role in ("forward", "reversed"):
            relation = drawn(relations, self._seed, "relation", epoch, index, role)
            items.append(self._pair_item(role, relation, rows, is_wrong))
        return items[0], items[1], self._pair_item("overlaid", "while", rows)

    def stage_a(self, epoch: int, index: int) -> tuple[TemporalItem, TemporalItem]:
        """Build two items of pair `index` for TeminAL stage A (B.2): one recording alone, and both combined."""
        rows = self.draw_rows("stage_a", epoch, index)
        combined = self._pair_item("combined", "combined", rows)

        row = rows[drawn((0, 1), self._seed, "single", epoch, index)]
        (label,) = row["labels"]
        captions = self._describe("single", self._phrases[label], None)
        clip_id = f"single:{row['clip_id']} of {combined.clip_id}"
        return TemporalItem("single", (row,), (label,), captions, clip_id), combined

    def draw_rows(self, stage: str, epoch: int, index: int) -> tuple[Row, Row]:
        """Draw the two recordings of pair `index` in an epoch, in its order. Each `stage` draws different ones."""
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} is out of range; an epoch has {len(self)} pairs")
        labels = self.pairs[(epoch * len(self) + index) % len(self.pairs)]
        key = (self._seed, stage, epoch, index)
        first = drawn(self.recordings[labels[0]], *key, "first")

        # Clips of two classes may come from the same recording; do not pair these.
        others = [other for other in self.recordings[labels[1]] if other.source != first.source]
        if not others:
            raise ValueError(f"all clips of {labels[1]!r} are from {first.source!r}, and so is clip {first.clip_id!r}")
        return self.rows[first.row_index], self.rows[drawn(others, *key, "second").row_index]

    def _pair_item(self, role: str, relation: str, rows: tuple[Row, Row], is_wrong: bool = False) -> TemporalItem:
        first, second = self._phrases[rows[0]["labels"][0]], self._phrases[rows[1]["labels"][0]]
        captions = self._describe(relation, first, second, exchange=(role == "reversed") != is_wrong)

        rows = rows[::-1] if role == "reversed" else rows
        labels = (rows[0]["labels"][0], rows[1]["labels"][0])
        return TemporalItem(role, rows, labels, captions, f"{role}:{rows[0]['clip_id']}+{rows[1]['clip_id']}")

    def _describe(
        self, relation: str, first: Mapping[str, str], second: Mapping[str, str] | None, exchange: bool = False
    ) -> dict[str, list[str]]:
        captions = describe(relation, first, second, self.languages, exchange)
        return {language: texts[: self._num_phrasings] for language, texts in captions.items()}


class Recording(NamedTuple):
    """A recording to sample: its id, its source, and the index of its dataset row."""

    clip_id: str
    source: str
    row_index: int


def recordings_by_label(rows: Iterable[Row]) -> dict[str, list[Recording]]:
    """Return `{class: [recording, ...]}`, sorted by clip id, so that sampling does not depend on the row order."""
    recordings: dict[str, tuple[str, Recording]] = {}
    for index, row in enumerate(without_audio(rows)):
        clip_id, labels = row["clip_id"], list(row["labels"])
        if len(labels) != 1:
            raise ValueError(f"clip {clip_id!r} has the labels {labels}; give exactly one")
        if clip_id in recordings:
            raise ValueError(f"two rows have the clip_id {clip_id!r}; ids must be unique")
        recordings[clip_id] = labels[0], Recording(clip_id, row["source"], index)

    by_label: dict[str, list[Recording]] = {}
    for label, recording in sorted(recordings.values()):
        by_label.setdefault(label, []).append(recording)
    return by_label


def one_per_class(rows: Iterable[Row], seed: int = 0) -> list[int]:
    """Draw one recording of each class, from different sources if possible; return the sorted row indices.

    TeminAL (B.2) makes its 2,450 pairs from 50 recordings of ESC-50.

    >>> rows = [{"clip_id": str(i), "labels": [("dog", "rain")[i % 2]], "source": f"freesound:{i}"} for i in range(6)]
    >>> [rows[index]["labels"] for index in one_per_class(rows)]
    [['rain'], ['dog']]
    """
    indices: list[int] = []
    sources: set[str] = set()
    for label, recordings in recordings_by_label(rows).items():
        others = [recording for recording in recordings if recording.source not in sources]
        chosen = drawn(others or recordings, seed, "one per class", label)
        indices.append(chosen.row_index)
        sources.add(chosen.source)
    return sorted(indices)


def split_by_source(rows: Iterable[Row], train_fraction: float = 0.7, seed: int = 0) -> tuple[list[int], list[int]]:
    """Split rows into a training and a test set without common source recordings; return their sorted row indices.

    If a source has clips of several classes, it belongs to the alphabetically first class. A class without sources of
    its own may have no rows in one of the sets.

    Args:
        train_fraction: Fraction of the sources of each class to use for training, rounded. At least one source is used
            for training; of two or more sources, at least one is used for testing. TeminAL uses 0.7 (B.5).

    Raises ValueError if `train_fraction` is not between 0 and 1, or a row does not have exactly one label.

    >>> rows = [{"clip_id": str(i), "labels": ["dog"], "source": f"freesound:{i // 2}"} for i in range(6)]
    >>> split_by_source(rows)
    ([0, 1, 2, 3], [4, 5])
    """
    if not 0 < train_fraction < 1:
        raise ValueError(f"train_fraction is {train_fraction}; give a value between 0 and 1")
    source_of_row: dict[int, str] = {}
    seen: set[str] = set()
    train_sources: set[str] = set()
    for label, recordings in recordings_by_label(rows).items():
        sources: set[str] = set()
        for recording in recordings:
            source_of_row[recording.row_index] = recording.source
            sources.add(recording.source)
        sources -= seen
        seen |= sources
        count = max(1, min(round(train_fraction * len(sources)), len(sources) - 1))
        train_sources.update(shuffled(sources, seed, "split", label)[:count])

    train = sorted(index for index, source in source_of_row.items() if source in train_sources)
    return train, sorted(source_of_row.keys() - train)


def digest(value: Any) -> bytes:
    """Return the SHA-256 of a value as canonical JSON, which is the same on every machine."""
    return hashlib.sha256(_canonical_json(value).encode()).digest()


def drawn(options: Sequence[T], *key: Any) -> T:
    """Choose one of the options by a hash of `key`. The key must contain the seed and differ between choices."""
    return options[int.from_bytes(digest(key), "big") % len(options)]


def shuffled(options: Iterable[T], *key: Any) -> list[T]:
    """Return the options (JSON values) in a random order, which depends only on the options and `key`."""
    return sorted(options, key=lambda option: digest([*key, option]))
