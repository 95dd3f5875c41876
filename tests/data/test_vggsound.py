"""VGGSound: the table without a header, and captions from the labels."""

import pytest
from dataset_folders import vggsound, youtube_id

from modeling_supclap.datasets_scripts import load_builder


def load(folder, **config):
    return load_builder("vggsound", str(folder.parent / "cache"), data_dir=str(folder), **config)


def test_labels_become_captions(tmp_path):
    vggsound(tmp_path / "data")
    splits = load(tmp_path / "data").as_dataset()
    row = splits["train"][1]
    assert row["clip_id"] == f"{youtube_id(1)}_10"
    assert row["labels"] == ["cap gun, shooting"]
    assert row["captions"]["eng"] == [
        "Cap gun, shooting",
        "This is the sound of cap gun, shooting.",
        "You can hear cap gun, shooting.",
        "A recording of cap gun, shooting.",
    ]
    assert row["source"] == f"youtube:{youtube_id(1)}"
    assert row["events"] == []


def test_a_header_that_somebody_added_is_passed_over(tmp_path):
    made = vggsound(tmp_path / "data")
    made.table.write_text("youtube_id,start,label, Split \n" + made.table.read_text().replace("train\n", "train \n"))
    assert {split: len(rows) for split, rows in load(tmp_path / "data").as_dataset().items()} == made.counts
    made.table.write_text(made.table.read_text() + "youtube_id,start,label,split\n")
    with pytest.raises(ValueError, match=r"line 13: the split is 'split'"):
        load(tmp_path / "data")


def test_a_line_that_comes_twice_is_one_clip_of_its_video(tmp_path):
    made = vggsound(tmp_path / "data", naming="{id}.wav")
    lines = made.table.read_text().splitlines()
    made.table.write_text("\n".join([*lines, lines[2].replace("people eating noodle", " ")]))
    builder = load(tmp_path / "data")
    assert {split: len(rows) for split, rows in builder.as_dataset().items()} == made.counts
    assert builder.report() == {"missing": [], "left_out": {"duplicate": [f"{youtube_id(2)}_20"]}}
    made.table.write_text("\n".join([lines[2].replace("people eating noodle", " "), *lines[3:]]))
    assert load(tmp_path / "data").report()["left_out"] == {"empty caption": [f"{youtube_id(2)}_20"]}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [(",test", ",val", r"vggsound\.csv.*line 9.*'val'"), (",20,", ",x,", "line 3.*start_seconds.*'x'")],
)
def test_a_bad_line_is_named(tmp_path, old, new, message):
    made = vggsound(tmp_path / "data")
    made.table.write_text(made.table.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "data")


def test_validation_is_drawn_from_training_videos(tmp_path):
    made = vggsound(tmp_path / "data")
    splits = load(tmp_path / "data", num_validation=2).as_dataset()
    sources = {name: set(rows["source"]) for name, rows in splits.items()}
    assert len(sources["validation"]) == 2
    assert not sources["validation"] & sources["train"]
    assert len(splits["train"]) + len(splits["validation"]) == made.counts["train"]
    assert len(splits["test"]) == made.counts["test"]
    with pytest.raises(ValueError, match="validation"):
        load(tmp_path / "data", num_validation=99)
    with pytest.raises(ValueError, match="num_validation is -1"):
        load(tmp_path / "data", num_validation=-1)
