"""Preparation: the written files are correct and reproducible, and a killed run resumes."""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, create_autospec

import datasets
import numpy as np
import pytest
import soundfile
from fake_hub import COMMIT, FakeHub, fake_hub
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from prepared_sets import make_folder, sound
from processes import Moment, run_killed, run_processes, run_python

from modeling_supclap.datasets_scripts import load_splits, prepare, shard_writer
from modeling_supclap.datasets_scripts.atomic_files import InUseError
from modeling_supclap.datasets_scripts.audio import BadAudioError, read_row
from modeling_supclap.datasets_scripts.prepare import Request, Shard, finish, main, make_entries, pack, write_shard
from modeling_supclap.datasets_scripts.prepare import prepare as run
from modeling_supclap.recipes.command import run_command

SHARD_BYTES = 150_000


@pytest.fixture(scope="module", autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("esc") / "ESC", bad=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def request_for(folder, storage="int16", **options):
    options = {"data_dir": str(folder), "test_fold": 4, "languages": ["eng", "jpn"], **options}
    return Request("esc50", options, storage, SHARD_BYTES)


def command_for(folder, out, cache):
    """Return the words of `supclap prepare` for `request_for(folder)`."""
    words = ["esc50", "--data_dir", str(folder), "--test_fold", "4", "--languages", "eng", "jpn", "--quiet"]
    return [*words, "--storage", "int16", "--shard_size", "150KB", "--out", str(out), "--cache_dir", cache]


@pytest.fixture(scope="module")
def whole(folder, cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "set"
    return out, run(request_for(folder), out, cache_dir=cache, quiet=True)


def files_of(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and ".prepare" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_the_manifest_lists_included_and_excluded_recordings(whole, folder):
    out, manifest = whole
    assert json.loads((out / "manifest.json").read_text(encoding="utf-8")) == manifest
    request = {"dataset": "esc50", "storage": "int16", "shard_bytes": SHARD_BYTES}
    assert {name: manifest[name] for name in request} == request
    assert manifest["options"] == {"data_dir": "ESC", "languages": ["eng", "jpn"], "test_fold": 4}
    bad = {clip["clip_id"]: clip for clips in manifest["bad_audio"].values() for clip in clips}
    assert bad.keys() == {"2-5", "2-9", "3-14"}
    for clip_id, message in (("2-5", "truncated"), ("2-9", "silent"), ("3-14", "truncated")):
        assert bad[clip_id]["audio_path"] == f"audio/{clip_id}.wav"
        assert message in bad[clip_id]["reason"]
        assert str(folder) not in bad[clip_id]["reason"]
    assert sum(about["clips"] for about in manifest["splits"].values()) == 21
    assert manifest["splits"]["test"]["captions"] == {"eng": 6 * 4, "jpn": 6 * 4}
    assert manifest["splits"]["test"]["seconds"] == pytest.approx(6 * 0.6)
    assert manifest["licenses"] == {"CC BY 3.0": 21}
    (metadata,) = manifest["source_files"]["metadata"]
    assert metadata["sha256"] == hashlib.sha256((folder / "meta" / "esc50.csv").read_bytes()).hexdigest()
    assert manifest["source_files"]["audio"]["files"] == 21


def test_shards_are_named_as_the_hub_does_and_hashed(whole):
    out, manifest = whole
    names = [shard["file"] for about in manifest["splits"].values() for shard in about["shards"]]
    assert sorted(names) == sorted(f"data/{path.name}" for path in (out / "data").iterdir())
    assert len(manifest["splits"]["train"]["shards"]) > 1
    expected = []
    for split, about in manifest["splits"].items():
        count = len(about["shards"])
        expected += [f"data/{split}-{number:05d}-of-{count:05d}.parquet" for number in range(count)]
    assert names == expected
    for about in manifest["splits"].values():
        for shard in about["shards"]:
            content = (out / shard["file"]).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (shard["bytes"], shard["sha256"])
            assert shard["payload_bytes"] <= SHARD_BYTES


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.process)])
def test_preparing_again_gives_the_same_bytes(whole, folder, cache, tmp_path, workers, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    request = request_for(folder, data_dir=folder.relative_to(folder.parent.parent))
    request = replace(request, options=dict(reversed(request.options.items())))
    entries = Mock(wraps=make_entries)
    monkeypatch.setattr(prepare, "make_entries", entries)
    run(request, tmp_path / "again", workers=workers, cache_dir=cache, quiet=True)
    assert {call.args[3] for call in entries.call_args_list} == {workers}
    assert files_of(tmp_path / "again") == files_of(whole[0])


def test_a_killed_run_reads_at_most_one_shard_again(whole, folder, cache, tmp_path, monkeypatch):
    out, packed = tmp_path / "out", []

    def counting(source, name, *options):
        packed.append(name)
        if len(packed) == 12:
            raise KeyboardInterrupt
        return pack(source, name, *options)

    monkeypatch.setattr(shard_writer, "pack", counting)
    with pytest.raises(KeyboardInterrupt):
        run(request_for(folder), out, cache_dir=cache, quiet=True)
    assert not (out / "manifest.json").exists()
    run(request_for(folder), out, cache_dir=cache, quiet=True)
    assert files_of(out) == files_of(whole[0])
    assert len(packed) < 24 + 8  # at most one shard is read twice


def test_a_second_run_on_the_folder_is_rejected_without_damage(whole, folder, cache, tmp_path, monkeypatch):
    def packing(*arguments):
        second = ThreadPoolExecutor().submit(run, request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)
        with pytest.raises(RuntimeError, match=r"\bout\b"):
            second.result()
        return pack(*arguments)

    monkeypatch.setattr(shard_writer, "pack", packing)
    run(request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)
    assert files_of(tmp_path / "out") == files_of(whole[0])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.process
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(whole, folder, cache, tmp_path):
    out = tmp_path / "out"
    words = [*command_for(folder, out, cache), "--workers", "2"]
    for name, number in (("*/.prepare/*.json", 1), ("*.parquet", 2), ("*/data/*.parquet", 1), ("*/manifest.json", 1)):
        run_killed(prepare.__file__, *words, moment=Moment("os.rename", name, number))
        assert not (out / "manifest.json").exists()
    run_processes(prepare.__file__, *words, count=1)
    assert files_of(out) == files_of(whole[0])


def test_a_complete_set_is_left_alone(whole, folder, cache, monkeypatch):
    monkeypatch.setattr(shard_writer, "pack", None)
    assert run(request_for(folder), whole[0], cache_dir=cache, quiet=True) == whole[1]


def test_policy_report_does_not_change_a_complete_set(whole, folder, cache):
    request = Request("esc50", request_for(folder).options, "int16", SHARD_BYTES, on_bad_audio="report")
    assert run(request, whole[0], cache_dir=cache, quiet=True) == whole[1]


def test_overwrite_reads_the_same_set_again_and_replaces_shards(whole, folder, cache, tmp_path, monkeypatch):
    shutil.copytree(whole[0], tmp_path / "out")
    write_shard(request_for(folder), tmp_path / "shards", Shard(0, 2), cache_dir=cache, quiet=True)
    counted = Mock(wraps=pack)
    monkeypatch.setattr(shard_writer, "pack", counted)
    for number, name in enumerate(("out", "shards"), 1):
        run(request_for(folder), tmp_path / name, overwrite=True, cache_dir=cache, quiet=True)
        assert counted.call_count == 24 * number
        assert files_of(tmp_path / name) == files_of(whole[0])
        left = {path.name for path in (tmp_path / name / ".prepare").rglob("*") if path.is_file()}
        assert left == {"plan.json", "00000-of-00001.json"}


def test_another_set_is_replaced_only_with_overwrite(folder, cache, tmp_path):
    out = tmp_path / "out"
    run(request_for(folder), out, cache_dir=cache, quiet=True)
    for message in (
        r"\bout contains another prepared set with different storage;",
        r"\bout contains another prepared set;",
    ):
        with pytest.raises(FileExistsError, match=message):
            run(request_for(folder, "reference"), out, cache_dir=cache, quiet=True)
        shutil.rmtree(out / ".prepare", ignore_errors=True)  # as in a set from the Hub
    manifest = run(request_for(folder, "reference"), out, overwrite=True, cache_dir=cache, quiet=True)
    assert (manifest["storage"], manifest["audio_example"]) == ("reference", "audio/1-0.wav")
    assert len(list((out / "data").iterdir())) == sum(len(about["shards"]) for about in manifest["splits"].values())


def test_a_folder_of_something_else_is_not_touched(folder, cache, tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=re.escape(str(tmp_path))):
            run(request_for(folder), tmp_path, overwrite=overwrite, cache_dir=cache, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_changed_recording_makes_another_set(cache, tmp_path):
    folder = make_folder(tmp_path / "ESC", clips=12)
    run(request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)
    size = (folder / "audio" / "1-0.wav").stat().st_size
    soundfile.write(folder / "audio" / "1-0.wav", sound(99), 22_050)
    assert (folder / "audio" / "1-0.wav").stat().st_size == size
    with pytest.raises(FileExistsError, match=r"\bout\b.*different recordings;"):
        run(request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)


@pytest.mark.parametrize(
    ("data_dir", "paths", "root"),
    [
        (None, ["/a/b/1.wav", "/a/c/2.wav"], "/a"),
        (None, ["/a/b/1.wav", "s3://bucket/2.wav"], "/a/b"),
        ("/a", ["/a/b/1.wav", "/a/b/2.wav"], "/a"),
        ("/a/b", ["/a/b/1.wav", "/a/c/2.wav"], "/a"),
        ("~/b", ["/a/b/c/1.wav"], "/a/b"),
        ("etc", ["/usr/etc/x/1.wav"], "/usr/etc"),
        ("/a", ["s3://bucket/2.wav", "1.wav"], None),
        (None, [], None),
    ],
)
def test_paths_begin_at_the_folder_of_the_recordings(monkeypatch, data_dir, paths, root):
    monkeypatch.setenv("HOME", "/a")
    monkeypatch.chdir("/usr")
    options = {} if data_dir is None else {"data_dir": data_dir}
    splits = {"train": {"audio_path": paths[1:]}, "test": {"audio_path": paths[:1]}}
    assert prepare.audio_root(Request("esc50", options), splits) == root


def test_equal_options_and_rows_are_one_set_and_other_splits_another(cache, tmp_path, monkeypatch):
    lines = ["name,text,split", "a.wav,rain,train", "b.wav,wind,test", "c.wav,hail,test"]
    for place in ("here", "there"):
        (tmp_path / place / "data").mkdir(parents=True)
        for number, name in enumerate("abc"):
            soundfile.write(tmp_path / place / "data" / f"{name}.wav", sound(number), 22_050)
        (tmp_path / place / "data" / "metadata.csv").write_text("\n".join(lines))
    columns = {"file_name": "name", "caption": "text"}
    for place, order in (("here", 1), ("there", -1)):  # another order of the keys, and the same relative folder
        monkeypatch.chdir(tmp_path / place)
        options = {"data_dir": "data", "columns": dict(list(columns.items())[::order])}
        write_shard(Request("audio_folder", options, "int16"), tmp_path / "out", Shard(0, 1), cache_dir=cache)
    metadata = tmp_path / "there" / "data" / "metadata.csv"
    metadata.write_text("\n".join(lines).replace("test", "validation"))
    with pytest.raises(FileExistsError, match="with different rows;"):
        write_shard(Request("audio_folder", options, "int16"), tmp_path / "out", Shard(0, 1), cache_dir=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "mp3"}, r"storage is 'mp3'; expected one of original, .*reference$"),
        ({"on_bad_audio": "stop"}, r"on_bad_audio is 'stop'; expected one of error, skip, report"),
        ({"shard_bytes": 0}, r"shard_bytes is 0; expected at least 1"),
    ],
)
def test_invalid_requests_are_refused_before_the_rows_are_read(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(Request("esc50", {"data_dir": str(tmp_path / "none")}, **options), tmp_path / "out")
    assert not (tmp_path / "out" / ".prepare").exists()


def test_a_shard_may_have_one_byte(cache, tmp_path):
    folder = make_folder(tmp_path / "ESC", clips=8)
    request = replace(request_for(folder), shard_bytes=1)
    manifest = run(request, tmp_path / "out", cache_dir=cache, quiet=True)
    assert {name: [shard["rows"] for shard in about["shards"]] for name, about in manifest["splits"].items()} == {
        "train": [1] * 3, "validation": [1] * 3, "test": [1] * 2
    }  # fmt: skip


def test_error_stops_at_the_first(folder, cache, tmp_path):
    request = Request("esc50", request_for(folder).options, "int16", on_bad_audio="error")
    with pytest.raises(BadAudioError, match=r"'2-5'.*audio/2-5\.wav"):
        run(request, tmp_path / "out", cache_dir=cache, quiet=True)


def damaged_flac(path, total_samples=None, zeros=0):
    """Write a second of noise as FLAC, with a wrong number of samples in its header, or zeros as its first frame."""
    encoded = io.BytesIO()
    soundfile.write(encoded, sound(1)[:16_000], 16_000, format="FLAC")
    content = bytearray(encoded.getvalue())
    if total_samples is not None:  # the last 36 bits of eight bytes, after rate, channels and bit depth
        fields = int.from_bytes(content[18:26], "big")
        content[18:26] = (fields >> 36 << 36 | total_samples).to_bytes(8, "big")

    first_frame, last = 4, False
    while not last:  # the metadata blocks: flag of the last block, type, length
        last = bool(content[first_frame] & 0x80)
        first_frame += 4 + int.from_bytes(content[first_frame + 1 : first_frame + 4], "big")
    content[first_frame : first_frame + zeros] = bytes(zeros)
    path.write_bytes(content)


def test_odd_recordings_are_read_whole_or_listed_by_name(tmp_path, cache):
    folder = tmp_path / "sounds"
    folder.mkdir()
    damaged_flac(folder / "first_frame.flac", zeros=600)
    damaged_flac(folder / "declares.flac", total_samples=2**36 - 1)
    damaged_flac(folder / "piped.flac", total_samples=0)  # the writer did not know the length
    soundfile.write(folder / "gsm.wav", sound(2)[:8000], 8000, subtype="GSM610")
    soundfile.write(folder / "short.wav", sound(3)[:1600], 16_000)
    names = sorted(path.name for path in folder.iterdir())
    lines = ["file_name,caption", *(f"{name},the sound of {name}" for name in names)]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")

    options = {"data_dir": str(folder), "validation_fraction": 0, "test_fraction": 0}
    manifest = run(Request("audio_folder", options, "int16"), tmp_path / "set", cache_dir=cache, quiet=True)
    bad = {note["clip_id"]: note["reason"] for note in manifest["bad_audio"]["train"]}
    assert sorted(bad) == ["declares.flac", "first_frame.flac"]
    assert all(reason.startswith(name) for name, reason in bad.items())

    rows = load_splits("prepared", data_dir=str(tmp_path / "set"))["train"]
    seconds = {row["clip_id"]: len(row["samples"]) / 2 / row["sampling_rate_hz"] for row in rows}
    assert seconds == pytest.approx({"gsm.wav": 1.0, "piped.flac": 13_230 / 16_000, "short.wav": 0.1}, abs=0.05)


def test_a_prepared_set_contains_no_local_paths(folder, cache, tmp_path):
    for storage in ("int16", "reference"):
        run(request_for(folder, storage), tmp_path / storage, cache_dir=cache, quiet=True)
        for name in ("manifest.json", "README.md"):
            text = (tmp_path / storage / name).read_text(encoding="utf-8")
            assert not re.search(rf"{folder.parent}|{tmp_path}|{tmp_path.name}", text)
        manifest = json.loads((tmp_path / storage / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["options"]["data_dir"] == "ESC"


def test_a_split_of_bad_recordings_is_refused(cache, tmp_path):
    folder = make_folder(tmp_path / "ESC", clips=12)
    for path in (folder / "audio").glob("4-*"):
        soundfile.write(path, np.zeros(1000), 22_050)
    with pytest.raises(ValueError, match=r"^all 3 recordings of 'test' are bad; the first: audio/4-3\.wav "):
        run(request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)


def test_a_prepared_set_can_be_prepared_in_another_way(folder, cache, tmp_path):
    run(request_for(folder, "original"), tmp_path / "original", cache_dir=cache, quiet=True)
    again = Request("prepared", {"data_dir": str(tmp_path / "original")}, "int16", SHARD_BYTES)
    manifest = run(again, tmp_path / "int16", cache_dir=cache, quiet=True)
    assert manifest["dataset"] == "esc50"
    assert sorted(manifest["left_out"]["bad audio"]) == ["2-5", "2-9", "3-14"]
    (row,) = load_splits("prepared", cache, data_dir=str(tmp_path / "int16"))["test"].select([0])
    expected = read_row({"audio_path": folder / row["audio_path"]}, 16_000, resampling_method="sinc_interp_hann")
    np.testing.assert_allclose(np.frombuffer(row["samples"], "<i2") / 32768, expected, atol=0.501 / 32768)


def write_all(folder, cache, out, order, count):
    for number in order:
        write_shard(request_for(folder), out, Shard(number, count), cache_dir=cache, quiet=True)
    return finish(request_for(folder), out, cache)


class TestMachines:
    """Shards of many machines: joined, they are the dataset that one run writes."""

    @pytest.mark.parametrize("count", [1, 3, 30])  # 30: more than the 24 rows, and shards with only a bad recording
    def test_shards_in_any_order_are_the_whole_set(self, whole, folder, cache, tmp_path, count):
        order = [*range(1, count), 0, count - 1]  # the last one twice
        joined = write_all(folder, cache, tmp_path / "out", order, count)
        assert json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8")) == joined
        for split, about in joined["splits"].items():
            rows = [shard["rows"] for shard in about.pop("shards")]
            expected = dict(whole[1]["splits"][split])
            assert sum(rows) == sum(shard["rows"] for shard in expected.pop("shards"))
            assert about == expected
        assert {**joined, "splits": None} == {**whole[1], "splits": None}  # also the hash of all recordings
        if count == 1:
            assert {name: value for name, value in files_of(tmp_path / "out").items() if "data/" in name} == {
                name: value for name, value in files_of(whole[0]).items() if "data/" in name
            }

        expected, found = (load_splits("prepared", cache, data_dir=str(out)) for out in (whole[0], tmp_path / "out"))
        for split, rows in expected.items():
            assert found[split].to_list() == rows.to_list()

    @pytest.mark.process
    def test_a_killed_machine_loses_nothing_and_writes_nothing_twice(self, folder, cache, tmp_path):
        write_all(folder, cache, tmp_path / "expected", (0, 1), 2)
        out = tmp_path / "out"
        words = command_for(folder, out, cache)
        killed = Moment("os.rename", "*/00000-of-00002/*.json", 3)  # the plan, and two finished files
        run_killed(prepare.__file__, *words, "--workers", "2", "--shard", "0/2", moment=killed)
        run_processes(prepare.__file__, *words, "--workers", "1", "--shard", "1/2", count=1)
        with pytest.raises(ValueError, match=r"lacks 1 of 2 shards: 0/2"):
            finish(request_for(folder), out, cache)

        finished = {path: path.stat().st_mtime_ns for path in out.glob(".prepare/shards/*/*.json")}
        assert len(finished) > 3
        run_processes(prepare.__file__, *words, "--workers", "1", "--shard", "0/2", count=1)
        assert {path: path.stat().st_mtime_ns for path in finished} == finished
        moved = Moment("os.rename", "*/data/*.parquet", 2)
        run_killed(prepare.__file__, *words, "--finish", moment=moved)
        finish(request_for(folder), out, cache)
        assert files_of(out) == files_of(tmp_path / "expected")

    def test_nothing_is_read_or_written_again(self, folder, cache, tmp_path, monkeypatch):
        out = tmp_path / "out"
        manifest = write_all(folder, cache, out, (0, 1), 2)
        files = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
        monkeypatch.setattr(shard_writer, "pack", None)
        lock = Mock(wraps=prepare.folder_lock)
        monkeypatch.setattr(prepare, "folder_lock", lock)
        assert write_all(folder, cache, out, (1, 0), 2) == manifest
        # another machine may have the lock for a moment
        assert [call.kwargs for call in lock.call_args_list] == [{"wait_seconds": 60}] * 3
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == files

    def test_two_machines_do_not_write_one_shard(self, folder, cache, tmp_path):
        def write(number):
            write_shard(request_for(folder), tmp_path / "out", Shard(number, 2), cache_dir=cache, quiet=True)

        write(0)
        with Shard(1, 2).lock(tmp_path / "out" / ".prepare"), ThreadPoolExecutor() as another:
            with pytest.raises(InUseError, match="00001-of-00002"):
                another.submit(write, 1).result()
            another.submit(write, 0).result()

    @pytest.mark.parametrize(
        ("changed", "name"),
        [
            ({"storage": "flac16k"}, "storage"),
            ({"shard_bytes": 10**6}, "shard_bytes"),
            ({"on_bad_audio": "error"}, "on_bad_audio"),
            ({"options": {"test_fold": 3}}, r"options\.test_fold"),
            ({"options": {"languages": ["eng"]}}, r"options\.languages.*rows"),
        ],
    )
    def test_another_option_is_refused_by_name(self, folder, cache, tmp_path, changed, name):
        request = request_for(folder)
        write_shard(request, tmp_path / "out", Shard(0, 2), cache_dir=cache, quiet=True)
        before = files_of(tmp_path)
        options = {**request.options, **changed.pop("options", {})}
        other = replace(request, options=options, **changed)
        with pytest.raises(FileExistsError, match=rf"\bout\b.*different .*{name}"):
            write_shard(other, tmp_path / "out", Shard(1, 2), cache_dir=cache, quiet=True)
        with pytest.raises(FileExistsError, match=rf"\bout\b.*different .*{name}"):
            finish(other, tmp_path / "out", cache)
        assert files_of(tmp_path) == before

    def test_another_dataset_or_number_of_shards_is_refused_by_name(self, cache, tmp_path):
        folder, out = make_folder(tmp_path / "ESC", clips=12), tmp_path / "out"
        write_shard(request_for(folder), out, Shard(0, 2), cache_dir=cache, quiet=True)
        with pytest.raises(FileExistsError, match="shards"):
            write_shard(request_for(folder), out, Shard(1, 3), cache_dir=cache, quiet=True)
        with pytest.raises(FileExistsError, match="shards 2"):
            run(request_for(folder), out, cache_dir=cache, quiet=True)
        samples, rate_hz = soundfile.read(folder / "audio" / "1-0.wav")
        soundfile.write(folder / "audio" / "1-0.wav", samples, rate_hz, subtype="PCM_24")  # another size
        with pytest.raises(FileExistsError, match="different recordings"):
            write_all(folder, cache, out, (0, 1), 2)
        make_folder(folder, clips=16)
        with pytest.raises(FileExistsError, match="different rows"):
            write_shard(request_for(folder), out, Shard(0, 2), cache_dir=cache, quiet=True)

    def test_copies_of_the_recordings_may_have_other_times(self, cache, tmp_path):
        folder, out = make_folder(tmp_path / "ESC", clips=12), tmp_path / "out"
        write_shard(request_for(folder), out, Shard(0, 1), cache_dir=cache, quiet=True)
        for path in (folder / "audio").iterdir():
            os.utime(path, (0, 0))
        write_shard(request_for(folder), out, Shard(0, 1), cache_dir=cache, quiet=True)
        assert finish(request_for(folder), out, cache)["source_files"]["audio"]["files"] == 12

    def test_shards_are_not_mixed_with_the_set_of_one_run_or_other_files(self, whole, folder, cache, tmp_path):
        before = files_of(whole[0])
        with pytest.raises(FileExistsError, match="recordings, shards"):
            write_shard(request_for(folder), whole[0], Shard(0, 2), cache_dir=cache, quiet=True)
        for out in (whole[0], tmp_path / "none"):
            with pytest.raises(FileNotFoundError, match="no shards"):
                finish(request_for(folder), out, cache)
        assert files_of(whole[0]) == before
        (tmp_path / "thesis.tex").write_text("chapter 1")
        with pytest.raises(FileExistsError, match="not a prepared set"):
            write_shard(request_for(folder), tmp_path, Shard(0, 2), cache_dir=cache, quiet=True)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_lost_file_is_named(self, folder, cache, tmp_path):
        write_shard(request_for(folder), tmp_path / "out", Shard(0, 1), cache_dir=cache, quiet=True)
        lost = next((tmp_path / "out").rglob("train-00001.parquet"))
        lost.unlink()
        with pytest.raises(FileNotFoundError, match="train-00001"):
            finish(request_for(folder), tmp_path / "out", cache)
        assert not (tmp_path / "out" / "manifest.json").exists()

    def test_folders_of_machines_without_a_shared_disk_are_copied_together(self, whole, folder, cache, tmp_path):
        for number in range(2):
            out = tmp_path / f"machine{number}"
            write_shard(request_for(folder), out, Shard(number, 2), cache_dir=cache, quiet=True)
            shutil.copytree(out, tmp_path / "out", dirs_exist_ok=True)
        manifest = finish(request_for(folder), tmp_path / "out", cache)
        assert manifest["source_files"] == whole[1]["source_files"]

    def test_entries_of_a_range_are_those_of_the_whole_split(self, folder, cache):
        rows = load_splits("esc50", cache, **request_for(folder).options)["train"]
        entries = list(make_entries(rows, "int16", str(folder)))
        assert [entry.note["audio_path"] for entry in entries] == [
            f"audio/{clip_id}.wav" for clip_id in rows["clip_id"]
        ]
        assert entries[0].row.keys() == {*rows.column_names, "samples", "sampling_rate_hz"}
        parts = [rows.select(range(4, len(rows))), rows.select(range(4))]
        assert [entry for part in parts for entry in make_entries(part, "int16", str(folder))] == [
            *entries[4:],
            *entries[:4],
        ]
        assert pickle.loads(pickle.dumps(entries)) == entries  # an engine sends them between processes


class TestCommandLine:
    def words(self, folder, out, cache, *more):
        return ["esc50", "--data_dir", str(folder), "--out", str(out), "--cache_dir", cache, "--quiet", *more]

    def test_a_run_ends_with_a_table(self, folder, cache, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # there, a bar would be shown
        options = ["--test_fold", "4", "--languages", "eng", "fra", "--on_bad_audio", "report", "--storage", "int16"]
        options += ["--workers", "1"]
        main(self.words(folder, tmp_path / "out", cache, *options))
        out, err = capsys.readouterr()
        assert re.search(r"^test\s+6\s+0\.00\s+48\s+0\s+eng fra$", out, re.MULTILINE)
        assert re.findall("^clip '(.*?)'", err, re.MULTILINE) == ["2-5", "2-9", "3-14"]
        assert len(err.splitlines()) == 3

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nonsense", "--out", "x"], "invalid choice: 'nonsense' (choose from"),
            ([], "the following arguments are required: DATASET"),
            (["esc50", "--out", "x", "--test_fld=4"], "unrecognized arguments: --test_fld=4"),
            (["esc50", "--out", "x", "--test_fol=4"], "unrecognized arguments: --test_fol=4"),
            (["synthetic", "--out", "x", "--data_dir", "d"], "unrecognized arguments: --data_dir d"),
            (["esc50"], "--out is required"),
            (["esc50", "--out", "x", "--shard_size", "big"], "value: 'big'"),
            (["esc50", "--out", "x", "--shard", "0/2", "--finish"], "--finish"),
            (["esc50", "--out", "x", "--shard", "0/2", "--overwrite"], "--overwrite is not for a shard"),
            (["esc50", "--out", "x", "--shard", "0/2", "--push_to_hub", "a/b"], "--push_to_hub is not for a shard"),
            (["esc50", "--out", "x", "--finish", "--overwrite"], "--finish does not write the shards"),
        ],
    )
    def test_invalid_arguments_print_one_line(self, words, message, capsys):
        with pytest.raises(SystemExit) as exit:
            main(words)
        assert exit.value.code == 2
        assert message in capsys.readouterr().err

    def test_invalid_data_print_one_line(self, tmp_path, cache, capsys, monkeypatch):
        monkeypatch.delenv("SUPCLAP_COMMAND", raising=False)
        words = self.words(tmp_path / "nowhere", tmp_path / "out", cache)
        monkeypatch.setattr(sys, "argv", ["supclap prepare", *words])
        with pytest.raises(SystemExit, match="1"):
            run_command(main)
        err = capsys.readouterr().err
        assert re.fullmatch(r"supclap prepare: error: .*nowhere.*\n", err)

    def test_shards_and_finish(self, folder, cache, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        words = self.words(
            folder, tmp_path / "out", str(tmp_path / "rows"), "--workers", "1", "--storage", "reference"
        )
        for number in (1, 0):
            main([*words, "--shard", f"{number}/2"])
        out, err = capsys.readouterr()
        assert [line.partition(" is complete;")[0] for line in out.splitlines()] == [
            f"shard {number}/2 of {tmp_path / 'out'}" for number in (1, 0)
        ]
        assert err == ""
        with pytest.raises(ValueError, match="2/2"):
            main([*words, "--shard", "2/2"])
        for finished in (["--finish"], ["--finish", "true"]):
            main([*words, *finished])
            assert re.search(r"^train\s+13\s", capsys.readouterr().out, re.MULTILINE)
        assert any((tmp_path / "rows").iterdir())
        rows = load_splits("prepared", cache, data_dir=str(tmp_path / "out"))["train"]
        assert read_row(rows[0], 16_000).any()

    def test_help_lists_the_options_of_the_builder(self, capsys):
        with pytest.raises(SystemExit):
            main(["esc50", "--help"])
        out = capsys.readouterr().out
        assert "--test_fold" in out
        assert "--storage" in out
        assert "\n    supclap prepare esc50 --help " in out  # an example has its own line


class DatasetHub(FakeHub):
    """Fake Hub for dataset repositories, which also serves byte ranges."""

    def _as_models(self):
        self.path = self.path.replace("/api/datasets/", "/api/models/")
        if self.path.startswith("/datasets/"):
            self.path = self.path.removeprefix("/datasets")

    def do_POST(self):
        self._as_models()
        super().do_POST()

    def do_GET(self):
        self._as_models()
        path = self.path.split("?")[0]
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        file = re.fullmatch(r"/(.+)/resolve/[^/]+/(.+)", path)
        listing = re.fullmatch(r"/api/models/(.+)/tree/[^/]+/(.+)", path)
        if part and file:
            self.answer(self.files[file[1]][file[2]][int(part[1]) : int(part[2]) + 1], 206)
        elif listing:
            sizes = {name: len(content) for name, content in self.files[listing[1]].items()}
            inside = [name for name in sizes if name.startswith(listing[2] + "/")]
            self.answer([{"type": "file", "path": name, "size": sizes[name], "oid": COMMIT} for name in inside])
        else:
            super().do_GET()

    do_HEAD = do_GET


@pytest.mark.slow
@pytest.mark.process
def test_the_script_pushes_and_the_hub_gives_it_back(folder, cache, tmp_path):
    script = """if True:
        import runpy, sys
        path, out, cache, folder = sys.argv[1:]
        sys.argv = [path, "esc50", "--data_dir", folder, "--test_fold", "4", "--out", out, "--cache_dir", cache]
        sys.argv += ["--quiet", "--storage", "int16", "--workers", "2", "--push_to_hub", "somebody/sounds"]
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as exit:
            assert exit.code == 0, exit.code
        from modeling_supclap.datasets_scripts import load_splits
        here = load_splits("prepared", cache, data_dir=out)
        there = load_splits("prepared", cache, data_dir="somebody/sounds")
        assert {name: rows.to_list() for name, rows in here.items()} == {k: v.to_list() for k, v in there.items()}
        streamed = load_splits("prepared", data_dir="somebody/sounds", streaming=True)["test"]
        assert [{**row, "clip_index": place} for place, row in enumerate(here["test"])] == list(streamed)
        try:
            load_splits("prepared", cache, data_dir="somebody/else")
        except FileNotFoundError as error:
            print(error)
    """
    with fake_hub(DatasetHub) as address:
        hub = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
        words = [prepare.__file__, tmp_path / "out", cache, folder]
        printed = run_python("-c", script, *words, HF_HOME=str(tmp_path / "home"), **hub)
        names = set(FakeHub.files["somebody/sounds"])
    assert "somebody/sounds" in printed
    assert "somebody/else" in printed
    assert names == set(files_of(tmp_path / "out"))


@pytest.mark.parametrize("private", [False, True])
def test_a_set_is_uploaded_in_one_commit_that_replaces_its_shards(
    whole, folder, cache, monkeypatch, capsys, tmp_path, private
):
    api = create_autospec(HfApi, instance=True)
    api.create_repo.return_value = "https://hub/datasets/somebody/sounds"
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    words = [*command_for(folder, whole[0], cache), "--push_to_hub", "somebody/sounds"]
    main([*words, "--private"] if private else words)
    assert capsys.readouterr().out.endswith("\nuploaded to https://hub/datasets/somebody/sounds\n")
    api.create_repo.assert_called_once_with("somebody/sounds", repo_type="dataset", private=private, exist_ok=True)
    (upload,) = api.upload_folder.call_args_list
    assert (upload.kwargs["repo_id"], upload.kwargs["repo_type"]) == ("somebody/sounds", "dataset")
    assert Path(upload.kwargs["folder_path"]) == whole[0]
    assert upload.kwargs["commit_message"] == "Upload a prepared set"
    files = [path.relative_to(whole[0]).as_posix() for path in whole[0].rglob("*") if path.is_file()]
    assert len(files) > len(files_of(whole[0]))
    names = set(filter_repo_objects(files, allow_patterns=upload.kwargs["allow_patterns"]))
    assert names == files_of(whole[0]).keys()
    deleted = set(filter_repo_objects(files, allow_patterns=upload.kwargs["delete_patterns"]))
    assert deleted == {name for name in names if name.startswith("data/")}


def test_a_set_without_audio_is_not_pushed(folder, cache, tmp_path):
    run(request_for(folder, "reference"), tmp_path / "out", cache_dir=cache, quiet=True)
    with pytest.raises(ValueError, match="'reference'"):
        prepare.push(tmp_path / "out", "somebody/sounds")


def test_a_channel_of_parts_of_recordings_is_prepared(tmp_path):
    right = np.linspace(0.1, 0.9, 3 * 16_000)
    (tmp_path / "data").mkdir()
    soundfile.write(tmp_path / "data" / "long.wav", np.stack([np.zeros_like(right), right], axis=1), 16_000)
    (tmp_path / "data" / "metadata.csv").write_text(
        "file_name,caption,start_seconds,end_seconds\nlong.wav,a,0,1\nlong.wav,b,1,3\n"
    )
    options = {"data_dir": str(tmp_path / "data"), "languages": ["eng"], "validation_fraction": 0, "test_fraction": 0}
    for storage in ("int16", "flac16k", "reference"):
        request = Request("audio_folder", {**options, "channel": 1}, storage)
        run(request, tmp_path / storage, cache_dir=str(tmp_path / "cache"), quiet=True)
        rows = load_splits("prepared", str(tmp_path / "cache"), data_dir=str(tmp_path / storage))["train"]
        for row, start, end in zip(rows, (0, 16_000), (16_000, 48_000), strict=True):
            np.testing.assert_allclose(read_row(row, 16_000), right[start:end], atol=1e-4)
    (tmp_path / "data" / "metadata.csv").write_text("file_name,caption,start_seconds,end_seconds\nlong.wav,a,,\n")
    request = Request("audio_folder", {**options, "channel": 1})
    run(request, tmp_path / "original", cache_dir=str(tmp_path / "cache"), quiet=True)
    rows = load_splits("prepared", str(tmp_path / "cache"), data_dir=str(tmp_path / "original"))["train"]
    np.testing.assert_allclose(read_row(rows[0], 16_000), right, atol=1e-4)
    request = Request("audio_folder", {**options, "channel": 2}, "int16", on_bad_audio="skip")
    with pytest.raises(ValueError, match=r"no channel 2|no clips|unusable"):
        run(request, tmp_path / "none", cache_dir=str(tmp_path / "cache"), quiet=True)


def test_parts_of_recordings_are_prepared_as_clips(tmp_path):
    ramp = np.linspace(0.1, 0.9, 3 * 16_000)
    (tmp_path / "data").mkdir()
    soundfile.write(tmp_path / "data" / "long.wav", ramp, 16_000)
    soundfile.write(tmp_path / "data" / "a.wav", ramp[::-1], 16_000)
    table = "file_name,caption,start_seconds,end_seconds\nlong.wav,a,0,1\nlong.wav,b,1,3\na.wav,c,,\n"
    (tmp_path / "data" / "metadata.csv").write_text(table)
    options = {"data_dir": str(tmp_path / "data"), "languages": ["eng"], "validation_fraction": 0, "test_fraction": 0}
    with pytest.raises(ValueError, match=r"'original'.*int16"):
        run(Request("audio_folder", options), tmp_path / "none", cache_dir=str(tmp_path / "cache"), quiet=True)
    for storage in ("int16", "flac16k", "reference"):
        out = tmp_path / storage
        manifest = run(Request("audio_folder", options, storage), out, cache_dir=str(tmp_path / "cache"), quiet=True)
        assert manifest["splits"]["train"]["seconds"] == 6
        rows = load_splits("prepared", str(tmp_path / "cache"), data_dir=str(out))["train"]
        clips = {row["captions"]["eng"][0]: read_row(row, 16_000) for row in rows}
        for caption, expected in (("a", ramp[:16_000]), ("b", ramp[16_000:]), ("c", ramp[::-1])):
            np.testing.assert_allclose(clips[caption], expected, atol=1e-4)
