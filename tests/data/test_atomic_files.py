"""Atomic writes: a file is complete, or it does not exist."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modeling_supclap.datasets_scripts.atomic_files import (
    InUseError,
    atomic_write,
    folder_lock,
    read_json,
    write_json,
    write_text,
)


@pytest.mark.parametrize("one_writer", [False, True])
def test_the_old_file_exists_until_the_new_one_is_complete(tmp_path, one_writer):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with atomic_write(path, one_writer) as unfinished:
        unfinished.write_bytes(b"new")
        assert unfinished.parent == tmp_path
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write(half):
        with atomic_write(path) as unfinished:
            unfinished.write_bytes(half)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(b"ne")
    with pytest.raises(TypeError):
        write(None)  # before anything is written
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_processes_do_not_share_the_unfinished_file_but_a_run_and_its_next_do(tmp_path, monkeypatch):
    def names(one_writer):
        found = []
        for process in (1, 2):
            monkeypatch.setattr(os, "getpid", lambda process=process: process)
            with atomic_write(tmp_path / "a", one_writer) as unfinished:
                unfinished.touch()
            found.append(unfinished.name)
        return found

    assert names(one_writer=False) == ["a.1.tmp", "a.2.tmp"]
    assert names(one_writer=True) == ["a.tmp", "a.tmp"]


@pytest.mark.parametrize("one_writer", [False, True])
def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path, one_writer):
    other = tmp_path / "other.txt"
    other.write_text("theirs")
    name = "a.txt.tmp" if one_writer else f"a.txt.{os.getpid()}.tmp"
    (tmp_path / name).symlink_to(other)
    write_text(tmp_path / "a.txt", "mine", one_writer)
    assert (other.read_text(), (tmp_path / "a.txt").read_text()) == ("theirs", "mine")
    assert not (tmp_path / "a.txt").is_symlink()


def test_a_temporary_file_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt.tmp").touch()
    monkeypatch.setattr(
        Path, "unlink", lambda path, missing_ok: None
    )  # the file of another user in a folder like /tmp
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "a.txt", "mine", one_writer=True)


def test_a_lock_is_held_until_its_first_block_ends(tmp_path):
    folder = tmp_path / "deep" / "new"

    def enter(name="job"):
        with folder_lock(folder / name):
            return True

    with ThreadPoolExecutor() as another:
        with folder_lock(folder / "job"):
            with folder_lock(folder / ".." / "new" / "job"):
                assert [path.name for path in (folder).iterdir()] == ["job.lock"]
            (folder / "latest").symlink_to("job")
            for name in ("job", "latest"):
                with pytest.raises(InUseError, match=rf"another run is writing .*new/{name}; wait"):
                    another.submit(enter, name).result()
            (folder / "latest").unlink()
        assert another.submit(enter).result()
    assert not list((folder).iterdir())


def test_text_and_json_to_the_byte(tmp_path):
    write_text(tmp_path / "a.txt", "é\nb")
    assert (tmp_path / "a.txt").read_bytes() == "é\nb".encode()
    write_json(tmp_path / "a.json", {"é": [1]})
    assert (tmp_path / "a.json").read_bytes() == '{\n "é": [\n  1\n ]\n}\n'.encode()
    write_json(tmp_path / "a.json", {"é": 1}, indent=None, ensure_ascii=True)
    assert (tmp_path / "a.json").read_bytes() == b'{"\\u00e9": 1}\n'


def test_a_damaged_file_is_named(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1]})
    assert read_json(str(tmp_path / "a.json")) == {"é": [1]}
    for content in (b'{"a": 1', b"\xff\xfe\xfd"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/a\.json is damaged: .*; copy it again, or delete it"):
            read_json(tmp_path / "a.json")


def test_content_that_is_not_json_changes_no_file(tmp_path):
    write_json(tmp_path / "a.json", 1)
    for bad, style in ((object(), {}), (float("nan"), {"allow_nan": False})):
        with pytest.raises((TypeError, ValueError)):
            write_json(tmp_path / "a.json", bad, **style)
    assert json.loads((tmp_path / "a.json").read_text()) == 1
