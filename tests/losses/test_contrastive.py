"""InfoNCE, SigLIP and the re-weighted InfoNCE against loops, golden numbers, closed forms and their gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from builders import filler, related_pair, unit_rows
from torch import Tensor

from modeling_supclap.losses import info_nce, reweighted_info_nce, sigmoid_loss

Loss = Callable[..., Tensor]

SCALE = 1 / 0.07
GROUPS = [0, 1, 0, 2, 1]


LOSSES: dict[str, Loss] = {
    "info_nce": lambda a, t, g=None: info_nce(a, t, SCALE, group_ids=g),
    "sigmoid": lambda a, t, g=None: sigmoid_loss(a, t, 10.0, -10.0, group_ids=g),
    "reweighted": lambda a, t, g=None: reweighted_info_nce(a, t, SCALE, 3.0, group_ids=g),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@pytest.mark.parametrize(("n", "d"), [(2, 3), (5, 7), (9, 4)])
def test_equals_the_loops(n: int, d: int) -> None:
    audio, text = related_pair(n, d)
    assert info_nce(audio, text, SCALE).item() == pytest.approx(reference.info_nce(audio, text, SCALE), abs=1e-12)
    assert sigmoid_loss(audio, text, 10.0, -9.0).item() == pytest.approx(
        reference.sigmoid_loss(audio, text, 10.0, -9.0), abs=1e-12
    )
    assert reweighted_info_nce(audio, text, SCALE, 2.5).item() == pytest.approx(
        reference.reweighted_info_nce(audio, text, SCALE, 2.5), abs=1e-12
    )


def test_group_positives_equal_the_loops() -> None:
    audio, text = related_pair()
    ids = torch.tensor(GROUPS)
    assert info_nce(audio, text, SCALE, ids).item() == pytest.approx(
        reference.info_nce(audio, text, SCALE, GROUPS), abs=1e-12
    )
    assert sigmoid_loss(audio, text, 10.0, -9.0, ids).item() == pytest.approx(
        reference.sigmoid_loss(audio, text, 10.0, -9.0, GROUPS), abs=1e-12
    )


def test_golden_numbers() -> None:
    """The expected values are from ML-CLAP's own loss, which is the mean of both directions instead of the sum."""
    audio = F.normalize(filler((4, 8), 0), dim=1)
    text = F.normalize(filler((4, 8), 0) + 0.8 * filler((4, 8), 1), dim=1)
    assert info_nce(audio, text, SCALE).item() / 2 == pytest.approx(0.1708606, abs=1e-6)
    assert info_nce(audio, text, SCALE, torch.tensor([0, 0, 1, 2])).item() / 2 == pytest.approx(2.8752162, abs=1e-6)


WRONG = F.normalize(torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=-1)
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 1]]).bool()


@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 9])
def test_negatives_equal_the_loops(groups: list[int] | None, mask: Tensor | None, chunk_size: int | None) -> None:
    audio, text = related_pair(5, 7)
    ids = None if groups is None else torch.tensor(groups)
    options: dict[str, Any] = {"group_ids": ids, "chunk_size": chunk_size, "negatives": WRONG, "negative_mask": mask}
    rows, pairs = [], 0.0
    for i, clip in enumerate(audio.tolist()):
        wrong = [
            reference.dot(clip, vector) for m, vector in enumerate(WRONG[i].tolist()) if mask is None or mask[i, m]
        ]
        right = [reference.dot(clip, vector) for vector in text.tolist()]
        scores = [SCALE * value for value in right + wrong]
        rows.append(reference.log_ratio(scores, reference.positives_of(i, 5, groups)))
        pairs += sum(reference.binary_cross_entropy(10 * value - 9, False) for value in wrong) / 5
    to_audio = reference.one_direction(text.tolist(), audio.tolist(), SCALE, groups)
    assert info_nce(audio, text, SCALE, **options).item() == pytest.approx(reference.mean(rows) + to_audio, abs=1e-12)
    expected = reference.sigmoid_loss(audio, text, 10.0, -9.0, groups) + pairs
    assert sigmoid_loss(audio, text, 10.0, -9.0, **options).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gradients_with_negatives(chunk_size: int | None) -> None:
    audio, text = (embeds.requires_grad_() for embeds in related_pair(5, 7))
    wrong, scale = WRONG.clone().requires_grad_(), torch.tensor(9.0, dtype=torch.float64, requires_grad=True)

    def softmax(audio: Tensor, text: Tensor, wrong: Tensor, scale: Tensor) -> Tensor:
        return info_nce(audio, text, scale, None, chunk_size, wrong, MASK)

    def sigmoid(audio: Tensor, text: Tensor, wrong: Tensor, scale: Tensor) -> Tensor:
        return sigmoid_loss(audio, text, scale, -8.0, None, chunk_size, wrong, MASK)

    inputs = (audio, text, wrong, scale)
    for loss in (softmax, sigmoid):
        torch.autograd.gradcheck(loss, inputs)
        (gradient,) = torch.autograd.grad(loss(*inputs), wrong)
        assert torch.equal(gradient.abs().sum(-1) > 0, MASK)  # exactly the negatives that exist


def test_negatives_of_another_shape_are_refused() -> None:
    audio, text = related_pair(5, 7)
    with pytest.raises(ValueError, match=r"\(4, 3, 7\).*\(5, 7\)"):
        info_nce(audio, text, SCALE, negatives=WRONG[:4])
    with pytest.raises(ValueError, match=r"\(5, 7\)"):
        sigmoid_loss(audio, text, SCALE, -8.0, negatives=WRONG[:, 0])


@pytest.mark.parametrize("loss", [LOSSES[name] for name in ("info_nce", "sigmoid")])
def test_gradcheck(loss: Loss) -> None:  # "reweighted" detaches a part of its gradient, which is tested below
    audio, text = (embeds.requires_grad_() for embeds in related_pair(4, 3))
    torch.autograd.gradcheck(loss, (audio, text))
    torch.autograd.gradcheck(lambda a, t: loss(a, t, torch.tensor([0, 1, 0, 2])), (audio, text))


def test_gradcheck_of_the_scalars() -> None:
    audio, text = related_pair(4, 3)
    scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (9.0, -8.0))
    torch.autograd.gradcheck(lambda s: info_nce(audio, text, s), (scale,))
    torch.autograd.gradcheck(lambda s, b: sigmoid_loss(audio, text, s, b), (scale, bias))


def gradient_of_similarities(loss: Loss, similarity: Tensor) -> Tensor:
    """Return dL/dS. With the identity matrix as texts, the audio matrix is the similarity matrix."""
    similarity = similarity.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(similarity, torch.eye(len(similarity), dtype=similarity.dtype)), similarity)
    return gradient


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_every_entry_gets_the_gradient_of_both_directions(weight: float) -> None:
    """dL/dS_ij = scale/N (P_a2t + P_t2a - 2 delta)_ij, with the diagonal multiplied by w."""
    similarity = torch.tensor([[0.9, 0.1, -0.2], [0.4, 0.7, 0.3], [0.0, 0.6, 0.8]], dtype=torch.float64)
    similarity = torch.nn.functional.normalize(similarity, dim=1)  # rows are embeddings
    gradient = gradient_of_similarities(lambda a, t: reweighted_info_nce(a, t, 5.0, weight), similarity)
    diagonal = torch.eye(3, dtype=torch.float64)
    exponentials = (5.0 * similarity).exp()
    audio_to_text = exponentials / exponentials.sum(1, keepdim=True)
    text_to_audio = exponentials / exponentials.sum(0, keepdim=True)
    for part in (audio_to_text, text_to_audio):
        assert (part > 1e-4).all()

    expected = 5.0 / 3 * (audio_to_text + text_to_audio - 2 * diagonal) * (1 + (weight - 1) * diagonal)
    torch.testing.assert_close(gradient, expected)
    if weight == 1:
        plain = gradient_of_similarities(lambda a, t: info_nce(a, t, 5.0), similarity)
        torch.testing.assert_close(plain, gradient, rtol=0, atol=1e-14)


def test_the_weight_of_the_positive_grows_and_the_gradient_with_it() -> None:
    audio, text = related_pair(6, 5)
    text.requires_grad_()
    gradients = []
    for value in (1.0, 4.0):
        log_weight = torch.tensor(value, dtype=torch.float64).log().requires_grad_()
        half = reweighted_info_nce(audio, text, SCALE, log_weight.exp())
        of_text, of_weight = torch.autograd.grad(half, (text, log_weight))
        gradients.append(of_text)
        assert of_weight < 0
    assert gradients[1].norm() > gradients[0].norm()


@every_loss
def test_leading_dimensions_are_batches_of_their_own(loss: Loss) -> None:
    audio, _ = related_pair()
    texts = torch.stack([related_pair()[1], unit_rows(5, 7, seed=2)])
    torch.testing.assert_close(loss(audio, texts), (loss(audio, texts[0]) + loss(audio, texts[1])) / 2)
    ids = torch.tensor(GROUPS)
    torch.testing.assert_close(loss(audio, texts, ids), (loss(audio, texts[0], ids) + loss(audio, texts[1], ids)) / 2)


def test_values_of_a_random_and_of_a_perfect_batch() -> None:
    alike = F.normalize(torch.ones(6, 8, dtype=torch.float64), dim=1)
    perfect = torch.eye(6, dtype=torch.float64)
    assert info_nce(alike, alike, SCALE).item() == pytest.approx(2 * math.log(6))
    assert info_nce(perfect, perfect, 100.0).item() == pytest.approx(0, abs=1e-12)
    pulled = 2 * math.log(6) - 2 * 3 * 5 / 6 * SCALE
    assert reweighted_info_nce(alike, alike, SCALE, 4.0).item() == pytest.approx(pulled)
    assert sigmoid_loss(alike, alike, 10.0, -10.0).item() == pytest.approx(6 * math.log(2))
    unrelated = torch.eye(12, dtype=torch.float64)
    start = math.log1p(math.exp(10.0)) + 5 * math.log1p(math.exp(-10.0))
    assert sigmoid_loss(unrelated[:6], unrelated[6:], 10.0, -10.0).item() == pytest.approx(start)
    twins = perfect[[0, 0, 1, 1, 2, 2]]
    assert info_nce(twins, twins, 100.0, torch.tensor([0, 0, 1, 1, 2, 2])).item() == pytest.approx(2 * math.log(2))


def test_small_loss_is_not_lost_to_rounding() -> None:
    """2 log(1 + exp(-14.3)) for orthogonal pairs; a naive float32 logsumexp(s) - s+ would be off by a third of it."""
    pairs = torch.eye(2)
    expected = 2 * math.log1p(math.exp(-SCALE))
    assert info_nce(pairs, pairs, SCALE).item() == pytest.approx(expected, abs=1.3e-7)


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_costs_only_the_rounding_of_the_embeddings(loss: Loss, dtype: torch.dtype) -> None:
    audio, text = (embeds.to(dtype).requires_grad_() for embeds in related_pair(8, 32))
    value = loss(audio, text)
    exact = loss(audio.double(), text.double())
    assert value.dtype == torch.float32
    # of logits up to SCALE; half precision would be off by 1e-2
    rounding = 2 * SCALE * torch.finfo(torch.float32).eps
    assert value.item() == pytest.approx(exact.item(), rel=1e-5, abs=rounding)
    gradients = torch.autograd.grad(value, (audio, text))
    for gradient in gradients:
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


@every_loss
def test_autocast_does_not_reach_the_loss(loss: Loss) -> None:
    audio, text = (embeds.float() for embeds in related_pair(8, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(audio, text)
    assert inside.item() == loss(audio, text).item()


@every_loss
def test_unfit_batches_are_errors(loss: Loss) -> None:
    audio, text = related_pair()
    with pytest.raises(ValueError, match=r"\b1\b"):
        loss(audio[:1], text[:1])
    with pytest.raises(ValueError, match=r"\(5, 7\).*\(4, 7\)"):
        loss(audio, text[:4])
    with pytest.raises(ValueError, match=r"\(5, 7\).*\(5, 6\)"):
        loss(audio, text[:, :6])
    with pytest.raises(ValueError, match=r"\(7,\)"):
        loss(audio[0], text[0])
    with pytest.raises(ValueError, match=r"group_ids.*\(3,\).*5"):
        loss(audio, text, torch.tensor([0, 1, 2]))


def test_weight_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive_weight=0"):
        reweighted_info_nce(*related_pair(), SCALE, 0)
