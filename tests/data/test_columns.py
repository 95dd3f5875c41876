"""Columns of tables found by their names, and cells in the forms that users, pandas and spreadsheets write."""

import json
import math
import re
import unicodedata
from datetime import timedelta

import pytest

from modeling_supclap.datasets_scripts.builders import columns
from modeling_supclap.datasets_scripts.builders.columns import (
    ColumnOptions,
    Columns,
    clean_text,
    merge_captions,
    parse,
    read_seconds,
)


@pytest.fixture(autouse=True)
def _forget_warnings():
    columns.warn_once.cache_clear()


def read(values, **options):
    """Read one row of a table with these columns."""
    return Columns(values, ColumnOptions(**options)).read(values, "a.csv, line 2")


@pytest.mark.parametrize(
    ("names", "captions"),
    [
        (["caption", "caption2", "caption 3", "Caption_4"], {"eng": ["0", "1", "2", "3"]}),
        (["CAPTIONS"], {"eng": ["0"]}),
        (["caption_DEU", "Caption_fra", "caption_zh-CN", "caption_pt"], {"deu": ["0"], "fra": ["1"], "zho": ["2"]}),
        (["Caption (German)", "captionEng", "captions_ger"], {"deu": ["0", "2"], "eng": ["1"]}),
        (["text", "Sentence"], {"eng": ["0"]}),
        (["transcription", "caption"], {"eng": ["1"]}),
        (["Annotation", "caption_fra"], {"eng": ["0"], "fra": ["1"]}),
        (["text", "caption_eng"], {"eng": ["1"]}),
        (["species", "Common Name"], {"eng": ["1"]}),  # the preferred name, not the first column
        (["captioner", "caption_id", "caption"], {"eng": ["2"]}),
        (["Text", "TEXT"], {"eng": ["0"]}),  # the first of equal names
    ],
)
def test_captions_are_found_by_usual_names(names, captions, caplog):
    assert read({name: str(number) for number, name in enumerate(names)})["captions"] == captions
    unused = ", ".join(repr(name) for name in names if name in ("caption_pt", "captioner", "caption_id"))
    messages = [message.partition("; rename")[0] for message in caplog.messages]
    assert messages == [f"these columns look like captions and are not used: {unused}"] * bool(unused)


def test_columns_that_are_named_win():
    values = {
        "caption": "a",
        "text": "b",
        "caption_fra": "c",
        "title": "d",
        "start": "1",
        "end": "2",
        "von": "3000 ms",
    }
    assert read(values, caption_column="title")["captions"] == {"eng": ["d"], "fra": ["c"]}
    assert read(values, caption_columns={"deu": "text"})["captions"] == {"deu": ["b"]}
    assert read({"caption": "a", "a=b": "c"}, caption_columns="deu=a=b")["captions"] == {"deu": ["c"]}
    assert read({"caption": "a", "caption_raw": "b"}, caption_column="caption_raw")["captions"] == {"eng": ["b"]}
    assert read(values, columns={"caption": "text", "source": "title"})["source"] == "d"
    assert (
        read({**values, "Source": "s", "source": "t", "licence": "l"}).items()
        >= {"source": "s", "license": "l"}.items()
    )
    assert read(values, columns={"end_seconds": "end"})["start_seconds"] is None
    assert read(values, columns={"start_seconds": ""})["end_seconds"] is None  # turned off
    with pytest.raises(ValueError, match=r"'titel'.*'title'"):
        read(values, caption_column="titel")
    two = {"caption": "text", "captions": "title", "label": "von"}
    assert read(values, columns=two)["captions"] == {"eng": ["b", "d"], "fra": ["c"]}
    assert read(values, columns=two)["labels"] == ["3000 ms"]
    with pytest.raises(
        ValueError, match=r"unknown keys \['begin', 'end'\]; expected .*start_seconds.*duration_seconds"
    ):
        read(values, columns={"end": "end", "begin": "start"})
    for given in ("deu", "deu=", "de=text", {"German": "text"}):
        with pytest.raises(ValueError, match=r"caption_columns is .*; expected LANGUAGE=COLUMN"):
            read(values, caption_columns=given)


def test_only_the_columns_that_are_read_are_loaded():
    names = ["file_name", "caption", "note", "labels", "caption_fra", "start", "end", "sample_rate"]
    columns = Columns(names, ColumnOptions(label_column="caption"))
    assert sorted(columns.read_names) == ["caption", "caption_fra", "end", "sample_rate", "start"]
    assert columns.has_parts
    assert not Columns(names[:5], ColumnOptions()).has_parts


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"Begin Time (s)": "1.5", "End Time (s)": "4"}, (1.5, 4)),
        ({"Start (s)": "1,5", "End (s)": "4"}, (1.5, 4)),
        ({"start_ms": 1500, "endMs": 4000}, (1.5, 4)),
        ({"start_time": "0:01:30.5", "end_time": "2:00"}, (90.5, 120)),
        ({"start": timedelta(seconds=1.5), "stop": timedelta(seconds=4)}, (1.5, 4)),
        ({"offset": 1.5, "duration": 2.5}, (1.5, 4)),
        ({"onset": 1.5, "offset": 4, "duration": 9}, (1.5, 4)),
        ({"start": "", "duration_ms": 2500}, (None, 2.5)),
        ({"start_sample": 24000, "end_sample": 64000, "sampling_rate": "16000"}, (1.5, 4)),
        ({"tmin": 1.5, "tmax": "nan"}, (1.5, None)),
        ({"Begin Time (s)": 101.5, "End Time (s)": 104, "File Offset (s)": 1.5}, (1.5, 4)),
        ({"start_seconds": 1.5}, (1.5, None)),
        ({"Begin Time (s)": 1.5, "Delta Time (s)": 2.5}, (1.5, 4)),
        ({"t_start": 1.5, "t_end": 4}, (1.5, 4)),
        ({"IN FILE": "a.wav", "OFFSET": 1.5, "DURATION": 2.5}, (1.5, 4)),
        ({"start_ms": 1500, "start": 7, "end_ms": 4000, "end": 9}, (1.5, 4)),  # the first columns
        ({"Begin Time (s)": 101.5, "End Time (s)": "", "File Offset (s)": 1.5}, (1.5, None)),
        ({"Begin Time (s)": 1.5, "End Time (s)": 4, "File Offset (s)": ""}, (1.5, 4)),
        ({"Begin Time (s)": "", "End Time (s)": 4, "File Offset (s)": 1.5}, (None, 4)),
        ({"start": 0, "end": 0.5}, (0, 0.5)),
        ({"clip_start_min": 0.025, "event_end_min": "0:04"}, (1.5, 4)),
        ({"start_sample": "", "end_sample": 64000, "sample_rate": 16000}, (None, 4)),
        ({"segment_start": 1.5, "segment_end": 4}, (1.5, 4)),
    ],
)
def test_parts_have_many_names_and_units(values, part, caplog):
    row = read({"caption": "a", **values})
    assert (row["start_seconds"], row["end_seconds"]) == pytest.approx(part)
    assert not caplog.messages


@pytest.mark.parametrize(
    "names",
    [
        ["start_time"],
        ["Begin Clock Time", "Begin File", "End Path", "length"],
        ["onset"],
        ["start_frame", "end_frame"],
        ["start_sample", "end_sample"],
        ["end_ms"],
        ["from", "to"],
    ],
)
def test_times_that_are_not_used_are_named_once(names, caplog):
    for _ in range(2):
        row = read({"caption": "a", **dict.fromkeys(names, "1")})
    assert row["start_seconds"] is row["end_seconds"] is None
    (message,) = caplog.messages
    others = ("Begin File", "End Path", "length")
    assert message.partition("; rename")[0].partition(": ")[2] == ", ".join(
        repr(name) for name in names if name not in others
    )


@pytest.mark.parametrize(
    "cell", ["1,500", "-1", "soon", "1:75", "1:60", "1:60:00", "1:2:3:4", "inf", "1.000,5", "1:-2", "-1:30", "0x10"]
)
def test_times_that_are_not_clear_are_refused(cell):
    with pytest.raises(ValueError, match="start"):
        read_seconds(cell, "start")
    with pytest.raises(ValueError, match=r"a\.csv, line 2.*start"):
        read({"caption": "a", "start": cell, "end": "9000"})


def test_a_unit_is_the_end_of_a_name_and_not_all_of_it():
    cells = {"caption": "a", "min": 1.5, "samples": 4, "loudness ms": 1000}
    row = read(cells, columns={"start_seconds": "min", "end_seconds": "samples"})
    assert (row["start_seconds"], row["end_seconds"]) == (1.5, 4)
    row = read(cells, columns={"start_seconds": "loudness ms", "duration_seconds": "min"})
    assert (row["start_seconds"], row["end_seconds"]) == (1, 2.5)


@pytest.mark.parametrize(
    ("rate", "message"), [("", "start_sample is 24000; expected"), ("fast", "sampling_rate is 'fast'; expected")]
)
def test_samples_need_a_sampling_rate(rate, message):
    with pytest.raises(ValueError, match=rf"a\.csv, line 2: {message} a number"):
        read({"caption": "a", "start_sample": 24000, "end_sample": 64000, "sample_rate": rate})


@pytest.mark.parametrize(("start", "end"), [(2, 2), (2, 1), ("", 0)])
def test_a_part_has_a_length(start, end):
    with pytest.raises(ValueError, match=rf"a\.csv, line 2: the clip is from .* to {end}\.0 s"):
        read({"caption": "a", "start": start, "end": end})


EVENT = {"label": 7, "onset_seconds": "0", "offset_seconds": 1}


def test_events_are_read_from_objects_or_json():
    expected = [{"label": "7", "onset_seconds": 0.0, "offset_seconds": 1.0}]
    for cell in ([EVENT], json.dumps([EVENT])):
        assert read({"caption": "a", "events": cell})["events"] == expected
    moment = {**EVENT, "offset_seconds": 0}
    assert read({"caption": "a", "events": [moment]})["events"][0]["offset_seconds"] == 0
    assert read({"caption": "a", "events": ""})["events"] == []


@pytest.mark.parametrize(
    "cell",
    [
        "dog",
        7,
        [7],
        [EVENT, None],
        [{"label": "a"}],
        [{**EVENT, "onset_seconds": -1}],
        [{**EVENT, "onset_seconds": 2}],
        [{**EVENT, "onset_seconds": math.nan}],
        [{**EVENT, "offset_seconds": "soon"}],
    ],
)
def test_events_that_are_not_clear_are_refused(cell):
    with pytest.raises(ValueError, match=r"a\.csv, line 2: events is .*; expected a list of objects with label"):
        read({"caption": "a", "events": cell})


@pytest.mark.parametrize(
    ("name", "cell", "labels", "is_named"),
    [
        ("labels", "Speech,Music", ["Speech", "Music"], False),
        ("Labels", "Dog; Bark |Cat", ["Dog", "Bark", "Cat"], False),
        ("tags", "Dog; ;Bark;", ["Dog", "Bark"], False),
        ("tags", "Child speech, kid speaking;Dog", ["Child speech, kid speaking", "Dog"], True),
        ("label", "Dog;Bark", ["Dog;Bark"], True),
        ("label", '["Dog", "Bark", null]', ["Dog", "Bark"], False),
        ("labels", [7, None], ["7"], False),
        ("label", 7, ["7"], False),
        ("label", "007", ["007"], False),
        ("tag", "", [], False),
    ],
)
def test_labels_are_divided_at_separators(name, cell, labels, is_named, caplog):
    assert read({"caption": "a", name: cell})["labels"] == labels
    assert [repr(name) in message for message in caplog.messages] == [True] * is_named
    assert read({"caption": "a", "kind": cell}, columns={"label": "kind"})["labels"] == (
        labels if isinstance(cell, list) or cell == "" or "[" in str(cell) or len(labels) == 1 else [cell]
    )


def test_texts_have_one_form():
    composed = "Löwe brüllt & faucht"
    assert (
        clean_text(" \ufeff" + unicodedata.normalize("NFD", "Löwe br&#252;llt &amp; faucht") + "\u200b ") == composed
    )
    assert clean_text("rain<br/>wind<br>and<br />snow") == "rain wind and snow"
    assert clean_text("caf&#xE9; &AMP; bar") == "café & bar"
    assert clean_text("AT&T; R&D") == "AT&T; R&D"
    for cell in (None, "", math.nan, "NaN", "None", "#N/A", "\u200b", "<NA>", "null"):
        assert clean_text(cell) == ""
    assert clean_text("none of them") == "none of them"


def test_cells_without_a_caption_are_no_captions():
    for cell in (None, math.nan, "", [], [None, "nan"]):
        assert not any(read({"caption": cell, "caption_fra": "a"})["captions"].get("eng", []))
    cell = {"eng": "a", "fra": None, "xyz": None, "ger": ["b", None]}
    assert read({"captions": cell})["captions"] == {"eng": ["a"], "deu": ["b"]}


def test_ids_stay_texts():
    row = read({"caption": "a", "clip_id": "007", "source": "1e5", "licence": "CC0"})
    assert (row["clip_id"], row["source"], row["license"]) == ("007", "1e5", "CC0")


@pytest.mark.parametrize("cell", [4, [1], {"eng": 3}, [["a"]], {"xx": "a"}, '{"words": "a"}', "{1: 'a'}"])
def test_a_cell_that_is_no_caption_is_named(cell):
    with pytest.raises(ValueError, match=r"a\.csv, line 2, column 'caption'"):
        read({"caption": cell})


def test_captions_with_and_without_a_language_are_not_merged():
    for values in ({"caption": "a", "caption_eng": "b"}, {"caption": "a", "captions": json.dumps({"en": ["b"]})}):
        names = list(values)
        advice = rf"set --caption_language, or --caption_columns eng={names[0]} eng={names[1]}$"
        with pytest.raises(
            ValueError, match=rf"columns {re.escape(str(names))} would all be captions in 'eng'; {advice}"
        ):
            read(values)
        assert read(values, caption_language="deu")["captions"] == {"deu": ["a"], "eng": ["b"]}
    assert read({"caption": "a", "caption_eng": "", "caption_1": "b"})["captions"] == {"eng": ["a", "b"]}


@pytest.mark.parametrize(
    ("cell", "language"),
    [
        ("de", "deu"),
        (" DE-at", "deu"),
        ("German", "deu"),
        ("ger", "deu"),
        ("deu_Latn", "deu"),
        ("it", "ita"),
        ("Swiss German", "gsw"),
        ("Mandarin Chinese", "zho"),
        ("zh_Hans-CN", "zho"),
        ("Chinese (Simplified)", "zho"),
        ("en", "eng"),
        (None, "eng"),
    ],
)
def test_captions_are_in_the_language_of_their_row(cell, language, caplog):
    values = {"text": "a", "caption_fra": "b", "Locale": cell}
    read_captions = Columns(values, ColumnOptions(), ["eng", "fra"]).read(values, "a.csv, line 2")["captions"]
    assert read_captions == {language: ["a"], "fra": ["b"]}
    told = "the column 'Locale' has the language of the captions; if it is another one, rename"
    assert [told in message for message in caplog.messages] == [True] * (language != "eng")
    assert read(values, columns={"language": ""})["captions"] == {"eng": ["a"], "fra": ["b"]}
    assert read(values, columns={"language": ""}, caption_language="spa")["captions"] == {"spa": ["a"], "fra": ["b"]}


@pytest.mark.parametrize("cell", ["multi", "en,de", "en/de", ["en", "de"], "Non English", "12"])
def test_an_unknown_language_of_a_row_is_refused_if_captions_are_in_it(cell):
    values = {"text": "a", "language": cell}
    with pytest.raises(ValueError, match=r"line 2: .*; use ISO 639-3 .*columns=\{'language': ''\}"):
        read(values)
    assert read({"caption_eng": "a", "lang": cell})["captions"] == {"eng": ["a"]}
    assert Columns(values, ColumnOptions(), captioned=False).read(values, "line 2")["captions"] == {}


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (' ["a", "b"] ', ["a", "b"]),
        ("\u00a0['a', None]\u00a0", ["a", None]),
        ("{'eng': None}", {"eng": None}),
        ("[1, 2", "[1, 2"),
        (" ['a' 'b'] ", ["a", "b"]),  # two texts in numpy form, one in Python
        ("['a']", ["a"]),
        ("[a] dog", "[a] dog"),
        ("a [1]", "a [1]"),
        (None, None),
        ([1], [1]),
    ],
)
def test_lists_and_objects_are_parsed_and_other_cells_are_not(cell, value):
    assert parse(cell) == value


def test_captions_of_several_lines_are_merged_without_repeats():
    languages = ["deu", "eng", "fra"]
    lines = [
        {"eng": ["a", "b"], "fra": ["x"]},  # no translations of each other
        {"eng": ["c", "a"], "fra": ["z", "x"]},
        {"eng": ["a", "c"], "fra": ["y", "z"]},
        {"fra": ["y", "w"]},
    ]
    assert merge_captions(lines, languages) == {"deu": [], "eng": ["c", "a", "a", "b"], "fra": ["z", "x", "y", "w"]}
    assert merge_captions(lines, ["eng"]) == {"eng": ["a", "b", "c"]}
    assert merge_captions([{}, {"fra": []}], languages) == {"deu": [], "eng": [], "fra": []}


def test_placeholders_are_counted_with_an_example(caplog):
    table = Columns(["caption", "labels"], ColumnOptions())
    for cells in (["n/a", "nan"], [" ", None], ["a", ["NULL", "dog"]]):
        table.read(dict(zip(table.names, cells, strict=True)), "a.csv")
    table.warn_of_placeholders("a.csv")
    (message,) = caplog.messages
    assert message.startswith("a.csv: left out 3 captions or labels ")
    assert message.endswith("such as 'n/a'")
