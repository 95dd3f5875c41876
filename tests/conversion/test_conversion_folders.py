"""Folders are written completely, or not at all."""

import builders
import open_clip_folders as folders
import pytest

from modeling_supclap import SupCLAPModel
from modeling_supclap.conversion import save_clap, save_open_clip
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


@pytest.mark.parametrize("save", [save_clap, save_open_clip])
def test_a_model_in_another_format_keeps_the_files_on_its_origin(tmp_path, save):
    model, processor = builders.pair("converted") if save is save_clap else folders.build("A")
    model.save_pretrained(tmp_path / "ours")
    for name in ("provenance.json", "trained_sources.npy"):
        (tmp_path / "ours" / name).write_text(name)
    save(SupCLAPModel.from_pretrained(tmp_path / "ours"), processor, tmp_path / "theirs")
    for name in ("provenance.json", "trained_sources.npy"):
        assert (tmp_path / "theirs" / name).read_text() == name
