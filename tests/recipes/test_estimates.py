"""Estimates of a training run: a local model has the size in its own configuration."""

import builders

from modeling_supclap.recipes.arguments import parse_arguments
from modeling_supclap.recipes.estimates import estimate
from modeling_supclap.recipes.train_supclap import OPTIONS


def memory_gib(model: str) -> float:
    words = ["--dataset", "audiocaps", "--model", model, "--per_device_train_batch_size", "2", "--output_dir", "out"]
    found = estimate(parse_arguments(OPTIONS, words), num_clips=100)
    assert found is not None
    return found.memory_gib


def test_a_small_local_model_needs_little(tmp_path):
    folder = builders.save_supclap(tmp_path / "model")
    assert memory_gib(str(folder)) < 0.1
    assert memory_gib("laion/clap-htsat-unfused") > 5
