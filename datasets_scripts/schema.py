"""Row format of all datasets: builders produce it, and collators, training and evaluation read it.

A row is one clip (see `Row`). Rows of a prepared dataset may also contain the audio itself, in `AUDIO_COLUMNS`.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value

from modeling_supclap.languages import LANGUAGES

logger = logging.getLogger(__name__)

AUDIO_COLUMNS = ("audio", "samples", "sampling_rate_hz")
"""Audio columns of a prepared dataset: file bytes in `audio`, or int16 `samples` with `sampling_rate_hz`."""

SEGMENT_COLUMNS = ("start_seconds", "end_seconds")
"""Optional columns of rows that are parts of recordings; null is the beginning or the end of the recording."""

CHANNEL = "channel"
"""Optional column with the index of the channel of a recording that is the clip; null is the mean of all channels."""

EXPECTED_COUNT = "expected_count"
"""Column with the expected number of times that a training epoch contains a row. If it is missing, the number is 1."""

SAMPLING = "sampling"
"""Column with the options of a row's dataset in a mixture (see `mixture.counts_in_epoch`). It takes precedence over
`EXPECTED_COUNT`, because it remains valid if rows are removed or if each caption is an item of its own."""

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "development"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Dict from the split names of other datasets, in lower case, to "train", "validation" or "test"."""

FILE_SOURCE = "file:"
"""Prefix of a `source` that is only a file name. The same name in another dataset may be a different recording."""


class Event(TypedDict):
    """A sound event in a clip.

    Times are in seconds from the beginning of the clip. If the dataset has labels, `label` is one of the labels of the
    row.
    """

    label: str
    onset_seconds: float
    offset_seconds: float


class Row(TypedDict):
    """One clip.

    Attributes:
        clip_id: Unique id within the dataset, stable between runs; translated captions are joined on this column.
        audio_path: Path of the audio file.
        captions: `{language: [caption, ...]}` with ISO 639-3 codes; the list is empty if there is no caption.
        labels: Classes of the sounds in the clip; empty if the dataset has no classes.
        events: Sound events with start and end; empty if the dataset has no events.
        source: Id of the original recording, such as "freesound:100032". Clips with the same source must be in the same
            split.
        license: Licence of the audio.
    """

    clip_id: str
    audio_path: str
    captions: dict[str, list[str]]
    labels: list[str]
    events: list[Event]
    source: str
    license: str


def features(
    languages: Sequence[str] = LANGUAGES, with_segments: bool = False, with_channel: bool = False
) -> Features:
    """Return the `datasets.Features` of a row with captions in the given languages, the anchor language first.

    `with_segments` adds `SEGMENT_COLUMNS`, and `with_channel` adds `CHANNEL`.

    `audio_path` is a string, because `datasets.Audio` requires torchcodec even to store a path.

    >>> features(["eng", "fra"])["captions"]
    {'eng': List(Value('string')), 'fra': List(Value('string'))}
    """
    text, seconds = Value("string"), Value("float64")

    return Features(
        {
            "clip_id": text,
            "audio_path": text,
            "captions": text_lists(languages),
            "labels": List(text),
            "events": List({"label": text, "onset_seconds": seconds, "offset_seconds": seconds}),
            "source": text,
            "license": text,
            **(dict.fromkeys(SEGMENT_COLUMNS, seconds) if with_segments else {}),
            **({CHANNEL: Value("int32")} if with_channel else {}),
        }
    )


def text_lists(languages: Iterable[str]) -> dict[str, List]:
    """Return the features of texts by language, such as captions.

    >>> text_lists(["eng", "fra"])
    {'eng': List(Value('string')), 'fra': List(Value('string'))}
    """
    return {language: List(Value("string")) for language in languages}


def without_audio(rows: Any) -> Any:
    """Return a dataset without its audio columns, so that iterating over its rows does not load the audio.

    If `rows` is not a dataset or has no such columns, it is returned unchanged.
    """
    columns = [name for name in AUDIO_COLUMNS if name in (getattr(rows, "column_names", None) or ())]
    return rows.remove_columns(columns) if columns else rows


def replace_columns(rows: Dataset, columns: Mapping[str, Sequence[Any]], types: Mapping[str, Any]) -> Dataset:
    """Add or replace columns of a dataset, `{name: values}` with feature types. No other column is copied.

    To add a column to selected rows, `datasets` would copy them with their audio. Therefore add the column to the whole
    table, with None in the other rows, and select the rows again.
    """
    whole = Dataset(rows.data, info=rows.info, split=rows.split, fingerprint=rows._fingerprint)
    chosen = list(range(len(rows))) if rows._indices is None else rows._indices.column(0).to_pylist()
    for name, values in columns.items():
        of_row = dict(zip(chosen, values, strict=True))
        whole = whole.remove_columns([name] if name in whole.column_names else [])
        whole = whole.add_column(name, [of_row.get(row) for row in range(len(whole))], feature=types[name])
    whole = whole.select_columns(list({**rows.features, **columns}))
    form = rows.format
    shown = [*form["columns"], *(columns.keys() - rows.features.keys())]
    replaced = whole if rows._indices is None else whole.select(chosen)
    return replaced.with_format(form["type"], shown, form["output_all_columns"], **form["format_kwargs"])


def check_rows(rows: Any) -> None:
    """Raise ValueError if rows lack a field, or have a string where a list of strings belongs.

    A `datasets.Dataset` is checked by the types of its columns, a list row by row, and any other map-style dataset by
    its first row.
    """
    kind = type(rows).__name__
    if hasattr(rows, "iterrows"):
        raise ValueError(f"rows are a {kind}; pass datasets.Dataset.from_pandas(rows), or rows.to_dict('records')")
    if isinstance(rows, Mapping):
        raise ValueError(
            f"rows are a {kind} with the keys {list(rows)[:8]}; pass a list of rows or a datasets.Dataset"
        )
    if isinstance(rows, Dataset):
        _check_row("the dataset", rows.features)
    elif isinstance(rows, list | tuple):
        for index, row in enumerate(rows):
            _check_row(f"row {index}", row)
    elif hasattr(rows, "__len__") and len(rows):
        _check_row("row 0", rows[0])


def _check_row(name: str, row: Any) -> None:
    """Check the fields of a row, or the columns of a dataset as `{column: type}`."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{name} is {str(row)[:80]!r}; a row is a dict with the keys {list(Row.__annotations__)}")
    if "clip_id" not in row or not {"captions", "labels"} & row.keys():
        raise ValueError(
            f"{name} has the fields {list(row)}; a row needs clip_id, audio_path, and captions {{'eng': ['rain']}} or "
            "labels ['rain']. A datasets.Dataset without clip_id is converted"
        )
    if isinstance(row["clip_id"], str):
        name = f"clip {row['clip_id']!r}"
    lists = [("labels", row.get("labels"))]
    for texts in ("captions", "negatives"):
        of_language = row.get(texts)
        if of_language is None or of_language == Value("null"):
            continue
        if not isinstance(of_language, Mapping):
            raise ValueError(f"{name} has the {texts} {of_language!r}; pass a dict such as {{'eng': ['a caption']}}")
        lists += of_language.items()
    for field, value in lists:
        if isinstance(value, str | bytes | Value) and value != Value("null"):
            raise ValueError(f"{name} has {value!r} as {field}; pass a list of strings, such as ['a dog barks']")
    labels = row.get("labels")
    if isinstance(labels, list | tuple) and not all(isinstance(label, str) for label in labels):
        raise ValueError(f"{name} has the labels {labels!r}; labels are strings, such as ['dog']")


def stable_id(text: str) -> int:
    """Hash a string to a 63-bit integer; the result is the same in all processes and runs.

    >>> stable_id("dog") == stable_id("dog"), stable_id("dog") == stable_id("cat")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def group_id(row: Mapping[str, Any], positives: str) -> int:
    """Return the group id of a row as an integer; rows with the same group id are positives of each other.

    With `positives="clip"`, the captions of a clip are positives only for that clip, as in the papers. With "captions",
    clips with identical captions are also positives, for example if captions are generated from class names.
    """
    return stable_id(row["clip_id"] if positives == "clip" else json.dumps(row["captions"], sort_keys=True))


def warn_of_shared_captions(rows: Any) -> None:
    """Log a warning if several clips have identical captions, because these clips count as negatives of each other."""
    counts = pc.value_counts(_join_captions(_read_captions(rows))).field("counts").to_numpy()

    shared = counts[counts > 1].sum()
    if shared:
        logger.warning(
            f"{shared} of {counts.sum()} clips have the same captions as another clip of their split, and count as its "
            "negatives and as wrong answers; set --positives captions to count them as right answers to each other"
        )


def hash_rows(rows: Any) -> str:
    """Hash the clip ids, captions, negatives and sampling of rows, in their order, without folders and recordings.

    The result does not depend on how the rows are stored. Languages without any caption do not affect it.

    >>> rows = [{"clip_id": "a", "captions": {"eng": ["a dog"]}}, {"clip_id": "b", "captions": {"eng": ["rain"]}}]
    >>> hash_rows(rows) == hash_rows(Dataset.from_list(rows)), hash_rows(rows) == hash_rows(rows[::-1])
    (True, False)
    """
    light = without_audio(rows)
    captions = _read_captions(light)
    ids = light["clip_id"][:] if isinstance(light, Dataset) else [row["clip_id"] for row in light]
    columns: dict[str, Any] = {"clip_id": pyarrow.array(ids, pyarrow.string())}
    for language in sorted(field.name for field in captions.type):
        lists = pc.struct_field(captions, language)
        if pc.sum(pc.list_value_length(lists)).as_py():
            columns[language] = pc.fill_null(pc.binary_join(lists, "\x1f"), "")
    for name in (SAMPLING, EXPECTED_COUNT, "negatives"):
        if isinstance(light, Dataset):
            values = light[name][:] if name in light.column_names else []
        else:
            values = [row.get(name) for row in light]
        if any(values):
            columns[name] = pyarrow.array([json.dumps(value, sort_keys=True) for value in values])

    digest = hashlib.sha256()
    for name in sorted(columns):
        digest.update(f"{name} {len(light)}".encode())
        for start in range(0, len(light), 100_000):
            texts = columns[name].slice(start, 100_000).to_pylist()
            digest.update("\x1e".join(["", *texts]).encode())
    return digest.hexdigest()


def all_captions(row: Mapping[str, Any], languages: Sequence[str]) -> list[tuple[str, str]]:
    """Return all captions of a row as a list of `(language, text)`, in the order of `languages`.

    >>> all_captions({"captions": {"eng": ["a dog", "a barking dog"], "fra": ["un chien"]}}, ["fra", "eng"])
    [('fra', 'un chien'), ('eng', 'a dog'), ('eng', 'a barking dog')]
    """
    captions: list[tuple[str, str]] = []
    for language in languages:
        captions += [(language, text) for text in row["captions"].get(language) or ()]
    return captions


def lacking_languages(row: Mapping[str, Any], languages: Sequence[str], scheme: str = "random") -> list[str]:
    """Return the languages in which a clip has no caption, if it lacks captions for training with the given scheme.

    The list is empty if the captions are sufficient. The scheme `random` requires a caption in any of the languages,
    `kcl` in each language, and `cacl` in the anchor (first) language and any other language.

    >>> clip = {"captions": {"eng": ["a dog"], "fra": []}}
    >>> lacking_languages(clip, ["eng", "fra"]), lacking_languages(clip, ["eng", "fra"], "kcl")
    ([], ['fra'])
    """
    has_captions = np.array([bool(row["captions"].get(language)) for language in languages])
    if _suffices(has_captions, scheme):
        return []
    return [language for language, has_some in zip(languages, has_captions, strict=True) if not has_some]


def _suffices(has_captions: np.ndarray, scheme: str) -> Any:
    """Return whether clips have the captions that a scheme requires: bool `(..., languages)` -> bool `(...)`."""
    if scheme == "random":
        return has_captions.any(axis=-1)
    if scheme == "kcl":
        return has_captions.all(axis=-1)
    return has_captions[..., 0] & (has_captions.sum(axis=-1) >= min(2, has_captions.shape[-1]))


def _read_captions(rows: Any) -> Any:
    """Return the captions of all rows as an Arrow array of structs, with one list of captions per language."""
    if isinstance(rows, Dataset) and isinstance(rows.features.get("captions"), dict):
        return rows.select_columns("captions").with_format("arrow")[:]["captions"]
    captions = [row["captions"] for row in without_audio(rows)]
    languages = dict.fromkeys(itertools.chain.from_iterable(captions))
    texts = pyarrow.list_(pyarrow.string())
    return pyarrow.array(captions, pyarrow.struct([(language, texts) for language in languages]))


def _join_captions(captions: Any) -> Any:
    """Join the captions of each row, in all languages, to one string: an Arrow array of structs to one of strings."""
    texts = []
    for field in captions.type:
        joined = pc.binary_join(pc.struct_field(captions, field.name), "\x1f")
        texts.append(pc.fill_null(joined, ""))
    return pc.binary_join_element_wise(*texts, "\x1e")


def _lengths(lists: Any) -> np.ndarray:
    """Return the lengths of the lists in an Arrow array, as int64 `(rows,)`. The length of a null is 0."""
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def label_counts(rows: Dataset) -> np.ndarray:
    """Count the labels of each row, as an int64 array `(rows,)`."""
    return _lengths(rows.select_columns("labels").with_format("arrow")[:]["labels"])


def label_names(rows: Dataset) -> set[str]:
    """Return all labels that occur in the rows."""
    labels = rows.select_columns("labels").with_format("arrow")[:]["labels"]
    return set(pc.unique(pc.list_flatten(labels)).to_pylist())


def list_classes(splits: Mapping[str, Any], further: Iterable[str] = ()) -> list[str] | None:
    """Return the labels of all splits, sorted, and `further` ones, of clips without a row. None: there are no labels.

    They are the candidates of zero-shot classification, also if no clip of a class is present. Streams are not read.
    """
    from .stream import RowStream

    labels = set(further)
    for rows in splits.values():
        if not isinstance(rows, RowStream):
            labels |= label_names(rows)
    return sorted(labels) or None


def caption_counts(rows: Any) -> dict[str, np.ndarray]:
    """Count the captions of each row per language, as `{language: counts}` with int64 arrays `(rows,)`.

    >>> caption_counts([{"captions": {"eng": ["a dog", "barks"]}}, {"captions": {"fra": ["un chien"]}}])
    {'eng': array([2, 0]), 'fra': array([0, 1])}
    """
    captions = _read_captions(rows)
    return {field.name: _lengths(pc.struct_field(captions, field.name)) for field in captions.type}


def require_captions(
    rows: Sequence[Mapping[str, Any]], languages: Sequence[str], scheme: str = "random", split: str = ""
) -> None:
    """Raise ValueError if a clip lacks captions that the language scheme requires (see `lacking_languages`).

    ValueError is also raised if a language has no caption in any clip. `split` is the split name for the message.
    """
    counts = caption_counts(rows)
    present = {language for language, of_language in counts.items() if of_language.any()}
    nowhere = [language for language in languages if language not in present]
    if nowhere:
        raise ValueError(
            f"no {split} clip has a caption in {nowhere}; the clips have captions in {sorted(present)}: set these "
            "languages, or the language of a table with --caption_language"
        )

    has_captions = np.stack([counts[language] > 0 for language in languages], axis=-1)
    lacking = np.flatnonzero(~_suffices(has_captions, scheme))
    if len(lacking):
        row = rows[int(lacking[0])]
        needed = {"random": "one of", "kcl": "all of", "cacl": "the first and another of"}[scheme]
        raise ValueError(
            f"{len(lacking)} {split} clips lack captions, such as {row['clip_id']!r}, which has none in "
            f"{lacking_languages(row, languages, scheme)}; this run needs captions in {needed} {list(languages)}: "
            "choose other languages, add translations, or remove the clips"
        )
