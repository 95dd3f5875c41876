"""WavCaps: collections, blacklists and held-out clips."""

import json
import os
from pathlib import Path

import pytest
from dataset_folders import touch, wavcaps, write_json, youtube_id

from modeling_supclap.datasets_scripts import load_builder, load_splits
from modeling_supclap.datasets_scripts.builders.wavcaps import BLACKLISTS, read_blacklists


def load(folder, **config):
    return load_builder("wavcaps", str(folder.parent / "cache"), data_dir=str(folder), **{"num_test": 5, **config})


def clip_ids(builder):
    return {clip_id for rows in builder.as_dataset().values() for clip_id in rows["clip_id"]}


def test_ids_and_sources_contain_the_collection(tmp_path):
    wavcaps(tmp_path / "data")
    rows = {row["clip_id"]: row for rows in load(tmp_path / "data").as_dataset().values() for row in rows}
    folder = tmp_path / "data" / "waveforms"
    for clip_id, source, path in (
        ("FreeSound/1", "freesound:1", "FreeSound_flac/1.flac"),
        ("SoundBible/1", "soundbible:1", "SoundBible_flac/1.flac"),
        ("BBC_Sound_Effects/NHU00000001", "bbc:NHU00000001", "BBC_Sound_Effects_flac/NHU00000001.flac"),
        (f"AudioSet_SL/Y{youtube_id(1)}", f"youtube:{youtube_id(1)}", f"AudioSet_SL_flac/Y{youtube_id(1)}.flac"),
    ):
        assert rows[clip_id]["source"] == source
        assert rows[clip_id]["audio_path"] == str(folder / path)
        (caption,) = rows[clip_id]["captions"]["eng"]
        assert caption.startswith(f"A sound in {clip_id.split('/')[0]}/")


def test_ids_may_be_numbers_and_a_caption_may_be_missing(tmp_path):
    made = wavcaps(tmp_path / "data")
    table = json.loads(made.table.read_text("utf-8"))
    for entry in table["data"]:
        entry["id"] = int(entry["id"])
    table["data"][1]["caption"] = None
    made.table.write_text(json.dumps(table), "utf-8")
    builder = load(tmp_path / "data", parts=["SoundBible"], num_test=0)
    rows = builder.as_dataset()["train"]
    assert rows["clip_id"][:] == ["SoundBible/0", "SoundBible/2", "SoundBible/3"]
    assert set(rows["license"]) == {"academic use only"}
    assert builder.report()["left_out"] == {"empty caption": ["SoundBible/1"]}


def test_only_the_prefix_of_an_audioset_name_is_no_part_of_the_id(tmp_path):
    lists = [{"AudioSet": ["YYabcdefghi-.wav", "Yabcdefghi_"], "FreeSound": ["Yabcdefghi-_.wav"]}, {"AudioSet": []}]
    paths = [write_json(tmp_path / f"{number}.json", names) for number, names in enumerate(lists)]
    assert read_blacklists(paths) == {"youtube:Yabcdefghi-", "youtube:Yabcdefghi_", "freesound:Yabcdefghi-_"}


def test_blacklisted_clips_are_excluded_by_default(tmp_path):
    wavcaps(tmp_path / "data")
    listed = {f"AudioSet_SL/Y{youtube_id(7)}", "FreeSound/3"}
    builder = load(tmp_path / "data")
    assert set(builder.report()["left_out"]["blacklist"]) == listed
    assert not clip_ids(builder) & listed
    assert "SoundBible/3" in clip_ids(builder)
    assert load(tmp_path / "data", blacklists=BLACKLISTS[:2]).report()["left_out"]["blacklist"] == [
        max(listed - {"FreeSound/3"})
    ]
    more = {"AudioSet": [], "FreeSound": ["5"]}
    write_json(tmp_path / "data" / "json_files" / "blacklist" / BLACKLISTS[1], more)  # rows follow the blacklists
    assert set(load(tmp_path / "data").report()["left_out"]["blacklist"]) == listed | {"FreeSound/5"}
    write_json(tmp_path / "data" / "json_files" / "blacklist" / BLACKLISTS[1], {})
    everything = load(tmp_path / "data", blacklists=[])
    assert clip_ids(everything) == clip_ids(builder) | listed
    assert everything.report()["left_out"] == {}


def test_without_the_blacklists_nothing_is_trained_on_by_accident(tmp_path):
    wavcaps(tmp_path / "data", blacklisted=False)
    with pytest.raises(FileNotFoundError, match=f"data lacks {', '.join(BLACKLISTS)} of"):
        load(tmp_path / "data")
    write_json(tmp_path / "data" / BLACKLISTS[1], {})
    with pytest.raises(FileNotFoundError, match=f"data lacks {BLACKLISTS[0]}, {BLACKLISTS[2]} of"):
        load(tmp_path / "data")
    with pytest.raises(FileNotFoundError, match=f"data lacks {BLACKLISTS[0]} of"):
        load(tmp_path / "data", blacklists=BLACKLISTS[:2], parts=["SoundBible", "AudioSet_SL"])
    assert len(clip_ids(load(tmp_path / "data", blacklists=[]))) == 24
    assert len(clip_ids(load(tmp_path / "data", parts=["SoundBible", "BBC_Sound_Effects"]))) == 8


def test_held_out_clips_do_not_depend_on_the_existing_audio(tmp_path):
    made = wavcaps(tmp_path / "data")
    full = load(tmp_path / "data").as_dataset()
    held_out = full["test"]["clip_id"]
    assert len(held_out) == 5
    assert len({clip_id.split("/")[0] for clip_id in held_out}) > 1
    Path(full["test"][0]["audio_path"]).unlink()
    Path(full["train"][0]["audio_path"]).unlink()
    fewer = load(tmp_path / "data")
    assert fewer.as_dataset()["test"]["clip_id"] == held_out[1:]
    assert set(fewer.report()["missing"]) == {held_out[0], full["train"][0]["clip_id"]}
    assert load(tmp_path / "data", seed=1).as_dataset()["test"]["clip_id"] != held_out[1:]
    assert len(made.audio) == 24


def test_5000_clips_are_held_out_if_there_are_enough(tmp_path):
    wavcaps(tmp_path / "data")
    with pytest.raises(ValueError, match=r"'test': 5000.*\b22\b"):
        load_builder("wavcaps", str(tmp_path), data_dir=str(tmp_path / "data"))
    for num_test, splits in ((0, {"train"}), (22, {"test"})):
        assert set(load(tmp_path / "data", num_test=num_test).as_dataset()) == splits


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"parts": ["Freesound"]}, "'Freesound'.*'AudioSet_SL'"),
        ({"parts": "FreeSound"}, "'FreeSound'"),
        ({"blacklists": ["all"]}, "'all'.*'blacklist_exclude_all_ac"),
        ({"num_validation": -1}, "num_validation.*-1"),
        ({"languages": ["fra"]}, "WavCaps.*'eng'"),
    ],
)
def test_bad_settings_are_refused(tmp_path, config, message):
    wavcaps(tmp_path / "data")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "data", **config)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", 'has no list "data"'),
        ("{}", 'has no list "data"'),
        ('{"data": {"id": "1", "caption": "A"}}', 'has no list "data"'),
        ('{"data": ["id and caption"]}', "entry 0 lacks"),
        ('{"data": [{"id": "1", "caption": "A"}, {"id": "1"}]}', 'entry 1 lacks "id" or "caption"'),
        ('{"data": [{"caption": "A"}]}', "entry 0 lacks"),
    ],
)
def test_a_table_of_another_form_is_refused(tmp_path, content, problem):
    made = wavcaps(tmp_path / "data")
    made.table.write_text(content)
    with pytest.raises(ValueError, match=rf"sb_final\.json:? {problem}"):
        load(tmp_path / "data")


def test_a_requested_collection_must_exist(tmp_path):
    made = wavcaps(tmp_path / "data")
    made.table.unlink()
    assert len(clip_ids(load(tmp_path / "data"))) == 18
    with pytest.raises(FileNotFoundError, match=r"sb_final\.json"):
        load(tmp_path / "data", parts=["SoundBible", "FreeSound"])


@pytest.mark.skipif("SUPCLAP_DATA" not in os.environ, reason="set SUPCLAP_DATA to a folder with wavcaps/sb_final.json")
def test_the_real_files_have_their_numbers_of_clips(tmp_path):
    folder = Path(os.environ["SUPCLAP_DATA"], "wavcaps")
    entries = json.loads((folder / "sb_final.json").read_text("utf-8"))["data"]
    touch(tmp_path / "SoundBible", [f"{entry['id']}.flac" for entry in entries])
    config = {"data_dir": str(folder), "audio_dir": str(tmp_path / "SoundBible"), "num_test": 200}
    splits = load_splits("wavcaps", str(tmp_path), **config)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 1032, "test": 200}
    blacklisted = read_blacklists([folder / "blacklist" / name for name in BLACKLISTS])
    by_part = {source.split(":")[0] for source in blacklisted}
    assert by_part == {"youtube", "freesound"}
    assert "youtube:r1nicOVtvkQ" in blacklisted
    lists = [json.loads((folder / "blacklist" / name).read_text("utf-8")) for name in BLACKLISTS]
    assert len(blacklisted) == sum(
        len({name for names in lists for name in names[part]}) for part in ("AudioSet", "FreeSound")
    )
