"""Tables of hits: rows, selection tables of Raven, and labels of Audacity."""

from pathlib import Path

import pytest

from modeling_supclap.search.query import Answer, Hit
from modeling_supclap.search.tables import COLUMNS, to_audacity, to_raven, to_rows, write_labels

ANSWERS = [
    Answer("rain", [Hit("site/a.wav", 12.5, 17.5, 0.625), Hit("b.flac", 0.0, 5.0, 0.5)], True),
    Answer("no hit", [], False),
    Answer("a\ttab\nand a line", [Hit("site/a.wav", 2.5, 7.25, -0.125)], False),
]
ROWS = to_rows(ANSWERS)


def test_each_hit_is_a_row_with_its_query():
    assert [tuple(row) for row in ROWS] == [COLUMNS] * 3
    assert [tuple(row.values()) for row in ROWS] == [
        ("rain", "site/a.wav", 12.5, 17.5, 0.625, True),
        ("rain", "b.flac", 0.0, 5.0, 0.5, True),
        ("a\ttab\nand a line", "site/a.wav", 2.5, 7.25, -0.125, False),
    ]


def test_a_selection_table_has_the_columns_of_raven_and_is_in_order_of_time():
    heading, *lines = [line.split("\t") for line in to_raven(ROWS, "/sounds", 8000.0).splitlines()]
    assert heading[:4] == ["Selection", "View", "Channel", "Begin Time (s)"]
    assert heading[4:7] == ["End Time (s)", "Low Freq (Hz)", "High Freq (Hz)"]
    assert heading[7:] == ["Begin Path", "File Offset (s)", "Begin File", "Annotation", "Score"]
    view, site = ["Spectrogram 1", "1"], str(Path("/sounds/site/a.wav"))
    limits = ["0", "8000"]
    assert lines == [
        [
            "1",
            *view,
            "0.000000",
            "5.000000",
            *limits,
            str(Path("/sounds/b.flac")),
            "0.000000",
            "b.flac",
            "rain",
            "0.5000",
        ],
        ["2", *view, "2.500000", "7.250000", *limits, site, "2.500000", "a.wav", "a tab and a line", "-0.1250"],
        ["3", *view, "12.500000", "17.500000", *limits, site, "12.500000", "a.wav", "rain", "0.6250"],
    ]
    assert to_raven([], "/sounds", 8000.0).rstrip("\n").split("\t") == heading


def test_labels_have_one_file_per_recording(tmp_path, monkeypatch):
    labels = to_audacity(ROWS)
    assert labels == {
        "b.flac": "0.000000\t5.000000\train\n",
        "site/a.wav": "2.500000\t7.250000\ta tab and a line\n12.500000\t17.500000\train\n",
    }
    monkeypatch.chdir(tmp_path)
    write_labels(labels, "labels")
    assert (tmp_path / "labels" / "site" / "a.wav.txt").read_text(encoding="utf-8") == labels["site/a.wav"]
    assert (tmp_path / "labels" / "b.flac.txt").is_file()


@pytest.mark.parametrize("name", ["../evil", "site/../../evil", "/evil"])
def test_an_index_from_elsewhere_writes_no_labels_outside_the_folder(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="evil"):
        write_labels({name: "0\t1\train\n"}, tmp_path / "labels")
    assert not list(tmp_path.rglob("evil*"))
