"""Groups of rows that belong together, and the splits that are drawn of them."""

import pytest

from modeling_supclap.datasets_scripts.splits import connect, draw_sources, draw_splits, hash_copies, warn_of_shared


def test_groups_are_connected_through_any_key():
    sources = ["a", "b", "c", "d", None, None]
    recordings = [1, 1, 2, 3, 3, 4]
    contents = [None, "x", "x", None, None, None]
    assert connect(sources) == [0, 1, 2, 3, 4, 5]
    groups = connect(sources, recordings, contents)
    assert [groups.index(group) for group in groups] == [0, 0, 0, 3, 3, 5]


def test_only_files_of_equal_content_have_a_key(tmp_path):
    contents = {
        "a": b"x" * 200_000,
        "b": b"x" * 200_000,
        "c": b"x" * 199_999 + b"y",
        "d": b"y" * 9,
        "e": b"",
        "f": b"",
    }
    contents |= {"g": b"z" * 200_000, "h": b"y" * 9}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    keys = dict(zip(contents, hash_copies([str(tmp_path / name) for name in contents]), strict=True))
    assert keys["a"] == keys["b"] != keys["d"] == keys["h"]
    assert {name for name, key in keys.items() if key is None} == {"c", "e", "f", "g"}
    path = str(tmp_path / "a")
    assert hash_copies([path, path, str(tmp_path / "gone")]) == [None, None, None]  # parts of one recording


def test_whole_groups_are_drawn():
    sources = [f"s{number}" for number in range(40)]
    groups = [number // 2 for number in range(40)]
    splits = draw_splits(sources, groups, {"validation": 0.1, "test": 0.2}, 0)
    assert splits[::2] == splits[1::2]
    assert [splits.count(split) for split in ("train", "validation", "test")] == [28, 4, 8]
    backwards = draw_splits(sources[::-1], groups[::-1], {"validation": 0.1, "test": 0.2}, 0)
    assert backwards[::-1] == splits
    assert draw_splits(sources, groups, {"validation": 0.1, "test": 0.2}, 1) != splits
    alone = draw_splits(sources, range(40), {"test": 0.2}, 0)
    assert alone == [draw_sources(sources, {"test": 8}, 0)[source] for source in sources]
    assert draw_splits(sources, groups, {"test": 1.0}, 0) == ["test"] * 40
    with pytest.raises(ValueError, match=r"^the counts \{'test': 2, 'validation': 1\} exceed the 2 recordings"):
        draw_sources(["a", "b", "a"], {"test": 2, "validation": 1}, 0)
    halves = {"validation": 0.5, "test": 0.5}
    assert sorted(draw_splits("ab", [0, 1], halves, 0)) == ["test", "validation"]
    with pytest.raises(ValueError, match=r"^1 recordings are too few to draw validation and test"):
        draw_splits("aa", [0, 0], halves, 0)
    with pytest.raises(ValueError, match=r"^2 recordings.*validation and test"):
        draw_splits("abc", [0, 0, 1], {"validation": 0.1, "test": 0.1}, 0)


def test_a_source_may_be_the_test_split():
    sources, groups, fractions = list("gabfecd"), [0, 0, 2, 3, 4, 5, 6], {"validation": 0.2, "test": 0.9}
    splits = draw_splits(sources, groups, fractions, 0, test_group="a")
    assert splits[:2] == ["test", "test"]  # of one group
    assert sorted(splits[2:]) == ["train", "train", "train", "train", "validation"]
    with pytest.raises(ValueError, match=r"^test_group is 'x'; the sources are a, b, c, d, e, f, g$"):
        draw_splits(sources, groups, fractions, 0, test_group="x")


def test_what_splits_share_is_counted(caplog):
    splits = ["train", "train", "train", "validation", "validation", "test", "test", "test"]
    groups = [0, 1, 1, 2, 3, 1, 2, 4]
    captions = [["a"], ["b", "c"], [], ["c"], ["d"], ["e", "a"], ["d"], ["f"]]
    warn_of_shared("mine", splits, groups, captions)
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "mine: 2 of 3 test clips share a recording or a source with train or validation",
        "mine: 1 of 2 validation clips share a caption with train",
        "mine: 2 of 3 test clips share a caption with train or validation",
    ]
    caplog.clear()
    warn_of_shared("mine", ["test", "train", "test"], [0, 1, 1], [["a"], ["a"], []])
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "mine: 1 of 2 test clips share a recording or a source with train",
        "mine: 1 of 2 test clips share a caption with train",
    ]
