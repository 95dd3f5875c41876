"""Detections against a table of events: precision, recall, average precision, thresholds of other recordings."""

import math
import sys
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
import soundfile
from fake_models import PITCHES, RATE, build, tone
from sklearn.metrics import average_precision_score, f1_score

from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.recipes import search_audio
from modeling_supclap.search import Searcher, read_selections, score_detections
from modeling_supclap.search.detections import DetectionScore, Selection, best_threshold

pytestmark = pytest.mark.skipif(find_spec("lancedb") is None, reason="the extra search is not installed")


def mixed(*parts):
    """Return parts of (seconds, low, middle, high), each pitch with its amplitude, one after the other."""
    return np.concatenate(
        [
            sum(amplitude * tone(PITCHES[name], seconds) for name, amplitude in zip(PITCHES, amplitudes, strict=True))
            for seconds, *amplitudes in parts
        ]
    )


@pytest.fixture
def tapes(tmp_path):
    """Three tapes. On a.wav "high" is faint, and a loud decoy of b.wav is not labelled as such."""
    folder = tmp_path / "tapes"
    (folder / "site").mkdir(parents=True)
    tapes = {
        "a.wav": [(20, 1, 0.2, 0), (10, 1, 0, 0.5), (20, 0.3, 1, 0), (10, 1, 0, 0.7)],
        "site/b.wav": [(15, 1, 0, 0), (10, 0, 0.1, 1), (10, 1, 0.1, 0.8), (15, 0.5, 1, 0.1)],
        "site/quiet.wav": [(20, 1, 0, 0.1), (5, 1, 0.8, 0.6)],
        "unlabelled.wav": [(20, 0, 0, 1)],
    }
    for name, parts in tapes.items():
        soundfile.write(folder / name, 0.5 * mixed(*parts), RATE)
    return folder


SELECTIONS = [
    Selection("a.wav", 20.0, 30.0, "high"),
    Selection("a.wav", 50.0, 60.0, "high"),
    Selection("a.wav", 31.0, 49.5, "middle"),
    Selection("site/b.wav", 15.0, 25.0, "high"),
    Selection("site/b.wav", 38.3, 39.1, "middle"),
    Selection("site/quiet.wav", 0.0, math.inf, ""),
    Selection("a.wav", 2.0, 8.0, "low"),
]


@pytest.fixture
def searcher(fake_model, tapes):
    build(fake_model, tapes)
    return Searcher(tapes.parent / "index", load_embedding_model(fake_model))


def naive(searcher, word, selections):
    """Compute the scores of a word with a loop over windows and thresholds."""
    windows = []
    files = {selection.file for selection in selections}
    for row in searcher.index.nearest(searcher.embed(word), 1000, files, exact=True):
        file, start, end = row["file"], row["start_seconds"], row["end_seconds"]
        is_positive = False
        for of_file, first, last, label in selections:
            overlap = min(end, last) - max(start, first)
            if (of_file, label) == (file, word) and overlap >= 0.5 * min(end - start, last - first):
                is_positive = True
        windows.append((file, row["score"], is_positive))

    def best(chosen):
        truth = [is_positive for _, _, is_positive in chosen]
        f1 = {}
        for _, threshold, _ in chosen:
            f1[threshold] = f1_score(truth, [score >= threshold for _, score, _ in chosen])
        return max(sorted(f1, reverse=True), key=lambda threshold: round(f1[threshold], 9))

    detected = []
    for file, score, _ in windows:
        detected.append(score >= best([window for window in windows if window[0] != file]))
    truth = np.array([is_positive for _, _, is_positive in windows])
    hits = np.sum(truth & detected)
    area = average_precision_score(truth, [score for _, score, _ in windows])
    f1 = f1_score(truth, detected)
    return [hits / np.sum(detected), hits / np.sum(truth), f1, area, best(windows)]


def test_scores_are_those_of_a_naive_computation_with_thresholds_of_other_recordings(searcher):
    high, low, middle = score_detections(searcher, SELECTIONS)
    for score in (high, middle):
        assert list(score[4:]) == pytest.approx(naive(searcher, score.word, SELECTIONS), abs=1e-6)
    assert high[:4] == ("high", 3, 3, 2)
    assert middle[:4] == ("middle", 2, 2, 2)
    assert 0 < high.precision != high.recall < 1
    assert 0 < middle.average_precision < 1
    # "low" is labelled in one recording, which leaves no other one for the threshold
    assert low[:4] == ("low", 1, 1, 1)
    assert 0 < low.average_precision < 1
    assert np.isnan([low.precision, low.recall, low.f1, low.threshold]).all()


def test_a_score_equal_to_the_threshold_is_a_detection(fake_model, tmp_path):
    """Two copies of a recording, so that the threshold of each is the score of the other."""
    (tmp_path / "tapes").mkdir()
    for name in ("a.wav", "b.wav"):
        soundfile.write(tmp_path / "tapes" / name, 0.5 * mixed((10, 1, 0, 0), (10, 0, 0.2, 1)), RATE)
    build(fake_model, tmp_path / "tapes")
    searcher = Searcher(tmp_path / "index", load_embedding_model(fake_model))
    (high,) = score_detections(searcher, [Selection(f"{name}.wav", 10.0, 20.0, "high") for name in "ab"])
    assert (high.precision, high.recall, high.f1) == (1.0, 1.0, 1.0)


def test_events_count_once_and_only_labelled_recordings_count(searcher):
    expected = score_detections(searcher, SELECTIONS)
    np.testing.assert_equal(score_detections(searcher, SELECTIONS * 2), expected)  # a line for each view of Raven
    (alone,) = score_detections(searcher, [each for each in SELECTIONS if each.label == "high"])
    assert alone.average_precision != expected[0].average_precision  # quiet.wav has no event, but negative windows
    everywhere = score_detections(searcher, [*SELECTIONS, Selection("unlabelled.wav", 0.0, 1.0, "")])
    assert everywhere[0].average_precision < expected[0].average_precision


def test_an_event_that_no_window_overlaps_is_counted_as_such(searcher):
    beyond = Selection("a.wav", 70.0, 80.0, "thunder")
    half = [Selection("a.wav", 2.5, 2.6, "rain"), Selection("site/b.wav", 51.0, 52.0, "rain")]
    rain, thunder = score_detections(searcher, [*half, beyond])
    assert rain[:4] == ("rain", 2, 1, 1)
    assert thunder[:4] == ("thunder", 1, 0, 0)
    assert math.isnan(thunder.average_precision)
    with pytest.raises(ValueError, match="no selection has a label"):
        score_detections(searcher, [Selection("a.wav", 0.0, 1.0, "")])
    with pytest.raises(ValueError, match=r"no windows of \['tapes/a\.wav'\]"):
        score_detections(searcher, [*SELECTIONS, Selection("tapes/a.wav", 0.0, 1.0, "high")])


def test_a_window_is_positive_from_half_of_the_shorter_on(searcher):
    def count(start, end):
        (score,) = score_detections(searcher, [Selection("site/quiet.wav", start, end, "high")])
        return score.matched

    assert count(24.0, 26.0) == 1  # one of two seconds
    assert count(24.1, 26.1) == 0
    assert count(22.5, 40.0) == 1  # half of the last window
    assert count(22.6, 40.0) == 0


def test_the_best_threshold_takes_equal_scores_together():
    assert best_threshold(np.array([0.9, 0.8, 0.8, 0.8, 0.8]), np.array([True, True, False, False, False])) == 0.9
    assert best_threshold(np.array([0.9, 0.8, 0.7, 0.1]), np.array([True, True, False, False])) == 0.8
    assert best_threshold(np.array([0.5, 0.5]), np.array([True, False])) == 0.5


RAVEN = "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tBegin Path\tFile Offset (s)\tBegin File\tAnnotation\n"


def test_tables_of_raven_and_audacity_and_plain_tables_are_read(searcher, tmp_path, monkeypatch):
    raven = tmp_path / "selections.txt"
    raven.write_text(
        RAVEN
        + "1\tSpectrogram 1\t1\t20.0\t30.0\t/disk/tapes/a.wav\t20.0\ta.wav\thigh\n"
        + "2\tSpectrogram 1\t1\t75.0\t85.0\tC:\\tapes\\site\\b.wav\t15.0\tb.wav\thigh\n"
    )
    assert read_selections(raven, searcher.index) == [SELECTIONS[0], SELECTIONS[3]]
    plain = tmp_path / "events.csv"
    plain.write_text(
        "file,start,end,label,caption\na.wav,20,30,high,a\nsite/quiet.wav,,,,b\nsite/b.wav,15,25,high,c\n"
    )
    assert read_selections(plain, searcher.index) == [SELECTIONS[0], SELECTIONS[5], SELECTIONS[3]]
    alone = tmp_path / "a.Table.1.selections.txt"
    alone.write_text("Selection\tView\tBegin Time (s)\tEnd Time (s)\tAnnotation\n1\tWaveform 1\t20\t30\thigh\n")
    assert read_selections(alone, searcher.index) == [SELECTIONS[0]]
    beside = tmp_path / "tapes" / "site" / "b.txt"
    beside.write_text("15.0\t25.0\thigh\n")
    assert read_selections(beside, searcher.index) == [SELECTIONS[3]]
    monkeypatch.chdir(beside.parent)
    assert read_selections("b.txt", searcher.index) == [SELECTIONS[3]]
    captions = tmp_path / "captions.csv"
    captions.write_text("File,Start,End,Caption\n a.wav ,20,30,high\nsite/quiet.wav,,5,high\n")
    quiet = SELECTIONS[5]._replace(end_seconds=5.0, label="high")
    assert read_selections(captions, searcher.index) == [SELECTIONS[0], quiet]
    (tmp_path / "a.txt").write_text("20.0\t30.0\thigh\n50.0\t60.0\thigh\n")
    assert read_selections(tmp_path / "a.txt", searcher.index) == SELECTIONS[:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,start,end,label\na.wav,1,2,high\nelse.wav,1,2,high\n", r"line 3: 'else\.wav' is not in the index"),
        ("file,start,end,label\n,1,2,high\n", "'events.wav' is not in the index"),
        ("file,label\na.wav,high\n", "start_seconds"),
        ("file,start,end,call\na.wav,1,2,high\n", r"'call'\].*expected .*label"),
        ("file,start,end,label\na.wav,2,1,high\n", "line 2: .*before its end"),
    ],
)
def test_tables_that_do_not_fit_are_refused(searcher, tmp_path, text, message):
    (tmp_path / "events.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_selections(tmp_path / "events.csv", searcher.index)


def test_the_command_prints_a_row_for_each_word(searcher, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("modeling_supclap.search.Searcher", lambda *_: searcher)
    (tmp_path / "a.txt").write_text("20\t30\thigh\n50\t60\thigh\n2\t8\tlow\n")
    (tmp_path / "b.csv").write_text("file,start,end,label\nsite/b.wav,15,25,high\n")
    words = ["score", str(tmp_path / "index"), "--table", str(tmp_path / "a.txt"), str(tmp_path / "b.csv")]
    with mock.patch.object(sys, "argv", ["search_audio.py", *words]):
        search_audio.main()
    heading, high, low, note = capsys.readouterr().out.splitlines()
    assert heading.split() == list(DetectionScore._fields)
    (expected, _) = score_detections(searcher, [SELECTIONS[index] for index in (0, 1, 3, 6)])
    assert high.split() == [*map(str, expected[:4]), *(f"{value:.3f}" for value in expected[4:])]
    assert low.split()[:4] == ["low", "1", "1", "1"]
    assert low.split().count("nan") == 4
    assert "fewer than two recordings" in note
