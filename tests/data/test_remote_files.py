"""Files are read again after server errors, every error names its file, and folders at addresses are downloaded."""

import functools
import html
import io
import os
import re
from urllib.parse import quote

import aiohttp
import fsspec
import numpy as np
import pytest
from datasets import Audio, Dataset
from recordings import captioned_folder
from web_server import PartsHandler, flaky, serving

from modeling_supclap.datasets_scripts import load_splits, remote_files
from modeling_supclap.datasets_scripts.audio import read_row
from modeling_supclap.datasets_scripts.remote_files import local_folder, read_file, use_files
from modeling_supclap.evaluation.windows import list_recordings


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(remote_files, "WAIT_SECONDS", 0.01)


def test_it_fails_after_four_attempts_without_printing_secrets(tmp_path, monkeypatch, caplog):
    (tmp_path / "a.bin").write_bytes(b"content")
    faults, waited = [], []
    monkeypatch.setattr("time.sleep", waited.append)
    with flaky(tmp_path, faults) as address:
        address = f"{address.replace('//', '//ann:secret@')}/a.bin?key=verysecret"
        assert read_file(address, lambda file: file.read()) == b"content"
        faults += ["busy"] * 100
        with pytest.raises(OSError, match=r"/a\.bin.*after 4 attempts: .*503") as caught:
            read_file(address, lambda file: file.read())
    assert "secret" not in str(caught.value) + caplog.text
    assert waited == [0.01, 0.02, 0.04]
    retries = [re.search(r"/a\.bin cannot be read \(.*503.*\); (.*)", message)[1] for message in caplog.messages]
    assert retries == ["retry 1 in 0.01 s", "retry 2 in 0.02 s", "retry 3 in 0.04 s"]


@pytest.mark.parametrize("protocol", ["http", "https", "s3"])
def test_a_long_download_is_only_ended_if_no_data_arrives(monkeypatch, protocol):
    def open_system(address, **options):
        return options, address

    monkeypatch.setattr(fsspec.core, "url_to_fs", open_system)
    options, address = use_files(f"{protocol}://x/y", lambda *given: given)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60.0, sock_read=60.0)
    assert options == ({"client_kwargs": {"timeout": timeout}} if protocol.startswith("http") else {})
    assert address == f"{protocol}://x/y"


def test_missing_files_are_not_retried(tmp_path, caplog):
    faults = ["gone"]
    with flaky(tmp_path, faults) as address:
        for name in ("none.bin?key=verysecret", "none.bin"):
            with pytest.raises(FileNotFoundError, match=rf"^there is no file {address}/none\.bin$"):
                read_file(f"{address}/{name}", lambda file: file.read())
    assert not faults
    for address in (f"{tmp_path}/none.bin", f"file://{tmp_path}/none.bin"):
        with pytest.raises(FileNotFoundError, match=f"^there is no file {address}$"):
            read_file(address, lambda file: file.read())
    assert not caplog.messages


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_a_file_on_this_machine_is_read_once(tmp_path, protocol):
    (tmp_path / "a.bin").write_bytes(b"")
    attempts = []

    def fail(file):
        attempts.append(file)
        raise KeyError("damaged")

    path = f"{protocol}{tmp_path}/a.bin"
    with pytest.raises(OSError, match=rf"^{path} cannot be read after 1 attempts: KeyError: 'damaged'$"):
        read_file(path, fail)
    assert len(attempts) == 1


def test_only_changed_files_of_a_folder_are_downloaded_again(monkeypatch):
    system, downloaded = fsspec.filesystem("memory"), []
    get_file = type(system).get_file
    monkeypatch.setattr(
        type(system), "get_file", lambda self, name, target: (downloaded.append(name), get_file(self, name, target))
    )
    for name in ("a.wav", "deep/b.wav", "c.wav", "d.wav"):
        system.pipe(f"/updated/{name}", name.encode())
    # a key that an object store may have
    system.store["/updated/../outside.wav"] = system.store["/updated/a.wav"]
    folder = local_folder("memory://updated")
    assert sorted(downloaded) == ["/updated/a.wav", "/updated/c.wav", "/updated/d.wav", "/updated/deep/b.wav"]
    assert not (folder.parent / "outside.wav").exists()

    system.pipe("/updated/a.wav", b"new")
    for name in ("c.wav", "d.wav"):
        system.rm(f"/updated/{name}")
    for name in ("d.wav", "deep/b.wav"):  # lost copies
        (folder / name).unlink()
    downloaded.clear()
    assert local_folder("memory://updated") == folder
    assert downloaded == ["/updated/a.wav", "/updated/deep/b.wav"]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
    assert files == {"a.wav": b"new", "deep/b.wav": b"deep/b.wav"}

    with pytest.raises(FileNotFoundError, match="memory://nowhere"):
        local_folder("memory://nowhere")
    monkeypatch.setenv("HOME", str(folder))
    assert local_folder("~/deep") == folder / "deep"


def test_a_download_that_is_interrupted_continues(monkeypatch):
    system, downloaded = fsspec.filesystem("memory"), []
    get_file = type(system).get_file

    def fail(self, name, target):
        downloaded.append(name)
        if len(downloaded) == 2:
            raise KeyboardInterrupt
        return get_file(self, name, target)

    monkeypatch.setattr(type(system), "get_file", fail)
    for name in ("a.wav", "b.wav", "c.wav"):
        system.pipe(f"/interrupted/{name}", name.encode())
    with pytest.raises(KeyboardInterrupt):
        local_folder("memory://interrupted")
    folder = local_folder("memory://interrupted")
    assert downloaded == [f"/interrupted/{name}" for name in ("a.wav", "b.wav", "b.wav", "c.wav")]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        f"{name}.wav": f"{name}.wav".encode() for name in "abc"
    }


@pytest.mark.parametrize("name", ["audio_folder", "hf"])
def test_an_address_has_the_rows_of_its_folder(tmp_path, name):
    folder = captioned_folder(tmp_path / "sounds", 4)
    if name == "hf":
        rows = []
        for path in sorted(folder.glob("*.wav")):
            rows.append({"audio": {"bytes": path.read_bytes(), "path": path.name}, "caption": f"a tone {path.stem}"})
        folder = tmp_path / "stored"
        folder.mkdir()
        stored = Dataset.from_list(rows).cast_column("audio", Audio(decode=False))
        stored.to_parquet(str(folder / "train.parquet"))
    fsspec.filesystem("memory").put(str(folder), f"/{name}", recursive=True)
    options = {"test_fraction": 0, "validation_fraction": 0}
    local, remote = (
        load_splits(name, data_dir=each, **options)["train"] for each in (str(folder), f"memory://{name}")
    )
    for column in ("clip_id", "captions", "labels", "source"):
        assert remote[column][:] == local[column][:]
    for first, second in zip(local, remote, strict=True):
        np.testing.assert_array_equal(read_row(first, 16000), read_row(second, 16000))


class ApacheHandler(PartsHandler):
    """Handler whose listings have links that sort them, and a link to the parent folder."""

    def list_directory(self, path):
        links = ["?C=N;O=D", "/", *(quote(name) + "/" * os.path.isdir(f"{path}/{name}") for name in os.listdir(path))]
        content = "".join(f'<a href="{html.escape(link)}">x</a>' for link in links).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return io.BytesIO(content)


@pytest.mark.parametrize("handler", [PartsHandler, ApacheHandler])
def test_names_in_listings_of_web_servers_are_decoded(tmp_path, monkeypatch, handler):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    names = ["100% rain.wav", "sub/déjà #1.wav", "plain.wav"]
    for name in names:
        (tmp_path / "sounds" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sounds" / name).write_bytes(name.encode())
    with serving(functools.partial(handler, directory=str(tmp_path))) as address:
        for folder in (f"{address}/sounds", f"{address}/sounds/"):
            local = local_folder(folder)
            assert {path.relative_to(local).as_posix() for path in local.rglob("*.wav")} == set(names)
        assert (local / names[1]).read_bytes() == names[1].encode()
        _, paths = list_recordings(f"{address}/sounds")
        assert sorted(paths) == sorted(names)
        assert read_file(paths[names[0]], lambda file: file.read()) == names[0].encode()


@pytest.mark.parametrize(
    "pointer",
    ["version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "/annex/objects/SHA256E-s9--0.tar"],
)
def test_a_pointer_of_git_lfs_is_named(tmp_path, pointer):
    (tmp_path / "a.tar").write_text(pointer)
    with pytest.raises(OSError, match=r"a\.tar is a Git LFS pointer.*git lfs pull"):
        load_splits("webdataset", data_dir=str(tmp_path), streaming=True)
