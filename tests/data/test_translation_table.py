"""Translations file."""

import csv
import unicodedata

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modeling_supclap.datasets_scripts.translation.table import (
    SCHEMA,
    languages_of,
    read_translations,
    write_translations,
)

LINES = [
    dict(zip(SCHEMA.names, values, strict=True))
    for values in (
        ("a", 0, "fra", "Un chien", "m", "0" * 16),
        ("a", 1, "fra", "Un gros chien", None, None),
        ("a", 0, "jpn", "犬", "m", None),
        ("ö b.wav", 0, "fra", "Où ? « Là »", "m", None),
    )
]


def changed(**fields):
    """Return the lines with changes in the first one."""
    return [{**LINES[0], **fields}, *LINES[1:]]


def save(path, lines, schema=None):
    pq.write_table(pa.Table.from_pylist(lines, schema=schema), path)
    return path


def test_written_and_read_it_is_the_same_in_the_order_of_its_keys(tmp_path):
    write_translations(tmp_path / "new" / "t.parquet", LINES)
    table = read_translations(tmp_path / "new" / "t.parquet")
    assert table.schema.equals(SCHEMA)
    assert table.to_pylist() == LINES
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["t.parquet"]


def test_the_order_of_the_lines_does_not_change_a_byte(tmp_path):
    write_translations(tmp_path / "one.parquet", LINES)
    write_translations(tmp_path / "two.parquet", reversed(LINES))
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def test_rejected_translations_do_not_change_the_file(tmp_path):
    path = tmp_path / "t.parquet"
    write_translations(path, LINES)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="blank"):
        write_translations(path, changed(text=" "))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("tool", ["pandas", "csv"])
def test_files_written_by_other_tools_are_read(tmp_path, tool):
    path, fields = tmp_path / "t.parquet", ["clip_id", "caption_index", "language", "text"]
    frame = pd.DataFrame(LINES)[fields]  # with large strings and 64-bit integers
    if tool == "csv":
        frame.to_csv(tmp_path / "t.csv", index=False, quoting=csv.QUOTE_ALL)
        frame = pd.read_csv(tmp_path / "t.csv")
    frame.to_parquet(path)
    table = read_translations(path)
    assert table.schema.equals(SCHEMA)
    assert table.select(fields).to_pylist() == [{name: line[name] for name in fields} for line in LINES]
    assert table["source_hash"].null_count == table["model"].null_count == len(LINES)


def test_text_comes_in_one_normal_form(tmp_path):
    decomposed = unicodedata.normalize("NFD", "Où ? « Là »")
    path = save(tmp_path / "t.parquet", changed(text=decomposed), SCHEMA)
    assert decomposed != "Où ? « Là »"
    assert read_translations(path)["text"][0].as_py() == "Où ? « Là »"


def test_languages_are_chosen_and_in_the_papers_order(tmp_path):
    path = save(
        tmp_path / "t.parquet", [*LINES, {**LINES[0], "language": "cat"}, {**LINES[0], "language": "afr"}], SCHEMA
    )
    assert languages_of(read_translations(path)) == ["fra", "cat", "jpn", "afr"]
    assert languages_of(read_translations(path, ["jpn", "fra"])) == ["fra", "jpn"]
    with pytest.raises(ValueError, match="'swe'"):
        read_translations(path, ["fra", "swe"])


def test_several_files_are_one_table(tmp_path):
    one, two = (save(tmp_path / "1.parquet", LINES[:2], SCHEMA), save(tmp_path / "2.parquet", LINES[2:], SCHEMA))
    assert read_translations([one, str(two)]).to_pylist() == LINES
    with pytest.raises(ValueError, match=r"'a' caption 0.*'a' caption 1"):
        read_translations([one, two, one])
    with pytest.raises(ValueError, match="Parquet"):
        read_translations([])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES, LINES[0]], "'a' caption 0.*'fra'"),
        (changed(text=""), "blank.*'a' caption 0.*'fra'"),
        (changed(text=" \u00a0\u3000\u200b"), "blank"),
        (changed(text="... !"), "blank"),
        (changed(text="Un chi\ufffdn"), r"U\+FFFD"),
        (changed(text="Un chien\x00"), "control"),
        (changed(text=None), "text.*'a' caption 0"),
        (changed(clip_id=None), "clip.id.*None"),
        (changed(caption_index=None), "caption.index.*'a'"),
        (changed(caption_index=-1), "negative"),
        (changed(language="fr"), "'fr'"),
        (changed(language="fra_Latn"), "'fra_Latn'"),
        ([{**LINES[0], "clip_id": f"c{i}", "text": " "} for i in range(8)], "blank.*'c4'"),
    ],
)
def test_invalid_lines_are_named(tmp_path, lines, message):
    path = save(tmp_path / "t.parquet", lines, SCHEMA)
    with pytest.raises(ValueError, match=message) as caught:
        read_translations(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match=message):
        write_translations(tmp_path / "new.parquet", lines)


def test_punctuation_marks_and_single_letters_are_text(tmp_path):
    lines = changed(text="¡Sí!")
    lines[2]["text"] = "雨"
    assert len(read_translations(save(tmp_path / "t.parquet", lines, SCHEMA))) == 4


def test_everything_that_is_wrong_is_in_one_message(tmp_path):
    path = save(tmp_path / "t.parquet", changed(text="", language="French"), SCHEMA)
    with pytest.raises(ValueError, match=r"blank.*'French'"):
        read_translations(path)


def broken_utf8():
    good = pa.Table.from_pylist(LINES, schema=SCHEMA)
    data, offsets = b"Un \xff\xfe", pa.array([0, 5, 5, 5, 5], pa.int32()).buffers()[1]
    text = pa.Array.from_buffers(pa.string(), 4, [None, offsets, pa.py_buffer(data)])
    return good.set_column(3, "text", text)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"id": ["a"]}), r"\['caption_index', 'clip_id', 'language', 'text'\]; it has \['id'\]"),
        (pa.table({"clip_id": ["a"], "caption_index": ["x"], "language": ["fra"], "text": ["b"]}), "caption_index"),
        (pa.table({"clip_id": ["a"], "caption_index": [0.5], "language": ["fra"], "text": ["b"]}), "caption_index"),
        (broken_utf8(), r"t\.parquet.*UTF8"),
    ],
)
def test_other_tables_are_refused(tmp_path, table, message):
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=message):
        read_translations(tmp_path / "t.parquet")


def test_missing_and_invalid_files_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        read_translations(tmp_path / "absent.parquet")
    (tmp_path / "t.parquet").write_text("clip_id,text\n")
    with pytest.raises(ValueError, match=r"t\.parquet"):
        read_translations(tmp_path / "t.parquet")
