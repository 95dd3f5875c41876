"""Properties of all dataset builders."""

import json
import logging
from unittest.mock import Mock

import builders
import dataset_folders
import pytest
import soundfile
import yaml
from dataset_folders import FOLDERS, MAKERS
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from valid_rows import validate_row

from modeling_supclap.datasets_scripts import builder_names, find_builder, load_builder, load_splits
from modeling_supclap.datasets_scripts.builders import metadata
from modeling_supclap.languages import LANGUAGES

# Captions are generated from the class names in all languages.
CLASSIFIED = {name for name in FOLDERS if hasattr(find_builder(name).BUILDER_CONFIG_CLASS, "PHRASES")}
EACH_FOLDER = pytest.mark.parametrize("name", FOLDERS)
CAPTIONED = pytest.mark.parametrize("name", sorted(FOLDERS.keys() - CLASSIFIED - {"audioset", "clotho"}))
EACH = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture
def make(tmp_path):
    return lambda name: MAKERS[name](tmp_path / "data")


@pytest.fixture
def load(tmp_path):
    """Return the prepared builder of a folder."""
    return lambda name, made, **config: load_builder(name, str(tmp_path / "cache"), **{**made.config, **config})


def rows_of(builder):
    return {split: rows.to_list() for split, rows in builder.as_dataset().items()}


def all_rows(builder):
    return [row for rows in rows_of(builder).values() for row in rows]


def test_every_builder_is_in_the_contract_tests():
    assert {*MAKERS, "hf", "prepared"} == set(builder_names())  # these two read prepared data


@EACH
def test_rows_keep_the_contract(name, make, load):
    made = make(name)
    splits = rows_of(load(name, made))
    assert {split: len(rows) for split, rows in splits.items()} == made.counts
    rows = [row for members in splits.values() for row in members]
    for row in rows:
        validate_row(row)
        assert list(row["captions"]) == list(LANGUAGES)
        if name not in CLASSIFIED | {"scenes", "synthetic", "audio_folder"}:
            assert not any(row["captions"][language] for language in LANGUAGES[1:])
    assert len({row["clip_id"] for row in rows}) == len(rows)
    sources = [{row["source"] for row in members} for members in splits.values()]
    assert sum(map(len, sources)) == len(set().union(*sources))
    if made.audio:
        assert {row["audio_path"] for row in rows} <= set(map(str, made.audio))


@EACH
def test_preparing_again_gives_the_same_rows(name, make, tmp_path):
    made = make(name)
    first, second = (rows_of(load_builder(name, str(tmp_path / cache), **made.config)) for cache in "ab")
    assert first == second


@EACH
def test_changed_code_builds_new_rows(name, make, load, monkeypatch):
    made = make(name)
    first, again = (load(name, made).cache_dir for _ in range(2))
    monkeypatch.setattr(metadata, "code_fingerprint", lambda: "other code")
    assert first == again != load(name, made).cache_dir


@EACH
def test_languages_are_chosen_and_ordered(name, make, load):
    builder = load(name, make(name), languages=["fra", "eng"])
    for row in all_rows(builder):
        assert list(row["captions"]) == ["fra", "eng"]
        assert row["captions"]["eng"]


@EACH
def test_an_unknown_setting_is_refused(name, make, load):
    with pytest.raises(ValueError, match=rf"'{name}'.*'language'.*'languages'"):
        load(name, make(name), language="eng")


@EACH
def test_one_language_needs_no_list(name, make, load):
    assert {tuple(row["captions"]) for row in all_rows(load(name, make(name), languages="eng"))} == {("eng",)}


@EACH
def test_bad_languages_are_refused(name, make, load):
    for languages in ("en", [], ["en"], ["eng", "eng"]):
        with pytest.raises(ValueError, match=r"languages|\['en'\]"):
            load(name, make(name), languages=languages)


@EACH
def test_nothing_missing_is_reported_as_such(name, make, load):
    builder = load(name, make(name))
    assert builder.report()["missing"] == []
    assert set(builder.report()["left_out"]) == ({"blacklist"} if name == "wavcaps" else set())


@EACH_FOLDER
def test_missing_audio_is_counted_listed_and_not_fatal(name, make, load, caplog, tmp_path):
    made = make(name)
    gone = made.audio[-1]
    gone.unlink()
    with caplog.at_level(logging.WARNING):
        builder = load(name, made)
        load(name, made)  # says nothing again
    rows = all_rows(builder)
    assert len(rows) == sum(made.counts.values()) - 1
    assert str(gone) not in {row["audio_path"] for row in rows}
    (missing,) = builder.report()["missing"]
    assert (missing.rsplit("/", 1)[-1].rsplit(".", 1)[0]).rsplit("_", 1)[0] in gone.name
    (message,) = [record.message for record in caplog.records if f"1 audio missing ({missing})" in record.message]
    with open(message.rsplit(" in ", 1)[1]) as file:
        assert json.load(file) == builder.report()


def test_more_than_five_missing_names_are_only_counted(load, caplog, tmp_path):
    made = dataset_folders.audio_folder(tmp_path / "sounds")
    for path in made.audio[:6]:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        builder = load("audio_folder", made)
    assert len(builder.report()["missing"]) == 6
    assert "6 audio missing; listed in" in caplog.text
    made.audio[0].touch()
    with caplog.at_level(logging.WARNING):
        missing = load("audio_folder", made).report()["missing"]
    assert f"5 audio missing ({', '.join(missing)}); listed in" in caplog.text


@EACH_FOLDER
def test_the_report_needs_no_preparing(name, make, load, tmp_path):
    made = make(name)
    made.audio[0].unlink()
    unprepared = find_builder(name)(cache_dir=str(tmp_path / "other"), **made.config)
    assert unprepared.report() == load(name, made).report()


@EACH_FOLDER
def test_the_error_without_any_audio_lists_the_searched_names(name, make, load):
    made = make(name)
    for path in made.audio:
        path.unlink()
    total = sum(made.counts.values())
    problem = rf"contains no audio, and none of the {total} recordings, such as .*\. Searched for .*\.wav"
    with pytest.raises(FileNotFoundError, match=problem):
        load(name, made)
    dataset_folders.touch(made.table.parent, ["unrelated.mp3"])
    with pytest.raises(FileNotFoundError, match=r"unrelated\.mp3"):
        load(name, made)


@EACH_FOLDER
def test_rows_follow_the_audio(name, make, load):
    made = make(name)
    before = all_rows(load(name, made))
    kept = made.audio[0].read_bytes()
    made.audio[0].unlink()
    assert len(all_rows(load(name, made))) == len(before) - 1
    made.audio[0].write_bytes(kept)
    assert all_rows(load(name, made)) == before


@CAPTIONED
def test_rows_follow_the_metadata(name, make, load):
    made = make(name)
    load(name, made)
    made.table.write_text(made.table.read_text("utf-8").replace(made.text, "Something else"), "utf-8")
    after = [row["captions"]["eng"] for row in all_rows(load(name, made))]
    assert sum(any("omething else" in text for text in texts) for texts in after) == 1


@EACH
def test_a_limit_takes_the_first_clips(name, make, load):
    made = make(name)
    full, some = rows_of(load(name, made)), rows_of(load(name, made, limit=2))
    assert some == {split: rows[:2] for split, rows in full.items()}
    with pytest.raises(ValueError, match=r"limit.*0"):
        load(name, made, limit=0)


@EACH_FOLDER
def test_a_copy_of_a_recording_is_in_no_other_split(name, make, load):
    made = make(name)
    splits = rows_of(load(name, made))
    train, test = (splits[split][0] for split in ("train", "test"))
    for row in (train, test):
        soundfile.write(row["audio_path"], builders.tone(440.0, 800), 8000, format="WAV")
    after = rows_of(load(name, made))
    found = {row["clip_id"]: split for split, rows in after.items() for row in rows}
    if name == "audio_folder":  # drawn with its copy
        assert found[train["clip_id"]] == found[test["clip_id"]]
        assert len(found) == sum(made.counts.values())
    else:  # the test split is as published
        assert after["test"] == splits["test"]
        assert train["clip_id"] not in found


@EACH_FOLDER
def test_audio_may_be_elsewhere_and_in_another_format(name, make, load, tmp_path):
    made = make(name)
    for path in made.audio:
        target = (tmp_path / "odd [place] é, #1" / path.relative_to(made.config["data_dir"])).with_suffix(".OGG")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    builder = load(name, made, audio_dir=str(tmp_path / "odd [place] é, #1"))
    assert {split: len(rows) for split, rows in rows_of(builder).items()} == made.counts
    assert all(row["audio_path"].endswith(".OGG") for row in all_rows(builder))


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "audio_folder"])
def test_a_clip_that_comes_twice_is_one_row(name, make, load):
    made = make(name)
    if made.table.suffix == ".json":
        table = json.loads(made.table.read_text("utf-8"))
        made.table.write_text(json.dumps({**table, "data": table["data"] + table["data"][-1:]}), "utf-8")
    elif made.table.suffix == ".yaml":
        files = yaml.safe_load(made.table.read_text("utf-8"))["files"]
        made.table.write_text(yaml.safe_dump({"files": files + files[-1:]}), "utf-8")
    else:
        lines = made.table.read_bytes().splitlines(keepends=True)
        made.table.write_bytes(b"".join(lines + lines[-1:]))
    builder = load(name, made)
    assert {split: len(rows) for split, rows in rows_of(builder).items()} == made.counts
    assert len(builder.report()["left_out"]["duplicate"]) == 1


@CAPTIONED
def test_a_clip_without_a_caption_is_left_out(name, make, load):
    made = make(name)
    made.table.write_text(made.table.read_text("utf-8").replace(made.text, "  "), "utf-8")
    builder = load(name, made)
    assert len(all_rows(builder)) == sum(made.counts.values()) - 1
    assert len(builder.report()["left_out"]["empty caption"]) == 1


@CAPTIONED
def test_other_scripts_and_a_byte_order_mark_survive(name, make, load):
    made = make(name)
    made.table.write_text(made.table.read_text("utf-8").replace(made.text, "Ça « 鳥 » 🐦"), "utf-8-sig")
    texts = [text for row in all_rows(load(name, made)) for text in row["captions"]["eng"]]
    assert sum("« 鳥 » 🐦" in text for text in texts) == (4 if name in ("fsd50k", "vggsound") else 1)


@EACH_FOLDER
def test_a_missing_folder_or_table_is_named(name, make, load, tmp_path):
    made = make(name)
    with pytest.raises(ValueError, match="data_dir"):
        load(name, made, data_dir=None)
    for folder in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "nowhere"):  # no id of the Hub: it has no owner
        with pytest.raises(FileNotFoundError, match="nowhere is not a folder; set it to"):
            load(name, made, data_dir=folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty"):
        load(name, made, data_dir=str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(name, made, audio_dir=str(tmp_path / "nowhere"))


@EACH_FOLDER
def test_a_dataset_of_the_hub_is_downloaded(name, make, load, monkeypatch):
    made = make(name)
    asked = []

    def download(repository, repo_type, revision):
        asked.append((repository, repo_type, revision))
        return made.config["data_dir"]

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    splits = load_splits(
        name, str(made.table.parent / "cache"), **{**made.config, "data_dir": "user/set", "revision": "v2"}
    )
    assert {split: len(rows) for split, rows in splits.items()} == made.counts
    assert set(asked) == {("user/set", "dataset", "v2")}


@pytest.mark.parametrize("error", [HfHubHTTPError("404", response=Mock()), LocalEntryNotFoundError("")])
def test_a_dataset_that_is_neither_here_nor_on_the_hub_is_an_error(tmp_path, monkeypatch, error):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(FileNotFoundError, match="user/set could not be downloaded from the Hub; set it to"):
        load_splits("clotho", str(tmp_path), data_dir="user/set")
