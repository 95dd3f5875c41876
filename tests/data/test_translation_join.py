"""Joining translated captions to a dataset, compared with a join written as loops."""

import logging
import random
import re
import unicodedata

import pyarrow as pa
import pytest
from datasets import Audio, Dataset, DatasetDict, Features, Value

from modeling_supclap.datasets_scripts import load_splits
from modeling_supclap.datasets_scripts.schema import features
from modeling_supclap.datasets_scripts.stream import RowGroup, RowStream
from modeling_supclap.datasets_scripts.translation.join import Caption, join_translations, read_captions
from modeling_supclap.datasets_scripts.translation.table import source_hash, write_translations

NEW = ["fra", "jpn"]


def rows_of(captions_of, languages=("eng",)):
    """Return rows with the English captions `{clip id: captions}`."""
    rest = {"labels": [], "events": [], "source": "s", "license": "l"}
    return [
        {
            "clip_id": clip,
            "audio_path": f"{clip}.wav",
            "captions": {**{x: [] for x in languages}, "eng": texts},
            **rest,
        }
        for clip, texts in captions_of.items()
    ]


def dataset(captions_of, languages=("eng",)):
    return Dataset.from_list(rows_of(captions_of, languages), features=features(languages))


class Held:
    """Split in memory, for a stream."""

    def __init__(self, rows):
        self.licenses, self.digest = {}, ""
        self.features, self.rows = rows.features, rows.to_list()
        self.row_groups = [RowGroup("", 0, len(rows))]

    def read(self, group, columns):
        return self.rows.__getitem__


def stream_of(rows):
    return RowStream(Held(rows)).map(lambda row: {name: row[name] for name in rows.features}, rows.features)


def lines_of(captions_of, languages=NEW, hashed=True):
    """Return a translation of every caption."""
    return [
        {
            "clip_id": clip,
            "caption_index": index,
            "language": language,
            "text": f"{language} {text}",
            "model": "m",
            "source_hash": source_hash(text) if hashed else None,
        }
        for language in languages
        for clip, texts in captions_of.items()
        for index, text in enumerate(texts)
    ]


def naive_join(rows, lines, languages):
    """Join with loops: add a language to a clip if all its captions are translated and unchanged."""
    joined = []
    for row in rows:
        captions = dict(row["captions"])
        for language in languages:
            texts = []
            for index, text in enumerate(row["captions"]["eng"]):
                for line in lines:
                    key = (line["clip_id"], line["caption_index"], line["language"])
                    if key == (row["clip_id"], index, language) and line["source_hash"] in (None, source_hash(text)):
                        texts.append(line["text"])
            if len(texts) == len(row["captions"]["eng"]) and not captions.get(language):
                captions[language] = texts
            captions.setdefault(language, [])
        joined.append({**row, "captions": captions})
    return joined


@pytest.fixture
def some():
    """Captions of 30 clips with 0 to 4 captions each, in random order, with ids and texts in several scripts."""
    rng = random.Random(0)
    ids = [f"clip {number} ç犬'#" for number in range(30)]
    rng.shuffle(ids)
    return {clip: [f"a dog {clip} {index}" for index in range(rng.randrange(5))] for clip in ids}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "translations.parquet"


KINDS = {
    "dataset": lambda rows: rows,
    "empty": lambda rows: rows.select([]),
    "selection": lambda rows: rows.select([7, 3, 21, 4]),
    "range": lambda rows: rows.select(range(5, 15)),
    "shuffled": lambda rows: rows.shuffle(seed=1),
    "formatted": lambda rows: rows.with_format("numpy", columns=["clip_id"]),
    "stream": stream_of,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("languages", [("eng",), ("eng", "fra", "deu")], ids=["alone", "empty_ones"])
@pytest.mark.parametrize("damage", [0, 10], ids=["complete", "gaps"])
def test_it_is_the_join_written_as_loops(some, path, kind, languages, damage, caplog):
    rows = KINDS[kind](dataset(some, languages))
    lines = lines_of(some)
    rng = random.Random(1)
    rng.shuffle(lines)
    lines = lines[damage:]
    for line in lines[:damage]:
        line["source_hash"] = source_hash("something else")
    write_translations(path, lines)

    joined = join_translations(rows, path, strict=False)
    plain, found = (each.with_format(None) if isinstance(rows, Dataset) else each for each in (rows, joined))
    assert type(joined) is type(rows)
    assert joined.features == Features(
        {**rows.features, "captions": features([*dict.fromkeys([*languages, *NEW])])["captions"]}
    )
    assert list(found) == naive_join(plain, lines, NEW)
    if isinstance(rows, Dataset):
        assert joined.format == rows.format
        assert joined.column_names == rows.column_names
        if not damage and kind in ("dataset", "shuffled", "formatted"):
            assert not caplog.records
            assert join_translations(rows, path)._fingerprint == joined._fingerprint != rows._fingerprint


def test_splits_are_joined_as_one(some, path):
    clips = list(some)
    parts = {"train": {c: some[c] for c in clips[:20]}, "test": {c: some[c] for c in clips[20:]}}
    splits = DatasetDict({name: dataset(part) for name, part in parts.items()})
    lines = lines_of(some)
    write_translations(path, lines)
    joined = join_translations(splits, path)
    assert isinstance(joined, DatasetDict)
    streamed = join_translations({name: stream_of(split) for name, split in splits.items()}, path)
    for name, split in splits.items():
        assert list(joined[name]) == list(streamed[name]) == naive_join(split, lines, NEW)


def test_languages_have_the_requested_order(path):
    captions = {"a": ["A dog"]}
    write_translations(path, lines_of(captions, ["fra", "jpn", "deu"]))
    assert list(join_translations(dataset(captions), path, ["jpn", "fra"]).features["captions"]) == [
        "eng",
        "jpn",
        "fra",
    ]
    assert join_translations(dataset(captions), path)[0]["captions"] == {
        "eng": ["A dog"],
        "fra": ["fra A dog"],
        "deu": ["deu A dog"],
        "jpn": ["jpn A dog"],
    }


def test_the_captions_may_be_in_another_language_than_english(path):
    rows = Dataset.from_list(rows_of({"a": []}, ["eng", "swe"]), features=features(["eng", "swe"]))
    rows = rows.map(lambda row: {"captions": {"eng": [], "swe": ["En hund"]}}, load_from_cache_file=False)
    write_translations(path, lines_of({"a": ["En hund"]}, ["eng"]))
    joined = join_translations(rows, path, source_language="swe")
    assert joined[0]["captions"] == {"eng": ["eng En hund"], "swe": ["En hund"]}
    with pytest.raises(ValueError, match="'eng'"):
        join_translations(rows, path)
    with pytest.raises(ValueError, match="'nor'"):
        join_translations(rows, path, source_language="nor")


def test_clips_that_speak_the_language_already_keep_their_captions(path):
    native = {"clip_id": "b", "captions": {"eng": ["A cat"], "fra": ["Un chat"]}}
    rows = [*rows_of({"a": ["A dog"]}, ["eng", "fra"]), {**rows_of({"b": []})[0], **native}]
    rows = Dataset.from_list(rows, features=features(["eng", "fra"]))
    write_translations(path, lines_of({"a": ["A dog"]}, ["fra"]))
    for joined in (join_translations(rows, path), list(join_translations(stream_of(rows), path))):
        assert [row["captions"]["fra"] for row in joined] == [["fra A dog"], ["Un chat"]]
    write_translations(path, lines_of({"a": ["A dog"], "b": ["A cat"]}, ["fra"]))
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"fra.*'b'"):
            join_translations(rows, path, strict=strict)


CAPTIONS = {"a": ["A dog", "A barking dog"], "b": ["Rain"]}


def without(*keys):
    """Return all lines except the given French ones."""
    return [x for x in lines_of(CAPTIONS) if x["language"] != "fra" or (x["clip_id"], x["caption_index"]) not in keys]


UNKNOWN = [*lines_of(CAPTIONS), *lines_of({"c": ["Wind"]}, ["fra"])]
STALE = [*without(("b", 0)), *lines_of({"b": ["Snow"]}, ["fra"])]
DOGS, RAIN = ["fra A dog", "fra A barking dog"], ["fra Rain"]


@pytest.mark.parametrize(
    ("lines", "message", "french"),
    [
        (without(("a", 1)), "fra are missing.*'a' caption 1", [[], RAIN]),
        (without(("a", 0), ("a", 1)), "fra.*'a' caption 0.*'a' caption 1", [[], RAIN]),
        (STALE, "fra are stale.*'b' caption 0", [DOGS, []]),
        (UNKNOWN, "'c'", [DOGS, RAIN]),
    ],
    ids=["part", "clip", "stale", "unknown"],
)
def test_mismatches_are_an_error_or_a_warning_with_counts(path, caplog, lines, message, french):
    write_translations(path, lines)
    with pytest.raises(ValueError, match=message):
        join_translations(dataset(CAPTIONS), path)
    with caplog.at_level(logging.WARNING):
        joined = join_translations(dataset(CAPTIONS), path, strict=False)
    assert [row["captions"]["fra"] for row in joined] == french
    assert [row["captions"]["jpn"] for row in joined] == [["jpn A dog", "jpn A barking dog"], ["jpn Rain"]]
    assert len(caplog.records) == 1
    assert re.search(message, caplog.text)
    stream = stream_of(dataset(CAPTIONS))
    assert [row["captions"]["fra"] for row in join_translations(stream, path, strict=False)] == french
    if lines is not UNKNOWN:  # a stream does not know its clips in advance
        with pytest.raises(ValueError, match=message):
            list(join_translations(stream, path))


def test_one_message_lists_all_mismatches(path):
    write_translations(path, [*without(("a", 1)), *lines_of({"c": ["Wind"]}, ["fra", "jpn"])])
    with pytest.raises(ValueError, match=r"fra.*'c'.*strict=False"):
        join_translations(dataset(CAPTIONS), path)


@pytest.mark.parametrize("strict", [True, False])
def test_a_translation_of_a_caption_that_the_clip_lacks_is_an_error(path, strict):
    write_translations(path, [*lines_of(CAPTIONS), {**lines_of(CAPTIONS)[0], "clip_id": "b", "caption_index": 1}])
    message = "fra.*'b' caption 1"
    for rows in (dataset(CAPTIONS), stream_of(dataset(CAPTIONS))):
        with pytest.raises(ValueError, match=message):
            list(join_translations(rows, path, strict=strict))


def test_a_clip_id_in_another_normal_form_is_pointed_at(path):
    composed, decomposed = (unicodedata.normalize(form, "pluie en été") for form in ("NFC", "NFD"))
    write_translations(path, lines_of({composed: ["Rain"]}))
    with pytest.raises(ValueError, match=f"'{composed}'.*Unicode"):
        join_translations(dataset({decomposed: ["Rain"]}), path)


def test_a_clip_id_that_is_there_twice_is_an_error(path):
    write_translations(path, lines_of(CAPTIONS))
    rows = Dataset.from_list([*rows_of(CAPTIONS), *rows_of({"a": ["A cat"]})], features=features(["eng"]))
    with pytest.raises(ValueError, match="'a'"):
        join_translations(rows, path)


def test_captions_are_read_in_the_order_of_the_rows():
    splits = DatasetDict(train=dataset(CAPTIONS).select([1, 0]), test=dataset({"c": []}))
    assert read_captions(splits) == [
        Caption("b", 0, "Rain"),
        Caption("a", 0, "A dog"),
        Caption("a", 1, "A barking dog"),
    ]


@pytest.fixture
def with_audio():
    """Rows with much audio that cannot be decoded."""
    audio = [{"bytes": bytes([i]) * 100_000, "path": None} for i in range(20)]
    columns = {
        "clip_id": [f"c{i}" for i in range(20)],
        "audio": audio,
        "captions": [{"eng": [f"dog {i}"]} for i in range(20)],
    }
    kinds = {"bytes": Value("binary"), "path": Value("string")}
    schema = Features({"clip_id": Value("string"), "audio": kinds, "captions": features(["eng"])["captions"]})
    return Dataset.from_dict(columns, features=schema), {f"c{i}": [f"dog {i}"] for i in range(20)}


def audio_address(rows):
    """Return the memory address of the audio bytes."""
    return rows.data["audio"].chunk(0).field("bytes").buffers()[2].address


@pytest.mark.parametrize("kind", ["dataset", "shuffled", "range"])
@pytest.mark.parametrize("cast", [False, True], ids=["struct", "audio"])
def test_audio_is_neither_copied_nor_decoded(with_audio, path, kind, cast):
    rows, captions = with_audio
    write_translations(path, lines_of(captions))
    rows = KINDS[kind](rows.cast_column("audio", Audio()) if cast else rows)
    before = pa.total_allocated_bytes()
    joined = join_translations(rows, path, strict=False)
    assert pa.total_allocated_bytes() - before < 100_000
    assert audio_address(joined) == audio_address(rows)
    assert joined.features["audio"] == rows.features["audio"]
    got = joined.cast_column("audio", {"bytes": Value("binary"), "path": Value("string")})
    for row in got:
        assert row["audio"]["bytes"] == bytes([int(row["clip_id"][1:])]) * 100_000
        assert row["captions"]["jpn"] == [f"jpn dog {row['clip_id'][1:]}"]


def test_every_builder_takes_translations(path, tmp_path):
    options = {"num_train": 32, "num_validation": 32, "num_test": 32, "languages": ["eng"], "cache_dir": str(tmp_path)}
    plain = load_splits("synthetic", **options)
    captions = {}
    for caption in read_captions(plain):
        captions.setdefault(caption.clip_id, []).append(caption.text)
    write_translations(path, lines_of(captions))
    splits = load_splits("synthetic", translations=str(path), **options)
    assert splits.keys() == plain.keys()
    for name, split in splits.items():
        expected = [[f"fra {text}" for text in row["captions"]["eng"]] for row in plain[name]]
        assert [row["captions"]["fra"] for row in split] == expected
    chosen = load_splits("synthetic", translations={"path": str(path), "languages": ["jpn"]}, **options)
    assert list(chosen["test"].features["captions"]) == ["eng", "jpn"]
    with pytest.raises(ValueError, match=r"'strickt'.*'strict'"):
        load_splits("synthetic", translations={"path": str(path), "strickt": False}, **options)
