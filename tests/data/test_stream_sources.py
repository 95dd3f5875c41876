"""WebDataset tar files as streams of rows."""

import bz2
import gzip
import io
import json
import tarfile
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
import soundfile
from prepared_sets import sound
from valid_rows import validate_row

from modeling_supclap.datasets_scripts import load_splits, remote_files, stream_sources
from modeling_supclap.datasets_scripts.audio import read_row


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Two tar files for training and one for testing, with 40 samples of several kinds, some without a recording."""
    folder = tmp_path_factory.mktemp("tars")
    (folder / "test").mkdir()
    for number, name in enumerate(("train-000.tar", "train-001.tar", "test/000.tar")):
        with tarfile.open(folder / name, "w") as archive:
            for sample in range(40 * number, 40 * number + 40):
                # requires a longer header
                key = f"some/where/{sample:03}" + "x" * (120 if sample == 7 else 0)
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
    sizes = [group.rows for group in splits["test"].row_groups]  # of three samples, some without a recording
    assert sizes == [3, 3, 3, 2, 3, 3, 2, 3, 3, 2, 3, 3, 3]
    rows = list(splits["train"])
    assert [row["clip_index"] for row in rows] == list(range(72))
    assert [row["captions"]["eng"] for row in rows] == [
        [f"sound {number}"] for number in range(80) if number % 10 != 9
    ]
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
def test_invalid_webdatasets_are_rejected(tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        load_splits("webdataset", **options)


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO(content))


def test_members_of_a_sample_may_be_in_any_place_but_only_once(tmp_path, monkeypatch):
    read, read_file = [], stream_sources.read_file
    monkeypatch.setattr(stream_sources, "read_file", lambda path, use: read.append(read_file(path, use)) or read[-1])
    members = [("a.flac", b"1"), ("b.flac", b"22"), ("a.txt", b"a dog"), ("b.TXT", b"rain")]
    write_tar(tmp_path / "train.tar", members)
    rows = rows_of_tar(tmp_path)
    assert [(row["captions"]["eng"], row["audio"]["bytes"]) for row in rows] == [(["a dog"], b"1"), (["rain"], b"22")]
    assert len(read[-1]) == 1 + 511 + 512 + 2  # up to the last recording: padding, a header
    write_tar(tmp_path / "train.tar", [*members, ("a.flac", b"2")])
    with pytest.raises(ValueError, match=r"train\.tar: a\.flac.* twice"):
        rows_of_tar(tmp_path)


def test_equal_keys_of_two_tars_are_two_samples(tmp_path):
    for number, words in enumerate((b"a dog", b"rain")):
        write_tar(tmp_path / f"train-{number}.tar", [("000.flac", words), ("000.txt", words)])
    rows = rows_of_tar(tmp_path)
    assert [row["clip_id"] for row in rows] == ["train-0/000", "train-1/000"]
    assert [row["source"] for row in rows] == ["file:train-0/000", "file:train-1/000"]
    assert [row["audio"]["bytes"] for row in rows] == [b"a dog", b"rain"]


def test_an_index_of_tars_is_kept_until_a_file_changes(tmp_path, monkeypatch):
    write_tar(tmp_path / "train.tar", [("a.flac", b"1"), ("a.txt", b"a dog")])
    first = rows_of_tar(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(stream_sources, "_index_tar", lambda *path, **options: pytest.fail("read again"))
        assert rows_of_tar(tmp_path) == first
    write_tar(tmp_path / "train.tar", [("a.flac", b"1"), ("a.txt", b"a bird")])
    assert rows_of_tar(tmp_path)[0]["captions"]["eng"] == ["a bird"]


def test_a_sparse_member_is_rejected(tmp_path):
    headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "a.flac"}
    headers |= {"GNU.sparse.size": str(30 * 2**30), "GNU.sparse.map": "0,1"}
    with tarfile.open(tmp_path / "train.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a.flac")
        member.size, member.pax_headers = 1, headers
        archive.addfile(member, io.BytesIO(b"1"))
    assert (tmp_path / "train.tar").stat().st_size < 21_000
    with pytest.raises(ValueError, match=r"train\.tar: a\.flac is a sparse file"):
        load_splits("webdataset", data_dir=str(tmp_path), streaming=True)


@pytest.mark.parametrize(
    "note", ["{", "[" * 20_000, '{"text": 3}', '{"text": {"eng": 3}}', '{"text": {"xyz": "rain"}}']
)
def test_a_sample_that_cannot_be_read_is_named(tmp_path, note):
    write_tar(tmp_path / "train.tar", [("a.flac", b"1"), ("a.json", note.encode())])
    with pytest.raises(ValueError, match=r"train\.tar: sample 'a'"):
        list(load_splits("webdataset", data_dir=str(tmp_path), streaming=True)["train"])


def test_a_json_file_that_is_no_object_is_named(tmp_path):
    write_tar(tmp_path / "train.tar", [("a.flac", b"1"), ("a.json", b'["rain"]')])
    with pytest.raises(ValueError, match=r"sample 'a'.*\['rain'\].*object"):
        rows_of_tar(tmp_path)


def test_tar_files_belong_to_the_split_that_a_word_of_their_path_names(tmp_path):
    (tmp_path / "latest").mkdir()
    for name in ("development-0", "Evaluation-0", "validation_0", "latest/device"):
        key = name.replace("/", "-")
        write_tar(tmp_path / f"{name}.tar", [(f"{key}.flac", b"1"), (f"{key}.txt", b"a dog"), ("x.txt", b"a dog")])
    splits = load_splits("webdataset", data_dir=str(tmp_path), streaming=True)
    names = {split: sorted(row["clip_id"] for row in rows) for split, rows in splits.items()}
    assert names == {
        "train": ["development-0/development-0", "latest/device/latest-device"],
        "test": ["Evaluation-0/Evaluation-0"],
        "validation": ["validation_0/validation_0"],
    }


def rows_of_tar(folder, **options):
    return list(load_splits("webdataset", data_dir=str(folder), streaming=True, **options)["train"])


def test_samples_of_a_tar_may_have_dots_and_any_audio_suffix(tmp_path, caplog):
    names = ["Yabc_10.000_20.000.wav", "track 2.0.FLAC", "x.oga", "y.webm", "z.mp4"]
    members = [("._track 2.0.FLAC", b"Mac")]
    for name in names:
        members += [(name, b"1"), (name.rpartition(".")[0] + ".json", b'{"text": "rain"}')]
    members += [
        ("._x.oga", b"Mac"),
        ("__MACOSX/x.oga", b"Mac"),
        ("odd.SOUND", b"1"),
        ("odd.json", b'{"text": "rain"}'),
        ("x.seg.npy", b"belongs to x"),
        ("folder.wav/", b""),
    ]
    write_tar(tmp_path / "train.tar", members)
    assert [row["audio_path"] for row in rows_of_tar(tmp_path)] == [*names[:1], "track 2.0.flac", *names[2:]]
    assert ["1 of 6 rows" in message and "train/odd" in message for message in caplog.messages] == [True]
    assert len(rows_of_tar(tmp_path, audio_suffix="Sound")) == 6
    members = [("v1.0/a.take.wav", b"1"), ("v1.0/a.txt", b"rain"), ("v1.0/a.seg.npy", b"belongs to a")]
    write_tar(tmp_path / "train.tar", members)
    caplog.clear()
    assert [row["clip_id"] for row in rows_of_tar(tmp_path, audio_suffix="take.wav")] == ["train/v1.0/a"]
    assert caplog.messages == []


def test_texts_of_a_tar_have_their_language_and_their_times_are_those_of_another_recording(tmp_path):
    about = {"text": "la pluie", "start": 5, "end": 2}
    write_tar(tmp_path / "train.tar", [("a.wav", b"1"), ("a.json", json.dumps(about).encode())])
    (row,) = rows_of_tar(tmp_path, language="fra", languages="eng")
    assert row["captions"] == {"fra": ["la pluie"], "eng": []}
    assert "start_seconds" not in row


def test_a_column_of_recordings_may_have_blanks_in_its_name(tmp_path):
    rows = [{"caption": text, "my own audio": {"bytes": text.encode(), "path": None}} for text in ("rain", "wind")]
    rows = datasets.Dataset.from_list(rows).cast_column("my own audio", datasets.Audio(decode=False))
    rows.to_parquet(str(tmp_path / "train.parquet"))
    options = {"data_dir": str(tmp_path), "validation_fraction": 0, "test_fraction": 0}
    stream = load_splits("hf", streaming=True, **options)["train"]
    assert [(row["captions"]["eng"], row["audio"]["bytes"]) for row in stream] == [
        (["rain"], b"rain"),
        (["wind"], b"wind"),
    ]


def test_captions_of_a_tar_may_have_own_keys_and_encodings(tmp_path):
    members = [("a.wav", b"1"), ("a.caption", "pluie légère\r\nla pluie\n".encode("cp1252")), ("b.wav", b"1")]
    members += [
        ("b.caption", b"\xef\xbb\xbfwind"),
        ("c.wav", b"1"),
        ("c.json", b'{"about": {"eng": "c", "fra": ["d"]}}'),
    ]
    write_tar(tmp_path / "train.tar", members)
    options = {"caption_suffix": "Caption", "caption_key": "about", "languages": ["fra"]}
    captions = [row["captions"] for row in rows_of_tar(tmp_path, **options)]
    assert captions == [
        {"eng": ["pluie légère", "la pluie"], "fra": []}, {"eng": ["wind"], "fra": []}, {"eng": ["c"], "fra": ["d"]}
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"train\.tar: sample 'c'.*'fra'"):
        rows_of_tar(tmp_path, caption_suffix="caption", caption_key="about")


def test_samples_of_a_tar_may_have_their_own_language(tmp_path):
    write_tar(tmp_path / "train.tar", [("a.wav", b"1"), ("a.json", b'{"text": "pluie", "language": "fr"}')])
    assert [row["captions"] for row in rows_of_tar(tmp_path, languages=["fra"])] == [{"eng": [], "fra": ["pluie"]}]
    with pytest.raises(ValueError, match=r"no recordings with captions in \['eng'\]; recordings are \.wav, "):
        rows_of_tar(tmp_path)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_compressed_tar_is_unpacked_once(tmp_path, monkeypatch, suffix, remote):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    write_tar(data / "test-0.tar", [("b.flac", b"2"), ("b.txt", b"a dog")])
    write_tar(data / "train-0.tar", [("a.flac", b"1"), ("a.txt", b"rain")])
    expected = rows_of_tar(data)
    compressed = data / f"train-0{suffix}"
    compressed.write_bytes(gzip.compress((data / "train-0.tar").read_bytes()))
    assert rows_of_tar(data) == expected  # not twice
    assert not (tmp_path / "cache" / "tars").exists()

    (data / "train-0.tar").unlink()
    folder = data
    if remote:
        folder = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").put(str(data), f"/{tmp_path.name}", recursive=True)
    for _ in range(2):
        splits = load_splits("webdataset", data_dir=str(folder), streaming=True)
        assert splits.keys() == {"train", "test"}
        assert list(splits["train"]) == expected
    (unpacked,) = (tmp_path / "cache" / "tars").rglob("*.*")
    assert unpacked.name == "train-0.tar"

    write_tar(data / "new.tar", [("a.flac", b"1"), ("a.txt", b"wind")])
    compressed.write_bytes(gzip.compress((data / "new.tar").read_bytes()))
    (data / "new.tar").unlink()
    if remote:
        fsspec.filesystem("memory").put(str(compressed), f"/{tmp_path.name}/{compressed.name}")
    assert [row["captions"]["eng"] for row in rows_of_tar(folder)] == [["wind"]]


def test_an_archive_that_unpacks_to_much_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(remote_files, "UNPACKED_BYTES", 3 * 2**20)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(bytes(3 * 2**20)))  # 1,000 : 1, within the bytes that any archive may have
    unpacked = remote_files.unpacked_tar(str(path))
    assert Path(unpacked).stat().st_size == 3 * 2**20
    path.write_bytes(gzip.compress(bytes(9 * 2**20)))
    with pytest.raises(OSError, match=r"a\.tar\.gz .*more than 3145728 bytes"):
        remote_files.unpacked_tar(str(path))
    assert [each for each in (tmp_path / "cache").rglob("*") if each.is_file()] == [Path(unpacked)]
    path.write_bytes(gzip.compress(np.random.default_rng(0).bytes(9 * 2**20)))  # 1 : 1
    assert Path(remote_files.unpacked_tar(str(path))).stat().st_size == 9 * 2**20


def test_a_tar_that_cannot_be_streamed_is_named(tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    write_tar(tmp_path / "a.tar", [("a.flac", b"1"), ("a.txt", b"rain")])
    (tmp_path / "a.tar").write_bytes(bz2.compress((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(OSError, match=r"a\.tar cannot be read"):
        rows_of_tar(tmp_path)
    (tmp_path / "a.tar").write_bytes(gzip.compress(b"x"))
    with pytest.raises(OSError, match=r"a\.tar cannot be read.*\.tar\.gz"):
        rows_of_tar(tmp_path)
    (tmp_path / "a.tar").rename(tmp_path / "a.tar.gz")
    with pytest.raises(OSError, match=r"a\.tar cannot be read.*header"):
        rows_of_tar(tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(20_000))[:-9])
    with pytest.raises(OSError, match=r"a\.tar\.gz cannot be read"):
        rows_of_tar(tmp_path)
    (tmp_path / "a.tar.gz").unlink()
    write_tar(tmp_path / "a.tar", [("notes.txt", b"rain")])
    with pytest.raises(ValueError, match=r"a\.tar contains no recordings"):
        rows_of_tar(tmp_path)


def test_only_the_columns_that_are_asked_for_are_read(tmp_path, monkeypatch):
    write_tar(tmp_path / "train.tar", [("a.flac", b"1"), ("a.txt", b"rain")])
    monkeypatch.setattr(stream_sources, "_fetch_members", lambda *place: pytest.fail("reads a recording"))
    stream = load_splits("webdataset", data_dir=str(tmp_path), streaming=True)["train"]
    (row,) = stream.remove_columns([name for name in stream.features if name != "captions"])
    assert row.keys() - {"clip_index"} == {"captions"}
