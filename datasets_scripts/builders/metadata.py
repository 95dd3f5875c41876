"""Read the metadata tables of datasets, with errors that contain the file name and the line number."""

import csv
import hashlib
import io
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..schema import SEGMENT_COLUMNS
from .recordings import listing
from .text_encodings import decode_text

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[1]  # the code and phrases that produce the rows
_SEGMENT_PAIRS = (
    ("start", "end"),
    ("start_time", "end_time"),
    ("start_sec", "end_sec"),
    ("begin", "end"),
    ("onset", "offset"),
)
_UNUSED_PAIR = ("offset", "duration")  # start and length of a part, in other projects
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


class Line(NamedTuple):
    """Line of a table: its values as `{column: value}`, and its file and line number for error messages."""

    where: str
    values: dict[str, Any]


def find_metadata(folder: Path, files: Iterable[str], *names: str) -> Path | None:
    """Find a metadata file by its possible names, in a folder or its sub-folders; return None if it does not exist.

    A file at the top of the folder has priority. Raises ValueError if there is none, and several in sub-folders.
    """
    matches = sorted((file for file in files if os.path.basename(file) in names), key=lambda file: file.count("/"))
    if len(matches) > 1 and "/" in matches[0]:
        raise ValueError(
            f"{folder} contains several {names[0]}: {listing(matches)}; set data_dir to the folder of one"
        )
    return folder / matches[0] if matches else None


def read_csv(
    path: Path,
    columns: Sequence[str],
    header: bool = True,
    languages: Iterable[str] = ("eng",),
    encoding: str | None = None,
) -> list[Line]:
    """Read a CSV file; the delimiter is the most frequent of comma, semicolon, tab and `|` in the first line.

    Missing values at the end of a line become empty strings. In a file with tabs, quotation marks are characters,
    except around a whole cell, unless cells contain tabs or line breaks. ValueError is raised if a column is missing
    or repeated, or a line has more values than columns.

    Args:
        columns: Required columns. If `header` is False, names of all columns.
        header: Whether the first line contains the column names.
        languages: Languages of the table, and `encoding` its encoding, as in `text_encodings.decode_text`.
    """
    text = decode_text(path.read_bytes(), str(path), languages, encoding)
    first_line = re.sub('"[^"]*"', "", text.partition("\n")[0])  # without quoted cells
    delimiter = max(",;\t|", key=first_line.count)
    if delimiter == "\t" and (unquoted := _read_unquoted(text)) is not None:
        text = unquoted
    # The tables of AudioSet have no header, and spaces before the quotes.
    form: dict[str, Any] = {"restval": "", "delimiter": delimiter, "skipinitialspace": not header, "strict": True}
    reader = csv.DictReader(io.StringIO(text, newline=""), None if header else columns, **form)

    numbered: list[tuple[int, dict[Any, Any]]] = []
    try:
        names = list(reader.fieldnames or [])
        for values in reader:
            numbered.append((reader.line_num, values))
    except csv.Error as error:
        line = 1 + (numbered[-1][0] if numbered else int(header))
        problem = f"{error}; check the quotes: a cell in quotes ends with one, and quotes inside it are doubled"
        raise ValueError(f"{path} cannot be read as CSV from line {line} on: {problem}") from error

    missing = sorted(set(columns) - set(names))
    if missing:
        raise ValueError(f"{path} lacks the columns {missing}; it has {names}")
    name, count = Counter(filter(None, names)).most_common(1)[0] if any(names) else ("", 0)
    if count > 1:
        raise ValueError(f"{path} has {count} columns {name!r}; rename them, since only the last one would be read")

    lines = []
    for number, values in numbered:
        where = f"{path}, line {number}"
        if None in values:
            cells = f"{len(names) + len(values[None])} cells for {len(names)} columns"
            raise ValueError(f"{where} has {cells}; quote cells that contain {delimiter!r}")
        lines.append(Line(where, values))
    return lines


def _read_unquoted(text: str) -> str | None:
    """Quote all cells of a table with tabs in which quotation marks are characters, as in Common Voice.

    Return None if a line has another number of cells than the first, because then cells contain tabs or line breaks.
    """
    rows = [line.split("\t") for line in text.splitlines() if line]
    if any(len(row) != len(rows[0]) for row in rows):
        return None
    lines = []
    for row in rows:
        cells = []
        for cell in row:
            is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")
            cells.append(cell if is_quoted else '"' + cell.replace('"', '""') + '"')
        lines.append("\t".join(cells))
    return "\n".join(lines)


def read_json(path: Path, languages: Iterable[str] = ("eng",), encoding: str | None = None) -> Any:
    """Read a JSON file; raise ValueError with the path if it is not valid JSON."""
    return _parse_json(decode_text(path.read_bytes(), str(path), languages, encoding), str(path))


def read_table(path: Path, languages: Iterable[str] = ("eng",), encoding: str | None = None) -> list[Line]:
    """Read a table in CSV, TSV, JSON Lines, JSON (a list of objects) or Parquet; raise ValueError if it is invalid.

    `languages` and `encoding` are described in `text_encodings.decode_text`.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return read_csv(path, (), languages=languages, encoding=encoding)

    lines = []
    if suffix == ".jsonl":
        text = decode_text(path.read_bytes(), str(path), languages, encoding)
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{path}, line {number}"
                lines.append(Line(where, _parse_json(line, where)))
    elif suffix == ".json":
        values = read_json(path, languages, encoding)
        if not isinstance(values, list):
            raise ValueError(f"{path} is not a list; expected a JSON list of objects, or JSON Lines as .jsonl")
        lines = [Line(f"{path}, entry {number}", value) for number, value in enumerate(values)]
    elif suffix == ".parquet":
        import pyarrow.parquet

        try:
            values = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path} is not Parquet: {error}") from error
        lines = [Line(f"{path}, row {number}", value) for number, value in enumerate(values)]
    else:
        raise ValueError(f"{path} has an unsupported suffix; expected one of {', '.join(TABLE_SUFFIXES)}")

    for where, value in lines:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {str(value)[:60]!r}; expected a JSON object")
    return lines


def find_segment_columns(names: Iterable[str], columns: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the columns of the start and the end of a clip in its recording, as `{"start_seconds": column, ...}`.

    Names other than `start_seconds` and `end_seconds` are only recognised as a pair, because a single start is often
    the start of the clip in another recording, such as a YouTube video. `columns` sets the names explicitly.
    """
    present, chosen = set(names), {}
    for name in SEGMENT_COLUMNS:
        column = (columns or {}).get(name, name)
        if column in present:
            chosen[name] = column
    for pair in _SEGMENT_PAIRS if not chosen else ():
        if present.issuperset(pair):
            return dict(zip(SEGMENT_COLUMNS, pair, strict=True))
    if not chosen and present.issuperset(_UNUSED_PAIR):
        _warn_of_unused_pair()
    return chosen


@cache  # once
def _warn_of_unused_pair() -> None:
    unused, expected = " and ".join(_UNUSED_PAIR), " and ".join(SEGMENT_COLUMNS)
    logger.warning("the columns %s are not used, and whole recordings are read; for parts, add %s", unused, expected)


def read_segment(values: Mapping[str, Any], where: str) -> tuple[float | None, float | None]:
    """Return the start and the end of a clip in its recording, in seconds; None without a value."""
    times: list[float | None] = []
    for name in SEGMENT_COLUMNS:
        value = values.get(name)
        try:
            time = None if value is None or str(value).strip() == "" else float(value)
        except (TypeError, ValueError):
            time = math.nan
        if time is not None and not 0 <= time < math.inf:
            raise ValueError(f"{where}: {name} is {value!r}; expected a number of seconds, at least 0")
        times.append(time)
    start, end = times
    if end is not None and end <= (start or 0):
        raise ValueError(f"{where}: the clip is from {start} to {end} s; expected a start before its end")
    return start, end


def fingerprint(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the paths and contents of files as a hex string, for cache keys."""
    contents = hashlib.sha256()
    for path in sorted(paths):
        contents.update(f"{path}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return contents.hexdigest()


@cache
def code_fingerprint() -> str:
    """Return a hash of the code and phrases that produce the rows, for cache keys."""
    return fingerprint(path for path in SOURCES.rglob("*") if path.suffix in (".py", ".json"))


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
