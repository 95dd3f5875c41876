"""Metadata tables and lists in the formats that users have."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from dataset_folders import touch

from modeling_supclap.datasets_scripts.audio_files import walk
from modeling_supclap.datasets_scripts.builders import metadata
from modeling_supclap.datasets_scripts.builders.metadata import find_metadata, fingerprint, read_csv, read_table


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_csv_is_read_in_several_encodings_with_line_breaks_in_cells(tmp_path, encoding):
    path = tmp_path / "a.csv"
    path.write_bytes('name,text\r\na,"Très «fort», ""là""\nici"\r\nb\r\n'.encode(encoding))
    first, second = read_csv(path, ["name"])
    assert first.values == {"name": "a", "text": 'Très «fort», "là"\nici'}
    assert second.values == {"name": "b", "text": ""}
    assert second.where == f"{path}, line 4"


@pytest.mark.parametrize("mark", ",;\t")
def test_cells_may_have_any_usual_mark_between_them(tmp_path, mark):
    path = tmp_path / "a.tsv"
    path.write_text(f'file_name{mark}"a, b; or c"\n1.wav{mark}"x{mark} y, z; \tw"\n')
    (line,) = read_table(path)
    assert line.values == {"file_name": "1.wav", "a, b; or c": f"x{mark} y, z; \tw"}


def test_quotes_in_a_table_with_tabs_are_characters(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('name\ttext\na\t"Rain falls, she said\nb\t"Rain" falls\nc\twind"\nd\t"a ""b"" c"\ne\t""\n')
    texts = [line.values["text"] for line in read_table(path)]
    assert texts == ['"Rain falls, she said', '"Rain" falls', 'wind"', 'a "b" c', ""]
    path.write_text('name\ttext\na\t"two\nlines"\n')
    assert [line.values["text"] for line in read_table(path)] == ["two\nlines"]


@pytest.mark.parametrize(
    "content",
    [
        "Sounds of 2024;;\n;;\nname;text;note\na;rain, heavy;\n",
        '"Sounds; May",,\nname,text,note\na,"rain, heavy",\n',
        "# exported\nname\ttext\tnote\na\train, heavy\t\n",
        '{"name": "a", "text": "rain, heavy", "note": ""}\n',
    ],
)
def test_titles_and_comments_above_the_header_are_skipped(tmp_path, content):
    path = tmp_path / "a.csv"
    path.write_text(content)
    (line,) = read_table(path)
    assert line.values == {"name": "a", "text": "rain, heavy", "note": ""}


def test_a_header_may_begin_with_an_empty_cell_or_a_number_sign(tmp_path):
    for first, expected in ((",text", ""), ("#,text", "#"), ("text", "text")):
        path = tmp_path / "a.csv"
        path.write_text(f"{first}\n1" + ",rain" * first.count(",") + "\n")
        assert next(iter(read_table(path)[0].values)) == expected


def test_csv_without_a_header_has_the_columns_given(tmp_path):
    (path,) = touch(tmp_path, ["a.csv"])
    path.write_text("a,1\nb,2\n")
    assert [line.values for line in read_csv(path, ["x", "y"], header=False)] == [
        {"x": "a", "y": "1"},
        {"x": "b", "y": "2"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file,text\na,b\n", r"a\.csv.*'name'"),
        ("", r"a\.csv.*'name'.*\[\]"),
        ("name,text\na,b, and c\n", r"a\.csv.*line 2.*\b3\b.*\b2\b"),
        ("name,text\na," + "b" * 200_000, r"a\.csv.*field larger"),
        ("n\0a\0m\0e\0", r"a\.csv"),
        ("name,text,text\na,b,c\n", r"a\.csv.*'text'"),
        ('name,text\na,b\nb,"rain on\nc,d\n', r"a\.csv.*line 3 on.*quotes"),
        ('name,text\na,"rain" on a roof\n', r"a\.csv.*line 2 on.*quotes"),
    ],
)
def test_a_bad_csv_is_refused(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_csv(path, ["name"])


def test_all_table_formats_give_the_same_lines(tmp_path):
    rows = [{"file_name": "é.wav", "caption": "Line\u2028separator"}, {"file_name": "b.wav", "caption": ""}]
    (tmp_path / "a.csv").write_text("file_name,caption\né.wav,Line\u2028separator\nb.wav,\n", encoding="utf-8")
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for suffix in ("csv", "json", "jsonl", "parquet"):
        assert [line.values for line in read_table(tmp_path / f"a.{suffix}")] == rows
    with pytest.raises(ValueError, match=r"a\.xls"):
        read_table(tmp_path / "a.xls")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}\n[1]", r"a\.jsonl.*line 2.*\[1\]"),
        ("a.jsonl", "{}\n{", r"a\.jsonl.*line 2"),
        ("a.json", "[1]", r"a\.json.*'1'"),
        ("a.json", "{}", r"a\.json"),
        ("a.json", "[" * 100_000, r"a\.json"),
        ("a.json", "[" + "9" * 5000 + "]", r"a\.json"),
        ("a.parquet", "PAR1", r"a\.parquet"),
    ],
)
def test_a_bad_table_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / name)


def test_metadata_are_found_at_the_top_or_below_but_not_guessed(tmp_path):
    def find(*names):
        return find_metadata(tmp_path, walk(tmp_path), *names)

    assert find("train.csv") is None
    touch(tmp_path, ["dataset/train.csv", "other/x-train.csv"])
    assert find("val.csv", "train.csv") == tmp_path / "dataset/train.csv"
    touch(tmp_path, ["dataset2.0/train.csv"])
    with pytest.raises(ValueError, match=r"dataset/train\.csv, dataset2\.0/train\.csv"):
        find("train.csv")
    touch(tmp_path, ["train.csv"])
    assert find("train.csv") == tmp_path / "train.csv"


def test_the_fingerprint_follows_paths_and_contents(tmp_path):
    paths = touch(tmp_path, ["a", "b"])
    before = fingerprint(paths)
    assert fingerprint(paths[::-1]) == before
    paths[0].write_text("1")
    assert len({before, fingerprint(paths), fingerprint(paths[:1])}) == 3


def test_the_fingerprint_of_the_code_follows_code_and_phrases(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "SOURCES", tmp_path)
    paths = touch(tmp_path, ["builders/a.py", "phrases/b.json", "c.txt"])
    found = []
    for path in (None, *paths):
        if path is not None:
            path.write_text("changed")
        found.append(metadata.code_fingerprint.__wrapped__())
    assert len(set(found)) == 3
    assert found[2] == found[3]
