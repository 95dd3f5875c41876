"""Parquet shards: bounded, in order, the same bytes whether or not a run was interrupted."""

import datasets
import pyarrow.parquet
import pytest

from modeling_supclap.datasets_scripts.shards import ShardWriter, file_sha256, payload_bytes

TEXT, BYTES = datasets.Value("string"), datasets.Value("binary")
TYPES = datasets.Features({"clip_id": TEXT, "audio": {"bytes": BYTES, "path": TEXT}})


def row(number, size=1000):
    return {"clip_id": f"clip-{number:04d}", "audio": {"bytes": bytes([number % 256]) * size, "path": "a.wav"}}


def entries(start, stop, bad=()):
    for number in range(start, stop):
        yield number, None if number in bad else row(number), {"number": number}


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_are_bounded_and_hold_all_rows_in_order(tmp_path):
    records = ShardWriter(tmp_path, "train", TYPES, 10_000).write(entries(0, 50, bad=(3, 9, 49)))
    tables = [pyarrow.parquet.read_table(tmp_path / record["file"]) for record in records]
    assert [record["rows"] for record in records] == list(map(len, tables))
    assert all(record["payload_bytes"] <= 10_000 for record in records)
    assert all(record["sha256"] == file_sha256(tmp_path / record["file"]) for record in records)
    found = [read for table in tables for read in table.to_pylist()]
    assert found == [row(number) for number in range(50) if number not in (3, 9, 49)]
    assert [note["number"] for record in records for note in record["notes"]] == list(range(50))
    assert records[-1]["next_row"] == 50


def test_a_row_beyond_the_bound_has_a_shard_of_its_own(tmp_path):
    rows = [(number, row(number, size), {}) for number, size in enumerate((100, 5000, 100))]
    assert [record["rows"] for record in ShardWriter(tmp_path, "train", TYPES, 1000).write(rows)] == [1, 1, 1]


@pytest.mark.parametrize("stop", [1, 17, 30])
def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path, stop):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    ShardWriter(tmp_path / "whole", "train", TYPES, 10_000).write(entries(0, 40, bad=(8, 9, 10)))

    def killed():
        yield from entries(0, stop, bad=(8, 9, 10))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ShardWriter(tmp_path / "parts", "train", TYPES, 10_000).write(killed())
    writer = ShardWriter(tmp_path / "parts", "train", TYPES, 10_000)
    assert (writer.next_row > 0) == (stop > 12)
    writer.write(entries(writer.next_row, 40, bad=(8, 9, 10)))
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def test_audio_is_neither_compressed_nor_indexed(tmp_path):
    (record,) = ShardWriter(tmp_path, "train", TYPES, 10**6).write(entries(0, 5))
    columns = pyarrow.parquet.ParquetFile(tmp_path / record["file"]).metadata.row_group(0)
    by_path = {columns.column(place).path_in_schema: columns.column(place) for place in range(columns.num_columns)}
    assert by_path["audio.bytes"].compression == "UNCOMPRESSED"
    assert by_path["clip_id"].compression == "ZSTD"
    assert by_path["audio.bytes"].statistics is None


def test_payload_counts_bytes_letters_and_numbers():
    assert payload_bytes({"a": "abc", "b": [b"12", None], "c": {"d": 1.5}}) == 3 + 2 + 8
