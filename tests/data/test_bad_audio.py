"""Bad recordings found before a run: the same ones each time, and no longer among the rows."""

import logging

import pytest
import soundfile
from datasets import Dataset
from recordings import tone_rows

from modeling_supclap.datasets_scripts import bad_audio
from modeling_supclap.datasets_scripts.audio import BadAudioError
from modeling_supclap.datasets_scripts.bad_audio import find_bad_audio, usable_rows
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.collator import usable_rows as rows_of_a_run
from modeling_supclap.training.training_args import SupCLAPTrainingArguments


@pytest.fixture
def rows(tmp_path):
    """Eight clips of which the second is junk, the fourth silent and the seventh missing."""
    rows = tone_rows(tmp_path, 8)
    (tmp_path / "tone_1.wav").write_bytes(b"junk")
    soundfile.write(tmp_path / "tone_3.wav", [0.0] * 800, 16_000)
    (tmp_path / "tone_6.wav").unlink()
    return rows


GOOD = ["clip0", "clip2", "clip4", "clip5", "clip7"]


@pytest.mark.parametrize("workers", [1, 2])
def test_all_bad_clips_are_found_in_order(rows, workers):
    bad = find_bad_audio(rows, workers)
    assert [(clip.place, clip.clip_id) for clip in bad] == [(1, "clip1"), (3, "clip3"), (6, "clip6")]
    for clip, (name, message) in zip(bad, [("1", "not audio"), ("3", "silent"), ("6", "No such file")], strict=True):
        assert f"tone_{name}.wav" in clip.reason
        assert message in clip.reason


@pytest.mark.parametrize("make", [list, Dataset.from_list], ids=["list", "dataset"])
@pytest.mark.parametrize(("policy", "named"), [("skip", 0), ("report", 3)])
def test_bad_clips_leave_the_rows(rows, make, policy, named, caplog):
    with caplog.at_level(logging.WARNING, "modeling_supclap.datasets_scripts.bad_audio"):
        kept = usable_rows(make(rows), policy)
    assert [row["clip_id"] for row in kept] == GOOD
    assert caplog.messages[0] == "left out 3 of 8 clips whose recordings cannot be used"
    assert len(caplog.messages) == 1 + named


def test_error_reads_nothing(rows):
    assert usable_rows(rows, "error") is rows


def test_an_unknown_policy_names_the_known(rows):
    with pytest.raises(ValueError, match="on_bad_audio is 'ignore'; it must be one of error, skip, report"):
        usable_rows(rows, "ignore")


def test_no_row_left_is_an_error(rows):
    with pytest.raises(BadAudioError, match=r"none of 2 recordings can be used; .*tone_1\.wav"):
        usable_rows([rows[1], rows[3]], "skip")


def test_the_memo_spares_the_second_look_but_for_what_has_changed(rows, tmp_path, monkeypatch):
    looked_at = []
    pack = bad_audio.pack
    monkeypatch.setattr(bad_audio, "pack", lambda source, name, how: looked_at.append(name) or pack(source, name, how))
    memo = tmp_path / "out" / "bad_audio.json"
    kept = usable_rows(rows, "skip", memo=memo)
    assert len(looked_at) == 8
    assert usable_rows(kept, "skip", memo=memo) == kept  # a filtered split is known already
    assert len(looked_at) == 8
    soundfile.write(tmp_path / "tone_1.wav", [0.1, -0.1] * 400, 16_000)
    assert [row["clip_id"] for row in usable_rows(rows, "skip", memo=memo)] == ["clip0", "clip1", *GOOD[1:]]
    assert looked_at[8:] == [rows[1]["audio_path"]]


def test_stored_samples_are_not_read_again():
    rows = [{"clip_id": "a", "audio_path": "a.wav", "samples": b"xx", "sampling_rate_hz": 16_000}]
    assert find_bad_audio(rows) == []
    assert usable_rows(rows, "skip") is rows


def test_a_run_trains_on_the_rest(rows, tmp_path, processor):
    arguments = SupCLAPTrainingArguments(output_dir=str(tmp_path / "out"), on_bad_audio="report", report_to="none")
    kept = IndexedRows(rows_of_a_run(rows, arguments))
    assert (tmp_path / "out" / "bad_audio.json").is_file()
    batch = TrainingCollator(processor)([kept[place] for place in range(len(kept))])
    assert batch["clip_index"].tolist() == [0, 1, 2, 3, 4]


def test_the_argument_is_checked(tmp_path):
    with pytest.raises(ValueError, match="on_bad_audio is 'ignore'"):
        SupCLAPTrainingArguments(output_dir=str(tmp_path), on_bad_audio="ignore", report_to="none")
