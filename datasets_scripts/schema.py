"""The row: the one thing every dataset builder gives and everything after it takes.

A row is a clip. Its audio stays a path, because decoding belongs to the collator; its captions are grouped by
language, because the multilingual objectives draw or stack languages per clip; its events say what sounds when,
because the temporal methods build on that; its source says which recording it was cut from, because splits must never
share one. Rows of a prepared set may hold their audio too, in `AUDIO_COLUMNS`.
"""

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value

from modeling_supclap.languages import LANGUAGES

logger = logging.getLogger(__name__)

AUDIO_COLUMNS = ("audio", "samples", "sampling_rate_hz")
"""Where rows of a prepared set hold their audio: a file's bytes in `audio`, or int16 samples and their rate."""

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "development"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Our names of splits by the names that others give them, in lower case."""

FILE_SOURCE = "file:"
"""What a `source` begins with that is no more than the name of a file: another dataset may have a file of that name."""


class Event(TypedDict):
    """One sound inside a clip.

    Attributes:
        label: What sounds; one of the row's labels where the dataset has labels.
        onset_seconds: Where it starts, from the beginning of the clip.
        offset_seconds: Where it ends, from the beginning of the clip.
    """

    label: str
    onset_seconds: float
    offset_seconds: float


class Row(TypedDict):
    """One clip.

    Attributes:
        clip_id: Unique in the dataset and stable between runs; translations are joined by it.
        audio_path: The audio file.
        captions: The captions of each language, by ISO 639-3 code; a language without captions has an empty list.
        labels: The classes that sound in the clip; empty where the dataset has none.
        events: What sounds when; empty where the dataset does not say.
        source: The original recording, such as "freesound:100032". Clips that share one belong in the same split.
        license: The licence of the audio.
    """

    clip_id: str
    audio_path: str
    captions: dict[str, list[str]]
    labels: list[str]
    events: list[Event]
    source: str
    license: str


def features(languages: Sequence[str] = LANGUAGES) -> Features:
    """The Arrow types of a row.

    Args:
        languages: The languages that the captions may have, the anchor first; any codes work.

    Returns:
        Features with plain strings for paths: `datasets.Audio` needs torchcodec even to store a path. Cast the column
        `audio_path` to `Audio(decode=False)` where that is wanted.

    >>> features(["eng", "fra"])["captions"]
    {'eng': List(Value('string')), 'fra': List(Value('string'))}
    """
    text, seconds = Value("string"), Value("float64")

    return Features(
        {
            "clip_id": text,
            "audio_path": text,
            "captions": {language: List(text) for language in languages},
            "labels": List(text),
            "events": List({"label": text, "onset_seconds": seconds, "offset_seconds": seconds}),
            "source": text,
            "license": text,
        }
    )


def without_audio(rows: Any) -> Any:
    """The same rows without the audio that they hold, for whoever walks through all of them and wants the rest.

    Args:
        rows: A dataset, or any sequence of rows.

    Returns:
        A view where `rows` is a dataset that holds audio, else `rows` itself.
    """
    held = [name for name in AUDIO_COLUMNS if name in (getattr(rows, "column_names", None) or ())]
    return rows.remove_columns(held) if held else rows


def stable_id(text: str) -> int:
    """A 63-bit integer for a string, the same in every process and every run.

    >>> stable_id("dog") == stable_id("dog"), stable_id("dog") == stable_id("cat")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def group_id(row: Mapping[str, Any], positives: str) -> int:
    """Which rows count as right answers to each other: those with the same group id.

    Args:
        row: A row of the schema.
        positives: `"clip"`, every clip only to itself (the papers' protocol); or `"captions"`, also to the clips that
            carry exactly the same captions, as where captions are made from class names.
    """
    return stable_id(row["clip_id"] if positives == "clip" else json.dumps(row["captions"], sort_keys=True))


def warn_of_shared_captions(rows: Any) -> None:
    """Warns where clips have just the captions of other clips, and those count as wrong answers.

    Args:
        rows: The split, a dataset or any sequence of rows, that is trained or evaluated with positives "clip".
    """
    counts: Counter[Any] = Counter()
    for captions in _caption_batches(rows):
        if isinstance(captions, pyarrow.ChunkedArray):
            texts = []
            for field in captions.type:
                joined = pc.binary_join(pc.struct_field(captions, field.name), "\x1f")
                texts.append(pc.fill_null(joined, ""))
            counts.update(map(hash, pc.binary_join_element_wise(*texts, "\x1e").to_pylist()))
        else:
            counts.update(group_id({"captions": of_row}, "captions") for of_row in captions)

    shared = sum(filter((1).__lt__, counts.values()))
    if shared:
        logger.warning(
            "%d of %d clips have just the captions of another clip of their split, and count as its negatives "
            "and wrong answers; --positives captions makes such clips right answers to each other",
            shared,
            counts.total(),
        )


def all_captions(row: Mapping[str, Any], languages: Sequence[str]) -> list[tuple[str, str]]:
    """Every caption of a row as `(language, text)`, languages in the order given.

    >>> all_captions({"captions": {"eng": ["a dog", "a barking dog"], "fra": ["un chien"]}}, ["fra", "eng"])
    [('fra', 'un chien'), ('eng', 'a dog'), ('eng', 'a barking dog')]
    """
    captions = []
    for language in languages:
        for text in row["captions"].get(language) or ():
            captions.append((language, text))
    return captions


def lacking_languages(row: Mapping[str, Any], languages: Sequence[str], scheme: str = "random") -> list[str]:
    """The languages in which a clip has no caption, if they keep a scheme from drawing for it.

    Args:
        row: A row of the schema.
        languages: ISO 639-3 codes, the anchor first.
        scheme: As for `TrainingCollator`; `random` wants one of the languages, `kcl` all, `cacl` the first and another.

    >>> clip = {"captions": {"eng": ["a dog"], "fra": []}}
    >>> lacking_languages(clip, ["eng", "fra"]), lacking_languages(clip, ["eng", "fra"], "kcl")
    ([], ['fra'])
    """
    has_captions = np.array([bool(row["captions"].get(language)) for language in languages])
    if _suffices(has_captions, scheme):
        return []
    return [language for language, has_some in zip(languages, has_captions, strict=True) if not has_some]


def _suffices(has_captions: np.ndarray, scheme: str) -> Any:
    """Whether clips have captions in the languages that a scheme draws from: bool, (..., languages) -> (...)."""
    if scheme == "random":
        return has_captions.any(axis=-1)
    if scheme == "kcl":
        return has_captions.all(axis=-1)
    return has_captions[..., 0] & (has_captions.sum(axis=-1) >= min(2, has_captions.shape[-1]))


def _caption_batches(rows: Any) -> Iterator[Any]:
    """The captions of all rows, in parts: of a dataset as Arrow's structs of lists, else as lists of mappings."""
    if isinstance(rows, Dataset) and isinstance(rows.features.get("captions"), dict):
        captions = rows.select_columns("captions").with_format("arrow")
        for start in range(0, len(rows), 10_000):
            yield captions[start : start + 10_000]["captions"]
    else:
        yield [row["captions"] for row in without_audio(rows)]


def caption_counts(rows: Any) -> dict[str, np.ndarray]:
    """Count the captions of each row, by language.

    Args:
        rows: A dataset, whose captions are counted by Arrow's offsets, or any sequence of rows.

    Returns:
        int64, `(rows,)` for each language that a row has, also one without captions.

    >>> caption_counts([{"captions": {"eng": ["a dog", "barks"]}}, {"captions": {"fra": ["un chien"]}}])
    {'eng': array([2, 0]), 'fra': array([0, 1])}
    """
    counts = {}
    batches = list(_caption_batches(rows))
    if batches and isinstance(batches[0], pyarrow.ChunkedArray):
        for field in batches[0].type:
            lengths = [pc.list_value_length(pc.struct_field(captions, field.name)) for captions in batches]
            counts[field.name] = np.concatenate([pc.fill_null(part, 0).to_numpy().astype(np.int64) for part in lengths])
        return counts

    listed = list(itertools.chain.from_iterable(batches))
    for index, captions in enumerate(listed):
        for language, texts in captions.items():
            counts.setdefault(language, np.zeros(len(listed), np.int64))[index] = len(texts or ())
    return counts


def require_captions(
    rows: Sequence[Mapping[str, Any]], languages: Sequence[str], scheme: str = "random", split: str = ""
) -> None:
    """Refuses a split that would end a run when the turn of some clip comes.

    Args:
        rows: Rows of the schema.
        languages: As for `lacking_languages`.
        scheme: As for `lacking_languages`.
        split: What the message calls the rows.

    Raises:
        ValueError: Clips lack captions that the scheme draws from, or no clip has a caption in one of the languages.
    """
    counts = caption_counts(rows)
    present = {language for language, of_language in counts.items() if of_language.any()}
    nowhere = [language for language in languages if language not in present]
    if nowhere:
        raise ValueError(
            f"no {split} clip has a caption in {nowhere}; the clips have captions in {sorted(present)}: name these, "
            "or, if a table's captions are in another language, set it with --caption_language"
        )

    has_captions = np.stack([counts[language] > 0 for language in languages], axis=-1)
    lacking = np.flatnonzero(~_suffices(has_captions, scheme))
    if len(lacking):
        row = rows[int(lacking[0])]
        wanted = {"random": "one of", "kcl": "all of", "cacl": "the first and another of"}[scheme]
        raise ValueError(
            f"{len(lacking)} {split} clips lack captions, such as {row['clip_id']!r}, which has none in "
            f"{lacking_languages(row, languages, scheme)}: captions are wanted in {wanted} {list(languages)}; take "
            "other languages, add translations, or leave the clips out"
        )


def validate_row(row: Mapping[str, Any], languages: Sequence[str] = LANGUAGES) -> None:
    """Checks a row against the contract.

    Args:
        row: What a builder is about to give.
        languages: The languages that the captions may have.

    Raises:
        ValueError: Names the clip and everything that is wrong with it: a missing field, an empty id, path or source,
            an empty or blank caption, no caption in any language, an unknown language, an event that starts before the
            clip or ends before it starts.

    >>> row = {"clip_id": "a", "audio_path": "a.wav", "captions": {"eng": ["Rain"]}, "labels": [], "events": [],
    ...        "source": "freesound:1", "license": "CC0-1.0"}
    >>> validate_row(row)
    >>> validate_row({**row, "captions": {"eng": [" "]}})
    Traceback (most recent call last):
    ValueError: clip 'a': caption 0 of 'eng' is blank; drop it or write one
    """
    problems = list(_problems(row, languages))
    if problems:
        raise ValueError(f"clip {row.get('clip_id')!r}: " + "; ".join(problems))


def _problems(row: Mapping[str, Any], languages: Sequence[str]) -> Iterator[str]:
    missing = sorted(Row.__required_keys__ - row.keys())
    if missing:
        yield f"the fields {missing} are missing; a row has {list(Row.__annotations__)}"
        return

    for field in ("clip_id", "audio_path", "source"):
        if not isinstance(row[field], str) or not row[field].strip():
            yield f"{field} is {row[field]!r}; give a string that is not empty"
    for language, texts in row["captions"].items():
        if language not in languages:
            yield f"unknown language {language!r}; the languages here are {list(languages)}"
        if isinstance(texts, str):
            yield f"the captions of {language!r} are the string {texts!r}; give a list of strings"
            continue
        for index, text in enumerate(texts):
            if not text.strip():
                yield f"caption {index} of {language!r} is blank; drop it or write one"
    if not any(row["captions"].values()):
        yield "no caption in any language; give at least one"

    for event in row["events"]:
        label, onset, offset = event["label"], event["onset_seconds"], event["offset_seconds"]
        # Written as "not >=" so that NaN is caught too.
        if not onset >= 0:
            yield f"event {label!r} starts at {onset} seconds; an onset is 0 or later"
        if not offset >= onset:
            yield f"event {label!r} ends at {offset} seconds, before its onset at {onset}"
