"""Base class of the builders: collecting clips, separating splits, sampling and reporting."""

from pathlib import Path

import pytest
from dataset_folders import CLOTHO_NAMES, clotho, write_csv

from modeling_supclap.datasets_scripts.builders.clotho import Clotho
from modeling_supclap.datasets_scripts.builders.columns import clean_texts
from modeling_supclap.datasets_scripts.builders.folder import REPORT_NAME, Clip, Collection
from modeling_supclap.datasets_scripts.splits import draw_sources


def collect(*clips):
    """Return a collection of clips, given as (split, clip id, source, file)."""
    collection = Collection()
    for split, clip_id, source, file in clips:
        collection.add(split, Clip(clip_id, {"eng": ["A"]}, source, ""), clip_id, Path(file))
    collection.keep_apart("clips")
    return {split: [clip.clip_id for clip in members] for split, members in collection.clips.items()}, collection


def test_a_source_stays_in_the_split_that_comes_last():
    clips, collection = collect(
        ("train", "1", "a", "1"),
        ("train", "2", "b", "2"),
        ("train", "3", "c", "3"),
        ("validation", "4", "a", "4"),
        ("validation", "5", "b", "5"),
        ("test", "6", "a", "6"),
        ("test", "7", "a", "7"),
    )
    assert clips == {"train": ["3"], "validation": ["5"], "test": ["6", "7"]}
    assert sorted(collection.left_out["source in another split"]) == ["1", "2", "4"]


def test_clips_that_share_a_file_are_excluded():
    clips, collection = collect(("train", "1", "a", "x"), ("test", "2", "b", "x"), ("test", "3", "c", "y"))
    assert clips == {"train": [], "validation": [], "test": ["3"]}
    assert collection.left_out == {"one file for several clips": ["1", "2"]}
    clips, collection = collect(("train", "1", "a", "x"), ("test", "1", "a", "x"))  # one clip in two splits
    assert clips == {"train": [], "validation": [], "test": ["1"]}
    assert collection.left_out == {"source in another split": ["1"]}


def test_only_unique_clips_with_caption_and_audio_are_added():
    collection = Collection()
    clip = Clip("1", {"eng": [" A\n", " "], "fra": [""]}, "a", "")
    for _ in range(2):
        collection.add("train", clip, "1.wav", Path("1.wav"))
    collection.add("test", clip._replace(clip_id="2", captions={"eng": [" "]}), "2.wav", Path("2.wav"))
    collection.add("test", clip._replace(clip_id="3"), "3.wav", None)
    collection.leave_out("never")
    assert collection.clips["train"] == [clip._replace(captions={"eng": ("A",), "fra": ()}, audio_path="1.wav")]
    assert collection.clips["test"] == []
    assert collection.missing == ["3.wav"]
    assert collection.left_out == {"duplicate": ["1"], "empty caption": ["2"]}


def test_captions_lose_the_space_around_them():
    assert clean_texts([" a b ", "", "\t", "c"]) == ("a b", "c")


def test_the_sample_depends_only_on_recordings_and_seed():
    sources = [f"freesound:{number}" for number in range(1000)]
    counts = {"test": 100, "validation": 50}
    drawn = draw_sources(sources, counts, 0)
    assert [list(drawn.values()).count(split) for split in ("train", "validation", "test")] == [850, 50, 100]
    assert draw_sources(sources[::-1] + sources, counts, 0) == drawn
    assert draw_sources(sources, counts, 1) != drawn
    fewer = draw_sources(sources, {"test": 50}, 0)
    assert {source for source in sources if fewer[source] == "test"} < {s for s in sources if drawn[s] == "test"}
    halves = [sum(drawn[source] == "test" for source in half) for half in (sources[:500], sources[500:])]
    assert min(halves) > 35  # 100 of 1,000 without replacement: 50 +- 4.7


@pytest.mark.parametrize("count", [0, 1])
def test_sampling_more_sources_than_exist_is_an_error(count):
    assert set(draw_sources("ab", {"test": 1, "validation": 1}, 0).values()) == {"test", "validation"}
    with pytest.raises(ValueError, match=rf"\b{count}\b"):
        draw_sources(map(str, range(count)), {"test": 1, "validation": 1}, 0)


def test_the_report_is_saved_with_the_rows(tmp_path, monkeypatch):
    made = clotho(tmp_path / "clotho")
    made.audio[0].unlink()
    builder = Clotho(cache_dir=str(tmp_path / "cache"), **made.config)
    builder.download_and_prepare()
    (path,) = (tmp_path / "cache").rglob(REPORT_NAME)
    expected = {"missing": ["development/" + made.audio[0].name], "left_out": {}}
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(Clotho, "collect", lambda self: pytest.fail("the metadata were read again"))
    again = Clotho(cache_dir=str(tmp_path / "cache"), **made.config)
    again.download_and_prepare()
    assert again.report() == expected
    assert path.stat().st_mtime_ns == written
    assert path.parent == Path(again.cache_dir)


def test_rows_may_go_elsewhere_than_to_the_cache(tmp_path, caplog):
    made = clotho(tmp_path / "clotho")
    made.audio[0].unlink()
    builder = Clotho(cache_dir=str(tmp_path / "cache"), **made.config)
    builder.download_and_prepare(output_dir=str(tmp_path / "out"), file_format="parquet")
    assert not list((tmp_path / "out").rglob(REPORT_NAME))
    missing = f"development/{made.audio[0].name}"
    assert builder.report() == {"missing": [missing], "left_out": {}}
    assert caplog.messages == [f"Clotho: clips without a row: 1 audio missing ({missing}); listed in report()"]


def test_the_error_of_an_empty_dataset_lists_the_reasons(tmp_path):
    made = clotho(tmp_path / "clotho")
    for table in (tmp_path / "clotho").glob("*.csv"):
        write_csv(table, [["file_name", "caption_1"], *([name, " "] for name in CLOTHO_NAMES)])
    with pytest.raises(ValueError, match=r"Clotho: no clips left in .*/clotho: \{'empty caption': 15\}"):
        Clotho(cache_dir=str(tmp_path / "cache"), **made.config).download_and_prepare()
    for table in (tmp_path / "clotho").glob("*.csv"):
        write_csv(table, [["file_name", "caption_1"]])
    with pytest.raises(ValueError, match=r"Clotho: no clips left in .*/clotho: it lists none"):
        Clotho(cache_dir=str(tmp_path / "cache"), **made.config).download_and_prepare()
