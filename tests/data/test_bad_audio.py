"""Bad recordings are found before a run, reproducibly, and removed from the rows."""

import hashlib
import io
import logging
import os
import re
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import soundfile
import torch
from crash_callbacks import assert_workers_end_with_their_parent, name_worker
from datasets import Dataset
from memory import traced_peak
from recordings import tone_rows

from modeling_supclap.datasets_scripts import audio, bad_audio, decoders
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError, read_recording
from modeling_supclap.datasets_scripts.bad_audio import (
    check_recording,
    filter_bad_audio,
    find_bad_audio,
    map_in_order,
    measure_content,
    source_of,
)
from modeling_supclap.datasets_scripts.prepare import pack
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.rows import filter_bad_audio as rows_of_a_run
from modeling_supclap.training.training_args import SupCLAPTrainingArguments


@pytest.fixture
def rows(tmp_path):
    """Eight clips; the second is not audio, the fourth is silent and the seventh is missing."""
    rows = tone_rows(tmp_path, 8)
    (tmp_path / "tone_1.wav").write_bytes(b"junk")
    soundfile.write(tmp_path / "tone_3.wav", [0.0] * 800, 16_000)
    (tmp_path / "tone_6.wav").unlink()
    return rows


GOOD = ["clip0", "clip2", "clip4", "clip5", "clip7"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.process)])
def test_all_bad_clips_are_found_in_order(rows, workers):
    bad = find_bad_audio(rows, workers)
    assert [(clip.row, clip.clip_id) for clip in bad] == [(1, "clip1"), (3, "clip3"), (6, "clip6")]
    assert all(clip.reason.startswith(f"tone_{clip.row}.wav ") for clip in (bad[0], bad[1]))  # without its folder
    assert bad[1].reason == "tone_3.wav is silent: every sample is zero"
    assert bad[2].reason == "FileNotFoundError: there is no audio file tone_6.wav"


@pytest.mark.parametrize("make", [list, Dataset.from_list], ids=["list", "dataset"])
@pytest.mark.parametrize(("policy", "named"), [("skip", 0), ("report", 3)])
def test_bad_clips_leave_the_rows(rows, make, policy, named, caplog):
    with caplog.at_level(logging.WARNING, "modeling_supclap.datasets_scripts.bad_audio"):
        kept = filter_bad_audio(make(rows), policy)
    assert [row["clip_id"] for row in kept] == GOOD
    reports = [f"clip {clip.clip_id!r}: {clip.reason}" for clip in find_bad_audio(rows)]
    assert caplog.messages == ["left out 3 of 8 clips with bad recordings", *reports[:named]]


@pytest.mark.parametrize("memo", [None, "memo.json"])
def test_clips_that_are_too_short_for_the_model_are_bad(tmp_path, memo):
    rows = tone_rows(tmp_path, 3)
    soundfile.write(tmp_path / "tone_1.wav", [0.1, -0.1] * 800, 16_000)
    options = {"memo": memo and str(tmp_path / memo)}
    assert len(filter_bad_audio(rows, "skip", **options)) == 3
    assert filter_bad_audio(rows, "skip", min_seconds=0.1, **options) == rows
    kept = filter_bad_audio(rows, "skip", min_seconds=0.15, **options)
    assert [row["clip_id"] for row in kept] == ["clip0", "clip2"]
    assert re.search(r"0\.1000 s.*0\.15 s", find_bad_audio(rows, min_seconds=0.15)[0].reason)


def test_error_reads_nothing(rows):
    assert filter_bad_audio(rows, "error") is rows


def test_an_unknown_policy_names_the_known(rows):
    with pytest.raises(ValueError, match=r"on_bad_audio.*'ignore'"):
        filter_bad_audio(rows, "ignore")


def test_no_row_left_is_an_error(rows):
    with pytest.raises(BadAudioError, match=r"tone_1\.wav"):
        filter_bad_audio([rows[1], rows[3]], "skip")


def test_with_a_memo_only_changed_recordings_are_read_again(rows, tmp_path, monkeypatch):
    looked_at = []
    check = bad_audio.check_recording
    monkeypatch.setattr(
        bad_audio, "check_recording", lambda source, name, *rest: looked_at.append(name) or check(source, name, *rest)
    )
    memo = tmp_path / "runs" / "out" / "bad_audio.json"
    kept = filter_bad_audio(rows, "skip", memo=memo)
    assert len(looked_at) == 8
    assert filter_bad_audio(kept, "skip", memo=memo) == kept  # the filtered split is already in the memo
    assert len(looked_at) == 8
    soundfile.write(tmp_path / "tone_1.wav", [0.1, -0.1] * 400, 16_000)
    assert [row["clip_id"] for row in filter_bad_audio(rows, "skip", memo=memo)] == ["clip0", "clip1", *GOOD[1:]]
    assert looked_at[8:] == [rows[1]["audio_path"]]


@pytest.mark.parametrize(("size", "later_ns"), [(None, 10**9), (100, 0)])
def test_a_repaired_recording_of_the_same_size_or_time_is_read_again(tmp_path, size, later_ns):
    rows = tone_rows(tmp_path, 2)
    path, memo = tmp_path / "tone_1.wav", tmp_path / "memo.json"
    good = path.read_bytes()
    path.write_bytes(b"junk".ljust(size or len(good)))
    assert len(filter_bad_audio(rows, "skip", memo=memo)) == 1
    modified_ns = path.stat().st_mtime_ns
    path.write_bytes(good)
    os.utime(path, ns=(modified_ns + later_ns, modified_ns + later_ns))
    assert len(filter_bad_audio(rows, "skip", memo=memo)) == 2
    stored = [{**row, "audio": {"bytes": good, "path": None}} for row in rows]
    assert len(filter_bad_audio(stored, "skip", memo=memo)) == 2
    stored[1]["audio"]["bytes"] = b"junk"
    assert filter_bad_audio(stored, "skip", memo=memo) == stored[:1]


def test_of_stored_samples_only_the_length_is_checked(tmp_path):
    rows = []
    for name, samples in (("short", b"xx"), ("long", bytes(32_000)), ("file", None)):
        audio = {"samples": samples, "sampling_rate_hz": samples and 16_000}
        rows.append({"clip_id": name, "audio_path": tone_rows(tmp_path, 1)[0]["audio_path"], **audio})
    for stored in (rows, Dataset.from_list(rows[::-1]).select([2, 1, 0])):
        assert find_bad_audio(stored) == []
        assert filter_bad_audio(stored, "skip") is stored
        for min_seconds in (0.15, 0.5, 1.0):  # the others last 0.5 and 1 s
            bad = find_bad_audio(stored, min_seconds=min_seconds)
            assert [clip[:2] for clip in bad] == [(0, "short"), (2, "file")][: 1 + (min_seconds > 0.5)]
        assert find_bad_audio(stored, min_seconds=1.0)[0].reason == (
            f"{rows[0]['audio_path']} lasts 0.0001 s; the model requires at least 1.0 s"
        )


def test_a_run_trains_on_the_rest(rows, tmp_path, processor):
    arguments = SupCLAPTrainingArguments(output_dir=str(tmp_path / "out"), on_bad_audio="report", report_to="none")
    kept = IndexedRows(rows_of_a_run(rows, arguments))
    assert (tmp_path / "out" / "bad_audio.json").is_file()
    batch = TrainingCollator(processor)([kept[place] for place in range(len(kept))])
    assert batch["clip_index"].tolist() == [0, 1, 2, 3, 4]


def test_the_argument_is_checked(tmp_path):
    with pytest.raises(ValueError, match=r"on_bad_audio.*'ignore'"):
        SupCLAPTrainingArguments(output_dir=str(tmp_path), on_bad_audio="ignore", report_to="none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "audio/bad.wav is empty: 0 bytes"),
        (b"no audio at all", "audio/bad.wav (15 bytes) is not audio, but a text: b'no audio at all'"),
        (
            bytes(200),
            "audio/bad.wav (200 bytes) is not audio that can be decoded by libsndfile (Format not recognised.) or "
            "FFmpeg (Invalid data found when processing input)",
        ),
        (None, "FileNotFoundError: there is no audio file audio/bad.wav"),
        (np.zeros(100), "audio/bad.wav is silent: every sample is zero"),
    ],
    ids=["empty", "text", "junk", "missing", "silent"],
)
def test_errors_for_unusable_recordings_name_the_reason(tmp_path, content, message):
    path = tmp_path / "bad.wav"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        soundfile.write(path, content, 8000)
    with pytest.raises(BadAudioError, match=f"^{re.escape(message)}") as error:
        read_recording(str(path), "audio/bad.wav", 16_000)
    assert str(tmp_path) not in str(error.value)


def of_rate(rate_hz):
    """Return a second of noise with another sampling rate in the header."""
    file = io.BytesIO()
    soundfile.write(file, 0.1 * np.random.default_rng(0).standard_normal(16_000), 16_000, format="WAV")
    content = bytearray(file.getvalue())
    content[24:28] = rate_hz.to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize("rate_hz", [1, 199, 2**31 - 1])
def test_an_impossible_rate_is_rejected(rate_hz):
    with pytest.raises(BadAudioError, match=rf"a\.wav.*{rate_hz} Hz"):
        read_recording(of_rate(rate_hz), "a.wav", 16_000)
    with pytest.raises(BadAudioError, match=f"{rate_hz} Hz"):
        audio.resample(np.ones(100, dtype=np.float32), rate_hz, 16_000)
    with pytest.raises(BadAudioError, match=rf"b\.wav \(clip 'b'\) .*{rate_hz} Hz"):
        audio.read_row({"clip_id": "b", "audio_path": "b.wav", "samples": b"aa", "sampling_rate_hz": rate_hz}, 16_000)


def test_floats_in_the_scale_of_integers_are_bad_audio(tmp_path):
    path = tmp_path / "loud.wav"
    soundfile.write(path, 32767 * np.sin(np.arange(800.0)), 8000, subtype="FLOAT")
    rows = [{"clip_id": "loud", "audio_path": str(path)}]
    (bad,) = find_bad_audio(rows)
    assert re.search(r"loud\.wav .*3276", bad.reason)
    with pytest.raises(BadAudioError, match=r"loud\.wav .*3276"):
        pack(str(path), "loud.wav", "int16")
    with pytest.raises(BadAudioError, match=r"loud\.wav \(clip 'loud'\) .*3276"):
        audio.read_row(rows[0], 16_000)
    soundfile.write(
        path, 2.0 * np.sin(np.arange(800.0)), 8000, subtype="FLOAT"
    )  # above full scale, but not in integer scale
    assert find_bad_audio(rows) == []


def test_a_long_recording_is_checked_in_parts(tmp_path):
    path = tmp_path / "long.wav"
    with soundfile.SoundFile(path, "w", 44_100, 1) as file:
        minute = (0.1 * np.random.default_rng(0).standard_normal(60 * 44_100)).astype(np.float32)
        for _ in range(20):
            file.write(minute)

    rows = [{"clip_id": "long", "audio_path": str(path)}]
    assert traced_peak(find_bad_audio, rows) < 70e6  # the waveform has 212 MB, the file 106 MB


@pytest.mark.parametrize(("storage", "copies"), [("reference", 0), ("int16", 2), ("original", 1)])
def test_packing_a_long_recording_needs_little_more_than_its_stored_size(tmp_path, monkeypatch, storage, copies):
    monkeypatch.setattr(decoders, "_BLOCK_FRAMES", 2**19)
    path, stored_bytes = tmp_path / "long.wav", {"int16": 19.2e6, "original": 52.9e6, "reference": 0}[storage]
    with soundfile.SoundFile(path, "w", 44_100, 1) as file:
        minute = (0.1 * np.random.default_rng(0).standard_normal(60 * 44_100)).astype(np.float32)
        for _ in range(10):
            file.write(minute)
    # the waveform has 106 MB
    assert traced_peak(pack, str(path), "long.wav", storage) < copies * stored_bytes + 20e6


def test_a_decoder_that_fails_is_that_recordings_fault(monkeypatch):
    def fail(content, name, segment):
        raise MemoryError("Unable to allocate 256 GiB")

    monkeypatch.setattr(audio, "open_recording", fail)
    with pytest.raises(BadAudioError, match=r"^a\.flac cannot be decoded: MemoryError: Unable to allocate 256 GiB$"):
        read_recording(b"fLaC", "a.flac", 16_000)


def test_a_missing_decoder_does_not_make_a_recording_bad(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, "modeling_supclap.datasets_scripts.ffmpeg", raising=False)
    content = b"\0\0\0\x20ftypM4A " + bytes(100)
    with pytest.raises(MissingDecoderError):
        read_recording(content, "a.m4a", 16_000)
    (tmp_path / "a.m4a").write_bytes(content)
    with pytest.raises(MissingDecoderError, match=r"a\.m4a"):
        find_bad_audio([{"clip_id": "a", "audio_path": str(tmp_path / "a.m4a")}], memo=tmp_path / "memo.json")


def test_another_part_of_a_recording_is_checked_again(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.repeat([0.1, 0.0], 16_000), 16_000)
    row = {"clip_id": "a", "audio_path": str(tmp_path / "a.wav"), "start_seconds": 0.0, "end_seconds": 1.0}
    for part, is_bad in (({}, False), ({"start_seconds": 1.0, "end_seconds": 2.0}, True), ({}, False)):
        assert bool(find_bad_audio([row | part], memo=tmp_path / "memo.json")) == is_bad


def test_a_recording_too_quiet_for_16_bits_is_silent(tmp_path, monkeypatch):
    file = io.BytesIO()
    soundfile.write(file, [0.0, 0.5, -0.5], 8000, format="WAV", subtype="FLOAT")
    assert read_recording(file.getvalue(), "a.wav", 8000).tolist() == [0, 16384, -16384]
    size, digest = measure_content(file.getvalue(), "a.wav")
    assert (size, digest) == (len(file.getvalue()), hashlib.sha256(file.getvalue()).hexdigest())
    (tmp_path / "a.wav").write_bytes(file.getvalue())
    assert measure_content(str(tmp_path / "a.wav"), "a.wav") == (size, digest)
    with pytest.raises(BadAudioError, match=r"^b\.wav cannot be decoded: .*No such file"):
        measure_content(str(tmp_path / "b.wav"), "b.wav")

    file = io.BytesIO()
    soundfile.write(file, [0.0, 1e-6, 0.0, 0.0], 8000, format="WAV", subtype="FLOAT")
    monkeypatch.setattr(decoders, "_BLOCK_FRAMES", 2)
    with pytest.raises(BadAudioError, match=r"^a\.wav is silent: it is too quiet for 16 bits$"):
        read_recording(file.getvalue(), "a.wav", 8000)
    assert check_recording(file.getvalue(), "a.wav", min_seconds=0.0005) == 0.0005
    with pytest.raises(BadAudioError, match=r"^a\.wav lasts 0\.0005 s; the model requires at least 0\.0006 s$"):
        check_recording(file.getvalue(), "a.wav", min_seconds=0.0006)


def test_the_source_of_a_row():
    assert source_of({"clip_id": "a", "audio_path": "a.wav"}) == "a.wav"
    assert source_of({"clip_id": "a", "audio_path": "a.wav", "audio": {"bytes": b"x", "path": "a.wav"}}) == b"x"
    with pytest.raises(ValueError, match=r"'a'.*int16"):
        source_of({"clip_id": "a", "audio_path": "a.wav", "samples": b"xx"})


def threads_at(row):
    return row, torch.get_num_threads()


def fail_at(fatal, error, row):
    if row == fatal:
        raise error
    return row


def die_at(fatal, row):
    if row == fatal:
        os._exit(1)
    return row


class TestMapInOrder:
    @pytest.mark.parametrize("workers", [0, 1, pytest.param(2, marks=pytest.mark.process)])
    def test_results_are_in_order_and_on_one_thread(self, workers):
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert list(map_in_order(threads_at, range(50), workers)) == [(row, 1) for row in range(50)]
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.process)])
    def test_an_error_is_the_functions_own(self, workers):
        results = map_in_order(partial(fail_at, 5, MissingDecoderError("install FFmpeg")), range(10), workers)
        with pytest.raises(MissingDecoderError, match=r"^install FFmpeg$"):
            list(results)

    @pytest.mark.process
    def test_a_dead_worker_is_an_error(self):
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(map_in_order(partial(die_at, 5), range(10), workers=2))

    @pytest.mark.process
    def test_no_worker_outlives_a_parent_that_is_killed(self, monkeypatch):
        assert_workers_end_with_their_parent(map_in_order(name_worker, range(100), workers=2), monkeypatch)


WORKER = """if True:
    import os, signal, sys, threading, time
    from multiprocessing import connection, process, resource_sharer, util
    from modeling_supclap.datasets_scripts.bad_audio import exit_with_parent

    def end(status):
        print("exits with status", status, flush=True)
        has_ended.set()

    os._exit, has_ended = end, threading.Event()
    exit_with_parent(0)
    handed_over = resource_sharer.DupFd(0)
    address = resource_sharer._resource_sharer._address
    connection.Client(address, authkey=process.current_process().authkey).close()
    for number in (signal.SIGINT, signal.SIGTERM):  # from another process than the parent
        os.kill(os.getpid(), number)
    while signal.SIGTERM in signal.sigpending():
        time.sleep(0.01)
    time.sleep(0.5)
    waiting = threading.enumerate()[1:]  # that may not keep a worker alive that is done
    print("works", has_ended.is_set(), {thread.daemon for thread in waiting}, flush=True)
    has_ended.wait(60)
    os.getppid = lambda: 1
    util._exit_function()  # of a process that is done
    sys.excepthook(ConnectionResetError, ConnectionResetError("the parent was killed"), None)
    1 / 0
"""


@pytest.mark.process
def test_a_worker_ends_with_its_parent_and_prints_only_its_own_errors():
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WORKER], **options) as worker:
        assert worker.stdout.readline() == "works False {True}\n"
        worker.send_signal(signal.SIGTERM)
        out, errors = worker.communicate(timeout=120)
    assert out.splitlines() == ["exits with status 0", "exits with status 1"]
    assert not re.search("EOFError|ConnectionResetError", errors)  # of a parent that stops reading
    assert errors.endswith("ZeroDivisionError: division by zero\n")


def test_a_stopped_check_keeps_its_results_and_shows_progress(tmp_path, monkeypatch, capsys):
    rows = []
    for number in range(6):
        soundfile.write(tmp_path / f"{number}.wav", 0.1 * np.sin(np.arange(8000) / (number + 2)), 16000)
        rows.append({"clip_id": str(number), "audio_path": str(tmp_path / f"{number}.wav")})
    checked = []

    def check(row, min_seconds):
        checked.append(row["clip_id"])
        if len(checked) == 5:
            raise KeyboardInterrupt
        return None

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(bad_audio, "_problem", check)
    with pytest.raises(KeyboardInterrupt):
        bad_audio.find_bad_audio(rows, memo=tmp_path / "memo.json")
    assert "checking" in capsys.readouterr().err
    checked.clear()
    assert bad_audio.find_bad_audio(rows, memo=tmp_path / "memo.json") == []
    assert checked == ["4", "5"]
