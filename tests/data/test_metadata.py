"""Metadata tables and lists in the formats that users have."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from dataset_folders import touch

from modeling_supclap.datasets_scripts.audio_files import walk
from modeling_supclap.datasets_scripts.builders import metadata
from modeling_supclap.datasets_scripts.builders.metadata import Line, find_metadata, fingerprint, read_csv, read_table


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_csv_is_read_in_several_encodings_with_line_breaks_in_cells(tmp_path, encoding):
    path = tmp_path / "a.csv"
    path.write_bytes('name,text\r\na,"Très «fort», ""là""\nici"\r\nb\r\n'.encode(encoding))
    first, second = read_csv(path, ["name"])
    assert first.values == {"name": "a", "text": 'Très «fort», "là"\nici'}
    assert second.values == {"name": "b", "text": ""}
    assert second.where == f"{path}, line 4"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [",", "\t"])
def test_lines_may_have_any_usual_end(tmp_path, end, mark):
    path = tmp_path / "a.csv"
    path.write_bytes(f"name{mark}text{end}a{mark}b{end}{end}c{mark}d{end}".encode())
    lines = read_csv(path, ["name"])
    assert lines == [(f"{path}, line 2", {"name": "a", "text": "b"}), (f"{path}, line 4", {"name": "c", "text": "d"})]


@pytest.mark.parametrize("mark", ",;\t|")
def test_cells_may_have_any_usual_mark_between_them(tmp_path, mark):
    path = tmp_path / "a.tsv"
    path.write_text(f'file_name{mark}"a, b; or c"\n1.wav{mark}"x{mark} y, z; \tw"\n')
    (line,) = read_table(path)
    assert line.values == {"file_name": "1.wav", "a, b; or c": f"x{mark} y, z; \tw"}
    path.write_text(f"\n file_name {mark} b \n 1.wav {mark} x \n{mark}\n2.wav{mark}y{mark} \n3.wav\n")
    lines = [(line.where, *line.values.values()) for line in read_csv(path, ["b"])]
    assert lines == [
        (f"{path}, line 3", "1.wav", "x"), (f"{path}, line 5", "2.wav", "y"), (f"{path}, line 6", "3.wav", "")
    ]  # fmt: skip


def test_the_first_line_may_name_the_mark(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"sep=;\r\nfile_name;a, b, c\r\n1.wav;x, y, z\r\n")
    (line,) = read_table(path)
    assert line == (f"{path}, line 3", {"file_name": "1.wav", "a, b, c": "x, y, z"})
    path.write_text("sep=\t\nfile_name\ttext\tnote\n1.wav\ta, b\t\n")
    assert [line.values for line in read_table(path)] == [{"file_name": "1.wav", "text": "a, b", "note": ""}]
    path.write_text("sep=;,text\n1,rain\n")
    assert [line.values for line in read_table(path)] == [{"sep=;": "1", "text": "rain"}]


@pytest.mark.parametrize(("cell", "number", "whole"), [("0", 0, 0), (" 7 ", 7, 7), ("1.5", 1.5, None), ("2.0", 2, 2)])
def test_numbers_of_a_line_are_at_least_zero(cell, number, whole):
    line = Line("a.csv, line 2", {"fold": cell})
    assert line.number("fold") == number
    if whole is None:
        with pytest.raises(ValueError, match=r"a\.csv, line 2: fold is '1\.5'; expected a whole number of"):
            line.number("fold", whole=True)
    else:
        assert line.number("fold", whole=True) == whole
    for bad in ("-1", "", "one", "nan"):
        with pytest.raises(ValueError, match=f"a.csv, line 2: fold is '{bad}'; expected a number of at least 0"):
            line._replace(values={"fold": bad}).number("fold")


def test_quotes_in_a_table_with_tabs_are_characters(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('name\ttext\na\t"Rain falls, she said\nb\t"Rain" falls\nc\twind"\nd\t"a ""b"" c"\ne\t""\n')
    lines = read_table(path)
    assert [line.values["text"] for line in lines] == [
        '"Rain falls, she said', '"Rain" falls', 'wind"', 'a "b" c', ""
    ]  # fmt: skip
    assert [line.where for line in lines] == [f"{path}, line {number}" for number in range(2, 7)]
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


def test_a_title_is_not_taken_for_a_header_nor_a_header_for_a_title(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("name,\n")
    assert read_csv(path, ["name"]) == []
    path.write_text("a,\nb,2\n")
    assert [line.values["y"] for line in read_csv(path, ["x", "y"], header=False)] == ["", "2"]
    path.write_text("name,,\nrain,,\n")  # several columns without a name
    assert [line.values["name"] for line in read_csv(path, ["name"])] == ["rain"]
    path.write_text("name,text\na,b\nname,text\nc,d\n")
    assert [line.values["name"] for line in read_csv(path, ["name"])] == ["a", "c"]


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
        ("file,text\na,b\n", r"a\.csv lacks the columns \['name'\]; it has \['file', 'text'\]"),
        ("", r"a\.csv.*'name'.*\[\]"),
        ("name\na,b\n", r"a\.csv, line 2 has 2 cells for 1 columns; .* ','$"),
        ("name,text\na,b, and c\n", r"a\.csv, line 2 has 3 cells for 2 columns; .* ','$"),
        ("name,text\na," + "b" * 200_000, r"a\.csv.*field larger"),
        ("n\0a\0m\0e\0", r"a\.csv"),
        ("name,text,text\na,b,c\n", r"a\.csv has 2 columns 'text'"),
        ("name,text,text,text,\na,b,c,d\n", r"a\.csv has 3 columns 'text'"),
        ('name,text\na,b\nb,"rain on\nc,d\n', r"a\.csv.*line 3 on.*quotes"),
        ('name,text\na,"rain" on a roof\n', r"a\.csv.*line 2 on.*quotes"),
    ],
)
def test_a_bad_csv_is_refused(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_csv(path, ["name"])


def test_all_columns_that_are_missing_are_named(tmp_path):
    (path,) = touch(tmp_path, ["a.csv"])
    path.write_text("name,file\n")
    with pytest.raises(ValueError, match=r"lacks the columns \['a', 'b', 'c', 'd', 'e'\]; it has \['name', 'file'\]$"):
        read_csv(path, ["e", "c", "name", "a", "d", "b"])


def test_all_table_formats_give_the_same_lines(tmp_path):
    rows = [{"file_name": "é.wav", "caption": "Line\u2028separator"}, {"file_name": "b.wav", "caption": ""}]
    (tmp_path / "a.csv").write_text("file_name,caption\né.wav,Line\u2028separator\nb.wav,\n", encoding="utf-8")
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.ndjson").write_text(
        "\n " + "\n ".join(json.dumps(rows, indent=1).splitlines())
    )  # a list in another suffix
    (tmp_path / "a.CSV").write_text(lines, encoding="utf-8")
    places = {"csv": "line 3", "json": "entry 1", "jsonl": "line 3", "parquet": "row 1", "ndjson": "entry 1"}
    for suffix, place in {**places, "CSV": "line 3"}.items():
        read = read_table(tmp_path / f"a.{suffix}")
        assert [line.values for line in read] == rows
        assert read[1].where == f"{tmp_path / f'a.{suffix}'}, {place}"
    with pytest.raises(ValueError, match=r"a\.xls.* \.csv, \.tsv, \.jsonl, \.ndjson, \.json, \.parquet$"):
        read_table(tmp_path / "a.xls")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}\n[1]", r"a\.jsonl.*line 2.*\[1\]"),
        ("a.jsonl", "{}\n{", r"a\.jsonl.*line 2"),
        ("a.jsonl", "{\n{}", r"a\.jsonl, line 1 is not JSON"),
        ("a.jsonl", '{"a": 1}\n\n{', r"a\.jsonl, line 3 is not JSON: .*; expected a list of objects, or JSON Lines"),
        ("a.json", "[1]", r"a\.json, entry 0 is '1'; expected a JSON object"),
        ("a.json", "{}", r"a\.json contains no rows"),
        ("a.json", "[]", r"a\.json contains no rows"),
        ("a.json", '["' + 99 * "x" + '"]', f"entry 0 is '{60 * 'x'}'; "),
        ("a.json", "[" * 100_000, r"a\.json"),
        ("a.json", "[" + "9" * 5000 + "]", r"a\.json"),
        ("a.parquet", "PAR1", r"a\.parquet is not Parquet: "),
        ("a.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", r"a\.parquet.*Git LFS"),
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
