"""KCL, CACL, a radius for several languages, and the data distribution error against loops and closed forms."""

import math

import pytest
import reference
import torch
import torch.nn.functional as F
from builders import unit_rows
from torch import Tensor

from modeling_supclap.losses import (
    alignment_direction_error,
    cacl_loss,
    data_distribution_error,
    info_nce,
    kcl_loss,
    language_distribution_error,
    momentum_error_bound,
    weight_error_bound,
    weight_error_term,
)

SCALE = 1 / 0.07
GROUPS = [0, 1, 0, 2, 1]


def multilingual_batch(n: int = 5, languages: int = 3, d: int = 7) -> tuple[Tensor, Tensor]:
    """Return audio (N, d) and captions (N, K, d) near it."""
    audio = unit_rows(n, d)
    return audio, F.normalize(audio.unsqueeze(1) + 0.7 * unit_rows(n, languages, d, seed=1), dim=-1)


# --- KCL


@pytest.mark.parametrize("languages", [2, 3, 8])
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_kcl_equals_the_loops(languages: int, groups: list[int] | None) -> None:
    audio, text = multilingual_batch(languages=languages)
    ids = None if groups is None else torch.tensor(groups)
    expected = reference.kcl_loss(audio, text, SCALE, groups)
    assert kcl_loss(audio, text, SCALE, ids).item() == pytest.approx(expected, abs=1e-12)


def test_kcl_gradcheck() -> None:
    audio, text = (x.requires_grad_() for x in multilingual_batch(4, 2, 3))
    scale = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(kcl_loss, (audio, text, scale))
    torch.autograd.gradcheck(lambda a, t, s: kcl_loss(a, t, s, torch.tensor([0, 1, 0, 2])), (audio, text, scale))


def test_values_of_a_random_and_of_a_perfect_batch() -> None:
    alike = F.normalize(torch.ones(6, 8, dtype=torch.float64), dim=1)
    assert kcl_loss(alike, alike.unsqueeze(1).expand(6, 4, 8), SCALE).item() == pytest.approx(math.log(6))
    assert cacl_loss(alike, alike, alike, SCALE).item() == pytest.approx(math.log(6))
    perfect = torch.eye(6, dtype=torch.float64)
    assert kcl_loss(perfect, perfect.unsqueeze(1).expand(6, 4, 6), 100.0).item() == pytest.approx(0, abs=1e-12)
    assert cacl_loss(perfect, perfect, perfect, 100.0).item() == pytest.approx(0, abs=1e-12)


# --- CACL


def test_cacl_equals_the_loops() -> None:
    audio, text = multilingual_batch()
    loss = cacl_loss(audio, text[:, 0], text[:, 1], SCALE)
    assert loss.item() == pytest.approx(reference.cacl_loss(audio, text[:, 0], text[:, 1], SCALE), abs=1e-12)


def test_cacl_with_groups_is_the_sum_of_grouped_terms() -> None:
    audio, text = multilingual_batch()
    anchor, other, ids = text[:, 0], text[:, 1], torch.tensor(GROUPS)
    terms = [info_nce(u, v, SCALE, ids) for u, v in ((audio, anchor), (audio, other), (anchor, other))]
    torch.testing.assert_close(cacl_loss(audio, anchor, other, SCALE, ids), sum(terms) / 6)


# --- the data distribution error


def scheme(name: str, n: int, languages: int) -> Tensor:
    """Return a mask (N, K) of the languages that a step trains."""
    if name == "kcl":
        return torch.ones(n, languages, dtype=torch.bool)
    drawn = torch.randint(1, languages, (n,), generator=torch.Generator().manual_seed(0))
    trained = F.one_hot(drawn, languages).bool()
    if name == "cacl":
        trained[:, 0] = True
    return trained


@pytest.mark.parametrize("name", ["random", "cacl", "kcl"])
def test_data_distribution_error_equals_the_loops(name: str) -> None:
    audio, text = multilingual_batch(languages=4)
    trained = scheme(name, 5, 4)
    expected = reference.data_distribution_error(audio, text, SCALE, trained.tolist())
    assert data_distribution_error(audio, text, SCALE, trained).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("languages", [2, 3, 8])
def test_language_distribution_error_has_its_closed_forms(languages: int) -> None:
    expected = {"random": 2 * (1 - 1 / languages), "cacl": 2 * (1 - 2 / languages), "kcl": 0.0}
    for name, value in expected.items():
        error = language_distribution_error(scheme(name, 6, languages))
        assert error.item() == pytest.approx(value, abs=1e-6)


def test_the_error_orders_the_schemes() -> None:
    audio, text = multilingual_batch(languages=4)
    schemes = [scheme(name, 5, 4) for name in ("random", "cacl", "kcl")]
    random, cacl, kcl = (data_distribution_error(audio, text, SCALE, trained).item() for trained in schemes)
    assert random > cacl + 0.1 > kcl + 0.2
    assert kcl == pytest.approx(0, abs=1e-12)


def test_the_error_has_its_closed_form_for_equal_similarities() -> None:
    alike = F.normalize(torch.ones(5, 7, dtype=torch.float64), dim=1)
    for name, count in (("random", 1), ("cacl", 2), ("kcl", 4)):
        trained = scheme(name, 5, 4)
        error = data_distribution_error(alike, alike.unsqueeze(1).expand(5, 4, 7), SCALE, trained)
        assert error.item() == pytest.approx(2 * (1 - count / 4), abs=1e-6)


def embed_by(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Embed with two one-layer towers with weights in one vector; return audio (5, 7) and texts (5, 4, 7)."""
    audio, text = unit_rows(5, 6, seed=2), unit_rows(5, 4, 6, seed=3)
    towers = weights.view(2, 6, 7)
    return F.normalize(audio @ towers[0], dim=-1), F.normalize(text @ towers[1], dim=-1)


@pytest.mark.parametrize("name", ["random", "cacl", "kcl"])
def test_the_weight_error_of_a_step_equals_the_loops_and_keeps_to_its_bound(name: str) -> None:
    trained = scheme(name, 5, 4)
    weights = unit_rows(1, 2 * 6 * 7, seed=4)[0].mul(3).requires_grad_()
    expected, bound = reference.weight_error(embed_by, weights, SCALE, trained.tolist())

    (gradient,) = torch.autograd.grad(weight_error_term(*embed_by(weights), SCALE, trained), weights)
    assert gradient.norm().item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert expected <= bound + 1e-12
    assert (expected > 1e-3) == (name != "kcl")


def train_on(
    matrices: Tensor, offsets: Tensor, shares: Tensor, start: Tensor, rate: float, steps: int
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Train with SGD on the losses w . A w / 2 - b . w of the pairs, mixed by their shares.

    Return the weights and Adam's first moments before and after each step, and the largest gradient norms.
    """
    weights, moments, norms = [start], [torch.zeros_like(start)], []
    for _ in range(steps):
        gradients = matrices @ weights[-1] - offsets  # (pairs, d)
        norms.append(gradients.norm(dim=1).max().item())
        mixed = shares @ gradients
        weights.append(weights[-1] - rate * mixed)
        moments.append(0.9 * moments[-1] + 0.1 * mixed)
    return weights, moments, norms


def test_errors_of_weights_and_moments_keep_to_their_bounds_over_epochs() -> None:
    """[ATRI eq. 6-8, 25 and 32], with losses whose gradients have known Lipschitz constants."""
    generator = torch.Generator().manual_seed(0)
    roots = torch.randn(6, 4, 4, generator=generator, dtype=torch.float64) / 4
    matrices, offsets = roots @ roots.mT, torch.randn(6, 4, generator=generator, dtype=torch.float64)
    constants = torch.linalg.matrix_norm(matrices, ord=2)  # of each pair
    start, rate, steps = torch.ones(4, dtype=torch.float64), 0.1, 5
    everything = torch.full((6,), 1 / 6, dtype=torch.float64)
    trained = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.float64)
    trained = trained / trained.sum(dim=1, keepdim=True)  # p'_e of three epochs

    ideal, ideal_moments, norms = train_on(matrices, offsets, everything, start, rate, 3 * steps)
    actual, actual_moments = [start], [torch.zeros(4, dtype=torch.float64)]
    for shares in trained:
        weights, _, _ = train_on(matrices, offsets, shares, actual[-1], rate, steps)
        for before in weights[:-1]:
            actual_moments.append(0.9 * actual_moments[-1] + 0.1 * shares @ (matrices @ before - offsets))
        actual += weights[1:]

    errors = (trained - everything).abs().sum(dim=1)
    averages = trained @ constants
    largest = averages.max().item()
    by_epoch = [norms[first : first + steps] for first in range(0, 3 * steps, steps)]
    bounds = weight_error_bound(errors.tolist(), by_epoch, largest, rate)
    for epoch, bound in enumerate(bounds, start=1):
        error = (ideal[epoch * steps] - actual[epoch * steps]).norm().item()
        assert 0.02 < error < bound

        # [eq. 25], from the bound of the previous epoch
        a = 1 + rate * largest
        series = sum(a**j * by_epoch[epoch - 1][steps - 1 - j] for j in range(steps))
        earlier = bounds[epoch - 2] if epoch > 1 else 0.0
        assert bound == pytest.approx(a**steps * earlier + rate * errors[epoch - 1].item() * series)

    for step in range(3 * steps):
        epoch = step // steps
        apart = (ideal[step] - actual[step]).norm().item()
        moment = (ideal_moments[step] - actual_moments[step]).norm().item()
        bound = momentum_error_bound(moment, apart, errors[epoch].item(), norms[step], averages[epoch].item())
        assert (ideal_moments[step + 1] - actual_moments[step + 1]).norm().item() <= bound


def test_a_bound_is_reached_by_constant_gradients_that_point_in_one_line() -> None:
    bound = weight_error_bound([1.0, 0.5], [[3.0] * 4, [3.0] * 2], lipschitz=0.0, learning_rate=0.1, start=0.25)
    assert bound == pytest.approx([0.25 + 4 * 0.3, 0.25 + 4 * 0.3 + 2 * 0.15])
    # Two pairs with gradients 3 and -3: p is 1/2 each, p'_e is 1 and 0, and one step moves them apart by 0.1 * 3.
    assert momentum_error_bound(0.0, 0.0, 1.0, 3.0, 0.0) == pytest.approx(0.1 * 3)


@pytest.mark.parametrize("name", ["random", "cacl", "kcl"])
def test_the_alignment_direction_error_equals_the_loops(name: str) -> None:
    audio, text = multilingual_batch(languages=4)
    trained = scheme(name, 5, 4)
    expected = reference.alignment_direction_error(audio, text, trained.tolist())
    error = alignment_direction_error(audio, text, trained).item()
    assert error == pytest.approx(expected, abs=1e-5)
    assert (error > 1) == (name != "kcl")


# --- errors


def test_errors_name_the_expected_values() -> None:
    audio, text = multilingual_batch()
    with pytest.raises(ValueError, match="K = 1"):
        kcl_loss(audio, text[:, :1], SCALE)
    with pytest.raises(ValueError, match=r"text_embeds.*\(5, 7\)"):
        kcl_loss(audio, text[:, 0], SCALE)
    for loss in (kcl_loss(audio[:2], text[:2], SCALE), cacl_loss(audio[:2], text[:2, 0], text[:2, 1], SCALE)):
        assert loss.isfinite()
    with pytest.raises(ValueError, match=r"\b1\b"):
        kcl_loss(audio[:1], text[:1], SCALE)
    with pytest.raises(ValueError, match=r"\b1\b"):
        cacl_loss(audio[:1], text[:1, 0], text[:1, 1], SCALE)
    with pytest.raises(ValueError, match=r"shapes \(5, 7\) and \(3, 4, 7\)"):
        kcl_loss(audio, text[:4], SCALE)
    with pytest.raises(ValueError, match=r"trained.*\(5, 2\).*\(5, 3, 7\)"):
        data_distribution_error(audio, text, SCALE, torch.ones(5, 2, dtype=torch.bool))
