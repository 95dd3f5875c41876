"""Entries of a prepared dataset, and the files that contain them."""

import hashlib
import io
import sys
import tracemalloc

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import soundfile
from prepared_sets import sound

from modeling_supclap.datasets_scripts import shard_writer
from modeling_supclap.datasets_scripts.atomic_files import file_sha256
from modeling_supclap.datasets_scripts.audio import MissingDecoderError, read_row
from modeling_supclap.datasets_scripts.prepared import STORAGES
from modeling_supclap.datasets_scripts.shard_writer import Entry, ShardWriter, make_entries, pack, payload_bytes


def test_a_recording_too_large_for_a_parquet_cell_is_listed(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "long.wav", sound(1), 44_100)
    row = {"clip_id": "a", "audio_path": str(tmp_path / "long.wav"), "captions": {"eng": ["b", "c"], "fra": []}}
    row["license"] = "CC0"
    size = (tmp_path / "long.wav").stat().st_size + len("long.wav")
    monkeypatch.setattr(shard_writer, "CELL_BYTES", size)
    (entry,) = make_entries([row], "original", str(tmp_path))
    audio = {"bytes": (tmp_path / "long.wav").read_bytes(), "path": "long.wav"}
    assert entry.row == {**row, "audio_path": "long.wav", "audio": audio}
    about = {"seconds": len(sound(1)) / 44_100, "source_bytes": size - len("long.wav")}
    about["source_sha256"] = file_sha256(tmp_path / "long.wav")
    assert entry.note == {"audio_path": "long.wav", "captions": {"eng": 2}, "license": "CC0", **about}

    monkeypatch.setattr(shard_writer, "CELL_BYTES", size - 1)
    (entry,) = make_entries([row], "original", str(tmp_path))
    assert entry.row is None
    assert entry.note.pop("reason").startswith(f"long.wav takes {size} bytes as original, more than the {size - 1} ")
    assert entry.note == {"clip_id": "a", "audio_path": "long.wav"}
    assert next(make_entries([row], "reference", str(tmp_path))).row is not None


def test_a_missing_decoder_stops_the_run_with_every_policy(tmp_path, monkeypatch):
    (tmp_path / "a.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(100))
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, "modeling_supclap.datasets_scripts.ffmpeg", raising=False)
    row = {"clip_id": "a", "audio_path": str(tmp_path / "a.m4a")}
    with pytest.raises(MissingDecoderError, match="FFmpeg"):
        shard_writer._make_entry(row, None, "original")


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

    @pytest.mark.parametrize(("storage", "rate_hz"), [("flac16k", 16_000), ("flac48k", 48_000), ("int16", 16_000)])
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
        return {"clip_id": f"clip-{number:04d}", "audio": {"bytes": bytes([number % 256]) * size, "path": "a.wav"}}

    def entries(self, start, stop, bad=()):
        for number in range(start, stop):
            yield Entry(None if number in bad else self.row(number), {"number": number})

    def test_shards_are_bounded_and_hold_all_rows_in_order(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shard_writer, "ROW_GROUP_ROWS", 4)
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
        assert [record["rows"] for record in ShardWriter(tmp_path, "train", TYPES, 1000).write(rows)] == [1, 1, 1]

    def test_a_row_that_reaches_a_limit_exactly_is_within_it(self, tmp_path, monkeypatch):
        size = payload_bytes(self.row(0))
        monkeypatch.setattr(shard_writer, "ROW_GROUP_BYTES", 2 * size)
        records = ShardWriter(str(tmp_path), "train", TYPES, 5 * size).write(self.entries(0, 8, bad=(5,)))
        assert [(record["row_groups"], record["payload_bytes"], len(record["notes"])) for record in records] == [
            ([2, 2, 1], 5 * size, 6), ([2], 2 * size, 2)
        ]  # fmt: skip
        monkeypatch.setattr(shard_writer, "ROW_GROUP_BYTES", size - 1)
        (record,) = ShardWriter(tmp_path, "test", TYPES, 3 * size).write(self.entries(0, 3, bad=(0,)))
        assert record["row_groups"] == [1, 1]
        (record,) = ShardWriter(tmp_path, "none", TYPES, 3 * size).write(self.entries(0, 2, bad=(0, 1)))
        assert (record["rows"], record["row_groups"], record["payload_bytes"], len(record["notes"])) == (0, [], 0, 2)

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
            columns.column(place) for place in range(3) if columns.column(place).path_in_schema == "audio.bytes"
        ]
        assert (audio.compression, audio.statistics) == ("UNCOMPRESSED", None)
        assert not [name for name in audio.encodings if "DICTIONARY" in name]
