"""What a step costs whose text tower is frozen, when the texts are remembered and when they are not.

    OMP_NUM_THREADS=1 python benchmarks/bench_frozen.py

KCL on eight languages, with the model and the captions of `bench_step.py`. The step with a cache is that of every epoch
after the first. It takes turns with the step without one, and with what is left to do at best: the audio tower forward
and backward. Gradients are compared first, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_step import build_model, make_batch, require_equal_gradients, run_step
from rows import Row, compare, get_device, print_rows, take_turns

from modeling_supclap.training.contrastive_module import ContrastiveModule
from modeling_supclap.training.objectives import ContrastiveObjective


def measure(rounds: int = 3, clips: int = 24, width: int = 96) -> list[Row]:
    """The step with and without a cache, in units of the audio pass."""
    torch.manual_seed(0)
    device = get_device()
    model: Any = build_model(width, vocabulary=8000)
    model.to(device).text_model.requires_grad_(False)
    batch = {name: tensor.to(device) for name, tensor in make_batch(model, clips, texts=8).items()}

    objective = ContrastiveObjective("kcl")
    cached, plain = ContrastiveModule(model, objective), ContrastiveModule(model, objective, cache_frozen="never")
    require_equal_gradients(plain, cached, {name: tensor[:4] for name, tensor in batch.items()})

    def pass_audio() -> None:
        model.zero_grad(set_to_none=False)
        model.get_audio_features(batch["input_features"], batch["audio_attention_mask"]).pooler_output.sum().backward()

    ways: dict[str, Callable[[], Any]] = {
        "audio": pass_audio,
        "cached": partial(run_step, cached, batch),
        "not cached": partial(run_step, plain, batch),
    }
    seconds = take_turns(ways, rounds)
    return [
        Row("frozen", "KCL of 8, texts remembered / the audio pass", *compare(seconds, "cached", "audio"), "<= 1.1"),
        Row("frozen", "the same, texts embedded each time", *compare(seconds, "not cached", "audio")),
    ]


if __name__ == "__main__":
    print_rows(measure())
