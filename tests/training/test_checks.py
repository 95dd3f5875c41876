"""What a trainer refuses before it reads a recording or changes the model."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import builders
import pandas as pd
import pytest
import torch
from datasets import Dataset
from processes import run_processes
from recordings import tone_rows
from test_temporal_training import build as build_temporal
from test_temporal_training import items_of
from test_trainer import QUICK, arguments, build, processor
from transformers import TrainingArguments

from modeling_supclap import SupCLAPModel
from modeling_supclap.datasets_scripts.mixture import _DatasetSplit
from modeling_supclap.datasets_scripts.schema import EXPECTED_COUNT
from modeling_supclap.datasets_scripts.stream import RowStream
from modeling_supclap.training.checks import refuse_unsupported
from modeling_supclap.training.distributed import leave_process_group
from modeling_supclap.training.lora import train_last_layers
from modeling_supclap.training.rows import UsableRows
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments


def train_on(rows, evaluation=None, front_end=None, **options):
    """Return a function from a folder to a trainer."""
    return lambda folder: SupCLAPTrainer(
        builders.supclap_model(), arguments(folder, **options), rows, evaluation, front_end or processor()
    )


def trainer_of(model: Any, args: Any) -> SupCLAPTrainer:
    """Build a trainer with any kind of model and arguments."""
    return SupCLAPTrainer(model, args, MISSING, None, processor())


def frozen_model() -> SupCLAPModel:
    """Build a model without trainable weights."""
    return builders.supclap_model().requires_grad_(False)


def two_gpus(folder):
    """Build a trainer in a process that has two GPUs."""
    args = arguments(folder)
    args._n_gpu = 2
    return SupCLAPTrainer(builders.supclap_model(), args, MISSING, None, processor())


STREAM = Dataset.from_list([{"clip_id": "a"}]).to_iterable_dataset()
MISSING = [{"clip_id": str(number), "audio_path": "missing.wav", "captions": {"eng": ["a"]}} for number in range(9)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: SupCLAPTrainer(builders.supclap_model(), arguments(folder)), "processing_class is NoneType"),
        (
            train_on(MISSING, front_end=builders.bert_tokenizer()),
            "processing_class is BertTokenizer; .*SupCLAPProcessor",
        ),
        (train_on(pd.DataFrame(MISSING), MISSING), "DataFrame.*from_pandas"),
        (
            train_on(MISSING, front_end=builders.pair("whisper")[1], features_on_device=True, on_bad_audio="skip"),
            "features_on_device.*WhisperFeatureExtractor",
        ),
        (train_on(MISSING, loss="siglip", on_bad_audio="skip"), "siglip.*--logit_bias"),
        (
            train_on(MISSING, {"few": MISSING}, on_bad_audio="skip"),
            "metric_for_best_model is 'mean_recall'.*'few_mean_recall'",
        ),
        (train_on(STREAM), "IterableDataset"),
        (train_on(MISSING, {"few": STREAM}), "IterableDataset"),
        (train_on(dict.fromkeys("abcdefg", MISSING)), r"\['a', 'b', 'c', 'd', 'e'\].*mix"),
        (lambda folder: two_gpus(folder), "one process sees 2 GPUs"),
        (lambda folder: trainer_of(builders.clap_model(), arguments(folder)), "ClapModel.*supclap_from_clap"),
        (
            lambda folder: trainer_of(builders.supclap_model(), TrainingArguments(str(folder), use_cpu=True)),
            "TrainingArguments.*SupCLAPTrainingArguments",
        ),
    ],
)
def test_invalid_combinations_are_rejected_before_the_recordings_are_read(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "run")
    assert not Path(tmp_path, "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negatives_per_clip": 1}, "negatives_per_clip.*supclap mine"),
        ({"matryoshka_widths": [8, 16]}, r"matryoshka_widths has \[16\].*below projection_dim 16"),
    ],
)
@pytest.mark.parametrize(
    "rows", [MISSING, Dataset.from_list(MISSING), RowStream(_DatasetSplit(Dataset.from_list(MISSING)))]
)
def test_negatives_and_widths_that_do_not_exist_are_refused(tmp_path, rows, options, message):
    with pytest.raises(ValueError, match=message):
        train_on(rows, **options)(tmp_path)


def test_options_that_nothing_uses_are_not_refused(tmp_path, rows):
    """Without training rows, no negatives are missing; your own objective needs no bias."""
    args = arguments(tmp_path, negatives_per_clip=1)
    SupCLAPTrainer(builders.supclap_model(), args, None, rows[:8], processor())
    args = arguments(tmp_path, loss="siglip", svr="none", **QUICK)
    SupCLAPTrainer(builders.supclap_model(), args, rows, None, processor(), objective=lambda *embeds, **inputs: 0)


def test_smaller_batches_of_negatives_are_named_once(tmp_path, rows, monkeypatch):
    args = arguments(tmp_path, gradient_accumulation_steps=2)
    parts = builders.supclap_model(), args, processor(), None, rows, rows
    with pytest.warns(UserWarning, match="fewer negatives"):
        refuse_unsupported(*parts)
    monkeypatch.setattr(SupCLAPTrainingArguments, "process_index", 1)
    with warnings.catch_warnings(action="error"):
        refuse_unsupported(*parts)


def test_a_frozen_model_is_evaluated_and_trains_an_objective_with_weights(tmp_path, rows):
    trainer = SupCLAPTrainer(frozen_model(), arguments(tmp_path, **QUICK), None, rows, processor())
    assert trainer.evaluate()["eval_mean_recall"] > 0
    with pytest.raises(ValueError, match="all weights of the model are frozen; set requires_grad"):
        build(tmp_path / "frozen", rows, frozen_model(), **QUICK).train()
    build(tmp_path, rows, frozen_model(), svr="bi-dynamic", **QUICK).train()


def test_batches_of_one_process_for_all_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dispatch_batches"):
        train_on(MISSING, accelerator_config={"dispatch_batches": True})(tmp_path)


@pytest.mark.parametrize("wrap", [UsableRows, lambda rows: rows])
@pytest.mark.parametrize("option", [{"on_bad_audio": "skip"}, {"hard_negatives_per_batch": 2}])
def test_a_stream_refuses_options_that_need_all_rows(tmp_path, rows, wrap, option):
    stream = RowStream(_DatasetSplit(Dataset.from_list(rows)))
    with pytest.raises(ValueError, match=r"streaming.*on_bad_audio='skip'"):
        train_on(wrap(stream), **option, **QUICK)(tmp_path)


def test_hard_negatives_refuse_rows_with_expected_counts(tmp_path, rows):
    counted = Dataset.from_list(rows).add_column(EXPECTED_COUNT, [1.0] * len(rows))
    with pytest.raises(ValueError, match="hard_negatives_per_batch for rows with expected counts"):
        train_on(counted, hard_negatives_per_batch=2, **QUICK)(tmp_path)


def test_fsdp_refuses_language_errors_and_hard_negatives(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(SupCLAPTrainingArguments, "sharding", "fsdp")
    with pytest.raises(ValueError, match="hard_negatives_per_batch"):
        build(tmp_path, rows, hard_negatives_per_batch=2)
    with pytest.raises(ValueError, match="track_language_errors"):
        build(tmp_path, rows, languages=["eng", "fra"], track_language_errors=True)


# ---- the metric of the best checkpoint ----


def with_datasets(rows):
    return Dataset.from_list([{**row, "dataset": "ab"[number % 2]} for number, row in enumerate(rows)])


@pytest.mark.parametrize("metric", ["loss", "recall_at_10", "c_mean_recall", "few_mean_recall", "deu_t2a_R@1"])
def test_a_metric_of_no_evaluation_is_refused_before_the_first_step(tmp_path, rows, metric):
    trainer = build(tmp_path, rows, metric_for_best_model=metric)
    with pytest.raises(ValueError, match=f"'{metric}'.*{'contrastive loss' if metric == 'loss' else ''}.*mean_recall"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer.compute_metrics = lambda prediction: {metric: 1.0}
    trainer.train()
    assert trainer.state.best_metric == 1


def test_every_logged_metric_is_accepted(tmp_path, rows):
    options = {"languages": ["eng", "fra"], "max_steps": 1, "eval_strategy": "no"}
    args = arguments(tmp_path, **{**QUICK, **options})
    trainer = SupCLAPTrainer(builders.supclap_model(), args, with_datasets(rows), None, processor())
    trainer.eval_rows = {"few": trainer.train_rows}
    names = trainer.evaluate({"few": trainer.train_rows}).keys() - {"epoch"}
    names = {name for name in names if not name.endswith(("runtime", "_per_second", "preparation_time"))}
    assert {"eval_few_mean_recall", "eval_few_a_MRV", "eval_few_b_fra_t2a_R@5"} <= names
    trainer.args.eval_strategy = "epoch"
    for name in names:
        trainer.args.metric_for_best_model = name
        trainer._refuse_unknown_metric()


def test_metrics_of_pairs_of_sounds_are_known(tmp_path):
    items = items_of(tone_rows(tmp_path, count=12))
    for stage in "ab":
        trainer = build_temporal(tmp_path / stage, items, stage=stage)
        measured = {name.removeprefix("eval_") for name in trainer.evaluate() if "accuracy" in name}
        assert measured == set(trainer._metric_names())


# ---- weights ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_train_in_float32(tmp_path, rows, caplog, dtype):
    frozen = builders.supclap_model().to(dtype).requires_grad_(False)
    frozen.logit_scale = torch.nn.Parameter(frozen.logit_scale.float())
    build(tmp_path, rows, frozen, **QUICK)
    # small updates are lost in trained weights only
    assert frozen.text_projection.linear1.weight.dtype == dtype

    model = builders.supclap_model().to(dtype)
    trainer = build(tmp_path, rows, model, learning_rate=1e-5, max_steps=4, **QUICK)
    assert re.search(f"{dtype}.*keep_weight_dtype", caplog.text)
    assert model.dtype == torch.float32
    before = model.logit_scale.item()
    trainer.train()
    assert model.logit_scale.item() != before

    kept, quantized = builders.supclap_model().to(dtype), builders.supclap_model().to(dtype)
    quantized.is_quantized = True
    build(tmp_path, rows, kept, keep_weight_dtype=True, **QUICK)
    build(tmp_path, rows, quantized, **QUICK)
    assert kept.dtype == quantized.dtype == dtype


def with_idle_weight():
    model = builders.supclap_model()
    model.idle = torch.nn.Parameter(torch.zeros(2))
    return model


def train_idle(folder, report):
    """Train two steps with an idle weight, first with and then without the search for such weights."""
    Path(folder, "tones").mkdir(exist_ok=True)
    rows = tone_rows(Path(folder, "tones"), count=12)
    messages = []
    for finds in (True, False):
        trainer = build(
            f"{folder}/{finds}", rows, with_idle_weight(), max_steps=2, ddp_find_unused_parameters=finds, **QUICK
        )
        try:
            trainer.train()
            messages.append("")
        except ValueError as error:
            messages.append(f"step {trainer.state.global_step}: {error}")
    if trainer.is_world_process_zero():
        Path(report).write_text("\n".join(messages))


@pytest.mark.process
def test_idle_weights_are_named_in_the_first_step_of_several_processes(tmp_path):
    report = tmp_path / "report.txt"
    run_processes(__file__, str(tmp_path), str(report))
    assert re.fullmatch(r"\nstep 0: 1 trainable.*model\.idle;.*ddp_find_unused_parameters.*", report.read_text())
    (tmp_path / "alone").mkdir()
    train_idle(str(tmp_path / "alone"), str(report))
    assert report.read_text() == "\n"  # a single process does not wait for them, and only warns


def test_idle_weights_of_a_single_process_are_a_warning(tmp_path, rows):
    trainer = build(tmp_path, rows, with_idle_weight(), max_steps=1, **QUICK)
    with pytest.warns(UserWarning, match=r"1 trainable.*no gradient.*model\.idle"):
        trainer.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*no gradient.*")
        build(tmp_path / "all", rows, max_steps=1, **QUICK).train()


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_reentrant_checkpoints_behind_frozen_blocks_are_refused(tmp_path, rows, options):
    model = builders.supclap_model()
    train_last_layers(model, 1, 1)
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
    trainer = build(tmp_path, rows, model, max_steps=1, **checkpointing, **QUICK)
    if options["use_reentrant"]:
        with pytest.raises(ValueError, match=r"no gradient.*blocks\.1.*use_reentrant"):
            trainer.train()
    else:
        trainer.train()


if __name__ == "__main__":
    train_idle(*sys.argv[1:])
    leave_process_group()
