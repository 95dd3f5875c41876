"""Clotho: file names with special characters, equal names in several splits, and the sources of the recordings."""

import csv
import html
import os
from pathlib import Path

import pytest
from dataset_folders import CLOTHO_NAMES, clotho, touch, write_csv

from modeling_supclap.datasets_scripts import load_builder, load_splits


def load(folder, **config):
    return load_builder("clotho", str(folder.parent / "cache"), data_dir=str(folder), **config)


def test_a_row_is_a_recording_with_its_five_captions(tmp_path):
    clotho(tmp_path / "data")
    splits = load(tmp_path / "data").as_dataset()
    for split, part in (("train", "development"), ("validation", "validation"), ("test", "evaluation")):
        for name, row in zip(CLOTHO_NAMES, splits[split], strict=True):
            assert row["clip_id"] == f"{part}/{name}"
            assert row["audio_path"] == str(tmp_path / "data" / part / name)
            assert row["captions"]["eng"] == [f"{part} {html.unescape(name)}, {turn}" for turn in range(5)]
            assert row["source"] == f"clotho:{part}/{name}"


def test_names_that_a_system_changed_are_found(tmp_path):
    made = clotho(tmp_path / "data")
    for path in made.audio:
        path.rename(path.with_name(html.unescape(path.name).replace(" .", ".").replace("#", "_").replace("'", "")))
    assert {split: len(rows) for split, rows in load(tmp_path / "data").as_dataset().items()} == made.counts


def test_equal_names_in_two_splits_are_ambiguous_in_one_folder(tmp_path):
    clotho(tmp_path / "data")
    flat = tmp_path / "flat"
    touch(flat, [*CLOTHO_NAMES, "only.wav"])
    table = tmp_path / "data" / "clotho_captions_evaluation.csv"
    table.write_text(table.read_text("utf-8") + "only.wav,A,B,C,D,E\n", "utf-8")
    builder = load(tmp_path / "data", audio_dir=str(flat))
    assert {split: rows["clip_id"] for split, rows in builder.as_dataset().items()} == {
        "test": ["evaluation/only.wav"]
    }
    assert len(builder.report()["left_out"]["one file for several clips"]) == 15


def test_source_and_license_are_read_from_the_metadata(tmp_path):
    clotho(tmp_path / "data")
    url = "http://creativecommons.org/licenses/by/3.0/"
    columns = ["file_name", "keywords", "sound_id", "sound_link", "start_end_samples", "manufacturer", "license"]
    for part, first in (("development", 10), ("evaluation", 11)):
        lines = [
            [name, "é", f"{first + index} ", "", "", "", f"{url} "] for index, name in enumerate(CLOTHO_NAMES[:2])
        ]
        lines.append([CLOTHO_NAMES[2], "", "Not found", "", "", "", "Not found"])
        path = write_csv(tmp_path / "data" / f"clotho_metadata_{part}.csv", [columns, *lines])
        path.write_bytes(path.read_text("utf-8").encode("cp1252"))
    builder = load(tmp_path / "data")
    splits = builder.as_dataset()
    assert splits["test"]["source"][:3] == ["freesound:11", "freesound:12", f"clotho:evaluation/{CLOTHO_NAMES[2]}"]
    assert splits["test"]["license"][:3] == [url, url, "Creative Commons, clip by clip"]
    assert builder.report()["left_out"] == {"source in another split": [f"development/{CLOTHO_NAMES[1]}"]}


def test_columns_of_the_tables_are_required(tmp_path):
    clotho(tmp_path / "data")
    path = write_csv(tmp_path / "data" / "clotho_metadata_evaluation.csv", [["keywords"], ["rain"]])
    with pytest.raises(ValueError, match=r"_evaluation\.csv lacks the columns \['file_name', 'license', 'sound_id'\]"):
        load(tmp_path / "data")
    path.unlink()
    write_csv(tmp_path / "data" / "clotho_captions_evaluation.csv", [["caption_1"], ["rain"]])
    with pytest.raises(ValueError, match=r"_evaluation\.csv lacks the columns \['file_name'\]"):
        load(tmp_path / "data")


def test_audio_may_be_in_subfolders_and_one_split_is_enough(tmp_path):
    clotho(tmp_path / "data")
    (tmp_path / "data" / "evaluation").rename(tmp_path / "data" / "clotho_audio_evaluation")
    (tmp_path / "data" / "clotho_captions_development.csv").unlink()
    splits = load(tmp_path / "data").as_dataset()
    assert {split: len(rows) for split, rows in splits.items()} == {"validation": 5, "test": 5}


@pytest.mark.skipif("SUPCLAP_DATA" not in os.environ, reason="set SUPCLAP_DATA to a folder with clotho/")
def test_the_real_tables_have_their_published_numbers_of_clips(tmp_path):
    folder = Path(os.environ["SUPCLAP_DATA"], "clotho")
    for part in ("development", "validation", "evaluation"):
        with (folder / f"clotho_captions_{part}.csv").open(newline="", encoding="utf-8") as file:
            touch(tmp_path / "audio" / part, [html.unescape(line["file_name"]) for line in csv.DictReader(file)])
    splits = load_splits("clotho", str(tmp_path), data_dir=str(folder), audio_dir=str(tmp_path / "audio"))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 3839, "validation": 1045, "test": 1045}
    assert {len(row["captions"]["eng"]) for rows in splits.values() for row in rows} == {5}
