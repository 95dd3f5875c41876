"""Recordings that a model has trained on are refused in its evaluation."""

import numpy as np
import pytest
from datasets import Dataset

from modeling_supclap.datasets_scripts.overlap.trained_sources import (
    exclude_trained_sources,
    load_trained_sources,
    refuse_trained_sources,
    save_trained_sources,
)


def rows(*sources):
    return [{"clip_id": source, "source": source} for source in sources]


def test_trained_sources_are_counted_and_refused(tmp_path):
    save_trained_sources(rows("freesound:1", "freesound:2", "freesound:1"), tmp_path)
    assert load_trained_sources(tmp_path).dtype == np.uint64
    assert len(load_trained_sources(tmp_path)) == 2
    assert refuse_trained_sources(rows("freesound:3"), str(tmp_path)) == 0
    with pytest.raises(ValueError, match=r"2 of 3 clips, for example freesound:2"):
        refuse_trained_sources(rows("freesound:3", "freesound:2", "freesound:1"), str(tmp_path))
    with pytest.warns(UserWarning, match="1 of 1"):
        assert refuse_trained_sources(rows("freesound:2"), str(tmp_path), allow=True) == 1


def test_trained_sources_are_excluded(tmp_path):
    save_trained_sources(rows("freesound:1", "freesound:2"), tmp_path)
    others, count = exclude_trained_sources(Dataset.from_list(rows("freesound:3", "freesound:2")), str(tmp_path))
    assert (others["source"], count) == (["freesound:3"], 1)
    with pytest.raises(ValueError, match="all 1 clips"):
        exclude_trained_sources(Dataset.from_list(rows("freesound:1")), str(tmp_path))


def test_the_sources_of_the_starting_model_stay(tmp_path):
    start, model = tmp_path / "start", tmp_path / "model"
    start.mkdir()
    model.mkdir()
    save_trained_sources(rows("a", "b"), start)
    save_trained_sources(rows("b", "c"), model, start)
    for source in "abc":
        with pytest.raises(ValueError, match=source):
            refuse_trained_sources(rows(source), str(model))


def test_recordings_with_equal_file_names_are_distinguished_by_their_clips(tmp_path):
    named = {"source": "file:audio.wav"}
    save_trained_sources([{**named, "clip_id": "mine/train-000000", "dataset": "mine"}], tmp_path)
    assert refuse_trained_sources([{**named, "clip_id": "test-000000"}], str(tmp_path)) == 0
    with pytest.raises(ValueError, match=r"1 of 1 clips, for example file:audio\.wav"):
        refuse_trained_sources([{**named, "clip_id": "train-000000"}], str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00"])
def test_a_damaged_record_is_an_error(tmp_path, content):
    (tmp_path / "trained_sources.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"trained_sources\.npy is damaged"):
        load_trained_sources(tmp_path)


def test_a_model_without_record_is_not_refused(tmp_path, monkeypatch):
    save_trained_sources(rows("a"), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert len(load_trained_sources("laion/clap-htsat-unfused")) == 0
    assert len(load_trained_sources(None)) == 0
