"""Zero-shot temporal evaluation (ZSTE): sample a fixed set of clips, and build the candidate texts for each clip.

ZSTE is described in the TeminAL paper, section 4.2 and appendix B.4. All random choices depend only on the seed, so the
evaluation set is the same on every machine. The prompts are in `phrases/temporal.json`.
"""

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..builders.captions import check_languages
from .items import Phrases, Row, TemporalItems, digest, label_phrase, shuffled, write_sentence

ZSTE_VERSION = 1
"""Part of `set_hash`; increase it if the results of `zste_set` or `zste_prompts` change."""

# Maximum number of sampling attempts per requested pair.
_DRAWS_PER_ITEM = 20

ZSTE_FAMILIES = {
    "1A": "single", "2A": "concatenated", "2B": "concatenated", "2C": "overlaid", "2D": "overlaid",
    "3A": "concatenated", "3B": "overlaid", "4A": "concatenated", "4B": "overlaid", "5A": "concatenated",
    "5B": "overlaid",
}  # fmt: skip
"""Type of clip in each task: a single sound, two concatenated sounds, or two overlaid sounds."""

Candidate = tuple[str, ...]
"""A candidate text before translation: (key of a sentence in `temporal.json`, labels to insert)."""


def zste_set(rows: Sequence[Row], seed: int, num_items: int) -> list[dict[str, Any]]:
    """Sample a fixed evaluation set for ZSTE (TeminAL section 4.2 and B.4), with three families of clips.

    Args:
        rows: Dataset rows with one label each. Pass only the test split.
        num_items: Number of clips per family. A family has fewer if there are not enough distinct clips or pairs.

    Returns:
        List of records. A record is a dict with "id", "family", "clip_ids" and "labels"; clip ids and labels are in the
        order of playback. The families are:

        - "single": distinct clips, sampled from each class in turn.
        - "concatenated": distinct ordered pairs of clips, sampled from each ordered pair of classes in turn.
        - "overlaid": the same pairs of clips as in "concatenated".

    Raises ValueError if `num_items` is not positive, or if `TemporalItems` does for these rows.
    """
    if num_items < 1:
        raise ValueError(f"num_items is {num_items}; give 1 or more")
    items = TemporalItems(rows, seed)

    queues = []
    for label in shuffled(items.labels, seed, "classes"):
        clips = [(recording.clip_id, label) for recording in items.recordings[label]]
        queues.append(shuffled(clips, seed, "single"))
    in_turn = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*queues)))
    singles = {}
    for clip_id, label in itertools.islice(in_turn, num_items):
        singles[(clip_id,)] = [label]

    # Later epochs may sample the same recordings again. Use each pair of recordings once.
    pairs: dict[tuple[str, ...], list[str]] = {}
    for number in range(_DRAWS_PER_ITEM * num_items):
        drawn = items.draw_rows("triple", *divmod(number, len(items)))
        first, second = drawn
        pairs.setdefault((first["clip_id"], second["clip_id"]), [first["labels"][0], second["labels"][0]])
        if len(pairs) == num_items:
            break

    records = []
    for family, sounds in (("single", singles), ("concatenated", pairs), ("overlaid", pairs)):
        for ids, labels in sounds.items():
            name = f"{family}:{'+'.join(ids)}"
            records.append({"id": name, "family": family, "clip_ids": list(ids), "labels": labels})
    return records


def set_hash(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256, in hex, of `ZSTE_VERSION` and the records of `zste_set` as canonical JSON.

    Evaluations with equal hashes used the same clips.

    >>> set_hash([])[:12]
    '77d4115bf19d'
    """
    return digest({"records": list(records), "version": ZSTE_VERSION}).hex()


class Prompts(NamedTuple):
    """Distinct candidate texts for one clip, and the indices of the one or two correct texts."""

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
    """Build the candidate texts of a ZSTE task for one clip (TeminAL B.4).

    - 1A and 2A-2D: "The sound of {label}" for every label, in the given order. The classes in the clip are correct.
    - 3A, 3B: "X before Y", "Y before X", "X while Y". The first (3A) or the last (3B) is correct.
    - 4A, 4B: the texts of task 3, and wrong candidates up to `num_candidates`.
    - 5A: "In this concatenated sound, the first sound is X" and "the second sound is X", and the same two texts with Y.
      Two of the four texts are correct.
    - 5B: "Simultaneous sound of X and Y" in both orders (correct), and wrong candidates up to `num_candidates`.

    In tasks 3 to 5, the order of the candidates is random. An added wrong candidate (4A, 4B, 5B) names one class in the
    clip and one absent class, so that the model must recognise both sounds to exclude it. If there are not enough such
    candidates, the remaining ones name two absent classes.

    Args:
        record: Record from `zste_set` with the family of the task.
        labels: All classes, including the classes in the record.
        phrases: Noun phrases as `{label: {language: phrase}}`. None: use the labels as English phrases.
        language: ISO 639-3 code. The candidates and their order are the same in all languages.
        num_candidates: Number of candidates in tasks 4 and 5B.

    Raises:
        ValueError: The task is unknown, the record has another family, or a class is not in `labels`. Labels or texts
            are duplicated. `num_candidates` is too small for the task or too large for the number of labels.

    >>> record = {"id": "a", "family": "overlaid", "clip_ids": ["1", "2"], "labels": ["dog", "rain"]}
    >>> prompts = zste_prompts("3B", record, ["dog", "rain", "wind"])
    >>> sorted(prompts.texts), [prompts.texts[index] for index in prompts.right]
    (['Dog before rain', 'Dog while rain', 'Rain before dog'], ['Dog while rain'])
    """
    if task not in ZSTE_FAMILIES:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(ZSTE_FAMILIES)}")
    if record["family"] != ZSTE_FAMILIES[task]:
        raise ValueError(
            f"task {task} requires {ZSTE_FAMILIES[task]!r} clips; record {record['id']!r} is {record['family']!r}"
        )
    if len(set(labels)) < len(labels):
        raise ValueError(f"labels is {list(labels)}; list each class once")
    unknown = set(record["labels"]) - set(labels)
    if unknown:
        raise ValueError(f"record {record['id']!r} has the classes {sorted(unknown)}, which are not in labels")
    check_languages([language])

    key = (seed, "zste", task, record["id"])
    candidates, right = _candidates(task, record["labels"], labels, num_candidates, key)
    if task[0] not in "12":
        candidates = shuffled(candidates, *key)

    texts: list[str] = []
    for sentence, *named in candidates:
        sounds = [label_phrase(label, language, phrases) for label in named]
        texts.append(write_sentence(sentence, language, sounds)[0])
    if len(set(texts)) < len(texts):
        raise ValueError(f"task {task} has two equal candidates in {language!r}; give distinct phrases")
    return Prompts(texts, list(map(candidates.index, right)))


def _candidates(
    task: str, present: Sequence[str], labels: Sequence[str], num_candidates: int, key: tuple[Any, ...]
) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
    """Return the candidates of a task, and the correct candidates in the order of playback."""
    if task[0] in "12":
        return [("zste_label", label) for label in labels], [("zste_label", label) for label in present]

    first, second = present
    if task == "5A":
        right = [("zste_first", first), ("zste_second", second)]
        return [*right, ("zste_first", second), ("zste_second", first)], right
    if task == "5B":
        orders = [("zste_simultaneous", first, second), ("zste_simultaneous", second, first)]
        return _add_wrong_candidates(orders, present, labels, num_candidates, key), orders
    relations = [("before", first, second), ("before", second, first), ("while", first, second)]
    most = num_candidates if task[0] == "4" else 3
    candidates = _add_wrong_candidates(relations, present, labels, most, key)
    return candidates, relations[:1] if task[1] == "A" else relations[2:]


def _add_wrong_candidates(
    candidates: Sequence[Candidate],
    present: Sequence[str],
    labels: Sequence[str],
    num_candidates: int,
    key: Sequence[Any],
) -> Sequence[Candidate]:
    """Add wrong candidates with the same sentence templates, until there are `num_candidates`.

    First add candidates with one class in the clip and one absent class, then candidates with two absent classes.
    """
    sentences = set(map(itemgetter(0), candidates))
    most = len(candidates) + len(sentences) * (len(labels) * (len(labels) - 1) - 2)
    if not len(candidates) <= num_candidates <= most:
        raise ValueError(
            f"num_candidates is {num_candidates}; give {len(candidates)} to {most} with {len(labels)} labels"
        )

    absent = set(labels) - set(present)
    one_present = [*itertools.product(present, absent), *itertools.product(absent, present)]
    extended = list(candidates)
    for kind, pairs in (("one", one_present), ("none", itertools.permutations(absent, 2))):
        if len(extended) < num_candidates:
            others = []
            for sentence, pair in itertools.product(sentences, pairs):
                others.append((sentence, *pair))
            extended += shuffled(others, *key, kind)
    return extended[:num_candidates]
