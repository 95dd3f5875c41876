"""AudioCaps 1.0 and 2.0, with the audio in several layouts."""

import csv
import os
from pathlib import Path

import pytest
from dataset_folders import audiocaps, touch, write_csv, youtube_id

from modeling_supclap.datasets_scripts import load_builder, load_splits

HEADER = ["audiocap_id", "youtube_id", "start_time", "caption"]


def load(folder, **config):
    return load_builder("audiocaps", str(folder.parent / "cache"), data_dir=str(folder), **config)


def test_train_has_one_caption_a_clip_and_the_others_five(tmp_path):
    splits = load(Path(audiocaps(tmp_path / "data").config["data_dir"])).as_dataset()
    assert {split: {len(row["captions"]["eng"]) for row in rows} for split, rows in splits.items()} == {
        "train": {1},
        "validation": {5},
        "test": {5},
    }
    row = splits["test"][0]
    assert row["clip_id"] == f"{youtube_id(9)}_30"
    assert row["source"] == f"youtube:{youtube_id(9)}"
    assert row["captions"]["eng"] == [f"A dog, test 9 barks “là” {turn}" for turn in range(5)]


def test_files_may_be_named_after_the_captions(tmp_path):
    made = audiocaps(tmp_path / "data")
    for number, path in enumerate(made.audio, 1):
        path.rename(path.with_stem(str(10 * number + (3 if number > 6 else 0))))
    assert {split: len(rows) for split, rows in load(tmp_path / "data").as_dataset().items()} == made.counts
    touch(tmp_path / "data", [f"Y{youtube_id(1)}.wav"])
    builder = load(tmp_path / "data")
    assert builder.as_dataset()["train"]["clip_id"] == [f"{youtube_id(1)}_30"]
    assert len(builder.report()["missing"]) == 9


def test_the_same_text_twice_is_two_captions_and_the_same_line_twice_is_one(tmp_path):
    lines = [
        [1, youtube_id(1), 30, "A dog barks"],
        [2, youtube_id(1), "30.0", "A dog barks"],
        [1, youtube_id(1), 30, "?"],
    ]
    write_csv(tmp_path / "data" / "val.csv", [HEADER, *lines])
    touch(tmp_path / "data", [f"{youtube_id(1)}.wav"])
    builder = load(tmp_path / "data")
    (row,) = builder.as_dataset()["validation"]
    assert row["captions"]["eng"] == ["A dog barks"] * 2
    assert builder.report()["left_out"] == {"duplicate": [f"{youtube_id(1)}_30"]}


def test_two_clips_of_a_video_are_two_rows_of_one_source(tmp_path):
    lines = [[1, youtube_id(1), 30, "A"], [2, youtube_id(1), 60, "B"]]
    write_csv(tmp_path / "data" / "train.csv", [HEADER, *lines])
    touch(tmp_path / "data", [f"{youtube_id(1)}_{start}.wav" for start in (30, 60)])
    rows = load(tmp_path / "data").as_dataset()["train"]
    assert rows["clip_id"] == [f"{youtube_id(1)}_30", f"{youtube_id(1)}_60"]
    assert set(rows["source"]) == {f"youtube:{youtube_id(1)}"}


def test_a_clip_in_two_splits_is_kept_in_the_later_one(tmp_path):
    for split, numbers in (("train", (1, 2)), ("test", (2,))):
        lines = [[number, youtube_id(number), 30, f"{split} {number}"] for number in numbers]
        write_csv(tmp_path / "data" / f"{split}.csv", [HEADER, *lines])
    touch(tmp_path / "data", [f"{youtube_id(number)}_30.wav" for number in (1, 2)])
    builder = load(tmp_path / "data")
    captions = {split: [row["captions"]["eng"] for row in rows] for split, rows in builder.as_dataset().items()}
    assert captions == {"train": [["train 1"]], "test": [["test 2"]]}
    assert builder.report()["left_out"] == {"source in another split": [f"{youtube_id(2)}_30"]}


def test_cells_may_have_space_around_them(tmp_path):
    write_csv(tmp_path / "data" / "train.csv", [HEADER, ["1 ", f"{youtube_id(1)} ", "30", "A"], ["1", "x", "5", "B"]])
    touch(tmp_path / "data", [f"{youtube_id(1)}_30.wav"])
    builder = load(tmp_path / "data")
    assert builder.as_dataset()["train"]["clip_id"] == [f"{youtube_id(1)}_30"]
    assert builder.report()["left_out"] == {"duplicate": ["x_5"], "empty caption": ["x_5"]}


def test_one_split_is_enough_but_two_releases_are_an_error(tmp_path):
    audiocaps(tmp_path / "data")
    for name in ("train.csv", "val.csv"):
        (tmp_path / "data" / name).unlink()
    assert list(load(tmp_path / "data").as_dataset()) == ["test"]
    for release in ("dataset", "dataset2.0"):
        audiocaps(tmp_path / "clone" / release)
    with pytest.raises(ValueError, match=r"dataset/train\.csv, dataset2\.0/train\.csv"):
        load(tmp_path / "clone")
    clone = load(tmp_path / "clone" / "dataset2.0", audio_dir=str(tmp_path / "clone" / "dataset"))
    assert len(clone.as_dataset()["train"]) == 6


def test_a_start_that_is_not_a_whole_number_is_named(tmp_path):
    write_csv(tmp_path / "data" / "train.csv", [HEADER, [1, youtube_id(1), "0:30", "A"]])
    with pytest.raises(ValueError, match=r"train\.csv.*line 2.*start_time.*'0:30'"):
        load(tmp_path / "data")


@pytest.mark.skipif("SUPCLAP_DATA" not in os.environ, reason="set SUPCLAP_DATA to a folder with audiocaps/train.csv")
def test_the_real_tables_have_their_published_numbers_of_clips(tmp_path):
    folder = Path(os.environ["SUPCLAP_DATA"], "audiocaps")
    for split in ("train", "val", "test"):
        with (folder / f"{split}.csv").open(newline="", encoding="utf-8") as file:
            touch(tmp_path / "audio", [f"Y{line['youtube_id']}.wav" for line in csv.DictReader(file)])
    splits = load_splits("audiocaps", str(tmp_path), data_dir=str(folder), audio_dir=str(tmp_path / "audio"))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 49838, "validation": 495, "test": 975}
    assert {len(row["captions"]["eng"]) for row in splits["test"]} == {5}
    assert {len(row["captions"]["eng"]) for row in splits["train"].take(1000)} == {1}
