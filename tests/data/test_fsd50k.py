"""FSD50K: several labels per clip, the three splits, captions from the labels, and the licence of each clip."""

import pytest
from dataset_folders import fsd50k

from modeling_supclap.datasets_scripts import load_builder


def load(folder, **config):
    return load_builder("fsd50k", str(folder.parent / "cache"), data_dir=str(folder), **config)


def test_labels_captions_sources_and_licences(tmp_path):
    fsd50k(tmp_path / "data")
    splits = load(tmp_path / "data").as_dataset()
    row = splits["train"][1]
    assert row["clip_id"] == "1"
    assert row["labels"] == ["Acoustic_guitar", "Guitar"]
    assert row["captions"]["eng"] == [
        "Acoustic guitar and guitar",
        "This is the sound of acoustic guitar and guitar.",
        "You can hear acoustic guitar and guitar.",
        "A recording of acoustic guitar and guitar.",
    ]
    assert (row["source"], row["license"]) == ("freesound:1", "CC0")
    assert splits["test"][2]["labels"] == ["Bark", "Dog", "Animal"]
    assert splits["test"][2]["captions"]["eng"][0] == "Bark, dog and animal"
    assert splits["test"][2]["audio_path"].endswith("FSD50K.eval_audio/102.wav")
    assert splits["validation"]["clip_id"] == ["6", "7"]
    licenses = {split: rows["license"][1:3] for split, rows in splits.items()}
    unknown = "unknown (Freesound)"
    assert licenses == {"train": ["CC0", unknown], "validation": [unknown], "test": ["CC BY", unknown]}


def test_one_part_is_enough_and_labels_may_have_space_or_be_missing(tmp_path):
    made = fsd50k(tmp_path / "data")
    for path in (tmp_path / "data" / "FSD50K.metadata").iterdir():
        path.unlink()
    made.table.unlink()
    made.audio[-1].unlink()
    (made.table.parent / "eval.csv").write_text('fname,labels\n100,"Bark, Dog ,,Animal"\n101,","\n102,Speech\n')
    builder = load(tmp_path / "data")
    (row,) = builder.as_dataset()["test"]
    assert (row["labels"], row["license"]) == (["Bark", "Dog", "Animal"], "unknown (Freesound)")
    assert builder.report() == {"missing": ["102"], "left_out": {"empty caption": ["101"]}}
    assert builder.labels == {"Bark", "Dog", "Animal", "Speech"}  # of all lines


def test_an_unknown_split_is_named(tmp_path):
    made = fsd50k(tmp_path / "data")
    made.table.write_text(made.table.read_text().replace(",val", ",test"))
    with pytest.raises(ValueError, match=r"dev\.csv, line 8.*'test'"):
        load(tmp_path / "data")
    made.table.write_text("mids\n/m/0\n")
    with pytest.raises(ValueError, match=r"dev\.csv lacks the columns \['fname', 'labels', 'split'\]"):
        load(tmp_path / "data")
    made.table.rename(made.table.with_name("eval.csv"))
    with pytest.raises(ValueError, match=r"eval\.csv lacks the columns \['fname', 'labels'\]"):
        load(tmp_path / "data")
