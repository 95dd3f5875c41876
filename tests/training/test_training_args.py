"""Default training arguments, and errors for invalid ones."""

import math
import os
from datetime import timedelta

import pytest
import torch

from modeling_supclap.training import training_args
from modeling_supclap.training.training_args import SupCLAPTrainingArguments, TemporalTrainingArguments


def test_all_languages_are_evaluated_by_default():
    assert SupCLAPTrainingArguments(languages=["fra", "deu"]).eval_languages == ["fra", "deu"]
    assert SupCLAPTrainingArguments(languages=["fra", "deu"], eval_languages=["deu"]).eval_languages == ["deu"]


def test_defaults_are_the_papers(tmp_path):
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path))
    assert (args.learning_rate, args.per_device_train_batch_size, args.num_train_epochs) == (5e-5, 24, 10)
    assert (args.weight_decay, args.svr_alpha, args.svr_beta) == (0, 1, 0.01)
    assert args.metric_for_best_model == "mean_recall"
    assert args.greater_is_better


def test_workers_persist_and_pinned_batches_are_copied_without_waiting(tmp_path):
    for workers, pins in ((2, True), (0, False)):
        args = SupCLAPTrainingArguments(str(tmp_path), dataloader_num_workers=workers, dataloader_pin_memory=pins)
        assert args.dataloader_persistent_workers is (workers > 0)
        assert args.accelerator_config.non_blocking is pins
    some = {"dataloader_num_workers": 2, "dataloader_persistent_workers": False}
    assert not SupCLAPTrainingArguments(str(tmp_path), **some).dataloader_persistent_workers


@pytest.mark.parametrize(
    ("metric", "higher"),
    [
        ("mean_recall", True),
        ("eval_eng_t2a_R@1", True),
        ("temporal_accuracy", True),
        ("loss", False),
        ("eval_loss", False),
        ("MRV", False),
        ("eval_fra_a2t_mean_rank", False),
    ],
)
def test_the_best_checkpoint_is_the_better_one(tmp_path, metric, higher):
    assert SupCLAPTrainingArguments(output_dir=str(tmp_path), metric_for_best_model=metric).greater_is_better is higher
    given = {"metric_for_best_model": metric, "greater_is_better": not higher}
    assert SupCLAPTrainingArguments(output_dir=str(tmp_path), **given).greater_is_better is not higher


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(("metric", "mode"), [("mean_recall", "max"), ("MRV", "min")])
def test_schedules_that_follow_the_metric_know_its_direction(tmp_path, schedule, metric, mode):
    options = {"lr_scheduler_type": schedule, "metric_for_best_model": metric, "output_dir": str(tmp_path)}
    assert SupCLAPTrainingArguments(**options).lr_scheduler_kwargs["mode"] == mode
    given = SupCLAPTrainingArguments(**options, lr_scheduler_kwargs={"mode": "min", "patience": 3})
    assert given.lr_scheduler_kwargs == {"mode": "min", "patience": 3}
    assert not SupCLAPTrainingArguments(output_dir=str(tmp_path)).lr_scheduler_kwargs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negatives_per_clip": 2, "loss": "kcl", "languages": ["eng", "fra"]}, "negatives_per_clip.*kcl"),
        ({"negatives_per_clip": -1}, "negatives_per_clip.*-1"),
        ({"matryoshka_widths": [0]}, "matryoshka_widths.*0"),
        ({"early_stopping_patience": 0}, "early_stopping_patience.*0"),
        ({"early_stopping_patience": 2, "load_best_model_at_end": False}, "early_stopping_patience"),
        ({"learning_rates": "fast"}, "learning_rates.*fast"),
        ({"svr": "bi"}, "svr.*'bi'"),
        ({"loss": "nce"}, "loss.*'nce'"),
        ({"positives": "label"}, "positives.*'label'"),
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size"),
        ({"num_train_epochs": 0}, "num_train_epochs.*0"),
        ({"max_audio_seconds": 0.0}, "max_audio_seconds.*0.0"),
        (
            {"every_caption": True, "track_language_errors": True, "languages": ["eng", "fra"]},
            "track_language_errors|every_caption",
        ),
        ({"cached_chunk_size": 0}, "cached_chunk_size.*0"),
        ({"kept_tokens": 0}, "kept_tokens.*0"),
        ({"languages_per_clip": 2, "languages": ["eng", "fra"]}, "languages_per_clip.*2.*infonce"),
        ({"languages_per_clip": 1, "languages": ["eng", "fra"], "loss": "kcl"}, "languages_per_clip.*1"),
        ({"languages_per_clip": 3, "languages": ["eng", "fra"], "loss": "kcl"}, "languages_per_clip.*3"),
        ({"mask_time_length": 0}, "mask_time_length.*0"),
        ({"mask_feature_prob": 5.0}, "mask_feature_prob.*5.0"),
        ({"ema_decay": -0.1}, "ema_decay.*-0.1"),
        ({"ema_decay": 1}, "ema_decay.*1.*below 1"),
        ({"learning_rate": math.nan}, "learning_rate.*nan"),
        ({"weight_decay": -0.1}, "weight_decay.*-0.1"),
        ({"svr_alpha": -1}, "svr_alpha.*-1"),
        ({"svr_beta": -3}, "svr_beta.*-3"),
        ({"svr_alpha": math.inf}, "svr_alpha.*inf"),
        ({"radius_init": 5}, "radius_init.*5.*2"),
        ({"radius_ratio": -0.5}, "radius_ratio.*-0.5"),
        ({"radius_num_similarities": 1}, "radius_num_similarities.*1"),
        ({"max_audio_seconds": math.nan}, "max_audio_seconds.*nan"),
        ({"random_gain_db": -6.0}, "random_gain_db.*-6"),
        ({"random_gain_db": math.nan}, "random_gain_db.*nan"),
        ({"random_gain_db": 400}, "random_gain_db.*400.*40"),
        ({"background_snr_db": [math.nan, 3]}, "background_snr_db.*nan"),
        ({"background_snr_db": [3]}, r"background_snr_db.*\[3\]"),
        ({"matryoshka_widths": 8}, "matryoshka_widths is 8; pass a list"),
        ({"matryoshka_widths": ["8"]}, "matryoshka_widths.*'8'.*number"),
        ({"svr_alpha": "1"}, "svr_alpha.*'1'.*number"),
        ({"background_prob": 1.5}, "background_prob.*1.5"),
        ({"languages": ["de"]}, "'de'.*'deu'"),
        ({"eval_languages": ["klingon"]}, "'klingon'"),
        ({"languages": "eng"}, "languages is the string 'eng'"),
        ({"languages": []}, "languages is empty"),
        ({"loss": "cacl"}, r"loss cacl needs two languages or more, got \['eng'\]"),
        ({"track_language_errors": True}, r"track_language_errors needs two languages or more, got \['eng'\]"),
        (
            {"negatives_per_clip": 1, "track_language_errors": True, "languages": ["eng", "fra"]},
            "track_language_errors with negatives_per_clip",
        ),
        ({"num_train_epochs": 0, "max_steps": 0}, "num_train_epochs is 0"),
        ({"matryoshka_widths": [8, 0]}, "matryoshka_widths is 0; it must be at least 1$"),
        ({"hard_negatives_per_batch": 24}, "hard_negatives_per_batch is 24.*, 24"),
        ({"loss": "own:Loss:x"}, "loss is 'own:Loss:x'; it must be one of infonce, "),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha.*5.0"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor.*0.1"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy.*group_by_length"),
        ({"remove_unused_columns": True}, "remove_unused_columns.*True"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics.*True"),
        ({"eval_do_concat_batches": False}, "eval_do_concat_batches.*False"),
    ],
)
def test_wrong_arguments_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        SupCLAPTrainingArguments(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 0, "max_steps": 1},
        {"loss": "kcl", "languages": ["eng", "fra"], "languages_per_clip": 2},
        {"loss": "own.module:Loss", "negatives_per_clip": 1},
        {"loss": "siglip", "svr": "none", "negatives_per_clip": 1000},
        {"hard_negatives_per_batch": 23},
        {"background_snr_db": (3, 30)},
        {"per_device_train_batch_size": 2, "feature_cache_gib": 0, "early_stopping_patience": 1},
    ],
    ids=str,
)
def test_combinations_at_the_limits_are_valid(tmp_path, options):
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path), **{"svr": "none", **options})
    assert {name: getattr(args, name) for name in options} == options


def test_values_at_the_ends_of_their_ranges_are_valid(tmp_path):
    limits = {
        "ema_decay": 0.999999,
        "svr_alpha": 0.0,
        "radius_init": 2.0,
        "random_gain_db": 40.0,
        "mask_time_prob": 1.0,
    }
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path), **limits)
    assert {name: getattr(args, name) for name in limits} == limits


def test_options_of_post_training_have_ranges():
    with pytest.raises(ValueError, match=r"temporal_beta.*-0\.5"):
        TemporalTrainingArguments(temporal_beta=-0.5)


def test_the_clips_of_all_processes_are_negatives(tmp_path, monkeypatch):
    monkeypatch.setattr(SupCLAPTrainingArguments, "world_size", 2)
    SupCLAPTrainingArguments(str(tmp_path), per_device_train_batch_size=1)
    SupCLAPTrainingArguments(str(tmp_path), hard_negatives_per_batch=47)
    with pytest.raises(ValueError, match="must be less than the batch of all devices, 48"):
        SupCLAPTrainingArguments(str(tmp_path), hard_negatives_per_batch=48)


def test_processes_that_would_each_train_alone_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does; without a GPU the Trainer would not join them
    with pytest.raises(ValueError, match="--use_cpu"):
        SupCLAPTrainingArguments(output_dir=str(tmp_path))


def test_a_single_process_on_cpus_joins_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(training_args, "PartialState", lambda **options: pytest.fail("joined"))
    assert SupCLAPTrainingArguments(str(tmp_path), use_cpu=True)._setup_devices.type == "cpu"


@pytest.mark.parametrize("by_launcher", [False, True])
def test_processes_on_cpus_are_joined_by_the_chosen_backend(tmp_path, monkeypatch, by_launcher):
    joined = []
    monkeypatch.setattr(training_args, "PartialState", lambda **options: joined.append(options))
    monkeypatch.setattr(training_args.TrainingArguments, "_setup_devices", torch.device("cpu"))
    monkeypatch.setattr(training_args.TrainingArguments, "world_size", 2)
    launched = {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": str(by_launcher), "ACCELERATE_TORCH_DEVICE": ""}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    options = {"ddp_backend": "mpi", "ddp_timeout": 7, "use_cpu": not by_launcher}
    assert SupCLAPTrainingArguments(str(tmp_path), **options)._setup_devices == torch.device("cpu")
    assert joined == [{"cpu": True, "backend": "mpi", "timeout": timedelta(seconds=7)}]
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"


def test_tf32_is_the_default_on_a_gpu_that_supports_it(tmp_path, monkeypatch):
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(torch.backends, "fp32_precision", "none")
    for options, expected in (({"use_cpu": True}, None), ({}, True), ({"tf32": False}, False)):
        assert SupCLAPTrainingArguments(output_dir=str(tmp_path), **options).tf32 is expected
    assert torch.backends.fp32_precision == "none"  # the trainer sets it, for its own run


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_sharding_by_the_launcher_is_seen(tmp_path, monkeypatch, name):
    assert SupCLAPTrainingArguments(output_dir=str(tmp_path), use_cpu=True).sharding is None
    args = SupCLAPTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    assert args.sharding == name
