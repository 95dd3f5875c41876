"""What the losses cost: beside InfoNCE by automatic differentiation, and beside the naive form.

    python benchmarks/bench_support_vector.py [--clips 2048] [--dim 1024] [--rounds 5]

Variants run in turn in one process, on a GPU where there is one; the unit is the time of InfoNCE by automatic
differentiation. The naive form makes the support vectors and compares them with every clip; its radii learn, like ours.
Memory is what a pass keeps for its gradient. All forms must agree in loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from rows import Row, compare, get_device, run_script, take_turns
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from modeling_supclap.losses import DynamicRadius, StaticRadius
from modeling_supclap.training.objectives import ContrastiveObjective, SupportVectorRegularizer

Loss = Callable[[Tensor, Tensor], Tensor]

SCALE = 1 / 0.07
RADIUS = 0.1


def by_autograd(audio: Tensor, text: Tensor) -> Tensor:
    """InfoNCE as its formula reads."""
    logits = SCALE * audio @ text.T
    own = torch.arange(len(audio), device=audio.device)
    return cross_entropy(logits, own) + cross_entropy(logits.T, own)


class Naive(nn.Module):
    """InfoNCE plus SVR from text to audio, or both ways, written as the paper has it.

    Args:
        ways: How many directions have a term, 1 or 2.
    """

    def __init__(self, ways: int) -> None:
        super().__init__()
        self.radii = nn.Parameter(torch.full((ways,), RADIUS))

    def forward(self, audio: Tensor, text: Tensor) -> Tensor:
        own = torch.arange(len(audio), device=audio.device)
        total = by_autograd(audio, text)

        for radius, (anchors, targets) in zip(self.radii, ((text, audio), (audio, text)), strict=False):
            pull = targets - anchors
            support = normalize(anchors + radius * pull / pull.norm(dim=-1, keepdim=True), dim=-1)
            total = total + cross_entropy(SCALE * support @ targets.T, own)
        return total


def objective(audio: Tensor, text: Tensor, module: ContrastiveObjective) -> Tensor:
    """This project's way, as training calls it."""
    return module(audio, text[:, None], torch.tensor(SCALE, device=audio.device))[0]


def variants(device: torch.device) -> dict[str, Loss]:
    """The losses of a pair of embedding matrices, by name."""
    losses: dict[str, Loss] = {
        "InfoNCE by autograd": by_autograd,
        "naive uni-static": Naive(ways=1).to(device),
        "naive bi-static": Naive(ways=2).to(device),
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
    """One forward and backward pass, also to the radii: the loss, and the gradients through the normalisation."""
    for tensor in raw:
        tensor.grad = None
    value = loss(*(normalize(tensor, dim=-1) for tensor in raw))
    value.backward()

    gradients = []
    for tensor in raw:
        assert tensor.grad is not None
        gradients.append(tensor.grad)
    return value.detach(), gradients


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
            rows.append(Row("G4", f"{name} / its naive form, {size:,} clips", *ratio, "<= 1" if size == clips else ""))

        if size == clips:
            kept = {name: kept_megabytes(losses[name], raw) for name in ("bi-static", "naive bi-static")}
            share = kept["bi-static"] / kept["naive bi-static"]
            rows.append(Row("G4", "bi-static / its naive form, memory kept", share, None, "<= 1"))
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


if __name__ == "__main__":
    run_script(measure, __doc__)
