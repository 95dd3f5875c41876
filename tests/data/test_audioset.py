"""AudioSet: comments and spaces in its tables, the names of its classes, and several labels per clip."""

import pytest
from dataset_folders import audioset, youtube_id

from modeling_supclap.datasets_scripts import load_builder


def load(folder, **config):
    return load_builder("audioset", str(folder.parent / "cache"), data_dir=str(folder), **config)


def test_class_names_become_labels_and_captions(tmp_path):
    audioset(tmp_path / "data")
    splits = load(tmp_path / "data").as_dataset()
    assert splits["train"][0]["labels"] == ["Child speech, kid speaking"]
    assert splits["train"][0]["captions"]["eng"][1] == "This is the sound of child speech, kid speaking."
    row = splits["train"][1]
    assert row["clip_id"] == f"{youtube_id(11)}_10"
    assert row["labels"] == ["Dog", "Bark"]
    assert row["captions"]["eng"][1] == "This is the sound of dog and bark."
    assert (row["source"], row["license"]) == (f"youtube:{youtube_id(11)}", "unknown (YouTube)")
    assert splits["test"]["clip_id"] == [f"{youtube_id(number)}_0" for number in range(3)]


def test_a_shorter_clip_is_found_by_its_own_end(tmp_path):
    made = audioset(tmp_path / "data")
    table = tmp_path / "data" / "eval_segments.csv"
    lines = [line for line in table.read_text().splitlines() if "created" not in line]
    lines[3] = lines[3].replace(" 10.000", " 7.500").replace(', "', ', ", ')
    table.write_text("\n".join(lines))
    (path,) = [path for path in made.audio if path.stem == f"Y{youtube_id(1)}"]
    path.rename(path.with_stem(f"{youtube_id(1)}_0.000_7.500"))
    rows = load(tmp_path / "data").as_dataset()["test"]
    assert rows["clip_id"] == [f"{youtube_id(number)}_0" for number in range(3)]
    assert rows["labels"] == [["Dog"], ["Dog", "Bark"], ["Dog"]]


def test_a_bad_line_is_named(tmp_path):
    audioset(tmp_path / "data")
    table = tmp_path / "data" / "eval_segments.csv"
    good = table.read_text()
    for old, new, message in (
        ("/m/01", "/m/09", r"eval_segments\.csv, line 5.*'/m/09'"),
        (" 0.000", " 0.500", r"line 4.*start_seconds.*'0\.500'"),
    ):
        table.write_text(good.replace(old, new))
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "data")


def test_columns_of_the_classes_are_required(tmp_path):
    audioset(tmp_path / "data")
    (tmp_path / "data" / "class_labels_indices.csv").write_text("index,name\n0,Dog\n")
    with pytest.raises(ValueError, match=r"indices\.csv lacks the columns \['display_name', 'mid'\]"):
        load(tmp_path / "data")


def test_the_class_names_are_required(tmp_path):
    audioset(tmp_path / "data")
    (tmp_path / "data" / "class_labels_indices.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks class_labels_indices\.csv"):
        load(tmp_path / "data")


def test_a_table_of_clips_is_required(tmp_path):
    audioset(tmp_path / "data")
    for table in (tmp_path / "data").rglob("*_segments.csv"):
        table.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks balanced_train_segments\.csv, eval_segments\.csv;"):
        load(tmp_path / "data")
