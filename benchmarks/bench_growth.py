"""How cost grows: the exponent of time over the size, from the least times of several sizes, beside the expected.

    OMP_NUM_THREADS=1 python benchmarks/bench_growth.py [--largest_gallery 1000000]

An exponent of 1 is linear. What is expected to be linear may be a tenth above it, and the losses, whose similarities
are a matrix, are quadratic in the clips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rows import Row, get_device, run_script, take_turns
from torch.nn.functional import normalize

from modeling_supclap import CEDConfig, CEDFeatureExtractor, CEDModel
from modeling_supclap.losses import info_nce, kcl_loss, support_vector_loss
from modeling_supclap.metrics.recall import LazySimilarity, best_ranks

SLACK = 0.1


def make_row(what: str, expected: float, make: Callable[[int], Callable[[], Any]], sizes: Sequence[int]) -> Row:
    """Times each size, and fits a line through the logarithms: seconds grow as size ** slope."""
    ways = {str(size): make(size) for size in sizes}
    seconds = take_turns(ways, 3)
    least = [min(seconds[str(size)]) for size in sizes]
    slope = float(np.polyfit(np.log(sizes), np.log(least), 1)[0])
    shown = f"{what}, {sizes[0]:,} to {sizes[-1]:,}: exponent, {expected:g} expected"
    return Row("growth", shown, slope, None, f"<= {expected + SLACK}", "")


def measure(largest_gallery: int = 1_000_000) -> list[Row]:
    """Losses over clips and languages, the tower and the spectrogram over seconds, ranks over the gallery."""
    torch.manual_seed(0)
    device = get_device()

    def unit(*shape: int) -> torch.Tensor:
        return normalize(torch.randn(*shape, device=device), dim=-1).requires_grad_()

    def both_ways(loss: Callable[..., torch.Tensor], *embeds: torch.Tensor) -> None:
        torch.autograd.grad(loss(*embeds), embeds)

    def info(size: int) -> Callable[[], None]:
        return partial(both_ways, partial(info_nce, logit_scale=14.0), unit(size, 512), unit(size, 512))

    def support(size: int) -> Callable[[], None]:
        loss = partial(support_vector_loss, radius=0.1, logit_scale=14.0)
        return partial(both_ways, loss, unit(size, 512), unit(size, 512))

    def languages(size: int) -> Callable[[], None]:
        return partial(both_ways, partial(kcl_loss, logit_scale=14.0), unit(512, 512), unit(512, size, 512))

    tower: Any = CEDModel(CEDConfig(embed_dim=192, depth=4, num_heads=3))
    tower.to(device).eval()
    extractor = CEDFeatureExtractor()

    def embed(seconds: int) -> Callable[[], Any]:
        return partial(tower, torch.randn(1, 64, 100 * seconds + 1, device=device))

    def extract(seconds: int) -> Callable[[], Any]:
        clip = np.random.default_rng(0).standard_normal(16000 * seconds).astype(np.float32)
        return partial(extractor, [clip], sampling_rate=16000, return_tensors="pt")

    queries = normalize(torch.randn(64, 128), dim=-1).numpy()

    def rank(size: int) -> Callable[[], Any]:
        gallery = normalize(torch.randn(size, 128), dim=-1).numpy()
        return lambda: best_ranks(LazySimilarity(queries, gallery), np.arange(64)[:, None])

    galleries = [10**power for power in range(3, round(math.log10(largest_gallery)) + 1)]
    return [
        make_row("InfoNCE over clips", 2, info, [512, 1024, 2048, 4096]),
        make_row("InfoNCE over clips of a common batch", 2, info, [32, 64, 128, 256]),
        make_row("SVR over clips", 2, support, [512, 1024, 2048, 4096]),
        make_row("KCL over languages", 1, languages, [2, 4, 8]),
        make_row("spectrogram over seconds", 1, extract, [5, 10, 20, 60]),
        make_row("CED over seconds, in windows", 1, embed, [5, 10, 20, 60]),
        make_row("ranks over the gallery", 1, rank, galleries),
    ]


if __name__ == "__main__":
    run_script(measure, __doc__)
