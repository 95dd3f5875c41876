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
from modeling_supclap.datasets_scripts.audio import MissingDecoderError
from modeling_supclap.datasets_scripts.overlap import check_overlap
from modeling_supclap.datasets_scripts.overlap.check_overlap import (
    compare,
    copies_as_csv,
    find_copies,
    main,
    overlap_table,
)
from modeling_supclap.datasets_scripts.prepare import Request, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sets `first` (sources 100-111), `second` (120-131) and `third` (108-119).

    In `second`, clip 21 is a part of clip 3 as MP3 samples; in `third`, clip 11 is another sound than in `first`.
    """
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("overlap")
    for name, first in (("first", 0), ("second", 20), ("third", 8)):
        esc = make_folder(folder / f"esc-{name}", clips=12, seconds=2.0, first=first)
        if name == "second":
            soundfile.write(esc / "copy.mp3", 0.4 * sound(3, 2.0)[6_000:], RATE_HZ)
            samples, rate_hz = soundfile.read(esc / "copy.mp3")
            soundfile.write(esc / "audio" / "2-21.wav", samples, rate_hz)
            soundfile.write(esc / "audio" / "3-22.wav", np.sin(np.arange(2000)), RATE_HZ)
        if name == "third":
            soundfile.write(esc / "audio" / "4-11.wav", sound(40, 2.0), RATE_HZ)
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
    assert copy["score"] == round(copy["score"], 4)
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
    assert {copy["second"]["clip_id"]: copy["same_source"] for copy in report["copies"]} == {
        "1-8": True, "2-9": True, "3-10": True
    }  # fmt: skip
    order = [(-copy["score"], copy["first"]["clip_id"]) for copy in report["copies"]]
    assert order == sorted(order)
    assert report["sets"] == [{"name": str(folder / name), "clips": 12} for name in ("first", "third")]
    assert report["threshold"] == 6


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


def test_a_recording_that_is_gone_is_not_compared_but_a_missing_decoder_is_an_error(folder, monkeypatch, capsys):
    path = folder / "esc-third" / "audio" / "2-9.wav"
    path.rename(path.with_suffix(".gone"))
    try:
        report = compare(str(folder / "first"), str(folder / "third"), cache_dir=str(folder / "cache"))
    finally:
        path.with_suffix(".gone").rename(path)
    assert report["not_compared"] == [[], [{"split": "train", "clip_id": "2-9", "source": "freesound:109"}]]
    assert sorted(copy["second"]["clip_id"] for copy in report["copies"]) == ["1-8", "3-10"]

    def read_row(row, rate_hz):
        raise MissingDecoderError("install PyAV")

    monkeypatch.setattr(check_overlap, "read_row", read_row)
    assert run(folder, "first", "second") == 2
    assert "error: install PyAV" in capsys.readouterr().err


def clip(clip_id, split="train", source="s"):
    return {"split": split, "clip_id": clip_id, "source": source}


def test_the_table_of_two_sets_has_the_first_sources_and_copies():
    numbers = {"score": 12.34, "bit_error_rate": 0.1234, "offset_seconds": -1.256, "overlap_seconds": 2.0}
    copies = [{"first": clip(f"a{n}"), "second": clip(f"b{n}"), "same_source": False, **numbers} for n in range(22)]
    sources = {f"s{n:02d}": [[clip("x")], [clip(f"y{m}", "test") for m in range(4)]] for n in range(23)}
    report = {
        "sets": [{"name": "A", "clips": 40}, {"name": "B", "clips": 50}],
        "shared_sources": sources,
        "copies": copies,
        "not_compared": [[], [clip("z")]],
    }
    lines = overlap_table(report).split("\n")
    assert lines[:4] == [
        "A (40 clips) and B (50 clips)",
        "shared sources: 23",
        "copies by sound: 22",
        "without fingerprint, too short, silent or unreadable: 0 and 1",
    ]
    assert lines[4:24] == [f"  s{n:02d}: train/x | test/y0, test/y1, test/y2 and 1 more" for n in range(20)]
    assert lines[24:45] == ["  score  bit errors  offset s  overlap s  clips"] + [
        f"   12.3       12.3%     -1.26       2.00  train/a{n} | train/b{n}" for n in range(20)
    ]
    assert lines[45:] == ["... and 5 more; --json FILE or --csv FILE saves all"]
    shown = {**report, "shared_sources": {}, "copies": copies[:20], "not_compared": [[], []]}
    assert overlap_table(shown).split("\n") == [lines[0], "shared sources: 0", "copies by sound: 20", *lines[24:45]]
    assert overlap_table({**shown, "copies": []}).split("\n")[-1] == "copies by sound: 0"
    assert copies_as_csv({"copies": copies[:1]}) == (
        '"first","second","same_file","score","bit_error_rate","offset_seconds","overlap_seconds"\n'
        '"train/a0","train/b0",False,12.34,0.1234,-1.256,2.0\n'
    )


def test_the_name_of_a_set_may_contain_a_colon(folder, tmp_path, capsys):
    shutil.copytree(folder / "first", tmp_path / "at 10:30")
    report = compare(str(tmp_path / "at 10:30"), f"{folder / 'third'}:train", cache_dir=str(folder / "cache"))
    assert [each["clips"] for each in report["sets"]] == [12, 9]
    assert len(report["copies"]) == 3
    report = compare(f"{tmp_path / 'at 10:30'}:test", str(folder / "third"), cache_dir=str(folder / "cache"))
    assert [each["clips"] for each in report["sets"]] == [3, 12]
    for name in ("C:/sets/a", r"C:\sets\a"):
        assert main([str(folder / "first"), name, "--quiet"]) == 2
        assert name in capsys.readouterr().err


def test_a_set_is_not_compared_with_itself_and_an_unknown_split_is_named(folder):
    first = str(folder / "first")
    with pytest.raises(ValueError, match=f"both sets are {first}; .*{first}:train {first}:test"):
        compare(first, first)
    with pytest.raises(ValueError, match=r"first has no split 'dev'; its splits are train, test"):
        compare(f"{first}:dev", str(folder / "second"), cache_dir=str(folder / "cache"))


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
        (("first:test", "third:test", "--fail_on_overlap"), 1),  # a source, but no copy
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


def test_copies_within_a_folder_are_found_once(library, tmp_path, monkeypatch):
    monkeypatch.chdir(library.parent)
    report = find_copies("sounds", cache_dir=str(tmp_path))
    assert pairs_of(report) == COPIES
    (near,) = [pair for pair in report["copies"] if not pair["same_file"]]
    assert near["offset_seconds"] == pytest.approx(8_000 / RATE_HZ, abs=0.06)
    assert report["sets"] == [{"name": "sounds", "clips": 15}]
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
    soundfile.write(tmp_path / "sounds" / "0.mp3", sound(1, 2.0), RATE_HZ)  # less like 40.flac than 00.wav is
    computed = []
    plain = check_overlap.fingerprint
    monkeypatch.setattr(check_overlap, "fingerprint", lambda waveform: computed.append(1) or plain(waveform))
    copies = pairs_of(find_copies(str(tmp_path / "sounds"), cache_dir=str(tmp_path)))
    assert len(computed) == 3
    assert copies == [("0.mp3", "00.wav", False)] + [
        ("00.wav", f"{number:02d}.wav", True) for number in range(1, 40)
    ] + [("00.wav", "40.flac", False)]


def test_copies_of_a_folder_are_written_as_csv(library, tmp_path, capsys):
    words = [str(library), "--csv", str(tmp_path / "copies.csv"), "--cache_dir", str(tmp_path), "--quiet"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert f"{library} (15 clips)" in printed
    assert "copies by sound: 1" in printed
    assert "copies with the same bytes: 3" in printed
    assert "3.wav | old/3.mp3" in printed
    assert f"\n{'the same bytes':<40}  2.wav | =copy.wav\n" in printed
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
