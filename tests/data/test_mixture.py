"""Mixed datasets: rows that stay distinct, and the expected counts of each dataset and label."""

import logging
from collections import Counter
from operator import itemgetter

import numpy as np
import pytest
from datasets import Dataset, Value, concatenate_datasets
from valid_rows import validate_row

from modeling_supclap.datasets_scripts import mixture
from modeling_supclap.datasets_scripts.mixture import (
    counts_in_epoch,
    expected_counts,
    mix,
    warn_of_shared_recordings,
    with_counts,
)
from modeling_supclap.datasets_scripts.schema import EXPECTED_COUNT, features, require_captions
from modeling_supclap.datasets_scripts.stream import RowGroup, RowStream


def make_rows(count, languages=("eng",), source="freesound", labels=(("dog",),), samples=False):
    rows = []
    for number in range(count):
        rows.append(
            {
                "clip_id": f"clip{number}",
                "audio_path": f"{source}{number}.wav",
                "captions": {language: [f"{language} {number}"] for language in languages},
                "labels": list(labels[number % len(labels)]),
                "events": [],
                "source": f"{source}:{number}",
                "license": "CC0-1.0",
            }
        )
    made = Dataset.from_list(rows, features=features(languages))
    if samples:
        made = made.add_column("samples", [bytes([number, 0]) for number in range(count)], feature=Value("binary"))
        made = made.add_column("sampling_rate_hz", [16_000] * count, feature=Value("int32"))
    return made


def test_rows_keep_their_audio_and_get_distinct_names_and_all_languages():
    stored = concatenate_datasets([make_rows(5, ("eng", "fra"), "file", samples=True)]).select([4, 1, 2])
    mixed = mix({"a": {"train": stored, "test": stored}, "b": {"train": make_rows(2, ("jpn", "eng"))}})
    train = mixed["train"]
    assert train["clip_id"][:] == ["a/clip4", "a/clip1", "a/clip2", "b/clip0", "b/clip1"]
    assert train["source"][:] == ["file:4", "file:1", "file:2", "freesound:0", "freesound:1"]
    assert train["dataset"][:] == ["a", "a", "a", "b", "b"]
    assert list(train.features["captions"]) == ["eng", "fra", "jpn"]
    assert train["samples"][:] == [b"\4\0", b"\1\0", b"\2\0", None, None]
    assert train[0]["captions"] == {"eng": ["eng 4"], "fra": ["fra 4"], "jpn": []}
    assert train[3]["captions"] == {"eng": ["eng 0"], "fra": [], "jpn": ["jpn 0"]}
    assert train[EXPECTED_COUNT][:] == [1] * 5
    for row in train:
        validate_row(row)
    assert len(mixed["test"]) == 3
    assert EXPECTED_COUNT not in mixed["test"].column_names

    require_captions(train, ["eng", "fra"], "random", "train")
    with pytest.raises(ValueError, match=r"2 train.*'b/clip0'.*\['fra'\]"):
        require_captions(train, ["eng", "fra"], "kcl", "train")


@pytest.mark.parametrize(
    ("options", "temperature", "totals"),
    [
        ({}, None, (40, 10)),
        ({"b": {"repeats": 2.5}}, None, (40, 25)),
        ({"a": {"repeats": 0.5}, "b": {"repeats": 3}}, None, (20, 30)),
        ({"b": {"weight": 3}}, None, (12.5, 37.5)),
        ({}, 1, (40, 10)),
        ({}, 2, (50 * 2 / 3, 50 / 3)),  # ratio of the square roots of 4 and 1
    ],
)
def test_counts_of_datasets(options, temperature, totals):
    counts = expected_counts({"a": make_rows(40), "b": make_rows(10)}, options, temperature)
    assert [of_set.sum() for of_set in counts.values()] == pytest.approx(totals)
    assert all(np.ptp(of_set) == 0 for of_set in counts.values())


def test_balanced_labels_are_equally_frequent_and_keep_the_share_of_their_dataset():
    rows = make_rows(12, labels=(("dog",), ("dog",), ("cat",)))
    sets = {"a": rows, "b": make_rows(12, labels=(("dog", "cat"), ("dog",), ("dog",)))}
    counts = expected_counts(sets, {"a": {"balance_labels": True, "weight": 1}, "b": {"balance_labels": True}})
    drawn = Counter()
    for label, count in zip(rows["labels"], counts["a"], strict=True):
        drawn[label[0]] += count
    assert drawn == pytest.approx({"dog": 6, "cat": 6})
    both, dog, _ = counts["b"][:3]
    assert both / dog == pytest.approx((1 / 12 + 1 / 4) / (1 / 12))
    assert counts["b"].sum() == pytest.approx(12)


@pytest.mark.parametrize(
    ("options", "temperature", "totals"),
    [
        ({}, None, (8, 25)),  # captions of 4 clips with two, and of 5 clips with five
        ({"b": {"repeats": 2}}, None, (8, 50)),
        ({"a": {"weight": 1}, "b": {"weight": 3}}, None, (33 / 4, 33 * 3 / 4)),
        ({}, 2, tuple(33 * np.sqrt([8, 25]) / np.sqrt([8, 25]).sum())),
    ],
)
def test_shares_hold_for_captions_and_for_the_rows_that_are_left(options, temperature, totals):
    sets = {"a": {"train": make_rows(6)}, "b": {"train": make_rows(5)}}
    # two rows of "a" are bad
    mixed = mix(sets, options, temperature)["train"].select([1, 3, 4, 5, *range(6, 11)])
    counts = counts_in_epoch(mixed, np.array([2] * 4 + [5] * 5))
    of_items = np.repeat(counts, [2] * 4 + [5] * 5)
    assert [of_items[:8].sum(), of_items[8:].sum()] == pytest.approx(totals)
    assert np.ptp(of_items[:8]) == np.ptp(of_items[8:]) == pytest.approx(0)


def test_labels_are_balanced_among_captions_and_the_rows_that_are_left():
    rows, balanced = make_rows(9, labels=(("dog",), ("dog",), ("cat",))), {"balance_labels": True}
    rows = with_counts(rows, expected_counts({"": rows}, {"": balanced})[""], balanced)
    # one of three cats is left
    rows, captions = rows.select([0, 1, 2, 3, 4, 6]), np.array([1, 2, 4, 1, 3, 1])
    drawn = Counter()
    for label, count, number in zip(rows["labels"], counts_in_epoch(rows, captions), captions, strict=True):
        drawn[label[0]] += count * number
    assert drawn == pytest.approx({"dog": 6, "cat": 6})


@pytest.mark.parametrize(
    ("options", "temperature", "message"),
    [
        ({"a": {"repeats": 2}, "b": {"weight": 1}}, None, r"repeats.*weight"),
        ({"a": {"weight": 2}}, 2.0, r"weight.*2\.0"),
        ({"a": {"weight": 0}}, None, r"weight.*0\.0"),
        ({"b": {"repeats": -1}}, None, r"repeats.*-1\.0"),
        ({}, -3.0, r"-3\.0"),
        ({}, 0.0, r"0\.0"),
        ({"b": {"balance_labels": True}}, None, r"'clip1'.*balance_labels.* b$"),
    ],
)
def test_refused_options(options, temperature, message):
    sets = {"a": make_rows(2), "b": make_rows(2, labels=(("dog",), ()))}
    with pytest.raises(ValueError, match=message):
        expected_counts(sets, options, temperature)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"a": dict.fromkeys(("repeat", "size", "count", "share", "weight"), 2)},
            r"'count', 'repeat', 'share', 'size'\]",
        ),
        ({"c": {"repeats": 2}}, "'c'.*a, b"),
    ],
)
def test_unknown_options_and_datasets_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        mix({"a": {"train": make_rows(2)}, "b": {"train": make_rows(2)}}, options)


class Held:
    """A split in memory, in row groups of four, to be streamed."""

    def __init__(self, rows):
        self.licenses, self.digest, self.features, self.rows = {}, "", rows.features, rows.to_list()
        starts = range(0, len(rows), 4)
        self.row_groups = [RowGroup("", start, min(4, len(rows) - start)) for start in starts]

    def read(self, group, columns):
        rows = self.rows[group.location :]
        return lambda number: {name: rows[number][name] for name in columns}


def test_streams_are_mixed_with_map_style_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "ROWS_OF_A_GROUP", 4)
    captioned = RowStream(Held(make_rows(10, ("eng", "fra")))).map(lambda row: {**row, "labels": ["new"]})
    sets = {
        "a": {"train": captioned},
        "b": {"train": make_rows(6, ("jpn",), samples=True), "test": make_rows(2)},
        "c": {"train": RowStream(Held(make_rows(7)))},
    }
    expected = {"a": 0.3, "b": 2.5, "c": 1}
    mixed = mix(sets, {name: {"repeats": count} for name, count in expected.items()})
    assert mixed["test"]["dataset"][:] == ["b", "b"]
    train = mixed["train"].shuffle(seed=3)
    assert train.licenses == {"": 17, "CC0-1.0": 6}
    fewer = train.remove_columns(["audio_path", "clip_id", "captions"])
    assert not {"audio_path", "captions"} & next(iter(fewer)).keys()
    assert not {"audio_path", "captions"} & fewer.features.keys()
    whole = train.to_dataset(str(tmp_path))
    assert len(whole) == len(set(whole["clip_id"][:])) == 23
    assert train.to_dataset(str(tmp_path))._fingerprint == whole._fingerprint
    again, fewer = mix(sets, {"b": {"repeats": 2.5}, "a": {"repeats": 0.3}}), mix(sets)
    renamed = sets["b"]["train"].select(range(5, -1, -1))
    other = mix({**sets, "b": {"train": renamed}}, {"b": {"repeats": 2.5}, "a": {"repeats": 0.3}})
    hashes = [each["train"].content_hash for each in (again, fewer, other)]
    assert hashes[0] == train.content_hash
    assert len(set(hashes)) == 3  # of other counts, and of other rows
    assert other["train"].to_dataset(str(tmp_path))._fingerprint != whole._fingerprint

    total, orders = Counter(), set()
    for epoch in range(60):
        train.set_epoch(epoch)
        rows = list(train)
        assert len(rows) == len(train) == 25
        copies = Counter(row["clip_index"] for row in rows)
        last = {row["clip_index"]: row["repetition"] for row in sorted(rows, key=itemgetter("repetition"))}
        assert copies == {clip: repetition + 1 for clip, repetition in last.items()}
        assert all(copies[clip] in (2, 3) for clip in range(10, 16))
        total.update(row["clip_id"] for row in rows)
        orders.add(tuple(row["clip_id"] for row in rows))
    assert len(orders) == 60
    for name, (start, end) in {"a": (0, 10), "b": (10, 16), "c": (16, 23)}.items():
        means = np.array([total[f"{name}/clip{clip}"] for clip in range(end - start)]) / 60
        assert means.mean() == pytest.approx(expected[name], abs=0.02)
        assert means == pytest.approx(expected[name], abs=0.25)  # standard error: 0.06
    row = next(row for row in rows if row["dataset"] == "a")
    assert (row["captions"]["jpn"], row["samples"], row["labels"]) == ([], None, ["new"])
    row = next(row for row in rows if row["dataset"] == "b")
    assert row["captions"].keys() == {"eng", "fra", "jpn"}
    assert row["samples"] == bytes([row["clip_index"] - 10, 0])

    with pytest.raises(ValueError, match=r"balance_labels.*'b'"):
        mix(sets, {"b": {"balance_labels": True}})


def test_labels_of_a_mixture_are_balanced_on_request():
    rows = make_rows(6, labels=(("dog",), ("dog",), ("cat",)))
    mixed = mix({"a": {"train": rows}, "b": {"train": make_rows(2)}}, {"a": {"balance_labels": True}})
    assert mixed["train"][EXPECTED_COUNT][:] == pytest.approx([0.75, 0.75, 1.5, 0.75, 0.75, 1.5, 1, 1])


def test_recordings_shared_with_the_test_split_of_another_dataset_are_named(caplog):
    first, second = make_rows(6).select([0, 1, 2, 3, 4, 5, 2]), make_rows(3)  # two clips are of one recording
    sets = {
        "wavcaps": {"train": first, "test": make_rows(1)},
        "clotho": {"train": make_rows(1, source="other"), "test": second.select([0, 2, 2]), "validation": second},
        "mine": {"train": make_rows(2, source="file")},
        "yours": {"test": make_rows(2, source="file")},
    }
    with caplog.at_level(logging.WARNING):
        mix(sets)
        streamed = {**mix(sets), "train": list(mix(sets)["train"])}  # a sample of a stream is a list of rows
        caplog.clear()
        warn_of_shared_recordings(streamed)
    messages = sorted(caplog.messages)
    assert len(messages) == 2  # no warning within a dataset or for equal file names
    for message, count, split in zip(messages, (2, 3), ("test", "validation"), strict=True):
        assert message.startswith(
            f"{count} recordings of the {split} split of clotho are also in the training split of wavcaps, "
            "such as freesound:0;"
        )
