"""Callbacks: logged values compared with loops and known times, and no effect on the training."""

import json
import math
import pickle
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import builders
import numpy as np
import pytest
import reference
import torch
from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from processes import run_processes
from recordings import tone_rows
from test_trainer import QUICK, arguments, best_step, build, processor, with_dropout
from torch import distributed, nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from modeling_supclap import SupCLAPModel
from modeling_supclap.datasets_scripts import progress
from modeling_supclap.losses import DynamicRadius, StaticRadius, info_nce
from modeling_supclap.losses.multilingual import weight_error_term
from modeling_supclap.training import callbacks
from modeling_supclap.training.callbacks import (
    Averages,
    DriftCallback,
    EpochCallback,
    LineCallback,
    SigtermCallback,
    StartCallback,
    SupCLAPProgressCallback,
    ThroughputCallback,
)
from modeling_supclap.training.distributed import gather, leave_process_group
from modeling_supclap.training.drift import drift_statistics
from modeling_supclap.training.objectives import ContrastiveObjective, SupportVectorRegularizer
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments

# ---- averages, epoch, throughput, progress ----


def test_averages_are_means_since_the_last_log():
    averages = Averages()
    averages.add({"loss": torch.tensor(1.0), "radius": 0.5})
    averages.add({"loss": torch.tensor(4.0)})
    assert averages.drain() == {"loss": 2.5, "radius": 0.5}
    assert averages.drain() == {}


def test_averages_without_a_log_take_no_memory():
    averages = Averages()
    for step in range(200):
        averages.add({"loss": torch.tensor(float(step)), "radius": step})
    assert len(pickle.dumps(averages)) < 1000
    assert averages.drain() == {"loss": 99.5, "radius": 99.5}


@pytest.mark.parametrize(("position", "epoch"), [(None, 0), (0.0, 0), (2.0, 2), (2.6, 2)])
def test_the_collator_receives_whole_epochs(position, epoch):
    told = []
    callback = EpochCallback(lambda: None, [SimpleNamespace(set_epoch=told.append)])
    callback.on_epoch_begin(None, SimpleNamespace(epoch=position), None)
    assert told == [epoch]


def test_throughput_counts_the_global_batch_and_no_evaluation(monkeypatch):
    clock = iter([10.0, 12.0, 50.0, 54.0])
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(clock))
    averages = Averages()
    callback = ThroughputCallback(averages)
    args = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=2, world_size=3)
    callback.on_train_begin(args, TrainerState(), None)  # at 10 s
    callback.on_step_end(args, None, None)  # 2 s
    callback.on_evaluate(args, None, None)  # at 50 s
    callback.on_step_end(args, None, None)  # 4 s
    assert averages.drain()["seconds_per_clip"] == pytest.approx(3 / 24)
    assert callback.earlier_seconds == 0


def test_the_seconds_of_a_resumed_run_include_those_before():
    callback, state = ThroughputCallback(Averages()), TrainerState()
    state.log_history = [{"process_seconds": 5.0}, {"loss": 1.0}, {"process_seconds": 70.0}, {"loss": 1.0}]
    callback.on_train_begin(None, state, None)
    assert 70 <= callback.process_seconds < 71


class _Bar:
    def set_postfix_str(self, text, refresh):
        assert not refresh  # with the next step
        print(text)

    def write(self, line):
        print(line)


class Zero(torch.nn.Module):
    """Objective that is always 0."""

    def forward(self, audio_embeds, *args, **kwargs):
        return 0 * audio_embeds.sum(), {}


@pytest.mark.parametrize(
    ("options", "objective", "chance"),
    [({}, None, 2 * math.log(4)), ({"svr": "bi-static"}, None, None), ({}, Zero(), None)],
)
def test_the_first_loss_is_printed_with_that_of_random_embeddings(tmp_path, capsys, rows, options, objective, chance):
    args = arguments(tmp_path, max_steps=2, **QUICK, **options)
    SupCLAPTrainer(builders.supclap_model(), args, rows, None, processor(), objective).train()
    _, first, second = capsys.readouterr().out.splitlines()
    assert (f"random embeddings: loss {chance:.3f}" in first) if chance else ("random" not in first)
    assert "random" not in second


@pytest.mark.parametrize(
    ("rate", "printed"), [(0.042, "0.042"), (0.42, "0.42"), (4.2, "4.2"), (9.96, "10"), (98.7, "99"), (1234.5, "1234")]
)
def test_slow_steps_have_a_rate(capsys, rate, printed):
    state = SimpleNamespace(is_world_process_zero=True, global_step=1, max_steps=2)
    LineCallback().on_log(None, state, None, logs={"loss": 1.0, "clips_per_second": rate})
    assert capsys.readouterr().out == f"step 1 of 2: loss 1.000, {printed} clips/s\n"


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({}, "training: 1 process, 6 clips in a batch, 50 steps, cpu, float32\n"),
        ({"gradient_accumulation_steps": 2}, "training: 1 process, 6 clips in a batch, 50 steps of 2 batches, cpu, "),
        ({"world_size": 2, "bf16": True}, "training: 2 processes, 12 clips in a batch, 50 steps, cpu, bf16\n"),
        ({"world_size": 2, "fp16": True}, "training: 2 processes, 12 clips in a batch, 50 steps, cpu, fp16\n"),
    ],
)
def test_a_run_starts_with_its_size(monkeypatch, capsys, caplog, options, printed):
    alone = {"world_size": 1, "gradient_accumulation_steps": 1, "bf16": False, "fp16": False}
    args = SimpleNamespace(train_batch_size=6, device=torch.device("cpu"), **{**alone, **options})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    StartCallback().on_train_begin(args, SimpleNamespace(is_world_process_zero=False, max_steps=50), None)
    assert capsys.readouterr().out == caplog.text == ""
    StartCallback().on_train_begin(args, SimpleNamespace(is_world_process_zero=True, max_steps=50), None)
    assert capsys.readouterr().out.startswith(printed)
    assert ("torchrun" in caplog.text) == ("world_size" not in options)


def test_a_launcher_that_starts_fewer_processes_is_reported(tmp_path, monkeypatch, caplog):
    """With the environment that `accelerate launch --cpu` sets for one and for two processes."""
    state = SimpleNamespace(is_world_process_zero=True, max_steps=50)
    args = SupCLAPTrainingArguments(str(tmp_path), use_cpu=True)
    told = []
    for count in (1, 2):
        words = ["--cpu", "--num_processes", str(count), "--num_machines", "1", "--mixed_precision", "no"]
        launched = launch.launch_command_parser().parse_args([*words, "--dynamo_backend", "no", "train.py"])
        launch._validate_launch_command(launched)
        _, environment = prepare_simple_launcher_cmd_env(launched)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name in environment:
                monkeypatch.setenv(name, environment[name])
        caplog.clear()
        StartCallback().on_train_begin(args, state, None)
        told.append(caplog.text)
    assert told[0] == ""
    assert "torchrun" in told[1]
    monkeypatch.setenv("WORLD_SIZE", "1")  # of a launcher that was asked for one
    caplog.clear()
    StartCallback().on_train_begin(args, state, None)
    assert caplog.text == ""


@pytest.mark.parametrize(("kind", "head"), [(SupCLAPProgressCallback, ""), (LineCallback, "step 10 of 200: ")])
def test_progress_prints_one_line_per_log_and_evaluation(capsys, kind, head):
    callback = kind()
    callback.training_bar = _Bar()
    args = SimpleNamespace(metric_for_best_model="mean_recall", greater_is_better=True)
    state = SimpleNamespace(is_world_process_zero=True, epoch=2.0, best_metric=None, global_step=10, max_steps=200)
    state.log_history = []
    callback.on_log(args, state, None, logs={"loss": 0.5, "clips_per_second": 0.0426})
    callback.on_log(args, state, None, logs={"loss": 1.23456, "clips_per_second": 98.7})
    callback.on_log(args, state, None, logs={"eval_mean_recall": 0.25})
    callback.on_evaluate(args, state, None, metrics={"eval_mean_recall": 0.25})
    state.best_metric = 0.5
    callback.on_evaluate(args, state, None, metrics={"eval_mean_recall": 0.25})
    lower = SimpleNamespace(metric_for_best_model="MRV", greater_is_better=False)
    callback.on_evaluate(lower, state, None, metrics={"eval_MRV": 0.75, "eval_MRV_chance": 2.0})
    tested = SimpleNamespace(metric_for_best_model=None, greater_is_better=True, selection_split="test")
    callback.on_evaluate(tested, state, None, metrics={"eval_mean_recall": 0.125})
    for metric in (None, "eval_mean_recall"):
        either = SimpleNamespace(metric_for_best_model=metric, greater_is_better=True)
        callback.on_evaluate(either, state, None, metrics={"eval_mean_recall": 0.125})
    state.log_history = [{"eval_mean_recall": 0.5}, {"loss": 0.5}, {"eval_mean_recall": 0.25}]
    for score in (0.5, 0.625):  # the state has the best score of earlier evaluations
        state.log_history.append({"eval_mean_recall": score})
        callback.on_evaluate(args, state, None, metrics={"eval_mean_recall": score})
    assert capsys.readouterr().out.splitlines() == [
        f"{head}loss 0.500, 0.043 clips/s",
        f"{head}loss 1.235, 99 clips/s",
        "epoch 2: validation mean_recall 0.250 (best 0.250)",
        "epoch 2: validation mean_recall 0.250 (best 0.500)",
        "epoch 2: validation MRV 0.750 (best 0.500, chance 2.000)",
        "epoch 2: test mean_recall 0.125 (best 0.500)",
        *["epoch 2: validation mean_recall 0.125 (best 0.500)"] * 2,
        "epoch 2: validation mean_recall 0.500 (best 0.500 in 2 equal evaluations, of which the last counts)",
        "epoch 2: validation mean_recall 0.625 (best 0.625)",
    ]


def test_other_processes_print_nothing(capsys):
    state = SimpleNamespace(is_world_process_zero=False, global_step=10, max_steps=200, epoch=1.0, best_metric=None)
    state.log_history = []
    args = SimpleNamespace(metric_for_best_model="mean_recall", greater_is_better=True)
    for callback in (LineCallback(), SupCLAPProgressCallback()):
        callback.on_log(args, state, None, logs={"loss": 1.23456, "clips_per_second": 98.7})
        callback.on_evaluate(args, state, None, metrics={"eval_mean_recall": 0.5})
    LineCallback().on_prediction_step(args, state, None, eval_dataloader=[1, 2])
    assert capsys.readouterr() == ("", "")


def test_each_long_evaluation_has_its_own_progress(monkeypatch, capsys):
    """With the number of batches, unless the rows are a stream."""
    made, callback, state = [], LineCallback(), SimpleNamespace(is_world_process_zero=True)
    monkeypatch.setattr(progress, "progress", lambda *words, **options: made.append((words[1:], options)) or Updates())
    for rows, ends in ((["a", "b"], callback.on_predict), (iter("ab"), callback.on_predict)):
        for _ in range(2):
            callback.on_prediction_step(None, state, None, eval_dataloader=rows)
        assert callback.batches.count == 2
        ends(None, state, None)
    options = {"quiet": False}
    assert made == [(("evaluating", 2, "batches"), options), (("evaluating", None, "batches"), options)]
    callback.on_prediction_step(None, state, None, eval_dataloader=[])
    args = SimpleNamespace(metric_for_best_model="other")
    callback.on_evaluate(args, state, None, metrics={})
    assert callback.batches is None


class Updates:
    """Progress that counts its updates."""

    count = 0

    def update(self):
        self.count += 1


# ---- the average of the weights ----


class Weights(TrainerCallback):
    """Callback that stores the trained weights after each step."""

    def __init__(self):
        self.steps, self.module = [], None

    def on_step_end(self, args, state, control, **kwargs):
        weights = self.module.named_parameters()
        self.steps.append({name: value.detach().double() for name, value in weights})


AVERAGED = {"ema_decay": 0.8, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def averages_by_loop(steps, decay=0.8):
    """Compute the average after each step from the formula."""
    average, found = steps[0], []
    for weights in steps:
        average = {name: decay * average[name] + (1 - decay) * value for name, value in weights.items()}
        found.append(average)
    return found


def watch_weights(trainer):
    """Log the mean of the weights during each evaluation."""
    trainer.compute_metrics = lambda _: {"weights": sum(w.double().mean().item() for w in trainer.model.parameters())}


@pytest.mark.parametrize("best", [False, True])
def test_evaluations_checkpoints_and_the_saved_model_have_the_average_of_a_loop(tmp_path, rows, best):
    watcher = Weights()
    settings = {**AVERAGED, "load_best_model_at_end": best, "save_total_limit": 9, "svr": "bi-static"}
    if best:  # the mean of the weights grows, so that its least value is the first
        settings |= {"metric_for_best_model": "weights", "greater_is_better": False}
    trainer = build(tmp_path, rows, callbacks=[watcher], **settings)
    watcher.module = trainer.module
    watch_weights(trainer)
    trainer.train()
    averages = averages_by_loop(watcher.steps)
    assert not torch.equal(averages[-1]["model.logit_scale"], watcher.steps[-1]["model.logit_scale"])

    logged = [entry["eval_weights"] for entry in trainer.state.log_history if "eval_weights" in entry]
    expected = [sum(value.mean().item() for value in average.values()) for average in averages[1::2]]
    assert logged == pytest.approx(expected, abs=1e-6)
    for step in (2, 4, 6):
        saved = dict(SupCLAPModel.from_pretrained(tmp_path / f"checkpoint-{step}").named_parameters())
        for name, value in saved.items():
            torch.testing.assert_close(value.detach().double(), averages[step - 1][f"model.{name}"], rtol=0, atol=1e-6)

    last = best_step(trainer) if best else 6
    trainer.save_model(str(tmp_path / "final"))
    final = dict(SupCLAPModel.from_pretrained(tmp_path / "final").named_parameters())
    assert trainer.evaluate()["eval_weights"] == pytest.approx(expected[last // 2 - 1], abs=1e-6)
    for name, value in final.items():
        assert torch.equal(value, dict(trainer.clap.named_parameters())[name])
        torch.testing.assert_close(value.detach().double(), averages[last - 1][f"model.{name}"], rtol=0, atol=1e-6)


def test_a_run_that_ends_before_its_first_evaluation_has_the_average(tmp_path, rows):
    watcher = Weights()
    trainer = build(tmp_path, rows, callbacks=[watcher], **{**AVERAGED, "eval_steps": 4, "save_steps": 4}, max_steps=2)
    watcher.module = trainer.module
    trainer.train()
    average = averages_by_loop(watcher.steps)[-1]["model.logit_scale"]
    torch.testing.assert_close(trainer.clap.logit_scale.detach().double(), average, rtol=0, atol=1e-6)
    assert not torch.equal(average, watcher.steps[-1]["model.logit_scale"])


@pytest.mark.parametrize("is_frozen", [False, True])
def test_averaging_does_not_change_the_training_and_resumes_bit_for_bit(tmp_path, rows, is_frozen):
    def run(folder, resumed=None, model=None, **settings):
        settings = {**AVERAGED, "load_best_model_at_end": False, "save_total_limit": 9, **settings}
        watcher, model = Weights(), model or with_dropout()
        model.text_model.requires_grad_(not is_frozen)
        trainer = build(tmp_path / folder, rows, model, [watcher], **settings)
        watcher.module = trainer.module
        watch_weights(trainer)
        trainer.train(resumed)
        return watcher.steps, trainer

    steps, whole = run("whole")
    if not is_frozen:
        plain, _ = run("plain", ema_decay=None, save_strategy="no")
        for one, other in zip(steps, plain, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in one.items())

    other = with_dropout() if is_frozen else builders.supclap_model(with_dropout().config, seed=99)
    after, resumed = run("whole", str(tmp_path / "whole" / "checkpoint-4"), other)
    assert all(torch.equal(value, after[-1][name]) for name, value in steps[-1].items())
    evaluations = [
        [entry["eval_weights"] for entry in each.state.log_history if "eval_weights" in entry]
        for each in (whole, resumed)
    ]
    assert evaluations[0] == evaluations[1]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_trained_weights_that_hold_code_are_not_loaded(tmp_path):
    # any class could run code
    torch.save({"weight": SimpleNamespace()}, tmp_path / callbacks.TRAINED_WEIGHTS)
    callback = callbacks.EMACallback(nn.Linear(1, 1), 0.9)
    callback.checkpoint = str(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="SimpleNamespace"):
        callback.on_train_begin(None, None, None)


@pytest.mark.parametrize("sharding", ["fsdp", "deepspeed"])
def test_sharded_weights_have_no_average(tmp_path, rows, monkeypatch, sharding):
    monkeypatch.setattr(SupCLAPTrainingArguments, "sharding", sharding)
    with pytest.raises(ValueError, match="ema_decay"):
        build(tmp_path, rows, ema_decay=0.9)


def test_weights_of_half_precision_have_no_average(tmp_path, rows):
    model = builders.supclap_model()
    model.text_projection.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"ema_decay.*text_projection.*bfloat16"):
        build(tmp_path, rows, model, ema_decay=0.9, keep_weight_dtype=True).train()


# ---- parameters that the optimizer lacks ----


class Unfreeze(TrainerCallback):
    """Callback that unfreezes a part of the model at the second epoch."""

    def __init__(self, part):
        self.part = part

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.part.requires_grad_(state.epoch >= 1)


def test_parameters_that_are_unfrozen_too_late_are_named_once(tmp_path, rows):
    model = builders.supclap_model()
    model.text_projection.requires_grad_(False)
    before = model.text_projection.linear1.weight.clone()
    trainer = build(tmp_path, rows, model, [Unfreeze(model.text_projection)], num_train_epochs=4, **QUICK)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        trainer.train()
    (message,) = [str(each.message) for each in warned if "optimizer" in str(each.message)]
    assert re.match(r"4 trainable parameters.*text_projection", message)
    assert torch.equal(model.text_projection.linear1.weight, before)


def test_radii_that_ones_own_optimizer_lacks_are_named(tmp_path, rows):
    model = builders.supclap_model()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    args = arguments(tmp_path, svr="bi-static", max_steps=1, **QUICK)
    trainer = SupCLAPTrainer(model, args, rows, processing_class=processor(), optimizers=(own, None))
    with pytest.warns(UserWarning, match=r"2 trainable parameters.*objective\.regularizer\.radii"):
        trainer.train()

    whole = build(tmp_path / "whole", rows, svr="bi-static", max_steps=1, **QUICK)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*optimizer.*")
        whole.train()


# ---- the errors of the languages ----


@pytest.fixture(scope="module")
def spoken_rows(tmp_path_factory):
    rows = tone_rows(tmp_path_factory.mktemp("spoken"), count=12)
    for row in rows:
        row["captions"] = {"eng": ["a dog"], "fra": ["un chien"], "deu": ["la pluie"]}
    return rows


@pytest.mark.parametrize("loss", ["infonce", "cacl", "kcl"])
def test_the_errors_of_the_languages_are_those_of_the_last_batch_and_change_nothing(tmp_path, spoken_rows, loss):
    languages = ["eng", "fra", "deu"]
    options = {"loss": loss, "languages": languages, "max_steps": 2, "learning_rate": 1e-2, **QUICK}
    config = builders.supclap_config(logit_bias=-10.0)  # which these losses do not use
    trainer = build(
        tmp_path / "on", spoken_rows, builders.supclap_model(config), track_language_errors=True, **options
    )
    drawn = []
    trainer.module.register_forward_pre_hook(lambda module, args, kwargs: drawn.append(kwargs), with_kwargs=True)
    trainer.train()

    rows = [spoken_rows[index] for index in drawn[-1]["clip_index"].tolist()]
    trainer.clap.eval()
    audio = trainer.clap.get_audio_features(drawn[-1]["input_features"], drawn[-1]["audio_attention_mask"])
    texts = trainer.processor(
        text=[row["captions"][each][0] for row in rows for each in languages], return_tensors="pt"
    )
    texts = trainer.clap.get_text_features(**texts).pooler_output.unflatten(0, (len(rows), 3))
    masks = []
    for ids, row in zip(drawn[-1]["input_ids"].tolist(), rows, strict=True):
        trained = [[token for token in text if token] for text in ids]
        masks.append(
            [trainer.processor(text=row["captions"][each][0])["input_ids"][0] in trained for each in languages]
        )

    logged = [entry for entry in trainer.state.log_history if "weight_error" in entry][-1]
    audio, scale = audio.pooler_output, trainer.clap.logit_scale.exp()
    weight_error_term(audio, texts, scale.squeeze(), torch.tensor(masks)).backward()
    gradients = [weight.grad for weight in trainer.clap.parameters() if weight.grad is not None]
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    assert logged["weight_error"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    audio, texts, scale = audio.detach(), texts.detach(), scale.item()
    expected = reference.data_distribution_error(audio, texts, scale, masks)
    assert logged["data_distribution_error"] == pytest.approx(expected, abs=1e-5)
    expected = reference.alignment_direction_error(audio, texts, masks)
    assert logged["alignment_direction_error"] == pytest.approx(expected, abs=1e-2)
    for name in ("data_distribution_error", "alignment_direction_error", "weight_error"):
        assert (logged[name] > 1e-3) == (loss != "kcl")

    unwatched = build(tmp_path / "off", spoken_rows, builders.supclap_model(config), **options)
    unwatched.train()
    for name, value in unwatched.module.state_dict().items():
        torch.testing.assert_close(trainer.module.state_dict()[name], value, rtol=0, atol=0)


# ---- drift: the numbers ----

SCALE = torch.tensor(1 / 0.07, dtype=torch.float64)


def unit(*shape, seed):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.functional.normalize(values, dim=-1).requires_grad_()


def measure(objective, audio, text, **named):
    """Return the logged values of one step of `objective`, and the histogram."""
    averages = Averages()
    callback = DriftCallback(objective, averages)
    objective(audio, text, logit_scale=SCALE, **named)[0].backward()
    callback.on_step_end(None, None, SimpleNamespace(should_log=True))
    numbers = averages.drain()
    state = SimpleNamespace(log_history=[{}])
    callback.on_log(None, state, None, logs=numbers)
    return numbers, state.log_history[0]["positive_similarity_histogram"]


def mean_tangent_cosine(updates, anchors, targets):
    """Compute the drift cosine with a loop: project both vectors to the tangent space of the sphere at the anchor."""
    cosines = []
    for update, anchor, target in zip(*(values.tolist() for values in (updates, anchors, targets)), strict=True):
        anchor, pull = np.array(anchor), np.array(target) - np.array(anchor)
        update = np.array(update) - np.dot(update, anchor) * anchor
        pull = pull - pull @ anchor * anchor
        cosines.append(update @ pull / math.sqrt((update @ update) * (pull @ pull)))
    return np.mean(cosines)


def regularised(radii, **kwargs):
    return ContrastiveObjective("infonce", SupportVectorRegularizer(radii, **kwargs)).double()


def test_the_numbers_equal_the_loops():
    audio, text = unit(6, 8, seed=0), unit(6, 1, 8, seed=1)
    objective = regularised({"t2a": StaticRadius(0.3), "a2t": StaticRadius(0.2)}, similarity="dot")
    numbers, histogram = measure(objective, audio, text)
    texts = text.detach()[:, 0]
    expected = reference.drift_statistics(audio.detach(), texts, 0.07, [0.3] * 6)
    exchanged = reference.drift_statistics(texts, audio.detach(), 0.07, [0.2] * 6)
    for name in ("radius_mean", "radius_std", "svr_factor_mean", "svr_factor_std"):
        expected[f"{name}_t2a"], expected[f"{name}_a2t"] = expected.pop(name), exchanged[name]
    # radii are float32
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, abs=1e-6)

    cosines = (audio * text[:, 0]).sum(-1).detach().numpy()
    for percent in (10, 50, 90):
        assert numbers[f"positive_similarity_p{percent}"] == pytest.approx(np.percentile(cosines, percent))
    assert histogram["counts"] == np.histogram(cosines, len(histogram["counts"]), (-1, 1))[0].tolist()
    assert (histogram["low"], histogram["high"]) == (-1.0, 1.0)
    assert json.loads(json.dumps(histogram)) == histogram


def test_the_objective_s_own_drift_is_that_of_its_whole_gradient():
    audio, text = unit(6, 8, seed=2), unit(6, 1, 8, seed=3)
    objective = regularised({"t2a": StaticRadius(0.3), "a2t": StaticRadius(0.2)})
    logged = measure(objective, audio, text)[0]
    update, texts, clips = -text.grad[:, 0], text.detach()[:, 0], audio.detach()
    expected = mean_tangent_cosine(update, texts, clips)
    assert logged["drift_cosine_objective"] == pytest.approx(expected, abs=1e-12)
    for reading, pull in (("difference", clips - texts), ("target", clips)):
        expected = nn.functional.cosine_similarity(update, pull).mean().item()
        assert logged[f"drift_cosine_objective_{reading}"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("loss", "bias"), [("infonce", None), ("siglip", torch.tensor(-3.0, dtype=torch.float64))])
def test_the_drift_with_support_vectors_is_that_of_the_run_s_own_term(loss, bias):
    audio, text = unit(6, 8, seed=2), unit(6, 1, 8, seed=3)
    options = {"alpha": 0.4, "similarity": "dot"}
    regularizer = SupportVectorRegularizer({"t2a": StaticRadius(0.3)}, base=loss, **options)
    objective = ContrastiveObjective(loss, regularizer).double()
    numbers, _ = measure(objective, audio, text, logit_bias=bias)
    flat = text.detach()[:, 0], torch.full((6,), 0.3).double()
    expected = drift_statistics(audio.detach(), flat[0], SCALE, flat[1], **options, logit_bias=bias)
    for name in ("drift_cosine", "drift_cosine_svr", "drift_cosine_svr_difference", "drift_cosine_svr_target"):
        assert numbers[name] == pytest.approx(expected[name].item(), abs=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_spread_of_a_dynamic_radius_is_that_within_the_batch(chunk_size):
    radius = DynamicRadius(num_similarities=4)
    torch.manual_seed(0)
    nn.init.normal_(radius.layers[-1].weight)
    objective = ContrastiveObjective("infonce", SupportVectorRegularizer({"t2a": radius}), chunk_size).double()
    audio, text = unit(6, 8, seed=6), unit(6, 1, 8, seed=7)
    with torch.no_grad():
        radii = radius(SCALE * text[:, 0] @ audio.T).numpy()
    numbers, _ = measure(objective, audio, text)
    assert numbers["radius_mean_t2a"] == pytest.approx(radii.mean())
    assert numbers["radius_std_t2a"] == pytest.approx(radii.std())
    assert numbers["radius_std_t2a"] > 1e-3
    assert "radius_std_a2t" not in numbers


def test_of_a_large_batch_the_first_samples_are_measured(monkeypatch):
    monkeypatch.setattr(callbacks, "MOST_WATCHED", 4)
    radius = DynamicRadius(num_similarities=4)
    nn.init.normal_(radius.layers[-1].weight, generator=torch.Generator().manual_seed(0))
    objective = ContrastiveObjective("infonce", SupportVectorRegularizer({"t2a": radius})).double()
    audio, text = unit(6, 8, seed=6), unit(6, 1, 8, seed=7)
    numbers, histogram = measure(objective, audio, text)
    assert sum(histogram["counts"]) == 4
    with torch.no_grad():
        radii, flat = radius(SCALE * text[:, 0] @ audio.T)[:4], text.detach()[:4, 0]
    expected = drift_statistics(audio.detach()[:4], flat, SCALE, radii)
    for name in ("drift_cosine", "drift_cosine_svr", "distance"):
        assert numbers[name] == pytest.approx(expected[name].item())
    assert numbers["radius_mean_t2a"] == pytest.approx(radii.mean().item())


def test_without_text_gradients_the_other_values_are_logged():
    audio, text = unit(6, 8, seed=8), unit(6, 1, 8, seed=9).detach()
    numbers, _ = measure(ContrastiveObjective("infonce"), audio, text)
    assert "drift_cosine_objective" not in numbers
    assert "drift_cosine" in numbers


def test_of_several_languages_the_first_is_measured():
    audio, text = unit(5, 8, seed=10), unit(5, 3, 8, seed=11)
    radius = DynamicRadius(num_similarities=4)
    nn.init.normal_(radius.layers[-1].weight, generator=torch.Generator().manual_seed(0))
    regularizer = SupportVectorRegularizer({"t2a": radius}, beta=0.0)
    objective = ContrastiveObjective("infonce", regularizer).double()
    first, _ = measure(objective, audio.detach().requires_grad_(), text[:, :1].detach().requires_grad_())

    regularizer.base = "kcl"
    several, _ = measure(ContrastiveObjective("kcl", regularizer).double(), audio, text)
    assert several == pytest.approx(first, abs=1e-12)


class _AllRoles(nn.Module):
    """InfoNCE over all recordings and the first texts, in blocks of one role."""

    def forward(self, audio_embeds, text_embeds, logit_scale, class_ids):
        roles = audio_embeds.shape[1]
        texts = text_embeds.unflatten(1, (roles, -1))[:, :, 0]
        return info_nce(*(values.transpose(0, 1).flatten(0, 1) for values in (audio_embeds, texts)), logit_scale), {}


def test_recordings_of_one_sample_are_pairs_of_one_batch():
    audio, text = unit(3, 2, 8, seed=12), unit(3, 4, 8, seed=13)  # two roles, captions in two languages each
    roles, histogram = measure(_AllRoles(), audio, text, class_ids=None)
    pairs = [(audio[i, r], text[i, 2 * r]) for r in range(2) for i in range(3)]
    flat_audio, flat_text = (torch.stack(side).detach().requires_grad_() for side in zip(*pairs, strict=True))
    flat, _ = measure(ContrastiveObjective("infonce"), flat_audio, flat_text.unsqueeze(1).detach().requires_grad_())
    assert roles == pytest.approx(flat, abs=1e-12)
    assert sum(histogram["counts"]) == 6


# ---- drift: in a run ----

TRACKED = {"drift_cosine", "drift_cosine_svr", "drift_cosine_objective", "radius_std_a2t", "positive_similarity_p50"}


def train(folder, rows, **kwargs):
    """Train for six steps with dropout."""
    trainer = build(folder, rows, model=with_dropout(), **{"svr": "bi-dynamic", **QUICK, **kwargs})
    trainer.train()
    return trainer


def entries(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_tracking_does_not_change_the_training(tmp_path, rows, options):
    tracked = train(tmp_path / "tracked", rows, **options)
    drawn = torch.rand(1)
    plain = train(tmp_path / "plain", rows, track_drift=False, **options)
    assert torch.equal(torch.rand(1), drawn)
    assert [entry["loss"] for entry in entries(tracked)] == [entry["loss"] for entry in entries(plain)]
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, tracked.model.state_dict()[name]), name
    assert all(set(entry) >= TRACKED for entry in entries(tracked))
    assert all(math.isfinite(entry[name]) for entry in entries(tracked) for name in TRACKED)
    assert not TRACKED & set().union(*entries(plain))


def test_terms_of_the_learning_rate_and_components_of_an_evaluation_are_logged(tmp_path, rows):
    small, large = (train(tmp_path / str(rate), rows, learning_rate=rate, max_steps=1) for rate in (1e-4, 2e-4))
    penalties = [entries(trainer)[0]["noise_penalty"] for trainer in (small, large)]  # before the first step
    assert penalties[1] == pytest.approx(4 * penalties[0], rel=1e-4)
    metrics = small.evaluate(rows)
    assert metrics["eval_perpendicular_global"] > 0
    assert metrics["eval_perpendicular_local"] > 0
    small.args.track_drift = False
    assert "eval_perpendicular_global" not in small.evaluate(rows)


@pytest.mark.parametrize(
    ("options", "steps"), [({"logging_steps": 2}, [2, 4, 6]), ({"logging_strategy": "epoch"}, [3, 6])]
)
def test_it_measures_at_logging_steps_only(tmp_path, rows, monkeypatch, options, steps):
    calls = []
    original = DriftCallback._numbers
    monkeypatch.setattr(DriftCallback, "_numbers", lambda callback: calls.append(callback) or original(callback))
    trainer = train(tmp_path, rows, **options)
    assert len(calls) == len(steps)
    tracked = [entry for entry in trainer.state.log_history if "drift_cosine" in entry]
    assert [entry["step"] for entry in tracked] == steps
    assert all(sum(entry["positive_similarity_histogram"]["counts"]) == 4 for entry in tracked)


class _Reporter(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_reports_get_scalars_only(tmp_path, rows):
    reporter = _Reporter()
    train(tmp_path, rows, callbacks=[reporter], max_steps=2)
    assert set(reporter.seen[0]) >= TRACKED
    assert {type(value) for logs in reporter.seen for value in logs.values()} <= {float, int}


# ---- drift: several processes ----


def measure_a_part(folder):
    """Run one step with this process's part of six clips, gather, and write the logged values."""
    distributed.init_process_group("gloo")
    place, count = distributed.get_rank(), distributed.get_world_size()
    audio, text = (values.detach().chunk(count)[place].requires_grad_() for values in six_pairs())
    objective = regularised({"t2a": StaticRadius(0.3), "a2t": StaticRadius(0.2)})
    numbers, histogram = measure(objective, gather(audio), gather(text))
    Path(folder, f"process_{place}_of_{count}.json").write_text(json.dumps([numbers, histogram]))


def six_pairs():
    return unit(6, 8, seed=14), unit(6, 1, 8, seed=15)


@pytest.mark.process
def test_every_process_measures_the_global_batch(tmp_path):
    run_processes(__file__, str(tmp_path))
    objective = regularised({"t2a": StaticRadius(0.3), "a2t": StaticRadius(0.2)})
    alone, histogram = measure(objective, *six_pairs())
    for place in range(2):
        numbers, counts = json.loads((tmp_path / f"process_{place}_of_2.json").read_text())
        assert numbers == pytest.approx(alone, abs=1e-12)
        assert counts == histogram


if __name__ == "__main__":
    measure_a_part(*sys.argv[1:])
    leave_process_group()


def test_the_averages_of_a_log_are_one_transfer():
    averages, transfers = Averages(), []
    for number in range(4):
        tensors = {name: torch.tensor(float(number + index)) for index, name in enumerate("abc")}
        averages.add({**tensors, "plain": number})
    tolist, convert = torch.Tensor.tolist, torch.Tensor.__float__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(tensor.shape) or tolist(tensor))
        patch.setattr(torch.Tensor, "__float__", lambda tensor: transfers.append(tensor.shape) or convert(tensor))
        drained = averages.drain()
    assert drained == {"a": 1.5, "b": 2.5, "c": 3.5, "plain": 1.5}
    assert transfers == [(3,)]
    assert averages.drain() == {}


@pytest.mark.parametrize(
    ("seconds_of_data", "is_first", "is_said"), [(3.0, True, True), (0.5, True, False), (3.0, False, False)]
)
def test_a_run_that_starves_names_the_remedy_once(monkeypatch, caplog, seconds_of_data, is_first, is_said):
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    callback, state = ThroughputCallback(Averages()), TrainerState(is_world_process_zero=is_first)
    args = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=1, world_size=1, dataloader_num_workers=3)
    callback.on_train_begin(args, state, None)
    for step in range(4):
        now[0] += seconds_of_data + 100 * (step == 0)  # the workers start before the first step
        callback.on_step_begin(args, state, None)
        now[0] += 1.0
        callback.on_step_end(args, state, None)
        callback.on_log(args, state, None, logs={"clips_per_second": 1.0})
    assert (caplog.text.count("dataloader_num_workers (now 3)") == 1) == is_said
    assert ("75%" in caplog.text) == is_said


@pytest.mark.parametrize(("world_size", "logs", "saves"), [(1, False, True), (2, False, False), (2, True, True)])
def test_processes_agree_on_a_signal_only_at_a_log(monkeypatch, world_size, logs, saves):
    gathered = []
    monkeypatch.setattr(callbacks, "gather", lambda tensor: gathered.append(tensor) or tensor)
    callback = SigtermCallback(SimpleNamespace(is_checkpoint_requested=True))
    args = SimpleNamespace(world_size=world_size, device="cpu")
    control = TrainerControl(should_log=logs)
    callback.on_step_end(args, None, control)
    assert (control.should_save, control.should_training_stop) == (saves, saves)
    # gloo gathers no booleans
    assert [tensor.dtype for tensor in gathered] == [torch.float32] * (world_size > 1 and logs)
