"""Tables of hits: rows for a data frame or CSV, selection tables of Raven, and label files of Audacity.

rows = to_rows(searcher.search_texts(["rain", "birds sing"], k=None, threshold=0.3))
frame = pandas.DataFrame(rows)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

from modeling_supclap.datasets_scripts.atomic_files import write_text

from .query import Answer
from .store import find_inside

COLUMNS = ("query", "file", "start_seconds", "end_seconds", "score", "stands_out")
Row = Mapping[str, Any]
_RAVEN = (
    "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tLow Freq (Hz)\tHigh Freq (Hz)\tBegin Path\t"
    "File Offset (s)\tBegin File\tAnnotation\tScore\n"
)


def to_rows(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """Return one dict per hit, with the keys `COLUMNS`."""
    rows = []
    for answer in answers:
        for hit in answer.hits:
            rows.append({"query": answer.query, **hit._asdict(), "stands_out": answer.stands_out})
    return rows


def to_raven(rows: Iterable[Row], folder: str | Path, high_hz: float) -> str:
    """Format hits as a selection table of Raven.

    Times count from the start of each recording. For several recordings, open the table as a sound selection table:
    Raven then finds them by "Begin Path" and "File Offset (s)".

    Args:
        folder: Folder of the recordings.
        high_hz: Upper limit of the selections, such as half of the model's sampling rate.
    """
    lines = [_RAVEN]
    for number, row in enumerate(_by_time(rows), 1):
        start, end = f"{row['start_seconds']:.6f}", f"{row['end_seconds']:.6f}"
        path, name = _cell(Path(folder, row["file"])), _cell(PurePath(row["file"]).name)
        times = f"{number}\tSpectrogram 1\t1\t{start}\t{end}\t0\t{high_hz:g}"
        lines.append(f"{times}\t{path}\t{start}\t{name}\t{_cell(row['query'])}\t{row['score']:.4f}\n")
    return "".join(lines)


def to_audacity(rows: Iterable[Row]) -> dict[str, str]:
    """Format hits as label files of Audacity, `{recording: text}`, because labels do not name their recording."""
    texts: dict[str, str] = {}
    for row in _by_time(rows):
        label = f"{row['start_seconds']:.6f}\t{row['end_seconds']:.6f}\t{_cell(row['query'])}\n"
        texts[row["file"]] = texts.get(row["file"], "") + label
    return texts


def write_labels(texts: Mapping[str, str], folder: str | Path) -> None:
    """Write the label files of `to_audacity`, each with the name and the sub-folder of its recording and ".txt"."""
    for name, text in texts.items():
        path = find_inside(Path(folder).resolve(), f"{name}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds.

    >>> clock(62.5), clock(3600)
    ('01:02.5', '60:00.0')
    """
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{int(minutes):02d}:{rest:04.1f}"


def _by_time(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=itemgetter("file", "start_seconds"))


def _cell(value: Any) -> str:
    """Format a value without tabs and line breaks, for formats that have no quotes."""
    return re.sub(r"[\t\r\n]", " ", str(value))
