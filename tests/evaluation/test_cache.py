"""Embedding cache: atomic writes, exact arrays, and no repeated computation."""

import errno
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from modeling_supclap.evaluation.cache import EmbeddingCache, digest_of

KEY = {"model": "m", "texts": ["rain", "pluie"]}


def counted(values, calls):
    def make():
        calls.append(1)
        return {"embeds": np.array(values, dtype=np.float32), "counts": np.arange(len(values))}

    return make


def test_equal_keys_are_computed_once_and_loaded_exactly(tmp_path):
    calls = []
    values = np.random.default_rng(0).standard_normal((3, 4))
    first = EmbeddingCache(tmp_path).fetch(KEY, counted(values, calls))
    again = EmbeddingCache(tmp_path)
    arrays = again.fetch(dict(reversed(KEY.items())), counted(values, calls))
    assert len(calls) == 1
    assert (again.read, again.embedded) == (1, 0)
    assert arrays.keys() == first.keys()
    assert all(np.array_equal(arrays[name], first[name]) and arrays[name].dtype == first[name].dtype for name in first)


@pytest.mark.parametrize("change", [{"model": "n"}, {"texts": ["rain"]}, {"texts": ["pluie", "rain"]}, {"more": 1}])
def test_another_key_is_another_set(tmp_path, change):
    calls = []
    cache = EmbeddingCache(tmp_path)
    cache.fetch(KEY, counted([[1]], calls))
    cache.fetch({**KEY, **change}, counted([[2]], calls))
    assert len(calls) == cache.embedded == 2


def test_without_a_folder_or_a_name_nothing_is_written(tmp_path):
    calls = []
    cache = EmbeddingCache(None)
    for _ in range(2):
        cache.fetch(KEY, counted([[1]], calls))
    assert len(calls) == 2
    cache = EmbeddingCache(tmp_path)
    for _ in range(2):
        cache.fetch(KEY, counted([[1]], calls), keep=False)
    assert len(calls) == cache.embedded + 2 == 4
    assert list(tmp_path.iterdir()) == []


DAMAGES = {
    "cut": lambda content: content[:50],
    "all but a byte": lambda content: content[:-1],
    "empty": lambda content: b"",
    "garbage": lambda content: b"\xff garbage" * 9,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_computed_again(tmp_path, damage):
    calls = []
    EmbeddingCache(tmp_path).fetch(KEY, counted([[1]], calls))
    (path,) = tmp_path.glob("*/*.npz")
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    with pytest.warns(UserWarning, match=re.escape(path.name)):
        arrays = EmbeddingCache(tmp_path).fetch(KEY, counted([[1]], calls))
    assert len(calls) == 2
    assert arrays["embeds"].tolist() == [[1]]
    assert [file.suffix for file in tmp_path.glob("*/*")] == [".npz"]
    again = EmbeddingCache(tmp_path)
    assert again.fetch(KEY, counted([[2]], calls))["embeds"].tolist() == [[1]]
    assert again.read == 1, "it is whole again"


def test_the_default_is_a_folder_of_the_hugging_face_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    assert EmbeddingCache.default().folder == tmp_path / "supclap" / "embeddings"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert EmbeddingCache("~/mine").folder == tmp_path / "mine"


def test_a_crash_leaves_no_file(tmp_path):
    def crash():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        EmbeddingCache(tmp_path).fetch(KEY, crash)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def write_half(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        with pytest.raises(OSError, match="No space"):
            EmbeddingCache(tmp_path).fetch(KEY, counted([[1]], calls))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    again = EmbeddingCache(tmp_path)
    again.fetch(KEY, counted([[1]], calls))
    assert (again.read, again.embedded, len(calls)) == (0, 1, 2)


def test_the_digest_of_a_value_is_that_of_its_sorted_json():
    expected = hashlib.sha256(b'{"a": ["\\u00e9"], "b": 1}').hexdigest()
    assert digest_of({"b": 1, "a": ["é"]}) == expected
