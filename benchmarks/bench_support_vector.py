"""What support vectors cost: a loss with them beside the same loss without, forward and backward.

    python benchmarks/bench_support_vector.py [--clips 2048] [--dim 1024] [--rounds 15]

Variants run in turn in one process; the figure of each is the median over the rounds of its time in units of InfoNCE's
time in the same round. The naive form makes the support vectors and compares them with every clip.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from modeling_supclap.losses import StaticRadius, info_nce
from modeling_supclap.training.objectives import ContrastiveObjective, SupportVectorRegularizer

SCALE = torch.tensor(1 / 0.07)


def naive_uni(audio: Tensor, text: Tensor, radius: Tensor) -> Tensor:
    """InfoNCE plus SVR from text to audio, written as the paper has it."""
    pull = audio - text
    support = normalize(text + radius * pull / pull.norm(dim=-1, keepdim=True), dim=-1)
    own = torch.arange(len(audio))
    return info_nce(audio, text, SCALE) + cross_entropy(SCALE * support @ audio.T, own)


def variants() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The losses of a pair of embedding matrices, by name."""
    radius = StaticRadius().radius
    objectives = {
        "InfoNCE": ContrastiveObjective(),
        "uni-static": ContrastiveObjective(regularizer=SupportVectorRegularizer({"t2a": StaticRadius()})),
        "bi-static": ContrastiveObjective(
            regularizer=SupportVectorRegularizer({"t2a": StaticRadius(), "a2t": StaticRadius()})
        ),
    }
    losses = {
        name: lambda audio, text, objective=objective: objective(audio, text[:, None], SCALE)[0]
        for name, objective in objectives.items()
    }
    return {**losses, "naive uni-static": lambda audio, text: naive_uni(audio, text, radius)}


def seconds(loss: Callable[[Tensor, Tensor], Tensor], raw: tuple[Tensor, Tensor]) -> float:
    """One forward and backward pass, through the normalisation."""
    for tensor in raw:
        tensor.grad = None
    started = time.perf_counter()
    loss(*(normalize(tensor, dim=-1) for tensor in raw)).backward()
    return time.perf_counter() - started


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    raw = (
        torch.randn(options.clips, options.dim, requires_grad=True),
        torch.randn(options.clips, options.dim, requires_grad=True),
    )
    losses = variants()
    rounds = [{name: seconds(loss, raw) for name, loss in losses.items()} for _ in range(options.rounds + 1)][1:]
    print(f"{options.clips} clips, {options.dim} dimensions, {torch.get_num_threads()} threads")
    for name in losses:
        ratio = statistics.median(times[name] / times["InfoNCE"] for times in rounds)
        print(f"{name:<18}{1000 * statistics.median(times[name] for times in rounds):>8.0f} ms   x {ratio:.2f}")


if __name__ == "__main__":
    main()
