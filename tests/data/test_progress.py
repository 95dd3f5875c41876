"""Progress of long jobs: no log lines for short jobs, and one line per interval for long jobs."""

import os

import pytest

from modeling_supclap.datasets_scripts import progress as module
from modeling_supclap.datasets_scripts.progress import progress


@pytest.mark.parametrize(("quiet", "first_seconds"), [(False, 10.0), (True, 0.0)])
def test_a_short_job_prints_nothing_to_a_log(capsys, monkeypatch, quiet, first_seconds):
    monkeypatch.setattr(module, "FIRST_LOG_SECONDS", first_seconds)
    assert list(progress(range(500), "reading", 500, "clips", quiet)) == list(range(500))
    assert capsys.readouterr().err == ""


def test_a_log_gets_whole_lines(capsys, monkeypatch):
    monkeypatch.setattr(module, "LOG_SECONDS", 0.0)  # the first line is not later than the second
    list(progress(range(2), "reading", 5, "clips", start=3))
    lines = capsys.readouterr().err.replace("\r", "").split("\n")
    told = [line.rsplit(",", 1)[0] for line in lines if line.strip()]
    assert told[0] == "reading: 3 of 5 clips"
    assert told[-1] == "reading: 5 of 5 clips"
    assert len(set(told)) == len(told) == len(lines) - 1  # each state once, and no blank lines


def test_a_bar_that_is_dropped_at_its_end_repeats_no_line(capsys, monkeypatch):
    monkeypatch.setattr(module, "FIRST_LOG_SECONDS", 0.0)
    bar = progress((), "evaluating", 2, "batches")
    for _ in range(2):
        bar.update()
    del bar
    assert capsys.readouterr().err.splitlines()[-1] == "evaluating: 2 of 2 batches, 00:00 left"


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tqdm.std.time", lambda: 0.0)
    bar = iter(progress(range(3), "reading", 5, "clips", start=2))
    assert [next(bar) for _ in range(2)] == [0, 1]
    assert "reading:  60%" in capsys.readouterr().err  # at once after the first item
    assert list(bar) == [2]
    written = capsys.readouterr().err
    assert "\n" not in written.rstrip("\n")
    assert "reading: 100%" in written


def test_a_log_has_a_first_line_early_and_then_fewer(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    bar = progress((), "reading", 1000, "clips")
    printed = []
    for second in range(1, 150):
        clock[0] = float(second)
        bar.update()
        if capsys.readouterr().err.strip():
            printed.append(second)
    assert printed == [11, 71, 131]  # the clock starts with the first item


def test_a_terminal_without_a_width_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    list(progress(range(3), "reading", 3, "clips"))
    assert "reading: 100%" in capsys.readouterr().err


def test_the_time_left_does_not_count_the_first_batch(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])

    def work():
        for number in range(200):
            clock[0] += 18.0 if number == 0 else 0.5 if number <= 20 else 1.0  # loads the model first
            yield number

    assert list(progress(work(), "indexing", 200, "files")) == list(range(200))
    lines = list(filter(None, capsys.readouterr().err.replace("\r", "").split("\n")))
    assert lines[:2] == ["indexing: 21 of 200 files, 01:29 left", "indexing: 81 of 200 files, 01:44 left"]
    assert lines[-1] == "indexing: 200 of 200 files, 00:00 left"


def test_items_are_counted_once_between_two_lines(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    bar = progress(range(300), "reading", 300, "clips")
    for number, _ in enumerate(bar):
        assert bar.n == number
        clock[0] += 1.0
    lines = [line.split(",")[0] for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert lines[:3] == ["reading: 11 of 300 clips", "reading: 71 of 300 clips", "reading: 131 of 300 clips"]
    assert lines[-1] == "reading: 300 of 300 clips"  # at the end of the loop, while the bar still exists
