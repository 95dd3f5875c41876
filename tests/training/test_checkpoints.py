"""Checkpoints: atomic writes, and resumption only by the same run and one process at a time."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import builders
import pytest
import torch
from crash_callbacks import KillAt, Killed
from datasets import Dataset
from memory import resident_peak
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_trainer import QUICK, arguments, best_step, build, losses, processor, with_dropout
from transformers import Trainer, TrainerCallback

from modeling_supclap import SupCLAPModel
from modeling_supclap.datasets_scripts.atomic_files import file_sha256, folder_lock
from modeling_supclap.datasets_scripts.stream import EpochBatches
from modeling_supclap.recipes.command import run_command
from modeling_supclap.recipes.train_supclap import train
from modeling_supclap.training.checkpoints import (
    RESUME_FOLDER,
    RUN_FILE,
    checkpoint_flaws,
    describe_run,
    last_checkpoint,
    put_away,
    refuse_another_run,
    uploads_checkpoints,
    write_frozen,
    write_run_file,
)
from modeling_supclap.training.lora import add_lora
from modeling_supclap.training.trainer import SupCLAPTrainer

STEPS = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "load_best_model_at_end": False}
CONSTANT = {"lr_scheduler_type": "constant", **STEPS}  # does not depend on the planned number of steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("whole")
    trainer = build(folder, rows, model=with_dropout(), max_steps=4, svr="uni-static", **STEPS)
    trainer.train()
    return trainer


@pytest.fixture
def run(whole, tmp_path):
    """Copy of a run of four steps with checkpoints 2 and 4."""
    shutil.copytree(whole.args.output_dir, tmp_path, dirs_exist_ok=True)
    return whole


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


# ---- writing ----


@pytest.mark.parametrize("crash", [Killed("between two files"), OSError("No space left on device")])
def test_an_interrupted_checkpoint_does_not_appear(tmp_path, rows, monkeypatch, crash):
    trainer = build(tmp_path, rows, max_steps=4, **STEPS)
    write = trainer._save_rng_state

    def fail_at_step_4(folder):
        if trainer.state.global_step == 4:
            raise crash
        write(folder)

    monkeypatch.setattr(trainer, "_save_rng_state", fail_at_step_4)
    with pytest.raises(type(crash)):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert checkpoint_flaws(tmp_path / "checkpoint-2") == []


def test_a_checkpoint_is_uploaded_when_it_is_whole(tmp_path, rows, monkeypatch):
    uploads = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda _, folder: uploads.append((folder, checkpoint_flaws(folder)))
    )
    trainer = build(tmp_path, rows, max_steps=4, **STEPS)
    trainer.args.push_to_hub = True
    trainer.train()
    assert uploads == [(str(tmp_path / f"checkpoint-{step}"), []) for step in (2, 4)]


def test_files_of_a_killed_run_are_removed(tmp_path, rows):
    left = tmp_path / "unfinished" / "checkpoint-2"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    build(tmp_path, rows, max_steps=2, **STEPS).train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert checkpoint_flaws(tmp_path / "checkpoint-2") == []


def test_the_best_checkpoint_is_kept_loaded_and_found_under_its_last_name(tmp_path, rows):
    options = {"num_train_epochs": 4, "save_total_limit": 1, "greater_is_better": False}  # the recall grows
    trainer = build(tmp_path, rows, **options)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_mean_recall" in entry]
    recalls = {entry["step"]: entry["eval_mean_recall"] for entry in logged}
    assert recalls[best_step(trainer)] == min(recalls.values()) == trainer.state.best_metric
    assert trainer.evaluate()["eval_mean_recall"] == pytest.approx(trainer.state.best_metric)
    best = tmp_path / f"checkpoint-{best_step(trainer)}"
    assert trainer.state.best_model_checkpoint == str(best)
    assert names(tmp_path) == [best.name]  # with a limit of 1, transformers removes the last one at the end
    trainer.save_state()
    for folder in (tmp_path, best):  # the files may be moved or published
        assert json.loads((folder / "trainer_state.json").read_text())["best_model_checkpoint"] is None
    assert trainer.state.best_model_checkpoint == str(best)

    moved = tmp_path.rename(tmp_path.with_name("on another machine"))
    for folder in (moved, moved / RESUME_FOLDER):
        resumed = build(moved, rows, **options)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.best_model_checkpoint == str(folder / best.name)
        put_away(moved)


class BreakWeights(TrainerCallback):
    """Callback that writes NaN to the weights, as a bad gradient in the last step would."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 4:
            with torch.no_grad():
                model.text_projection.linear2.weight[0, 0] = torch.nan


def test_weights_that_are_not_finite_are_never_saved(tmp_path, rows):
    trainer = build(tmp_path, rows, callbacks=[BreakWeights()], max_steps=4, **STEPS)
    with pytest.raises(FloatingPointError, match=r"step 4.*model\.text_projection\.linear2\.weight"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]
    with pytest.raises(FloatingPointError):
        trainer.save_model()
    assert not (tmp_path / "model.safetensors").exists()


# ---- frozen weights ----


def with_frozen_text(seed=0, vocab_size=None):
    config = with_dropout().config
    config.text_config.vocab_size = vocab_size or config.text_config.vocab_size
    model = builders.supclap_model(config, seed=seed)
    model.text_model.requires_grad_(False)
    return model


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_frozen_weights_are_written_once_and_checkpoints_still_load(tmp_path, rows):
    options = {
        **STEPS,
        "num_train_epochs": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eng_t2a_mean_rank",
        "greater_is_better": True,
    }
    whole = build(tmp_path / "whole", rows, model=with_frozen_text(), svr="uni-static", **options)
    frozen = {f"model.text_model.{name}": weight for name, weight in whole.clap.text_model.named_parameters()}
    whole.train()
    (file,) = (tmp_path / "whole").glob("_frozen-*.safetensors")
    assert set(load_file(file)) == set(frozen)
    (tmp_path / "whole" / "other").touch()
    assert file.stat().st_mode == (tmp_path / "whole" / "other").stat().st_mode
    for step in (2, 4, 6):
        folder = tmp_path / "whole" / f"checkpoint-{step}"
        if folder.exists():
            assert checkpoint_flaws(folder) == []
            assert not set(load_file(folder / "model-trained.safetensors")) & set(frozen)
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            weights = load_file(folder / "model-trained.safetensors") | load_file(file)
            with safe_open(file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}  # transformers loads no other
            assert index["metadata"] == {"total_size": sum(weight.nbytes for weight in weights.values())}
    best = SupCLAPModel.from_pretrained(tmp_path / "whole" / f"checkpoint-{best_step(whole)}")
    whole.save_model(str(tmp_path / "final"))
    final = load_file(tmp_path / "final" / "model.safetensors")
    assert final.keys() == best.state_dict().keys()
    for name, weight in best.state_dict().items():
        assert torch.equal(weight, final[name]), name

    with pytest.raises(Killed):
        build(
            tmp_path / "cut", rows, model=with_frozen_text(), svr="uni-static", callbacks=[KillAt(5)], **options
        ).train()
    before = next((tmp_path / "cut").glob("_frozen-*")).read_bytes()
    resumed = build(tmp_path / "cut", rows, model=with_frozen_text(seed=99), svr="uni-static", **options)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    assert [path.read_bytes() for path in (tmp_path / "cut").glob("_frozen-*")] == [before]


@pytest.fixture(scope="module")
def frozen_runs(tmp_path_factory, rows):
    """Return a folder with runs of six and of four steps, and the trainer of the first."""
    folder = tmp_path_factory.mktemp("frozen")
    for steps in (4, 6):
        trainer = build(folder / str(steps), rows, with_frozen_text(), max_steps=steps, **CONSTANT)
        trainer.train()
    return folder, trainer


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("moves", [0, 1, 2])
def test_what_only_resuming_needs_is_put_away_even_if_killed(frozen_runs, tmp_path, rows, monkeypatch, moves, links):
    folder, whole = frozen_runs
    run = shutil.copytree(folder / "4", tmp_path / "run")
    (run / "model.safetensors").write_bytes(b"final")
    moved = []

    def replace_or_die(source, target):
        if Path(source).name.startswith("checkpoint-"):
            if len(moved) == moves:
                raise Killed
            moved.append(source)
        os.rename(source, target)

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(os, "replace", replace_or_die)
        if not links:
            patch.setattr(os, "link", lambda *_: os.stat("/no such file"))
        put_away(run)
    assert len(moved) == moves
    last = last_checkpoint(run, resumes=True)
    assert Path(last).name == "checkpoint-4"
    assert checkpoint_flaws(last) == []

    told = put_away(run, limit=2)
    away = run / RESUME_FOLDER
    assert f"{away} ({size(away) / 1e6:.1f} MB)" in told
    assert {path.name for path in run.iterdir()} == {RESUME_FOLDER, "model.safetensors"}
    with pytest.raises(ValueError, match="checkpoint-4"):
        last_checkpoint(run, resumes=False)
    resumed = build(run, rows, with_frozen_text(seed=9), max_steps=6, **CONSTANT)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    put_away(run, limit=2)
    assert names(away) == ["checkpoint-4", "checkpoint-6"]
    assert [path.suffix for path in away.iterdir() if path.is_file()] == [".safetensors"]
    assert put_away(tmp_path) == ""


@pytest.mark.parametrize(("limit", "best", "steps"), [(1, None, [4]), (2, None, [2, 4]), (1, 6, [4, 6])])
def test_the_newest_checkpoints_and_the_best_are_put_away(tmp_path, limit, best, steps):
    """The newest by time: a run that resumes from step 2 writes step 4 after an earlier step 6."""
    for seconds, step in enumerate((6, 2, 4)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (seconds, seconds))
    put_away(tmp_path, limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert names(tmp_path / RESUME_FOLDER) == [f"checkpoint-{step}" for step in steps]


def test_frozen_weights_are_written_again_if_they_are_missing(tmp_path):
    weights, written = {"a": torch.ones(3), "b": torch.zeros(2)}, {}
    for step in (1, 2, 3):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        save_file({"b": weights["b"]}, checkpoint / "model.safetensors")
        written = write_frozen(checkpoint, tmp_path, weights, {"a"}, written)
        (file,) = tmp_path.glob("_frozen-*")
        assert (file.stat().st_mtime == 0) == (step == 2)
        assert written == {f"../{file.name}": file_sha256(file)}
        os.utime(file, (0, 0))
        if step == 2:
            file.unlink()


@pytest.mark.parametrize(
    ("name", "value", "uploads"),
    [
        ("WANDB_LOG_MODEL", "checkpoint", True),
        ("WANDB_LOG_MODEL", "end", False),
        ("HF_MLFLOW_LOG_ARTIFACTS", "true", True),
        ("CLEARML_LOG_MODEL", "True", True),
        ("CLEARML_LOG_MODEL", "0", False),
    ],
)
def test_trackers_that_upload_checkpoints_are_known(monkeypatch, name, value, uploads):
    assert not uploads_checkpoints()
    monkeypatch.setenv(name, value)
    assert uploads_checkpoints() == uploads


def test_a_few_frozen_weights_stay_in_the_checkpoint(tmp_path, rows):
    model = with_dropout()
    model.logit_scale.requires_grad_(False)
    build(tmp_path, rows, model, max_steps=2, **STEPS).train()
    assert not list(tmp_path.glob("_frozen-*"))
    assert "model.logit_scale" in load_file(tmp_path / "checkpoint-2" / "model.safetensors")


@pytest.mark.parametrize("flaw", ["missing", "damaged"])
def test_a_checkpoint_needs_its_frozen_weights(tmp_path, rows, flaw):
    build(tmp_path, rows, model=with_frozen_text(), max_steps=2, **STEPS).train()
    (file,) = tmp_path.glob("_frozen-*.safetensors")
    if flaw == "damaged":
        file.write_bytes(file.read_bytes()[:-200])
    else:
        file.unlink()
    assert checkpoint_flaws(tmp_path / "checkpoint-2") == [f"../{file.name} {flaw}"]
    with pytest.raises(ValueError, match=file.name):
        build(tmp_path, rows, model=with_frozen_text(), max_steps=4, **STEPS).train(resume_from_checkpoint=True)
    with pytest.raises(OSError, match=file.name):
        SupCLAPModel.from_pretrained(tmp_path / "checkpoint-2")


class ChangeFrozen(TrainerCallback):
    """Callback that changes a frozen weight without autograd."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            model.text_model.embeddings.word_embeddings.weight.data[0, 0] = 5.0


def test_frozen_weights_that_change_are_saved_again(tmp_path, rows):
    build(tmp_path, rows, model=with_frozen_text(), callbacks=[ChangeFrozen()], max_steps=4, **STEPS).train()
    assert len(list(tmp_path.glob("_frozen-*"))) == 2
    tables = [
        SupCLAPModel.from_pretrained(tmp_path / f"checkpoint-{step}").text_model.embeddings.word_embeddings.weight
        for step in (2, 4)
    ]
    assert tables[0][0, 0] != 5
    assert tables[1][0, 0] == 5


@pytest.mark.parametrize("option", ["save_only_model", "push_to_hub"])
def test_checkpoints_for_others_are_complete(tmp_path, rows, monkeypatch, option):
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda *_: None)
    trainer = build(tmp_path, rows, model=with_frozen_text(), max_steps=2, **STEPS)
    setattr(trainer.args, option, True)
    trainer.train()
    assert not list(tmp_path.glob("_frozen-*"))
    assert set(load_file(tmp_path / "checkpoint-2" / "model.safetensors")) >= set(trainer.model.state_dict())
    assert (tmp_path / "modeling_supclap.py").exists() == (option == "push_to_hub")  # the Trainer uploads it


@pytest.mark.skipif(sys.platform != "linux", reason="measures resident memory with /proc")
def test_a_save_needs_little_memory_and_few_bytes(tmp_path, rows, monkeypatch):
    trainer = build(tmp_path, rows, model=with_frozen_text(vocab_size=700_000), max_steps=4, **STEPS)
    model_bytes = sum(weight.nbytes for weight in trainer.model.state_dict().values())
    assert model_bytes > 60e6
    peaks = []
    save = trainer._save_checkpoint
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *args: peaks.append(resident_peak(save, *args)))
    trainer.train()
    for name in ("checkpoint-9", "final"):  # complete
        peaks.append(resident_peak(trainer.save_model, str(tmp_path / name)))
    assert len(peaks) == 4
    assert max(peaks) < 0.2 * model_bytes, [peak / model_bytes for peak in peaks]
    assert size(tmp_path / "checkpoint-2") < 0.05 * model_bytes
    assert size(tmp_path / "checkpoint-4") < 0.05 * model_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="measures resident memory with /proc")
def test_adapters_are_merged_for_a_save_without_a_copy_of_the_model(tmp_path, rows):
    model = add_lora(with_frozen_text(vocab_size=700_000), audio_layers=1, text_layers=1)
    trainer = build(tmp_path, rows, model=model, max_steps=1, **STEPS)
    trainer.train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    peak = resident_peak(trainer.save_model, str(tmp_path / "final"))
    assert peak < 0.2 * sum(weight.nbytes for weight in before.values())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


# ---- resuming ----


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", RUN_FILE]
)
@pytest.mark.parametrize("flaw", ["missing", "damaged"])
def test_an_incomplete_checkpoint_is_named_and_skipped(run, rows, tmp_path, caplog, file, flaw):
    path = tmp_path / "checkpoint-4" / file
    if flaw == "damaged":
        path.write_bytes(path.read_bytes()[:-200])
    else:
        path.unlink()
    assert checkpoint_flaws(tmp_path / "checkpoint-4") == [f"{file} {flaw}"]
    assert last_checkpoint(tmp_path, resumes=True) == str(tmp_path / "checkpoint-2")
    assert re.search(rf"checkpoint-4.*{file}", caplog.text)

    again = build(tmp_path, rows, model=with_dropout(), max_steps=4, svr="uni-static", **STEPS)
    with pytest.raises(ValueError, match="checkpoint-4"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_run_resumes_before_an_incomplete_checkpoint_and_replaces_it(run, rows, tmp_path):
    (tmp_path / "checkpoint-4" / RUN_FILE).unlink()
    again = build(tmp_path, rows, model=with_dropout(), max_steps=4, svr="uni-static", **STEPS)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(run)
    assert checkpoint_flaws(tmp_path / "checkpoint-4") == []


def test_a_resumed_run_keeps_its_own_checkpoint_and_not_an_earlier_one_of_a_later_step(run, rows, tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    os.utime(tmp_path / "checkpoint-9", (0, 0))
    options = {**STEPS, "save_total_limit": 1, "max_steps": 4, "svr": "uni-static"}
    build(tmp_path, rows, with_dropout(), **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert names(tmp_path) == ["checkpoint-4"]


def test_a_checkpoint_without_its_optimizer_does_not_resume(tmp_path, rows):
    build(tmp_path, rows, max_steps=2, save_only_model=True, **STEPS).train()
    assert checkpoint_flaws(tmp_path / "checkpoint-2") == [f"{RUN_FILE} missing"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_checkpoint_with_a_flipped_bit_is_damaged(run, tmp_path, file):
    path = tmp_path / "checkpoint-4" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert checkpoint_flaws(tmp_path / "checkpoint-4") == [f"{file} damaged"]
    assert last_checkpoint(tmp_path, resumes=True) == str(tmp_path / "checkpoint-2")


def test_weights_have_the_permissions_of_other_files(run, tmp_path):
    run.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "checkpoint-4", tmp_path / "final"):
        modes = {path.stat().st_mode & 0o777 for path in folder.glob("*.*")}
        assert modes == {(folder / "config.json").stat().st_mode & 0o777}


class Terminate(TrainerCallback):
    """Callback that sends SIGTERM during the second step, as a scheduler does before a kill."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # transformers requests the checkpoint in a thread


def test_sigterm_ends_a_run_with_a_checkpoint_and_a_status_of_its_own(tmp_path, rows, capsys, whole):
    options = {"enable_jit_checkpoint": True, "max_steps": 4, "svr": "uni-static", **STEPS, "save_steps": 4}
    trainer = build(tmp_path, rows, model=with_dropout(), callbacks=[Terminate()], **options)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            run_command(lambda: train(trainer))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 143
    assert "--resume_from_checkpoint last" in capsys.readouterr().err
    assert last_checkpoint(tmp_path, resumes=True) == str(tmp_path / "checkpoint-2")

    again = build(tmp_path, rows, model=with_dropout(), **options)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)


def test_a_folder_in_use_is_continued_when_asked_and_never_written_over(tmp_path, run):
    empty = tmp_path / "none"
    assert last_checkpoint(empty, resumes=False) is last_checkpoint(empty, resumes=True) is None
    assert last_checkpoint(tmp_path, resumes=True) == str(tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match="checkpoint-4"):
        last_checkpoint(tmp_path, resumes=False)

    (empty / "checkpoint-8").mkdir(parents=True)
    assert last_checkpoint(empty, resumes=False) is None
    with pytest.raises(ValueError, match=rf"checkpoint-8.*{RUN_FILE}"):
        last_checkpoint(empty, resumes=True)
    (empty / "checkpoint-8" / RUN_FILE).write_text("{}")
    assert checkpoint_flaws(empty / "checkpoint-8") == [f"{RUN_FILE} damaged"]
    (empty / "checkpoint-8" / RUN_FILE).unlink()
    (empty / "checkpoint-8" / "shard").write_text("weights")  # of a sharded model
    write_run_file(empty / "checkpoint-8", {}, {})
    with pytest.raises(ValueError, match="checkpoint-8 exists"):
        last_checkpoint(empty, resumes=False)


def test_a_run_without_a_checkpoint_does_not_resume(tmp_path, rows):
    trainer = build(tmp_path, rows, max_steps=2, **STEPS)
    with pytest.raises(ValueError, match=f"{tmp_path} contains no checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"svr": "bi-static"}, "svr was 'uni-static' and is 'bi-static'"),
        ({"loss": "reweighted", "svr": "none"}, "loss was 'infonce' and is 'reweighted'"),
        ({"languages": ["fra"]}, r"languages.*\['eng'\].*\['fra'\]"),
        ({"seed": 8}, "seed.*7.*8"),
        ({"learning_rate": 1e-4}, "learning_rate was 0.001 and is 0.0001"),
        (
            {"weight_decay": 0.5, "adam_beta2": 0.98},
            "adam_beta2 was 0.999 and is 0.98; weight_decay was 0.0 and is 0.5",
        ),
        ({"lr_scheduler_type": "constant"}, "lr_scheduler_type was 'linear' and is 'constant'"),
        ({"warmup_steps": 1}, "warmup_steps was 0 and is 1"),
        ({"max_grad_norm": 2.0}, "max_grad_norm was 1.0 and is 2.0"),
        ({"optim": "sgd"}, "optim was 'adamw_torch.*' and is 'sgd'"),
        ({"per_device_train_batch_size": 2}, "clips_per_step was 4 and is 2"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1 and is 2"),
        ({"dataloader_drop_last": False}, "dataloader_drop_last was True and is False"),
        ({"bf16": True}, "bf16 was False and is True"),
        ({"accelerator_config": {"even_batches": False}}, "batching.even_batches was True and is False"),
        ({"max_steps": 3}, "max_steps was 4 and is 3"),
    ],
)
def test_changed_settings_are_named(run, rows, tmp_path, options, difference):
    options = {"svr": "uni-static", "max_steps": 6, **options}
    other = build(tmp_path, rows, model=with_dropout(), **STEPS, **options)
    with pytest.raises(ValueError, match=f"checkpoint-4.*{difference}"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_another_initial_temperature_is_named(run, rows, tmp_path):
    """The weights of the checkpoint would replace it, and the saved configuration would still contain it."""
    other = build(tmp_path, rows, model=with_dropout(), max_steps=6, svr="uni-static", **STEPS)
    other.clap.config.temperature, other.clap.config.logit_bias = 0.5, -9.0
    with pytest.raises(ValueError, match=r"initial temperature was 0\.07 and is 0\.5") as refused:
        other.train(resume_from_checkpoint=True)
    assert "initial logit_bias was None and is -9.0" in str(refused.value)


@pytest.mark.parametrize("known", ["before", "now"])
def test_data_that_only_one_run_recorded_are_not_compared(run, rows, tmp_path, known):
    other = build(tmp_path, rows, model=with_dropout(), max_steps=6, svr="uni-static", **STEPS)
    if known == "now":
        other.args.training_data = {"dataset": "esc50"}
    else:
        path = tmp_path / "checkpoint-4" / RUN_FILE
        written = json.loads(path.read_text())
        written["settings"]["training_data"] = {"dataset": "esc50"}
        path.write_text(json.dumps(written))
    refuse_another_run(tmp_path / "checkpoint-4", describe_run(other.args, other.module))


def test_changes_of_nested_settings_and_of_removed_ones_are_named(run, rows, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint-4" / RUN_FILE
    written = json.loads(path.read_text())
    written["settings"] |= {"stream": {"workers": 3, "batch_size": 4}, "gone": 7}
    path.write_text(json.dumps(written))
    other = build(tmp_path, rows, model=with_dropout(), max_steps=6, svr="uni-static", **STEPS)
    batches = EpochBatches([{}] * 8, batch_size=4, workers=2)
    with pytest.raises(ValueError, match=r"gone was 7 and is None") as refused:
        refuse_another_run(tmp_path / "checkpoint-4", describe_run(other.args, other.module, None, batches))
    assert "stream.workers was 3 and is 2" in str(refused.value)
    with pytest.raises(
        ValueError, match=r"stream was None and is \{'rows of a process': 8, 'batch_size': 4, 'workers': 2"
    ):
        refuse_another_run(tmp_path / "checkpoint-2", describe_run(other.args, other.module, None, batches))
    monkeypatch.setattr(type(other.args), "world_size", 2)
    with pytest.raises(ValueError, match="settings: clips_per_step was 4 and is 8; resume"):
        refuse_another_run(tmp_path / "checkpoint-2", describe_run(other.args, other.module))
    assert "batch_size" not in str(refused.value)


def without(rows, number):
    return [row for row in rows if row is not rows[number]]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda rows: without(rows, 3), "12 training rows and are 11"),
        (lambda rows: [*rows[1:], rows[0]], "order of the 12 training rows"),
        (lambda rows: [{**rows[0], "captions": {"eng": ["the rain"]}}, *rows[1:]], "captions.*12 training rows"),
    ],
)
def test_changed_training_rows_are_refused(run, rows, tmp_path, change, difference):
    options = {"model": with_dropout(), "max_steps": 6, "svr": "uni-static", **STEPS}
    with pytest.raises(ValueError, match=f"checkpoint-4.*{difference}"):
        build(tmp_path, change(rows), **options).train(resume_from_checkpoint=True)

    moved = tmp_path / "elsewhere"  # the same rows in another folder, and as a dataset
    moved.mkdir()
    copies = []
    for row in rows:
        shutil.copy(row["audio_path"], moved)
        copies.append({**row, "audio_path": str(moved / Path(row["audio_path"]).name)})
    again = SupCLAPTrainer(
        with_dropout(),
        arguments(tmp_path, max_steps=6, svr="uni-static", **STEPS),
        Dataset.from_list(copies),
        processing_class=processor(),
    )
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6


@pytest.mark.parametrize("change", ["rows", "metric", "nothing"])
def test_a_best_score_on_other_validation_rows_is_forgotten(tmp_path, rows, caplog, change):
    """A best score of 9 stands for one that is easy to reach among few clips, and cannot be reached among more."""
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    options = {"num_train_epochs": 2, "save_total_limit": None, **steps}
    first = build(tmp_path, rows, callbacks=[KillAt(4)], **options)
    with pytest.raises(Killed):
        first.train()
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    run_file = tmp_path / "checkpoint-2" / RUN_FILE
    state.write_text(json.dumps({**json.loads(state.read_text()), "best_metric": 9.0}))
    written = json.loads(run_file.read_text())
    written["sha256"][state.name] = file_sha256(state)
    run_file.write_text(json.dumps(written))

    metric = {"metric_for_best_model": "eng_t2a_R@5"} if change == "metric" else {}
    evaluation = rows[:6] if change == "rows" else rows[:8]
    args = arguments(tmp_path, **options, **metric)
    resumed = SupCLAPTrainer(builders.supclap_model(), args, rows, evaluation, processor())
    resumed.train(resume_from_checkpoint=True)
    assert ("forgotten" in caplog.text) == (change != "nothing")
    assert (resumed.state.best_metric == 9) == (change == "nothing")
    assert resumed.state.best_model_checkpoint.endswith("checkpoint-2") == (change == "nothing")


def test_the_values_of_ones_own_optimizer_are_compared(tmp_path, rows):
    def build_with(make, **values):
        model = builders.supclap_model()
        own = make(model.parameters(), **values)
        args = arguments(tmp_path, max_steps=4, **STEPS)
        return SupCLAPTrainer(model, args, rows, processing_class=processor(), optimizers=(own, None))

    build_with(torch.optim.SGD, lr=0.1).train()
    with pytest.raises(ValueError, match=r"optimizer\.lr was 0\.1 and is 0\.01"):
        build_with(torch.optim.SGD, lr=0.01).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"optimizer\.class was 'SGD' and is 'Adam'"):
        build_with(torch.optim.Adam, lr=0.1).train(resume_from_checkpoint=True)
    build_with(torch.optim.SGD, lr=0.1).train(resume_from_checkpoint=True)


def test_the_checkpoint_of_the_arguments_is_used(run, rows, tmp_path):
    options = {"model": with_dropout(), "max_steps": 6, "svr": "uni-static", **STEPS}
    for number, name in enumerate(("checkpoint-2", "last")):
        folder = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name} {number}"))
        named = name if name == "last" else str(folder / name)
        resumed = build(folder, rows, resume_from_checkpoint=named, **{**options, "model": with_dropout()})
        resumed.train()
        assert losses(resumed)[:2] == losses(run)[:2]
        assert resumed.state.global_step == 6
    started = build(tmp_path / "new", rows, resume_from_checkpoint="last", **options)
    started.train()
    assert started.state.global_step == 6


@pytest.mark.parametrize("flaw", [None, RUN_FILE])
def test_a_second_run_in_a_folder_is_refused(run, rows, tmp_path, flaw):
    shutil.rmtree(tmp_path / "checkpoint-2")
    if flaw is not None:
        (tmp_path / "checkpoint-4" / flaw).unlink()
    second = build(tmp_path, rows, model=with_dropout(), max_steps=4, svr="uni-static", **STEPS)
    with pytest.raises(ValueError, match=r"checkpoint-4.*resume_from_checkpoint=True"):
        second.train()
    with pytest.raises(ValueError, match="checkpoint-4"):
        second.train(resume_from_checkpoint=False)


def test_another_trained_part_is_named(run, rows, tmp_path):
    frozen = with_dropout()
    frozen.audio_model.requires_grad_(False)
    count = len(list(frozen.audio_model.parameters()))
    other = build(tmp_path, rows, model=frozen, max_steps=6, svr="uni-static", **STEPS)
    first = r"such as model\.audio_model\.blocks\.0\.attn\.proj\.bias"  # by name
    with pytest.raises(ValueError, match=f"{count} parameters are no longer trained, {first}"):
        other.train(resume_from_checkpoint=True)
    path = tmp_path / "checkpoint-4" / RUN_FILE
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "trainable": describe_run(other.args, other.module)["trainable"]})
    )
    with pytest.raises(ValueError, match=f"{count} parameters are newly trained, {first}"):
        refuse_another_run(path.parent, describe_run(run.args, run.module))


def test_harmless_settings_may_change(run, rows, tmp_path):
    options = {"max_steps": 6, "svr": "uni-static", "logging_steps": 1.0, "track_drift": False, **STEPS}
    longer = build(tmp_path, rows, model=with_dropout(), **options)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 6
    assert losses(longer)[:4] == losses(run)
    assert json.loads((tmp_path / "checkpoint-6" / RUN_FILE).read_text())["settings"]["svr"] == "uni-static"


def test_two_runs_in_one_folder_are_an_error(tmp_path, rows):
    trainer = build(tmp_path / "run", rows, max_steps=1, **QUICK)
    another = ThreadPoolExecutor()  # a thread blocks the lock like another process
    with folder_lock(tmp_path / "run"), pytest.raises(RuntimeError, match=r"\brun\b"):
        another.submit(trainer.train).result()

    trainer.train()
    assert not (tmp_path / "run.lock").exists()
    with folder_lock(tmp_path / "run"):  # the recipe holds the lock until the model card is written
        trainer.train()
        assert (tmp_path / "run.lock").exists()
