"""Finding audio files by their names in the metadata."""

import logging
import os
import unicodedata

import numpy as np
import pytest
import soundfile
from dataset_folders import touch

from modeling_supclap.datasets_scripts.audio_files import SUFFIXES, walk
from modeling_supclap.datasets_scripts.builders.recordings import (
    Recordings,
    duration_seconds,
    find_segments,
    listing,
    stem_of,
)

VIDEO = "Y_abcdefgh-"  # eleven characters that begin with Y


def test_walk_lists_files_without_hidden_system_files(tmp_path):
    touch(tmp_path, ["b.wav", "a/c.wav", "a/._c.wav", ".cache/d.wav", "__MACOSX/e.wav", "a/notes.txt"])
    assert walk(tmp_path) == ["a/c.wav", "a/notes.txt", "b.wav"]


def test_walk_follows_links_but_not_in_circles(tmp_path):
    touch(tmp_path, ["disk/a.wav", "data/b.wav"])
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "back").symlink_to(tmp_path / "data")
    assert walk(tmp_path / "data") == ["b.wav", "linked/a.wav"]


def test_walk_skips_pipes_and_devices(tmp_path):
    touch(tmp_path, ["a.wav"])
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "terminal.wav").symlink_to("/dev/tty")
    assert walk(tmp_path) == ["a.wav"]


def test_walk_skips_names_that_are_not_utf8(tmp_path, caplog):
    touch(tmp_path, ["a.wav"])
    with open(os.path.join(os.fsencode(tmp_path), b"caf\xe9.wav"), "wb"), caplog.at_level(logging.WARNING):
        assert walk(tmp_path) == ["a.wav"]
    assert "UTF-8" in caplog.text


@pytest.mark.parametrize(
    ("name", "stem"),
    [("a.wav", "a"), ("b/a.FLAC", "a"), ("a.b.001", "a.b.001"), ("a.mp4", "a"), ("Glass .wav", "Glass "), ("a", "a")],
)
def test_a_stem_loses_only_a_suffix_of_a_medium(name, stem):
    assert stem_of(name) == stem


def test_a_path_is_found_in_another_format_and_the_format_named_wins(tmp_path):
    touch(tmp_path, ["x/1.wav", "x/1.mp3", "x/1.txt", "y/1.flac", "2.opus"])
    recordings = Recordings(tmp_path)
    assert recordings.at("x/1.mp3") == tmp_path / "x/1.mp3"
    assert recordings.at("x/1.ogg") == tmp_path / "x/1.wav"
    assert recordings.at("y/1.wav") == tmp_path / "y/1.flac"
    assert recordings.at("1.wav") is None
    assert Recordings(tmp_path / "y").at(str(tmp_path / "2.opus")) == tmp_path / "2.opus"
    assert recordings.at("Y/1.OGG") == recordings.at("y%2F1.wav") == tmp_path / "y/1.flac"
    assert recordings.at("X/1.wav") == tmp_path / "x/1.wav"  # one path in two formats is no second recording
    assert Recordings(tmp_path, ["rain.wav", "Rain.wav"]).at("RAIN.wav") is None
    assert recordings.locate([("", "2.wav")])["", "2.wav"] == ("2.wav", tmp_path / "2.opus")
    assert recordings.locate([("", "1")])["", "1"] == ("1", None)
    (tmp_path / "y/1.flac").rename(tmp_path / "y/3.flac")
    assert Recordings(tmp_path).locate([("", "1")])["", "1"] == ("x/1.wav", tmp_path / "x/1.wav")
    touch(tmp_path, ["z/Été.wav"])
    other = unicodedata.normalize("NFD", "ÉTÉ.WAV")
    assert Recordings(tmp_path).locate([("", other)])["", other] == ("z/Été.wav", tmp_path / "z/Été.wav")
    touch(tmp_path, ["y/1.flac"])
    assert recordings.named(["0", "2", "1"]) == tmp_path / "2.opus"
    assert recordings.named(["1"]) == tmp_path / "x/1.wav"
    assert recordings.named(["0"]) is None


def test_a_path_in_another_unicode_normal_form_is_found(tmp_path):
    composed, apart = (unicodedata.normalize(form, "été/über.wav") for form in ("NFC", "NFD"))
    recordings = Recordings(tmp_path, [apart])
    assert recordings.at(composed) == recordings.at(apart) == tmp_path / apart
    assert Recordings(tmp_path, [composed]).at(apart) == tmp_path / composed


def test_names_of_tables_are_located_from_their_folders(tmp_path):
    folder = tmp_path / "data"
    here = touch(folder, ["x/1.wav", "1.wav", "2.flac", "y/3.wav", "u/only.wav", "v/a b.wav", "w/5.wav", "z/5.wav"])
    (elsewhere,) = touch(tmp_path, ["disk/4.wav"])
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    expected = {
        ("x", "1.wav"): ("x/1.wav", here[0]),  # from the table, and otherwise from the folder
        ("y", "1.wav"): ("1.wav", here[1]),
        ("y", "2.wav"): ("2.wav", here[2]),  # in another format
        ("", "y/../y/./3.WAV"): ("y/3.wav", here[3]),
        ("x", "gone/1.wav"): ("x/gone/1.wav", None),
        ("", str(here[3])): ("y/3.wav", here[3]),
        ("x", str(elsewhere)): (str(elsewhere), elsewhere),
        ("x", str(tmp_path / "link" / "4.wav")): (str(tmp_path / "link" / "4.wav"), tmp_path / "link" / "4.wav"),
        ("x", "/u/only.wav"): ("u/only.wav", here[4]),  # of another machine, named by two tables
        ("y", "/u/only.wav"): ("u/only.wav", here[4]),
        ("x", "D:/set/V/a b.wav"): ("v/a b.wav", here[5]),
        ("x", "s3://bucket/a%20b.wav?v=1"): ("s3://bucket/a%20b.wav?v=1", None),  # no file ends so
        ("x", "https://host/w/5.wav?v=1"): ("https://host/w/5.wav?v=1", None),  # two names with one end
        ("x", "https://other/w/5.wav"): ("https://other/w/5.wav", None),
        ("x", "https://host/z/5.wav"): ("z/5.wav", here[7]),
    }
    assert Recordings(folder).locate(expected) == expected


def test_the_preferred_format_wins_and_then_the_first_path(tmp_path):
    touch(tmp_path, [f"{letter}/1{suffix}" for suffix in SUFFIXES for letter in "ba"])
    for suffix in SUFFIXES:
        assert Recordings(tmp_path).named(["1"]) == tmp_path / f"a/1{suffix}"
        for letter in "ab":
            (tmp_path / letter / f"1{suffix}").unlink()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("rain&amp;storm.wav", "rain&storm.wav"),
        ("Glass .wav", "Glass.wav"),
        ("Door: open?.wav", "Door_ open_.wav"),
        ("Chris&#39; lift #1.wav", "Chris_ lift _1.flac"),
        ("Tre\u0300s.wav", "Tr\u00e8s.wav"),
        ("FREEZER_DOOR.wav", "freezer_door.wav"),
    ],
)
def test_names_with_changed_characters_are_found(tmp_path, name, file):
    touch(tmp_path, [file, "another.wav"])
    assert Recordings(tmp_path).matching([name, "missing.wav"]) == {name: tmp_path / file}


def test_a_changed_name_matches_only_if_it_is_unique(tmp_path):
    touch(tmp_path, ["Fountain.wav", "rain-drops.wav", "rain_drops.wav", "tree frogs.wav"])
    touch(tmp_path, ["wind&sea.wav", "wind sea.wav", "Tr\u00e8s.wav", "Tr\u00e9s.wav"])
    names = ["fountain.wav", "Fountain .wav", "rain drops.wav", "tree frogs.wav", "treefrogs.wav"]
    names += ["wind&amp;sea.wav", "Tre\u0300s.wav", "Tre\u0301s.wav"]
    assert {name: path.name for name, path in Recordings(tmp_path).matching(names).items()} == {
        "Fountain .wav": "Fountain.wav",
        "tree frogs.wav": "tree frogs.wav",
        "wind&amp;sea.wav": "wind&sea.wav",
        "Tre\u0300s.wav": "Tr\u00e8s.wav",
        "Tre\u0301s.wav": "Tr\u00e9s.wav",
    }
    assert Recordings(tmp_path, ["?!.wav"]).matching(["!?.wav"]) == {}  # no letters to compare


def test_parts_of_a_dataset_are_looked_for_in_their_own_folders(tmp_path):
    touch(tmp_path, ["audio/Clotho_Evaluation/1.wav", "audio/validation/1.wav", "2.wav"])
    recordings, parts = Recordings(tmp_path), ["evaluation", "validation", "development"]
    assert recordings.within("evaluation", parts).files == ("audio/Clotho_Evaluation/1.wav",)
    assert recordings.within("validation", parts).files == ("audio/validation/1.wav",)
    assert recordings.within("development", parts).files == ("2.wav",)


@pytest.mark.parametrize(
    "name",
    [
        "Y{}",
        "{}_30",
        "{}",
        "{}_30_40",
        "{}_30-40",
        "{}_30000_40000",
        "{}_30000",
        "{}_000030",
        "{}_30.0",
        "Y{}_30.000_40.000",
    ],
)
def test_a_clip_of_a_video_is_found_under_the_namings_in_use(tmp_path, name):
    name = name.format(VIDEO) + ".flac"
    touch(tmp_path, [name, "abcdefgh-__30.wav", f"{VIDEO}_300.wav"])
    assert find_segments(Recordings(tmp_path), [(VIDEO, 30)]) == {(VIDEO, 30): tmp_path / name}


def test_a_name_without_start_does_not_match_a_video_with_several_clips(tmp_path):
    touch(tmp_path, [f"{VIDEO}.wav", f"Y{VIDEO}_60.wav", "Zzzzzzzzzzz.wav"])
    found = find_segments(Recordings(tmp_path), [(VIDEO, 30), (VIDEO, 60), ("Zzzzzzzzzzz", 0)])
    assert {segment: path.name for segment, path in found.items()} == {
        (VIDEO, 60): f"Y{VIDEO}_60.wav",
        ("Zzzzzzzzzzz", 0): "Zzzzzzzzzzz.wav",
    }


def test_the_fingerprint_depends_on_names_sizes_and_times(tmp_path):
    (path,) = touch(tmp_path, ["a.wav"])
    found = [Recordings(tmp_path).fingerprint()]
    path.write_bytes(b"1")
    found.append(Recordings(tmp_path).fingerprint())
    os.utime(path, (1, 1))
    found.append(Recordings(tmp_path).fingerprint())
    touch(tmp_path, ["b.txt"])
    assert Recordings(tmp_path).fingerprint() == found[-1]
    touch(tmp_path, ["b.wav"])
    found.append(Recordings(tmp_path).fingerprint())
    assert len(set(found)) == 4


def test_a_list_of_names_has_a_count_of_the_others():
    assert listing(["a", "b"], 2) == "a, b"
    assert listing(["a", "b"], 2, count=2) == "a, b"
    assert listing(["a", "b"], 1, count=1200) == "a and 1199 more"
    assert listing(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Recordings(tmp_path / "nowhere")


def test_durations_are_read_from_the_header(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(4000), 8000)
    (tmp_path / "broken.wav").write_bytes(b"RIFF no wave")
    assert duration_seconds(tmp_path / "a.wav") == 0.5
    assert duration_seconds(tmp_path / "broken.wav") is None


def test_a_link_to_itself_is_skipped(tmp_path):
    touch(tmp_path, ["sub/a.wav"])
    (tmp_path / "sub" / "loop").symlink_to("loop")
    (tmp_path / "loop.wav").symlink_to(tmp_path / "loop.wav")
    assert walk(tmp_path) == ["sub/a.wav"]


def test_clips_shorter_than_ten_seconds_are_found_by_their_own_end(tmp_path):
    names = ["short_30.000_37.500.wav", "Yten_40_50.wav", "both_0_3.wav", "ms_10000-12346.wav"]
    touch(tmp_path, [*names, "both_0_10.wav"])
    ends = {("short", 30): 37.5, ("ten", 40): 44.0, ("both", 0): 3.0, ("gone", 0): 2.5, ("ms", 10): 12.3456}
    paths = find_segments(Recordings(tmp_path), list(ends), ends)
    assert {segment[0]: path.name for segment, path in paths.items()} == dict(
        zip(("short", "ten", "both", "ms"), names, strict=True)
    )
