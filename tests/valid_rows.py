"""Check that a row has the format of `schema.Row`, for the tests of the builders."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modeling_supclap.datasets_scripts.schema import SEGMENT_COLUMNS, Row
from modeling_supclap.languages import LANGUAGES


def validate_row(row: Mapping[str, Any], languages: Sequence[str] = LANGUAGES) -> None:
    """Raise ValueError with all problems of a row that does not have the format of `Row`.

    A row is invalid if a field is missing; if an id, path, source or caption is empty; if there is no caption; if a
    language is unknown; or if an event starts before the clip or has its end before its start.

    >>> row = {"clip_id": "a", "audio_path": "a.wav", "captions": {"eng": ["Rain"]}, "labels": [], "events": [],
    ...        "source": "freesound:1", "license": "CC0-1.0"}
    >>> validate_row(row)
    >>> validate_row({**row, "captions": {"eng": [" "]}})
    Traceback (most recent call last):
    ValueError: clip 'a': caption 0 of 'eng' is blank; write or remove it
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
            yield f"{field} is {row[field]!r}; expected a non-empty string"
    for language, texts in row["captions"].items():
        if language not in languages:
            yield f"unknown language {language!r}; expected one of {list(languages)}"
        if isinstance(texts, str):
            yield f"the captions of {language!r} are the string {texts!r}; expected a list of strings"
            continue
        for index, text in enumerate(texts):
            if not text.strip():
                yield f"caption {index} of {language!r} is blank; write or remove it"
    if isinstance(row["labels"], str):
        yield f"the labels are the string {row['labels']!r}; expected a list of strings"
    if not any(row["captions"].values()):
        yield "no caption in any language; add at least one"

    start, end = (row.get(name) for name in SEGMENT_COLUMNS)
    if (start is not None and not start >= 0) or (end is not None and not end > (start or 0)):
        yield f"the segment is from {start} to {end} seconds; expected a start of 0 or later, before the end"
    for event in row["events"]:
        label, onset, offset = event["label"], event["onset_seconds"], event["offset_seconds"]
        # "not >=" also catches NaN.
        if not onset >= 0:
            yield f"event {label!r} starts at {onset} seconds; expected an onset of 0 or later"
        if not offset >= onset:
            yield f"event {label!r} ends at {offset} seconds, before its onset at {onset}"
