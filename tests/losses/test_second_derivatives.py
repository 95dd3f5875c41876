"""Hessian-vector products of all losses, compared with naive forms in float64; with tiles they raise an error."""

import pytest
import torch
import torch.nn.functional as F
from builders import unit_rows
from torch import Tensor

from modeling_supclap.losses import (
    cacl_loss,
    info_nce,
    kcl_loss,
    sigmoid_loss,
    support_vector_loss,
    teminal_b_weights,
    temporal_nce,
)

CLIPS = 258  # three times an even number, for the blocks of TeminAL
SCALE, RADIUS = 12.0, 0.3
WEIGHTS = teminal_b_weights(CLIPS // 3, 0.5, 0.25, 0.75, 0.5).double()


def softmax_rows(anchors: Tensor, targets: Tensor) -> Tensor:
    """Compute one direction of InfoNCE."""
    return F.cross_entropy(SCALE * anchors @ targets.T, torch.arange(CLIPS))


def both(audio: Tensor, text: Tensor) -> Tensor:
    return softmax_rows(audio, text) + softmax_rows(text, audio)


def pairs(anchors: Tensor, targets: Tensor) -> Tensor:
    """Compute SigLIP's loss with bias -9."""
    signs = 2 * torch.eye(CLIPS, dtype=torch.float64) - 1
    return F.softplus(-signs * (SCALE * anchors @ targets.T - 9)).sum() / CLIPS


def displaced(anchors: Tensor, targets: Tensor) -> Tensor:
    way = targets - anchors
    return F.normalize(anchors + RADIUS * way / way.norm(dim=1, keepdim=True), dim=1)


def decoupled_rows(anchors: Tensor, targets: Tensor) -> Tensor:
    logits = SCALE * displaced(anchors, targets) @ targets.T
    exponentials = logits.exp() * (1 - torch.eye(CLIPS, dtype=torch.float64))
    return (exponentials.sum(1).log() - logits.diagonal()).mean()


def temporal(audio: Tensor, text: Tensor) -> Tensor:
    exponentials = (SCALE * audio @ text.T).exp()
    positives = 2 * exponentials.diagonal().log()
    return ((WEIGHTS * exponentials).sum(1).log() + (WEIGHTS * exponentials.T).sum(1).log() - positives).mean()


def languages(text: Tensor) -> Tensor:
    """(N, d) to (N, 2, d)."""
    return torch.stack([text, text.roll(1, -1)], dim=1)


def shifted(text: Tensor) -> Tensor:
    return text.roll(1, -1)


LOSSES = {
    "info_nce": (lambda a, t, **o: info_nce(a, t, SCALE, **o), both),
    "sigmoid": (lambda a, t, **o: sigmoid_loss(a, t, SCALE, -9.0, **o), pairs),
    "kcl": (
        lambda a, t, **o: kcl_loss(a, languages(t), SCALE, **o),
        lambda a, t: (both(a, t) + both(a, shifted(t))) / 4,
    ),
    "cacl": (
        lambda a, t, **o: cacl_loss(a, t, shifted(t), SCALE, **o),
        lambda a, t: (both(a, t) + both(a, shifted(t)) + both(t, shifted(t))) / 6,
    ),
    "svr": (
        lambda a, t, **o: support_vector_loss(t, a, RADIUS, SCALE, **o),
        lambda a, t: softmax_rows(displaced(t, a), a),
    ),
    "decoupled svr": (
        lambda a, t, **o: support_vector_loss(t, a, RADIUS, SCALE, decoupled=True, **o),
        lambda a, t: decoupled_rows(t, a),
    ),
    "sigmoid svr": (
        lambda a, t, **o: support_vector_loss(t, a, RADIUS, SCALE, logit_bias=-9.0, **o),
        lambda a, t: pairs(displaced(t, a), a),
    ),
}
IN_ONE_MATRIX = {"temporal": (lambda a, t: temporal_nce(a, t, SCALE, WEIGHTS), temporal)}


def inputs() -> list[Tensor]:
    audio = unit_rows(CLIPS, 6)
    text = F.normalize(audio + 0.7 * unit_rows(CLIPS, 6, seed=1), dim=-1)
    return [audio.requires_grad_(), text.requires_grad_()]


@pytest.mark.parametrize("name", [*LOSSES, *IN_ONE_MATRIX])
def test_hessian_vector_products_are_those_of_the_naive_form(name: str) -> None:
    products = []
    for loss in (LOSSES | IN_ONE_MATRIX)[name]:
        embeds = inputs()
        gradients = torch.autograd.grad(loss(*embeds), embeds, create_graph=True)
        projection = torch.stack([(gradient * unit_rows(CLIPS, 6, seed=3)).sum() for gradient in gradients]).sum()
        products.append(torch.autograd.grad(projection, embeds))
    torch.testing.assert_close(*products, rtol=0, atol=1e-10)
    assert min(product.norm() for product in products[0]) > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_tiles_refuse_second_derivatives(name: str) -> None:
    embeds = inputs()
    loss = LOSSES[name][0](*embeds, chunk_size=100)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, embeds, create_graph=True)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, embeds))
