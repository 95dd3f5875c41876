"""Streams of a prepared set: each row once, an order that depends only on seed and epoch, and resumption at any row."""

import io
import os
import shutil
import sys
import threading
from bisect import bisect_right
from itertools import chain
from typing import ClassVar

import datasets
import numpy as np
import pyarrow
import pytest
from prepared_sets import make_folder
from processes import run_python
from torch.utils.data import DataLoader
from web_server import flaky, served

from modeling_supclap.datasets_scripts import load_splits, remote_files, shard_writer, stream_sources
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.datasets_scripts.stream import SHUFFLE_SHARDS, EpochBatches, draw_copies
from modeling_supclap.datasets_scripts.translation.table import write_translations
from modeling_supclap.training.collator import TrainingCollator

CLIPS = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared set with 90 training clips in row groups of at most 3, and its rows by random access."""
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("streams")
    make_folder(folder / "ESC", clips=120, seconds=0.2)
    options = {
        "data_dir": str(folder / "ESC"),
        "languages": ["eng", "fra"],
        "test_fold": 4,
        "validation_fraction": 0.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "ROW_GROUP_ROWS", 3)
        for storage in ("int16", "reference"):
            request = Request("esc50", options, storage, 50_000)
            prepare(request, folder / storage, cache_dir=str(folder / "cache"), quiet=True)
    yield folder
    datasets.enable_progress_bars()


@pytest.fixture
def stream(folder):
    return load_splits("prepared", data_dir=str(folder / "int16"), streaming=True)["train"]


@pytest.fixture
def reads(monkeypatch):
    """List of the row groups that are read."""
    found = []
    monkeypatch.setattr(stream_sources, "with_absolute_paths", lambda table, root: found.append(table) or table)
    return found


def ids(rows):
    return [row["clip_id"] for row in rows]


def batches(stream, workers, size=4, after=0):
    """Return the clip ids in the batches of a loader, after skipping `after` batches."""
    stream.load_state_dict({**stream.state_dict(), "rows": after * size, "batch_size": size})
    return list(DataLoader(stream, size, collate_fn=ids, num_workers=workers))


@pytest.mark.parametrize("storage", ["int16", "reference"])
def test_in_order_it_is_the_split_numbered(folder, storage):
    rows = load_splits("prepared", str(folder / "cache"), data_dir=str(folder / storage))["train"]
    streamed = load_splits("prepared", data_dir=folder / storage, streaming=True)["train"]
    assert list(streamed) == [{**row, "clip_index": place} for place, row in enumerate(rows)]
    assert streamed.features == {**rows.features, "clip_index": datasets.Value("int64")}
    assert streamed.num_rows == len(rows) == CLIPS


def test_an_epoch_is_a_shuffle_of_all_rows_by_seed_and_epoch(stream):
    orders = {}
    for seed in (0, 1):
        shuffled = stream.shuffle(seed)
        for epoch in (0, 1):
            shuffled.set_epoch(epoch)
            orders[seed, epoch] = ids(shuffled)
            assert ids(shuffled) == orders[seed, epoch]
            assert sorted(orders[seed, epoch]) == sorted(ids(stream))
    assert len({tuple(order) for order in orders.values()}) == 4


def test_neighbouring_rows_come_from_the_whole_split(stream):
    starts = [group.start for group in stream.row_groups]
    groups = [bisect_right(starts, row["clip_index"]) for row in stream.shuffle(0)]
    assert len(starts) > 2 * SHUFFLE_SHARDS
    for start in range(2 * SHUFFLE_SHARDS):
        assert len(set(groups[start : start + SHUFFLE_SHARDS])) == SHUFFLE_SHARDS


def test_the_first_epoch_of_batches_is_0(stream):
    assert next(iter(EpochBatches(stream, 4)))[0] == (0, 0)


def test_rows_of_a_group_change_their_order_with_the_epoch(stream):
    shuffled, orders = stream.shuffle(0), {}
    for epoch in range(8):
        shuffled.set_epoch(epoch)
        indices = [row["clip_index"] for row in shuffled]
        for group in stream.row_groups:
            own = range(group.start, group.start + group.rows)
            orders.setdefault(group.start, set()).add(tuple(index for index in indices if index in own))
    assert all(len(orders[group.start]) > 1 for group in stream.row_groups if group.rows > 1)


def orders_in_groups(stream):
    """Return the order of the rows within each row group of three rows, `{(first row, repetition): order}`."""
    starts, orders = [group.start for group in stream.row_groups], {}
    for row in stream:
        start = starts[bisect_right(starts, row["clip_index"]) - 1]
        orders.setdefault((start, row.get("repetition", 0)), []).append(row["clip_index"] - start)
    return {group: tuple(order) for group, order in orders.items() if len(order) == 3}


def test_orders_of_rows_differ_between_groups_seeds_and_repetitions(stream):
    first, second = (orders_in_groups(stream.shuffle(seed)) for seed in (0, 1))
    assert len(set(first.values())) == 6
    assert first != second
    repeated, of_group = stream.repeat([6] * len(stream.row_groups)).shuffle(0), {}
    for (group, _), order in orders_in_groups(repeated).items():
        of_group.setdefault(group, set()).add(order)
    assert len(of_group) == len(first)
    assert all(len(orders) > 1 for orders in of_group.values())
    assert len(repeated) == 6 * CLIPS == len(list(repeated))
    with pytest.raises(ValueError, match="zip"):
        stream.repeat([6])


def test_order_of_the_row_groups_changes_with_the_seed_and_the_epoch(stream):
    shuffled, starts = {}, [group.start for group in stream.row_groups]
    for seed, epoch in ((0, 0), (1, 0), (0, 1)):
        rows = stream.shuffle(seed)
        rows.set_epoch(epoch)
        shuffled[seed, epoch] = [bisect_right(starts, row["clip_index"]) for row in rows]
    assert len(set(map(tuple, shuffled.values()))) == 3


def test_copies_of_pairs_of_items_are_independent():
    random, expected = np.random.default_rng(0), np.full(4, 0.5)
    assert len({tuple(draw_copies(expected, 2, random)) for _ in range(200)}) == 6


def test_streams_have_their_own_places_and_an_epoch_is_continued(stream):
    shuffled, other = stream.shuffle(0), stream.shuffle(0)
    shuffled.load_state_dict({"epoch": 1, "rows": 7})
    assert shuffled.state_dict() == {"epoch": 1, "rows": 7, "batch_size": 1}
    assert other.state_dict() == stream.state_dict() == {"epoch": 0, "rows": 0, "batch_size": 1}
    shuffled.set_epoch(1)
    assert shuffled.state_dict()["rows"] == 7
    shuffled.load_state_dict({"epoch": 1, "rows": 8, "batch_size": 4})
    shuffled.set_epoch(2)
    assert shuffled.state_dict() == {"epoch": 2, "rows": 0, "batch_size": 1}


@pytest.mark.process
def test_workers_that_stay_take_the_next_epoch(stream):
    shuffled = stream.shuffle(0)
    loader = DataLoader(shuffled, 9, collate_fn=ids, num_workers=1, persistent_workers=True)
    epochs = []
    for epoch in range(2):
        shuffled.set_epoch(epoch)
        epochs.append(list(chain.from_iterable(loader)))
        assert epochs[-1] == ids(shuffled)
    assert epochs[0] != epochs[1]


def test_the_content_hash_covers_files_groups_and_counts_but_no_folder(folder, stream, tmp_path):
    def load(name):
        return load_splits("prepared", data_dir=str(tmp_path / name), streaming=True)["train"]

    shutil.copytree(folder / "int16", tmp_path / "moved")
    assert load("moved").content_hash == stream.content_hash == stream.shuffle(1).content_hash
    counts = [1.0] * len(stream.row_groups)
    hashes = {each.content_hash for each in (stream, stream.repeat(counts), stream.repeat([2.0, *counts[1:]]))}
    changed = stream.shuffle(0)
    for field, value in (("path", "other"), ("location", 99), ("rows", 1)):
        changed.row_groups = [*stream.row_groups[:-1], stream.row_groups[-1]._replace(**{field: value})]
        hashes.add(changed.content_hash)
    assert len(hashes) == 6
    manifest = tmp_path / "moved" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"missing": []', '"missing": ["a.wav"]'))
    assert load("moved").content_hash not in hashes


def test_removed_columns_are_in_no_row_and_no_read(stream, monkeypatch):
    columns, read = [], stream_sources._read_row_group
    monkeypatch.setattr(
        stream_sources,
        "_read_row_group",
        lambda path, number, names: columns.append(names) or read(path, number, names),
    )
    light = stream.remove_columns(["samples", "clip_index", "labels"])
    names = [name for name in stream.column_names if name not in ("samples", "clip_index", "labels")]
    assert light.column_names == names
    assert list(next(iter(light))) == [*names, "clip_index"]
    assert columns == [names]


@pytest.mark.parametrize("expected", [[0.3, 0.7], [0.3, 0.7, 1.5, 2.0, 0.5], [1 / 3] * 9])
def test_items_are_drawn_as_often_as_expected(expected):
    random, total = np.random.default_rng(0), round(sum(expected))
    draws = np.array([draw_copies(np.array(expected), total, random) for _ in range(4000)])
    assert (draws.sum(axis=1) == total).all()
    assert (np.abs(draws - expected) < 1).all()
    np.testing.assert_allclose(draws.mean(axis=0), expected, atol=0.03)  # standard error: 0.008


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_share_the_rows_and_a_global_batch_is_the_same_rows(stream, processes):
    shuffled = stream.shuffle(3)
    parts = [ids(shuffled.shard(process, processes)) for process in range(processes)]
    assert {len(part) for part in parts} == {CLIPS // processes} == {len(shuffled.shard(0, processes))}
    turns = [clip_id for turn in zip(*parts, strict=True) for clip_id in turn]
    assert turns == ids(shuffled)[: len(turns)]


def test_without_shuffling_no_row_is_dropped(stream):
    parts = [stream.shard(process, 4) for process in range(4)]
    assert sum(map(len, parts)) == CLIPS
    assert sorted(chain.from_iterable(map(ids, parts))) == sorted(ids(stream))
    with pytest.raises(ValueError, match=r"process.*\b4\b"):
        stream.shard(4, 4)


@pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.process), pytest.param(2, marks=pytest.mark.process)]
)
@pytest.mark.parametrize("after", [0, 1, 5, 10])
def test_a_loader_continues_with_the_remaining_batches(stream, workers, after):
    shuffled = stream.shuffle(0).shard(1, 2)
    shuffled.set_epoch(2)
    whole = batches(shuffled, workers)
    assert len(set(chain.from_iterable(whole))) == CLIPS // 2
    resumed = stream.shuffle(0).shard(1, 2)
    resumed.set_epoch(2)
    assert batches(resumed, workers, after=after) == whole[after:]


def test_the_state_of_an_iteration_is_its_place(stream):
    shuffled = stream.shuffle(0)
    shuffled.set_epoch(1)
    whole, rows = ids(shuffled), iter(shuffled)
    assert ids(next(rows) for _ in range(17)) == whole[:17]
    state = shuffled.state_dict()

    again = stream.shuffle(0)
    again.load_state_dict(state)
    assert ids(again) == whole[17:]
    assert ids(again) == whole  # the position belongs to one iteration


def test_a_dataset_of_it_has_all_rows_in_order(stream, tmp_path):
    part = stream.repeat([2.0] * len(stream.row_groups)).shuffle(0).shard(1, 2)
    part.load_state_dict({"epoch": 1, "rows": 5})
    assert ids(part.to_dataset(str(tmp_path))) == ids(stream)
    assert part.state_dict()["rows"] == 5


def test_the_cache_keeps_streams_with_other_columns_or_functions_apart(stream, tmp_path):
    light, named = stream.remove_columns(["samples"]), stream.map(lambda row: {**row, "clip_id": row["clip_id"] + "!"})
    whole, light_rows, named_rows = (each.to_dataset(str(tmp_path)) for each in (stream, light, named))
    assert light_rows.column_names == [name for name in whole.column_names if name != "samples"]
    assert named_rows["clip_id"][:] == [clip_id + "!" for clip_id in whole["clip_id"]]


def test_a_moved_set_is_the_same_dataset_in_the_cache(folder, stream, tmp_path):
    shutil.copytree(folder / "int16", tmp_path / "moved")
    moved = load_splits("prepared", data_dir=str(tmp_path / "moved"), streaming=True)["train"]
    files = stream.to_dataset(str(tmp_path)).cache_files
    assert files
    assert moved.to_dataset(str(tmp_path)).cache_files == files


def test_the_cache_has_no_paths_of_recordings_that_were_moved(folder, tmp_path):
    shutil.copytree(folder / "ESC", tmp_path / "moved")
    roots = []
    for audio_dir in (folder / "ESC", tmp_path / "moved"):
        options = {"data_dir": str(folder / "reference"), "audio_dir": str(audio_dir)}
        rows = load_splits("prepared", streaming=True, **options)["train"].to_dataset(str(tmp_path))
        roots.append(os.path.commonpath(rows["audio_path"]).startswith(str(audio_dir)))
    assert roots == [True, True]


def test_rows_before_the_position_are_not_read(stream, reads):
    shuffled = stream.shuffle(0)
    shuffled.load_state_dict({"epoch": 0, "rows": CLIPS - 5})
    assert len(list(shuffled)) == 5
    assert len(reads) <= 5
    reads.clear()
    assert len(list(shuffled)) == CLIPS
    assert len(reads) == len(stream.row_groups)  # each once


def test_processes_and_workers_read_only_their_own_shards(stream, reads):
    shuffled = stream.shuffle(0).shard(1, 8)
    rows = iter(shuffled)
    for _ in range(4):  # two rows of each of two shuffle shards
        next(rows)
    assert len(reads) <= 4


def test_the_training_collator_accepts_a_stream(stream, processor):
    loader = DataLoader(stream.shuffle(0), batch_size=8, collate_fn=TrainingCollator(processor, ["eng"]))
    numbers = [number for batch in loader for number in batch["clip_index"].tolist()]
    assert sorted(numbers) == list(range(CLIPS))


def test_rows_are_mapped_as_they_are_read(stream):
    mapped = stream.map(lambda row: {"clip_id": row["clip_id"] + "!"}).map(lambda row: {**row, "more": 1})
    assert next(iter(mapped)) == {"clip_id": ids(stream)[0] + "!", "more": 1}
    assert "samples" in next(iter(stream))


def test_a_web_server_can_be_streamed(folder, stream):
    with served(folder) as address:
        rows = load_splits("prepared", data_dir=f"{address}/int16", streaming=True)["train"]
        assert list(rows.shuffle(0)) == list(stream.shuffle(0))


@pytest.fixture
def hasty(monkeypatch):
    """Shorten waits from minutes to a tenth of a second."""
    monkeypatch.setattr(remote_files, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(remote_files, "STALL_SECONDS", 0.4)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fault", ["busy", "drop", "stall"])
def test_requests_to_a_failing_server_are_repeated(folder, stream, fault, caplog):
    faults = [fault]
    with flaky(folder, faults) as address:
        rows = load_splits("prepared", data_dir=f"{address}/int16", streaming=True)["train"]
        assert not faults
        faults += [fault, fault]
        assert list(rows) == list(stream)
        assert not faults
    assert "train-00000" in caplog.text


@pytest.mark.usefixtures("hasty")
def test_the_error_of_a_failing_server_names_the_file(folder):
    faults = []
    with flaky(folder, faults) as address:
        rows = load_splits("prepared", data_dir=f"{address}/int16", streaming=True)["train"]
        faults += ["busy"] * 1000
        with pytest.raises(OSError, match=r"int16/data/train-00000-of-\d+\.parquet.*\b4\b"):
            list(rows)
        faults.clear()
        with pytest.raises(FileNotFoundError, match=r"none/manifest\.json"):
            load_splits("prepared", data_dir=f"{address}/none", streaming=True)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(OSError, match=r"train\.parquet"):
        load_splits("hf", data_dir=f"file://{tmp_path}", streaming=True)
    (tmp_path / "train.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(OSError, match=r"train\.tar"):
        load_splits("webdataset", data_dir=str(tmp_path), streaming=True)


class WatchedFile(io.FileIO):
    """File that records the names of the threads that read it."""

    threads: ClassVar[set[str]] = set()

    def read(self, size=-1):
        self.threads.add(threading.current_thread().name)
        return super().read(size)


@pytest.fixture
def _many_cores():
    before = pyarrow.cpu_count()
    pyarrow.set_cpu_count(4)
    yield
    pyarrow.set_cpu_count(before)


@pytest.mark.usefixtures("_many_cores")
@pytest.mark.parametrize("kind", ["prepared", "hf"])
def test_no_thread_of_pyarrow_reads_a_file(folder, tmp_path, monkeypatch, kind):
    # Threads of pyarrow that free bytes of a Python file abort a process that exits at this moment.
    WatchedFile.threads.clear()
    data_dir = folder / "int16"
    if kind == "hf":
        data_dir = tmp_path
        audio = [{"bytes": bytes([number]) * 20_000, "path": None} for number in range(9)]  # not read with the footer
        rows = [{"caption": "rain", "audio": each} for each in audio]
        stored = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio(decode=False))
        stored.to_parquet(str(tmp_path / "train.parquet"))
    monkeypatch.setattr(stream_sources, "read_file", lambda path, read: read(WatchedFile(path)))
    next(iter(load_splits(kind, data_dir=str(data_dir), streaming=True)["train"]))
    assert {name.partition("-")[0] for name in WatchedFile.threads} == {"MainThread", "ThreadPoolExecutor"} - (
        {"ThreadPoolExecutor"} if kind == "prepared" else set()
    )


MEMORY = """
import resource, sys
from pathlib import Path
from modeling_supclap.datasets_scripts import load_splits, stream_sources

rows = load_splits("prepared", data_dir=sys.argv[1], streaming=True)["train"].shuffle(0)
tables, read = [], stream_sources._read_row_group


def grow():
    taken = []
    for epoch in range(40):
        rows.set_epoch(epoch)
        assert sum(len(row["samples"]) > 0 for row in rows) == 90
        taken.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    return taken[-1] - taken[4]


print(grow())
stream_sources._read_row_group = lambda *names: tables.append(read(*names)) or tables[-1]
print(grow())
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow(folder):
    grown, grown_by_all_tables = map(
        int, run_python("-c", MEMORY, folder / "int16", ARROW_DEFAULT_MEMORY_POOL="system").split()
    )
    assert grown < 8e6 < grown_by_all_tables


def test_other_datasets_are_to_be_prepared(folder):
    with pytest.raises(ValueError, match="esc50"):
        load_splits("esc50", data_dir=str(folder / "ESC"), streaming=True)


def test_translations_join_a_stream(folder, stream, tmp_path):
    lines = []
    for row in stream:
        for index, text in enumerate(row["captions"]["eng"]):
            lines.append({"clip_id": row["clip_id"], "caption_index": index, "language": "deu", "text": f"({text})"})
    write_translations(tmp_path / "deu.parquet", lines)
    splits = load_splits(
        "prepared", data_dir=str(folder / "int16"), streaming=True, translations=str(tmp_path / "deu.parquet")
    )
    for joined, row in zip(splits["train"], stream, strict=True):
        assert joined["captions"].pop("deu") == [f"({text})" for text in row["captions"]["eng"]]
        assert joined == row
    assert list(splits["train"].features["captions"]) == ["eng", "fra", "deu"]
