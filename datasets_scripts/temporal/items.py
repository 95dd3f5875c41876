"""Temporal items for TeminAL and ZSTE, made on the fly from any rows with one label each: pure functions and a seed.

Nothing is rendered in advance and no file is read here: waveforms come in as arrays, by way of a function that the
caller gives. Every draw is a hash of the seed and of what it is for, so it is the same on every machine, for any number
of workers, for any order of the rows and in every version of numpy.

[T] is "Temporal Enhancement of Contrastive Audio-Language Models through Self-Supervised Post-Training with Text-Audio
Pairs" (TeminAL and ZSTE). The sentences are in `phrases/temporal.json`, where `{first}` sounds first.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..builders.captions import check_languages, read_phrases
from ..schema import LANGUAGES, without_audio
from .mixing import RenderOptions, compose

RELATIONS = ("before", "after", "while", "single", "combined")

Row = Mapping[str, Any]
Phrases = Mapping[str, Mapping[str, str]]
T = TypeVar("T")

# Samplers give numpy integers, which JSON does not know: hence `default`.
_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=int).encode


def describe(
    relation: str,
    phrases_first: Mapping[str, str],
    phrases_second: Mapping[str, str] | None,
    languages: Sequence[str] = LANGUAGES,
    exchange: bool = False,
) -> dict[str, list[str]]:
    """Writes what sounds when, in every phrasing of every language.

    Args:
        relation: "before", the first sounds before the second; "after", which says the same the other way round, "the
            second after the first"; "while", both sound at once; "single", the first is all that sounds; "combined",
            both sound, no matter when.
        phrases_first: The noun phrase of the first sound, by language.
        phrases_second: The same of the second; None for "single".
        languages: The languages to write in.
        exchange: Describes the clip with its two sounds exchanged instead, the T of [T eq. 1].

    Returns:
        `captions[language]`; the first English phrasing is the paper's.

    Raises:
        ValueError: An unknown relation or language, a sound too many or too few, or a language without a phrase.

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
        spoken = [sound.get(language, "") for sound in sounds]
        if not all(spoken):
            raise ValueError(f"no phrase in {language!r}; there are phrases in {list(map(list, sounds))}")
        captions[language] = write_sentence(relation, language, spoken)
    return captions


def label_phrase(label: str, language: str = "eng", phrases: Phrases | None = None) -> str:
    """The noun phrase of a label.

    Args:
        label: The class.
        language: ISO 639-3 code.
        phrases: `phrases[label][language]`, as from `captions.label_phrases`; without, the label itself serves in
            English.

    Returns:
        The phrase.

    Raises:
        ValueError: There is none.

    >>> label_phrase("crying_baby")
    'crying baby'
    """
    if phrases is None and language == "eng":
        return label.replace("_", " ")
    if phrases is None or language not in phrases.get(label, {}):
        raise ValueError(f"label {label!r} has no phrase in {language!r}; give phrases[{label!r}][{language!r}]")
    return phrases[label][language]


def write_sentence(sentence: str, language: str, sounds: Sequence[str]) -> list[str]:
    """Every phrasing of a sentence of `temporal.json`, with the one or two phrases in it and a capital in front."""
    texts = []
    for phrasing in read_phrases("temporal")[sentence][language]:
        text = phrasing.format(first=sounds[0], second=sounds[-1])
        texts.append(text[:1].upper() + text[1:])
    return texts


@dataclass(frozen=True)
class TemporalItem:
    """One training item: which recordings to put together how, and what to say of them.

    Attributes:
        role: One of `mixing.ROLES`.
        rows: The one or two clips, in the order in which they sound.
        labels: Their classes, in the same order.
        captions: `captions[language]`, one or more phrasings.
        clip_id: The role and the clips it is made of; unique among the items of an epoch.
    """

    role: str
    rows: tuple[Row, ...]
    labels: tuple[str, ...]
    captions: dict[str, list[str]]
    clip_id: str

    @property
    def meaning(self) -> str:
        """Equal for items that the same captions describe: "a before b" is also the reversed item of pair (b, a)."""
        if self.role in ("forward", "reversed"):
            return f"sequence:{'+'.join(self.labels)}"
        return f"{self.role}:{'+'.join(sorted(self.labels))}"

    def __post_init__(self) -> None:
        if len(set(self.labels)) < len(self.rows):
            raise ValueError(f"{self.clip_id} pairs {self.labels[0]!r} with itself; a pair needs two different classes")


def render(
    item: TemporalItem,
    read_waveform: Callable[[Row], np.ndarray],
    sampling_rate_hz: int,
    options: RenderOptions | None = None,
) -> np.ndarray:
    """The audio of an item.

    Args:
        item: What to render.
        read_waveform: Gives the (samples,) floats of a row at `sampling_rate_hz`.
        sampling_rate_hz: The rate of what `read_waveform` gives.
        options: How clips that follow each other are joined; by default without fade, gap or change of level.

    Returns:
        (samples,) float32, peak at most 0.99. A combined item is one clip after the other, like a forward one
        [T 3.2].

    Raises:
        ValueError: What `concatenate` and `overlay` raise, with the item's clips named.
    """
    try:
        return compose(item.role, list(map(read_waveform, item.rows)), sampling_rate_hz, options)
    except ValueError as error:
        raise ValueError(f"cannot render {item.clip_id}: {error}") from error


class TemporalItems:
    """All temporal items of a set of rows: every ordered pair of different classes, with recordings drawn each epoch.

    50 classes have 50 * 49 = 2,450 ordered pairs and so 7,350 items a `triple` [T B.2].

    Args:
        rows: Rows of the schema with one label each; give the training part only (`split_by_source`).
        seed: The seed of all draws.
        phrases: `phrases[label][language]`, as from `captions.label_phrases`; without, labels serve in English.
        languages: The caption languages, the anchor first.
        labels: The classes to use; by default all that the rows have.
        pairs_per_epoch: How many pairs an epoch has; by default all. The epochs go round all pairs in a random order
            of the seed's own, so none comes twice before all have come; an epoch may go round several times.
        use_after: Says every other time "c_j after c_i" for "c_i before c_j", drawn for each item.
        num_phrasings: Says everything in the first so many phrasings of its sentence; 1 is the paper's "X before Y",
            which ZSTE asks by. By default in all of them.

    Raises:
        ValueError: A row without a label or with several, two rows with one id, a class without recordings, a class
            named twice, fewer than two classes, a label without a phrase, no pairs an epoch, no phrasings.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        phrases: Phrases | None = None,
        languages: Sequence[str] = ("eng",),
        labels: Sequence[str] | None = None,
        pairs_per_epoch: int | None = None,
        use_after: bool = True,
        num_phrasings: int | None = None,
    ) -> None:
        self.rows, self._seed, self._use_after, self._num_phrasings = rows, seed, use_after, num_phrasings
        self._recordings = recordings_by_label(rows)
        self.languages = check_languages(languages)
        self.labels = _check_labels(sorted(self._recordings) if labels is None else labels, self._recordings)

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
        """The pairs of an epoch."""
        return self._length

    def triple(self, epoch: int, index: int) -> tuple[TemporalItem, TemporalItem, TemporalItem]:
        """The items of TeminAL B that a pair gives.

        Args:
            epoch: The epoch, from 0.
            index: The place of the pair in the epoch.

        Returns:
            The forward item `a_i + a_j`, "c_i before c_j"; the reversed one `a_j + a_i`, "c_j before c_i"; the
            overlaid one `a_i ^ a_j`, "c_i while c_j" [T 3.2]; all of the same two recordings.

        Raises:
            IndexError: The epoch has no such pair.
        """
        rows = self._draw_rows("triple", epoch, index)
        relations = ("before", "after") if self._use_after else ("before",)

        items = []
        for role in ("forward", "reversed"):
            relation = drawn(relations, self._seed, "relation", epoch, index, role)
            items.append(self._pair_item(role, relation, rows))
        return items[0], items[1], self._pair_item("overlaid", "while", rows)

    def stage_a(self, epoch: int, index: int) -> tuple[TemporalItem, TemporalItem]:
        """The items of TeminAL A that a pair gives.

        Args:
            epoch: The epoch, from 0.
            index: The place of the pair in the epoch.

        Returns:
            A single item, one of the pair's two recordings, and the combined item of both [T B.2]. Their `labels` are
            the class sets that `teminal_a_weights` compares; `items.labels.index(label)` numbers them.

        Raises:
            IndexError: The epoch has no such pair.
        """
        rows = self._draw_rows("stage_a", epoch, index)
        combined = self._pair_item("combined", "combined", rows)

        row = rows[drawn((0, 1), self._seed, "single", epoch, index)]
        (label,) = row["labels"]
        captions = self._describe("single", self._phrases[label], None)
        clip_id = f"single:{row['clip_id']} of {combined.clip_id}"
        return TemporalItem("single", (row,), (label,), captions, clip_id), combined

    def _draw_rows(self, stage: str, epoch: int, index: int) -> tuple[Row, Row]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of an epoch with {len(self)} pairs")
        labels = self.pairs[(epoch * len(self) + index) % len(self.pairs)]
        key = (self._seed, stage, epoch, index)
        first = drawn(self._recordings[labels[0]], *key, "first")

        # Clips of two classes may be cut from one recording.
        others = [other for other in self._recordings[labels[1]] if other.source != first.source]
        if not others:
            raise ValueError(f"all clips of {labels[1]!r} are from {first.source!r}, and so is clip {first.clip_id!r}")
        return self.rows[first.row_index], self.rows[drawn(others, *key, "second").row_index]

    def _pair_item(self, role: str, relation: str, rows: tuple[Row, Row]) -> TemporalItem:
        first, second = self._phrases[rows[0]["labels"][0]], self._phrases[rows[1]["labels"][0]]
        captions = self._describe(relation, first, second, exchange=role == "reversed")

        rows = rows[::-1] if role == "reversed" else rows
        labels = (rows[0]["labels"][0], rows[1]["labels"][0])
        return TemporalItem(role, rows, labels, captions, f"{role}:{rows[0]['clip_id']}+{rows[1]['clip_id']}")

    def _describe(
        self, relation: str, first: Mapping[str, str], second: Mapping[str, str] | None, exchange: bool = False
    ) -> dict[str, list[str]]:
        captions = describe(relation, first, second, self.languages, exchange)
        return {language: texts[: self._num_phrasings] for language, texts in captions.items()}


class Recording(NamedTuple):
    """What draws need to know of a row; `row_index` is its place among the rows."""

    clip_id: str
    source: str
    row_index: int


def recordings_by_label(rows: Iterable[Row]) -> dict[str, list[Recording]]:
    """The rows by class, in the order of their ids, so that draws do not depend on the order of the rows."""
    recordings: dict[str, tuple[str, Recording]] = {}
    for index, row in enumerate(without_audio(rows)):
        clip_id, labels = row["clip_id"], list(row["labels"])
        if len(labels) != 1:
            raise ValueError(f"clip {clip_id!r} has the labels {labels}; give it exactly one")
        if clip_id in recordings:
            raise ValueError(f"two rows have the clip_id {clip_id!r}; ids must be unique")
        recordings[clip_id] = labels[0], Recording(clip_id, row["source"], index)

    by_label: dict[str, list[Recording]] = {}
    for label, recording in sorted(recordings.values()):
        by_label.setdefault(label, []).append(recording)
    return by_label


def _check_labels(labels: Sequence[str], recordings: Mapping[str, Sequence[Recording]]) -> tuple[str, ...]:
    silent = set(labels) - recordings.keys()
    if silent:
        raise ValueError(f"the classes {sorted(silent)} have no recordings; there are recordings of {list(recordings)}")
    if len(set(labels)) < len(labels):
        raise ValueError(f"labels is {list(labels)}; name each class once, as no class is paired with itself")
    if len(labels) < 2:
        raise ValueError(f"labels is {list(labels)}; pairs need at least two classes")
    return tuple(labels)


def split_by_source(rows: Iterable[Row], train_fraction: float = 0.7, seed: int = 0) -> tuple[list[int], list[int]]:
    """Splits rows by the recording they were cut from, class by class.

    Args:
        rows: Rows of the schema with one label each.
        train_fraction: The part of the sources of each class to train on, rounded, but at least one source, and never
            all of them where there are two or more; 0.7 is TeminAL's [T B.5].
        seed: The seed of the draw.

    Returns:
        The indices of the training rows and of the test rows, ascending; no source is in both. A source with clips of
        several classes counts for the first of them by name.

    Raises:
        ValueError: The fraction is not between 0 and 1, or a row has no label or several.

    >>> rows = [{"clip_id": str(i), "labels": ["dog"], "source": f"freesound:{i // 2}"} for i in range(6)]
    >>> split_by_source(rows)
    ([0, 1, 2, 3], [4, 5])
    """
    if not 0 < train_fraction < 1:
        raise ValueError(f"train_fraction is {train_fraction}; give more than 0 and less than 1")
    source_of_row: dict[int, str] = {}
    seen: set[str] = set()
    train_sources: set[str] = set()
    for label, recordings in recordings_by_label(rows).items():
        for recording in recordings:
            source_of_row[recording.row_index] = recording.source

        own = {recording.source for recording in recordings} - seen
        seen |= own
        count = max(1, min(round(train_fraction * len(own)), len(own) - 1))
        train_sources.update(shuffled(own, seed, "split", label)[:count])

    train: list[int] = []
    test: list[int] = []
    for index, source in sorted(source_of_row.items()):
        (train if source in train_sources else test).append(index)
    return train, test


def digest(value: Any) -> bytes:
    """The SHA-256 of a value as canonical JSON: the same on every machine and for ever."""
    return hashlib.sha256(_canonical_json(value).encode()).digest()


def drawn(options: Sequence[T], *key: Any) -> T:
    """One of the options, drawn by the hash of the key: the seed and all that sets this draw apart from others."""
    return options[int.from_bytes(digest(key), "big") % len(options)]


def shuffled(options: Iterable[T], *key: Any) -> list[T]:
    """The options in a random order of the key's own, whatever their order was; each is a value that JSON knows."""
    return sorted(options, key=lambda option: digest([*key, option]))
