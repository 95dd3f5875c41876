"""Parquet files: one changed bit is refused with the name of the file."""

import pyarrow as pa
import pyarrow.parquet
import pytest

from modeling_supclap.datasets_scripts.atomic_files import read_json
from modeling_supclap.datasets_scripts.negatives import write_negatives
from modeling_supclap.datasets_scripts.overlap.trained_sources import load_trained_sources
from modeling_supclap.datasets_scripts.parquet_files import open_parquet, parquet_writer, read_parquet
from modeling_supclap.datasets_scripts.translation.table import read_translations, write_translations

TEXT = "a dog barks at the gate of the farm"


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def write_translated(path):
    write_translations(path, [{"clip_id": "a", "caption_index": 0, "language": "fra", "text": TEXT}])


def write_negative(path):
    write_negatives(path, [{"clip_id": "a", "language": "eng", "text": TEXT, "similarity": 0.5}])


@pytest.mark.parametrize(("write", "read"), [(write_translated, read_translations), (write_negative, read_parquet)])
def test_one_changed_letter_of_a_table_is_noticed(tmp_path, write, read):
    path = tmp_path / "table.parquet"
    write(path)
    assert read(path)["text"].to_pylist() == [TEXT]
    flip(path, path.read_bytes().index(TEXT.encode()) + 2)
    with pytest.raises(ValueError, match=r"table\.parquet.*CRC"):
        read(path)


def test_each_row_group_is_compared_when_it_is_read(tmp_path):
    path, rows = tmp_path / "a.parquet", pa.table({"number": list(range(1000, 1100))})
    with parquet_writer(path, rows.schema, compression="none", use_dictionary=False) as writer:
        writer.write_table(rows, row_group_size=50)
    flip(path, path.read_bytes().index((1060).to_bytes(8, "little")))
    with open_parquet(path) as file:
        assert file.read_row_group(0)["number"].to_pylist() == list(range(1000, 1050))
    with pytest.raises(ValueError, match="CRC"), open_parquet(path) as file:
        file.read_row_group(1)


def test_files_without_checksums_and_missing_ones(tmp_path):
    rows = pa.table({"text": [TEXT]})
    pyarrow.parquet.write_table(rows, tmp_path / "other.parquet")
    assert read_parquet(tmp_path / "other.parquet").equals(rows)
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text(TEXT)
    with pytest.raises(ValueError, match=r"text\.parquet"):
        read_parquet(tmp_path / "text.parquet")


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), parquet_writer(tmp_path / "a.parquet", pa.schema({"a": pa.int8()})):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"{", b'"\x82"'])
def test_damaged_json_and_arrays_are_named(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json.*delete"):
        read_json(tmp_path / "plan.json")
    (tmp_path / "trained_sources.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"trained_sources\.npy.*delete"):
        load_trained_sources(tmp_path)
