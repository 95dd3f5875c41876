"""What the losses cost: beside InfoNCE by automatic differentiation, beside the naive form, and in tiles.

    python benchmarks/bench_support_vector.py [--clips 2048] [--dim 1024] [--rounds 5] [--large 32768]

Variants run in turn in one process, on a GPU where there is one; the unit is the time of InfoNCE by automatic
differentiation. The naive form makes the support vectors and compares them with every clip. Memory is what a pass keeps
for its gradient. All forms must agree in loss and gradients. Then the losses in tiles at a size whose similarities are
too many to hold.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rows import Row, compare, get_device, print_rows, take_turns
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


def passes(loss: Loss, raw: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One forward and backward pass through the normalisation: the loss and its gradients."""
    value = loss(*(normalize(tensor, dim=-1) for tensor in raw))
    return value.detach(), list(torch.autograd.grad(value, raw))


def kept_megabytes(loss: Loss, raw: list[Tensor]) -> float:
    """What the forward pass keeps for the gradient."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(*(normalize(tensor, dim=-1) for tensor in raw))
    return sum(storages.values()) / 1e6


def measure(clips: int = 2048, dim: int = 1024, rounds: int = 5) -> list[Row]:
    """The rows of the losses: at the size of the goal, and at that of a common batch."""
    torch.manual_seed(0)
    device = get_device()
    rows = []
    for size in (clips, 24):
        raw = [torch.randn(size, dim, device=device, requires_grad=True) for _ in range(2)]
        losses = variants(device)
        require_equal(losses, raw)
        seconds = take_turns({name: partial(passes, loss, raw) for name, loss in losses.items()}, rounds)

        for name, wanted in (
            ("InfoNCE", "<= 1"),
            ("uni-static", "<= 1.3"),
            ("bi-static", "<= 1.8"),
            ("bi-dynamic", "<= 2"),
        ):
            what = f"{name} / InfoNCE by autograd, {size:,} clips"
            ratio = compare(seconds, name, "InfoNCE by autograd")
            rows.append(Row("G4", what, *ratio, wanted if size == clips else ""))
        for name in ("uni-static", "bi-static"):
            ratio = compare(seconds, name, f"naive {name}")
            rows.append(Row("G4", f"{name} / its naive form, {size:,} clips", *ratio, "<= 1"))

        kept = {name: kept_megabytes(losses[name], raw) for name in ("bi-static", "naive bi-static")}
        if size == clips:
            rows.append(
                Row(
                    "G4",
                    "bi-static / its naive form, memory kept",
                    kept["bi-static"] / kept["naive bi-static"],
                    None,
                    "<= 1",
                )
            )
    return rows


def require_equal(losses: dict[str, Loss], raw: list[Tensor]) -> None:
    """Stops where a loss or its gradients differ from the naive form's."""
    exact: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for name, loss in losses.items():
        exact[name] = passes(loss, raw)

    # The linear form uses that the norms are 1; through the normalisation both have one gradient.
    peers = {"InfoNCE": "InfoNCE by autograd", "uni-static": "naive uni-static"}
    for name, peer in (peers | {"bi-static": "naive bi-static", "bi-dynamic": "naive bi-static"}).items():
        torch.testing.assert_close(exact[name][0], exact[peer][0], rtol=1e-5, atol=1e-6)
        for own, other in zip(exact[name][1], exact[peer][1], strict=True):
            assert (own - other).norm() <= 1e-4 * other.norm(), f"{name} has another gradient than {peer}"


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
        plain, plain_gradients = passes(loss, part)
        tiled, tiled_gradients = passes(partial(loss, chunk_size=512), part)
        torch.testing.assert_close(tiled, plain, rtol=1e-6, atol=1e-6)
        for own, other in zip(tiled_gradients, plain_gradients, strict=True):
            assert (own - other).norm() <= 1e-4 * other.norm(), f"{name} in tiles has another gradient"

        whole = [torch.randn(large, dim, device=device, requires_grad=True) for _ in range(2)]
        before = resident_gigabytes(device)
        started = time.perf_counter()
        value, _ = passes(partial(loss, chunk_size=512), whole)
        seconds = time.perf_counter() - started
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", type=int, default=32_768)
    parser.add_argument("--large_dim", type=int, default=64)
    parser.add_argument("--only", help="One of the losses in tiles, and nothing else.")
    options = parser.parse_args()

    device = get_device()
    if options.only is None:
        print_rows(measure(options.clips, options.dim, options.rounds))
    in_tiles(options.large, options.large_dim, device, options.only)


if __name__ == "__main__":
    main()
