"""Preparation: the written files are correct and reproducible, and a killed run resumes."""

import hashlib
import io
import json
import re
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import soundfile
from fake_hub import COMMIT, FakeHub, fake_hub
from prepared_sets import make_folder, sound
from processes import Moment, run_killed, run_processes, run_python

from modeling_supclap.datasets_scripts import load_splits, prepare
from modeling_supclap.datasets_scripts.atomic_files import file_sha256
from modeling_supclap.datasets_scripts.audio import BadAudioError, MissingDecoderError, read_row
from modeling_supclap.datasets_scripts.prepare import Entry, Request, ShardWriter, main, pack
from modeling_supclap.datasets_scripts.prepare import prepare as run
from modeling_supclap.datasets_scripts.prepared import STORAGES
from modeling_supclap.recipes.running import run_command

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
    assert all(re.fullmatch(r"data/(train|validation|test)-\d{5}-of-\d{5}\.parquet", name) for name in names)
    for about in manifest["splits"].values():
        for shard in about["shards"]:
            content = (out / shard["file"]).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (shard["bytes"], shard["sha256"])
            assert shard["payload_bytes"] <= SHARD_BYTES


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.process)])
def test_preparing_again_gives_the_same_bytes(whole, folder, cache, tmp_path, workers):
    run(request_for(folder), tmp_path / "again", workers=workers, cache_dir=cache, quiet=True)
    assert files_of(tmp_path / "again") == files_of(whole[0])


def test_a_killed_run_reads_at_most_one_shard_again(whole, folder, cache, tmp_path, monkeypatch):
    out, packed = tmp_path / "out", []

    def counting(source, name, *options):
        packed.append(name)
        if len(packed) == 12:
            raise KeyboardInterrupt
        return pack(source, name, *options)

    monkeypatch.setattr(prepare, "pack", counting)
    with pytest.raises(KeyboardInterrupt):
        run(request_for(folder), out, cache_dir=cache, quiet=True)
    assert not (out / "manifest.json").exists()
    run(request_for(folder), out, cache_dir=cache, quiet=True)
    assert files_of(out) == files_of(whole[0])
    assert len(packed) < 24 + 8  # at most one shard is read twice


def test_a_second_run_on_the_folder_is_rejected_without_damage(whole, folder, cache, tmp_path, monkeypatch):
    def packing(*arguments):
        second = ThreadPoolExecutor().submit(
            run, request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True
        )
        with pytest.raises(RuntimeError, match=r"\bout\b"):
            second.result()
        return pack(*arguments)

    monkeypatch.setattr(prepare, "pack", packing)
    run(request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)
    assert files_of(tmp_path / "out") == files_of(whole[0])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.process
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(whole, folder, cache, tmp_path):
    out, options = tmp_path / "out", request_for(folder).options
    words = [
        "esc50",
        "--data_dir",
        options["data_dir"],
        "--test_fold",
        "4",
        "--languages",
        "eng",
        "jpn",
        "--quiet",
    ]
    words += [
        "--storage",
        "int16",
        "--shard_size",
        "150KB",
        "--out",
        str(out),
        "--cache_dir",
        cache,
        "--workers",
        "2",
    ]
    for name, number in (
        ("*/.prepare/*.json", 1),
        ("*.parquet", 2),
        ("*/data/*.parquet", 1),
        ("*/manifest.json", 1),
    ):
        run_killed(prepare.__file__, *words, moment=Moment("os.rename", name, number))
        assert not (out / "manifest.json").exists()
    run_processes(prepare.__file__, *words, count=1)
    assert files_of(out) == files_of(whole[0])


def test_a_complete_set_is_left_alone(whole, folder, cache, monkeypatch):
    monkeypatch.setattr(prepare, "pack", None)
    assert run(request_for(folder), whole[0], cache_dir=cache, quiet=True) == whole[1]


def test_policy_report_does_not_change_a_complete_set(whole, folder, cache):
    request = Request("esc50", request_for(folder).options, "int16", SHARD_BYTES, on_bad_audio="report")
    assert run(request, whole[0], cache_dir=cache, quiet=True) == whole[1]


def test_another_set_is_replaced_only_with_overwrite(folder, cache, tmp_path):
    out = tmp_path / "out"
    run(request_for(folder), out, cache_dir=cache, quiet=True)
    with pytest.raises(FileExistsError, match=r"\bout\b"):
        run(request_for(folder, "reference"), out, cache_dir=cache, quiet=True)
    manifest = run(request_for(folder, "reference"), out, overwrite=True, cache_dir=cache, quiet=True)
    assert manifest["storage"] == "reference"
    assert len(list((out / "data").iterdir())) == sum(
        len(about["shards"]) for about in manifest["splits"].values()
    )


def test_a_folder_of_something_else_is_not_touched(folder, cache, tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=re.escape(str(tmp_path))):
            run(request_for(folder), tmp_path, overwrite=overwrite, cache_dir=cache, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_changed_recording_makes_another_set(cache, tmp_path):
    folder = make_folder(tmp_path / "ESC", clips=12)
    run(request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)
    soundfile.write(folder / "audio" / "1-0.wav", np.full(4000, 0.1), 22_050)
    with pytest.raises(FileExistsError, match=r"\bout\b"):
        run(request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)


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
    assert seconds == pytest.approx(
        {"gsm.wav": 1.0, "piped.flac": 13_230 / 16_000, "short.wav": 0.1}, abs=0.05
    )


def test_a_recording_too_large_for_a_parquet_cell_is_listed(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "long.wav", sound(1), 44_100)
    row = {"clip_id": "a", "audio_path": str(tmp_path / "long.wav"), "captions": {}, "license": ""}
    monkeypatch.setattr(prepare, "CELL_BYTES", len(sound(1)))
    entry = prepare._make_entry(row, str(tmp_path), "original")
    assert entry.row is None
    assert "long.wav takes" in entry.note["reason"]
    assert prepare._make_entry(row, str(tmp_path), "reference").row is not None


def test_a_missing_decoder_stops_the_run_with_every_policy(tmp_path, monkeypatch):
    (tmp_path / "a.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(100))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    row = {"clip_id": "a", "audio_path": str(tmp_path / "a.m4a")}
    with pytest.raises(MissingDecoderError, match="FFmpeg"):
        prepare._make_entry(row, None, "original")


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
    with pytest.raises(ValueError, match=r"'test'.*audio/4-"):
        run(request_for(folder), tmp_path / "out", cache_dir=cache, quiet=True)


def test_a_prepared_set_can_be_prepared_in_another_way(folder, cache, tmp_path):
    run(request_for(folder, "original"), tmp_path / "original", cache_dir=cache, quiet=True)
    again = Request("prepared", {"data_dir": str(tmp_path / "original")}, "int16", SHARD_BYTES)
    manifest = run(again, tmp_path / "int16", cache_dir=cache, quiet=True)
    assert manifest["dataset"] == "esc50"
    assert sorted(manifest["left_out"]["bad audio"]) == ["2-5", "2-9", "3-14"]
    (row,) = load_splits("prepared", cache, data_dir=str(tmp_path / "int16"))["test"].select([0])
    expected = read_row(
        {"audio_path": folder / row["audio_path"]}, 16_000, resampling_method="sinc_interp_hann"
    )
    np.testing.assert_allclose(np.frombuffer(row["samples"], "<i2") / 32768, expected, atol=0.501 / 32768)


RATE_HZ = 44_100
TONE = (0.5 * np.sin(np.arange(RATE_HZ) / 20)).astype(np.float32)


class TestPack:
    @pytest.fixture
    def recording(self, tmp_path):
        path = tmp_path / "tone.ogg"
        soundfile.write(path, TONE, RATE_HZ)
        return path

    @pytest.mark.parametrize("storage", STORAGES)
    def test_columns_are_those_that_the_features_name(self, recording, storage):
        columns, note = pack(str(recording), "audio/tone.ogg", storage)
        assert columns.keys() == STORAGES[storage].features().keys()
        assert note["source_sha256"] == hashlib.sha256(recording.read_bytes()).hexdigest()
        assert note["source_bytes"] == recording.stat().st_size
        assert note["seconds"] == pytest.approx(1.0, abs=1e-3)
        assert pack(recording.read_bytes(), "audio/tone.ogg", storage) == (columns, note)

    @pytest.mark.parametrize(
        ("storage", "rate_hz"), [("flac16k", 16_000), ("flac48k", 48_000), ("int16", 16_000)]
    )
    def test_resampled_audio_is_within_half_a_step_of_16_bits(self, recording, storage, rate_hz):
        columns, _ = pack(str(recording), "tone.ogg", storage)
        if storage == "int16":
            assert columns["sampling_rate_hz"] == rate_hz
            samples = np.frombuffer(columns["samples"], "<i2") / 32768
        else:
            assert columns["audio"]["path"] == "tone.flac"
            samples, found_hz = soundfile.read(io.BytesIO(columns["audio"]["bytes"]))
            assert found_hz == rate_hz
        method = "sinc_interp_hann" if rate_hz == 16_000 else "kaiser_best"
        expected = read_row({"audio_path": recording}, rate_hz, resampling_method=method)
        np.testing.assert_allclose(samples, expected, atol=0.501 / 32768)


TEXT, BYTES = datasets.Value("string"), datasets.Value("binary")
TYPES = datasets.Features({"clip_id": TEXT, "audio": {"bytes": BYTES, "path": TEXT}})


class TestShards:
    """Shards: limited size, rows in order, and the same bytes after an interruption."""

    def row(self, number, size=1000):
        return {
            "clip_id": f"clip-{number:04d}",
            "audio": {"bytes": bytes([number % 256]) * size, "path": "a.wav"},
        }

    def entries(self, start, stop, bad=()):
        for number in range(start, stop):
            yield Entry(None if number in bad else self.row(number), {"number": number})

    def test_shards_are_bounded_and_hold_all_rows_in_order(self, tmp_path, monkeypatch):
        monkeypatch.setattr(prepare, "ROW_GROUP_ROWS", 4)
        records = ShardWriter(tmp_path, "train", TYPES, 10_000).write(self.entries(0, 50, bad=(3, 9, 49)))
        files = [pyarrow.parquet.ParquetFile(tmp_path / record["file"]) for record in records]
        for record, file in zip(records, files, strict=True):
            groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            assert record["row_groups"] == groups
            assert record["rows"] == sum(groups)
            assert record["payload_bytes"] <= 10_000
            assert record["sha256"] == file_sha256(tmp_path / record["file"])
        found = [read for file in files for read in file.read().to_pylist()]
        assert found == [self.row(number) for number in range(50) if number not in (3, 9, 49)]
        assert [note["number"] for record in records for note in record["notes"]] == list(range(50))

    def test_a_row_above_the_limit_has_its_own_shard(self, tmp_path):
        rows = [Entry(self.row(number, size), {}) for number, size in enumerate((100, 5000, 100))]
        assert [record["rows"] for record in ShardWriter(tmp_path, "train", TYPES, 1000).write(rows)] == [
            1,
            1,
            1,
        ]

    def test_a_written_row_is_kept_only_in_its_table(self, tmp_path, monkeypatch):
        held = []

        def write_table(writer, table, **options):
            # without the memory of Arrow, which is counted separately
            held.append(tracemalloc.get_traced_memory()[0])

        monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_table", write_table)
        tracemalloc.start()
        try:
            ShardWriter(tmp_path, "train", TYPES, 10**6).write(
                Entry(self.row(number, 10**7), {}) for number in range(1)
            )
        finally:
            tracemalloc.stop()
        assert max(held) < 10**6

    def test_audio_is_neither_compressed_nor_indexed(self, tmp_path):
        (record,) = ShardWriter(tmp_path, "train", TYPES, 10**6).write(self.entries(0, 5))
        columns = pyarrow.parquet.ParquetFile(tmp_path / record["file"]).metadata.row_group(0)
        (audio,) = [
            columns.column(place)
            for place in range(3)
            if columns.column(place).path_in_schema == "audio.bytes"
        ]
        assert (audio.compression, audio.statistics) == ("UNCOMPRESSED", None)


class TestCommandLine:
    def words(self, folder, out, cache, *more):
        return ["esc50", "--data_dir", str(folder), "--out", str(out), "--cache_dir", cache, "--quiet", *more]

    def test_a_run_ends_with_a_table(self, folder, cache, tmp_path, capsys):
        options = [
            "--test_fold",
            "4",
            "--languages",
            "eng",
            "fra",
            "--on_bad_audio",
            "report",
            "--storage",
            "int16",
        ]
        options += ["--workers", "1"]
        main(self.words(folder, tmp_path / "out", cache, *options))
        out, err = capsys.readouterr()
        assert re.search(r"^test\s+6\s+0\.00\s+48\s+0\s+eng fra$", out, re.MULTILINE)
        assert err.count("clip '") == 3

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nonsense", "--out", "x"], "invalid choice: 'nonsense' (choose from"),
            (["esc50", "--out", "x", "--test_fld=4"], "unrecognized arguments: --test_fld=4"),
            (["synthetic", "--out", "x", "--data_dir", "d"], "unrecognized arguments: --data_dir d"),
            (["esc50"], "the following arguments are required: --out"),
            (["esc50", "--out", "x", "--shard_size", "big"], "value: 'big'"),
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

    def test_help_lists_the_options_of_the_builder(self, capsys):
        with pytest.raises(SystemExit):
            main(["esc50", "--help"])
        out = capsys.readouterr().out
        assert "--test_fold" in out
        assert "--storage" in out


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
            self.answer(
                [{"type": "file", "path": name, "size": sizes[name], "oid": COMMIT} for name in inside]
            )
        else:
            super().do_GET()

    do_HEAD = do_GET


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
        hub = {
            "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_test",
            "HF_HUB_DISABLE_XET": "1",
        }
        words = [prepare.__file__, tmp_path / "out", cache, folder]
        printed = run_python("-c", script, *words, HF_HOME=str(tmp_path / "home"), **hub)
        names = set(FakeHub.files["somebody/sounds"])
    assert "somebody/sounds" in printed
    assert "somebody/else" in printed
    assert names == set(files_of(tmp_path / "out"))


def test_a_set_without_audio_is_not_pushed(folder, cache, tmp_path):
    run(request_for(folder, "reference"), tmp_path / "out", cache_dir=cache, quiet=True)
    with pytest.raises(ValueError, match="'reference'"):
        prepare.push(tmp_path / "out", "somebody/sounds")


def test_parts_of_recordings_are_prepared_as_clips(tmp_path):
    ramp = np.linspace(0.1, 0.9, 3 * 16_000)
    (tmp_path / "data").mkdir()
    soundfile.write(tmp_path / "data" / "long.wav", ramp, 16_000)
    table = "file_name,caption,start_seconds,end_seconds\nlong.wav,a,0,1\nlong.wav,b,1,3\n"
    (tmp_path / "data" / "metadata.csv").write_text(table)
    options = {
        "data_dir": str(tmp_path / "data"),
        "languages": ["eng"],
        "validation_fraction": 0,
        "test_fraction": 0,
    }
    with pytest.raises(ValueError, match=r"'original'.*int16"):
        run(
            Request("audio_folder", options), tmp_path / "none", cache_dir=str(tmp_path / "cache"), quiet=True
        )
    for storage in ("int16", "flac16k", "reference"):
        out = tmp_path / storage
        manifest = run(
            Request("audio_folder", options, storage), out, cache_dir=str(tmp_path / "cache"), quiet=True
        )
        assert manifest["splits"]["train"]["seconds"] == 3
        rows = load_splits("prepared", str(tmp_path / "cache"), data_dir=str(out))["train"]
        for row, start, end in zip(rows, (0, 16_000), (16_000, 48_000), strict=True):
            np.testing.assert_allclose(read_row(row, 16_000), ramp[start:end], atol=1e-4)
