"""UrbanSound8K: folds, recordings and captions in eight languages."""

import pytest
from dataset_folders import urbansound8k

from modeling_supclap.datasets_scripts import load_builder
from modeling_supclap.datasets_scripts.builders.captions import label_phrases, render_captions
from modeling_supclap.languages import LANGUAGES


def load(folder, **config):
    return load_builder("urbansound8k", str(folder.parent / "cache"), data_dir=str(folder), **config)


def test_a_row_contains_the_values_of_its_line(tmp_path):
    urbansound8k(tmp_path / "data")
    rows = load(tmp_path / "data").as_dataset()["test"]
    (row,) = [row for row in rows if row["clip_id"] == "1011-1-0-1"]
    assert row["labels"] == ["car_horn"]
    assert row["events"] == [{"label": "car_horn", "onset_seconds": 0.0, "offset_seconds": 1.25}]
    assert row["source"] == "freesound:1011"
    assert row["license"] == "CC BY-NC 3.0"
    assert row["audio_path"].endswith("audio/fold1/1011-1-0-1.wav")
    assert row["captions"] == render_captions(label_phrases("urbansound8k")["car_horn"], LANGUAGES)


@pytest.mark.parametrize("test_fold", [1, 3])
def test_folds_and_recordings_are_kept_apart(tmp_path, test_fold):
    made = urbansound8k(tmp_path / "data")
    splits = load(tmp_path / "data", test_fold=test_fold).as_dataset()
    assert {split: len(rows) for split, rows in splits.items()} == made.counts
    assert {path.split("/")[-2] for path in splits["test"]["audio_path"]} == {f"fold{test_fold}"}
    sources = {split: set(rows["source"]) for split, rows in splits.items()}
    assert len(set().union(*sources.values())) == sum(map(len, sources.values())) == 12
    assert {label for (label,) in splits["validation"]["labels"]} == {"air_conditioner", "car_horn"}


def test_a_recording_of_the_test_fold_is_not_trained_on(tmp_path):
    made = urbansound8k(tmp_path / "data")
    made.table.write_text(made.table.read_text().replace("2000-0-0-1.wav,2000", "2000-0-0-1.wav,1000"))
    builder = load(tmp_path / "data")
    assert builder.report()["left_out"] == {"source in another split": ["2000-0-0-1"]}
    assert sum(map(len, builder.as_dataset().values())) == 23
    left_out = load(tmp_path / "data", test_fold=2).report()["left_out"]
    assert left_out == {"source in another split": ["1000-0-0-0", "1000-0-0-1"]}  # in the order of the table


def test_lengths_have_the_precision_of_the_table(tmp_path):
    made = urbansound8k(tmp_path / "data")
    made.table.write_text(made.table.read_text().replace("0.5,1.75", "0.1,0.4").replace("0.0,1.25", "0,0"))
    rows = load(tmp_path / "data").as_dataset()["test"]
    lengths = [[event["offset_seconds"] for event in events] for events in rows["events"]]
    assert lengths == [[], [0.3]] * 4


def test_a_start_that_is_not_a_number_is_rejected(tmp_path):
    made = urbansound8k(tmp_path / "data")
    made.table.write_text(made.table.read_text().replace("0.5,1.75", "half,1.75"))
    with pytest.raises(ValueError, match=r"UrbanSound8K\.csv.*line 3"):
        load(tmp_path / "data")
