"""What the losses cost: beside InfoNCE by automatic differentiation, beside the naive form, and in tiles.

    python benchmarks/bench_support_vector.py [--clips 2048] [--dim 1024] [--rounds 9] [--large 32768]

Variants run in turn in one process, on a GPU where there is one; a ratio is the least over the rounds, and the median,
of the time in units of the first variant's in the same round. The naive form makes the support vectors and compares
them with every clip. Memory is what a pass keeps for its gradient and adds at its worst moment. All forms must agree in
loss and gradients. Then the losses in tiles at a size whose similarities are too many to hold.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from modeling_supclap.losses import DynamicRadius, StaticRadius, info_nce, kcl_loss, sigmoid_loss, support_vector_loss
from modeling_supclap.training.objectives import ContrastiveObjective, SupportVectorRegularizer

Loss = Callable[[Tensor, Tensor], Tensor]

SCALE = 1 / 0.07
RADIUS = 0.1


def by_autograd(audio: Tensor, text: Tensor) -> Tensor:
    """InfoNCE as its formula reads."""
    logits = SCALE * audio @ text.T
    own = torch.arange(len(audio), device=audio.device)
    return cross_entropy(logits, own) + cross_entropy(logits.T, own)


def naive(audio: Tensor, text: Tensor, ways: int) -> Tensor:
    """InfoNCE plus SVR from text to audio, or both ways, written as the paper has it."""
    own = torch.arange(len(audio), device=audio.device)
    total = by_autograd(audio, text)
    for anchors, targets in ((text, audio), (audio, text))[:ways]:
        pull = targets - anchors
        support = normalize(anchors + RADIUS * pull / pull.norm(dim=-1, keepdim=True), dim=-1)
        total = total + cross_entropy(SCALE * support @ targets.T, own)
    return total


def objective(audio: Tensor, text: Tensor, module: ContrastiveObjective) -> Tensor:
    """This project's way, as training calls it."""
    return module(audio, text[:, None], torch.tensor(SCALE, device=audio.device))[0]


def variants(device: torch.device) -> dict[str, Loss]:
    """The losses of a pair of embedding matrices, by name."""
    losses: dict[str, Loss] = {
        "InfoNCE by autograd": by_autograd,
        "naive uni-static": partial(naive, ways=1),
        "naive bi-static": partial(naive, ways=2),
        "InfoNCE": partial(objective, module=ContrastiveObjective()),
    }
    for name, ways, radius in (
        ("uni-static", ("t2a",), StaticRadius),
        ("bi-static", ("t2a", "a2t"), StaticRadius),
        ("bi-dynamic", ("t2a", "a2t"), partial(DynamicRadius, 16)),
    ):
        regularizer = SupportVectorRegularizer({way: radius(init=RADIUS) for way in ways}, beta=0.0)
        losses[name] = partial(objective, module=ContrastiveObjective(regularizer=regularizer).to(device))
    return losses


def passes(loss: Loss, raw: list[Tensor]) -> tuple[float, Tensor, list[Tensor]]:
    """Seconds of one forward and backward pass through the normalisation, the loss and its gradients."""
    if raw[0].is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    value = loss(*(normalize(tensor, dim=-1) for tensor in raw))
    gradients = torch.autograd.grad(value, raw)
    if raw[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, value.detach(), list(gradients)


def kept_megabytes(loss: Loss, raw: list[Tensor]) -> float:
    """What the forward pass keeps for the gradient."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(*(normalize(tensor, dim=-1) for tensor in raw))
    return sum(storages.values()) / 1e6


def side_by_side(clips: int, dim: int, rounds: int, device: torch.device) -> None:
    """The first table."""
    raw = [torch.randn(clips, dim, device=device, requires_grad=True) for _ in range(2)]
    losses = variants(device)
    exact: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for name, loss in losses.items():
        exact[name] = passes(loss, raw)[1:]

    # The linear form uses that the norms are 1; through the normalisation both have one gradient.
    for name, peer in {"InfoNCE": "InfoNCE by autograd", "uni-static": "naive uni-static"}.items():
        torch.testing.assert_close(exact[name][0], exact[peer][0], rtol=1e-5, atol=1e-6)
        for own, other in zip(exact[name][1], exact[peer][1], strict=True):
            assert (own - other).norm() <= 1e-4 * other.norm(), f"{name} has another gradient than {peer}"
    for name in ("bi-static", "bi-dynamic"):
        torch.testing.assert_close(exact[name][0], exact["naive bi-static"][0], rtol=1e-5, atol=1e-6)

    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(rounds):
        for name, loss in losses.items():
            times[name].append(passes(loss, raw)[0])

    unit = times["InfoNCE by autograd"]
    print(f"{clips} clips, {dim} dimensions, {device.type}, {torch.get_num_threads()} threads")
    for name, seconds in times.items():
        median = statistics.median(mine / theirs for mine, theirs in zip(seconds, unit, strict=True))
        least = min(seconds) / min(unit)
        kept = kept_megabytes(losses[name], raw)
        print(f"{name:<22}{1000 * min(seconds):>8.0f} ms   x {least:.2f} (median {median:.2f})   keeps {kept:.0f} MB")


def in_tiles(large: int, dim: int, device: torch.device, only: str | None = None) -> None:
    """Each loss in tiles, against the plain one on a part, and alone on the whole."""
    radius = torch.tensor(RADIUS, device=device)
    losses: dict[str, Callable[..., Tensor]] = {
        "InfoNCE": lambda a, t, **tiles: info_nce(a, t, SCALE, **tiles),
        "SigLIP": lambda a, t, **tiles: sigmoid_loss(a, t, 10.0, -10.0, **tiles),
        "SVR static": lambda a, t, **tiles: support_vector_loss(t, a, radius, SCALE, **tiles),
        "KCL of 2": lambda a, t, **tiles: kcl_loss(a, torch.stack([t, t.flip(-1)], dim=1), SCALE, **tiles),
    }
    dynamic = DynamicRadius(16).to(device)

    def dynamic_loss(audio: Tensor, text: Tensor, chunk_size: int | None = None) -> Tensor:
        rows = chunk_size or len(audio)
        return support_vector_loss(
            text, audio, dynamic.in_tiles(text, audio, SCALE, chunk_size=rows), SCALE, chunk_size=chunk_size
        )

    losses["SVR dynamic"] = dynamic_loss
    matrix = 4 * large**2 / 1e9
    print(
        f"\nin tiles of 512 rows: {large} clips, {dim} dimensions; one matrix of similarities would be {matrix:.1f} GB"
    )
    for name, loss in losses.items():
        if only not in (None, name):
            continue

        part = [torch.randn(1500, dim, device=device, requires_grad=True) for _ in range(2)]
        _, plain, plain_gradients = passes(loss, part)
        _, tiled, tiled_gradients = passes(partial(loss, chunk_size=512), part)
        torch.testing.assert_close(tiled, plain, rtol=1e-6, atol=1e-6)
        for own, other in zip(tiled_gradients, plain_gradients, strict=True):
            assert (own - other).norm() <= 1e-4 * other.norm(), f"{name} in tiles has another gradient"

        whole = [torch.randn(large, dim, device=device, requires_grad=True) for _ in range(2)]
        before = resident_gigabytes(device)
        seconds, value, _ = passes(partial(loss, chunk_size=512), whole)
        added = resident_gigabytes(device, at_most=True) - before
        print(f"{name:<22}{seconds:>8.1f} s   loss {value.item():.4f}   adds {added:.2f} GB at most")


def resident_gigabytes(device: torch.device, at_most: bool = False) -> float:
    """Memory in use now, from where a new maximum is kept; or the maximum since then."""
    if device.type == "cuda":
        if at_most:
            return torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e9

    if not at_most:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the maximum back to what is in use
    field = "VmHWM:" if at_most else "VmRSS:"
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index(field) + 1]) / 1e6


def main() -> None:
    """Runs the rounds and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--large", type=int, default=32_768)
    parser.add_argument("--large_dim", type=int, default=64)
    parser.add_argument("--only", help="One of the losses in tiles, and nothing else.")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.only is None:
        side_by_side(options.clips, options.dim, options.rounds, device)
    in_tiles(options.large, options.large_dim, device, options.only)


if __name__ == "__main__":
    main()
