"""Reading the tables and lists that datasets come with, with errors that name the file and the line."""

import csv
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .recordings import some


class Line(NamedTuple):
    """A line of a table.

    Attributes:
        where: The file and the line, for messages.
        values: The cells by column.
    """

    where: str
    values: dict[str, Any]


def find_metadata(folder: Path, files: Iterable[str], *names: str) -> Path | None:
    """Finds a metadata file in a folder or its sub-folders.

    Args:
        folder: The folder.
        files: What is in it, from `recordings.walk`.
        names: The names that the file may have.

    Returns:
        Its path; the one at the top where there are several; None where there is none.

    Raises:
        ValueError: Several sub-folders have one, and the top has not.
    """
    found = [file for file in files if os.path.basename(file) in names]
    top = [file for file in found if "/" not in file]
    if len(found) > 1 and not top:
        raise ValueError(
            f"{folder} holds several {names[0]}: {some(found)}; give the folder of one of them as data_dir"
        )
    return folder / (top or found)[0] if found else None


def read_csv(path: Path, columns: Sequence[str], header: bool = True) -> list[Line]:
    """Reads a comma-separated table.

    Args:
        path: The file, in UTF-8, with or without a byte order mark, or in Windows-1252.
        columns: The columns it must have; all that it has, where there is no header.
        header: Whether its first line names the columns.

    Returns:
        Its lines; cells that are missing at a line's end are empty.

    Raises:
        ValueError: A column is missing or there twice, or a line has more cells than there are columns.
    """
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), None if header else columns, restval="")
    names = list(reader.fieldnames or [])
    missing = [column for column in columns if column not in names]
    if missing:
        raise ValueError(f"{path} lacks the columns {missing}; it has {names}")
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise ValueError(f"{path} has several columns {twice}, of which only the last would be read; number them")
    lines = []
    for values in reader:
        where = f"{path}, line {reader.line_num}"
        if None in values:
            raise ValueError(
                f"{where} has {len(names) + len(values[None])} cells for {len(names)} columns; quote cells with commas"
            )
        lines.append(Line(where, values))
    return lines


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Args:
        path: The file.

    Returns:
        What it holds.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_table(path: Path) -> list[Line]:
    """Reads a table of any kind that `audiofolder` of `datasets` knows.

    Args:
        path: A file in CSV, JSON Lines or Parquet, by its suffix.

    Returns:
        Its lines.

    Raises:
        ValueError: Another suffix, a line of JSON Lines that is not an object, or what `read_csv` raises.
    """
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return read_csv(path, ())
    if suffix == ".jsonl":
        return [_object(text, f"{path}, line {i}") for i, text in enumerate(_text(path).split("\n"), 1) if text.strip()]
    if suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
        return [Line(f"{path}, row {index}", row) for index, row in enumerate(rows)]
    raise ValueError(f"{path} is no table that can be read; give .csv, .jsonl or .parquet")


def fingerprint(paths: Iterable[Path]) -> str:
    """A hash of files, to key caches with.

    Args:
        paths: The files.

    Returns:
        A SHA-256 in hex of their paths and contents.
    """
    contents = hashlib.sha256()
    for path in sorted(paths):
        contents.update(f"{path}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return contents.hexdigest()


@cache
def code_fingerprint() -> str:
    """A hash of this folder's sources, to key caches with: `datasets` alone would give rows that older code made."""
    return fingerprint(Path(__file__).parents[1].rglob("*.py"))


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:  # Clotho's metadata and what spreadsheets save
        return content.decode("cp1252", errors="replace")


def _object(text: str, where: str) -> Line:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where} is {text.strip()[:60]!r}; give a JSON object")
    return Line(where, values)
