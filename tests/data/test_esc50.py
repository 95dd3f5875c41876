"""ESC-50 and ESC-10 folders, and their splits."""

import itertools
import os

import numpy as np
import pytest
import soundfile
from recordings import ESC50Clip, write_esc50
from valid_rows import validate_row

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.builders.captions import label_phrases
from modeling_supclap.languages import LANGUAGES

CLASSES = {"dog": 0, "rain": 10, "engine": 44}
ESC10_CLASSES = ("dog", "rain")
SAMPLES = np.sin(np.arange(1600) / 10)


def make_folder(folder, classes=CLASSES, folds=(1, 2, 3), sources=4):
    """Write a tiny ESC-50 with `sources` recordings per fold and class; the first has two takes, and lengths differ."""
    clips = []
    for fold, label, number in itertools.product(folds, classes, range(sources)):
        source = 1000 * fold + 10 * CLASSES[label] + number
        for take in "AB"[: 2 if number == 0 else 1]:
            stem = f"{fold}-{source}-{take}-{CLASSES[label]}"
            samples = SAMPLES[: 800 + 100 * number] * (1 - len(clips) / 100)  # no two are equal
            clips.append(ESC50Clip(stem, fold, label, source, samples, label in ESC10_CLASSES))
    return write_esc50(folder, clips, 8000)


def load(folder, **config):
    return load_splits("esc50", cache_dir=str(folder.parent / "cache"), data_dir=str(folder), **config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("made") / "ESC-50")


@pytest.fixture(scope="module")
def splits(folder):
    return load(folder, test_fold=2, validation_fraction=0.25)


def test_rows_contain_the_values_of_the_csv_and_the_audio(folder, splits):
    phrases = label_phrases("esc50")
    for rows in splits.values():
        for row in rows:
            validate_row(row)
            _, source, _, target = row["clip_id"].split("-")
            (label,) = row["labels"]
            assert CLASSES[label] == int(target)
            assert row["source"] == f"freesound:{source}"
            assert row["audio_path"] == str(folder / "audio" / f"{row['clip_id']}.wav")
            duration_seconds = (800 + 100 * (int(source) % 10)) / 8000
            assert row["events"] == [{"label": label, "onset_seconds": 0.0, "offset_seconds": duration_seconds}]
            assert row["license"] == "CC BY-NC 3.0"
            for language in LANGUAGES:
                assert len(row["captions"][language]) >= 4
                core = phrases[label][language][1:]
                assert all(core in caption for caption in row["captions"][language])


def test_esc10_has_the_freer_license(tmp_path):
    splits = load(make_folder(tmp_path / "ESC-10", classes=ESC10_CLASSES, sources=2))
    assert {license for rows in splits.values() for license in rows["license"]} == {"CC BY 3.0"}


@pytest.mark.parametrize("content", [b"not audio", b""])
def test_a_recording_that_nothing_reads_keeps_its_row_for_on_bad_audio_to_judge(tmp_path, content):
    folder = make_folder(tmp_path / "ESC-50")
    (folder / "audio" / "1-1000-A-0.wav").write_bytes(content)
    (row,) = [row for row in load(folder)["test"] if row["clip_id"] == "1-1000-A-0"]
    assert row["events"] == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("src_file", "freesound_id", "'src_file'"),
        ("1-1000-A-0.wav,1,", "1-1000-A-0.wav,one,", r"esc50\.csv.*line 2.*fold.*'one'"),
        (",engine,", ",motor,", r"unknown classes \['motor'\]; the classes of ESC-50 are airplane, .*, wind$"),
        (",0,", ",0,my ", r"unknown classes \['my dog', 'my engine', 'my rain'\]"),
    ],
)
def test_a_bad_csv_is_refused(tmp_path, old, new, message):
    folder = make_folder(tmp_path / "ESC-50", folds=(1, 2), sources=2)
    path = folder / "meta" / "esc50.csv"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("validation_fraction", 1.0),
        ("validation_fraction", -0.1),
        ("test_fraction", 0.0),
        ("test_fraction", 1.0),
        ("seed", -1),
    ],
)
def test_a_fraction_is_less_than_all(folder, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
        load(folder, **{name: value})


def test_a_changed_folder_is_read_again(tmp_path):
    folder = make_folder(tmp_path / "ESC-50", sources=2)
    before = load(folder)["train"]
    soundfile.write(before[0]["audio_path"], SAMPLES, 8000)
    after = load(folder)["train"]
    assert before[0]["events"][0]["offset_seconds"] < after[0]["events"][0]["offset_seconds"] == 0.2


@pytest.mark.skipif("SUPCLAP_ESC10" not in os.environ, reason="set SUPCLAP_ESC10 to a folder of ESC-10 to read it")
def test_real_esc10(tmp_path):
    splits = load_splits("esc50", cache_dir=str(tmp_path), data_dir=os.environ["SUPCLAP_ESC10"])
    labels = {name: {row["labels"][0] for row in rows} for name, rows in splits.items()}
    assert len(labels["train"]) == 10
    assert labels["train"] == labels["validation"] == labels["test"]
    for rows in splits.values():
        assert {row["license"] for row in rows} == {"CC BY 3.0"}
        for row in rows:
            samples, sampling_rate_hz = soundfile.read(row["audio_path"])
            assert row["events"][0]["offset_seconds"] == len(samples) / sampling_rate_hz
