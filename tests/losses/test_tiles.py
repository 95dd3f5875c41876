"""Tiled losses equal the plain losses and gradients, and store no matrix of all clips."""

from collections.abc import Callable

import pytest
import torch
from builders import related_pair
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_supclap.losses import cacl_loss, info_nce, kcl_loss, sigmoid_loss, support_vector_loss

GROUPS = torch.tensor([0, 1, 0, 2, 1, 3, 4])
RADIUS = torch.tensor([0.1, 0.4, -0.2, 0.0, 1.3, 0.2, 0.3], dtype=torch.float64)

Loss = Callable[..., Tensor]


def languages(text: Tensor) -> Tensor:
    """(N, d) to (N, 3, d)."""
    return torch.stack([text, text.roll(1, -1), text.flip(-1)], dim=1)


LOSSES: dict[str, Loss] = {
    "info_nce": lambda a, t, s, **tiles: info_nce(a, t, s, **tiles),
    "sigmoid": lambda a, t, s, **tiles: sigmoid_loss(a, t, s, -9.0, **tiles),
    "kcl": lambda a, t, s, **tiles: kcl_loss(a, languages(t), s, **tiles),
    "cacl": lambda a, t, s, **tiles: cacl_loss(a, t, t.flip(-1), s, **tiles),
    "svr": lambda a, t, s, **tiles: support_vector_loss(t, a, RADIUS, s, **tiles),
    "svr decoupled": lambda a, t, s, **tiles: support_vector_loss(a, t, RADIUS, s, "dot", True, **tiles),
    "svr sigmoid": lambda a, t, s, **tiles: support_vector_loss(t, a, RADIUS, s, logit_bias=-9.0, **tiles),
    "svr on kcl": lambda a, t, s, **tiles: support_vector_loss(
        languages(t).transpose(0, 1), a, RADIUS.expand(3, -1), s, **tiles
    ),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@every_loss
@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_equals_the_plain_loss_with_its_gradients(loss: Loss, groups: Tensor | None, chunk_size: int) -> None:
    scale = torch.tensor(12.0, dtype=torch.float64, requires_grad=True)
    inputs = [*(embeds.requires_grad_() for embeds in related_pair(7, 5)), scale]
    plain = loss(*inputs, group_ids=groups)
    tiled = loss(*inputs, group_ids=groups, chunk_size=chunk_size)
    torch.testing.assert_close(tiled, plain, rtol=0, atol=1e-11)
    for own, other in zip(torch.autograd.grad(tiled, inputs), torch.autograd.grad(plain, inputs), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_plain_loss_in_lower_precision_and_under_autocast(loss: Loss, dtype: torch.dtype) -> None:
    audio, text = (embeds.to(dtype).requires_grad_() for embeds in related_pair(7, 5))
    plain = loss(audio, text, 12.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tiled = loss(audio, text, 12.0, chunk_size=3)
    torch.testing.assert_close(tiled, plain, rtol=1e-6, atol=2e-6)  # a logit of 12 is rounded to 1e-6
    for gradient in torch.autograd.grad(tiled, (audio, text)):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


class Largest(TorchDispatchMode):
    """Measures the number of entries of the largest tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
        return result


@every_loss
def test_no_matrix_of_all_clips_is_made(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RADIUS", torch.full((200,), 0.2, dtype=torch.float64))
    inputs = [embeds.requires_grad_() for embeds in related_pair(200, 4)]
    with Largest() as largest:
        loss(*inputs, 9.0, chunk_size=16).backward()
    assert largest.entries == 16 * 200


def test_a_chunk_holds_a_row() -> None:
    with pytest.raises(ValueError, match="chunk_size=0"):
        info_nce(*related_pair(), 9.0, chunk_size=0)
    with pytest.raises(ValueError, match="group_ids"):
        info_nce(*related_pair(), 9.0, torch.tensor([0, 1]), chunk_size=2)
    with pytest.raises(ValueError, match="negative"):
        support_vector_loss(
            *related_pair(), 0.1, 9.0, decoupled=True, group_ids=torch.zeros(5, dtype=torch.long), chunk_size=2
        )
