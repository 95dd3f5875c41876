"""Reading the tables and lists that datasets come with, with errors that name the file and the line."""

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .recordings import some

SOURCES = Path(__file__).parents[1]
"""The folder whose code and phrases rows are made by."""


TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
"""The kinds of tables that `read_table` reads."""


class Line(NamedTuple):
    """A line of a table.

    Attributes:
        where: The file and the line, for messages.
        values: The cells by column.
    """

    where: str
    values: dict[str, Any]


def find_metadata(folder: Path, files: Iterable[str], *names: str) -> Path | None:
    """The file of one of these names among the files of a folder, as `recordings.walk` gives them; None without one.

    Where there are several, the one at the top; where only several sub-folders have one, a ValueError.
    """
    found = sorted((file for file in files if os.path.basename(file) in names), key=lambda file: file.count("/"))
    if len(found) > 1 and "/" in found[0]:
        raise ValueError(
            f"{folder} holds several {names[0]}: {some(found)}; give the folder of one of them as data_dir"
        )
    return folder / found[0] if found else None


def read_csv(path: Path, columns: Sequence[str], header: bool = True) -> list[Line]:
    """The lines of a table with commas, semicolons or tabs between cells, whichever its first line has most of.

    Args:
        path: The file, in UTF-8, with or without a byte order mark, in UTF-16 with one, or in Windows-1252.
        columns: The columns it must have; all that it has, where there is no header.
        header: Whether its first line names the columns.

    Returns:
        Its lines; cells that are missing at a line's end are empty.

    Raises:
        ValueError: A column is missing or there twice, a line has more cells than there are columns, or the text is
            no table.
    """
    text = _text(path)
    first_line = re.sub('"[^"]*"', "", text.partition("\n")[0])  # without cells in quotes
    delimiter = max(",;\t", key=first_line.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), None if header else columns, restval="", delimiter=delimiter)

    try:
        names = list(reader.fieldnames or [])
        numbered = [(reader.line_num, values) for values in reader]
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error

    missing = sorted(set(columns) - set(names))
    if missing:
        raise ValueError(f"{path} lacks the columns {missing}; it has {names}")
    name, count = Counter(filter(None, names)).most_common(1)[0] if any(names) else ("", 0)
    if count > 1:
        raise ValueError(f"{path} has several columns {name!r}, of which only the last would be read; number them")

    lines = []
    for number, values in numbered:
        where = f"{path}, line {number}"
        if None in values:
            cells = len(names) + len(values[None])
            raise ValueError(f"{where} has {cells} cells for {len(names)} columns; quote cells that hold {delimiter!r}")
        lines.append(Line(where, values))
    return lines


def read_json(path: Path) -> Any:
    """What a JSON file holds; a ValueError that names the file where it is not JSON."""
    return _parse_json(_text(path), str(path))


def read_table(path: Path) -> list[Line]:
    """The lines of a table of one of the `TABLE_SUFFIXES`: CSV, JSON Lines, a JSON list of objects, or Parquet.

    Raises:
        ValueError: Another suffix, JSON that is no list of objects, or what `read_csv` raises.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return read_csv(path, ())

    entries: list[tuple[str, Any]] = []
    if suffix == ".jsonl":
        for number, text in enumerate(_text(path).split("\n"), 1):
            if text.strip():
                entries.append((f"{path}, line {number}", _parse_json(text, f"{path}, line {number}")))
    elif suffix == ".json":
        values = read_json(path)
        if not isinstance(values, list):
            raise ValueError(f"{path} holds no list; give a JSON list of objects, or JSON Lines as .jsonl")
        for number, value in enumerate(values):
            entries.append((f"{path}, entry {number}", value))
    elif suffix == ".parquet":
        import pyarrow.parquet

        try:
            values = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path} is not Parquet: {error}") from error
        for number, value in enumerate(values):
            entries.append((f"{path}, row {number}", value))
    else:
        raise ValueError(f"{path} is no table that can be read; give one of {', '.join(TABLE_SUFFIXES)}")

    lines = []
    for where, value in entries:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {str(value)[:60]!r}; give a JSON object")
        lines.append(Line(where, value))
    return lines


def fingerprint(paths: Iterable[Path]) -> str:
    """The SHA-256 in hex of the paths and contents of files, to key caches with."""
    contents = hashlib.sha256()
    for path in sorted(paths):
        contents.update(f"{path}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return contents.hexdigest()


@cache
def code_fingerprint() -> str:
    """A hash of the code and the phrases that rows are made by: `datasets` alone would give those of older ones."""
    return fingerprint(path for path in SOURCES.rglob("*") if path.suffix in (".py", ".json"))


def _text(path: Path) -> str:
    content = path.read_bytes()
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what spreadsheets call Unicode text
        return content.decode("utf-16", errors="replace")
    if b"\0" in content:
        raise ValueError(f"{path} holds zero bytes and is no text that can be read; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:  # Clotho's metadata and what spreadsheets save
        return content.decode("cp1252", errors="replace")


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
