"""Training on several languages at once: every scheme end to end, resumed, and over two processes."""

import json
import sys
from pathlib import Path

import builders
import pytest
from killing import KillAt, Killed
from processes import assert_same_training, run_processes
from recordings import tone_rows
from test_trainer import arguments, losses, processor, with_dropout

from modeling_supclap.training.distributed import leave_process_group
from modeling_supclap.training.trainer import SupCLAPTrainer

SCHEMES = [("infonce", "bi-static"), ("kcl", "bi-dynamic"), ("cacl", "bi-static")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return tone_rows(tmp_path_factory.mktemp("tones"), count=12)


def build(folder, rows, model=None, callbacks=None, **kwargs):
    args = arguments(folder, **{"languages": ["eng", "fra"], **kwargs})
    return SupCLAPTrainer(
        builders.supclap_model() if model is None else model,
        args,
        train_dataset=rows,
        eval_dataset=rows[:8],
        processing_class=processor(),
        callbacks=callbacks,
    )


QUICK = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


@pytest.mark.parametrize(("loss", "svr"), SCHEMES)
def test_it_learns_in_both_languages(tmp_path, rows, loss, svr):
    trainer = build(tmp_path, rows, loss=loss, svr=svr, num_train_epochs=60, learning_rate=3e-3, **QUICK)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for language in ("eng", "fra"):
        assert after[f"eval_{language}_t2a_R@1"] > before[f"eval_{language}_t2a_R@1"] + 0.2


def test_agreement_of_the_languages_is_measured(tmp_path, rows):
    same = [{**row, "captions": {"eng": row["captions"]["eng"], "fra": row["captions"]["eng"]}} for row in rows]
    assert build(tmp_path / "same", same).evaluate()["eval_MRV"] == 0
    assert build(tmp_path / "other", rows).evaluate()["eval_MRV"] > 0


@pytest.mark.parametrize(("loss", "svr"), SCHEMES)
def test_a_killed_run_resumes_bit_for_bit(tmp_path, rows, loss, svr):
    steps = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    options = {"loss": loss, "svr": svr, "num_train_epochs": 3, **steps}
    whole = build(tmp_path / "whole", rows, model=with_dropout(), **options)
    whole.train()
    with pytest.raises(Killed):
        build(tmp_path / "cut", rows, model=with_dropout(), callbacks=[KillAt(5)], **options).train()
    resumed = build(tmp_path / "cut", rows, model=builders.supclap_model(with_dropout().config, seed=99), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert losses(resumed) == losses(whole)


# ---- several processes ----


def train_and_report(folder, report, batch):
    Path(folder, "tones").mkdir(exist_ok=True)
    rows = tone_rows(Path(folder, "tones"), count=32)
    content = {}
    for loss, svr in SCHEMES:
        options = {"loss": loss, "svr": svr, "per_device_train_batch_size": int(batch), "max_steps": 2, **QUICK}
        trainer = build(f"{folder}/{loss}{batch}", rows, positives="captions", **options)
        trainer.model.double()  # Adam turns the rounding noise of a zero gradient into a step
        trainer.train()
        content["world_size"] = trainer.args.world_size
        content[loss] = {name: value.tolist() for name, value in trainer.model.named_parameters()}
    if trainer.is_world_process_zero():
        Path(report).write_text(json.dumps(content))


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_train_like_one(tmp_path, count):
    train_and_report(str(tmp_path), str(tmp_path / "one.json"), "32")
    run_processes(__file__, str(tmp_path), str(tmp_path / "many.json"), str(32 // count), count=count)
    assert_same_training(tmp_path / "one.json", tmp_path / "many.json", count)


if __name__ == "__main__":
    train_and_report(*sys.argv[1:])
    leave_process_group()
