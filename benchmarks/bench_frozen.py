"""What a step costs whose text tower is frozen, when the texts are remembered and when they are not.

    OMP_NUM_THREADS=1 python benchmarks/bench_frozen.py [--rounds 5] [--clips 24] [--width 96]

KCL on eight languages, with the model, the captions and the measures of `bench_step.py`. The step with a cache is that
of every epoch after the first. It takes turns with the step without one, and with what is left to do at best: the audio
tower forward and backward. Gradients are compared first, in float64.
"""

from __future__ import annotations

import argparse

import torch
from bench_step import build_model, make_batch, measure_bytes, require_equal_gradients, run_step, time_step
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


def main() -> None:
    """Prints time and memory of the three, as multiples of the audio pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clips", type=int, default=24)
    parser.add_argument("--width", type=int, default=96)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: SupCLAPModel = build_model(options.width, vocabulary=8000).to(device)  # type: ignore[arg-type]
    model.text_model.requires_grad_(False)
    batch = {name: tensor.to(device) for name, tensor in make_batch(model, options.clips, texts=8).items()}

    objective = ContrastiveObjective("kcl")
    modules = {
        "audio pass": AudioPass(model),
        "cached": ContrastiveModule(model, objective),
        "not cached": ContrastiveModule(model, objective, cache_frozen="never"),
    }
    few = {name: tensor[:4] for name, tensor in batch.items()}
    difference = require_equal_gradients(modules["not cached"], modules["cached"], few)
    print(f"{device}, {torch.get_num_threads()} threads, {options.clips} clips; gradients differ by {difference:.0e}")

    least = dict.fromkeys(modules, float("inf"))
    for module in modules.values():
        run_step(module, batch)  # the first epoch
    for _ in range(options.rounds):
        for name, module in modules.items():
            least[name] = min(least[name], time_step(module, batch))

    one, one_bytes = least["audio pass"], measure_bytes(modules["audio pass"], batch)
    print(f"{'step':12}{'time / audio pass':>20}{'memory / audio pass':>22}")
    for name, module in modules.items():
        print(f"{name:12}{least[name] / one:20.2f}{measure_bytes(module, batch) / one_bytes:22.2f}")


if __name__ == "__main__":
    main()
