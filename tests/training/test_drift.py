"""Forces and drift, compared with loops, autograd, the paper's one-step identity and simple geometric cases."""

from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from builders import unit_rows
from torch import Tensor

from modeling_supclap.losses import DynamicRadius, similarity_matrix, support_vector_loss
from modeling_supclap.training.drift import (
    contrastive_forces,
    distance_change,
    drift_cosine,
    drift_statistics,
    perpendicular_components,
    radius_by_hard_negatives,
    similarity_histogram,
)

SCALE = 1 / 0.07
RADII = [0.1, 0.4, -0.2, 0.0, 1.3]


def related_pair(n: int = 5, d: int = 7, spread: float = 0.8) -> tuple[Tensor, Tensor]:
    audio = unit_rows(n, d)
    return audio, F.normalize(audio + spread * unit_rows(n, d, seed=1), dim=-1)


def text_gradient(audio: Tensor, text: Tensor, radius: float | Tensor, scale: float = SCALE) -> Tensor:
    """Compute with autograd the gradient of each text's own text-to-audio loss (not of the mean)."""
    text = text.clone().requires_grad_()
    loss = len(text) * support_vector_loss(text, audio, radius, scale, similarity="dot")
    return torch.autograd.grad(loss, text)[0]


def test_statistics_equal_the_loops() -> None:
    audio, text = related_pair()
    expected = reference.drift_statistics(audio, text, 1 / SCALE, RADII, learning_rate=0.25)
    radii = torch.tensor(RADII, dtype=torch.float64)
    statistics = drift_statistics(audio, text, SCALE, radii, similarity="dot", learning_rate=0.25)
    assert {name: value.item() for name, value in statistics.items()} == pytest.approx(expected, abs=1e-11)


def test_without_a_radius_the_svr_numbers_are_left_out() -> None:
    audio, text = related_pair()
    plain, regularised = drift_statistics(audio, text, SCALE), drift_statistics(audio, text, SCALE, 0.1)
    assert set(plain) == {
        "drift_cosine", "drift_cosine_difference", "drift_cosine_target", "push_parallel_norm",
        "push_perpendicular_norm", "distance", "positive_similarity", "ideal_progress", "noise_penalty",
    }  # fmt: skip
    for name, value in plain.items():
        assert value.ndim == 0
        assert value.item() == regularised[name].item()


def test_forces_are_the_gradient() -> None:
    """[SupCLAP eq. 4] Pull + push is the gradient of each text's loss from autograd."""
    audio, text = related_pair()
    pull, push = contrastive_forces(SCALE * similarity_matrix(text, audio), audio, SCALE)
    torch.testing.assert_close(pull + push, text_gradient(audio, text, 0.0))
    assert ((pull * audio).sum(1) < 0).all()


@pytest.mark.parametrize("loss", ["infonce", "siglip"])
@pytest.mark.parametrize(
    ("alpha", "similarity", "decoupled"), [(1.0, "cosine", False), (0.3, "dot", False), (2.0, "cosine", True)]
)
def test_drift_is_that_of_the_gradients_of_the_losses(
    loss: str, alpha: float, similarity: str, decoupled: bool
) -> None:
    """Compute the support vectors here, with autograd through them."""
    audio, text = related_pair()
    radius, bias = torch.tensor(RADII, dtype=torch.float64), -3.0
    texts = text.clone().requires_grad_()
    ways = audio - texts
    supports = texts + radius.unsqueeze(1) * F.normalize(ways, dim=1)
    supports = F.normalize(supports, dim=1) if similarity == "cosine" else supports

    losses = []
    for anchors in (texts, supports):
        logits = SCALE * anchors @ audio.T
        if loss == "siglip":
            signs = 2 * torch.eye(5, dtype=torch.float64) - 1
            losses.append(-F.logsigmoid(signs * (logits + bias)).sum())
            continue
        others = logits.masked_fill(torch.eye(5, dtype=torch.bool), -torch.inf) if decoupled and losses else logits
        losses.append((others.logsumexp(1) - logits.diagonal()).sum())
    plain, whole = (
        torch.autograd.grad(each, texts, retain_graph=True)[0] for each in (losses[0], losses[0] + alpha * losses[1])
    )

    options: dict[str, Any] = {"alpha": alpha, "similarity": similarity, "decoupled": decoupled and loss == "infonce"}
    options |= {"logit_bias": bias} if loss == "siglip" else {}
    statistics = drift_statistics(audio, text, SCALE, radius, **options)
    straight = F.normalize(audio - text, dim=1)
    for name, gradient in (("drift_cosine", plain), ("drift_cosine_svr", whole)):
        torch.testing.assert_close(statistics[name], drift_cosine(-gradient, text, audio))
        for reading, pull in (("difference", straight), ("target", audio)):
            expected = F.cosine_similarity(-gradient, pull, dim=1).mean()
            torch.testing.assert_close(statistics[f"{name}_{reading}"], expected)


@pytest.mark.parametrize("rate", [1e-3, 0.1, 1.0])
def test_one_step_identity(rate: float) -> None:
    """[SupCLAP eq. 12]: the change of the squared distance; a push across the pull always increases it."""
    audio, text = related_pair()
    force = text_gradient(audio, text, 0.0)
    moved = text - rate * force
    change = (moved - audio).square().sum(1) - (text - audio).square().sum(1)
    progress, penalty = distance_change(force, text, audio, rate)
    torch.testing.assert_close(change, progress + penalty, rtol=0, atol=1e-12 * max(1, (SCALE * rate) ** 2))
    assert (penalty > 0).all()


def test_no_drift_without_a_perpendicular_push() -> None:
    """A negative directly behind the text pushes it along the great circle to its audio: cosine 1."""
    angles = torch.tensor([0.5, -1.0], dtype=torch.float64)
    audio = torch.stack([angles.cos(), angles.sin()], dim=1)
    text = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert drift_statistics(audio, text, 1.0)["drift_cosine"].item() == pytest.approx(1)


def test_support_vectors_lessen_the_drift() -> None:
    audio, text = related_pair(24, 64)
    statistics = drift_statistics(audio, text, SCALE, radius=0.3, similarity="dot")
    assert 0 < statistics["svr_factor_mean"] < 1
    assert statistics["drift_cosine_svr"] > statistics["drift_cosine"]


def test_the_sign_of_the_effect_depends_on_the_reading_of_figure_1() -> None:
    """Support vectors raise the cosine with a - t and lower that with a+ (figure 1 does not say which is meant)."""
    audio, text = related_pair(256, 64, spread=0.75)  # isotropic, with a positive cosine of 0.8
    radius = 0.25 * (audio - text).norm(dim=1)
    statistics = drift_statistics(audio, text, SCALE, radius)
    assert statistics["drift_cosine_svr_difference"] - statistics["drift_cosine_difference"] > 0.005
    assert statistics["drift_cosine_svr_target"] - statistics["drift_cosine_target"] < -0.005


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_coincident_pair_does_not_spoil_the_mean(dtype: torch.dtype) -> None:
    """Text 0 equals its audio and has no direction; the mean is over the other texts."""
    audio = torch.eye(4)
    text = F.normalize(audio + torch.tensor([[0.0], [0.1], [0.5], [2.0]]) * audio.roll(1, 0), dim=1)
    statistics = drift_statistics(audio.to(dtype), text.to(dtype), SCALE, radius=0.1)
    assert all(value.isfinite() for value in statistics.values())
    rest = drift_cosine(-text_gradient(audio.double(), text.double(), 0.0)[1:], text[1:], audio[1:])
    assert statistics["drift_cosine"].item() == pytest.approx(
        rest.item(), abs=1e-5 if dtype == torch.float32 else 2e-2
    )


def test_cosine_does_not_depend_on_the_size_of_the_forces() -> None:
    """The forces on a solved pair are as small as exp(-1 / tau), and their squares would underflow."""
    audio, text = (x.float() for x in related_pair())
    updates = -text_gradient(audio, text, 0.0)
    expected = drift_cosine(updates, text, audio)
    sizes = torch.tensor([[1.0], [1e-10], [1e-25], [1e-30], [1e10]])
    torch.testing.assert_close(drift_cosine(sizes * updates, text, audio), expected)
    updates[0] = 0
    torch.testing.assert_close(drift_cosine(updates, text, audio), drift_cosine(updates[1:], text[1:], audio[1:]))
    assert drift_cosine(0 * updates, text, audio).item() == 0


def test_statistics_leave_no_graph_and_ignore_autocast() -> None:
    audio, text = (x.float().requires_grad_() for x in related_pair())
    outside = drift_statistics(audio, text, SCALE, radius=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = drift_statistics(audio, text, SCALE, radius=0.1)
    for name, value in outside.items():
        assert not value.requires_grad
        assert value.item() == inside[name].item()


def test_histogram_counts_every_pair() -> None:
    audio, text = related_pair(200, 16)
    cosines = [reference.dot(a, t) for a, t in zip(audio.tolist(), text.tolist(), strict=True)]
    histogram = similarity_histogram(torch.tensor(cosines), bins=20)
    expected = [sum(-1 + b / 10 <= cosine < -1 + (b + 1) / 10 for cosine in cosines) for b in range(20)]
    assert histogram == {"low": -1.0, "high": 1.0, "counts": expected}


def test_errors_name_the_expected_values() -> None:
    audio, text = related_pair()
    with pytest.raises(ValueError, match=r"\b1\b"):
        drift_statistics(audio[:1], text[:1], SCALE)
    with pytest.raises(ValueError, match=r"radius.*\(3,\)"):
        drift_statistics(audio, text, SCALE, torch.ones(3))


def test_the_perpendicular_push_is_separated_as_in_the_loops() -> None:
    """The draws approach the mean and the deviation over all batches of three of five clips."""
    audio, text = related_pair(n=5)
    numbers = perpendicular_components(audio, text, 2.0, batch_size=3, num_batches=3000)
    expected = reference.perpendicular_components(audio, text, 1 / 2.0, batch_size=3)
    assert [value.item() for value in numbers.values()] == pytest.approx(expected, rel=0.02)
    assert list(numbers) == ["perpendicular_global", "perpendicular_local"]
    whole = perpendicular_components(audio, text, 2.0, batch_size=5)  # a batch of all clips does not vary
    assert whole["perpendicular_local"].item() == pytest.approx(0, abs=1e-7)
    every = drift_statistics(audio, text, 2.0)["push_perpendicular_norm"].item()
    assert whole["perpendicular_global"].item() == pytest.approx(every)
    assert perpendicular_components(audio, text, 2.0, batch_size=6) == {}


def test_clips_of_a_group_are_not_drawn_as_negatives() -> None:
    audio, text = related_pair(n=5)
    groups = torch.tensor([0, 1, 2, 3, 3])
    numbers = perpendicular_components(audio, text, 2.0, 4, groups, num_batches=200)
    again = perpendicular_components(audio, text, 2.0, 4, torch.arange(5), num_batches=200)
    assert numbers != again
    assert perpendicular_components(audio, text, 2.0, 5, groups) == {}


def test_hard_negatives_of_a_predictor_in_batch_order_are_mixed() -> None:
    audio, text = related_pair(n=9)
    sorted_radius, radius = DynamicRadius(4).double(), DynamicRadius(4, order="batch").double()
    torch.nn.init.normal_(list(radius.parameters())[-2], generator=torch.Generator().manual_seed(0))
    sorted_radius.load_state_dict(radius.state_dict())
    orders = {}
    for order, each in (("sorted", sorted_radius), ("batch", radius)):
        orders[order] = radius_by_hard_negatives(each, audio, text, SCALE, counts=(3,))["radius_hard_3"].item()
    assert orders["sorted"] != orders["batch"]


def test_a_radius_of_hard_negatives_equals_that_of_a_large_batch() -> None:
    """For a large batch, the predictor uses the hardest clips, which are the same as with K = their number."""
    audio, text = related_pair(n=9)
    radius = DynamicRadius(num_similarities=4).double()
    last = radius.layers[-1]
    assert isinstance(last, torch.nn.Linear)
    torch.nn.init.normal_(last.weight, generator=torch.Generator().manual_seed(0))
    radii = radius_by_hard_negatives(radius, audio, text, SCALE, counts=(1, 3, 4))
    assert set(radii) == {"radius_hard_1", "radius_hard_3"}
    assert radii["radius_hard_3"].item() == pytest.approx(radius(SCALE * text @ audio.T).mean().item())
    assert radius_by_hard_negatives(radius, audio, text, SCALE, torch.zeros(9)) == {}
    assert radius_by_hard_negatives(radius, audio[:3], text[:3], SCALE, counts=(3,)) == {}
    assert set(radius_by_hard_negatives(radius, audio[:4], text[:4], SCALE, counts=(3,))) == {"radius_hard_3"}


def test_the_pool_is_drawn_from_all_pairs() -> None:
    """A pool of all pairs gives one number, and smaller pools give others than the first pairs."""
    audio, text = related_pair(n=40)
    first = perpendicular_components(audio[:20], text[:20], 2.0, batch_size=20)
    drawn = perpendicular_components(audio, text, 2.0, batch_size=20, pool_size=20)
    assert list(first) == list(drawn)
    assert first["perpendicular_global"].item() != pytest.approx(drawn["perpendicular_global"].item())
    pool = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:20].sort().values
    same = perpendicular_components(audio[pool], text[pool], 2.0, batch_size=20)
    assert same["perpendicular_global"].item() == pytest.approx(drawn["perpendicular_global"].item())


def test_more_hard_negatives_raise_a_radius_that_adds_similarities_up() -> None:
    audio, text = related_pair(n=40)
    radius = DynamicRadius(num_similarities=9)
    adding = torch.nn.Linear(9, 1, bias=False).double().requires_grad_(False)
    adding.weight.fill_(1 / SCALE)
    radius.layers = torch.nn.Sequential(adding)
    few, some, all_of_them = radius_by_hard_negatives(radius, audio, text, SCALE, counts=(1, 4, 8)).values()

    ranked = (text @ audio.T).fill_diagonal_(-2).sort(dim=-1, descending=True).values
    assert few < some < all_of_them
    assert all_of_them.item() == pytest.approx(((text * audio).sum(-1) + ranked[:, :8].sum(-1)).mean().item())


def test_random_negatives_reach_a_predictor_in_descending_order() -> None:
    audio, text = related_pair(n=40)
    radius, seen = DynamicRadius(num_similarities=9), []
    radius.layers = torch.nn.Sequential(torch.nn.Linear(9, 1).double())
    radius.layers.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    radius_by_hard_negatives(radius, audio, text, SCALE, counts=(2,))
    negatives = seen[0][:, 1:]
    assert negatives.shape == (40, 8)
    assert (negatives.diff(dim=1) <= 0).all()
