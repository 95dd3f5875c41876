"""Tables of recordings: rows of Parquet and CSV files, one row group at a time."""

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from modeling_supclap.datasets_scripts.audio import Address
from modeling_supclap.datasets_scripts.recording_table import RecordingTable


def write(folder, name="clips.parquet", group=2, **columns):
    paths = ["a.wav", "b/c.wav ", "s3://x/d\\.wav", None, "/data/e.wav"]
    table = pa.table(columns or {"path": paths, "size": range(5)})
    if name.endswith("csv"):
        pa.csv.write_csv(table, folder / name)
    else:
        pq.write_table(table, folder / name, row_group_size=group)
    return folder / name


@pytest.mark.parametrize("name", ["clips.PARQUET", "clips.csv"])
def test_rows_in_any_order(tmp_path, name):
    rows = RecordingTable(str(write(tmp_path, name)))
    assert len(rows) == 5
    assert rows[4] == {"clip_id": "/data/e.wav", "audio_path": "/data/e.wav"}
    assert rows[0] == {"clip_id": "a.wav", "audio_path": str(tmp_path / "a.wav")}
    assert rows[-4]["audio_path"] == str(tmp_path / "b" / "c.wav")
    assert rows[2] == {"clip_id": "s3://x/d\\.wav", "audio_path": "s3://x/d\\.wav"}
    assert isinstance(rows[2]["audio_path"], Address)
    assert rows[3] == {"clip_id": None, "audio_path": None}
    assert [row["clip_id"] for row in rows[1:3]] == ["b/c.wav", "s3://x/d\\.wav"]
    with pytest.raises(IndexError):
        rows[5]


def test_ids_of_a_column(tmp_path):
    rows = RecordingTable(write(tmp_path, path=["a.wav", "b.wav"], key=[7, 8]), id_column="key")
    assert [row["clip_id"] for row in rows] == ["7", "8"]
    rows = RecordingTable(write(tmp_path, path=[1, 2]))  # files named by numbers
    assert [row["audio_path"] for row in rows] == [str(tmp_path / "1"), str(tmp_path / "2")]


def test_ids_stay_texts_and_are_unique(tmp_path):
    (tmp_path / "t.csv").write_text("id;Path\n007;a.wav\n1E5;b.wav\n1.10;c.wav\n123456789012345678901234;d.wav\n")
    rows = RecordingTable(tmp_path / "t.csv", id_column="id")
    assert [row["clip_id"] for row in rows] == ["007", "1E5", "1.10", "123456789012345678901234"]
    assert rows[0]["audio_path"] == str(tmp_path / "a.wav")
    (tmp_path / "t.csv").write_text("id,path\n7,a.wav\n7,b.wav\n")
    with pytest.raises(ValueError, match=r"t\.csv.*'7' twice.*--id_column"):
        RecordingTable(tmp_path / "t.csv", id_column="id")
    with pytest.raises(ValueError, match=r"'key'.*\['id', 'path'\]"):
        RecordingTable(tmp_path / "t.csv", id_column="key")
    (tmp_path / "t.csv").write_text("id,path\nx,\ny,\n")  # rows without a recording may repeat
    assert [row["clip_id"] for row in RecordingTable(tmp_path / "t.csv")] == [None, None]


def test_names_are_found_as_in_a_folder_of_recordings(tmp_path):
    for name in ("sub/rain.wav", "dog.wav", "x.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lines = ["sub\\\\rain.wav", "DOG.wav", "C:\\\\me\\\\x.wav", "gone.wav"]
    (tmp_path / "t.jsonl").write_text("\n".join(f'{{"audio_filepath": "{name}"}}' for name in lines))
    rows = RecordingTable(tmp_path / "t.jsonl")
    assert [row["clip_id"] for row in rows] == ["sub/rain.wav", "dog.wav", "x.wav", "gone.wav"]
    assert [row["audio_path"] for row in rows] == [str(tmp_path / row["clip_id"]) for row in rows]


@pytest.mark.parametrize("name", ["clips.parquet", "clips.csv"])
def test_rows_may_be_parts(tmp_path, name):
    table = write(tmp_path, name, path=["a.wav", "a.wav", "b.wav"], start_ms=[0, 1500, 0], end_ms=[1500, 4000, 500])
    rows = list(RecordingTable(table))
    assert [(row["start_seconds"], row["end_seconds"]) for row in rows] == [(0, 1.5), (1.5, 4), (0, 0.5)]
    assert [row["clip_id"] for row in rows] == ["a.wav:0.0:1.5", "a.wav:1.5:4.0", "b.wav:0.0:0.5"]
    assert rows[1]["audio_path"] == str(tmp_path / "a.wav")
    table = write(tmp_path, name, path=["a.wav", "b.wav"], start_seconds=[0, 2], end_seconds=[1, 1])
    with pytest.raises(ValueError, match=rf"{name}, row 1: the clip is from 2\.0 to 1\.0 s"):
        list(RecordingTable(table))


def test_only_one_row_group_is_read(tmp_path, monkeypatch):
    rows = RecordingTable(write(tmp_path))
    read = []
    monkeypatch.setattr(rows, "_convert", lambda values, own=rows._convert: read.append(len(values)) or own(values))
    found = [rows[index]["clip_id"] for index in (2, 3, 2)]
    assert found == ["s3://x/d\\.wav", None, "s3://x/d\\.wav"]
    assert read == [2]
    assert [row["clip_id"] for row in rows[::-1]][-2:] == ["b/c.wav", "a.wav"]
    assert read == [2, 1, 2, 2]


def test_the_digest_is_of_the_content(tmp_path):
    first = RecordingTable(write(tmp_path, path=["a.wav", "b.wav"])).digest
    assert RecordingTable(write(tmp_path, path=["a.wav", "b.wav"])).digest == first
    assert RecordingTable(write(tmp_path, path=["a.wav", "c.wav"])).digest != first
    assert (
        RecordingTable(write(tmp_path, "t.csv", path=["a.wav"])).digest
        != RecordingTable(write(tmp_path, "t.csv", path=["b.wav"])).digest
    )


@pytest.mark.parametrize(
    ("name", "column", "error", "words"),
    [
        ("clips.parquet", "file", ValueError, r"no column 'file' among \['path', 'size'\]"),
        ("sizes.parquet", "path", ValueError, r"sizes\.parquet has no column 'path'; .* one of \['size'\]"),
        ("sizes.csv", "path", ValueError, r"sizes\.csv has no column 'path'; .* one of \['size'\]"),
        ("clips.txt", "path", ValueError, r"\.txt"),
        ("gone.parquet", "path", FileNotFoundError, "gone"),
    ],
)
def test_bad_tables_are_refused(tmp_path, name, column, error, words):
    if name == "clips.parquet":
        write(tmp_path)
    elif name.startswith("sizes"):
        write(tmp_path, name, size=[1, 2])
    elif name == "clips.txt":
        (tmp_path / name).touch()
    with pytest.raises(error, match=words):
        RecordingTable(tmp_path / name, column)
