"""Read, write and check Parquet files of translated captions.

Each row is one translation of one caption. `caption_index` is the index of the caption in its clip. `model` is the name
of the translator. `source_hash` is the hash of the caption, to detect later changes.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from modeling_supclap.languages import LANGUAGES

from ..builders.recordings import listing
from ..parquet_files import parquet_writer, read_parquet

SCHEMA = pa.schema(
    {
        "clip_id": pa.string(),
        "caption_index": pa.int32(),
        "language": pa.string(),
        "text": pa.string(),
        "model": pa.string(),
        "source_hash": pa.string(),
    }
)
"""Columns of a translations file. `model` and `source_hash` may be absent or null, e.g. for human translations."""

KEY = ("clip_id", "language", "caption_index")  # identifies a translation; files are sorted by this key
Paths = str | Path | Sequence[str | Path]


def source_hash(text: str) -> str:
    """Return the first 16 hex digits of the SHA-256 of a caption.

    >>> source_hash("a dog barking")
    '9f4baeaf42ac8e3f'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_translations(path: Paths, languages: Sequence[str] | None = None) -> pa.Table:
    """Read and check translations files; return one table with the columns of `SCHEMA`.

    The texts are converted to Unicode normal form C.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A column is missing or has another type, a value is missing, a text is blank or damaged, a language
            is not an ISO 639-3 code, a key (clip id, language, caption index) is duplicated, or one of `languages` is
            absent.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise ValueError("path is empty; give at least one Parquet file of translations")

    table = pa.concat_tables(map(_read_file, map(Path, paths)))
    named = ", ".join(map(str, paths))
    _check(table, named)

    if languages is not None:
        present = languages_of(table)
        absent = [language for language in languages if language not in present]
        if absent:
            raise ValueError(f"{named} has no translations into {absent}; it has {present}")
        table = table.filter(pc.is_in(table["language"], value_set=pa.array(list(languages), pa.string())))
    return table


def write_translations(path: str | Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Check translations, sort them, and write them to a Parquet file atomically."""
    target = Path(path)
    table = pa.Table.from_pylist(list(lines), schema=SCHEMA)
    _check(table, str(target))

    target.parent.mkdir(parents=True, exist_ok=True)
    with parquet_writer(target, SCHEMA, one_writer=True) as writer:
        writer.write_table(table.sort_by([(name, "ascending") for name in KEY]))


def _read_file(path: Path) -> pa.Table:
    table = read_parquet(path)
    missing = sorted({*KEY, "text"} - set(table.column_names))
    if missing:
        raise ValueError(f"{path} lacks the columns {missing}; it has {sorted(table.column_names)}")
    for name in ("model", "source_hash"):
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), pa.string()))

    try:
        table = table.select(SCHEMA.names).cast(SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"{path} has a column of another type than\n{SCHEMA}\n{error}") from error
    return table.set_column(SCHEMA.get_field_index("text"), "text", pc.utf8_normalize(table["text"], "NFC"))


def _check(table: pa.Table, named: str) -> None:
    """Raise ValueError if a row is invalid, for example because its text is blank."""
    text, language = table["text"], table["language"]
    is_null = map(pc.is_null, table.select([*KEY, "text"]).columns)
    matches, no_code = (pc.match_substring_regex, f"is not an ISO 639-3 code such as {', '.join(LANGUAGES[:3])}")
    masks = {
        "have no clip id, caption index, language or text": functools.reduce(pc.or_, is_null),
        "are blank": pc.invert(matches(text, r"[\pL\pN]")),
        "contain U+FFFD or a control character, so some text is lost": matches(text, r"[\x{FFFD}\p{Cc}]"),
        "have a negative caption index": pc.less(table["caption_index"], 0),
        f"have a language that {no_code}": pc.invert(matches(language, "^[a-z]{3}$")),
    }
    counts = table.group_by(list(KEY)).aggregate([([], "count_all")])
    faulty = {fault: table.filter(mask) for fault, mask in masks.items()}
    faulty["are duplicated"] = counts.filter(pc.greater(counts["count_all"], 1))

    problems = []
    for fault, rows in faulty.items():
        first = rows.slice(0, 5).to_pylist()
        names = []
        for row in first:
            names.append(f"{row['clip_id']!r} caption {row['caption_index']} in {row['language']!r}")
        if names:
            problems.append(f"{len(rows)} translations {fault}: {listing(names, count=len(rows))}")
    if problems:
        raise ValueError(f"{named}: {'; '.join(problems)}")


def languages_of(table: pa.Table) -> list[str]:
    """Return the languages in a table: first those in `LANGUAGES`, in that order, then all others alphabetically."""
    present = set(pc.unique(table["language"]).to_pylist())
    return [language for language in LANGUAGES if language in present] + sorted(present - set(LANGUAGES))
