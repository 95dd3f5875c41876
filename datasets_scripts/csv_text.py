"""Format rows as CSV, without cells that a spreadsheet runs as a formula."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""First letters of a cell that a spreadsheet runs as a formula, also in full width."""


def to_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Format rows as CSV, with a heading and all digits. An apostrophe quotes a text that a spreadsheet would run.

    >>> print(to_csv([{"file": "=1+1", "score": -0.5}], ["file", "score"]), end="")
    "file","score"
    "'=1+1",-0.5
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(columns)
    for row in rows:
        cells = (row[column] for column in columns)
        writer.writerow(f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in cells)
    return written.getvalue()
