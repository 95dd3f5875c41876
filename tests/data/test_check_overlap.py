"""Overlap of two prepared sets: by source and by sound, and the exit status."""

import csv
import json
import re
import shutil

import datasets
import numpy as np
import pytest
import soundfile
from prepared_sets import RATE_HZ, make_folder, sound

from modeling_supclap.datasets_scripts import splits
from modeling_supclap.datasets_scripts.overlap import check_overlap
from modeling_supclap.datasets_scripts.overlap.check_overlap import compare, find_copies, main
from modeling_supclap.datasets_scripts.prepare import Request, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sets `first` (sources 100-111) and `second` (120-131), where clip 21 is a part of clip 3 as MP3 samples."""
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("overlap")
    for name, first in (("first", 0), ("second", 20), ("third", 8)):
        esc = make_folder(folder / f"esc-{name}", clips=12, seconds=2.0, first=first)
        if name == "second":
            soundfile.write(esc / "copy.mp3", 0.4 * sound(3, 2.0)[6_000:], RATE_HZ)
            samples, rate_hz = soundfile.read(esc / "copy.mp3")
            soundfile.write(esc / "audio" / "2-21.wav", samples, rate_hz)
            soundfile.write(esc / "audio" / "3-22.wav", np.sin(np.arange(2000)), RATE_HZ)
        options = {"data_dir": str(esc), "languages": ["eng"], "validation_fraction": 0.0, "test_fold": 4}
        storage = {"first": "int16", "second": "original", "third": "reference"}[name]
        prepare(Request("esc50", options, storage), folder / name, cache_dir=str(folder / "cache"), quiet=True)
    yield folder
    datasets.enable_progress_bars()


def run(folder, *words):
    names = [str(folder / words[0]), str(folder / words[1]), *words[2:]]
    return main([*names, "--cache_dir", str(folder / "cache"), "--quiet"])


def test_a_copy_under_another_source_is_found(folder):
    report = compare(str(folder / "first"), str(folder / "second"), cache_dir=str(folder / "cache"))
    assert report["shared_sources"] == {}
    (copy,) = report["copies"]
    assert copy["first"] == {"split": "test", "clip_id": "4-3", "source": "freesound:103"}
    assert copy["second"] == {"split": "train", "clip_id": "2-21", "source": "freesound:121"}
    assert not copy["same_source"]
    assert copy["offset_seconds"] == pytest.approx(6_000 / RATE_HZ, abs=0.06)
    assert [[clip["clip_id"] for clip in clips] for clips in report["not_compared"]] == [[], ["3-22"]]


@pytest.mark.process
def test_workers_change_nothing(folder):
    cache = str(folder / "cache")
    reports = [compare(str(folder / "first"), str(folder / "second"), workers, cache) for workers in (1, 2)]
    assert reports[0] == reports[1]


def test_shared_sources_are_listed_with_the_clips_of_both(folder):
    report = compare(str(folder / "first"), str(folder / "third"), cache_dir=str(folder / "cache"))
    assert list(report["shared_sources"]) == [f"freesound:{number}" for number in (108, 109, 110, 111)]
    (mine,), (theirs,) = report["shared_sources"]["freesound:109"]
    assert mine["clip_id"] == theirs["clip_id"] == "2-9"
    assert sorted(copy["second"]["clip_id"] for copy in report["copies"]) == ["1-8", "2-9", "3-10", "4-11"]
    assert all(copy["same_source"] for copy in report["copies"])


def test_file_names_are_not_shared_sources(tmp_path):
    for name, first in (("mine", 0), ("yours", 50)):
        (tmp_path / name).mkdir()
        for number in range(4):
            soundfile.write(tmp_path / name / f"{number}.wav", sound(first + number, 2.0), RATE_HZ)
            (tmp_path / name / f"{number}.txt").write_text("a sound")
        request = Request("audio_folder", {"data_dir": str(tmp_path / name), "languages": ["eng"]})
        prepare(request, tmp_path / f"{name}-prepared", cache_dir=str(tmp_path / "cache"), quiet=True)
    sets = [str(tmp_path / f"{name}-prepared") for name in ("mine", "yours")]
    report = compare(*sets, cache_dir=str(tmp_path / "cache"))
    assert report["shared_sources"] == {}
    assert report["copies"] == []


def test_one_split_of_a_set(folder):
    cache = str(folder / "cache")
    assert compare(f"{folder / 'first'}:train", str(folder / "second"), cache_dir=cache)["copies"] == []
    (copy,) = compare(f"{folder / 'first'}:test", f"{folder / 'second'}:train", cache_dir=cache)["copies"]
    assert copy["first"]["clip_id"] == "4-3"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("first", "second"), 0),
        (("first", "second", "--fail_on_overlap"), 1),
        (("first:train", "first:test", "--fail_on_overlap"), 0),
        (("first", "nowhere"), 2),
        (("first", "first"), 2),
        (("first:dev", "second"), 2),
    ],
)
def test_the_exit_status_depends_on_the_overlap(folder, words, status, capsys):
    assert run(folder, *words) == status
    out, err = capsys.readouterr()
    assert (": error: " in err) == (status == 2)
    assert "Traceback" not in err
    assert (re.search(r"sound.*\b1\b", out) is not None) == (words[:2] == ("first", "second"))


def test_the_report_is_written(folder, tmp_path, capsys):
    assert run(folder, "first", "second", "--json", str(tmp_path / "report.json")) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report == compare(str(folder / "first"), str(folder / "second"), cache_dir=str(folder / "cache"))
    assert "test/4-3 | train/2-21" in capsys.readouterr().out


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Sounds without captions: eight originals, copies of two kinds, and sounds that are too short to compare."""
    root = tmp_path_factory.mktemp("library") / "sounds"
    (root / "old").mkdir(parents=True)
    for number in range(8):
        soundfile.write(root / f"{number}.wav", sound(number, 3.0), RATE_HZ)
    shutil.copy(root / "2.wav", root / "=copy.wav")
    shutil.copy(root / "2.wav", root / "old" / "2.wav")
    soundfile.write(root / "old" / "3.mp3", 0.4 * sound(3, 3.0)[8_000:], RATE_HZ)
    for name, number in (("click.wav", 9), ("old/click.wav", 9), ("tick.wav", 10)):
        soundfile.write(root / name, sound(number, 0.2), RATE_HZ)
    (root / "broken.wav").write_bytes(b"no sound")
    (root / "notes.txt").write_text("a rain")
    return root


def pairs_of(report):
    return [(pair["first"]["clip_id"], pair["second"]["clip_id"], pair["same_file"]) for pair in report["copies"]]


COPIES = [
    ("2.wav", "=copy.wav", True),
    ("2.wav", "old/2.wav", True),
    ("3.wav", "old/3.mp3", False),
    ("click.wav", "old/click.wav", True),
]


def test_copies_within_a_folder_are_found_once(library, tmp_path):
    report = find_copies(str(library), cache_dir=str(tmp_path))
    assert sorted(pairs_of(report)) == sorted(COPIES)
    (near,) = [pair for pair in report["copies"] if not pair["same_file"]]
    assert near["offset_seconds"] == pytest.approx(8_000 / RATE_HZ, abs=0.06)
    assert report["sets"] == [{"name": str(library), "clips": 15}]
    assert {clip["clip_id"] for clip in report["not_compared"][0]} == {"broken.wav", "click.wav", "tick.wav"}


def test_only_files_of_equal_size_are_read_for_their_bytes(library, monkeypatch):
    hashed = []
    monkeypatch.setattr(splits, "file_sha256", lambda path: hashed.append(path.rpartition("/")[2]) or "")
    splits.hash_copies([str(library / name) for name in ("2.wav", "=copy.wav", "click.wav", "broken.wav")])
    assert hashed == ["2.wav", "=copy.wav"]


def test_many_equal_files_are_compared_once(tmp_path, monkeypatch):
    (tmp_path / "sounds").mkdir()
    soundfile.write(tmp_path / "sounds" / "00.wav", sound(1, 2.0), RATE_HZ)
    for number in range(1, 40):
        shutil.copy(tmp_path / "sounds" / "00.wav", tmp_path / "sounds" / f"{number:02d}.wav")
    soundfile.write(tmp_path / "sounds" / "40.flac", sound(1, 2.0), RATE_HZ)
    computed = []
    plain = check_overlap.fingerprint
    monkeypatch.setattr(check_overlap, "fingerprint", lambda waveform: computed.append(1) or plain(waveform))
    copies = pairs_of(find_copies(str(tmp_path / "sounds"), cache_dir=str(tmp_path)))
    assert len(computed) == 2
    assert copies == [("00.wav", f"{number:02d}.wav", True) for number in range(1, 40)] + [
        ("00.wav", "40.flac", False)
    ]


def test_copies_of_a_folder_are_written_as_csv(library, tmp_path, capsys):
    words = [str(library), "--csv", str(tmp_path / "copies.csv"), "--cache_dir", str(tmp_path), "--quiet"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert f"{library} (15 clips)" in printed
    assert "copies by sound: 1" in printed
    assert "copies with the same bytes: 3" in printed
    assert "3.wav | old/3.mp3" in printed
    assert "without fingerprint, too short, silent or unreadable: 3" in printed
    with (tmp_path / "copies.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    by_name = {row["second"]: row for row in rows}
    assert by_name["'=copy.wav"]["first"] == "2.wav"
    assert (by_name["old/click.wav"]["same_file"], by_name["old/click.wav"]["score"]) == ("True", "")
    assert (by_name["old/3.mp3"]["same_file"], float(by_name["old/3.mp3"]["score"]) > 6) == ("False", True)
    assert main([*words, "--fail_on_overlap"]) == 1


def test_copies_within_a_prepared_set_are_found(folder, capsys):
    assert main([str(folder / "first"), "--cache_dir", str(folder / "cache"), "--quiet", "--fail_on_overlap"]) == 0
    assert "copies by sound: 0" in capsys.readouterr().out


def test_the_recordings_of_an_index_are_compared(library, tmp_path):
    pytest.importorskip("lancedb")
    from fake_models import PitchModel, build

    root = tmp_path / "sounds"
    shutil.copytree(library, root)
    build(PitchModel(), root)
    report = find_copies(str(tmp_path / "index"), cache_dir=str(tmp_path))
    assert sorted(pairs_of(report)) == sorted(COPIES)
    root.rename(tmp_path / "moved")
    build(PitchModel(), tmp_path / "moved")
    assert len(find_copies(str(tmp_path / "index"), cache_dir=str(tmp_path))["copies"]) == 4


def test_a_folder_without_recordings_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path), "--quiet"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
