"""Folders of recordings with captions, in the layouts that users have."""

import itertools
import json
import shutil
import time

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
from dataset_folders import touch, write_csv

from modeling_supclap.datasets_scripts import load_builder, load_splits
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.builders import columns

NAMES = [f"{number}.wav" for number in range(10)]


@pytest.fixture
def folder(tmp_path):
    """Folder with ten recordings and no metadata."""
    touch(tmp_path / "data", NAMES)
    return tmp_path / "data"


@pytest.fixture
def load(tmp_path):
    return lambda **config: load_builder(
        "audio_folder", str(tmp_path / "cache"), **{"data_dir": str(tmp_path / "data"), **config}
    )


def rows_of(builder):
    """Return all rows as `{file name: row}`."""
    rows = [row for rows in builder.as_dataset().values() for row in rows]
    return {row["audio_path"].rsplit("/", 1)[-1]: row for row in rows}


def sizes_of(builder):
    return {split: len(rows) for split, rows in builder.as_dataset().items()}


def write_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8")


def test_a_table_of_pairs_becomes_three_splits(folder, load):
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *([name, f"Sound, {name}"] for name in NAMES)])
    builder = load()
    assert sizes_of(builder) == {"train": 8, "validation": 1, "test": 1}
    for name, row in rows_of(builder).items():
        assert row == {
            "clip_id": name,
            "audio_path": str(folder / name),
            "captions": {"eng": [f"Sound, {name}"], **{code: [] for code in list(row["captions"])[1:]}},
            "labels": [],
            "events": [],
            "source": f"file:{name}",
            "license": "",
        }


@pytest.mark.parametrize(
    ("columns", "values", "captions"),
    [
        (["caption"], ["A"], {"eng": ["A"]}),
        (["captions"], ['["A", "B"]'], {"eng": ["A", "B"]}),
        (["captions"], ['{"eng": "A", "fra": ["B", "C"]}'], {"eng": ["A"], "fra": ["B", "C"]}),
        (["captions"], ["[sic] A"], {"eng": ["[sic] A"]}),
        (["captions"], ["['A', \"B's\"]"], {"eng": ["A", "B's"]}),  # as pandas writes a list
        # as numpy writes one
        (["captions"], ["['A' \"B's\"\n 'it\\'s C']"], {"eng": ["A", "B's", "it's C"]}),
        (["caption_1", "caption_2", "caption_3"], ["A", "B", ""], {"eng": ["A", "B"]}),
        (
            ["caption", "caption_fra", "captions_deu"],
            ["A", "B", '["C", "D"]'],
            {"eng": ["A"], "fra": ["B"], "deu": ["C", "D"]},
        ),
    ],
)
def test_captions_come_in_many_forms(folder, load, columns, values, captions):
    write_csv(folder / "metadata.csv", [["file_name", *columns], *([name, *values] for name in NAMES)])
    for row in rows_of(load()).values():
        assert {language: texts for language, texts in row["captions"].items() if texts} == captions


def test_json_lines_and_parquet_hold_the_same_as_objects(folder, load):
    records = [
        {
            "file_name": name,
            "captions": {"eng": ["A", None], "jpn": ["鳥"]},
            "labels": ["bird", "wind"],
            "events": [{"label": "bird", "onset_seconds": 0, "offset_seconds": 1.5}],
            "source": f"field:{number // 2}",
            "license": "CC0-1.0",
            "clip_id": number,
            "split": "Val" if number < 2 else "train",
        }
        for number, name in enumerate(NAMES)
    ]
    write_jsonl(folder / "metadata.jsonl", records)
    builder = load()
    row = rows_of(builder)["3.wav"]
    assert sizes_of(builder) == {"train": 8, "validation": 2}
    assert (row["clip_id"], row["source"], row["license"], row["labels"]) == (
        "3",
        "field:1",
        "CC0-1.0",
        ["bird", "wind"],
    )
    assert row["events"] == [{"label": "bird", "onset_seconds": 0.0, "offset_seconds": 1.5}]
    assert (row["captions"]["eng"], row["captions"]["jpn"]) == (["A"], ["鳥"])
    expected = rows_of(builder)
    (folder / "metadata.jsonl").unlink()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "metadata.parquet")
    assert rows_of(load()) == expected


def test_several_lines_of_one_file_are_its_captions(folder, load):
    lines = [[name, text] for text in ("A", "B", "A") for name in NAMES]
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *lines])
    assert {tuple(row["captions"]["eng"]) for row in rows_of(load()).values()} == {("A", "B")}
    lines = [[name, "C", "a;b", "", "CC0"] for name in NAMES] + [[name, "D", "b;c", "tape", ""] for name in NAMES[:3]]
    write_csv(folder / "metadata.csv", [["file_name", "caption", "labels", "source", "license"], *lines])
    row = rows_of(load())["1.wav"]
    assert (row["captions"]["eng"], row["labels"]) == (["C", "D"], ["a", "b", "c"])
    assert (row["source"], row["license"]) == ("tape", "CC0")


def test_captions_with_the_same_index_are_translations(folder, load):
    lines = [("Rain", ""), ("A dog", "Un chien"), ("A dog", "Le chien"), ("A dog", "Un chien"), ("", "La pluie")]
    write_csv(
        folder / "metadata.csv", [["file_name", "caption_eng", "caption_fra"], *(["1.wav", *line] for line in lines)]
    )
    (row,) = rows_of(load(languages=["eng", "fra"], test_fraction=1.0, validation_fraction=0.0)).values()
    assert row["captions"]["eng"] == ["A dog", "A dog", "Rain"]
    assert row["captions"]["fra"] == ["Un chien", "Le chien", "La pluie"]


def test_reading_many_captions_of_one_file_takes_linear_time(folder, load):
    lines = [["1.wav", f"Caption {number}"] for number in range(20_000)]
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *lines])
    started = time.process_time()
    (texts,) = [row["captions"]["eng"] for row in rows_of(load(test_fraction=1.0, validation_fraction=0.0)).values()]
    assert texts == [text for _, text in lines]
    assert time.process_time() - started < 5


@pytest.mark.parametrize("name", ["metadata.tsv", "captions.csv", "METADATA.CSV", "captions.json"])
def test_tables_have_several_names_and_forms(folder, load, name):
    lines = [{"file_name": file, "caption": f"Sound; {file}"} for file in NAMES]
    if name.endswith(".json"):
        lines[3]["file_name"] = " 3.wav "
        lines[4]["file_name"] = 4  # an id
        (folder / name).write_text(json.dumps(lines))
    else:
        mark = "\t" if name.endswith(".tsv") else ";"
        text = "".join(f'{line["file_name"]}{mark}"{line["caption"]}"\n' for line in lines)
        (folder / name).write_bytes(f"file_name{mark}caption\n{text}".encode("utf-16"))
    found = {file: row["captions"]["eng"] for file, row in rows_of(load()).items()}
    assert found == {file: [f"Sound; {file}"] for file in NAMES}


@pytest.mark.parametrize("folders", [("",), ("train", "test")])
def test_parent_folders_of_absolute_paths_are_no_splits(folder, load, tmp_path, folders):
    lines = []
    for name, part in itertools.product(NAMES, folders):
        path = tmp_path / "dev" / part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, path)
        lines.append([str(path), name])
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *lines])
    sizes = {"train": 8, "validation": 1, "test": 1} if folders == ("",) else {"train": 10, "test": 10}
    assert sizes_of(load()) == sizes


def test_absolute_paths_may_contain_a_link(folder, load, tmp_path):
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    lines = [[str(tmp_path / "link" / name), "A"] for name in NAMES]
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *lines])
    builder = load()
    assert set(rows_of(builder)) == set(NAMES)
    assert {row["clip_id"] for row in rows_of(builder).values()} == set(NAMES)
    assert builder.report()["left_out"] == {}


def test_paths_may_be_absolute(folder, load, tmp_path):
    (other,) = touch(tmp_path / "elsewhere", ["other.wav"])
    names = [*(str(folder / name) for name in NAMES), str(other)]
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *([name, "A"] for name in names)])
    rows = rows_of(load())
    assert len(rows) == 11
    assert (rows["1.wav"]["clip_id"], rows["other.wav"]["audio_path"]) == ("1.wav", str(other))


def test_captions_in_other_languages_than_asked_for_are_named(folder, load):
    write_csv(folder / "metadata.csv", [["file_name", "caption_fra"], *([name, "Un son"] for name in NAMES)])
    with pytest.raises(ValueError, match=r"captions in \['fra'\], but languages is \['eng'\]"):
        load(languages="eng")
    write_csv(folder / "metadata.csv", [["file_name", "caption", "caption_fra"], *([name, "A", ""] for name in NAMES)])
    with pytest.raises(ValueError, match=r"captions in \['eng'\], but languages is \['fra', 'deu'\]"):
        load(languages=["fra", "deu"])  # where the column has no texts
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *([name, "nan"] for name in NAMES)])
    with pytest.raises(ValueError, match=r"no clips left in .*/data: \{'empty caption': 10\}"):
        load(languages=["fra"])


def test_a_folder_may_be_all_for_testing(folder, load):
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *([name, "A"] for name in NAMES[:2])])
    assert sizes_of(load(test_fraction=1.0, validation_fraction=0.0)) == {"test": 2}
    with pytest.raises(ValueError, match=r"\b2\b.*test_fraction"):
        load()
    assert sizes_of(load(test_fraction=0.5, validation_fraction=0.5)) == {"validation": 1, "test": 1}


@pytest.mark.parametrize(
    "names",
    [
        {"columns": {"file_name": "path", "caption": "text", "split": "wo"}},
        {"audio_column": "path", "caption_column": "text", "columns": {"split": "wo"}},
    ],
)
def test_columns_may_have_other_names(folder, load, names):
    write_csv(folder / "metadata.csv", [["path", "text", "wo"], *([name, "Ein Ton", "test"] for name in NAMES)])
    builder = load(**names, caption_language="deu", languages=["deu"])
    assert sizes_of(builder) == {"test": 10}
    assert rows_of(builder)["1.wav"]["captions"] == {"deu": ["Ein Ton"]}


def test_only_the_chosen_one_of_numbered_columns_is_read(folder, load):
    write_csv(
        folder / "metadata.csv", [["file_name", "caption_1", "caption_2"], *([name, "A", "B"] for name in NAMES)]
    )
    assert rows_of(load(caption_column="caption_2"))["1.wav"]["captions"]["eng"] == ["B"]


def test_captions_without_a_language_do_not_join_those_of_a_named_one(folder, load):
    lines = [["file_name", "Text", "caption_eng"], *([name, "Ein Ton", "A tone"] for name in NAMES)]
    write_csv(folder / "sounds.csv", lines)
    with pytest.raises(ValueError, match=r"\['Text', 'caption_eng'\] .*'eng'.*--caption_language"):
        load(caption_column="Text")
    options = {"languages": ["deu", "eng"], "validation_fraction": 0, "test_fraction": 0}
    for named in (
        {"caption_column": "Text", "caption_language": "deu"},
        {"caption_columns": ["deu=Text", "eng=caption_eng"]},
    ):
        captions = rows_of(load(**named, **options))["1.wav"]["captions"]
        assert captions == {"deu": ["Ein Ton"], "eng": ["A tone"]}
    with pytest.raises(ValueError, match=r"no column 'Titel'.*'Text'"):
        load(caption_columns=["deu=Titel"], **options)

    records = [{"file_name": name, "caption": "Ein Ton", "captions": {"eng": "A tone"}} for name in NAMES]
    write_jsonl(folder / "metadata.jsonl", records)
    with pytest.raises(ValueError, match=r"\['caption', 'captions'\] .*'eng'"):
        load()


def test_a_single_table_may_have_any_name(folder, load):
    write_csv(folder / "notes.csv", [["file_name", "caption"], *([name, f"sound {name}"] for name in NAMES)])
    assert rows_of(load())["3.wav"]["captions"]["eng"] == ["sound 3.wav"]
    (folder / "notes.txt").write_text("file_name,caption", encoding="utf-8")  # no table, if no column is named
    assert len(rows_of(load())) == 10
    (folder / "7.txt").write_text("a bell", encoding="utf-8")
    assert [row["captions"]["eng"] for row in rows_of(load(test_fraction=1)).values()] == [["a bell"]]
    (folder / "7.txt").unlink()
    write_csv(folder / "more/notes.csv", [["file_name", "caption"]])  # which of two tables?
    with pytest.raises(FileNotFoundError, match=r"only more/notes\.csv, notes\.csv, notes\.txt: save it as metadata"):
        load()
    (folder / "more/notes.csv").unlink()
    (folder / "notes.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"nor one table in the top folder.*only notes\.txt"):
        load()


def test_each_line_may_have_its_own_language(folder, load):
    lines = [[name, language, f"{language} {name}"] for name in NAMES for language in ("English", "fr")]
    write_csv(folder / "metadata.csv", [["file_name", "language", "caption"], *lines])
    for name, row in rows_of(load(languages=["eng", "fra", "deu"])).items():
        assert row["captions"] == {"eng": [f"English {name}"], "fra": [f"fr {name}"], "deu": []}
    assert rows_of(load(languages=["fra"]))["2.wav"]["captions"] == {"fra": ["fr 2.wav"]}
    one = rows_of(load(languages=["eng"], columns={"language": ""}))["2.wav"]
    assert one["captions"] == {"eng": ["English 2.wav", "fr 2.wav"]}


def test_a_table_of_other_columns_may_have_any_name_if_they_are_set(folder, load):
    lines = [["Nr", "Datei", "Text"], *([number, name, f"sound {name}"] for number, name in enumerate(NAMES))]
    text = "\n".join(";".join(map(str, line)) for line in lines)
    (folder / "Übersicht.csv").write_text(text, encoding="utf-8-sig")
    with pytest.raises(ValueError, match=r"Übersicht\.csv.*\['Nr', 'Datei', 'Text'\]"):
        load().as_dataset()
    rows = rows_of(load(audio_column="Datei", caption_column="Text"))
    assert {name: row["captions"]["eng"] for name, row in rows.items()} == {name: [f"sound {name}"] for name in NAMES}
    for second in ("Zweite.csv", "tabellen/Zweite.csv"):
        write_csv(folder / second, [["Nr"], [1]])
        if "/" in second:
            assert len(rows_of(load(columns={"file_name": "Datei"}, caption_columns=["eng=Text"]))) == 10
        else:
            with pytest.raises(FileNotFoundError, match=r"only Zweite\.csv, Übersicht\.csv"):
                load(audio_column="Datei", caption_column="Text")
        (folder / second).unlink()
    write_csv(folder / "Übersicht.csv", [["file_name", "Text"], *([name, "A"] for name in NAMES)])
    assert len(rows_of(load(caption_columns={"eng": "Text"}))) == 10


def test_any_language_can_be_requested(folder, load):
    write_csv(
        folder / "metadata.csv", [["file_name", "caption_ita", "caption_fra"], *([name, "A", "B"] for name in NAMES)]
    )
    assert rows_of(load(languages=["ita"]))["1.wav"]["captions"] == {"ita": ["A"]}
    with pytest.raises(ValueError, match=r"line 2.*caption_ita.*'ita'"):
        load()
    with pytest.raises(ValueError, match=r"caption_ita.*'ita'"):
        load(languages=["fra"])
    row = rows_of(load(languages=["fra"], caption_language="ita"))["1.wav"]
    assert row["captions"] == {"fra": ["B"]}


def test_the_languages_of_the_columns_determine_the_encoding(folder, load):
    polish = "dźwięk dzwonów na żółty dach"
    lines = ["file_name;opis;text", *(f"{name};{polish};bells" for name in NAMES)]
    (folder / "metadata.csv").write_bytes("\n".join(lines).encode("cp1250"))
    options = {"caption_columns": ["pol=opis", "eng=text"], "languages": ["eng"]}
    assert rows_of(load(**options))["1.wav"]["captions"] == {"eng": ["bells"]}
    row = rows_of(load(caption_column="opis", caption_language="pol", languages=["eng", "pol"]))["1.wav"]
    assert row["captions"] == {"eng": [], "pol": [polish]}
    with pytest.raises(ValueError, match=r"metadata\.csv is not UTF-8"):
        load(caption_column="text")


def test_sub_folders_are_splits_with_their_own_tables(tmp_path, load):
    for split, count in (("train", 3), ("DEV", 2), ("test", 1)):
        touch(tmp_path / "data" / split / "wav", NAMES[:count])
        lines = [[f"wav\\{name}", f"{split} {name}"] for name in NAMES[:count]]
        write_csv(tmp_path / "data" / split / "metadata.csv", [["file_name", "caption"], *lines])
    splits = load().as_dataset()
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 3, "validation": 2, "test": 1}
    assert splits["validation"]["clip_id"] == ["DEV/wav/0.wav", "DEV/wav/1.wav"]
    assert splits["test"][0]["captions"]["eng"] == ["test 0.wav"]


def test_a_missing_recording_is_not_taken_from_another_folder(tmp_path, load):
    touch(tmp_path / "data", ["train/1.wav", "train/2.wav", "test/1.flac"])
    lines = [["train/1.wav", "A"], ["train/2.wav", "B"], ["test/2.wav", "C"], ["./test/1.wav", "D"]]
    write_csv(tmp_path / "data" / "metadata.csv", [["file_name", "caption"], *lines])
    builder = load()
    assert builder.report()["missing"] == ["test/2.wav"]
    assert builder.as_dataset()["test"]["audio_path"] == [str(tmp_path / "data" / "test/1.flac")]


def test_captions_can_be_in_text_files_next_to_the_audio(folder, load):
    for name in NAMES[1:]:
        (folder / name).with_suffix(".txt").write_text(f"Sound {name}\n\nOr so\n", encoding="utf-8-sig")
    (folder / "v1.0").mkdir()
    for name in ("README.txt", "v1.0/README.txt", "notes.md", "notes.md.txt"):
        (folder / name).write_text("About this folder")
    touch(folder, ["0.txt"])  # empty
    builder = load()
    rows = rows_of(builder)
    assert set(rows) == set(NAMES[1:])
    assert rows["3.wav"]["captions"]["eng"] == ["Sound 3.wav", "Or so"]
    assert builder.report()["left_out"] == {"no caption": ["0.wav"]}
    (folder / "3.txt").write_text("Changed")
    assert rows_of(load())["3.wav"]["captions"]["eng"] == ["Changed"]
    (folder / "1.Table.1.selections.txt").write_text(RAVEN)
    (folder / "1.txt").unlink()
    rows = rows_of(load(languages=["fra"], caption_language="fra", caption_column="View"))
    assert rows["3.wav"]["captions"] == {"fra": ["Changed"]}  # without this column
    assert rows["1.wav"]["captions"] == {"fra": ["Spectrogram 1"]}


def test_the_column_split_of_a_table_counts_more_than_its_folder(tmp_path, load):
    touch(tmp_path / "data" / "train", NAMES)
    splits = ["train", "val", "test", "train", *["val"] * 6]
    table = [
        ["file_name", "caption", "split"],
        *([name, "A", split] for name, split in zip(NAMES, splits, strict=True)),
    ]
    write_csv(tmp_path / "data" / "train" / "metadata.csv", table)
    assert sizes_of(load()) == {"train": 2, "validation": 7, "test": 1}


def test_texts_of_recordings_named_like_splits_are_no_splits(tmp_path, load):
    names = ["dog", "train", "bird", "test"]
    touch(tmp_path / "data", [f"{name}.wav" for name in names])
    for name in names:
        (tmp_path / "data" / f"{name}.txt").write_text(f"A {name}")
    captions = {name: row["captions"]["eng"] for name, row in rows_of(load()).items()}
    assert captions == {f"{name}.wav": [f"A {name}"] for name in names}


def test_text_files_may_be_apart_from_the_recordings(folder, load, tmp_path):
    touch(tmp_path / "sounds", [f"day/{name}" for name in NAMES])
    for name in NAMES:
        (folder / "day").mkdir(exist_ok=True)
        (folder / "day" / name).with_suffix(".txt").write_text(f"Sound {name}")
    rows = rows_of(load(audio_dir=str(tmp_path / "sounds")))
    assert {row["clip_id"] for row in rows.values()} == {f"day/{name}" for name in NAMES}
    assert rows["3.wav"]["audio_path"] == str(tmp_path / "sounds" / "day" / "3.wav")


def test_sampling_depends_on_the_seed_and_keeps_recordings_together(folder, load):
    lines = [[name, "A", f"field:{number // 3}"] for number, name in enumerate(NAMES)]
    write_csv(folder / "metadata.csv", [["file_name", "caption", "source"], *lines])
    splits = load(validation_fraction=0.25, test_fraction=0.25).as_dataset()
    sources = {split: set(rows["source"]) for split, rows in splits.items()}
    assert {split: len(names) for split, names in sources.items()} == {"train": 2, "validation": 1, "test": 1}
    assert len(set().union(*sources.values())) == 4
    draws = {tuple(load(seed=seed).as_dataset()["test"]["source"]) for seed in range(6)}
    assert len(draws) > 1
    assert list(load(validation_fraction=0.0, test_fraction=0.0).as_dataset()) == ["train"]


def test_a_source_that_two_given_splits_share_is_kept_and_counted(folder, load, caplog):
    lines = []
    for number, name in enumerate(NAMES):
        lines.append([name, f"A {number}", "field:1" if number > 6 else name, "test" if number > 8 else "train"])
    write_csv(folder / "metadata.csv", [["file_name", "caption", "source", "split"], *lines])
    builder = load()
    assert sizes_of(builder) == {"train": 9, "test": 1}
    assert builder.report()["left_out"] == {}
    assert ["1 of 1 test clips share a recording or a source with train" in text for text in caplog.messages] == [True]


def test_parts_of_a_recording_may_be_in_several_splits_of_the_user(folder, load, caplog):
    lines = []
    for name in NAMES[:4]:
        soundfile.write(folder / name, np.arange(8000) / 8000 * (1 + int(name[0])) / 5, 1000)
        lines += [[name, start, start + 1, f"{name} {start}", "train" if start < 5 else "test"] for start in range(8)]
    write_csv(folder / "metadata.csv", [["file_name", "start", "end", "caption", "split"], *lines])
    assert sizes_of(load()) == {"train": 20, "test": 12}
    assert any("12 of 12 test clips share a recording or a source with train" in text for text in caplog.messages)


def test_copies_are_in_one_split(folder, load):
    for number, name in enumerate(NAMES):
        soundfile.write(folder / name, np.arange(800) / 900 * (1 - number / 20), 1000)  # of equal size
        shutil.copyfile(folder / name, folder / f"copy of {name}")
    lines = [[name, f"A {name}"] for name in NAMES] + [[f"copy of {name}", f"B {name}"] for name in NAMES]
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *lines])
    splits = load(validation_fraction=0.3, test_fraction=0.3).as_dataset()
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 8, "validation": 6, "test": 6}
    for rows in splits.values():
        names = {path.rsplit("/", 1)[-1].removeprefix("copy of ") for path in rows["audio_path"]}
        assert 2 * len(names) == len(rows)


def test_a_speaker_may_be_the_source(folder, load):
    lines = [[name, f"A {name}", f"speaker {number % 3}"] for number, name in enumerate(NAMES)]
    write_csv(folder / "metadata.csv", [["file_name", "caption", "who"], *lines])
    splits = load(source_column="who", validation_fraction=0.3, test_fraction=0.3).as_dataset()
    assert {split: len(set(rows["source"])) for split, rows in splits.items()} == dict.fromkeys(splits, 1)
    with pytest.raises(ValueError, match=r"'whom'.*'who'"):
        load(source_column="whom")


def test_one_speaker_is_tested_and_the_others_train(folder, load):
    """Splits of the table are not used then."""
    lines = [[name, f"A {name}", f"speaker {number % 3}", "train"] for number, name in enumerate(NAMES)]
    write_csv(folder / "metadata.csv", [["file_name", "caption", "who", "split"], *lines])
    for speaker in ("speaker 0", "speaker 2"):
        splits = load(source_column="who", test_group=speaker, validation_fraction=0.5, test_fraction=0.4).as_dataset()
        assert {split: len(set(rows["source"])) for split, rows in splits.items()} == dict.fromkeys(splits, 1)
        assert set(splits["test"]["source"]) == {speaker}
        assert sum(map(len, splits.values())) == len(NAMES)
    assert set(load(source_column="who", test_group="speaker 1", validation_fraction=0).as_dataset()) == {
        "train",
        "test",
    }
    with pytest.raises(ValueError, match="'speaker 3'; the sources are speaker 0, speaker 1"):
        load(source_column="who", test_group="speaker 3")


def test_captions_of_several_splits_are_counted(folder, load, caplog):
    lines = [[name, "A dog" if number in (0, 9) else f"A {number}"] for number, name in enumerate(NAMES)]
    write_csv(folder / "test.csv", [["file_name", "caption"], *lines[8:]])
    write_csv(folder / "train_metadata.csv", [["file_name", "caption"], *lines[:8]])
    assert sizes_of(load()) == {"train": 8, "test": 2}
    assert any("1 of 2 test clips share a caption with train" in text for text in caplog.messages)


@pytest.mark.parametrize("place", ["", "meta/"])
def test_each_split_may_have_its_table(folder, load, place, caplog):
    for split, names in (("train", NAMES[:7]), ("val", NAMES[7:8]), ("Test", NAMES[8:])):
        lines = [["../" * bool(place) + name, f"{split} {name}"] for name in names]
        write_csv(folder / f"{place}{split}.csv", [["file_name", "caption"], *lines])
    builder = load()
    assert sizes_of(builder) == {"train": 7, "validation": 1, "test": 2}
    assert builder.as_dataset()["test"]["clip_id"][:] == NAMES[8:]
    assert builder.report() == {"missing": [], "left_out": {}}
    touch(folder, [f"{place}train.tsv"])
    with pytest.raises(
        ValueError, match=rf"several tables of the split train in one folder: {place}train\.csv, {place}train\.tsv;"
    ):
        load()
    (folder / f"{place}train.tsv").unlink()
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *([name, "A"] for name in NAMES)])
    assert sizes_of(load()) == {"train": 8, "validation": 1, "test": 1}  # only this table
    assert f"only metadata.csv is read, not {place}Test.csv" in caplog.text


def test_recordings_are_found_by_other_spellings_of_their_paths(tmp_path, load, caplog):
    touch(tmp_path / "data", ["a/rain.wav", "a/Dog 1.flac", "b/rain.wav", "x/1.wav", "y/1.wav", "déjà.wav"])
    names = ["A/RAIN.WAV", "a\\dog%201.wav", "./b/../b/rain.wav", "C:\\Users\\me\\data\\x\\1.wav", "/home/me/1.wav"]
    names += ["https://host/data/y/1.wav?download=1", "de\u0301ja\u0300.wav"]
    lines = [[name, f"Sound {number}"] for number, name in enumerate(names)]
    write_csv(tmp_path / "data" / "metadata.csv", [["file_name", "caption"], *lines])
    builder = load(validation_fraction=0, test_fraction=0)
    found = {row["clip_id"]: row["captions"]["eng"][0] for row in builder.as_dataset()["train"]}
    assert found == {
        "a/rain.wav": "Sound 0", "a/Dog 1.flac": "Sound 1", "b/rain.wav": "Sound 2", "x/1.wav": "Sound 3",
        "y/1.wav": "Sound 5", "déjà.wav": "Sound 6",
    }  # fmt: skip
    assert builder.report() == {"missing": ["/home/me/1.wav"], "left_out": {}}


def test_two_paths_of_another_machine_with_one_end_are_missing(folder, load):
    lines = [[f"/disk/{part}/1.wav", f"Sound {part}"] for part in "ab"] + [[name, name] for name in NAMES[2:]]
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *lines])
    assert sorted(load().report()["missing"]) == ["/disk/a/1.wav", "/disk/b/1.wav"]
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *([f"s3://bucket/{name}x", "A"] for name in NAMES)])
    with pytest.raises(FileNotFoundError, match=r"such as s3://bucket/0\.wavx\. The addresses .*embed --table"):
        load()


def test_spellings_of_one_recording_are_one_clip(folder, load):
    lines = [["1.wav", "A"], ["./1.WAV", "B"], [str(folder / "1.wav"), "C"]]
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *lines])
    (row,) = load(validation_fraction=0, test_fraction=0).as_dataset()["train"]
    assert (row["clip_id"], row["captions"]["eng"]) == ("1.wav", ["A", "B", "C"])


RAVEN = """Selection\tView\tBegin Time (s)\tEnd Time (s)\tSpecies
1\tSpectrogram 1\t0.5\t3.5\tEurasian Wren
2\tSpectrogram 1\t0.5\t3.5\tBlackbird
"""
BIRDNET = "Start (s),End (s),Scientific name,Common name,Confidence\n0.0,3.0,Turdus merula,Blackbird,0.9\n"
AUDACITY = "0,500000\t3,500000\tdog barks\n\\\t200,0\t4000,0\n4,000000\t9,000000\train falls\n"


@pytest.mark.parametrize(
    ("files", "clips"),
    [
        ({"1.Table.1.selections.txt": RAVEN}, {"1.wav:0.5-3.5": ["Eurasian Wren", "Blackbird"]}),
        ({"1.TSV": RAVEN}, {"1.wav:0.5-3.5": ["Eurasian Wren", "Blackbird"]}),
        ({"1.txt": '{"caption": "a dog", "start": 1, "end": 2}\n'}, {"1.wav:1-2": ["a dog"]}),
        ({"1.BirdNET.results.csv": BIRDNET}, {"1.wav:0-3": ["Blackbird"]}),
        ({"1.txt": AUDACITY}, {"1.wav:0.5-3.5": ["dog barks"], "1.wav:4-9": ["rain falls"]}),
        ({"1.txt": "a dog\nrain\n", "2.txt": "wind"}, {"1.wav": ["a dog", "rain"], "2.wav": ["wind"]}),
        (
            {"1.txt": "a dog", "2.txt": AUDACITY},
            {"1.wav": ["a dog"], "2.wav:0.5-3.5": ["dog barks"], "2.wav:4-9": ["rain falls"]},
        ),
    ],
)
def test_labels_beside_recordings_are_parts(folder, load, files, clips):
    for name, text in files.items():
        (folder / name).write_text(text)
    rows = load(validation_fraction=0, test_fraction=0).as_dataset()["train"]
    assert {row["clip_id"]: row["captions"]["eng"] for row in rows} == clips
    for row in rows:
        expected = [None, None] if ":" not in row["clip_id"] else row["clip_id"].split(":")[1].split("-")
        times = [row.get("start_seconds"), row.get("end_seconds")]
        assert times == [None if text is None else float(text) for text in expected]


@pytest.mark.parametrize(
    "content",
    [
        "file_name,caption\n1.wav,A\n",
        '{"file_name": "1.wav", "caption": "A"}\n',
        "# notes\nfile_name\tcaption\n1.wav\tA\n",
    ],
)
def test_a_table_may_be_a_text_file_if_there_is_no_other(folder, load, content):
    (folder / "metadata.txt").write_text(content)
    assert rows_of(load(validation_fraction=0, test_fraction=0))["1.wav"]["captions"]["eng"] == ["A"]
    (folder / "2.txt").write_text("B\n")
    assert list(rows_of(load(validation_fraction=0, test_fraction=0))) == ["2.wav"]


def test_text_files_have_the_names_of_recordings_in_other_spellings(tmp_path, load):
    touch(tmp_path / "data", ["Gru\u0308nspecht.wav", "rain.wav"])
    for name in ("Gr\u00fcnspecht", "RAIN"):
        (tmp_path / "data" / f"{name}.TXT").write_text(f"Sound of {name}\n")
    rows = rows_of(load(validation_fraction=0, test_fraction=0)).values()
    assert {row["clip_id"]: row["captions"]["eng"] for row in rows} == {
        "Gr\u00fcnspecht.wav": ["Sound of Gr\u00fcnspecht"],
        "rain.wav": ["Sound of RAIN"],
    }


def test_labels_that_are_not_understood_are_refused(folder, load):
    (folder / "1.txt").write_text("12\tdog\n13\tcat\n")
    with pytest.raises(ValueError, match=r"1\.txt: no captions in \['12', 'dog'\]"):
        load()
    (folder / "1.txt").unlink()
    touch(folder, ["1.TextGrid", "2.eaf", "3.ods"])
    with pytest.raises(FileNotFoundError, match=r"1\.TextGrid, 2\.eaf, 3\.ods: save it"):
        load()
    touch(folder, ["metadata.xlsx"])
    with pytest.raises(FileNotFoundError, match=r"1\.TextGrid, 2\.eaf, 3\.ods and 1 more: save it"):
        load()


def test_a_table_of_birdnet_with_a_header_for_each_recording(folder, load):
    header = "Begin Path,Start (s),End (s),Common name"
    lines = [header, "C:\\rec\\1.wav,0,3,Wren", "C:\\rec\\1.wav,3,6,Robin", header, "C:\\rec\\2.wav,0,3,Wren"]
    (folder / "metadata.csv").write_text("\n".join(lines))
    rows = load(validation_fraction=0, test_fraction=0).as_dataset()["train"]
    assert rows["clip_id"][:] == ["1.wav:0-3", "1.wav:3-6", "2.wav:0-3"]
    assert [captions["eng"] for captions in rows["captions"]] == [["Wren"], ["Robin"], ["Wren"]]


def test_placeholders_are_no_captions_and_are_counted(folder, load, caplog):
    cells = ["nan", "None", "#N/A", "\u200b", "", "a dog", "Null", "n/a", "nan falls", "<NA>"]
    lines = [[name, cell, "nan", "nan"] for name, cell in zip(NAMES, cells, strict=True)]
    write_csv(folder / "metadata.csv", [["file_name", "caption", "source", "split"], *lines])
    builder = load(validation_fraction=0, test_fraction=0)
    rows = builder.as_dataset()["train"]
    assert [row["captions"]["eng"] for row in rows] == [["a dog"], ["nan falls"]]
    assert rows["source"][:] == ["file:5.wav", "file:8.wav"]
    assert len(builder.report()["left_out"]["empty caption"]) == 8
    assert any("left out 7 captions" in text and "'nan'" in text for text in caplog.messages)


def test_recordings_without_a_line_are_reported(folder, load):
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *([name, "A"] for name in NAMES[:8])])
    assert load().report() == {"missing": [], "left_out": {"no caption": ["8.wav", "9.wav"]}}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([["name", "caption"], ["1.wav", "A"]], "line 2.*file_name"),
        ([["file_name", "words"], ["1.wav", "A"]], r"\['file_name', 'words'\]"),
        (
            [["file_name", "caption_xx"], ["1.wav", "A"]],
            r"metadata\.csv: no captions in \['file_name', 'caption_xx'\]",
        ),
        ([["file_name", "captions"], ["1.wav", "[1]"]], r"line 2.*captions.*\[1\]"),
        ([["file_name", "caption", "split"], ["1.wav", "A", "tset"]], "line 2.*'tset'"),
        ([["file_name", "caption", "split"], ["1.wav", "A", "test"], ["2.wav", "B", ""]], r"2\.wav.*1\.wav"),
        (
            [["file_name", "caption", "source"], ["1.wav", "A", "x"], ["1.wav", "B", "y"]],
            r"line 3.*source.*'1\.wav'.*'y'.*'x'",
        ),
        (
            [["file_name", "caption", "clip_id", "split"], ["1.wav", "A", "x", "test"], ["2.wav", "B", "x", "test"]],
            r"line 3.*'1\.wav'.*'2\.wav'.*clip_id.*'x'",
        ),
        ([["file_name", "caption", "events"], ["1.wav", "A", '[{"label": "x"}]']], "line 2.*events"),
        ([["file_name", "caption"], ["1.wav", "A"]], r"\b1\b.*validation.*test"),
        ([["file_name", "caption"], ["1.wav", "A", "B"]], r"line 2.*\b3\b.*\b2\b"),
    ],
)
def test_a_bad_table_is_refused(folder, load, lines, message):
    write_csv(folder / "metadata.csv", lines)
    with pytest.raises(ValueError, match=message):
        load()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"columns": {"text": "caption"}}, r"\['text'\]"),
        ({"columns": "text"}, "columns.*'text'"),
        ({"test_fraction": 1.5}, r"test_fraction.*1\.5"),
        ({"test_fraction": 0.6, "validation_fraction": 0.6}, r"validation_fraction is 0\.6 and test_fraction 0\.6"),
        ({"test_fraction": -0.1}, r"test_fraction.*-0\.1"),
        ({"validation_fraction": -0.1}, r"validation_fraction.*-0\.1"),
        ({"caption_language": "en"}, "caption_language.*'en'"),
    ],
)
def test_bad_settings_are_refused(folder, load, config, message):
    with pytest.raises(ValueError, match=message):
        load(**config)


def test_a_folder_without_captions_or_with_too_many_tables_is_refused(folder, load):
    with pytest.raises(FileNotFoundError, match=r"nor text files with the names of recordings$"):
        load()
    for name in ("train_test.csv", "manifest.csv"):  # of one split or the other? of a prepared set?
        write_csv(folder / name, [["file_name", "caption"], *([name, "A"] for name in NAMES)])
    with pytest.raises(FileNotFoundError, match=r", only manifest\.csv, train_test\.csv: save it"):
        load()
    (folder / "train_test.csv").unlink()
    (folder / "manifest.csv").unlink()
    touch(folder, ["data/train-00000-of-00001.parquet"])
    with pytest.raises(FileNotFoundError, match=r"data/train-00000-of-00001\.parquet"):
        load()
    touch(folder, ["metadata.csv", "metadata.jsonl"])
    with pytest.raises(ValueError, match=r"several tables in one folder: metadata\.csv, metadata\.jsonl;"):
        load()


@pytest.mark.usefixtures("torchcodec")  # `audiofolder` always decodes
def test_it_reads_what_audiofolder_of_datasets_reads(folder, load, tmp_path):
    """Both readers return the same file names and captions."""
    for name in NAMES:
        soundfile.write(folder / name, np.zeros(80), 8000)
    write_csv(folder / "metadata.csv", [["file_name", "caption"], *([name, f"Sound {name}"] for name in NAMES)])
    theirs = datasets.load_dataset("audiofolder", data_dir=str(folder), cache_dir=str(tmp_path / "theirs"))["train"]
    paths = theirs.cast_column("audio", datasets.Audio(decode=False))["audio"]
    ours = {row["audio_path"]: row["captions"]["eng"] for row in rows_of(load()).values()}
    assert {audio["path"]: [text] for audio, text in zip(paths, theirs["caption"], strict=True)} == ours


@pytest.mark.parametrize(
    "names",
    [
        ("start_seconds", "end_seconds"),
        ("start", "end"),
        ("Onset", "offset"),
        ("from", "to"),
        ("Begin Time (s)", "End Time (s)"),
    ],
)
def test_a_table_may_have_parts_of_recordings(tmp_path, load, names):
    for name, loudness in (("long", 0.9), ("other", 0.8)):
        soundfile.write(touch(tmp_path / "data", [f"{name}.flac"])[0], np.linspace(0, loudness, 16_000), 1000)
    parts = [(2.0, 4.5), (8, 10), (10, "")]
    table = [[name, start, end, f"{name} {start}"] for name in ("long.flac", "other.flac") for start, end in parts]
    lines = [[*line, f"speaker {number}"] for number, line in enumerate(table)]  # more than one in a recording
    write_csv(tmp_path / "data" / "metadata.csv", [["file_name", *names, "caption", "source"], *lines])
    columns = {"start_seconds": "from", "end_seconds": "to"} if "from" in names else {}
    builder = load(columns=columns, validation_fraction=0.5, test_fraction=0)
    splits = builder.as_dataset()
    # one recording each
    assert [len({row["audio_path"] for row in rows}) for rows in splits.values()] == [1, 1]

    rows = {row["clip_id"]: row for rows in splits.values() for row in rows}
    assert set(rows) == {f"{name}:{part}" for name in ("long.flac", "other.flac") for part in ("2-4.5", "8-10", "10-")}
    for part, start, end in (("2-4.5", 2000, 4500), ("8-10", 8000, 10_000), ("10-", 10_000, 16_000)):
        row = rows[f"long.flac:{part}"]
        assert row["captions"]["eng"][0].startswith(f"long.flac {start // 1000}")
        np.testing.assert_allclose(read_row(row, 1000), np.linspace(0, 0.9, 16_000)[start:end], atol=1e-4)


def test_a_start_alone_is_no_part_of_the_recording(folder, load, caplog):
    columns.warn_once.cache_clear()
    write_csv(
        folder / "metadata.csv", [["file_name", "caption", "start_time"], *([name, "A", "30"] for name in NAMES)]
    )
    assert "start_seconds" not in next(iter(rows_of(load()).values()))
    assert any("'start_time'" in text and "not used" in text for text in caplog.messages)


def test_names_without_their_folder_are_found_if_one_file_has_them(tmp_path, load):
    folders = {name: ("training", "dev", "eval/x")[number % 3] for number, name in enumerate(NAMES)}
    touch(tmp_path / "data", [f"{folder}/{name}" for name, folder in folders.items()])
    table = [["file_name", "caption"], *([name.removesuffix(".wav"), name] for name in NAMES)]
    write_csv(tmp_path / "data" / "metadata.csv", table)
    builder = load()
    assert sizes_of(builder) == {"train": 4, "validation": 3, "test": 3}
    for name, row in rows_of(builder).items():
        path = f"{folders[name]}/{name}"
        assert (row["clip_id"], row["captions"]["eng"]) == (path, [name])
        assert row["audio_path"] == str(tmp_path / "data" / path)
    (tmp_path / "data" / "metadata.csv").rename(tmp_path / "data" / "sounds.csv")
    assert sizes_of(load()) == {"train": 4, "validation": 3, "test": 3}
    (tmp_path / "data" / "sounds.csv").unlink()
    with_path = [*table, ["eval/x/2.wav", "the same"], ["5", "of another"]]
    write_csv(tmp_path / "data" / "metadata.csv", [*with_path, ["dev/5.wav", "missing"]])
    assert "2.wav" in (rows := rows_of(load()))
    assert rows["2.wav"]["captions"]["eng"] == ["the same"]  # which of two names is in the folder is not known
    write_csv(tmp_path / "data" / "metadata.csv", table)
    (tmp_path / "data" / "metadata.csv").rename(tmp_path / "data" / "train.csv")
    with pytest.raises(ValueError, match=r"train\.csv, line 3: 1 is of the split train, but only dev/1\.wav has"):
        load().as_dataset()
    (tmp_path / "data" / "train.csv").rename(tmp_path / "data" / "metadata.csv")
    touch(tmp_path / "data", ["backup/0.flac"])
    assert "0.wav" not in rows_of(load())
    assert rows_of(load(audio_dir=str(tmp_path / "data" / "training"))).keys() == {"0.wav", "3.wav", "6.wav", "9.wav"}
    (tmp_path / "data" / "metadata.csv").rename(tmp_path / "data" / "dev" / "metadata.csv")
    assert rows_of(load()).keys() == {"1.wav", "4.wav", "7.wav"}  # the table names recordings beside it
    write_csv(tmp_path / "data" / "dev" / "metadata.csv", [["file_name", "caption"], ["other/2.wav", "A"]])
    with pytest.raises(FileNotFoundError, match=r"none of the 1 recordings, such as dev/other/2\.wav"):
        load().as_dataset()


@pytest.mark.parametrize(("start", "end"), [("soon", 2), (-1, 2), (3, 2), ("inf", 2), ("1,500", 2)])
def test_an_impossible_part_is_refused(folder, load, start, end):
    rows = [["file_name", "caption", "start_seconds", "end_seconds"], [NAMES[0], "A", start, end]]
    write_csv(folder / "metadata.csv", rows)
    with pytest.raises(ValueError, match=r"metadata\.csv, line 2.*(soon|-1|3|inf|1,500)"):
        load()


def test_text_files_may_have_other_encodings(folder, load):
    for name in NAMES:
        (folder / name).with_suffix(".txt").write_bytes("tôle\nà côté\n".encode("cp1252"))
    assert rows_of(load())["0.wav"]["captions"]["eng"] == ["tôle", "à côté"]
    (folder / "3.txt").write_bytes("大雨".encode("gb18030"))
    with pytest.raises(ValueError, match=r"3\.txt"):
        load(languages=["eng"], limit=9)
    for name in NAMES:
        (folder / name).with_suffix(".txt").write_bytes("大雨".encode("gb18030"))
    assert rows_of(load(encoding="gb18030"))["3.wav"]["captions"]["eng"] == ["大雨"]


def test_a_table_may_name_files_of_any_suffix(folder, load):
    touch(folder, ["clip.xyz"])
    write_csv(folder / "metadata.csv", [["file_name", "caption"], ["clip.xyz", "A"], *([name, "A"] for name in NAMES)])
    assert "clip.xyz" in rows_of(load())


def test_all_recordings_are_a_test_split_without_another_option(tmp_path):
    lines = ["file_name,caption"]
    for number in range(4):
        soundfile.write(tmp_path / f"{number}.wav", 0.1 * np.sin(np.arange(8000) / (number + 2)), 16000)
        lines.append(f"{number}.wav,tone {number}")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    splits = load_splits("audio_folder", data_dir=str(tmp_path), languages=["eng"], test_fraction=1.0)
    assert {name: len(rows) for name, rows in splits.items()} == {"test": 4}
