"""Folders are written completely, or not at all."""

import pytest

from modeling_supclap.conversion.folders import writing_folder


def test_a_folder_appears_when_it_is_complete(tmp_path):
    with writing_folder(tmp_path / "new" / "model") as written:
        (written / "weights").write_text("1")
        assert not (tmp_path / "new" / "model").exists()
    assert (tmp_path / "new" / "model" / "weights").read_text() == "1"


def test_an_error_leaves_nothing(tmp_path):
    def fail():
        with writing_folder(tmp_path / "model") as written:
            (written / "weights").write_text("1")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert not list(tmp_path.iterdir())


def test_other_files_are_never_replaced(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ValueError, match="not an empty folder"), writing_folder(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "x"
