"""Tables of windows: the recordings of a folder, and the rows of a recording."""

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from modeling_supclap.datasets_scripts.audio import Address
from modeling_supclap.encoding import AudioChunks
from modeling_supclap.evaluation.windows import list_recordings, window_table


def test_a_folder_and_its_address_have_the_same_recordings(tmp_path, caplog):
    (tmp_path / "deep").mkdir()
    for name in ("b.wav", "deep/a.FLAC", "notes.txt"):
        (tmp_path / name).touch()
    root, paths = list_recordings(tmp_path)
    assert root == str(tmp_path)
    assert paths == {"b.wav": tmp_path / "b.wav", "deep/a.FLAC": tmp_path / "deep" / "a.FLAC"}

    fsspec.filesystem("memory").put(str(tmp_path), "/listed", recursive=True)
    root, addresses = list_recordings("memory://listed")
    assert list(addresses) == list(paths)
    assert addresses["b.wav"] == Address(f"{root}/b.wav")
    assert ["1 files" in message and "notes.txt" in message for message in caplog.messages] == [True, True]


@pytest.mark.parametrize("folder", ["", "memory://nothing here"])
def test_a_folder_without_recordings_is_an_error(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"no recordings.*\.wav"):
        list_recordings(folder or tmp_path)


def test_a_row_per_window_with_its_times_and_embedding():
    chunks = AudioChunks(np.eye(3, dtype=np.float64)[:2], np.array([0.0, 2.5]), np.array([5.0, 6.5]))
    short = AudioChunks(np.eye(3, dtype=np.float64)[2:], np.array([0.0]), np.array([1.0]))
    unusable = AudioChunks(np.empty((0, 0)), np.empty(0), np.empty(0), ValueError("silent"))
    names, splits = ["a.wav", "b.wav", "c.wav"], ["train", "train", "test"]
    table = window_table([chunks, unusable, short], 3, "vector", file=names, split=splits)
    assert table.to_pylist() == [
        {"file": "a.wav", "split": "train", "start_seconds": 0.0, "end_seconds": 5.0, "vector": [1, 0, 0]},
        {"file": "a.wav", "split": "train", "start_seconds": 2.5, "end_seconds": 6.5, "vector": [0, 1, 0]},
        {"file": "c.wav", "split": "test", "start_seconds": 0.0, "end_seconds": 1.0, "vector": [0, 0, 1]},
    ]
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 3)
    assert window_table([unusable], 3, "vector", file=["b.wav"], split=["test"]).schema == table.schema
