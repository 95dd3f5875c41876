"""Training from a stream: a killed and resumed run has the batches and weights of an uninterrupted run."""

import io
import json
import sys
from pathlib import Path

import builders
import datasets
import numpy as np
import pytest
import soundfile
import torch
from crash_callbacks import KillAt, Killed, assert_workers_end_with_their_parent, name_worker
from prepared_sets import make_folder
from processes import run_processes
from recordings import tone_rows
from test_trainer import arguments, losses, processor
from web_server import served

from modeling_supclap.datasets_scripts import load_splits, shard_writer
from modeling_supclap.datasets_scripts.mixture import mix
from modeling_supclap.datasets_scripts.prepare import Request, prepare
from modeling_supclap.training import rows as training_rows
from modeling_supclap.training.distributed import leave_process_group
from modeling_supclap.training.trainer import SupCLAPTrainer

# 30 clips are 7 batches of 4 per epoch, or 6 with two workers.
RUN = {
    "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 9, "eval_strategy": "no",
    "load_best_model_at_end": False, "languages": ["eng", "fra"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared set of 30 training clips, in row groups of two."""
    folder = tmp_path_factory.mktemp("streams")
    make_folder(folder / "ESC", clips=40, seconds=0.2)
    options = {
        "data_dir": str(folder / "ESC"),
        "languages": ["eng", "fra"],
        "test_fold": 4,
        "validation_fraction": 0.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "ROW_GROUP_ROWS", 2)
        prepare(Request("esc50", options, "int16"), folder / "int16", cache_dir=str(folder / "cache"), quiet=True)
    return folder


class Seen(SupCLAPTrainer):
    """Trainer that stores the clips of each batch."""

    def compute_loss(self, model, inputs, **kwargs):
        self.__dict__.setdefault("batches", []).append(inputs["clip_index"].tolist())
        return super().compute_loss(model, inputs, **kwargs)


@pytest.fixture(scope="module")
def hub(folder):
    """Folder with the same clips in two other Parquet files of recordings and captions."""
    rows = load_splits("prepared", data_dir=str(folder / "int16"), cache_dir=str(folder / "cache"))["train"]
    stored = []
    for row in rows:
        file = io.BytesIO()
        soundfile.write(file, np.frombuffer(row["samples"], "<i2"), row["sampling_rate_hz"], format="WAV")
        audio = {"bytes": file.getvalue(), "path": Path(row["audio_path"]).name}
        stored.append({"audio": audio, "captions": row["captions"]["eng"], "caption_fra": row["captions"]["fra"][0]})
    made = datasets.Dataset.from_list(stored).cast_column("audio", datasets.Audio(decode=False))
    for number in range(2):
        path = folder / "hub" / "data" / f"train-{number:05d}-of-00002.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        made.shard(2, number, contiguous=True).to_parquet(str(path), batch_size=2)
    return folder / "hub"


def load_train(data_dir):
    """The training split of either kind, as a stream; or a mix of both with tones that have English captions only."""
    if data_dir.endswith("mix"):
        folder = Path(data_dir).parent
        rows = {name: load_train(str(folder / name)) for name in ("hub", "int16")}
        tones = tone_rows(folder, count=8)
        for row in tones:
            row["captions"] = {"eng": row["captions"]["eng"]}
        rows["tones"] = datasets.Dataset.from_list(tones)
        shares = {"hub": {"repeats": 0.3}, "int16": {"repeats": 0.35}, "tones": {"repeats": 1.25}}
        return mix({name: {"train": of_set} for name, of_set in rows.items()}, shares)["train"]
    if data_dir.endswith("hub"):
        options = {"validation_fraction": 0, "test_fraction": 0}
        return load_splits("hf", data_dir=data_dir, streaming=True, **options)["train"]
    return load_splits("prepared", data_dir=data_dir, streaming=True)["train"]


def build(output, data_dir, seed=0, callbacks=None, dropout=0.3, **kwargs):
    text = builders.bert_config(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = builders.supclap_model(builders.supclap_config(text), seed=seed)
    rows = load_train(data_dir)
    args = arguments(output, **{**RUN, **kwargs})
    return Seen(model, args, train_dataset=rows, processing_class=processor(), callbacks=callbacks)


def cut_and_resume(output, data_dir, step, **kwargs):
    """Run until a simulated crash after a step, and return the run that resumes from its checkpoint."""
    cut = build(output, data_dir, callbacks=[KillAt(step + 1)], **kwargs)
    with pytest.raises(Killed):
        cut.train()
    resumed = build(output, data_dir, seed=99, **kwargs)
    resumed.train(resume_from_checkpoint=f"{output}/checkpoint-{step}")
    return resumed


def assert_same_end(resumed, whole, step):
    assert resumed.batches == whole.batches[step:]
    assert losses(resumed) == losses(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@pytest.mark.parametrize(("step", "workers"), [(5, 0), pytest.param(10, 2, marks=pytest.mark.process)])
def test_a_killed_run_sees_the_same_batches_and_ends_with_the_same_weights(folder, tmp_path, step, workers):
    with served(folder) as address:
        whole = build(tmp_path / "whole", f"{address}/int16", dataloader_num_workers=workers)
        whole.train()
        resumed = cut_and_resume(tmp_path / "cut", f"{address}/int16", step, dataloader_num_workers=workers)
    assert_same_end(resumed, whole, step)

    half = len(whole.batches) // 2
    first, second = whole.batches[:half], whole.batches[half:]
    for epoch in (first, second):
        clips = [clip for batch in epoch for clip in batch]
        assert len(set(clips)) == len(clips) == 4 * (6 if workers else 7)
    assert first != second


def test_a_mix_of_streams_is_resumed_too(hub, tmp_path):
    data_dir = str(hub.parent / "mix")
    whole = build(tmp_path / "whole", data_dir)
    whole.train()
    assert len(whole.batches) == 14
    assert_same_end(cut_and_resume(tmp_path / "cut", data_dir, 5), whole, 5)


def test_resuming_requires_the_same_number_of_workers(folder, tmp_path):
    build(tmp_path, str(folder / "int16"), max_steps=1, save_steps=1).train()
    other = build(tmp_path, str(folder / "int16"), max_steps=2, dataloader_num_workers=2)
    with pytest.raises(ValueError, match=r"stream\.workers.*1.*2"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize(
    "options", [{"on_bad_audio": "skip"}, {"every_caption": True}, {"track_language_errors": True}]
)
def test_options_that_need_all_rows_are_rejected_for_streams(folder, tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        build(tmp_path, str(folder / "int16"), **options)


@pytest.mark.process
def test_no_worker_outlives_a_run_that_is_killed(folder, tmp_path, monkeypatch):
    trainer = build(tmp_path, str(folder / "int16"), per_device_train_batch_size=2, dataloader_num_workers=2)
    trainer.data_collator = name_worker
    assert_workers_end_with_their_parent(trainer.get_train_dataloader(), monkeypatch)


def test_clips_of_a_stream_with_a_loss_that_is_not_finite_are_numbered(folder, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(training_rows, "MANY_ROWS", 3)  # a stream is not advised to be streamed
    trainer = build(tmp_path, str(folder / "int16"))
    assert "--streaming" not in caplog.text
    with torch.no_grad():
        trainer.clap.audio_projection.linear2.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"on clips \[\d+, \d+, \d+, \d+\]"):
        trainer.train()


# ---- two processes ----


def train_and_report(data_dir, output, batch_size):
    """Train; with two processes, also interrupt and resume a run."""
    options = {"per_device_train_batch_size": int(batch_size), "dropout": 0.0}
    whole = build(f"{output}/whole{batch_size}", data_dir, **options)
    whole.train()
    if whole.args.world_size > 1:
        assert_same_end(cut_and_resume(f"{output}/cut", data_dir, 5, **options), whole, 5)

    weights = {name: value.tolist() for name, value in whole.model.named_parameters()}
    report = {"batches": whole.batches, "weights": weights, "losses": losses(whole)}
    Path(output, f"{batch_size}-{whole.args.process_index}.json").write_text(json.dumps(report))


@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param("int16", marks=pytest.mark.slow), "mix"])
def test_two_processes_see_the_batches_of_one_and_resume(folder, hub, tmp_path, name):
    train_and_report(str(folder / name), str(tmp_path), "4")
    run_processes(__file__, str(folder / name), str(tmp_path), "2")
    one, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("4-0", "2-0", "2-1"))

    together = [sorted(a + b) for a, b in zip(first["batches"], second["batches"], strict=True)]
    assert together == list(map(sorted, one["batches"]))
    assert first["weights"] == second["weights"]
    assert first["losses"] == pytest.approx(one["losses"], abs=2e-3)


if __name__ == "__main__":
    train_and_report(*sys.argv[1:])
    leave_process_group()
