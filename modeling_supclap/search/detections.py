"""Score the detections of words in an index against a table of labelled events, such as a selection table of Raven.

The units are the windows of the labelled recordings. A window is positive for a word if it overlaps an event with this
label by at least half of the shorter of the two. Its score is its cosine with the word. The average precision is that
of the ranking of all windows. Precision, recall and F1 are those of the windows that reach a threshold. The threshold
of each recording is the one with the best F1 on all other recordings (leave one recording out).

selections = read_selections("selections.txt", searcher.index)
for score in score_detections(searcher, selections):
    print(score.word, score.precision, score.recall, score.average_precision)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling_supclap.metrics.recall.ranking import average_precision

from .query import Searcher
from .store import SoundIndex


class Selection(NamedTuple):
    """Labelled event in a recording. `file` is relative to the indexed folder; the times are in seconds.

    An empty label only states that the recording is labelled, so that its windows count as negative.
    """

    file: str
    start_seconds: float
    end_seconds: float
    label: str


class DetectionScore(NamedTuple):
    """Scores of the detections of one word. Those that need more recordings with positive windows are NaN.

    Attributes:
        events: Number of events with this label. `matched` is the number of those that make a window positive.
        recordings: Number of recordings with positive windows.
        precision: Fraction of the detected windows that are positive. Each recording has the threshold of the others.
        recall: Fraction of the positive windows that are detected, and `f1` the F1 score, at the same thresholds.
        average_precision: Average precision of the ranking of all windows.
        threshold: Score with the best F1 on all recordings, for use on recordings without labels.
    """

    word: str
    events: int
    matched: int
    recordings: int
    precision: float
    recall: float
    f1: float
    average_precision: float
    threshold: float


def read_selections(path: str | Path, index: SoundIndex) -> list[Selection]:
    """Read a table of labelled events: a selection table of Raven, labels of Audacity, or a table with usual columns.

    Recordings are found as in `audio_folder`. If the table names no recordings, its own name and folder do, such as
    `tapes/dawn.Table.1.selections.txt` for `tapes/dawn.wav`.

    Raises:
        FileNotFoundError: The folder of the recordings does not exist.
        ValueError: The table has no times or no labels, or a line names a recording that is not in the index.
    """
    from modeling_supclap.datasets_scripts.builders.columns import CAPTIONS, USUAL_NAMES, ColumnOptions, Columns, plain
    from modeling_supclap.datasets_scripts.builders.metadata import read_table
    from modeling_supclap.datasets_scripts.builders.recordings import Recordings, stem_of

    path = Path(path)
    lines = read_table(path, beside=True)
    names = {plain(name): name for name in chain.from_iterable(map(attrgetter("values"), lines))}
    label = next((names[name] for name in (*USUAL_NAMES["labels"], "caption", *CAPTIONS) if name in names), "")
    columns = Columns(names.values(), ColumnOptions(label_column=label), captioned=False)
    if not label or not columns.has_parts:
        raise ValueError(
            f"{path} has the columns {columns.names}; expected file_name, start_seconds, end_seconds and label"
        )

    folder, own_name = str(path.parent.resolve()), stem_of(path.stem.partition(".Table.")[0]) + ".wav"  # any suffix
    rows = []
    for where, values in lines:
        name = str(values.get(columns.of_field.get("file_name", "")) or own_name).strip()
        rows.append(((folder, name.replace("\\", "/")), columns.read(values, where)))
    files = index.known_files()
    found = Recordings(index.about["folder"], files).locate({place for place, _ in rows})
    selections = []
    for place, record in rows:
        file, _ = found[place]
        if file not in files:
            raise ValueError(
                f"{record['where']}: {place[1]!r} is not in the index; write its path in the indexed folder"
            )
        for word in record["labels"] or [""]:
            times = record["start_seconds"] or 0.0, record["end_seconds"] or math.inf
            selections.append(Selection(file, *times, word))
    return selections


def score_detections(
    searcher: Searcher, selections: Sequence[Selection], language: str = "eng"
) -> list[DetectionScore]:
    """Score the detections of each label, which is also the text query (see the module).

    `selections` must contain all events of these labels in their recordings. Other recordings of the index are left
    out. `language` is the ISO 639-3 code of the labels.

    Raises ValueError if no selection has a label, or a recording has no windows in the index.
    """
    words = sorted({selection.label for selection in selections} - {""})
    if not words:
        raise ValueError("no selection has a label; pass labelled events")
    files = {selection.file for selection in selections}
    scores = []
    for word, vector in zip(words, searcher.model.encode_text(words, language, 32), strict=True):
        rows = searcher.index.nearest(vector, searcher.index.windows.count_rows(), files, exact=True)
        if missing := sorted(files.difference(map(itemgetter("file"), rows))):
            raise ValueError(f"the index has no windows of {missing[:3]}; leave out recordings that it cannot read")
        # a set, because Raven has one line for each view of an event
        scores.append(_score_word(word, rows, {selection for selection in selections if selection.label == word}))
    return scores


def _score_word(word: str, rows: Sequence[Mapping[str, Any]], events: Collection[Selection]) -> DetectionScore:
    """Score windows, best first, for one word."""
    start, end, scores = np.array(list(map(itemgetter("start_seconds", "end_seconds", "score"), rows))).T
    names, files = np.unique(list(map(itemgetter("file"), rows)), return_inverse=True)
    is_positive, matched = np.zeros(len(rows), bool), 0
    for event in events:
        overlap = np.minimum(end, event.end_seconds) - np.maximum(start, event.start_seconds)
        shorter = np.minimum(end - start, event.end_seconds - event.start_seconds)
        matches = (files == np.searchsorted(names, event.file)) & (overlap >= shorter / 2 - 1e-9)  # up to rounding
        is_positive |= matches
        matched += bool(matches.any())

    precision = recall = f1 = area = threshold = math.nan
    recordings = len(set(files[is_positive]))
    if recordings:
        area = average_precision(scores, is_positive)
    if recordings > 1:
        thresholds = np.empty(len(rows))
        for file in range(len(names)):
            is_own = files == file
            thresholds[is_own] = best_threshold(scores[~is_own], is_positive[~is_own])
        is_detected = scores >= thresholds  # not empty: the best window reaches the threshold of any other recording
        precision, recall = is_positive[is_detected].mean(), is_detected[is_positive].mean()
        f1 = 2 * (is_detected & is_positive).sum() / (is_detected.sum() + is_positive.sum())
        threshold = best_threshold(scores, is_positive)
    return DetectionScore(
        word, len(events), matched, recordings, *map(float, (precision, recall, f1, area, threshold))
    )


def best_threshold(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Return the score with the best F1 as threshold, the highest of equals. `scores` (n,) must be descending.

    >>> best_threshold(np.array([0.9, 0.8, 0.8, 0.1]), np.array([False, True, True, False]))
    0.8
    """
    hits = np.cumsum(is_positive)
    is_last = np.append(scores[1:] < scores[:-1], True)  # equal scores are detected together
    f1 = 2 * hits / (np.arange(len(scores)) + 1 + hits[-1])
    return float(scores[np.argmax(f1 * is_last)])
