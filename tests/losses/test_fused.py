"""The hand-written gradients against automatic differentiation of the textbook form, over several blocks of rows."""

import pytest
import torch
from builders import unit_rows
from torch import Tensor

from modeling_supclap.losses import fused
from modeling_supclap.losses.contrastive import softmax_contrast
from modeling_supclap.losses.similarity import positive_mask, positive_mean

SIZE = 7
GROUPS = torch.tensor([0, 1, 0, 2, 1, 3, 4])


@pytest.fixture(autouse=True, params=[2 * SIZE, SIZE // 2 + 1])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two rows, the last of one, where few rows would have none; then where four are taken together."""
    monkeypatch.setattr(fused, "FEW_ROWS", 0)
    monkeypatch.setattr(fused, "_BLOCK_ENTRIES", request.param)


def matrices(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return (2 * torch.rand(*shape, dtype=torch.float64, generator=generator) - 1).to(dtype)


def same_loss_and_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(3 * found, inputs, retain_graph=True)
    for own, other in zip(gradients, torch.autograd.grad(3 * expected, inputs), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_a_clip_that_nothing_resembles_underflows_nowhere(groups: Tensor | None, scale: float) -> None:
    exact = matrices(SIZE, SIZE)
    exact[2] = -1 + 1e-3 * torch.arange(SIZE, dtype=torch.float64)
    exact[4, 5] = 1
    similarity = exact.float().requires_grad_()
    found = fused.symmetric_contrast(similarity, scale, groups)
    (gradient,) = torch.autograd.grad(found, similarity)

    wide = exact.clone().requires_grad_()
    logits = scale * wide
    expected = softmax_contrast(logits, groups) + softmax_contrast(logits.mT, groups)
    (wanted,) = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("scale", [5.0, 400.0])
def test_symmetric_contrast(leading: tuple[int, ...], groups: Tensor | None, scale: float) -> None:
    """A scale of 400 would overflow without a maximum taken off each row and column."""
    similarity = matrices(*leading, SIZE, SIZE).requires_grad_()
    logit_scale = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    logits = logit_scale * similarity
    expected = softmax_contrast(logits, groups) + softmax_contrast(logits.mT, groups)
    found = fused.symmetric_contrast(similarity, logit_scale, groups)
    same_loss_and_gradients(found, expected, [similarity, logit_scale])


@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("anchors", ["rows", "columns"])
def test_displaced_contrast(leading: tuple[int, ...], groups: Tensor | None, decoupled: bool, anchors: str) -> None:
    cross = matrices(*leading, SIZE, SIZE).requires_grad_()
    embeds = unit_rows(SIZE, 4).requires_grad_()  # one side's products with itself serve all leading dimensions
    near, far = matrices(2, *leading, SIZE).requires_grad_()
    scale = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    rows, within = cross if anchors == "rows" else cross.mT, embeds @ embeds.mT

    logits = scale * (near.unsqueeze(-1) * rows + far.unsqueeze(-1) * within)
    denominators = logits.masked_fill(positive_mask(SIZE, groups, logits.device) & decoupled, -torch.inf).logsumexp(-1)
    expected = (denominators - positive_mean(logits, groups)).mean()
    found = fused.displaced_contrast(rows, embeds, near, far, scale, groups, decoupled)
    same_loss_and_gradients(found, expected, [cross, embeds, near, far, scale])


def test_a_graph_may_be_walked_twice_and_none_is_made_without_gradients() -> None:
    similarity = matrices(SIZE, SIZE).requires_grad_()
    loss = fused.symmetric_contrast(similarity, 5.0)
    first = torch.autograd.grad(loss, similarity, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(loss, similarity)[0])
    with torch.no_grad():
        assert not fused.symmetric_contrast(similarity, 5.0).requires_grad


@pytest.mark.parametrize("scale", [14.0, 80.0])
def test_single_precision_is_enough(scale: float) -> None:
    """Rows and columns whose best differ by the most that cosines can, and pairs that are all but perfect."""
    similarity = matrices(SIZE, SIZE)
    similarity[0], similarity[:, 1] = -1.0, -1.0
    for values in (similarity, torch.eye(SIZE, dtype=torch.float64)):
        exact, single = values.clone().requires_grad_(), values.float().requires_grad_()
        expected, found = (fused.symmetric_contrast(each, scale) for each in (exact, single))
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-7)
        (wanted,), (own,) = torch.autograd.grad(expected, exact), torch.autograd.grad(found, single)
        torch.testing.assert_close(own.double(), wanted, rtol=1e-4, atol=1e-6)


def test_gradients_keep_one_matrix() -> None:
    """Automatic differentiation keeps five: the logits, the two softmaxes and what comes between."""
    similarity = matrices(SIZE, SIZE).requires_grad_()
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fused.symmetric_contrast(similarity, 5.0)
    assert [tensor.numel() for tensor in kept if tensor.numel() == SIZE**2] == [SIZE**2]
