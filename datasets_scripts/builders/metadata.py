"""Read the metadata tables of datasets, with errors that contain the file name and the line number."""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..remote_files import refuse_pointer
from ..schema import SEGMENT_COLUMNS
from .recordings import listing
from .text_encodings import decode_text

SOURCES = Path(__file__).parents[1]  # the code and phrases that produce the rows
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
LABEL_COLUMNS = (*SEGMENT_COLUMNS, "caption")


class Line(NamedTuple):
    """Line of a table: its values as `{column: value}`, and its file and line number for error messages."""

    where: str
    values: dict[str, Any]

    def number(self, column: str, whole: bool = False) -> float:
        """Parse a number of at least 0; raise ValueError with the file and the line for any other value."""
        with suppress(ValueError):
            number = float(self.values[column])
            if number >= 0 and (number.is_integer() or not whole):
                return number
        expected = "a whole number" if whole else "a number"
        raise ValueError(f"{self.where}: {column} is {self.values[column]!r}; expected {expected} of at least 0")


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

    Cells have no white space at their ends. Missing values at the end of a line become empty strings. Lines without
    values, and lines that repeat the header, are skipped, as are the titles that spreadsheets have above it, comments
    there, and the line "sep=;". In a file with tabs, quotation marks are characters, except around a whole cell, unless
    cells contain tabs or line breaks. ValueError is raised if a column is missing or repeated, or a line has more
    values than columns.

    Args:
        columns: Required columns. If `header` is False, names of all columns.
        header: Whether the first line contains the column names.
        languages: Languages of the table, and `encoding` its encoding, as in `text_encodings.decode_text`.
    """
    text = decode_text(path.read_bytes(), path, languages, encoding)
    unquoted = re.sub('"[^"]*"', "", text)
    head = re.search(r".*[,;\t|].*", unquoted)  # the first line may be a comment
    delimiter = max(",;\t|", key=(head[0] if head else "").count)
    rows = _split_tabs(text) if delimiter == "\t" else []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        for cells in () if rows else reader:
            rows.append((reader.line_num, cells))
    except csv.Error as error:
        raise ValueError(
            f"{path} cannot be read as CSV from line {1 + (rows[-1][0] if rows else 0)} on: {error}; check the quotes: "
            "a cell in quotes ends with one, and quotes inside it are doubled"
        ) from error

    rows = [(number, [cell.strip() for cell in cells]) for number, cells in rows]
    rows = [(number, cells) for number, cells in rows if any(cells)]
    while header and len(rows) > 1 and _is_title(rows[0][1]) and not _is_title(rows[1][1]):
        del rows[0]
    first = rows[0][1] if header and rows else []
    names = first if header else columns
    if missing := sorted(set(columns) - set(names)):
        raise ValueError(f"{path} lacks the columns {missing}; it has {names}")
    if repeated := [name for name in names if name and names.count(name) > 1]:
        raise ValueError(
            f"{path} has {len(repeated)} columns {repeated[0]!r}; rename them, since only one of them would be read"
        )

    lines = []
    for number, cells in rows:
        where = f"{path}, line {number}"
        if any(cells[len(names) :]):
            raise ValueError(
                f"{where} has {len(cells)} cells for {len(names)} columns; quote cells that contain {delimiter!r}"
            )
        if cells != first:
            lines.append(Line(where, dict(zip(names, [*cells, *[""] * len(names)], strict=False))))
    return lines


def _is_title(cells: Sequence[str]) -> bool:
    """Return whether a line above the header is a title, followed by empty cells, or a comment without separators."""
    return not any(cells[1:]) and (len(cells) > 1 or cells[0].startswith("#"))


def _split_tabs(text: str) -> list[tuple[int, list[str]]]:
    """Split lines at tabs, for tables in which quotation marks are characters, as in Common Voice.

    Return no lines if they have different numbers of cells, because then cells contain tabs or line breaks.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.split("\t")
        for place, cell in enumerate(cells):
            if quoted := re.fullmatch('"((?:[^"]|"")*)"', cell):
                cells[place] = quoted[1].replace('""', '"')
        if line:
            rows.append((number, cells))
    return rows if len({len(cells) for _, cells in rows}) == 1 else []


def read_json(path: Path) -> Any:
    """Read a JSON file; raise ValueError with the path if it is not valid JSON."""
    return _parse_json(decode_text(path.read_bytes(), path), path)


def read_table(
    path: Path, languages: Iterable[str] = ("eng",), encoding: str | None = None, beside: bool = False
) -> list[Line]:
    """Read a table in CSV, TSV, JSON Lines, JSON (a list of objects) or Parquet; raise ValueError if it is invalid.

    JSON Lines and CSV may have the suffix .txt. A text file `beside` a recording contains captions, one per line, a
    label track of Audacity, or a table, such as of Raven; the columns of the first two are `LABEL_COLUMNS`. `languages`
    and `encoding` are described in `text_encodings.decode_text`.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet

        refuse_pointer(path.open("rb").read(100), path)
        try:
            values = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path} is not Parquet: {error}") from error
        return [Line(f"{path}, row {number}", value) for number, value in enumerate(values)]
    if suffix not in (*TABLE_SUFFIXES, ".txt"):
        raise ValueError(f"{path} has an unsupported suffix; expected one of {', '.join(TABLE_SUFFIXES)}")

    text = decode_text(path.read_bytes(), path, languages, encoding)
    numbered = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_json = suffix in (".json", ".jsonl", ".ndjson")
    if numbered and not is_json:
        with suppress(ValueError):
            is_json = isinstance(json.loads(numbered[0][1]), dict)
    if beside and suffix == ".txt" and not is_json:
        # Audacity writes the frequencies of a label in a line of their own.
        rows = [(where, line.split("\t")) for where, line in numbered if not line.startswith("\\\t")]
        is_track = all(len(cells) == 3 and re.fullmatch(r"[\d.,]+ [\d.,]+", " ".join(cells[:2])) for _, cells in rows)
        if is_track or all(len(cells) == 1 for _, cells in rows):
            return [Line(where, dict(zip(LABEL_COLUMNS[-len(cells) :], cells, strict=True))) for where, cells in rows]
    if not is_json:
        return read_csv(path, (), languages=languages, encoding=encoding)

    if text.lstrip().startswith("["):
        lines = [Line(f"{path}, entry {number}", value) for number, value in enumerate(_parse_json(text, path))]
    else:
        try:
            lines = [Line(where, _parse_json(line, where)) for where, line in numbered]
        except ValueError as error:
            raise ValueError(f"{error}; expected a list of objects, or JSON Lines (one object per line)") from error
    for where, value in lines:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {str(value)[:60]!r}; expected a JSON object")
    if not any(line.values for line in lines):
        raise ValueError(f"{path} contains no rows; expected a list of objects, or JSON Lines")
    return lines


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


def _parse_json(text: str, where: str | Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
