"""Splits by fold and recording, for datasets with folds."""

import pytest

from modeling_supclap.datasets_scripts.builders.folds import FoldClip, split_clips


def test_sampling_depends_on_the_seed_only():
    clips = [FoldClip(f"{i}.wav", 1 + i % 3, "rain" if i % 2 else "dog", str(i), "") for i in range(60)]
    draws = [split_clips(clips, 1, 0.25, seed)["validation"] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert split_clips(clips[::-1], 1, 0.25, 0)["validation"] == draws[0][::-1]
    # The same in all releases, because the scores of a test fold depend on the model that was selected.
    assert [clip.freesound_id for clip in draws[0]] == ["8", "16", "19", "20", "25", "26", "29", "41", "44", "53"]


def test_the_first_clip_of_a_recording_determines_its_class():
    clips = [FoldClip(f"{i}.wav", 1, "dog", str(i), "") for i in range(3)]
    clips += [FoldClip(f"{i}-rain.wav", 1, "rain", str(i), "") for i in range(4)]
    drawn = [split_clips(clips, 1, 0.9, seed, test_fraction=0.9)["test"] for seed in range(4)]
    # two of three dogs, none of one recording of rain
    assert {tuple(sorted(clip.label for clip in test)) for test in drawn} == {("dog", "dog", "rain", "rain")}


def test_no_class_loses_its_last_source_and_a_fraction_of_zero_holds_nothing_out():
    recordings = [FoldClip(f"{fold}.wav", fold, "dog", str(fold), "") for fold in (1, 2, 3)]
    assert [len(members) for members in split_clips(recordings, 3, 0.99, 0).values()] == [1, 1, 1]
    assert [len(members) for members in split_clips(recordings[1:], 3, 0.5, 0).values()] == [1, 0, 1]
    assert [len(members) for members in split_clips(recordings, 3, 0, 0).values()] == [2, 0, 1]


def test_a_fraction_of_each_class_replaces_the_fold():
    """[TeminAL B.5] splits ESC-50 by 0.7: 28 of the 40 recordings of a class train."""
    clips = [FoldClip(f"{i}.wav", 1 + i % 5, ("dog", "rain")[i // 40], str(i), "") for i in range(80)]
    # of the same recordings
    clips += [clip._replace(file_name=f"second {clip.file_name}") for clip in clips[:20]]
    splits = split_clips(clips, 1, 0.0, 0, test_fraction=0.3)
    assert not splits["validation"]
    sources = {name: {clip.freesound_id for clip in members} for name, members in splits.items()}
    assert not sources["train"] & sources["test"]
    for label in ("dog", "rain"):
        counts = [len({c.freesound_id for c in splits[name] if c.label == label}) for name in ("train", "test")]
        assert counts == [28, 12]
    assert {clip.fold for clip in splits["test"]} == {1, 2, 3, 4, 5}
    assert sum(map(len, splits.values())) == 100
    assert splits != split_clips(clips, 1, 0.0, 1, test_fraction=0.3)


def test_a_source_in_two_folds_or_two_classes_never_leaks():
    recordings = [FoldClip(f"{i}.wav", 1 + i % 3, "dog", str(i // 2), "") for i in range(30)]
    recordings += [FoldClip(f"{i}-rain.wav", 1 + i % 3, "rain", str(i // 2), "") for i in range(30)]
    splits = split_clips(recordings, 1, 0.3, 0)
    train, validation, test = ({recording.freesound_id for recording in splits[name]} for name in splits)
    assert train
    assert validation
    assert len(train | validation | test) == len(train) + len(validation) + len(test)
    assert {recording.fold for recording in splits["test"]} == {1}


def test_the_test_split_is_one_fold_and_unknown_folds_are_named():
    clips = [FoldClip(f"{i}.wav", 3, "dog", str(i), "") for i in range(4)]
    assert split_clips(clips, 3, 0.15, 0) == {"train": [], "validation": [], "test": clips}
    more = [clip._replace(fold=2) for clip in clips]
    with pytest.raises(ValueError, match=r"fold 1 has no clips; folds with clips: \[2, 3\]; set test_fold=2 "):
        split_clips([*clips, *more], 1, 0.15, 0)
    with pytest.raises(ValueError, match=r"folds with clips: \[\]; set test_fold=1 "):
        split_clips([], 0, 0.15, 0)
