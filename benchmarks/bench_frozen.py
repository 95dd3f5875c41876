"""What a step costs whose text tower is frozen, when the texts are remembered and when they are not.

    OMP_NUM_THREADS=1 python benchmarks/bench_frozen.py

KCL on eight languages, with the model and the captions of `bench_step.py`. The step with a cache is that of every epoch
after the first. It takes turns with the step without one, and with what is left to do at best: the audio tower forward
and backward. Gradients are compared first, in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from bench_step import build_model, make_batch, require_equal_gradients, run_step
from rows import Row, compare, get_device, print_rows, take_turns
from torch import Tensor, nn

from modeling_supclap import SupCLAPModel
from modeling_supclap.training.contrastive_module import ContrastiveModule, ContrastiveOutput
from modeling_supclap.training.objectives import ContrastiveObjective


class AudioPass(nn.Module):
    """The audio tower and its projection, alone."""

    def __init__(self, model: SupCLAPModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_features: Tensor, audio_attention_mask: Tensor, **texts: Tensor) -> ContrastiveOutput:
        """Has a loss that is as good as nothing."""
        embeds = self.model.get_audio_features(input_features, audio_attention_mask).pooler_output
        return ContrastiveOutput(loss=embeds.sum())


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

    modules: dict[str, nn.Module] = {"audio pass": AudioPass(model), "cached": cached, "not cached": plain}
    seconds = take_turns({name: partial(run_step, module, batch) for name, module in modules.items()}, rounds)
    return [
        Row(
            "frozen", "KCL of 8, texts remembered / the audio pass", *compare(seconds, "cached", "audio pass"), "<= 1.1"
        ),
        Row("frozen", "the same, texts embedded each time", *compare(seconds, "not cached", "audio pass")),
    ]


if __name__ == "__main__":
    print_rows(measure())
