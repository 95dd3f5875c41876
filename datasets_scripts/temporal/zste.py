"""ZSTE, the zero-shot temporal evaluation: a fixed set of clips from rows with one label each, and questions on them.

Nothing is rendered and nothing is scored here: `mixing.compose` makes the clips and the metric `zste` the scores. The
draws are `temporal`'s, so a seed gives the same set and the same questions everywhere; `set_hash` names the set.

[T] is "Temporal Enhancement of Contrastive Audio-Language Models through Self-Supervised Post-Training with Text-Audio
Pairs" (TeminAL and ZSTE). The prompts are in `phrases/temporal.json`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..builders.captions import check_languages
from .items import Phrases, Row, TemporalItems, digest, label_phrase, recordings_by_label, shuffled, write_sentence

ZSTE_VERSION = 1
"""Raise it with any change to what `zste_set` draws or `zste_prompts` asks: it is part of `set_hash`."""

# How often pairs are drawn for each that is wanted, before the rows are said to have no more.
_DRAWS_PER_ITEM = 20

ZSTE_FAMILIES = {
    "1A": "single",
    "2A": "concatenated",
    "2B": "concatenated",
    "2C": "overlaid",
    "2D": "overlaid",
    "3A": "concatenated",
    "3B": "overlaid",
    "4A": "concatenated",
    "4B": "overlaid",
    "5A": "concatenated",
    "5B": "overlaid",
}
"""The kind of clip that each task asks about."""

Candidate = tuple[str, ...]
"""A sentence of `temporal.json` and the labels to put into it: a prompt before it has a language."""


def zste_set(rows: Sequence[Row], seed: int, num_items: int) -> list[dict[str, Any]]:
    """Draws a fixed evaluation set for ZSTE [T 4.2, B.4].

    Args:
        rows: Rows of the schema with one label each; give the test part only.
        seed: The seed of the draw.
        num_items: How many clips of each family to draw.

    Returns:
        Plain records of "id", "family", "clip_ids" and "labels" (both in the order of sounding). First the family
        "single": classes take turns and no clip comes twice, so there are at most as many as rows. Then
        "concatenated": ordered pairs of classes take turns and no two recordings come twice, so that there are fewer of
        them where the rows give no more. Then "overlaid": the same recordings again, so that order and overlap are
        asked of the same sounds.

    Raises:
        ValueError: `num_items` is not positive, or what `TemporalItems` raises.
    """
    if num_items < 1:
        raise ValueError(f"num_items is {num_items}; give at least 1")
    items = TemporalItems(rows, seed)

    records = []
    for clip_id, label in itertools.islice(_singles_in_turn(rows, seed), num_items):
        records.append(_record("single", [clip_id], [label]))

    # Later epochs draw recordings anew, and may draw those of an earlier one again: nothing is asked twice.
    pairs: dict[tuple[str, ...], list[str]] = {}
    for number in range(_DRAWS_PER_ITEM * num_items):
        forward, _, _ = items.triple(*divmod(number, len(items)))
        pairs.setdefault(tuple(map(itemgetter("clip_id"), forward.rows)), list(forward.labels))
        if len(pairs) == num_items:
            break
    for family in ("concatenated", "overlaid"):
        for clip_ids, labels in pairs.items():
            records.append(_record(family, list(clip_ids), labels))
    return records


def set_hash(records: Sequence[Mapping[str, Any]]) -> str:
    """The name of an evaluation set: evaluations with the same one asked about the same clips.

    Args:
        records: From `zste_set`.

    Returns:
        The SHA-256 in hex of `ZSTE_VERSION` and the records as canonical JSON.

    >>> set_hash([])[:12]
    '77d4115bf19d'
    """
    return digest({"records": list(records), "version": ZSTE_VERSION}).hex()


class Prompts(NamedTuple):
    """The candidates of one clip, each another text, and the indices of the right ones in the order of sounding."""

    texts: list[str]
    right: list[int]


def zste_prompts(
    task: str,
    record: Mapping[str, Any],
    labels: Sequence[str],
    phrases: Phrases | None = None,
    language: str = "eng",
    num_candidates: int = 50,
    seed: int = 0,
) -> Prompts:
    """What a task of ZSTE asks about a clip [T B.4]; the scores belong to the metric.

    - 1A and 2A-2D: "The sound of {label}" for every label, in the order given; right is what sounds.
    - 3A, 3B: "X before Y", "Y before X", "X while Y"; right is the first (3A) or the last (3B).
    - 4A, 4B: those three among `num_candidates`, of which each other names an absent class.
    - 5A: "In this concatenated sound, the first sound is X", "the second ...", and both of Y; right are two.
    - 5B: "Simultaneous sound of X and Y", the two orders are right, among `num_candidates` as in task 4.

    From task 3 on the order of the candidates is drawn too. The others of tasks 4 and 5B name one class that sounds
    and one that does not, and only when these are used up two that do not: CLAP hears one of two sounds in 81 % of the
    clips (2B) and yet scores at chance in task 4 [T table 3], so the others cannot be such that one sound decides.

    Args:
        task: "1A" to "5B", a key of `ZSTE_FAMILIES`.
        record: From `zste_set`, of the task's family.
        labels: All classes, the record's among them.
        phrases: `phrases[label][language]`; without, labels serve in English.
        language: ISO 639-3 code. The candidates and their order are the same in all languages.
        num_candidates: Of tasks 4 and 5B.
        seed: The seed of the draw of the others and of the order.

    Returns:
        The prompts and which of them are right: one index for 1A, 3 and 4, two for 2 and 5.

    Raises:
        ValueError: An unknown task, a record of another family or with a class not in `labels`, a label that repeats
            or whose phrase does, fewer candidates than the task needs or more than the labels give.

    >>> record = {"id": "a", "family": "overlaid", "clip_ids": ["1", "2"], "labels": ["dog", "rain"]}
    >>> prompts = zste_prompts("3B", record, ["dog", "rain", "wind"])
    >>> sorted(prompts.texts), [prompts.texts[index] for index in prompts.right]
    (['Dog before rain', 'Dog while rain', 'Rain before dog'], ['Dog while rain'])
    """
    _check_question(task, record, labels, language)
    key = (seed, "zste", task, record["id"])
    candidates, right = _questions(task, record["labels"], labels, num_candidates, key)
    if task[0] not in "12":
        candidates = shuffled(candidates, *key)

    texts: list[str] = []
    for sentence, *named in candidates:
        sounds = [label_phrase(label, language, phrases) for label in named]
        texts.append(write_sentence(sentence, language, sounds)[0])
    if len(set(texts)) < len(texts):
        raise ValueError(f"two of the candidates of task {task} read the same in {language!r}; give distinct phrases")
    return Prompts(texts, list(map(candidates.index, right)))


def _check_question(task: str, record: Mapping[str, Any], labels: Sequence[str], language: str) -> None:
    if task not in ZSTE_FAMILIES:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(ZSTE_FAMILIES)}")
    if record["family"] != ZSTE_FAMILIES[task]:
        raise ValueError(f"task {task} asks about {ZSTE_FAMILIES[task]!r} clips; record {record['id']!r} is another")
    if len(set(labels)) < len(labels):
        raise ValueError(f"labels is {list(labels)}; name each class once")
    unknown = set(record["labels"]) - set(labels)
    if unknown:
        raise ValueError(f"record {record['id']!r} has the classes {sorted(unknown)}, which are not among the labels")
    check_languages([language])


def _questions(
    task: str, present: Sequence[str], labels: Sequence[str], num_candidates: int, key: tuple[Any, ...]
) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates of a task and the right ones of them, in the order of sounding."""
    if task[0] in "12":
        every: list[Candidate] = [("zste_label", label) for label in labels]
        return every, [("zste_label", label) for label in present]

    first, second = present
    if task == "5A":
        wrong: list[Candidate] = [("zste_first", second), ("zste_second", first)]
        right: list[Candidate] = [("zste_first", first), ("zste_second", second)]
        return right + wrong, right
    if task == "5B":
        orders: list[Candidate] = [("zste_simultaneous", first, second), ("zste_simultaneous", second, first)]
        return _filled_up(orders, present, labels, num_candidates, key), orders
    relations: list[Candidate] = [("before", first, second), ("before", second, first), ("while", first, second)]
    candidates = _filled_up(relations, present, labels, num_candidates, key) if task[0] == "4" else relations
    return candidates, relations[:1] if task[1] == "A" else relations[2:]


def _filled_up(
    candidates: list[Candidate],
    present: Sequence[str],
    labels: Sequence[str],
    num_candidates: int,
    key: tuple[Any, ...],
) -> list[Candidate]:
    """Adds wrong candidates of the same sentences: with one class that sounds; when these are used up, with none."""
    sentences = sorted(set(map(itemgetter(0), candidates)))
    most = len(candidates) + len(sentences) * (len(labels) * (len(labels) - 1) - 2)
    if not len(candidates) <= num_candidates <= most:
        raise ValueError(
            f"num_candidates is {num_candidates}; give {len(candidates)} to {most}, which {len(labels)} labels make"
        )

    absent = set(labels) - set(present)
    one_sounds = [*itertools.product(present, absent), *itertools.product(absent, present)]
    filled = list(candidates)
    for kind, pairs in (("one", one_sounds), ("none", list(itertools.permutations(absent, 2)))):
        if len(filled) < num_candidates:
            others = [(sentence, *pair) for sentence, pair in itertools.product(sentences, pairs)]
            filled += shuffled(others, *key, kind)
    return filled[:num_candidates]


def _singles_in_turn(rows: Sequence[Row], seed: int) -> Iterator[tuple[str, str]]:
    """Every clip with its class, the classes taking turns."""
    by_label = recordings_by_label(rows)
    queues = []
    for label in shuffled(by_label, seed, "classes"):
        clips = [(recording.clip_id, label) for recording in by_label[label]]
        queues.append(shuffled(clips, seed, "single"))
    for turn in itertools.zip_longest(*queues):
        yield from filter(None, turn)


def _record(family: str, clip_ids: list[str], labels: list[str]) -> dict[str, Any]:
    return {"id": f"{family}:{'+'.join(clip_ids)}", "family": family, "clip_ids": clip_ids, "labels": labels}
