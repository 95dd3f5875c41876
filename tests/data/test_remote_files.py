"""Files are read again after server errors, and every error names its file."""

import pytest
from web_server import flaky

from modeling_supclap.datasets_scripts import remote_files
from modeling_supclap.datasets_scripts.remote_files import read_file


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(remote_files, "WAIT_SECONDS", 0.01)


def test_it_fails_after_four_attempts_without_printing_secrets(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"content")
    faults = []
    with flaky(tmp_path, faults) as address:
        address = f"{address.replace('//', '//ann:secret@')}/a.bin?key=verysecret"
        assert read_file(address, lambda file: file.read()) == b"content"
        faults += ["busy"] * 100
        with pytest.raises(OSError, match=r"/a\.bin.*\b4\b") as caught:
            read_file(address, lambda file: file.read())
    assert "secret" not in str(caught.value)


def test_missing_files_are_not_retried(tmp_path):
    with flaky(tmp_path, []) as address, pytest.raises(FileNotFoundError, match=r"none\.bin"):
        read_file(f"{address}/none.bin", lambda file: file.read())
    with pytest.raises(FileNotFoundError, match=r"none\.bin"):
        read_file(str(tmp_path / "none.bin"), lambda file: file.read())


def test_a_file_on_this_machine_is_read_once(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    attempts = []

    def fail(file):
        attempts.append(file)
        raise KeyError("damaged")

    with pytest.raises(OSError, match=r"a\.bin.*KeyError: 'damaged'"):
        read_file(str(tmp_path / "a.bin"), fail)
    assert len(attempts) == 1
