"""Audio files of a folder."""

import os

import pytest

from modeling_supclap.datasets_scripts.audio_files import SUFFIXES, list_recordings, walk


def test_audio_and_videos_are_listed(tmp_path):
    names = ["a.wav", "B.FLAC", "c.webm", "deep/d.mp4", "._a.wav", "notes.txt", "deep/x.wav.txt", "__MACOSX/a.wav"]
    bins = [
        "$RECYCLE.BIN/S-1",
        "#recycle",
        "@eaDir/a.wav",
        "lost+found",
        "System Volume Information",
        ".Trash-1000/files",
    ]
    names += [f"{folder}/lost.wav" for folder in [*bins, "disk/#recycle"]]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert list_recordings(tmp_path) == [str(tmp_path / name) for name in ("B.FLAC", "a.wav", "c.webm", "deep/d.mp4")]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list_recordings(tmp_path / "nowhere")


def test_only_files_are_listed_and_each_folder_once(tmp_path, monkeypatch, caplog):
    folder = tmp_path.resolve() / "sounds"
    (folder / "i").mkdir(parents=True)
    (folder / "i" / "x.wav").touch()
    (folder / "i" / "back").symlink_to(folder)
    for name in "hcfagbed":
        (folder / name).symlink_to("i")
    (folder / "gone.wav").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.wav")
    for name in (b"\xe9.wav", b"\xe8.wav"):
        open(os.path.join(os.fsencode(folder), name), "wb").close()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in (folder, "~/sounds", "sounds"):
        caplog.clear()
        assert list_recordings(given) == [str(folder / "a" / "x.wav")]
        assert caplog.messages == [f"{folder}: skipped 2 names that are not UTF-8, such as '\\udce8.wav'"]


def test_each_suffix_is_in_the_list_once():
    assert len(set(SUFFIXES)) == len(SUFFIXES)
    assert all(suffix == suffix.lower() for suffix in SUFFIXES)


@pytest.mark.parametrize(
    "name", ["$RECYCLE.BIN", "System Volume Information", "lost+found", "#recycle", "@eaDir", "@Recycle", "#Snapshot"]
)
def test_deleted_files_and_system_folders_are_no_recordings(tmp_path, name):
    for path in (f"{name}/S-1-5/deleted.wav", f"site/{name}/b.wav", f"site/{name.lower()} 2/kept.wav", f"{name}.wav"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert walk(tmp_path) == sorted([f"{name}.wav", f"site/{name.lower()} 2/kept.wav"])
