"""Format of the rows."""

import json
from collections import Counter
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pytest
from valid_rows import validate_row

from modeling_supclap.datasets_scripts.schema import (
    Row,
    caption_counts,
    check_rows,
    features,
    group_id,
    hash_rows,
    label_counts,
    label_names,
    lacking_languages,
    list_classes,
    replace_columns,
    require_captions,
    warn_of_shared_captions,
)
from modeling_supclap.datasets_scripts.stream import RowStream
from modeling_supclap.languages import LANGUAGES

ROW: Row = {
    "clip_id": "1-100032-A-0",
    "audio_path": "audio/1-100032-A-0.ogg",
    "captions": {"eng": ["A dog barking", "A barking dog"], "fra": []},
    "labels": ["dog"],
    "events": [{"label": "dog", "onset_seconds": 0.5, "offset_seconds": 0.5}],
    "source": "freesound:100032",
    "license": "CC BY 3.0",
}


def test_new_columns_of_selected_rows_do_not_copy_their_audio():
    def address(rows):
        return rows.data.column("audio").chunk(0).field("bytes").buffers()[-1].address

    audio = [{"bytes": content, "path": None} for content in (b"one", b"two", b"three")]
    whole = datasets.Dataset.from_dict({"clip_id": ["a", "b", "c"], "audio": audio}, split="test")
    whole = whole.with_format("numpy", ["clip_id"], output_all_columns=True)
    rows = whole.select([2, 0])
    types = {"clip_id": datasets.Value("string"), "count": datasets.Value("int32")}
    replaced = replace_columns(rows, {"clip_id": ["z", "y"], "count": [1, None]}, types)
    assert address(replaced) == address(whole)
    assert replaced.format["type"] == "numpy"
    assert replaced.format["columns"] == ["clip_id", "count"]
    assert replaced.format["output_all_columns"]
    assert replaced.split == "test"
    assert (
        replaced._fingerprint == replace_columns(rows, {"clip_id": ["z", "y"], "count": [1, None]}, types)._fingerprint
    )
    assert replaced._fingerprint != whole._fingerprint
    assert whole.column_names == ["clip_id", "audio"]
    assert replaced.with_format(None).to_list() == [
        {"clip_id": "z", "audio": audio[2], "count": 1},
        {"clip_id": "y", "audio": audio[0], "count": None},
    ]
    assert replaced.features["count"] == datasets.Value("int32")
    assert list(replace_columns(whole, {"count": range(3)}, types)["count"]) == [0, 1, 2]
    with pytest.raises(ValueError, match="zip"):
        replace_columns(whole, {"count": range(2)}, types)


def test_a_row_survives_arrow_unchanged():
    table = datasets.Dataset.from_list([ROW, {**ROW, "labels": [], "events": []}], features=features(["eng", "fra"]))
    assert table[0] == ROW
    assert table[1]["events"] == []


def test_features_name_the_fields_of_the_row_in_order():
    assert list(features()) == list(Row.__annotations__)
    assert list(features()["captions"]) == list(LANGUAGES)
    assert list(features(["swe", "eng"])["captions"]) == ["swe", "eng"]
    parts = features(["eng"], with_segments=True, with_channel=True)
    assert list(parts) == [*Row.__annotations__, "start_seconds", "end_seconds", "channel"]
    assert [parts[name].dtype for name in list(parts)[-3:]] == ["float64", "float64", "int32"]


def test_a_valid_row_passes():
    validate_row(ROW)
    validate_row({**ROW, "captions": {"swe": ["En hund skäller"]}}, languages=["swe"])


def event(onset_seconds, offset_seconds):
    return {"events": [{"label": "dog", "onset_seconds": onset_seconds, "offset_seconds": offset_seconds}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_id": ""}, "clip_id.*''"),
        ({"clip_id": "  "}, "clip_id.*'  '"),
        ({"audio_path": None}, "audio_path.*None"),
        ({"source": ""}, "source.*''"),
        ({"captions": {"eng": ["A dog", " \n"]}}, r"caption.*\b1\b.*'eng'"),
        ({"captions": {"eng": [""]}}, r"caption.*\b0\b.*'eng'"),
        ({"captions": {"eng": [], "fra": []}}, "caption"),
        ({"captions": {}}, "caption"),
        ({"captions": {"eng": ["A dog"], "klingon": ["targh"]}}, "'klingon'"),
        ({"captions": {"eng": "A dog"}}, "'eng'.*'A dog'"),
        ({"labels": "dog"}, "labels.*'dog'"),
        (event(2.0, 1.0), "'dog'.*1.0.*2.0"),
        (event(-0.1, 1.0), "'dog'.*-0.1"),
        (event(float("nan"), 1.0), "'dog'.*nan"),
        (event(0.0, float("nan")), "'dog'.*nan"),
    ],
)
def test_a_bad_row_is_refused_with_its_name_and_fault(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate_row({**ROW, **change})
    assert str(caught.value).startswith(f"clip {change.get('clip_id', ROW['clip_id'])!r}: ")


def test_every_fault_is_named_at_once():
    with pytest.raises(ValueError, match=r"audio_path.*''.*'eng'"):
        validate_row({**ROW, "audio_path": "", "captions": {"eng": [" "]}})


def test_missing_fields_are_named():
    with pytest.raises(ValueError, match="'license', 'source'"):
        validate_row({key: value for key, value in ROW.items() if key not in ("source", "license")})


def test_the_error_of_a_missing_language_lists_the_existing_ones():
    row = {**ROW, "captions": {"swe": ["En hund"], "eng": ["A dog"], "fra": [], "ita": ["Un cane"]}}
    problem = r"^no train clip has a caption in \['fra', 'deu'\].*\['eng', 'ita', 'swe'\]: .*--caption_language"
    with pytest.raises(ValueError, match=problem):
        require_captions([row], ["fra", "deu", "eng"], split="train")


class MapStyle:
    """Map-style dataset that is not a list, as those of torch."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize("form", [list, datasets.Dataset.from_list, MapStyle])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"captions": {"eng": "A dog"}}, "eng.*list"),
        ({"captions": {"eng": ["A dog"], "fra": "Un chien"}}, "fra.*list"),
        ({"labels": "dog"}, "labels.*list"),
        ({"captions": "A dog"}, r"captions.*\{'eng'"),
        ({"negatives": {"eng": "A cat"}}, "eng.*list"),
        ({"negatives": "A cat"}, r"negatives.*\{'eng'"),
    ],
)
def test_a_string_is_not_a_list_in_any_form_of_rows(form, change, message):
    check_rows(form([ROW, ROW]))
    check_rows(form([{**ROW, "labels": None, "captions": {"eng": ["A dog"], "fra": None}, "negatives": None}]))
    check_rows(form([{"clip_id": "a", "labels": ["dog"]}]))
    check_rows(MapStyle([]))
    with pytest.raises(ValueError, match=message):
        check_rows(form([{**ROW, **change}]))


def test_the_row_with_a_string_is_named():
    with pytest.raises(ValueError, match=r"clip 'second' has 'dog' as labels"):
        check_rows([ROW, {**ROW, "clip_id": "second", "labels": "dog"}])
    with pytest.raises(ValueError, match=r"clip 'second' has the labels \['dog', 2\]"):
        check_rows([ROW, {**ROW, "clip_id": "second", "labels": ["dog", 2]}])
    with pytest.raises(ValueError, match="b'dog' as labels"):
        check_rows([{**ROW, "labels": b"dog"}])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pandas.DataFrame([ROW]), "DataFrame.*from_pandas"),
        ({"clip_id": ["a"], "labels": [["dog"]]}, "dict.*'clip_id', 'labels'"),
        ("test", "row 0 is 't'"),
        (["a.wav"], "row 0 is 'a.wav'.*'clip_id'"),
        ([{"audio": "a.wav", "text": "A dog"}], r"row 0.*\['audio', 'text'\].*clip_id"),
        ([ROW, {key: value for key, value in ROW.items() if key != "clip_id"}], "row 1.*clip_id"),
        (
            datasets.Dataset.from_list([{"clip_id": "a", "audio": "a.wav", "caption": "A dog"}]),
            r"dataset.*\['clip_id'",
        ),
    ],
)
def test_anything_but_rows_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        check_rows(rows)


def rows_of_captions(seed=0, count=60):
    """Return rows with captions from a small set, so that many rows have equal captions; some languages are missing."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        captions = {}
        for language in ("eng", "fra", "deu"):
            captions[language] = [f"{language} {text}" for text in random.integers(2, size=random.integers(3))]
        rows.append({**ROW, "clip_id": str(number), "captions": captions})
    return rows


def forms_of(rows):
    """Return the same rows as a list, as a dataset, and as a selection from a larger dataset in another order."""
    whole = datasets.Dataset.from_list([*rows, ROW], features=features(["eng", "fra", "deu"]))
    back = datasets.Dataset.from_list(rows[::-1], features=features(["eng", "fra", "deu"]))
    return rows, whole.select(range(len(rows))), back.select(range(len(rows))[::-1])


def test_captions_of_datasets_are_counted_as_those_of_rows():
    rows = rows_of_captions()
    for form in forms_of(rows):
        counts = caption_counts(form)
        for language in ("eng", "fra", "deu"):
            assert counts[language].tolist() == [len(row["captions"][language]) for row in rows]


@pytest.mark.parametrize(
    ("scheme", "needed"), [("random", "one of"), ("kcl", "all of"), ("cacl", "the first and another of")]
)
def test_every_form_of_rows_is_refused_for_the_same_clips(scheme, needed):
    rows = rows_of_captions()
    lacking = [row["clip_id"] for row in rows if lacking_languages(row, ["eng", "fra", "deu"], scheme)]
    assert 0 < len(lacking) < len(rows)
    for form in forms_of(rows):
        with pytest.raises(
            ValueError, match=f"^{len(lacking)} train clips lack captions, such as '{lacking[0]}', "
        ) as error:
            require_captions(form, ["eng", "fra", "deu"], scheme, "train")
        absent = lacking_languages(rows[int(lacking[0])], ["eng", "fra", "deu"], scheme)
        assert f"none in {absent}; this run needs captions in {needed} ['eng', 'fra', 'deu']: " in str(error.value)
        usable = form.filter(lambda row: row["clip_id"] not in lacking) if hasattr(form, "filter") else []
        if usable:
            require_captions(usable, ["eng", "fra", "deu"], scheme)


def test_shared_captions_are_counted_in_every_form_of_rows(caplog):
    rows = rows_of_captions()
    groups = Counter(json.dumps(row["captions"]) for row in rows)
    shared = sum(count for count in groups.values() if count > 1)
    assert 0 < shared < len(rows)
    for form in forms_of(rows):
        caplog.clear()
        warn_of_shared_captions(form)
        assert f"{shared} of {len(rows)} clips" in caplog.text
    caplog.clear()
    warn_of_shared_captions(forms_of([{**row, "captions": {"eng": [row["clip_id"]]}} for row in rows])[0])
    assert not caplog.records


@pytest.mark.parametrize("column", ["negatives", "sampling", "expected_count"])
def test_the_hash_covers_what_changes_the_training_in_every_form_of_rows(column):
    values = {
        "negatives": ["a cat", "rain"],
        "sampling": [{"dataset": "esc50", "weight": 1.0}, {"dataset": "esc50", "weight": 2.0}],
        "expected_count": [0.25, 0.5],
    }
    plain = [{"clip_id": clip_id, "captions": {"eng": ["a dog"]}} for clip_id in "ab"]
    hashes = {hash_rows(plain)}
    for value in values[column]:
        rows = [{**row, column: [value] if column == "negatives" else value} for row in plain]
        hashes.add(hash_rows(rows))
        assert hash_rows(rows) == hash_rows(datasets.Dataset.from_list(rows))
    assert len(hashes) == 3


def test_the_hash_is_that_of_columns_in_another_order():
    for captions in ({"eng": ["a dog"], "fra": ["un chien"]}, {"fra": ["un chien"], "eng": ["a dog"]}):
        rows = [{"clip_id": "a", "captions": captions}]
        assert hash_rows(rows) == hash_rows(datasets.Dataset.from_list(rows))
        assert hash_rows(rows) == hash_rows([{"captions": dict(reversed(captions.items())), "clip_id": "a"}])


@pytest.mark.parametrize(
    ("given", "suffices"), [("eng fra deu", True), ("eng deu", True), ("eng", False), ("fra deu", False)]
)
def test_cacl_needs_english_and_one_of_the_other_languages(given, suffices):
    row = {"captions": {language: ["a dog"] for language in given.split()}}
    assert (lacking_languages(row, ["eng", "fra", "deu"], "cacl") == []) == suffices
    for scheme in ("random", "kcl", "cacl"):  # of one language
        assert lacking_languages(row, ["eng"], scheme) == ([] if "eng" in given else ["eng"])


def test_the_hash_covers_every_row_and_language_and_no_path():
    captions = {"eng": ["a dog", "barks"], "fra": ["un chien"]}
    count = 100_001
    ids = [str(number) for number in range(count)]
    hashes = set()
    for last in ("a cat", "a bird"):
        texts = [{"eng": ["rain"]}] * (count - 1) + [{"eng": [last]}]
        hashes.add(hash_rows(datasets.Dataset.from_dict({"clip_id": ids, "captions": texts})))
    assert len(hashes) == 2

    row = {"clip_id": "a", "captions": captions, "audio_path": "a.wav"}
    same = {"clip_id": "a", "captions": {"fra": ["un chien"], "deu": [], "eng": ["a dog", "barks"]}, "audio_path": "b"}
    assert hash_rows([row]) == hash_rows([same])
    english = [{"clip_id": "b", "captions": {"eng": ["rain"]} | rest} for rest in ({}, {"fra": []}, {"fra": None})]
    assert len({hash_rows([row, other]) for other in english}) == 1
    others = [{"clip_id": "b", "captions": captions}]
    for change in (
        {"eng": ["a dog barks"]},
        {"eng": ["barks", "a dog"]},
        {"fra": []},
        {"fra": [], "swe": ["un chien"]},
    ):
        others.append({"clip_id": "a", "captions": captions | change})
    assert len({hash_rows([other]) for other in [row, *others]}) == 1 + len(others)
    assert hash_rows([row, others[0]]) != hash_rows([row])


def test_labels_are_counted_and_listed_without_streams_and_nulls():
    rows = datasets.Dataset.from_list(
        [{"labels": ["rain", "dog"]}, {"labels": None}, {"labels": ["cat", "dog", "dog"]}]
    )
    assert label_counts(rows).tolist() == [2, 0, 3]
    assert label_names(rows.select([1, 2])) == {"cat", "dog"}
    splits = {
        "train": RowStream(SimpleNamespace(features={}, licenses={}, row_groups=[])),
        "test": rows.select([0]),
        "validation": rows.select([2]),
    }
    assert list_classes(splits, ["wind"]) == ["cat", "dog", "rain", "wind"]
    assert list_classes({"test": rows.select([1])}) is None


def test_clips_of_equal_captions_are_in_one_group_if_requested():
    first = {"clip_id": "a", "captions": {"eng": ["a dog"], "fra": ["un chien"]}}
    second = {"clip_id": "b", "captions": {"fra": ["un chien"], "eng": ["a dog"]}}
    other = {"clip_id": "b", "captions": {"eng": ["a dog"], "fra": []}}
    assert group_id(first, "captions") == group_id(second, "captions") != group_id(other, "captions")
    assert group_id(first, "clip") != group_id(second, "clip") == group_id(other, "clip")
    assert all(0 <= group_id(row, kind) < 2**63 for row in (first, other) for kind in ("clip", "captions"))
