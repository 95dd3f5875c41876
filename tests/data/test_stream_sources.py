"""Tar files of WebDataset as streams of rows."""

import io
import json
import tarfile

import numpy as np
import pytest
import soundfile
from prepared_sets import sound

from modeling_supclap.datasets_scripts import load_splits, stream_sources
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.schema import validate_row


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Two tar files for training and one for testing, 40 samples of several kinds, some without a recording."""
    folder = tmp_path_factory.mktemp("tars")
    (folder / "test").mkdir()
    for number, name in enumerate(("train-000.tar", "train-001.tar", "test/000.tar")):
        with tarfile.open(folder / name, "w") as archive:
            for sample in range(40 * number, 40 * number + 40):
                key = f"some/where/{sample:03}" + "x" * (120 if sample == 7 else 0)  # which needs a longer header
                audio = io.BytesIO()
                soundfile.write(audio, sound(sample, 0.05), 16_000, format="FLAC")
                about = {"text": [f"sound {sample}", " "], "tag": ["noise"], "license": "CC0"}
                parts = {".json": json.dumps(about).encode(), ".flac": audio.getvalue(), ".png": b"?" * sample}
                if sample % 3 == 1:
                    parts = {".flac": audio.getvalue(), ".txt": f"sound {sample}".encode()}
                if sample % 10 == 9:
                    parts = {".json": b"{}", ".png": b"?"}
                for suffix, content in parts.items():
                    member = tarfile.TarInfo(key + suffix)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return folder


def test_tar_files_of_webdataset_are_streamed(tars, monkeypatch):
    monkeypatch.setattr(stream_sources, "ROWS_OF_A_GROUP", 3)
    splits = load_splits("webdataset", data_dir=str(tars), streaming=True)
    assert {name: rows.num_rows for name, rows in splits.items()} == {"test": 36, "train": 72}
    rows = list(splits["train"])
    assert [row["clip_index"] for row in rows] == list(range(72))
    assert [row["captions"]["eng"] for row in rows] == [[f"sound {number}"] for number in range(80) if number % 10 != 9]
    for row in rows:
        validate_row({name: row[name] for name in rows[0] if name not in ("audio", "clip_index")}, ["eng"])
        number = int(row["captions"]["eng"][0].split()[1])
        np.testing.assert_allclose(read_row(row, 16_000), sound(number, 0.05), atol=2 / 32768)
    assert (rows[0]["license"], rows[0]["labels"], rows[1]["labels"]) == ("CC0", ["noise"], [])

    shuffled = splits["train"].shuffle(0)
    order = [row["clip_id"] for row in shuffled]
    assert sorted(order) == sorted(row["clip_id"] for row in rows) != order
    shuffled.load_state_dict({"epoch": 0, "rows": 50})
    assert [row["clip_id"] for row in shuffled] == order[50:]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data_dir": ".", "streaming": True}, FileNotFoundError, r"\.tar\b"),
        ({"streaming": True}, ValueError, "webdataset.*data_dir"),
        ({"data_dir": ".", "langauge": "fra", "streaming": True}, ValueError, "'langauge'.*'language'"),
        ({"data_dir": "."}, ValueError, "webdataset.*streaming"),
    ],
)
def test_what_is_no_webdataset_is_refused(tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        load_splits("webdataset", **options)
