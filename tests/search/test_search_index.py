"""The index: its windows, updates of the folder, and interrupted builds."""

import contextlib
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from threading import Barrier

import fsspec
import numpy as np
import pytest
import soundfile
from fake_models import PITCHES, RATE, PitchModel, build, tone

from modeling_supclap import encoding
from modeling_supclap.audio_input import Recording
from modeling_supclap.datasets_scripts import progress
from modeling_supclap.datasets_scripts.atomic_files import InUseError, folder_lock
from modeling_supclap.datasets_scripts.audio import MissingDecoderError
from modeling_supclap.encoding import AudioChunks
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.evaluation.windows import list_recordings
from modeling_supclap.search import Searcher, SoundIndex, build_index
from modeling_supclap.search import index as index_module
from modeling_supclap.search import store as store_module
from modeling_supclap.search.app import find_recordings

pytestmark = pytest.mark.skipif(find_spec("lancedb") is None, reason="the extra search is not installed")


def test_only_new_or_changed_files_are_read_again(fake_model, folder):
    build(fake_model, folder)
    fake_model.num_encoded = 0
    renamed = load_embedding_model(fake_model, name="copy")  # with an equal fingerprint
    index = folder.parent / "index"
    report = build_index(renamed, folder, index, window_seconds=5, show_progress_bar=False)  # as 5.0
    assert SoundIndex(index).about["model"] == "PitchModel"
    assert (report.added, report.changed, report.removed, report.unchanged, fake_model.num_encoded) == (0, 0, 0, 3, 0)

    soundfile.write(folder / "short.ogg", tone(PITCHES["high"], 2.0), RATE)
    (folder / "deep" / "middle's.flac").unlink()
    soundfile.write(folder / "new.wav", tone(PITCHES["middle"], 3.0), RATE)
    report = build(fake_model, folder)
    assert (report.added, report.changed, report.removed, report.unchanged, fake_model.num_encoded) == (1, 1, 1, 1, 2)

    fresh = build_index(load_embedding_model(fake_model), folder, folder.parent / "fresh", show_progress_bar=False)
    assert report.windows == fresh.windows
    rows = [everything(folder.parent / name) for name in ("index", "fresh")]
    assert rows[0] == rows[1]


def test_a_channel_is_indexed_and_kept(fake_model, tmp_path):
    (tmp_path / "sounds").mkdir()
    sides = np.stack([tone(PITCHES["low"], 12.0), tone(PITCHES["high"], 12.0)], axis=1)
    soundfile.write(tmp_path / "sounds" / "a.wav", sides, RATE)
    soundfile.write(tmp_path / "sounds" / "low.wav", sides[:, 0], RATE)
    for channel, pitch in ((0, "low"), (1, "high")):
        index = tmp_path / f"index{channel}"
        model, options = load_embedding_model(fake_model), {"show_progress_bar": False}
        report = build_index(model, tmp_path / "sounds", index, channel=channel, **options)
        assert list(report.unreadable) == ([] if channel == 0 else ["low.wav"])  # which is mono
        (hit, *_) = Searcher(index, fake_model).search(pitch, within="a.wav")
        assert hit.score == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ValueError, match=r"has channel '1', not 'None'"):
        build_index(model, tmp_path / "sounds", tmp_path / "index1", **options)
    report = build_index(model, tmp_path / "sounds", tmp_path / "index0", channel=0, **options)
    assert report.unchanged == 2


def test_a_report_says_what_is_in_the_index():
    report = index_module.IndexReport(1, 2, 3, 4, 500, {"a.wav": "no sound", "b.wav": "silent"}, 6.25, 0.953)
    assert str(report).splitlines() == [
        "1 files added, 2 changed, 3 removed, 4 unchanged",
        "500 windows in the index (6.2 s)",
        "the approximate index finds 95.3 % of the ten best windows",
        "cannot read a.wav: no sound",
        "cannot read b.wav: silent",
    ]
    assert str(index_module.IndexReport()).count("\n") == 1


@pytest.mark.parametrize(
    ("cores", "asked", "expected"), [(3, None, 3), (64, None, 8), (None, None, 1), (3, 0, 1), (3, 9, 9)]
)
def test_files_are_read_by_a_thread_per_core(fake_model, folder, monkeypatch, cores, asked, expected):
    model, found = load_embedding_model(fake_model), []
    embed = model.chunk_embeddings

    def record(recordings, **options):
        found.append((options["num_workers"], options["batch_size"]))
        return embed(recordings, **options)

    monkeypatch.setattr(index_module.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(model, "chunk_embeddings", record)
    build_index(model, folder, folder.parent / "index", num_workers=asked, show_progress_bar=False)
    assert found == [(expected, 32)]


@pytest.mark.parametrize(("shown", "rank"), [(True, 0), (False, 0), (True, 1)])
def test_the_progress_of_the_first_process_is_shown(fake_model, folder, monkeypatch, capsys, shown, rank):
    build(fake_model, folder)
    monkeypatch.setattr(progress, "FIRST_LOG_SECONDS", 0.0)
    model = load_embedding_model(fake_model)
    for name in ("a", "b"):  # of two processes, one each
        soundfile.write(folder / f"0{name}.wav", tone(PITCHES["low"], 1.0), RATE)
    build_index(model, folder, folder.parent / "index", show_progress_bar=shown, process=(rank, 2))
    found = capsys.readouterr().err
    assert ("indexing: 1 of 1 files" in found) == (shown and not rank)
    assert bool(found) == (shown and not rank)


def everything(path):
    """Return each window of an index with its embedding, sorted."""
    rows = SoundIndex(path).windows.to_arrow().to_pylist()
    return sorted((row["file"], row["start_seconds"], row["end_seconds"], tuple(row["vector"])) for row in rows)


def test_an_index_at_an_address_has_no_lock_and_is_updated(fake_model, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    index = f"file://{folder.parent}/at an address"
    assert index_folder(fake_model, folder, index).added == 3
    (folder / "short.ogg").unlink()
    report = index_folder(fake_model, folder, index)
    assert (report.removed, report.unchanged) == (1, 2)
    assert Searcher(index, load_embedding_model(fake_model)).search("high", k=1)[0].file == "long.wav"
    assert not list(folder.parent.glob("file:*"))


def test_two_files_that_swap_names_with_equal_size_and_time_are_read_again(fake_model, folder):
    for name in ("a.wav", "b.wav"):
        soundfile.write(folder / name, tone(PITCHES["low" if name == "a.wav" else "high"], 3.0), RATE)
        os.utime(folder / name, ns=(10**18, 10**18))
    build(fake_model, folder)
    (folder / "a.wav").rename(folder / "c.wav")
    (folder / "b.wav").rename(folder / "a.wav")
    (folder / "c.wav").rename(folder / "b.wav")
    assert build(fake_model, folder).changed == 2
    assert Searcher(folder.parent / "index", load_embedding_model(fake_model)).search("high", k=1)[0].file == "a.wav"


def test_the_folder_at_an_address_is_indexed(fake_model, folder, tmp_path):
    fsspec.filesystem("memory").put(str(folder), "/indexed", recursive=True)
    model = load_embedding_model(fake_model)
    report = build_index(model, "memory://indexed", tmp_path / "index", show_progress_bar=False)
    assert report.added == 3
    searcher = Searcher(tmp_path / "index", model)
    (hit,) = searcher.search("middle", k=1)
    assert hit.file == "deep/middle's.flac"
    assert (find_recordings(searcher) / hit.file).read_bytes() == (folder / hit.file).read_bytes()
    report = build_index(model, "memory://indexed", tmp_path / "index", show_progress_bar=False)
    assert (report.added, report.unchanged) == (0, 3)


def test_a_copied_folder_is_recognised_by_its_content(fake_model, folder, monkeypatch):
    build(fake_model, folder)
    shutil.copytree(folder, folder.parent / "copy")
    shutil.rmtree(folder)
    shutil.move(folder.parent / "copy", folder)
    time.sleep(0.01)
    fake_model.num_encoded = 0
    assert (build(fake_model, folder).unchanged, fake_model.num_encoded) == (3, 0)
    monkeypatch.setattr(index_module, "file_sha256", None)  # the new times are stored
    assert build(fake_model, folder).unchanged == 3


def test_unreadable_files_are_listed_and_tried_again(fake_model, folder):
    (folder / "broken.wav").write_bytes(b"no sound")
    report = build(fake_model, folder)
    assert list(report.unreadable) == ["broken.wav"]
    assert "broken.wav" in str(report)
    assert (report.added, build(fake_model, folder).changed) == (3, 0)
    soundfile.write(folder / "broken.wav", tone(PITCHES["low"], 1.0), RATE)
    again = build(fake_model, folder)
    assert (again.unreadable, again.added, again.changed) == ({}, 0, 1)


def test_a_recording_shorter_than_the_model_takes_is_listed(fake_model, folder):
    fake_model.min_seconds = 1.5
    report = build(fake_model, folder)
    assert list(report.unreadable) == ["short.ogg"]
    assert "the minimum is 1.5 s" in report.unreadable["short.ogg"]


@pytest.mark.parametrize("longest", [300.0, 22.5])
def test_a_silent_recording_is_listed_and_silence_in_a_recording_is_not(fake_model, folder, monkeypatch, longest):
    monkeypatch.setattr(encoding, "LONGEST_SECONDS", longest)  # read whole, and in parts
    silence = np.zeros(60 * RATE)
    soundfile.write(folder / "silent.wav", silence, RATE)
    silence[-100:] = 0.5
    soundfile.write(folder / "late.wav", silence, RATE)
    report = build(fake_model, folder)
    assert list(report.unreadable) == ["silent.wav"]
    assert "silent" in report.unreadable["silent.wav"]


def test_a_file_shorter_than_its_header_is_listed(fake_model, folder, monkeypatch):
    monkeypatch.setattr(encoding, "LONGEST_SECONDS", 22.5)  # eight windows
    monkeypatch.setattr(Recording, "get_seconds", lambda self: 70.0 if "long" in self.name else 1.0)
    report = build(fake_model, folder)
    assert list(report.unreadable) == ["long.wav"]
    assert "after 60.0000 s" in report.unreadable["long.wav"]


@pytest.mark.parametrize("bad_part", [0, 2])
def test_a_partly_readable_file_is_not_indexed(fake_model, folder, monkeypatch, bad_part):
    monkeypatch.setattr(encoding, "LONGEST_SECONDS", 22.5)  # eight windows
    read, first = Recording.read, bad_part * 8 * 2.5 * RATE

    def fail_once(self, rate_hz, start=0, *rest, **options):
        if "long" in self.name and start == first:
            raise OSError("the disk is gone")
        return read(self, rate_hz, start, *rest, **options)

    monkeypatch.setattr(Recording, "read", fail_once)
    report = build(fake_model, folder)
    assert report.unreadable == {"long.wav": "the disk is gone"}
    assert report.windows == 4 + 1


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_recording_that_changes_while_it_is_indexed_is_embedded_again(fake_model, folder, monkeypatch, is_restored):
    read, content = Recording.read, (folder / "short.ogg").read_bytes()

    def read_amid_changes(self, *span, **options):
        if self.name != "short.ogg":
            return read(self, *span, **options)
        if is_restored:
            soundfile.write(folder / "short.ogg", tone(PITCHES["high"], 2.0), RATE)
        waveform = read(self, *span, **options)
        if is_restored:
            (folder / "short.ogg").write_bytes(content)
        else:
            soundfile.write(folder / "short.ogg", tone(PITCHES["high"], 2.0), RATE)
        return waveform

    with monkeypatch.context() as patched:
        patched.setattr(Recording, "read", read_amid_changes)
        build(fake_model, folder, num_workers=1)
    build(fake_model, folder)
    fresh = build_index(load_embedding_model(fake_model), folder, folder.parent / "fresh", show_progress_bar=False)
    assert fresh.windows == 23 + 4 + 1
    assert everything(folder.parent / "index") == everything(folder.parent / "fresh")


def test_a_recording_that_vanishes_and_a_link_to_itself_are_skipped(fake_model, folder, monkeypatch):
    (folder / "loop.wav").symlink_to(folder / "loop.wav")
    root, there = list_recordings(folder)
    with monkeypatch.context() as patched:
        patched.setattr(index_module, "list_recordings", lambda _: (root, {**there, "gone.wav": folder / "gone.wav"}))
        report = build(fake_model, folder)
    assert list(report.unreadable) == ["gone.wav"]
    assert report.windows == 23 + 4 + 1
    soundfile.write(folder / "gone.wav", tone(PITCHES["low"], 1.0), RATE)
    report = build(fake_model, folder)
    assert (report.unreadable, report.windows, report.unchanged) == ({}, 29, 3)


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError("the disk is gone"), "the disk is gone"), (OSError(), "OSError()")]
)
def test_files_with_read_errors_are_tried_again(fake_model, folder, monkeypatch, error, reason):
    def fail(self, *_, **options):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Recording, "read", fail)
        report = build(fake_model, folder)
    assert report.unreadable == dict.fromkeys(["long.wav", "short.ogg", "deep/middle's.flac"], reason)
    assert (report.added, report.windows) == (0, 0)
    assert build(fake_model, folder).unreadable == {}


def test_files_that_need_a_missing_decoder_are_read_after_its_installation(fake_model, folder, monkeypatch):
    def fail(self, *_, **options):
        raise MissingDecoderError("install FFmpeg")

    with monkeypatch.context() as patched:
        patched.setattr(Recording, "read", fail)
        assert set(build(fake_model, folder).unreadable.values()) == {"install FFmpeg"}
    assert build(fake_model, folder).unreadable == {}


def test_an_interrupted_removal_is_repeated(fake_model, folder, monkeypatch):
    build(fake_model, folder)
    (folder / "short.ogg").unlink()
    table = type(SoundIndex(folder.parent / "index").files)
    delete, calls = table.delete, []

    def delete_once(self, where):
        calls.append(where)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return delete(self, where)

    monkeypatch.setattr(table, "delete", delete_once)
    with pytest.raises(KeyboardInterrupt):
        build(fake_model, folder)
    monkeypatch.undo()
    assert build(fake_model, folder).removed == 1
    assert {row[0] for row in everything(folder.parent / "index")} == {"deep/middle's.flac", "long.wav"}


def test_a_second_run_on_one_store_is_refused(fake_model, folder):
    build(fake_model, folder)
    with (
        folder_lock(folder.parent / "index"),
        ThreadPoolExecutor() as another,
        pytest.raises(InUseError, match="index"),
    ):
        another.submit(build, fake_model, folder).result()


def test_a_store_that_is_emptied_during_a_search_has_no_hits(fake_model, folder):
    build(fake_model, folder)
    index = SoundIndex(folder.parent / "index")
    index.remove(list(index.known_files()))
    assert index._nearest_in_memory(np.zeros(index.dim, np.float32), 3, None, False) == []


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_an_open_searcher_reads_the_writes_of_another_run(fake_model, folder, monkeypatch, threshold):
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", 10**9)  # too few windows to train an index
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", threshold)
    assert searcher.search("middle", k=1)[0].file == "deep/middle's.flac"

    (folder / "deep" / "middle's.flac").rename(folder / "new.flac")
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", 10**9)
    build(fake_model, folder)
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", threshold)
    assert searcher.search("middle", k=1)[0].file == "new.flac"
    assert searcher.index.holds("new.flac")
    assert not searcher.index.holds("deep/middle's.flac")


@pytest.mark.parametrize("part", ["windows", "files"])
def test_a_damaged_store_is_named(fake_model, folder, part):
    build(fake_model, folder)
    for manifest in (folder.parent / "index" / f"{part}.lance" / "_versions").iterdir():
        manifest.write_bytes(b"junk")
    with pytest.raises(ValueError, match=f"{folder.parent / 'index'} is damaged"):
        Searcher(folder.parent / "index", load_embedding_model(fake_model))


def test_a_store_that_a_kill_left_without_a_version_is_completed(fake_model, folder):
    windows = build(fake_model, folder).windows
    shutil.rmtree(folder.parent / "index" / "files.lance" / "_versions")
    with pytest.raises(FileNotFoundError, match="index"):
        SoundIndex(folder.parent / "index")
    assert build(fake_model, folder).windows == windows
    shutil.rmtree(folder.parent / "index" / "windows.lance" / "_versions")
    with pytest.raises(ValueError, match=f"{folder.parent / 'index'} is damaged"):
        build(fake_model, folder)


def test_a_store_without_its_data_is_named(fake_model, folder):
    build(fake_model, folder)
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    shutil.rmtree(folder.parent / "index" / "windows.lance" / "data")
    with pytest.raises(ValueError, match=f"{folder.parent / 'index'} is damaged"):
        searcher.search("high")


def test_a_foreign_store_is_named(fake_model, folder):
    lancedb = pytest.importorskip("lancedb")
    database = lancedb.connect(folder.parent / "index")
    for name in ("windows", "files"):
        database.create_table(name, [{"file": "a.wav", "vector": [1.0, 2.0]}])
    for call in (lambda: Searcher(folder.parent / "index"), lambda: build(fake_model, folder)):
        with pytest.raises(ValueError, match="fingerprint"):
            call()


@pytest.mark.parametrize("threshold", [2000, 100_000])
def test_the_store_takes_little_more_than_its_windows(tmp_path, monkeypatch, threshold):
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", threshold)
    rows = np.random.default_rng(0).normal(size=(4000, 256)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    store = SoundIndex(tmp_path / "index", 256)
    for part in range(8):
        starts, embeds = np.arange(500.0), rows[part * 500 : (part + 1) * 500]
        stamp = store_module.Stamp(1, 1, 1)
        store.replace([store_module.IndexedFile(f"{part}.wav", stamp, "", AudioChunks(embeds, starts, starts + 5))])
    store.optimize()
    size = sum(path.stat().st_size for path in (tmp_path / "index").rglob("*") if path.is_file())
    assert size <= 2.1 * rows.nbytes
    assert store.windows.count_rows() == 4000


@pytest.mark.parametrize("windows_at_once", [1, 20_000])
@pytest.mark.parametrize("writes", [1, 2, 3])
def test_an_interrupted_run_continues(fake_model, folder, monkeypatch, windows_at_once, writes):
    monkeypatch.setattr(index_module, "_WINDOWS_AT_ONCE", windows_at_once)
    soundfile.write(folder / "a.wav", tone(PITCHES["middle"], 3.0), RATE)
    build_index(load_embedding_model(fake_model), folder, folder.parent / "whole", show_progress_bar=False)
    SoundIndex(folder.parent / "index", 13, SoundIndex(folder.parent / "whole").about)
    table = type(SoundIndex(folder.parent / "whole").files)
    add, calls = table.add, []

    def add_some(self, rows):
        calls.append(rows)
        if len(calls) > writes:  # after the windows are written, before the files are recorded
            raise KeyboardInterrupt
        return add(self, rows)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(table, "add", add_some)
        build(fake_model, folder)
    (folder / "a.wav").unlink()  # its windows may be left, without an entry in the file table
    build(fake_model, folder)
    expected = [row for row in everything(folder.parent / "whole") if row[0] != "a.wav"]
    assert everything(folder.parent / "index") == expected


def record_calls(monkeypatch, *names):
    """Return a list of the calls of methods of LanceDB's tables, as (method, name of the table)."""
    import lancedb.table

    calls = []
    for name in names:
        method = getattr(lancedb.table.LanceTable, name)

        def call(self, *args, method=method, **options):
            calls.append((method.__name__, self.name))
            return method(self, *args, **options)

        monkeypatch.setattr(lancedb.table.LanceTable, name, call)
    return calls


def short_files(count, first=0, dim=16):
    """Yield files of one window each."""
    embeds = np.random.default_rng(first).normal(size=(count, dim)).astype(np.float32)
    for number, embed in enumerate(embeds, first):
        chunks = AudioChunks(embed[None], np.zeros(1), np.full(1, 3.0))
        yield store_module.IndexedFile(f"{number:06d}.wav", store_module.Stamp(1, 1, 1), str(number), chunks)


@pytest.mark.parametrize("count", [500, 5000])
def test_new_files_are_written_by_windows_and_nothing_is_deleted(tmp_path, monkeypatch, count):
    calls = record_calls(monkeypatch, "add", "delete", "optimize")
    monkeypatch.setattr(index_module, "_WINDOWS_AT_ONCE", count // 5)
    store = SoundIndex(tmp_path / "index", 16)
    for batch in index_module.write_batches(short_files(count)):
        store.replace(batch)
    assert calls == [("add", "windows"), ("add", "files")] * 5
    assert store.windows.stats()["fragment_stats"]["num_fragments"] == 5
    store.optimize()
    assert store.windows.stats()["fragment_stats"]["num_fragments"] == 1

    calls.clear()
    SoundIndex(tmp_path / "index").replace(list(short_files(100, first=count - 50)))  # 50 of them are new
    assert calls == [("delete", "files"), ("delete", "windows"), ("add", "windows"), ("add", "files")]
    assert store.windows.count_rows() == store.files.count_rows() == count + 50


def test_many_files_are_removed_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_NAMES_AT_ONCE", 2)
    store = SoundIndex(tmp_path / "index", 16)
    store.replace(list(short_files(7)))
    store.remove([f"{number:06d}.wav" for number in range(1, 6)])
    assert sorted(store.known_files()) == ["000000.wav", "000006.wav"]
    assert store.windows.count_rows() == 2


@pytest.mark.parametrize("exact", [False, True])
def test_equal_scores_are_in_order_of_file_and_time(tmp_path, exact):
    store = SoundIndex(tmp_path / "index", 4)
    same, starts = np.eye(4, dtype=np.float32)[[0, 0, 1]], np.array([5.0, 0.0, 10.0])
    for name in ("c.wav", "a.wav", "b.wav"):
        chunks = AudioChunks(same, starts, starts + 5)
        store.replace([store_module.IndexedFile(name, store_module.Stamp(1, 1, 1), name, chunks)])
    found = store.nearest([1.0, 0.5, 0.0, 0.0], 5, exact=exact)
    places = [("a.wav", 0.0), ("a.wav", 5.0), ("b.wav", 0.0), ("b.wav", 5.0), ("c.wav", 0.0)]
    assert [(row["file"], row["start_seconds"]) for row in found] == places
    assert found[0] == {"file": "a.wav", "start_seconds": 0.0, "end_seconds": 5.0, "score": 1.0}
    assert store.nearest([1.0, 0.0, 0.0, 0.0], 5, [], exact) == []
    assert len(store.nearest([1.0, 0.0, 0.0, 0.0], 99, ["a.wav", "c.wav"], exact)) == 6
    assert {row["duration_seconds"] for row in store.known_files().values()} == {15.0}


def test_a_slow_model_writes_before_all_windows_are_there(monkeypatch):
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr(index_module.time, "monotonic", lambda: next(clock))
    sizes = [len(batch) for batch in index_module.write_batches(short_files(20))]
    assert sizes == [9, 9, 2]


def test_a_write_has_a_number_of_windows_and_a_file_without_windows_counts_as_one(monkeypatch):
    monkeypatch.setattr(index_module, "_WINDOWS_AT_ONCE", 4)
    (entry,) = short_files(1)
    entries = []
    for count in (0, 0, 3, 3, 1, 0):
        entries.append(entry._replace(windows=AudioChunks(np.zeros((count, 16)), np.zeros(count), np.ones(count))))
    sizes = [[len(each.windows.onset_seconds) for each in batch] for batch in index_module.write_batches(entries)]
    assert sizes == [[0, 0, 3], [3, 1], [0]]


def test_fragments_are_merged_when_they_have_doubled(fake_model, tmp_path, monkeypatch):
    (tmp_path / "sounds").mkdir()
    for number in range(70):
        soundfile.write(tmp_path / "sounds" / f"{number}.wav", tone(250.0 + number, 1.0), RATE)
    calls = record_calls(monkeypatch, "add", "optimize")
    monkeypatch.setattr(index_module, "_WINDOWS_AT_ONCE", 1)
    build(fake_model, tmp_path / "sounds")
    writes = [
        number for number, call in enumerate(call for call in calls if call[1] == "files") if call[0] == "optimize"
    ]
    assert writes == [16, 33, 66, 73, 74]  # after 16, 32 and 64 writes, and twice at the end


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_share_the_files(fake_model, folder, processes):
    barrier = Barrier(processes, timeout=60)

    def run(rank):
        return build(fake_model, folder, process=(rank, processes), barrier=barrier.wait)

    with ThreadPoolExecutor(processes) as pool:
        report, *others = pool.map(run, range(processes))
    assert (report.added, report.unchanged, report.windows) == (3, 0, 28)
    assert {(other.added, other.windows) for other in others} == {(0, 0)}
    assert min(other.seconds for other in others) > 0
    (folder / "short.ogg").unlink()
    with ThreadPoolExecutor(processes) as pool:
        report, *others = pool.map(run, range(processes))
    assert (report.removed, report.unchanged) == (1, 2)
    soundfile.write(folder / "short.ogg", tone(PITCHES["low"], 1.0), RATE)
    build(fake_model, folder)
    whole = build_index(load_embedding_model(fake_model), folder, folder.parent / "whole", show_progress_bar=False)
    assert whole.added == 3
    assert everything(folder.parent / "index") == everything(folder.parent / "whole")


def test_windows_of_two_models_are_not_mixed(fake_model, folder):
    build(fake_model, folder)
    other = PitchModel()
    other.fingerprint = "another fake_model"
    with pytest.raises(ValueError, match="another fake_model"):
        build(other, folder)
    with pytest.raises(ValueError, match="index"):
        Searcher(folder.parent / "index", load_embedding_model(other))
    with pytest.raises(ValueError, match="hop_seconds"):
        build(fake_model, folder, hop_seconds=1.0)


def test_the_windows_of_another_folder_are_not_thrown_away(fake_model, folder):
    build(fake_model, folder)
    other = folder.parent / "other"
    other.mkdir()
    soundfile.write(other / "new.wav", tone(PITCHES["low"], 1.0), RATE)
    with pytest.raises(ValueError, match="other"):
        build_index(load_embedding_model(fake_model), other, folder.parent / "index", show_progress_bar=False)
    assert len(SoundIndex(folder.parent / "index").known_files()) == 3
    (other / "new.wav").rename(folder / "new.wav")
    assert build(fake_model, folder).added == 1


def index_folder(fake_model, root, index):
    return build_index(load_embedding_model(fake_model), root, index, show_progress_bar=False)


@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_second_site_with_equal_names_is_refused(fake_model, folder, is_mounted):
    build(fake_model, folder)
    before = everything(folder.parent / "index")
    site = folder.parent / "site B"
    shutil.copytree(folder, site)
    for name, pitch in (("long.wav", "middle"), ("short.ogg", "high"), ("deep/middle's.flac", "low")):
        soundfile.write(site / name, tone(PITCHES[pitch], 3.0), RATE)
    if not is_mounted:  # as the card of the first recorder
        folder.rename(folder.parent / "card")
        # the third recording is the same at both
        shutil.copy(folder.parent / "card" / "short.ogg", site / "short.ogg")
    with pytest.raises(ValueError, match=f"{folder}, not of {site}.*--index"):
        index_folder(fake_model, site, folder.parent / "index")
    assert everything(folder.parent / "index") == before
    assert SoundIndex(folder.parent / "index").about["folder"] == str(folder)


def test_a_copy_beside_the_indexed_folder_is_refused(fake_model, folder):
    build(fake_model, folder)
    shutil.copytree(folder, folder.parent / "copy")
    (folder.parent / "copy" / "long.wav").unlink()  # its windows would be removed
    with pytest.raises(ValueError, match="still has its recordings"):
        index_folder(fake_model, folder.parent / "copy", folder.parent / "index")
    (folder.parent / "link").symlink_to(folder)
    assert index_folder(fake_model, folder.parent / "link", folder.parent / "index").unchanged == 3
    SoundIndex(folder.parent / "index").move(str(folder.parent / "link"))  # as a folder that is mounted twice
    assert index_folder(fake_model, folder, folder.parent / "index").unchanged == 3
    assert SoundIndex(folder.parent / "index").about["folder"] == str(folder)


@pytest.mark.parametrize("leaves_empty_folder", [True, False])
def test_a_folder_that_moved_keeps_its_embeddings_and_is_found(fake_model, folder, leaves_empty_folder):
    (folder / "broken.wav").write_bytes(b"no sound")
    build(fake_model, folder)
    about = SoundIndex(folder.parent / "index").about
    new = folder.parent / "new place"
    shutil.copytree(folder, new)  # with other times
    shutil.rmtree(folder)
    if leaves_empty_folder:
        folder.mkdir()
    (new / "short.ogg").unlink()
    soundfile.write(new / "added.wav", tone(PITCHES["high"], 6.0), RATE)
    fake_model.num_encoded = 0
    report = index_folder(fake_model, new, folder.parent / "index")
    assert (report.added, report.removed, report.unchanged, fake_model.num_encoded) == (1, 1, 2, 2)
    stored = SoundIndex(folder.parent / "index").about
    assert stored == {**about, "folder": str(new)}
    assert str(folder) not in str(report)  # nor in the reason why a file is unreadable
    assert report.unreadable["broken.wav"].startswith("broken.wav (8 bytes)")
    searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
    assert find_recordings(searcher) == new.resolve()
    assert searcher.search("high", k=1)[0].file in ("added.wav", "long.wav")


def test_half_of_the_recordings_suffice_to_recognise_a_folder_that_moved(fake_model, folder):
    (folder / "short.ogg").unlink()
    build(fake_model, folder)
    new = folder.rename(folder.parent / "new place")
    soundfile.write(new / "long.wav", tone(PITCHES["middle"], 3.0), RATE)
    report = index_folder(fake_model, new, folder.parent / "index")
    assert (report.changed, report.unchanged) == (1, 1)


def test_an_index_without_a_channel_in_its_metadata_is_of_all_channels(fake_model, folder):
    build(fake_model, folder)
    about = SoundIndex(folder.parent / "index").about
    SoundIndex(folder.parent / "old", 13, {key: value for key, value in about.items() if key != "channel"})
    assert index_folder(fake_model, folder, folder.parent / "old").added == 3
    with pytest.raises(ValueError, match="has channel None, not '0'; use another, or delete it"):
        build_index(load_embedding_model(fake_model), folder, folder.parent / "old", channel=0)


def test_a_recording_without_permission_is_listed_and_the_others_are_indexed(fake_model, folder, monkeypatch):
    sha256 = index_module.file_sha256

    def fail(path):
        if path.name == "short.ogg":
            raise PermissionError(13, "Permission denied", str(path))
        return sha256(path)

    monkeypatch.setattr(index_module, "file_sha256", fail)
    assert build(fake_model, folder).added == 3
    (row,) = [row for name, row in SoundIndex(folder.parent / "index").known_files().items() if name == "short.ogg"]
    assert row["digest"] == ""


def test_an_index_of_a_model_without_a_fingerprint_takes_no_other_model(fake_model, folder):
    fake_model.fingerprint = ""
    model = load_embedding_model(fake_model, name="one")
    build_index(model, folder, folder.parent / "index", show_progress_bar=False)
    assert Searcher(folder.parent / "index", model).search("high", k=1)
    other = load_embedding_model(fake_model, name="another")
    fingerprinted = load_embedding_model(PitchModel(), name="one")
    for wrong in (other, fingerprinted):
        with pytest.raises(ValueError, match=r"'one'|fingerprint"):
            build_index(wrong, folder, folder.parent / "index", show_progress_bar=False)
        with pytest.raises(ValueError, match="built with one"):
            Searcher(folder.parent / "index", wrong)


def test_a_fingerprinted_index_takes_no_model_without_a_fingerprint(fake_model, folder):
    build(fake_model, folder)
    fake_model.fingerprint = None
    with pytest.raises(ValueError, match="fingerprint"):
        Searcher(folder.parent / "index", load_embedding_model(fake_model))


@pytest.mark.parametrize("threshold", [0, 100_000])  # in the store, and in memory
def test_flipped_bits_of_windows_are_found(fake_model, folder, monkeypatch, threshold):
    build(fake_model, folder)
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", threshold)

    def search():
        searcher = Searcher(folder.parent / "index", load_embedding_model(fake_model))
        return searcher.search("low", k=30, merge_overlaps=False)

    whole = search()
    (data,) = (folder.parent / "index" / "windows.lance" / "data").glob("*.lance")
    content, messages = data.read_bytes(), []
    for place in range(5, len(content), len(content) // 40):
        flipped = bytearray(content)
        flipped[place] ^= 4
        data.write_bytes(flipped)
        try:
            assert search() == whole  # a byte of no importance
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(f"the index {folder.parent / 'index'} is damaged" in message for message in messages)


def test_errors_of_writes_name_the_index(fake_model, folder, monkeypatch):
    build(fake_model, folder)
    soundfile.write(folder / "new.wav", tone(PITCHES["high"], 3.0), RATE)
    (folder / "short.ogg").unlink()
    table = type(SoundIndex(folder.parent / "index").files)

    def fail(*_, **options):
        raise RuntimeError("lance error: LanceError(IO): No space left on device")

    for method in ("delete", "add", "optimize"):
        with monkeypatch.context() as patched:
            patched.setattr(table, method, fail)
            with pytest.raises(
                ValueError, match=rf"{folder.parent / 'index'}: lance error.*No space left.*if it is damaged"
            ):
                build(fake_model, folder)

    def fail_by_name(*_, **options):
        raise RuntimeError(f"no space left for {folder.parent / 'index'}")

    with monkeypatch.context() as patched:
        patched.setattr(table, "optimize", fail_by_name)
        with pytest.raises(RuntimeError, match="no space left for"):
            build(fake_model, folder)
    report = build(fake_model, folder)
    assert (report.windows, len(SoundIndex(folder.parent / "index").known_files())) == (23 + 4 + 1, 3)


def test_a_panic_of_the_store_is_named_and_interruptions_pass(tmp_path):
    store = SoundIndex(tmp_path / "index", 4)

    class PanicException(BaseException):  # as of PyO3
        pass

    def fail(error):
        raise error

    with pytest.raises(ValueError, match=f"{tmp_path / 'index'} is damaged: index out of bounds; delete it"):
        store._read(lambda: fail(PanicException("index out of bounds")))
    calls = iter([lambda: fail(OSError("replaced by another process")), lambda: "rows"])
    assert store._read(lambda: next(calls)()) == "rows"
    for error, reason in ((OSError("first line\nsecond"), "first line"), (KeyError(), r"KeyError\(\)")):
        with pytest.raises(ValueError, match=f"is damaged: {reason}; delete it"):
            store._read(lambda error=error: fail(error))
    for error in (KeyboardInterrupt, MemoryError):
        with pytest.raises(error):
            store._read(lambda error=error: fail(error()))


def test_bad_arguments_are_refused(fake_model, folder, tmp_path, monkeypatch):
    for hop_seconds in (9.0, 5.1, 0.0, -1.0):
        with pytest.raises(ValueError, match=rf"hop_seconds is {hop_seconds}; .* at most window_seconds=5\.0"):
            build(fake_model, folder, hop_seconds=hop_seconds)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        build_index(load_embedding_model(fake_model), tmp_path / "nowhere", tmp_path / "index")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty"):
        build_index(load_embedding_model(fake_model), tmp_path / "empty", tmp_path / "index")
    with pytest.raises(FileNotFoundError, match="nothing"):
        SoundIndex(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(FileNotFoundError, match="memory://nothing; create one"):
        SoundIndex("memory://nothing")
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(ImportError, match=r"pip install 'supclap\[search\]'"):
        SoundIndex(tmp_path / "index", 16)


@pytest.mark.parametrize("dim", [16, 12])  # quantisation needs a multiple of 8
def test_beyond_a_size_the_index_is_approximate_and_its_recall_is_measured(tmp_path, monkeypatch, dim):
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", 2000)
    rows = np.random.default_rng(0).normal(size=(4000, dim)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    store = SoundIndex(tmp_path / "index", dim)
    starts = np.arange(4000.0)
    entry = store_module.IndexedFile("a.wav", store_module.Stamp(1, 1, 1), "", AudioChunks(rows, starts, starts + 5))
    store.replace([entry])
    recall = store.optimize()
    assert store.is_approximate
    assert 0.9 <= recall <= 1.0
    query = store.windows.search(rows[7], vector_column_name="vector").distance_type("dot")
    assert len(query.nprobes(1).limit(4000).to_list()) < 1000  # the partitions are not joined

    exact = store.nearest(rows[7], 10, exact=True)
    cosines = rows @ rows[7]
    assert [round(row["start_seconds"]) for row in exact] == np.argsort(-cosines)[:10].tolist()

    rebuilds = []
    monkeypatch.setattr(type(store.windows), "create_index", lambda *args, **options: rebuilds.append(options))
    assert store.optimize() is None  # nothing is new
    few = entry._replace(file="b.wav", windows=AudioChunks(-rows[:50], starts[:50], starts[:50] + 5))
    store.replace([few])
    assert store.optimize() >= 0.9
    assert not rebuilds  # few new windows go into the existing partitions
    found = store.nearest(-rows[7], 1)[0]
    assert (found["file"], found["start_seconds"]) == ("b.wav", 7.0)
    store.remove(["b.wav"])
    store.replace([entry._replace(file="c.wav")])
    store.optimize()
    assert rebuilds


def test_recall_is_the_share_of_the_ten_best_windows_that_are_found(tmp_path, monkeypatch):
    store = SoundIndex(tmp_path / "index", 4)

    def nearest(vector, limit, exact=False):
        first = 0 if exact else vector[0]
        return [{"file": "a.wav", "start_seconds": float(number)} for number in range(first, first + limit)]

    monkeypatch.setattr(store, "nearest", nearest)
    assert store.measure_recall([[-2], [3]]) == (8 + 7) / 20


@pytest.mark.parametrize(
    ("precision", "width", "size"), [("int8", None, 64), ("binary", None, 8), ("binary", 32, 4), ("float32", 16, 16)]
)
@pytest.mark.parametrize("threshold", [0, 100_000])
def test_smaller_vectors_are_searched_with_whole_queries(
    fake_model, folder, monkeypatch, precision, width, size, threshold
):
    monkeypatch.setattr(store_module, "APPROXIMATE_FROM_ROWS", threshold if precision != "float32" else 100_000)
    rng = np.random.default_rng(0)
    mixing = np.linalg.qr(rng.standard_normal((64, 64)))[0]

    class Wide:
        """The tones of the fake model, mixed into 64 values."""

        sampling_rate, fingerprint = fake_model.sampling_rate, "wide"

        def encode_audio(self, waveforms, sampling_rate):
            return self._wide(fake_model.encode_audio(waveforms, sampling_rate))

        def encode_text(self, texts, language="eng"):
            return self._wide(fake_model.encode_text(texts, language))

        def _wide(self, embeds):
            return (np.asarray(embeds) @ mixing[: np.shape(embeds)[1]]).astype(np.float32)

    model, options = (
        load_embedding_model(Wide()),
        {"precision": precision, "width": width, "show_progress_bar": False},
    )
    build_index(model, folder, folder.parent / "small", **options)
    assert build_index(model, folder, folder.parent / "small", **options).unchanged == 3
    searcher = Searcher(folder.parent / "small", model)
    assert (searcher.index.dim, searcher.index.precision) == (64, precision)
    assert searcher.index.windows.schema.field("vector").type.list_size == size
    assert not searcher.index.is_approximate
    best = searcher.search("high", k=1)[0]
    assert best.file == "long.wav"
    assert best.start_seconds < 35
    assert best.end_seconds > 31
    assert searcher.search("middle", k=1)[0].file == "deep/middle's.flac"
    starts, scores = searcher.strip(searcher.embed("high"), "long.wav")
    assert 26 < starts[scores.argmax()] < 35
    with pytest.raises(ValueError, match=r"precision|width"):
        build_index(model, folder, folder.parent / "small", show_progress_bar=False)
    with pytest.raises(ValueError, match="int4"):
        build_index(model, folder, folder.parent / "other", precision="int4", show_progress_bar=False)


def test_a_file_without_permission_is_listed_like_a_lost_one(tmp_path):
    (tmp_path / "a.wav").touch()
    for path in (tmp_path / "a.wav" / "inside", tmp_path / "none"):  # other errors than FileNotFoundError, too
        assert index_module._stamp(path) == index_module._UNKNOWN
        assert index_module._digest(path) == ""
    assert index_module._digest(tmp_path) == ""
