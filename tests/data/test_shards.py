"""Shards of a job: ranges that share all rows, one plan, and records."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from datasets import Dataset

from modeling_supclap.datasets_scripts.atomic_files import InUseError, folder_lock
from modeling_supclap.datasets_scripts.shards import (
    Shard,
    changed_settings,
    is_complete,
    join_records,
    read_plan,
    recording_states,
    split_ranges,
    start_plan,
    write_record,
)


@pytest.mark.parametrize(("total", "count"), [(10, 3), (3, 10), (0, 4), (100, 1)])
def test_shards_share_all_rows(total, count):
    ranges = [Shard(number, count).rows(total) for number in range(count)]
    assert [row for rows in ranges for row in rows] == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert Shard.parse(f"{count - 1}/{count}").rows(total) == ranges[-1]
    assert Shard.parse(None).rows(total) == range(total)


@pytest.mark.parametrize("text", ["3/3", "1", "-1/3", "a/b", "0/0", "1/2/3", ""])
def test_a_shard_that_does_not_exist_is_refused(text):
    with pytest.raises(ValueError, match=repr(text) if text.count("/") != 1 else text):
        Shard.parse(text)


def test_ranges_of_splits():
    lengths = {"train": 4, "validation": 0, "test": 3}
    found = {split: [] for split in lengths}
    for number in range(4):
        for split, rows in split_ranges(Shard(number, 4).rows(7), lengths).items():
            found[split] += rows
    assert found == {"train": [0, 1, 2, 3], "validation": [], "test": [0, 1, 2]}
    assert split_ranges(range(5, 6), lengths) == {"train": range(0), "validation": range(0), "test": range(1, 2)}


def test_all_shards_have_one_plan(tmp_path):
    folder, plan = tmp_path / "job", {"model": "a", "rows": 3}
    assert read_plan(folder) is None
    folder.mkdir()  # by a run that was killed at once
    start_plan(folder, plan)
    start_plan(folder, dict(plan))
    assert read_plan(folder) == plan
    with pytest.raises(FileExistsError, match=r"\bjob\b.*different dtype, model;"):
        start_plan(folder, {"model": "b", "rows": 3, "dtype": "int8"})
    assert read_plan(folder) == plan
    assert changed_settings(plan, {"rows": 3}) == ["model"]


def test_records_are_joined_in_the_order_of_shards(tmp_path):
    (tmp_path / "shards").mkdir()
    for number in (2, 0):
        write_record(tmp_path, Shard(number, 3), {"files": [f"f{number}"], "rows": number + 1})
    assert is_complete(tmp_path, Shard(2, 3))
    assert not is_complete(tmp_path, Shard(2, 4))
    with pytest.raises(ValueError, match=r"lacks 1 of 3 shards: 1/3;"):
        join_records(tmp_path, 3)
    write_record(tmp_path, Shard(1, 3), {"files": [], "rows": 0})
    assert join_records(tmp_path, 3) == {"files": ["f0", "f2"], "rows": 4}
    for count, end in ((20, "19/20;"), (21, r"19/21, \.\.\.;")):
        with pytest.raises(ValueError, match=rf"lacks {count} of {count} shards: 0/{count}, .*, {end} run them"):
            join_records(tmp_path, count)


def test_a_shard_has_one_writer_and_the_others_none(tmp_path):
    def enter(shard):
        with shard.lock(tmp_path):
            return json.dumps(shard.name)

    with Shard(0, 2).lock(tmp_path), ThreadPoolExecutor() as another:
        another.submit(enter, Shard(1, 2)).result()
        with pytest.raises(InUseError, match="00000-of-00002"):
            another.submit(enter, Shard(0, 2)).result()
    enter(Shard(0, 2))


def test_a_lock_waits_for_a_short_block(tmp_path):
    def enter(wait_seconds):
        with folder_lock(tmp_path / "job", wait_seconds):
            return True

    with ThreadPoolExecutor() as another:
        with folder_lock(tmp_path / "job"):
            with pytest.raises(InUseError, match="job"):
                another.submit(enter, 0).result()
            waiting = another.submit(enter, 20)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.1)
        assert waiting.result()


def test_a_repaired_recording_has_another_state(tmp_path):
    rows = [{"audio_path": str(tmp_path / name)} for name in ("a", "b", "gone")] + [{"audio_path": None}]
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1")
    before = recording_states(rows), recording_states(rows, with_times=False)
    assert before[0][2:] == ["", ""]
    os.utime(tmp_path / "b", (1, 1))
    assert [old == new for old, new in zip(before[0], recording_states(rows), strict=True)] == [
        True,
        False,
        True,
        True,
    ]
    assert recording_states(rows, with_times=False) == before[1]
    (tmp_path / "a").write_bytes(b"12")
    assert recording_states(rows, with_times=False)[0] != before[1][0]


@pytest.mark.parametrize("column", ["audio", "samples"])
def test_stored_audio_has_its_length_as_state(column):
    values = [b"123", b"1", b"12"]
    stored = values if column == "samples" else [{"bytes": value, "path": None} for value in values]
    rows = Dataset.from_dict({"audio_path": ["x"] * 3, column: stored})
    states = recording_states(rows)
    assert len(set(states)) == 3
    assert recording_states(rows.select([2, 0])) == [states[2], states[0]]
