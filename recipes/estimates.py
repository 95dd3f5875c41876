"""Estimate steps, hours and memory of a training run from model and data sizes, without downloads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import BertConfig

from modeling_supclap import CEDConfig, SupCLAPConfig, SupCLAPModel
from modeling_supclap.configuration_supclap import SONAR_TEXT_CONFIG
from modeling_supclap.recipes.options import as_mapping
from modeling_supclap.training.options import captions_per_clip

TRAIN_CLIPS = {"audiocaps": 49274, "clotho": 3839, "wavcaps": 398050}
"""Number of clips in the published training splits: AudioCaps as often distributed ("approximately 49k" in SupCLAP
section 4.1.1), Clotho's development split, WavCaps without the 5,000 clips held out in SupCLAP section E.2."""

TEST_CLIPS = {"audiocaps": 957, "clotho": 1045, "wavcaps": 5000, "vggsound": 15446}
"""Number of clips in the published test splits. AudioCaps as often distributed; the authors' list has 975."""

ALL_CLIPS = {"esc50": 2000, "urbansound8k": 8732}
"""Number of clips in datasets with folds."""

CAPTIONS_PER_CLIP = {"clotho": 5}  # of training clips; in all other datasets, 1
TOKENS_PER_CAPTION = 20
FLOPS_PER_SECOND = {"cuda": 1e14, "cpu": 2e10}
"""Sustained training speed in FLOP/s: about a third of the TF32 peak of an H100 GPU, or one server CPU core."""
GPU_PARAMETERS = 20_000_000
"""Models with more parameters are assumed to be trained on a GPU."""


def count_published(dataset: str, split: str) -> tuple[str, int]:
    """Return the name of a part of a dataset, "the dataset" or the split, and its published number of clips, or 0."""
    if dataset in ALL_CLIPS:
        return "the dataset", ALL_CLIPS[dataset]
    return split, (TRAIN_CLIPS if split == "train" else TEST_CLIPS).get(dataset, 0)


class Estimate(NamedTuple):
    """Estimated optimiser steps, hours and memory of a training run.

    The hours assume a speed of `FLOPS_PER_SECOND`, and do not include data loading.
    """

    steps: int
    hours: float
    memory_gib: float  # of weights, gradients, Adam's two moments, and the activations of a batch

    def __str__(self) -> str:
        return f"{self.steps} steps, {60 * self.hours:.1f} minutes of arithmetic, {self.memory_gib:.1f} GiB"


def estimate(parsed: Sequence[Any], num_clips: int = 0) -> Estimate | None:
    """Estimate the cost of a run of `train_supclap` from its parsed arguments.

    `num_clips` is the number of training clips; 0: the `num_train` of generated data, or the published number. Returns
    None if neither is known.

    A training step of a transformer needs 6 floating-point operations per parameter and token. The activations need
    about 34 bytes per token, layer and hidden unit in float16 (Korthikanti et al., 2022), and 68 in float32. A model in
    a local folder has the size in its configuration; every other pretrained encoder that of CED-Base or SONAR.
    """
    data, model_args, _, args = parsed
    options = data.builder_options
    clips = num_clips or options.get("num_train") or 0
    if not clips:
        for part in data.dataset.split("+"):
            clips += TRAIN_CLIPS.get(part, 0)
    if not clips:
        return None
    if args.every_caption:
        clips *= CAPTIONS_PER_CLIP.get(data.dataset, 1)
    batch = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    steps = args.max_steps if args.max_steps > 0 else int(clips // batch * args.num_train_epochs)

    is_published = model_args.model is not None or model_args.audio_encoder != "scratch"
    shapes = as_mapping(model_args.audio_config), as_mapping(model_args.text_config)
    model = _local_shape(model_args.model) or _shape(json.dumps(shapes), model_args.vocab_size, is_published)

    texts = captions_per_clip(args.loss, args.languages, args.languages_per_clip, args.negatives_per_clip)
    seconds = min(args.max_audio_seconds, options.get("duration_seconds", 10.0))
    # 25 patches of 16 x 16 per second of audio
    tokens = {"audio": 25 * seconds, "text": TOKENS_PER_CAPTION * texts}
    work, activations = 0.0, 0.0
    for name, tower in (("audio", model.audio_model), ("text", model.text_model)):
        weights = tower.num_parameters(exclude_embeddings=True)
        work += 6 * weights * tokens[name]
        width = tower.config.hidden_size
        layers = weights / (12 * width**2)
        activations += 68 * tokens[name] * layers * width

    device = "cuda" if model.num_parameters() > GPU_PARAMETERS else "cpu"
    hours = work * batch * steps / FLOPS_PER_SECOND[device] / 3600
    chunk = min(batch, args.cached_chunk_size or batch)
    memory = 16 * model.num_parameters() + activations * chunk
    return Estimate(steps, hours, memory / 2**30)


def _local_shape(name: str | None) -> SupCLAPModel | None:
    """Build a SupCLAP model of a local folder without weights (on the meta device). Return None for other models."""
    if name is None or not Path(name, "config.json").is_file():
        return None
    return _saved_shape(Path(name, "config.json").read_text(encoding="utf-8"))


@cache
def _saved_shape(config: str) -> SupCLAPModel | None:
    """Build a model without weights from the text of its `config.json`. Return None if it is not a SupCLAP model."""
    fields = json.loads(config)
    if fields.get("model_type") != SupCLAPConfig.model_type:
        return None
    with torch.device("meta"):
        return SupCLAPModel(SupCLAPConfig.from_dict(fields))


@cache
def _shape(configs: str, vocab_size: int, is_published: bool) -> SupCLAPModel:
    """Build a model without weights (on the meta device): CED and BERT, or CED-Base and SONAR if `is_published`."""
    audio_config, text_config = json.loads(configs)
    text: Any = BertConfig(vocab_size=vocab_size, **text_config)
    if is_published:
        text = {**SONAR_TEXT_CONFIG, **text_config}
    with torch.device("meta"):
        return SupCLAPModel(SupCLAPConfig(audio_config=CEDConfig(**audio_config), text_config=text))
