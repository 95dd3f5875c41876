"""Datasets of the `datasets` library: saved datasets and folders of files, with any column names."""

import io

import builders
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from modeling_supclap.datasets_scripts import load_builder, load_splits
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.builders.columns import warn_once
from modeling_supclap.datasets_scripts.builders.hf import (
    HubColumns,
    HubDatasetConfig,
    as_rows,
    ensure_rows,
    find_columns,
    get_origin,
)


def sound(number):
    file = io.BytesIO()
    soundfile.write(file, 0.5 * builders.tone(200.0 + 50 * number, 8000), builders.RATE_HZ, format="WAV")
    return {"bytes": file.getvalue(), "path": f"{number}.wav"}


def table(count, first=0, **columns):
    """Return rows with recordings in the column `clip`, as in a Hub dataset."""
    sounds = [sound(number) for number in range(first, first + count)]
    rows = datasets.Dataset.from_dict({"clip": sounds, **columns})
    return rows.cast_column("clip", datasets.Audio(decode=False))


def test_any_column_names_are_supported(tmp_path):
    texts = [f"a tone {number}" for number in range(10)]
    whole = table(10, what=texts, kind=["low", "high"] * 5)
    whole.save_to_disk(str(tmp_path / "saved"))
    options = {"data_dir": str(tmp_path / "saved"), "caption_column": "what", "label_column": "kind"}
    splits = load_splits("hf", **options)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 8, "test": 1, "validation": 1}

    seen = {}
    for rows in splits.values():
        for row in rows:
            seen[row["captions"]["eng"][0]] = row
    assert sorted(seen) == texts
    row = seen["a tone 7"]
    expected, _ = soundfile.read(io.BytesIO(sound(7)["bytes"]), dtype="float32")
    np.testing.assert_array_equal(read_row(row, builders.RATE_HZ), expected)
    assert (row["audio_path"], row["labels"], row["source"]) == ("7.wav", ["high"], "file:7.wav")
    assert load_builder("hf", **options).origin == "saved"


def test_a_dataset_of_the_hub_is_loaded_with_its_subset_and_revision(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path, name, **options):
        asked.append((path, name, options))
        return datasets.DatasetDict({"test": table(2, caption=["a", "b"])})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    builder = load_builder("hf", str(tmp_path), data_dir="user/set", subset="small", revision="v2")
    assert asked == [("user/set", "small", {"revision": "v2", "cache_dir": str(tmp_path)})]
    assert builder.origin == "user/set"
    assert builder.as_dataset()["test"]["clip_id"][:] == ["test-000000", "test-000001"]
    assert builder.report() == {"missing": [], "left_out": {}}


def test_a_split_that_is_saved_alone_is_divided(tmp_path):
    table(10, caption=list("abcdefghij")).select(range(9, -1, -1)).save_to_disk(str(tmp_path / "saved"))
    splits = load_splits("hf", data_dir=tmp_path / "saved")
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 8, "test": 1, "validation": 1}
    assert {row["clip_id"]: row["audio_path"] for row in splits["train"]}.items() <= {
        f"train-{number:06d}": f"{9 - number}.wav" for number in range(10)
    }.items()


@pytest.mark.parametrize("splits", [["train"], ["train", "validation"]])
def test_a_group_may_be_the_test_split(tmp_path, splits, caplog):
    warn_once.cache_clear()
    sites = [f"site {number % 4}" for number in range(12)]
    (tmp_path / "data").mkdir()
    for first, split in enumerate(splits):
        rows = table(12, 12 * first, caption=sites, site=sites, split=["test"] * 12)
        rows.to_parquet(str(tmp_path / "data" / f"{split}.parquet"))
    options = {"data_dir": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache"), "source_column": "site"}
    if len(splits) > 1:
        with pytest.raises(ValueError, match="has the splits validation; test_group requires a dataset without them"):
            load_splits("hf", test_group="site 2", **options)
        loaded = load_splits("hf", **options)  # without the column split
        assert {name: len(rows) for name, rows in loaded.items()} == {"train": 9, "validation": 12, "test": 3}
    else:
        loaded = load_splits("hf", test_group="site 2", validation_fraction=0.3, **options)
        assert {row["source"] for row in loaded["test"]} == {"site 2"}
        assert {name: len(rows) for name, rows in loaded.items()} == {"train": 6, "validation": 3, "test": 3}
    assert ["the column split is not used" in message for message in caplog.messages].count(True) == 1


def test_rows_are_checked_and_datasets_are_converted():
    rows = table(3, caption=["trois", "deux", "un"]).select([2, 1]).with_format("numpy")
    (first, second) = converted = ensure_rows(rows, "fra")
    assert (first["clip_id"], first["captions"]) == ("clip-000000", {"fra": ["un"]})
    assert second["audio"]["path"] == "1.wav"
    assert isinstance(ensure_rows(converted.with_format("numpy"), "fra")[0]["labels"], list)
    assert ensure_rows([first, second], "eng") == [first, second]


def test_several_classes_of_a_clip_are_named():
    kinds = datasets.List(datasets.ClassLabel(names=["low", "high"]))
    rows = table(2, what=["a", "b"], kind=[[1, 0], []]).cast_column("kind", kinds)
    assert as_rows(rows, caption_column="what", label_column="kind")["labels"] == [["high", "low"], []]
    assert as_rows(rows, caption_column="what", label_column="")["labels"] == [[], []]


def test_a_folder_of_files_with_its_own_splits_and_several_languages(tmp_path):
    for split in ("train", "valid", "test"):
        captions = {"captions": [["a tone", "a sound"], [None], []], "caption_fra": ["un son", "un ton", None]}
        table(3, **captions).to_parquet(str(tmp_path / f"{split}.parquet"))
    files = {split: str(tmp_path / f"{split}.parquet") for split in ("train", "valid", "test")}
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache")).save_to_disk(
        str(tmp_path / "set")
    )
    builder = load_builder("hf", data_dir=str(tmp_path / "set"))
    splits = builder.as_dataset()
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 2, "validation": 2, "test": 2}
    assert splits["test"][0]["captions"] == {"eng": ["a tone", "a sound"], "fra": ["un son"]}
    assert splits["test"][1]["captions"] == {"eng": [], "fra": ["un ton"]}
    assert builder.report()["left_out"] == {"no caption": ["train-000002", "valid-000002", "test-000002"]}


@pytest.fixture
def hub(tmp_path):
    """Folder as on the Hub: two Parquet files of 10 clips each, in row groups of 3."""
    (tmp_path / "hub").mkdir()
    for number in range(2):
        texts = [[f"a tone {number}{clip}", "a sound"] for clip in range(10)]
        kinds = datasets.ClassLabel(names=["low", "high"])
        rows = table(10, 10 * number, captions=texts, caption_fra=["un son"] * 10, kind=[0, 1] * 5).cast_column(
            "kind", kinds
        )
        rows = rows.cast_column("clip", datasets.Audio())  # decodes by default
        rows.to_parquet(str(tmp_path / "hub" / f"train-{number:05d}-of-00002.parquet"), batch_size=3)
    return tmp_path / "hub"


@pytest.mark.parametrize("address", ["{}", "file://{}"])
def test_parquet_is_streamed_as_the_rows_that_it_is(hub, address):
    options = {"label_column": "kind", "validation_fraction": 0, "test_fraction": 0}
    rows = load_splits("hf", data_dir=str(hub), cache_dir=str(hub.parent / "cache"), **options)["train"]
    stream = load_splits("hf", data_dir=address.format(hub), streaming=True, **options)["train"]
    streamed = list(stream)
    assert streamed == [{**row, "clip_index": place} for place, row in enumerate(rows)]
    assert streamed[11]["labels"] == ["high"]
    assert stream.features["captions"] == rows.features["captions"]

    light = list(stream.remove_columns(["audio"]))
    assert [row["audio_path"] for row in light] == [row["audio_path"] for row in rows]
    assert "audio" not in light[0]


def test_a_channel_is_chosen_in_tables_and_streams(tmp_path):
    file = io.BytesIO()
    right = 0.5 * builders.tone(200.0, 8000)
    soundfile.write(file, np.stack([0 * right, right], axis=1), builders.RATE_HZ, format="WAV", subtype="FLOAT")
    clips = {
        "clip": [{"bytes": file.getvalue(), "path": "0.wav"}],
        "caption": ["a tone"],
        "start": [0.0],
        "end": [0.25],
    }
    rows = datasets.Dataset.from_dict(clips).cast_column("clip", datasets.Audio(decode=False))
    (tmp_path / "set").mkdir()
    rows.to_parquet(str(tmp_path / "set" / "train.parquet"))
    options = {"data_dir": str(tmp_path / "set"), "validation_fraction": 0, "test_fraction": 0}
    for channel, expected in ((None, right / 2), (0, 0 * right), (1, right)):
        loaded = load_splits("hf", cache_dir=str(tmp_path / "cache"), channel=channel, **options)["train"]
        stream = load_splits("hf", streaming=True, channel=channel, **options)["train"]
        for row in (loaded[0], next(iter(stream))):
            assert row.get("channel") == channel
            if channel == 0:
                with pytest.raises(ValueError, match="silent"):
                    read_row(row, builders.RATE_HZ)
            else:
                read = read_row(row, builders.RATE_HZ)
                np.testing.assert_allclose(read, expected[: builders.RATE_HZ // 4], atol=1e-6)


def test_ids_contain_the_original_split_name(hub):
    header = "configs:\n- config_name: default\n  data_files:\n  - {split: dev, path: '*.parquet'}\n"
    (hub / "README.md").write_text(f"---\n{header}---\n")
    rows = load_splits("hf", data_dir=str(hub), cache_dir=str(hub.parent / "cache"))
    streamed = load_splits("hf", data_dir=str(hub), streaming=True)
    assert list(rows) == list(streamed) == ["validation"]
    assert [row["clip_id"] for row in streamed["validation"]] == rows["validation"]["clip_id"][:]


def test_a_stream_has_the_splits_of_the_loaded_dataset(hub):
    options = {"data_dir": str(hub), "test_fraction": 0.25}
    splits = load_splits("hf", streaming=True, **options)
    loaded = load_splits("hf", cache_dir=str(hub.parent / "cache"), **options)
    ids = {name: [row["clip_id"] for row in stream] for name, stream in splits.items()}
    assert ids == {name: rows["clip_id"][:] for name, rows in loaded.items()}
    assert {name: len(of_split) for name, of_split in ids.items()} == {"train": 13, "validation": 2, "test": 5}
    assert [row["clip_id"] for row in splits["test"].to_dataset(str(hub.parent / "cache"))] == ids["test"]
    with pytest.raises(ValueError, match=r"20 recordings.*validation"):
        load_splits("hf", data_dir=str(hub), streaming=True, validation_fraction=0.99)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("key", ["path", "source", "speaker"])
def test_sources_are_never_divided_between_splits(tmp_path, streaming, key, caplog):
    (tmp_path / "data").mkdir()
    rows = []
    for tape in range(6):
        (tmp_path / f"{tape}.wav").write_bytes(sound(tape)["bytes"])
        for part in range(4):
            path = str(tmp_path / f"{tape}.wav")
            rows.append({"audio": path, "text": f"{tape} {part}", "start": 0.1 * part, "end": 0.1 * part + 0.1})
            if key != "path":
                rows[-1] |= {"audio": sound(10 * tape + part), key: f"s{tape // 2}"}  # two tapes each
    for row in rows if key != "path" else ():
        del row["start"], row["end"]
    table = pa.Table.from_pylist(rows).take(list(range(0, 24, 2)) + list(range(1, 24, 2)))
    pq.write_table(table, tmp_path / "data" / "train.parquet", row_group_size=5)
    options = {} if streaming else {"cache_dir": str(tmp_path / "cache")}
    options |= {"source_column": "speaker"} if key == "speaker" else {}
    options |= {"audio_column": "audio", "validation_fraction": 0.3, "test_fraction": 0.3}
    splits = load_splits("hf", data_dir=str(tmp_path / "data"), streaming=streaming, **options)
    found = {}
    for name, of_split in splits.items():
        tapes = [int(row["captions"]["eng"][0].split()[0]) for row in of_split]
        found[name] = {tape if key == "path" else tape // 2 for tape in tapes}
        assert len(tapes) == 8
    assert [len(tapes) for tapes in found.values()] == [2 if key == "path" else 1] * 3
    assert len(set.union(*found.values())) == (6 if key == "path" else 3)
    assert not [message for message in caplog.messages if "share" in message]


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_the_user_are_kept_and_their_leaks_are_counted(tmp_path, streaming, caplog):
    captions = {"train": ["a", "b", "c", "d"], "test": ["e", "f", "a"]}
    sources = {"train": ["s1", "s1", "s2", "s3"], "test": ["s2", "s4", "s5"]}
    for first, (split, texts) in enumerate(captions.items()):
        table(len(texts), 10 * first, caption=texts, source=sources[split]).to_parquet(
            str(tmp_path / f"{split}.parquet")
        )
    options = {"validation_fraction": 0, "streaming": streaming}
    options |= {} if streaming else {"cache_dir": str(tmp_path / "cache")}
    splits = load_splits("hf", data_dir=str(tmp_path), **options)
    assert {name: len(list(rows)) for name, rows in splits.items()} == {"train": 4, "test": 3}
    assert [row["source"] for row in splits["test"]] == ["s2", "s4", "s5"]
    assert ["1 of 3 test clips share a recording or a source" in message for message in caplog.messages] == [
        True,
        False,
    ]
    assert ["1 of 3 test clips share a caption" in message for message in caplog.messages] == [False, True]


def test_equal_recordings_of_two_splits_are_counted(tmp_path, caplog):
    table(4, 0, caption=list("abcd")).to_parquet(str(tmp_path / "train.parquet"))
    sounds = [sound(2), {**sound(3), "path": "other.wav"}, {**sound(9), "path": "0.wav"}]  # equal names do not count
    rows = datasets.Dataset.from_dict({"clip": sounds, "caption": list("efg")})
    rows.cast_column("clip", datasets.Audio(decode=False)).to_parquet(str(tmp_path / "test.parquet"))
    splits = load_splits("hf", data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"), validation_fraction=0)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 4, "test": 3}
    assert ["2 of 3 test clips share a recording" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_may_name_the_split(tmp_path, streaming, caplog):
    rows = table(4, caption=list("abcd"), split=["dev", "train", "Test", "train"], license=["CC0", "x", None, "nan"])
    rows.to_parquet(str(tmp_path / "train.parquet"))
    options = {"streaming": streaming, **({} if streaming else {"cache_dir": str(tmp_path / "cache")})}
    splits = load_splits("hf", data_dir=str(tmp_path), **options)
    found = {name: [(row["captions"]["eng"][0], row["license"]) for row in rows] for name, rows in splits.items()}
    assert found == {"validation": [("a", "CC0")], "train": [("b", "x"), ("d", "")], "test": [("c", "")]}

    warn_once.cache_clear()
    (tmp_path / "other").mkdir()
    table(10, caption=list("abcdefghij"), split=["fold 1", *[""] * 9]).to_parquet(
        str(tmp_path / "other" / "train.parquet")
    )
    splits = load_splits("hf", data_dir=str(tmp_path / "other"), **options)
    assert {name: len(list(rows)) for name, rows in splits.items()} == {"train": 8, "validation": 1, "test": 1}
    assert ["column split is not used" in message for message in caplog.messages] == [True]


def test_rows_without_captions_are_left_out_of_a_stream_too(tmp_path, caplog):
    (tmp_path / "hub").mkdir()
    texts = [["a"], [], None, [" "], ["b", ""], *([f"c{number}"] for number in range(7))]
    french = [None] * 3 + ["un"] + [None] * 8
    table(12, captions=texts, caption_fra=french).to_parquet(str(tmp_path / "hub" / "train.parquet"), batch_size=3)
    options = {"data_dir": str(tmp_path / "hub"), "validation_fraction": 0, "test_fraction": 0}
    rows = load_splits("hf", cache_dir=str(tmp_path / "cache"), **options)["train"]
    stream = load_splits("hf", streaming=True, **options)["train"]
    assert stream.num_rows == len(rows) == 10
    assert list(stream) == [{**row, "clip_index": place} for place, row in enumerate(rows)]
    assert "left out 2 of 12 rows" in caplog.text


def test_each_row_of_a_table_or_stream_may_have_its_own_language(tmp_path, caplog):
    (tmp_path / "hub").mkdir()
    languages = ["en", "fr", "it", "fr", None]
    table(5, text=list("abcde"), language=languages).to_parquet(str(tmp_path / "hub" / "train.parquet"))
    options = {"data_dir": str(tmp_path / "hub"), "validation_fraction": 0, "test_fraction": 0}
    rows = list(load_splits("hf", cache_dir=str(tmp_path / "cache"), **options)["train"])
    stream = list(load_splits("hf", streaming=True, **options)["train"])
    expected = [("eng", "a"), ("fra", "b"), ("ita", "c"), ("fra", "d"), ("eng", "e")]
    assert [{name: texts for name, texts in row["captions"].items() if texts} for row in rows] == [
        {language: [text]} for language, text in expected
    ]
    known = [row for row in rows if not row["captions"].pop("ita")]
    assert [row["captions"] for row in stream] == [row["captions"] for row in known]
    assert "left out 1 of 5 rows without a recording or a caption in ['eng', 'fra', " in caplog.text
    assert "train-000002" in caplog.text


def test_a_stream_refuses_several_rows_of_one_recording(tmp_path):
    per_caption(4, 2).select([0, 4, 1, 5, 2, 6]).to_parquet(str(tmp_path / "train.parquet"))
    stream = load_splits("hf", data_dir=str(tmp_path), streaming=True, validation_fraction=0, test_fraction=0)["train"]
    with pytest.raises(ValueError, match=r"train\.parquet: 6 rows of row group 0 .*\b3 recordings"):
        list(stream)


def test_a_column_of_recordings_is_found_by_its_type_or_named():
    rows = table(2, caption=["a", "b"], file_name=["x.wav", "y.wav"], clip_id=["p", "q"], events=["u", "v"])
    read = as_rows(rows)
    assert read["audio_path"] == ["0.wav", "1.wav"]  # not file_name
    assert (read["clip_id"], read["events"]) == (["clip-000000", "clip-000001"], [[], []])
    assert as_rows(rows.select([1]))["source"] == ["file:1.wav"]

    both = table(2, caption=["a", "b"]).add_column("other", table(2, 7)["clip"]).cast_column("other", datasets.Audio())
    with pytest.raises(ValueError, match=r"no column of recordings; set .* one of \['clip', 'caption', 'other'\]"):
        as_rows(both)
    assert as_rows(both, audio_column="other")["audio_path"] == ["7.wav", "8.wav"]
    named = both.add_column("path", [None, None])
    with pytest.raises(ValueError, match="column 'path' contains null"):
        as_rows(named)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"caption_column": "txet"}, "txet.*caption_column"),
        ({}, "caption_column"),
        ({"caption_column": "what", "audio_column": "sound"}, "'sound'"),
        ({"caption_column": "what", "audio_column": "number"}, "'number'.*int64"),
    ],
)
def test_a_column_that_is_not_there_is_named(tmp_path, options, told):
    table(4, what=["a"] * 4, number=[3] * 4).save_to_disk(str(tmp_path))
    with pytest.raises(ValueError, match=told):
        load_splits("hf", data_dir=str(tmp_path), **options)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_of_labels_that_is_not_there_is_named(tmp_path, streaming):
    table(4, caption=["a"] * 4).to_parquet(str(tmp_path / "train.parquet"))
    held_out = {"validation_fraction": 0, "test_fraction": 0}
    with pytest.raises(ValueError, match="'lable'"):
        load_splits("hf", data_dir=str(tmp_path), label_column="lable", streaming=streaming, **held_out)


def test_classes_as_captions_are_their_names():
    kinds = datasets.ClassLabel(names=["dog", "cat"])
    rows = table(3, label=[1, 0, -1]).cast_column("label", kinds)
    assert as_rows(rows, caption_column="label")["captions"] == [{"eng": ["cat"]}, {"eng": ["dog"]}]


@pytest.mark.parametrize("values", [[4, 2], [[4.0], [2.0]], [{"x": "a"}, {"x": "b"}], [[["a"]], [["b"]]]])
def test_captions_that_are_not_text_are_rejected(values):
    with pytest.raises(ValueError, match=r"('name'|clip, row 0.*'what'.*unknown language 'x'|'what'.*'name')"):
        as_rows(table(2, what=values, name=["a", "b"]), caption_column="what")


def per_caption(number, texts):
    """Return one row per caption; the rows of a recording are not adjacent."""
    sounds = [sound(index) for _ in range(texts) for index in range(number)]
    captions = [f"text {text} of {index}" for text in range(texts) for index in range(number)]
    kinds = [f"kind {text}" for text in range(texts) for _ in range(number)]
    rows = datasets.Dataset.from_dict({"audio": sounds, "caption": captions, "kind": kinds})
    return rows.cast_column("audio", datasets.Audio(decode=False))


def test_rows_of_one_recording_become_one_row_and_stay_in_one_split(tmp_path):
    per_caption(15, 5).save_to_disk(str(tmp_path / "saved"))
    splits = load_splits("hf", data_dir=str(tmp_path / "saved"), test_fraction=0.3, validation_fraction=0.2)
    seen = {}
    for rows in splits.values():
        for row in rows:
            number = int(row["audio_path"].partition(".")[0])
            assert number not in seen
            seen[number] = row
            assert row["captions"]["eng"] == [f"text {text} of {number}" for text in range(5)]
            assert row["audio"]["bytes"] == sound(number)["bytes"]
    assert sorted(seen) == list(range(15))


def test_parts_of_a_recording_stay_in_one_split_whatever_source_they_name(tmp_path):
    rows = []
    for number in range(24):  # six recordings in four parts, each by another speaker
        start = 0.1 * (number // 6)
        rows.append({"audio": sound(number % 6), "text": str(number % 6), "speaker": f"s{number}", "start": start})
        rows[-1]["end"] = start + 0.1
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    options = {"source_column": "speaker", "validation_fraction": 0.3, "test_fraction": 0.3}
    splits = load_splits("hf", data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"), **options)
    found = [{row["captions"]["eng"][0] for row in of_split} for of_split in splits.values()]
    assert list(map(len, found)) == [2, 2, 2]
    assert len(set.union(*found)) == 6


def test_recordings_are_compared_by_content_instead_of_name():
    sounds = [{**sound(number), "path": path} for number, path in ((0, "a.wav"), (1, "a.wav"), (0, "b.wav"))]
    sounds += [{"bytes": None, "path": path} for path in ("x/a.wav", "y/a.wav", "x/a.wav")]
    rows = datasets.Dataset.from_dict({"audio": sounds, "caption": list("abcdef"), "kind": list("uvwxyz")})
    rows = rows.cast_column("audio", datasets.Audio(decode=False))
    merged = as_rows(rows, label_column="kind")
    assert [row["captions"]["eng"] for row in merged] == [["a", "c"], ["b"], ["d", "f"], ["e"]]
    assert merged["labels"] == [["u", "w"], ["v"], ["x", "z"], ["y"]]


def test_recordings_that_all_have_one_name_have_different_sources():
    sounds = [{**sound(number), "path": "audio.wav"} for number in (0, 1, 0)]
    rows = datasets.Dataset.from_dict({"audio": sounds, "caption": list("abc")})
    merged = as_rows(rows.cast_column("audio", datasets.Audio(decode=False)))
    assert merged["source"] == ["file:clip-000000", "file:clip-000001"]
    assert merged["audio_path"] == ["audio.wav", "audio.wav"]


def test_captions_of_merged_rows_stay_translations():
    texts = {"caption_eng": ["Rain", "A dog"], "caption_fra": [None, "Un chien"]}
    rows = datasets.Dataset.from_dict({"audio": [sound(0), sound(0)], **texts})
    (merged,) = as_rows(rows.cast_column("audio", datasets.Audio(decode=False)))
    assert merged["captions"] == {"eng": ["A dog", "Rain"], "fra": ["Un chien"]}


def test_numbered_captions_are_one_language():
    rows = table(2, caption_2=["b", None], caption_1=["a", "c"], caption_fra=["un", "deux"], text=["x", "y"])
    rows = rows.add_column("caption_3", [1, 2])
    captions = as_rows(rows, caption_language="deu")["captions"]
    assert captions == [{"deu": ["b", "a"], "fra": ["un"]}, {"deu": ["c"], "fra": ["deux"]}]
    assert as_rows(rows, caption_column="caption_1")["captions"][0] == {"eng": ["a"], "fra": ["un"]}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["Development", "evaluation"], ["train", "test"]),
        (["development", "validation", "evaluation"], ["train", "validation", "test"]),
        (["Train", "development", "Test"], ["train", "validation", "test"]),
        (["val", "dev"], ["validation", "dev"]),
        (["eval", "test", "other"], ["eval", "test", "other"]),
    ],
)
def test_splits_get_the_names_of_the_schema_and_none_is_lost(tmp_path, names, expected):
    splits = {name: table(number + 1, what=["a"] * (number + 1)) for number, name in enumerate(names)}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path))
    options = {"caption_column": "what", "validation_fraction": 0, "test_fraction": 0}
    found = load_splits("hf", data_dir=str(tmp_path), **options)
    assert {name: len(rows) for name, rows in found.items()} == dict(zip(expected, range(1, 9), strict=False))


def test_columns_of_captions_may_be_named_with_their_languages():
    rows = table(2, Beschreibung=["Regen", "Wind"], English=["rain", "wind"], caption_eng=["no", "no"])
    given = ["deu=Beschreibung", "eng=English"]
    expected = [{"deu": ["Regen"], "eng": ["rain"]}, {"deu": ["Wind"], "eng": ["wind"]}]
    assert as_rows(rows, caption_columns=given)["captions"] == expected
    assert as_rows(rows, caption_columns={"deu": "Beschreibung", "eng": "English"})["captions"] == expected
    with pytest.raises(ValueError, match=r"no column 'Titel'.*'Beschreibung'"):
        as_rows(rows, caption_columns=["deu=Titel"])
    with pytest.raises(ValueError, match=r"'de=English'.*LANGUAGE=COLUMN"):
        as_rows(rows, caption_columns=["de=English"])


def test_captions_without_a_language_do_not_join_those_of_a_named_one():
    rows = table(2, Beschreibung=["Regen", "Wind"], caption_eng=["rain", "wind"])
    with pytest.raises(ValueError, match=r"\['Beschreibung', 'caption_eng'\] .*'eng'.*--caption_language"):
        as_rows(rows, caption_column="Beschreibung")
    found = as_rows(rows, caption_column="Beschreibung", caption_language="deu")["captions"][0]
    assert found == {"deu": ["Regen"], "eng": ["rain"]}
    both = as_rows(rows, caption_columns=["eng=Beschreibung", "eng=caption_eng"])["captions"][0]
    assert both == {"eng": ["Regen", "rain"]}


@pytest.mark.parametrize(
    ("recording", "light"),
    [(sound(0), "clip.path"), ({"bytes": b"", "name": "a"}, "clip"), (b"", "clip"), ("a.wav", "clip")],
)
def test_names_are_read_without_their_recordings(recording, light):
    types = pa.table({"clip": [recording], "caption": ["a"]}).schema
    assert find_columns(types, HubDatasetConfig(data_dir="", audio_column="clip")).light == light
    rows = table(1, caption=["a"])
    assert HubColumns(rows.features, HubDatasetConfig(data_dir="")).light == "clip.path"


def test_the_origin_of_a_folder_is_its_name(tmp_path, monkeypatch):
    (tmp_path / "saved").mkdir()
    monkeypatch.chdir(tmp_path / "saved")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [get_origin(name) for name in (".", "~/saved", str(tmp_path / "saved"), "user/set")]
    assert found == ["saved", "saved", "saved", "user/set"]


def test_data_dir_is_required():
    with pytest.raises(ValueError, match="data_dir"):
        load_splits("hf")


SAMPLES = [(0.5 * builders.tone(200.0 + 100 * number, 1600)).tolist() for number in range(3)]
KINDS = {
    "decoded": [{"array": samples, "sampling_rate": builders.RATE_HZ} for samples in SAMPLES],
    "decoded channels": [{"array": [samples] * 2, "sampling_rate": builders.RATE_HZ} for samples in SAMPLES],
    "decoded frames": [{"array": [[x, x] for x in samples], "sampling_rate": 16e3} for samples in SAMPLES],
    "bytes": [sound(number)["bytes"] for number in range(3)],
    "structs": [sound(number) for number in range(3)],
    "only bytes": [{"bytes": sound(number)["bytes"]} for number in range(3)],
    "no paths": [{"bytes": sound(number)["bytes"], "path": None} for number in range(3)],
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parquet_may_hold_recordings_in_any_form(tmp_path, kind, streaming):
    values = KINDS[kind]
    gone = {"array": None, "sampling_rate": 8000} if kind == "decoded" and not streaming else None
    table = pa.table({"audio": pa.array([*values[:2], gone, values[2]]), "text": ["a", "b", "c", "d"]})
    pq.write_table(table, tmp_path / "train.parquet")
    options = {} if streaming else {"cache_dir": str(tmp_path / "cache")}
    options |= {"validation_fraction": 0, "test_fraction": 0}
    if streaming:
        rows = list(load_splits("hf", data_dir=str(tmp_path), streaming=True, **options)["train"])
    else:
        builder = load_builder("hf", data_dir=str(tmp_path), **options)
        rows = list(builder.as_dataset()["train"])
        assert builder.report() == {"missing": ["train-000002"], "left_out": {}}
    assert [row["captions"]["eng"] for row in rows] == [["a"], ["b"], ["d"]]  # without the null
    assert all(len(row["source"]) < 100 for row in rows)
    if "decoded" in kind:
        expected = [np.float32(samples) for samples in SAMPLES]
    else:
        expected = [soundfile.read(io.BytesIO(sound(number)["bytes"]), dtype="float32")[0] for number in range(3)]
    for row, waveform in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(read_row(row, builders.RATE_HZ), waveform)


@pytest.mark.parametrize("column", ["audio", "path"])
def test_relative_paths_of_a_table_start_at_its_folder(tmp_path, column, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "sounds").mkdir(parents=True)
    lines = [f"{column},caption"]
    for number in range(3):
        (tmp_path / "data" / "sounds" / f"{number}.wav").write_bytes(sound(number)["bytes"])
        lines.append(f"sounds/{number}.wav,tone {number}")
    lines += ["sounds/gone.wav,gone", ",nothing"]
    (tmp_path / "data" / "train.csv").write_text("\n".join(lines))
    options = {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0, "test_fraction": 0}
    builder = load_builder("hf", data_dir="data", audio_column=column, **options)
    *rows, gone = builder.as_dataset()["train"]
    assert (gone["audio_path"], gone["audio"]) == ("sounds/gone.wav", {"bytes": None, "path": "sounds/gone.wav"})
    assert builder.report()["missing"] == ["train-000004"]
    assert len(rows) == 3
    for number, row in enumerate(rows):
        assert row["audio"]["path"] == str(tmp_path / "data" / "sounds" / f"{number}.wav")
        expected = soundfile.read(io.BytesIO(sound(number)["bytes"]), dtype="float32")[0]
        np.testing.assert_array_equal(read_row(row, builders.RATE_HZ), expected)


def test_a_folder_of_videos_is_loaded_without_ffmpeg(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(2):
        (tmp_path / "data" / f"{number}.mp4").write_bytes(b"\0\0\0\x20ftypisom" + bytes([number]))
    (tmp_path / "data" / "metadata.csv").write_text("file_name,caption\n0.mp4,a dog\n1.mp4,rain\n")
    options = {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0, "test_fraction": 0}
    rows = load_splits("hf", data_dir=str(tmp_path / "data"), **options)["train"]
    assert [row["audio"]["path"] for row in rows] == [str(tmp_path / "data" / f"{number}.mp4") for number in range(2)]
    assert [row["captions"]["eng"] for row in rows] == [["a dog"], ["rain"]]


def test_other_codes_of_languages_are_read_or_named(tmp_path):
    options = {"validation_fraction": 0, "test_fraction": 0, "cache_dir": str(tmp_path / "cache")}
    for name, captions in (("codes", {"en": "low", "fr-CA": "grave"}), ("words", {"original": "low"})):
        (tmp_path / name).mkdir()
        table = pa.table({"audio": [sound(0)], "captions": [captions]})
        pq.write_table(table, tmp_path / name / "train.parquet")
    rows = load_splits("hf", data_dir=str(tmp_path / "codes"), **options)["train"]
    assert rows["captions"][:] == [{"eng": ["low"], "fra": ["grave"]}]
    with pytest.raises(ValueError, match=r"captions.*'original'.*ISO 639-3"):
        load_splits("hf", data_dir=str(tmp_path / "words"), **options)


@pytest.mark.parametrize("streaming", [False, True])
def test_types_may_differ_between_files(tmp_path, streaming):
    data = tmp_path / "data"
    data.mkdir()
    texts = {"a": pa.nulls(1), "b": ["rain"], "c": pa.array(["dog"], pa.large_string())}
    for name, captions in texts.items():
        sounds = pa.array([sound(ord(name))])
        pq.write_table(pa.table({"audio": sounds, "caption": captions, "text": ["x"]}), data / f"train-{name}.parquet")
    options = {"validation_fraction": 0, "test_fraction": 0, "streaming": streaming}
    options |= {} if streaming else {"cache_dir": str(tmp_path / "cache")}
    rows = list(load_splits("hf", data_dir=str(data), **options)["train"])
    assert [row["captions"]["eng"] for row in rows] == [["rain"], ["dog"]]
    sounds = pa.array([sound(9)])
    pq.write_table(pa.table({"audio": sounds, "caption": [["a", "b"]], "text": ["x"]}), data / "train-d.parquet")
    if streaming:
        rows = list(load_splits("hf", data_dir=str(data), **options)["train"])
        assert rows[-1]["captions"]["eng"] == ["a", "b"]
    else:
        with pytest.raises(ValueError, match=r"d\.parquet.*caption"):
            load_splits("hf", data_dir=str(data), **options)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_pointer_of_git_lfs_is_named(tmp_path, streaming):
    (tmp_path / "train.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    options = {} if streaming else {"cache_dir": str(tmp_path / "cache")}
    with pytest.raises((ValueError, OSError), match=r"train\.parquet.*Git LFS"):
        load_splits("hf", data_dir=str(tmp_path), streaming=streaming, **options)


@pytest.mark.parametrize("streaming", [False, True])
def test_captions_by_language_and_parts_of_recordings(tmp_path, streaming):
    captions = [{"eng": ["low"], "fra": ["grave"]}, {"eng": ["lower"], "fra": []}]
    columns = {"audio": [sound(0)] * 2, "captions": captions, "start": [0.0, 0.25], "end": [0.25, 0.5]}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    options = {} if streaming else {"cache_dir": str(tmp_path / "cache")}
    options |= {"validation_fraction": 0, "test_fraction": 0}
    rows = list(load_splits("hf", data_dir=str(tmp_path), streaming=streaming, **options)["train"])
    assert [row["captions"] for row in rows] == captions
    assert [row["source"] for row in rows] == ["file:0.wav"] * 2
    whole = np.concatenate([read_row(row, builders.RATE_HZ) for row in rows])
    np.testing.assert_array_equal(whole, soundfile.read(io.BytesIO(sound(0)["bytes"]), dtype="float32")[0])


def test_the_hash_of_a_stream_depends_on_its_row_groups_but_not_on_its_folder(tmp_path):
    hashes = []
    for name, size in (("a", 2), ("b", 2), ("c", 3)):
        (tmp_path / name).mkdir()
        columns = {"audio": [sound(number) for number in range(6)], "text": list("abcdef")}
        pq.write_table(pa.table(columns), tmp_path / name / "train.parquet", row_group_size=size)
        options = {"validation_fraction": 0, "test_fraction": 0}
        splits = load_splits("hf", data_dir=str(tmp_path / name), streaming=True, **options)
        hashes.append(splits["train"].content_hash)
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_without_recordings_is_named(tmp_path, streaming):
    pq.write_table(pa.table({"audio": [1, 2], "text": ["a", "b"]}), tmp_path / "train.parquet")
    options = {"validation_fraction": 0, "test_fraction": 0}
    with pytest.raises(ValueError, match=r"column 'audio' contains int64"):
        list(load_splits("hf", data_dir=str(tmp_path), streaming=streaming, **options)["train"])


def test_a_folder_of_recordings_needs_no_ffmpeg(tmp_path):  # where torchcodec does not load
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / "data" / f"{number}.wav").write_bytes(sound(number)["bytes"])
    lines = "".join(f"{number}.wav,sound {number}\n" for number in range(3))
    (tmp_path / "data" / "metadata.csv").write_text(f"file_name,caption\n{lines}")
    options = {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0, "test_fraction": 0}
    encode = datasets.Audio.encode_example
    rows = load_splits("hf", data_dir=str(tmp_path / "data"), **options)["train"]
    assert datasets.Audio.encode_example is encode
    for number, row in enumerate(rows):
        assert row["captions"]["eng"] == [f"sound {number}"]
        expected = soundfile.read(io.BytesIO(sound(number)["bytes"]), dtype="float32")[0]
        np.testing.assert_array_equal(read_row(row, builders.RATE_HZ), expected)


def test_large_strings_are_paths_and_large_binaries_are_recordings(tmp_path):
    (tmp_path / "a.wav").write_bytes(sound(0)["bytes"])
    path, content = str(tmp_path / "a.wav"), sound(0)["bytes"]
    for cell, kind, name in ((path, pa.large_string(), path), (content, pa.large_binary(), "clip-000000")):
        table = pa.table({"sound": pa.array([cell], kind), "text": ["a"]})
        row = as_rows(datasets.Dataset(table), audio_column="sound")[0]
        assert row["audio_path"] == name
        assert len(read_row(row, builders.RATE_HZ)) == 8000
