"""Rows are made usable once: converted, filtered, and refused if they do not form batches."""

import re

import builders
import pytest
from datasets import Dataset
from test_trainer import QUICK, arguments, build, processor

from modeling_supclap.datasets_scripts import bad_audio
from modeling_supclap.training import rows as training_rows
from modeling_supclap.training.rows import UsableRows, dataset_names, make_usable, read_in_epochs
from modeling_supclap.training.trainer import SupCLAPTrainer


def test_rows_are_read_once_however_often_they_are_passed_on(tmp_path, rows, monkeypatch):
    (tmp_path / "junk.wav").write_bytes(b"junk")
    broken = [*rows, {**rows[0], "clip_id": "junk", "audio_path": str(tmp_path / "junk.wav")}]
    args = arguments(tmp_path / "run", on_bad_audio="skip", **QUICK)
    usable = make_usable({"train": broken, "test": None, "more": {"few": broken[-3:]}}, args, processor())
    assert len(usable["train"]) == len(rows)
    assert len(usable["more"]["few"]) == 2
    assert usable["train"].left_out == usable["more"]["few"].left_out == ["junk"]
    assert usable["test"] is None

    monkeypatch.setattr(bad_audio, "find_bad_audio", lambda *_: pytest.fail("the recordings are read again"))
    assert make_usable(usable, args, processor()) == usable
    trainer = SupCLAPTrainer(builders.supclap_model(), args, usable["train"], usable["more"], processor())
    assert (trainer.train_rows, trainer.eval_rows) == (rows, {"few": broken[-3:-1]})
    assert trainer.evaluate(UsableRows(rows[:8])).keys() == trainer.evaluate(rows[:8]).keys()


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [(3, {}, r"\b3 clips\b.*\b4\b"), (5, {"dataloader_drop_last": False}, r"\b5 clips\b.*dataloader_drop_last")],
)
def test_too_few_clips_are_refused(tmp_path, rows, count, options, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, rows[:count], **options)
    build(tmp_path, rows[: count + 1], **options)


@pytest.mark.parametrize(("count", "drops"), [(4, False), (5, True), (6, False)])
def test_clips_that_fill_a_batch_are_enough(tmp_path, rows, count, drops):
    trainer = build(tmp_path, rows[:count], dataloader_drop_last=drops)
    assert [len(batch["clip_index"]) for batch in trainer.get_train_dataloader()] == ([4, 2] if count == 6 else [4])


def test_clips_are_enough_for_a_batch_of_all_processes(tmp_path, rows, monkeypatch):
    args = arguments(tmp_path, dataloader_drop_last=False)
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ValueError, match="7 clips are fewer than a batch of 8; "):
        read_in_epochs(UsableRows(rows[:7]), args)
    read, batches = read_in_epochs(UsableRows(rows[:9]), args)  # a process pads the last clip
    assert (len(read), batches) == (9, None)
    assert read_in_epochs(None, args) == (None, None)


@pytest.mark.parametrize("form", [list, Dataset.from_list])
def test_a_caption_is_not_read_letter_by_letter(tmp_path, rows, form):
    strings = form([{**row, "captions": {"eng": "A tone"}} for row in rows])
    with pytest.raises(ValueError, match=r"eng.*list of strings"):
        make_usable({"train": strings}, arguments(tmp_path), processor())


def test_captions_that_language_errors_need_are_required_before_a_run(tmp_path, rows):
    lacking = [*rows[:5], {**rows[5], "captions": {**rows[5]["captions"], "fra": []}}]
    options = {"languages": ["eng", "fra"], "track_language_errors": True}
    with pytest.raises(ValueError, match=r"1 train clips lack captions, such as 'clip5'.*\['fra'\]"):
        build(tmp_path, lacking, **options)
    build(tmp_path, lacking, languages=["eng", "fra"])


def test_the_datasets_of_rows_are_named():
    rows = [{"dataset": "b"}, {"clip_id": "1"}, {"dataset": "a"}]
    assert dataset_names(rows) == {"a", "b"}
    assert dataset_names(Dataset.from_list(rows[:1] * 2)) == {"b"}
    assert dataset_names(None) == dataset_names([]) == dataset_names(Dataset.from_list(rows[1:2])) == set()


def test_shared_captions_that_become_negatives_are_counted(tmp_path, rows, caplog):
    twins = [{**row, "captions": rows[index // 2]["captions"]} for index, row in enumerate(rows[:5])]
    build(tmp_path / "captions", twins, positives="captions")
    build(tmp_path / "distinct", rows[:5])
    assert not re.search(r"\d of \d+ clips", caplog.text)
    build(tmp_path / "clip", twins)
    assert "4 of 5 clips" in caplog.text


def test_a_transform_is_refused_and_other_formats_are_not(tmp_path, rows):
    """Columns are checked and read at once, without the transform."""
    dataset = Dataset.from_list(rows)
    changed = dataset.with_transform(lambda batch: {**batch, "clip_id": [f"new {name}" for name in batch["clip_id"]]})
    parts = builders.supclap_model(), arguments(tmp_path, **QUICK)
    for call in (
        lambda: SupCLAPTrainer(*parts, changed, processing_class=processor()),
        lambda: build(tmp_path, rows).evaluate(changed),
    ):
        with pytest.raises(ValueError, match=r"with_transform.*map\(\)"):
            call()
    trainer = SupCLAPTrainer(*parts, dataset.with_format("numpy"), processing_class=processor())
    assert trainer.train_rows[0]["clip_id"] == "clip0"


def test_many_rows_are_advised_to_be_streamed(tmp_path, rows, monkeypatch, caplog):
    monkeypatch.setattr(training_rows, "MANY_ROWS", len(rows))
    build(tmp_path, rows)
    assert "stream" not in caplog.text
    monkeypatch.setattr(training_rows, "MANY_ROWS", len(rows) - 1)
    monkeypatch.setattr(training_rows, "BYTES_PER_ROW", 10**9)
    build(tmp_path, rows)
    assert re.search(r"^.*12 rows take about 12 GB of memory in each process; .*--streaming true", caplog.text)
