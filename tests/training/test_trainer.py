"""The trainer: training, logs, saving, resumption and errors; several processes give the results of one."""

import copy
import dataclasses
import functools
import json
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import builders
import numpy as np
import pytest
import soundfile
import torch
from crash_callbacks import assert_workers_end_with_their_parent, name_worker
from datasets import Audio, Dataset
from processes import assert_same_training, run_processes
from recordings import tone_rows
from safetensors.torch import load_file
from transformers import EvalPrediction, PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from modeling_supclap import SupCLAPModel, SupCLAPProcessor
from modeling_supclap.datasets_scripts.schema import group_id
from modeling_supclap.evaluation import EmbeddingCache, evaluate, load_embedding_model
from modeling_supclap.losses import DynamicRadius, info_nce
from modeling_supclap.training.callbacks import LineCallback, SupCLAPProgressCallback
from modeling_supclap.training.collator import IndexedRows, TrainingCollator
from modeling_supclap.training.distributed import leave_process_group
from modeling_supclap.training.drift import perpendicular_components, radius_by_hard_negatives
from modeling_supclap.training.objectives import ContrastiveObjective, SupportVectorRegularizer
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments


def arguments(folder, **kwargs):
    quiet = {"disable_tqdm": True, "report_to": "none", "use_cpu": True, "seed": 7}
    short = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "learning_rate": 1e-3}
    return SupCLAPTrainingArguments(output_dir=str(folder), **{**quiet, **short, **kwargs})


processor = functools.cache(builders.bert_processor)


QUICK = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


def build(folder, rows, model=None, callbacks=None, **kwargs):
    model = builders.supclap_model() if model is None else model
    return SupCLAPTrainer(
        model,
        arguments(folder, **kwargs),
        train_dataset=rows,
        eval_dataset=rows[:8],
        processing_class=processor(),
        callbacks=callbacks,
    )


def best_step(trainer):
    """Return the step of the best checkpoint. Fail if it is the last step, where the best model is also the last."""
    best, last = trainer.state.best_global_step, trainer.state.global_step
    assert 0 < best < last, f"the best step is {best} of {last}; choose settings where the last step is not the best"
    return best


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_every_parameter_changes(tmp_path, rows):
    trainer = build(tmp_path, rows, svr="bi-static")
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    still = [name for name, value in trainer.model.named_parameters() if torch.equal(value, before[name])]
    assert still == []


class OwnLog(SupCLAPTrainer):
    """Trainer that logs its own loss in each step."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.log({"loss": 617.0})
        return loss


def test_a_loss_that_a_subclass_logs_is_kept_beside_ours(tmp_path, rows):
    trainer = OwnLog(builders.supclap_model(), arguments(tmp_path, max_steps=2, **QUICK), rows, None, processor())
    trainer.train()
    own = [entry for entry in trainer.state.log_history if entry.get("loss") == 617.0]
    ours = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert (len(own), len(ours)) == (2, 2)
    assert all("loss_infonce" in entry and "clips_per_second" in entry for entry in ours)
    assert not any("loss_infonce" in entry for entry in own)


def test_a_run_stops_early(tmp_path, rows):
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = build(tmp_path, rows, early_stopping_patience=2, learning_rate=0.0, num_train_epochs=9, **options)
    trainer.train()
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert saved["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 1}
    assert "TrainerControl" in saved
    assert trainer.state.global_step == 6  # the second and third evaluation are not better than the first
    assert trainer.state.best_global_step == 6  # of equal scores, the last


class Spy(TrainerCallback):
    """Records the model that a tracker gets at the end."""

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.model = model


def test_trackers_get_a_model_that_they_can_save(tmp_path, rows):
    spy = Spy()
    trainer = build(tmp_path, rows, callbacks=[spy], max_steps=1, **QUICK)
    trainer.train()
    assert spy.model is trainer.clap
    assert spy.model.config.to_dict()["projection_dim"] == trainer.clap.config.projection_dim
    tracker = Trainer(args=trainer.args, model=spy.model, processing_class=processor(), eval_dataset=["none"])
    tracker.save_model(str(tmp_path / "artifact"))
    loaded = SupCLAPModel.from_pretrained(tmp_path / "artifact")
    assert torch.equal(loaded.logit_scale, trainer.clap.logit_scale)


@pytest.mark.parametrize(
    ("name", "value", "is_whole"),
    [
        ("WANDB_LOG_MODEL", "checkpoint", True),
        ("WANDB_LOG_MODEL", "end", False),
        ("HF_MLFLOW_LOG_ARTIFACTS", "1", True),
    ],
)
def test_checkpoints_that_a_tracker_uploads_are_whole(tmp_path, rows, monkeypatch, name, value, is_whole):
    monkeypatch.setenv(name, value)
    model = builders.supclap_model()
    model.text_model.requires_grad_(False)
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "no", "load_best_model_at_end": False}
    build(tmp_path, rows, model, max_steps=1, **options).train()
    (tmp_path / "checkpoint-1").rename(tmp_path.parent / f"{tmp_path.name}-alone")
    if is_whole:
        SupCLAPModel.from_pretrained(tmp_path.parent / f"{tmp_path.name}-alone")
    else:
        with pytest.raises(FileNotFoundError, match="_frozen"):
            SupCLAPModel.from_pretrained(tmp_path.parent / f"{tmp_path.name}-alone")


@pytest.mark.parametrize(("option", "attention"), [(None, "sdpa"), ("eager", "eager")])
def test_attn_implementation_applies_to_both_towers(tmp_path, rows, option, attention):
    clap = build(tmp_path, rows, attn_implementation=option).clap
    assert {tower.config._attn_implementation for tower in (clap.audio_model, clap.text_model)} == {attention}


def test_an_unknown_attn_implementation_is_refused(tmp_path, rows):
    with pytest.raises(ValueError, match="flush"):
        build(tmp_path, rows, attn_implementation="flush")


def test_any_set_with_a_column_of_audio_and_one_of_captions_trains(tmp_path):
    rows = tone_rows(tmp_path, captions_per_clip=1)
    columns = {"audio": [row["audio_path"] for row in rows], "text": [row["captions"]["eng"][0] for row in rows]}
    own = Dataset.from_dict(columns).cast_column("audio", Audio(decode=False))
    found = []
    for name, given in (("own", own), ("rows", rows)):
        trainer = SupCLAPTrainer(
            builders.supclap_model(), arguments(tmp_path / name, **QUICK), given, processing_class=processor()
        )
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["numpy", "pandas", "torch"])
def test_any_format_of_a_set_is_evaluated_as_plain_rows(tmp_path, form):
    rows = tone_rows(tmp_path)
    audio, captions = [row["audio_path"] for row in rows], [row["captions"]["eng"] for row in rows]
    own = Dataset.from_dict({"audio": audio, "captions": captions}).cast_column("audio", Audio(decode=False))
    trainer = SupCLAPTrainer(
        builders.supclap_model(),
        arguments(tmp_path, eval_languages=["eng"], **QUICK),
        own.with_format(form),
        own.with_format(form),
        processor(),
    )
    assert trainer.train_rows[0]["captions"]["eng"] == captions[0]
    found = trainer.evaluate()["eval_mean_recall"]
    assert found == trainer.evaluate(own.with_format(form))["eval_mean_recall"]
    assert found == trainer.evaluate(Dataset.from_list(rows).with_format(form))["eval_mean_recall"]
    model = load_embedding_model(trainer.clap, trainer.processor)
    results = evaluate(model, own.with_format(form), cache=EmbeddingCache(None))
    assert results.protocol["clips"] == len(rows)


class OwnObjective(torch.nn.Module):
    """Custom objective with its own regularizer."""

    def __init__(self):
        super().__init__()
        self.regularizer = torch.nn.Dropout(0.1)

    def forward(self, audio_embeds, text_embeds, logit_scale, logit_bias=None, group_ids=None):
        return info_nce(self.regularizer(audio_embeds), text_embeds[:, 0], logit_scale, normalize=True), {}


def only_clips_displaced():
    return ContrastiveObjective("infonce", SupportVectorRegularizer({"a2t": DynamicRadius(4)}))


@pytest.mark.parametrize(("make", "radius"), [(OwnObjective, False), (only_clips_displaced, True)])
def test_a_custom_objective_trains_and_is_tracked(tmp_path, rows, make, radius):
    args = arguments(tmp_path, max_steps=1)
    trainer = SupCLAPTrainer(builders.supclap_model(), args, rows, rows[:8], processor(), objective=make())
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry.keys() >= {"drift_cosine", "drift_cosine_objective"}
    assert ("radius_mean_a2t" in entry) == radius

    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert f"`{type(trainer.module.objective).__name__}`" in card
    assert "InfoNCE" not in card
    assert "oord2018" not in card


def test_a_loss_is_imported_from_the_current_folder(tmp_path, rows, monkeypatch):
    lines = [
        "from modeling_supclap.training.objectives import ContrastiveObjective",
        "class Doubled(ContrastiveObjective):",
        "    def forward(self, *embeds, **options):",
        "        return 2 * super().forward(*embeds, **options)[0], {}",
    ]
    (tmp_path / "own_losses.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    found = []
    for loss in ("infonce", "own_losses:Doubled"):
        args = arguments(tmp_path / loss[:3], loss=loss, svr="none", max_steps=1)
        trainer = SupCLAPTrainer(builders.supclap_model(), args, rows, rows[:8], processor())
        trainer.train()
        found += losses(trainer)
    assert found[1] == pytest.approx(2 * found[0])
    trainer.create_model_card()
    assert "custom objective `Doubled`" in (tmp_path / "own" / "README.md").read_text()

    args = arguments(tmp_path, loss="own_losses:Halved", svr="none")
    with pytest.raises(ValueError, match="own_losses:Halved"):
        SupCLAPTrainer(builders.supclap_model(), args, rows, rows[:8], processor())
    with pytest.raises(ValueError, match="'bi-static'"):
        arguments(tmp_path, loss="own_losses:Doubled", svr="bi-static")


@pytest.mark.parametrize(("loss", "svr"), [("infonce", "bi-static"), ("kcl", "bi-dynamic"), ("cacl", "bi-static")])
def test_it_learns_in_both_languages(tmp_path, rows, loss, svr):
    options = {"languages": ["eng", "fra"], "num_train_epochs": 40, "learning_rate": 3e-3, **QUICK}
    options |= {"per_device_train_batch_size": 12, "lr_scheduler_type": "constant", "track_drift": False}
    trainer = build(tmp_path, rows, loss=loss, svr=svr, **options)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for language in ("eng", "fra"):
        assert after[f"eval_{language}_t2a_R@1"] > before[f"eval_{language}_t2a_R@1"] + 0.2


def test_spectrograms_of_the_device_train_and_evaluate_alike(tmp_path, rows):
    logs: dict[bool, list[float]] = {True: [], False: []}
    for on_device, numbers in logs.items():
        trainer = build(tmp_path / str(on_device), rows, features_on_device=on_device)
        assert ("samples" in next(iter(trainer.get_train_dataloader()))) == on_device
        trainer.train()
        for entry in trainer.state.log_history:
            numbers += [entry[name] for name in ("loss", "eval_mean_recall") if name in entry]
    assert len(logs[True]) == 8
    assert logs[True] == pytest.approx(logs[False], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "device", "option", "on_device"),
    [
        ("supclap", "cuda", None, True),
        ("converted", "cuda", None, True),
        ("clap2", "cuda", None, True),
        ("whisper", "cuda", None, False),
        ("supclap", "cpu", None, False),
        ("supclap", "cuda", False, False),
        ("supclap", "cpu", True, True),
    ],
)
def test_spectrograms_are_computed_on_a_gpu_by_default(tmp_path, rows, kind, device, option, on_device):
    trainer = build(tmp_path, rows)
    trainer.processor = builders.pair(kind)[1]
    args = SimpleNamespace(features_on_device=option, device=torch.device(device), max_audio_seconds=1.0)
    args.pad_short_clips, args.positives = False, "clip"
    assert trainer._collator_options(args)["gives_samples"] == on_device


def test_spectrograms_of_clap_on_the_device_train_alike(tmp_path, rows):
    losses = {}
    for on_device in (True, False):
        model, clap_processor = builders.pair("converted")
        args = arguments(tmp_path / str(on_device), features_on_device=on_device, num_train_epochs=1)
        trainer = SupCLAPTrainer(model, args, rows, rows, processing_class=clap_processor)
        assert ("samples" in next(iter(trainer.get_train_dataloader()))) == on_device
        losses[on_device] = trainer.train().training_loss
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_agreement_of_the_languages_is_measured(tmp_path, rows):
    same = [{**row, "captions": {"eng": row["captions"]["eng"], "fra": row["captions"]["eng"]}} for row in rows]
    assert build(tmp_path / "same", same, languages=["eng", "fra"]).evaluate()["eval_MRV"] == 0
    assert build(tmp_path / "other", rows, languages=["eng", "fra"]).evaluate()["eval_MRV"] > 0


def test_the_log_contains_loss_terms_and_throughput(tmp_path, rows, capsys):
    trainer = build(tmp_path, rows, svr="bi-static", radius_init=0.1, max_steps=2)
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["loss"] == pytest.approx(
        entry["loss_infonce"] + entry["loss_svr_t2a"] + entry["loss_svr_a2t"], rel=1e-5
    )
    assert entry["temperature"] == pytest.approx(0.07)
    assert entry["radius_t2a"] == pytest.approx(0.1)
    assert entry["clips_per_second"] > 0
    printed = capsys.readouterr().out
    assert re.search(r"\b2\b.*\bloss\b", printed)
    assert "temperature" not in printed  # the printed line contains only a few values


def test_evaluation_equals_embedding_clips_one_by_one(tmp_path, rows):
    trainer = build(tmp_path, rows, languages=["fra", "eng"], eval_languages=["eng"])
    metrics = trainer.evaluate()
    model, collator = trainer.clap.eval(), TrainingCollator(processor())
    hits = 0
    for number, row in enumerate(rows[:8]):
        audio = collator([{**row, "clip_index": 0}])
        with torch.no_grad():
            clip = model.get_audio_features(audio["input_features"], audio["audio_attention_mask"]).pooler_output
            scores = [
                model.get_text_features(
                    **processor()(text=other["captions"]["eng"], return_tensors="pt")
                ).pooler_output
                @ clip[0]
                for other in rows[:8]
            ]
        hits += max(range(8), key=lambda index: scores[index].max()) == number
    assert metrics["eval_eng_a2t_R@1"] == pytest.approx(hits / 8)
    assert metrics["eval_eng_t2a_num_queries"] == 16
    recalls = [value for name, value in metrics.items() if "_R@" in name]
    assert metrics["eval_mean_recall"] == pytest.approx(np.mean(recalls))


def test_evaluation_leaves_training_as_it_was(tmp_path, rows):
    trainer = build(tmp_path, rows)
    collator = trainer.data_collator
    first = trainer.evaluate()
    assert trainer.data_collator is collator
    assert trainer.args.dataloader_drop_last
    again = trainer.evaluate()
    assert {k: v for k, v in first.items() if "_R@" in k} == {k: v for k, v in again.items() if "_R@" in k}


def test_the_last_incomplete_batch_is_evaluated_and_not_trained_on(tmp_path, rows):
    trainer = build(tmp_path, rows[:11], per_device_eval_batch_size=5)
    assert len(trainer.get_train_dataloader()) == 2
    every = build(tmp_path, rows[:11], every_caption=True)
    assert len(every.get_train_dataloader()) == 5  # two captions per clip
    assert trainer.predict(rows[:11]).predictions[0].shape == (11, 16)


def test_a_checkpoint_is_a_model_and_remembers_its_objective(tmp_path, rows):
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = build(tmp_path, rows, svr="bi-static", max_steps=2, **options)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    assert {"objective.regularizer.radii.t2a.radius", "model.logit_scale"} <= set(
        load_file(folder / "model.safetensors")
    )
    loaded = SupCLAPModel.from_pretrained(folder)
    for name, value in trainer.clap.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert SupCLAPProcessor.from_pretrained(folder).feature_extractor.sampling_rate == 16000


def test_no_file_contains_the_token(tmp_path, rows):
    trainer = build(tmp_path, rows, num_train_epochs=1, hub_token="hf_secret")
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    assert trainer.args.hub_token == "hf_secret"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "README.md"} <= {path.name for path in files}
    assert not [path for path in files if b"hf_secret" in path.read_bytes()]


def test_copies_of_the_arguments_are_equal_and_uploads_are_public(tmp_path, rows, monkeypatch):
    options = {
        "num_train_epochs": 1,
        "hub_token": "hf_secret",
        "background_dir": Path(rows[0]["audio_path"]).parent.as_posix(),
        **QUICK,
    }
    trainer = build(tmp_path / "run", rows, **options)
    for copied in (copy.deepcopy(trainer.args), pickle.loads(pickle.dumps(trainer.args))):
        assert copied == trainer.args
        assert (copied.output_dir, copied.hub_token) == (str(tmp_path / "run"), "hf_secret")

    uploaded = []
    trainer.args.push_to_hub = trainer.args.save_only_model = True
    # the Trainer pickles the arguments, and uploads the file
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, _: uploaded.append(pickle.dumps(self.args)))
    trainer._save_checkpoint(trainer.model, None)
    assert b"hf_secret" not in uploaded[0]
    assert not [path for path in (tmp_path, trainer.args.background_dir) if str(path).encode() in uploaded[0]]
    assert trainer.args.hub_token == "hf_secret"


def test_the_saved_model_is_for_inference(tmp_path, rows):
    trainer = build(tmp_path / "run", rows, svr="bi-dynamic", max_steps=1, **QUICK)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    names = set(load_file(tmp_path / "final" / "model.safetensors"))
    assert names == set(trainer.clap.state_dict())
    loaded, report = SupCLAPModel.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(loaded.logit_scale, trainer.clap.logit_scale)
    assert "use_cache" not in json.loads((tmp_path / "final" / "config.json").read_text())


def with_dropout():
    config = builders.supclap_config(builders.bert_config(hidden_dropout_prob=0.1))
    return builders.supclap_model(config)


def lasting_logs(trainer):
    """Return the logs of all steps, including drift and histograms, without the throughput and the processor time."""
    entries = [dict(entry) for entry in trainer.state.log_history if "loss" in entry]
    seconds = [entry.pop("process_seconds") for entry in entries]
    assert seconds == sorted(seconds)  # a resumed run goes on with the time of the stopped one
    assert seconds[0] > 0
    for entry in entries:
        assert entry.pop("clips_per_second") > 0
    return entries


@pytest.mark.parametrize(("loss", "svr"), [("kcl", "bi-static"), ("cacl", "none"), ("infonce", "bi-dynamic")])
def test_a_resumed_run_continues_bit_for_bit(tmp_path, rows, loss, svr):
    options = {
        "loss": loss,
        "svr": svr,
        "languages": ["eng", "fra"],
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
    }
    whole = build(tmp_path / "whole", rows, model=with_dropout(), **options)
    whole.train()
    resumed = build(tmp_path / "whole", rows, model=builders.supclap_model(with_dropout().config, seed=99), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert lasting_logs(resumed) == lasting_logs(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_kcl_embeds_as_many_languages_as_set(tmp_path, rows):
    rows = [{**row, "captions": {**row["captions"], "deu": row["captions"]["eng"]}} for row in rows]
    options = {"loss": "kcl", "languages": ["eng", "fra", "deu"], "languages_per_clip": 2}
    trainer = build(tmp_path, rows, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[:2] == (trainer.args.train_batch_size, 2)
    trainer.train()


def test_nan_stops_the_run_and_names_the_clips(tmp_path, rows):
    model = builders.supclap_model()
    with torch.no_grad():
        model.audio_projection.linear2.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"loss_infonce.*'clip"):
        build(tmp_path, rows, model=model).train()


class LogsNumbers(OwnObjective):
    def forward(self, audio_embeds, text_embeds, *others, **named):
        return (audio_embeds.sum() + text_embeds.sum()) * torch.nan, {"accuracy": 0.5}


def test_nan_is_named_if_an_objective_logs_numbers(tmp_path, rows):
    with pytest.raises(FloatingPointError, match=r"step 1, from the total, on clips \['clip"):
        SupCLAPTrainer(
            builders.supclap_model(),
            arguments(tmp_path, **QUICK),
            rows,
            processing_class=processor(),
            objective=LogsNumbers(),
        ).train()


class BreakWeights(TrainerCallback):
    """Callback that writes NaN to the weights at the end of a step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                model.audio_projection.linear2.weight[0, 0] = torch.nan


@pytest.mark.parametrize("options", [{"logging_steps": 4}, {"logging_steps": 50, "eval_strategy": "epoch"}])
def test_the_first_step_with_nan_is_named_at_the_next_log_or_evaluation(tmp_path, rows, options):
    trainer = build(tmp_path, rows, callbacks=[BreakWeights()], **{**QUICK, **options})
    with pytest.raises(FloatingPointError, match=r"step 3, .*loss_infonce") as stopped:
        trainer.train()
    assert len(re.findall(r"'clip", str(stopped.value))) == 4


def test_several_sets_are_evaluated_under_their_names(tmp_path, rows):
    trainer = SupCLAPTrainer(
        builders.supclap_model(),
        arguments(tmp_path, metric_for_best_model="eval_many_mean_recall", num_train_epochs=1),
        rows,
        {"few": rows[:4], "many": rows[:8]},
        processor(),
    )
    trainer.train()
    scores = trainer.evaluate()
    assert {"eval_few_mean_recall", "eval_many_mean_recall"} <= scores.keys()
    assert (
        scores["eval_many_mean_recall"] == trainer.evaluate(rows[:8])["eval_mean_recall"] == trainer.state.best_metric
    )
    given = trainer.evaluate({"many": rows[:8]})
    assert given["eval_many_mean_recall"] == scores["eval_many_mean_recall"]


@pytest.mark.process
def test_workers_that_persist_train_the_same_and_evaluate_the_rows_they_are_given(tmp_path, rows):
    options = {"languages": ["eng", "fra"], "num_train_epochs": 3, **QUICK}
    alone = build(tmp_path / "alone", rows, **options)
    helped = build(tmp_path / "helped", rows, dataloader_num_workers=1, **options)
    for trainer in (alone, helped):
        trainer.train()
    assert losses(helped) == losses(alone)
    for some in (rows[:8], rows[:3]):  # the Trainer keeps a persistent loader of the first dataset
        assert helped.evaluate(some)["eval_mean_recall"] == alone.evaluate(some)["eval_mean_recall"]
        assert helped.evaluate(some)["eval_mean_recall_chance"] == alone.evaluate(some)["eval_mean_recall_chance"]


def test_custom_metrics_are_added(tmp_path, rows):
    trainer = build(tmp_path, rows)
    trainer.compute_metrics = lambda prediction: {"width": prediction.predictions[0].shape[1]}
    scores = trainer.evaluate()
    assert scores["eval_width"] == trainer.clap.config.projection_dim
    assert "eval_mean_recall" in scores


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"auto_find_batch_size": True}])
def test_smaller_batches_of_negatives_are_named(tmp_path, rows, options):
    with pytest.warns(UserWarning, match="cached_chunk_size"):
        build(tmp_path, rows, **options)


def test_loaders_have_the_options_of_the_arguments(tmp_path, rows):
    chosen = {"num_workers": 2, "prefetch_factor": 3, "multiprocessing_context": "forkserver"}
    trainer = build(tmp_path, rows, **{f"dataloader_{name}": value for name, value in chosen.items()})
    loaders = [trainer.get_train_dataloader(), trainer.get_eval_dataloader()]
    for loader in loaders:
        found = {name: getattr(loader, name) for name in chosen}
        found["multiprocessing_context"] = found["multiprocessing_context"].get_start_method()
        assert found == chosen
    assert [loader.persistent_workers for loader in loaders] == [True, False]


def test_collators_have_the_options_of_the_arguments(tmp_path, rows):
    options = {"max_audio_seconds": 0.3, "pad_short_clips": True, "positives": "captions"}
    of_training = {"negatives_per_clip": 2, "seed": 5}
    given = [{**row, "negatives": {"fra": ["non"]}} for row in rows]
    languages = {"languages": ["fra", "eng"], "eval_languages": ["eng"]}
    trainer = build(tmp_path, given, apply_spec_augment=True, **options, **of_training, **languages)
    training, evaluation = trainer.data_collator, trainer.evaluation_collator
    for collator in (training, evaluation):
        assert {name: getattr(collator, name) for name in options} == options
        assert collator.kept is trainer.kept
    assert {name: getattr(training, name) for name in of_training} == of_training
    assert (training.languages, evaluation.languages) == (("fra", "eng"), ("eng",))
    assert (training.changes_features, evaluation.changes_features) == (True, False)
    trainer = build(tmp_path, rows, loss="kcl", languages=["eng", "fra"], languages_per_clip=2)
    assert (trainer.data_collator.scheme, trainer.data_collator.languages_per_clip) == ("kcl", 2)


def test_hyperparameter_search_is_refused(tmp_path, rows):
    with pytest.raises(NotImplementedError, match="hyperparameter_search"):
        build(tmp_path, rows).hyperparameter_search(n_trials=1)


def test_activation_checkpointing_reaches_both_towers(tmp_path, rows):
    names = {option.name for option in dataclasses.fields(SupCLAPTrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    trainer = build(tmp_path, rows, max_steps=1, **{name: True})
    trainer.train()
    assert [
        part
        for part in (trainer.clap.audio_model, trainer.clap.text_model)
        if not any(getattr(module, "gradient_checkpointing", False) for module in part.modules())
    ] == []


@pytest.mark.parametrize("sharding", ["fsdp", "deepspeed"])
def test_radii_of_a_sharded_run_have_their_start_before_it_begins(tmp_path, rows, monkeypatch, sharding):
    """Sharded parameters cannot be set within a step, and an initial NaN would end the run."""
    monkeypatch.setattr(SupCLAPTrainingArguments, "sharding", sharding)
    clips, texts = torch.eye(4), torch.eye(4).unsqueeze(1)  # their distance, 0, would be the initial radius
    for svr in ("bi-static", "bi-dynamic"):
        trainer = build(tmp_path, rows, svr=svr)
        _, logs = trainer.module.objective(clips, texts, torch.tensor(10.0))
        assert logs["radius_t2a"].item() == logs["radius_a2t"].item() == pytest.approx(2**0.5)


@pytest.mark.parametrize(("tf32", "precision"), [(None, "none"), (True, "tf32"), (False, "ieee")])
def test_each_trainer_has_its_own_precision(tmp_path, rows, monkeypatch, tf32, precision):
    """The setter of transformers is cached: a second trainer with an earlier value would keep the last one."""
    monkeypatch.setattr(torch.backends, "fp32_precision", "none")
    trainer = build(tmp_path, rows, max_steps=1, **QUICK)
    trainer.args.tf32 = tf32
    for run in (trainer.evaluate, trainer.train):
        torch.backends.fp32_precision = "none"
        run()
        assert torch.backends.fp32_precision == precision


# ---- several processes ----

OBJECTIVES = [
    ("infonce", "bi-dynamic"),
    ("siglip", "bi-static"),
    ("reweighted", "none"),
    ("infonce", "none with a bias"),
    ("kcl", "bi-dynamic"),
    ("cacl", "bi-static"),
    ("siglip", "bi-static in tiles"),
    ("kcl", "bi-dynamic in tiles"),
    ("infonce", "none with negatives"),
    ("infonce", "none with negatives in tiles"),
    ("infonce", "bi-static nested"),
]


def train_and_report(folder, report, batch):
    """Train two steps with each objective on a global batch of 32, with `batch` clips per process."""
    Path(folder, "tones").mkdir(exist_ok=True)
    rows = tone_rows(Path(folder, "tones"), count=32)
    for number, row in enumerate(rows):
        wrong = [f"wrong {number} {index}" for index in range(number % 4)]
        row["negatives"] = dict.fromkeys(("eng", "fra"), wrong)
    content = {}
    for loss, svr in OBJECTIVES:
        biased = loss == "siglip" or svr.endswith(
            "bias"
        )  # DistributedDataParallel requires a gradient for each parameter
        model = builders.supclap_model(builders.supclap_config(logit_bias=-10.0 if biased else None))
        options = {
            "loss": loss,
            "svr": svr.split()[0],
            "per_device_train_batch_size": int(batch),
            "max_steps": 2,
            "loss_chunk_size": 3 if svr.endswith("tiles") else None,
            "cached_chunk_size": 3 if svr.endswith("tiles") else None,
            "negatives_per_clip": 2 if "negatives" in svr else 0,
            "matryoshka_widths": [3, 7] if "nested" in svr else [],
            "positives": "captions" if loss in ("kcl", "cacl") else "clip",
            **QUICK,
        }
        trainer = build(f"{folder}/{loss}{svr}{batch}", rows, model=model, languages=["eng", "fra"], **options)
        trainer.model.double()  # Adam turns the rounding noise of a zero gradient into a step
        trainer.train()
        content["world_size"] = trainer.args.world_size
        content[f"{loss} {svr}"] = {name: value.tolist() for name, value in trainer.model.named_parameters()}
    if trainer.is_world_process_zero():
        Path(report).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train_and_report(str(folder), str(folder / "report.json"), "32")
    return folder / "report.json"


@pytest.mark.process
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_like_one(one_process, tmp_path, count):
    run_processes(__file__, "train", str(tmp_path), str(tmp_path / "many.json"), str(32 // count), count=count)
    assert_same_training(one_process, tmp_path / "many.json", count)


def predict_and_report(folder, report):
    Path(folder, "tones").mkdir(exist_ok=True)
    rows = tone_rows(Path(folder, "tones"), count=12)
    trainer = build(f"{folder}/run", rows)
    prediction = trainer.predict(rows[:11])
    if trainer.is_world_process_zero():
        recall = prediction.metrics["test_mean_recall"]
        Path(report).write_text(json.dumps({"clips": sorted(prediction.label_ids.tolist()), "recall": recall}))


@pytest.mark.process
@pytest.mark.parametrize("loader", ["get_train_dataloader", "get_eval_dataloader"])
def test_no_worker_outlives_a_run_that_is_killed(tmp_path, rows, loader, monkeypatch):
    few = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 1, "dataloader_num_workers": 2}
    trainer = build(tmp_path, rows, **few)
    trainer.data_collator = trainer.evaluation_collator = name_worker
    assert_workers_end_with_their_parent(getattr(trainer, loader)(), monkeypatch)


@pytest.mark.process
def test_several_processes_evaluate_every_clip_once(tmp_path):
    predict_and_report(str(tmp_path), str(tmp_path / "one.json"))
    run_processes(__file__, "predict", str(tmp_path), str(tmp_path / "two.json"))
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert one["clips"] == list(range(11))
    assert two == one


def test_the_loaders_of_evaluations_are_public(tmp_path, rows):
    """Your own loop over them sees what `evaluate` scores: each clip once, with all captions and without a crop."""
    trainer = build(tmp_path, rows, per_device_eval_batch_size=5, max_audio_seconds=0.3)
    loaders = [trainer.get_eval_dataloader(), trainer.get_test_dataloader(rows[:8])]
    loaders.append(trainer.get_eval_dataloader(Dataset.from_list(rows[:8])))
    quick = arguments(tmp_path, per_device_eval_batch_size=5, max_audio_seconds=0.3, **QUICK)
    sets = SupCLAPTrainer(trainer.clap, quick, rows, {"half": rows[:8]}, processor())
    loaders.append(sets.get_eval_dataloader("half"))
    for loader in loaders:
        batches = list(loader)
        assert [batch["clip_index"].tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7]]
        assert {batch["input_ids"].shape[1] for batch in batches} == {2}
        samples, _ = soundfile.read(rows[0]["audio_path"], frames=4800, dtype="float32")
        beginning = processor()(audio=samples, sampling_rate=16000, return_tensors="pt")["input_features"]
        assert torch.equal(batches[0]["input_features"][:1], beginning)
    for trainer, missing in ((sets, None), (build(tmp_path, rows), {"half": rows})):
        with pytest.raises(ValueError, match="eval_dataset"):
            trainer.get_eval_dataloader(missing)


@pytest.mark.parametrize(
    ("result", "added"), [(None, {}), ({}, {}), ({"own": np.float32(0.5)}, {"eval_own": 0.5})], ids=str
)
def test_own_metrics_are_added_or_only_printed(tmp_path, rows, result, added):
    seen = []
    options = {"compute_metrics": lambda prediction: seen.append(prediction.predictions[0].shape) or result}
    args = arguments(tmp_path, num_train_epochs=1)
    trainer = SupCLAPTrainer(builders.supclap_model(), args, rows, rows[:8], processor(), **options)
    trainer.train()
    metrics = trainer.state.log_history[-2]
    assert seen == [(8, 16)]
    assert added.items() <= metrics.items()
    assert "eval_mean_recall" in metrics


@pytest.mark.parametrize("result", [0.5, (1, 2)])
def test_own_metrics_of_another_type_are_refused(tmp_path, rows, result):
    trainer = build(tmp_path, rows)
    trainer.compute_metrics = lambda prediction: result
    with pytest.raises(TypeError, match=f"compute_metrics returned.*{type(result).__name__}"):
        trainer.evaluate()


def test_the_mean_loss_of_a_resumed_run_is_that_of_one_run(tmp_path, rows):
    """With logs and checkpoints at different steps; a run that is resumed at its end does no step."""
    options = {"num_train_epochs": 3, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
    options |= {"eval_strategy": "no", "load_best_model_at_end": False, "save_total_limit": None}
    whole = build(tmp_path / "run", rows, **options)
    output = whole.train()
    assert output.training_loss == output.metrics["train_loss"] == whole.state.log_history[-1]["train_loss"]
    every = build(tmp_path / "every", rows, **{**options, "logging_steps": 1})
    every.train()
    assert output.training_loss == pytest.approx(np.mean(losses(every)), rel=1e-6)
    for step in (3, 6, 9):
        resumed = build(tmp_path / "run", rows, **options)
        again = resumed.train(str(tmp_path / "run" / f"checkpoint-{step}"))
        assert again.training_loss == again.metrics["train_loss"] == output.training_loss, step
    # a checkpoint of an earlier version has no sum of the losses
    path = tmp_path / "run" / "checkpoint-6" / "supclap_run.json"
    written = json.loads(path.read_text())
    del written["loss_sum"]
    path.write_text(json.dumps(written))
    assert 0 < build(tmp_path / "run", rows, **options).train(str(path.parent)).training_loss < output.training_loss


def test_a_subclass_may_use_the_outputs_of_a_step(tmp_path, rows):
    trainer = build(tmp_path, rows)
    batch = next(iter(trainer.get_train_dataloader()))
    loss, outputs = trainer.compute_loss(trainer.model.train(), batch, return_outputs=True)
    assert loss is outputs.loss
    assert outputs.audio_embeds.shape == (4, 16)
    assert trainer.compute_loss(trainer.model, batch).shape == ()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_shows_a_bar(tmp_path, rows, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    found = []
    for no_bars in (False, True):
        trainer = build(tmp_path, rows, disable_tqdm=no_bars)
        kinds = (SupCLAPProgressCallback, LineCallback, ProgressCallback, PrinterCallback)
        found.append([type(each) for each in trainer.callback_handler.callbacks if isinstance(each, kinds)])
    assert found == [[SupCLAPProgressCallback if is_terminal else LineCallback], [LineCallback]]


def test_evaluations_without_rows_are_refused_with_the_remedy(tmp_path, rows):
    with pytest.raises(ValueError, match=r"eval_dataset.*eval_strategy='no'"):
        SupCLAPTrainer(builders.supclap_model(), arguments(tmp_path), rows, processing_class=processor())


def test_a_loss_function_of_transformers_points_to_objectives(tmp_path, rows):
    with pytest.raises(ValueError, match=r"compute_loss_func.*objective="):
        SupCLAPTrainer(builders.supclap_model(), arguments(tmp_path), rows, rows, processor(), compute_loss_func=len)


@pytest.mark.parametrize("name", ["save_pretrained", "config", "push_to_hub", "encode_text"])
def test_the_module_names_the_road_to_the_model(tmp_path, rows, name):
    trainer = build(tmp_path, rows)
    for module in (trainer.model, trainer.accelerator.unwrap_model(trainer.model)):
        with pytest.raises(AttributeError, match=rf"{name}.*trainer\.clap.*trainer\.save_model"):
            getattr(module, name)
    assert not hasattr(trainer.model, name)


def test_among_equal_scores_the_last_checkpoint_is_the_best(tmp_path, rows, capsys):
    options = {"num_train_epochs": 3, "metric_for_best_model": "eng_t2a_R@10", "save_total_limit": 1}
    trainer = build(tmp_path, rows, **options)  # eight clips: always 1
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (9, 1.0)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-9"]
    assert "3 equal evaluations" in capsys.readouterr().out

    scores = iter([0.5, 0.75, 0.75, 0.25])
    trainer = build(
        tmp_path / "peak", rows, num_train_epochs=4, metric_for_best_model="eval_own", save_total_limit=None
    )
    trainer.compute_metrics = lambda prediction: {"own": next(scores)}
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (9, 0.75)


def test_drift_of_an_evaluation_does_not_depend_on_the_order_of_the_clips(tmp_path, rows, monkeypatch):
    """Several processes return clips in another order; groups of equal captions must stay with their clips."""
    twins = [{**row, "captions": rows[index % 5]["captions"]} for index, row in enumerate(rows)]
    model = builders.supclap_model()
    args = arguments(tmp_path, positives="captions", svr="bi-dynamic", radius_num_similarities=8, radius_init=0.3)
    trainer = SupCLAPTrainer(model, args, twins, twins, processor())
    radius = trainer.module.objective.regularizer.radius_of("t2a")
    torch.nn.init.normal_(radius.layers[-1].weight, generator=torch.Generator().manual_seed(0))
    prediction = trainer.predict(twins)
    measure = trainer._metrics_of(IndexedRows(twins))
    monkeypatch.setattr(type(args), "world_size", 2)  # batches of 8 clips
    order = np.array([7, 0, 3, 11, 1, 9, 2, 10, 4, 8, 5, 6])
    embeds = tuple(each[order] for each in prediction.predictions)
    shuffled = EvalPrediction(predictions=embeds, label_ids=prediction.label_ids[order])
    expected = measure(EvalPrediction(predictions=prediction.predictions, label_ids=prediction.label_ids))
    clips, texts = map(torch.from_numpy, prediction.predictions)
    groups = torch.tensor([group_id(row, "captions") for row in twins])
    pairs = clips, texts[:, 0], model.logit_scale.detach().exp()
    numbers = perpendicular_components(*pairs, 8, groups)
    numbers |= radius_by_hard_negatives(radius, *pairs, groups)
    assert {"perpendicular_global", "radius_hard_6"} <= numbers.keys()
    assert {name: expected[name] for name in numbers} == pytest.approx(
        {name: value.item() for name, value in numbers.items()}, abs=1e-6
    )
    found = measure(shuffled)
    assert found["perpendicular_global"] == pytest.approx(expected["perpendicular_global"], abs=1e-6)
    assert found == pytest.approx(expected, abs=1e-6)


if __name__ == "__main__":
    report = train_and_report if sys.argv[1] == "train" else predict_and_report
    report(*sys.argv[2:])
    leave_process_group()


def test_drift_is_computed_in_the_order_of_the_rows(tmp_path, rows):
    """Several processes return the clips in another order; groups of clips are those of the rows."""
    trainer = build(tmp_path, rows, track_drift=True, positives="captions")
    labelled = []
    for number, row in enumerate(rows):
        labelled.append({**row, "captions": {language: [f"sound {number // 3}"] for language in row["captions"]}})
    grouped = IndexedRows(labelled)
    rng, count = np.random.default_rng(0), len(rows)
    embeds = rng.standard_normal((2, count, 16)).astype(np.float32)
    embeds /= np.linalg.norm(embeds, axis=-1, keepdims=True)
    order, metrics = rng.permutation(count), trainer._metrics_of(grouped)
    results = []
    for places in (np.arange(count), order):
        results.append(
            metrics(SimpleNamespace(predictions=(embeds[0][places], embeds[1][places][:, None]), label_ids=places))
        )
    assert any("drift" in name or "perpendicular" in name for name in results[0])
    assert results[1] == pytest.approx(results[0])


def test_a_trained_model_is_named_by_its_output_folder(tmp_path):
    rows = tone_rows(tmp_path)
    trainer = build(tmp_path / "SVR-seed0", rows, **QUICK)
    assert load_embedding_model(trainer.clap, trainer.processor).name == "SupCLAPModel"
    trainer.train()
    assert load_embedding_model(trainer.clap, trainer.processor).name == "SVR-seed0"


def test_both_loaders_have_the_options_of_the_arguments(tmp_path, rows):
    options = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3, "dataloader_persistent_workers": False}
    trainer = build(tmp_path, rows, dataloader_multiprocessing_context="spawn", **options)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader(rows)):
        assert loader.multiprocessing_context.get_start_method() == "spawn"
        assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, False)
    assert build(tmp_path, rows).get_train_dataloader().multiprocessing_context is None
