"""MACS: captions of several annotators, scenes as labels, and places as sources."""

import pytest
from dataset_folders import macs

from modeling_supclap.datasets_scripts import load_builder, load_splits


def load(folder, **config):
    return load_builder("macs", str(folder.parent / "cache"), data_dir=str(folder), **config)


def test_all_clips_train_with_the_captions_of_all_annotators(tmp_path):
    macs(tmp_path / "data")
    splits = load(tmp_path / "data").as_dataset()
    assert list(splits) == ["train"]
    assert len(splits["train"]) == 12
    assert splits["train"]["clip_id"][:2] == ["airport-lisbon-0-0-a", "airport-lisbon-0-1-a"]
    row = splits["train"][1]
    assert (row["clip_id"], row["labels"]) == ("airport-lisbon-0-1-a", ["airport"])
    assert row["source"] == "tau2019:airport-lisbon-0"
    assert row["captions"]["eng"] == [f"People talk at the airport 0 « 1.{turn} »" for turn in range(3)]
    assert row["license"] == "academic use only"


def test_places_are_held_out(tmp_path):
    macs(tmp_path / "data")
    splits = load_splits(
        "macs", str(tmp_path / "cache"), data_dir=str(tmp_path / "data"), num_test=2, num_validation=1
    )
    sources = {name: set(rows["source"]) for name, rows in splits.items()}
    assert {name: len(places) for name, places in sources.items()} == {"train": 3, "validation": 1, "test": 2}
    assert len(set.union(*sources.values())) == 6
    with pytest.raises(ValueError, match=r"'test': 7"):
        load(tmp_path / "data", num_test=7)
    with pytest.raises(ValueError, match="num_validation is -1"):
        load(tmp_path / "data", num_validation=-1)


def test_names_and_captions_of_other_forms_are_read(tmp_path):
    made = macs(tmp_path / "data")
    sentences = "annotations: [{sentence: A beep}, {sentence: }, {sentence: 440}]"
    made.table.write_text(f"files: [{{filename: beep.wav, {sentences}}}, {{filename: park-oslo.wav, {sentences}}}]")
    for stem in ("beep", "park-oslo"):
        made.audio[0].with_stem(stem).touch()
    rows = load(tmp_path / "data").as_dataset()["train"]
    assert [(row["labels"], row["source"]) for row in rows] == [
        (["beep"], "tau2019:beep--"),
        (["park"], "tau2019:park-oslo-"),
    ]
    assert rows[0]["captions"]["eng"] == ["A beep", "440"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("files: [", r"MACS\.yaml is not YAML"),
        ("- a", 'no list "files"'),
        ("files: {a: 1}", 'no list "files"'),
        ("files: [{filename: a.wav}]", "entry 0 "),
        ("files: [{annotations: []}]", "entry 0 "),
        ("files: [{filename: 7, annotations: []}]", "entry 0 "),
        ("files: [{filename: a.wav, annotations: []}, {filename: b.wav, annotations: [{tags: []}]}]", "entry 1 "),
    ],
)
def test_another_file_is_refused(tmp_path, text, message):
    made = macs(tmp_path / "data")
    made.table.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "data")
