"""SVR against loops, the paper's gradient identities, the optimum of the radius, coincident pairs and low precision."""

import math
from functools import partial
from typing import Any, Literal

import pytest
import reference
import torch
import torch.nn.functional as F
from builders import unit_rows
from torch import Tensor

from modeling_supclap.losses import (
    DynamicRadius,
    StaticRadius,
    info_nce,
    radius_constraint,
    similarity_matrix,
    supclap_loss,
    support_vector_loss,
)
from modeling_supclap.losses.support_vector import Similarity, positive_distance, support_vectors

SCALE = 1 / 0.07
GROUPS = [0, 1, 0, 2, 1]
RADII = [0.1, 0.4, -0.2, 0.0, 1.3]
both_similarities = pytest.mark.parametrize("similarity", ["cosine", "dot"])


def related_pair(n: int = 5, d: int = 7, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    audio = unit_rows(n, d)
    return F.normalize(audio + spread * unit_rows(n, d, seed=1), dim=-1), audio


def support_similarity(
    anchors: Tensor, targets: Tensor, radius: float | Tensor, similarity: Similarity = "cosine"
) -> Tensor:
    return similarity_matrix(support_vectors(anchors, targets, radius, similarity), targets)


def radii() -> Tensor:
    return torch.tensor(RADII, dtype=torch.float64)


def naive_support_vectors(texts: Tensor, audios: Tensor, radius: Tensor) -> Tensor:
    return texts + radius.unsqueeze(-1) * F.normalize(audios - texts, dim=-1)


# --- values


@both_similarities
def test_similarity_equals_the_loops(similarity: Similarity) -> None:
    texts, audios = related_pair()
    expected = torch.tensor(reference.support_similarity(texts, audios, RADII, similarity), dtype=torch.float64)
    torch.testing.assert_close(support_similarity(texts, audios, radii(), similarity), expected, rtol=0, atol=1e-12)


@both_similarities
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_loss_equals_the_loops(similarity: Similarity, decoupled: bool, groups: list[int] | None) -> None:
    texts, audios = related_pair()
    ids = None if groups is None else torch.tensor(groups)
    loss = support_vector_loss(texts, audios, radii(), SCALE, similarity, decoupled, ids)
    expected = reference.support_vector_loss(texts, audios, RADII, SCALE, similarity, decoupled, groups)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


@both_similarities
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_sigmoid_loss_equals_the_loops(similarity: Similarity, groups: list[int] | None) -> None:
    texts, audios = related_pair()
    ids = None if groups is None else torch.tensor(groups)
    loss = support_vector_loss(texts, audios, radii(), 10.0, similarity, group_ids=ids, logit_bias=-9.0)
    expected = reference.support_vector_sigmoid_loss(texts, audios, RADII, 10.0, -9.0, similarity, groups)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_one_number_is_that_number_for_every_pair() -> None:
    texts, audios = related_pair()
    expected = support_vector_loss(texts, audios, torch.full((5,), 0.3), SCALE)
    for radius in (0.3, torch.tensor(0.3)):
        torch.testing.assert_close(support_vector_loss(texts, audios, radius, SCALE), expected)


def test_leading_dimensions_are_batches_of_their_own() -> None:
    texts, audios = related_pair()
    languages, per_pair = (torch.stack([texts, unit_rows(5, 7, seed=2)]), torch.stack([radii(), radii().flip(0)]))
    expected = sum(support_vector_loss(t, audios, r, SCALE) for t, r in zip(languages, per_pair, strict=True)) / 2
    torch.testing.assert_close(support_vector_loss(languages, audios, per_pair, SCALE), expected)
    expected = sum(support_vector_loss(audios, t, r, SCALE) for t, r in zip(languages, per_pair, strict=True)) / 2
    torch.testing.assert_close(support_vector_loss(audios, languages, per_pair, SCALE), expected)


# --- the whole loss


BASES = {"infonce": {}, "siglip": {"logit_bias": -9.0}}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("is_bidirectional", [False, True])
def test_the_whole_loss_equals_the_loops(base: str, groups: list[int] | None, is_bidirectional: bool) -> None:
    """[SupCLAP eq. 9]: L_orig + alpha L_svr + beta L_cons, the last two in one direction or in both."""
    texts, audios = related_pair()
    ids = None if groups is None else torch.tensor(groups)
    options: dict[str, Any] = {**BASES[base], "similarity": "dot", "group_ids": ids}
    if base == "siglip":
        options["original"] = torch.tensor(reference.sigmoid_loss(audios, texts, SCALE, -9.0, groups))
    loss, parts = supclap_loss(
        audios, texts, SCALE, radii(), radii().flip(0) if is_bidirectional else None, alpha=0.7, beta=0.3, **options
    )

    expected = {"original": reference.info_nce(audios, texts, SCALE, groups)}
    if base == "siglip":
        expected["original"] = options["original"].item()
    total = expected["original"]
    pairs = {"t2a": (texts, audios, RADII), "a2t": (audios, texts, RADII[::-1])}
    for direction in ("t2a", "a2t") if is_bidirectional else ("t2a",):
        anchors, targets, values = pairs[direction]
        if base == "siglip":
            svr = reference.support_vector_sigmoid_loss(anchors, targets, values, SCALE, -9.0, "dot", groups)
        else:
            svr = reference.support_vector_loss(anchors, targets, values, SCALE, "dot", False, groups)
        constraint = reference.radius_constraint(anchors, targets, values)
        assert constraint > 0.01
        expected |= {f"svr_{direction}": svr, f"constraint_{direction}": constraint}
        total += 0.7 * svr + 0.3 * constraint
    assert {name: part.item() for name, part in parts.items()} == pytest.approx(expected, abs=1e-12)
    assert loss.item() == pytest.approx(total, abs=1e-12)


def test_the_options_of_the_whole_loss_are_those_of_its_parts() -> None:
    texts, audios = related_pair()
    decoupled, parts = supclap_loss(audios, texts, SCALE, None, radii(), beta=0.0, decoupled=True, chunk_size=2)
    expected = reference.support_vector_loss(audios, texts, RADII, SCALE, "cosine", decoupled=True)
    assert parts.keys() == {"original", "svr_a2t"}  # no constraint with a weight of 0
    assert parts["svr_a2t"].item() == pytest.approx(expected, abs=1e-12)
    assert decoupled.item() == pytest.approx(expected + parts["original"].item(), abs=1e-12)

    texts.requires_grad_()
    for detach in (True, False):
        _, parts = supclap_loss(audios, texts, SCALE, radii(), detach_distance=detach)
        assert parts["constraint_t2a"].requires_grad is not detach


def test_gradcheck_of_the_whole_loss() -> None:
    texts, audios = related_pair(4, 3)
    scale = torch.tensor(9.0, dtype=torch.float64)
    reach = torch.tensor([[0.1, 0.4, -0.2, 1.3], [2.5, 0.2, 0.3, -0.1]], dtype=torch.float64)  # no kink of L_cons
    inputs = [x.requires_grad_() for x in (audios, texts, scale, *reach)]
    groups = torch.tensor([0, 1, 0, 2])

    def loss(a: Tensor, t: Tensor, s: Tensor, own: Tensor, other: Tensor) -> Tensor:
        return supclap_loss(a, t, s, own, other, 0.7, 0.3, detach_distance=False, group_ids=groups)[0]

    torch.autograd.gradcheck(loss, inputs)


# --- gradients


@both_similarities
@pytest.mark.parametrize("decoupled", [False, True])
def test_gradcheck(similarity: Similarity, decoupled: bool) -> None:
    texts, audios = related_pair(4, 3)
    scale = torch.tensor(9.0, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (texts, audios, radii()[:4], scale)]
    torch.autograd.gradcheck(
        lambda t, a, r, s: support_vector_loss(t, a, r, s, similarity, decoupled, torch.tensor([0, 1, 0, 2])), inputs
    )


@both_similarities
def test_sigmoid_gradcheck(similarity: Similarity) -> None:
    texts, audios = related_pair(4, 3)
    scalars = (torch.tensor(x, dtype=torch.float64) for x in (9.0, -8.0))
    inputs = [x.requires_grad_() for x in (texts, audios, radii()[:4], *scalars)]
    torch.autograd.gradcheck(lambda t, a, r, s, b: support_vector_loss(t, a, r, s, similarity, logit_bias=b), inputs)


@both_similarities
def test_gradient_equals_that_of_the_naive_form(similarity: Similarity) -> None:
    texts, audios, radius = inputs = [x.requires_grad_() for x in (*related_pair(), radii())]
    supports = naive_support_vectors(texts, audios, radius)
    if similarity == "cosine":
        supports = F.normalize(supports, dim=-1)
    naive = F.cross_entropy(SCALE * supports @ audios.T, torch.arange(5))
    loss = support_vector_loss(texts, audios, radius, SCALE, similarity)
    expected = torch.autograd.grad(naive, inputs)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), expected, rtol=0, atol=1e-12)


def test_only_the_perpendicular_push_is_scaled() -> None:
    """[SupCLAP eq. 15-18] on `dot`: only the perpendicular part changes, by the factor 1 - R / ||a - t||."""
    texts, audios = related_pair()
    radius = radii()
    pull = F.normalize(audios - texts, dim=1)
    factor = 1 - radius / (audios - texts).norm(dim=1)
    supports = naive_support_vectors(texts, audios, radius)
    probability = (SCALE * supports @ audios.T).softmax(dim=1)
    texts.requires_grad_()
    similarities = support_similarity(texts, audios, radius, "dot")
    for i in range(5):
        for j in range(5):
            score = SCALE * probability[i, j] * similarities[i, j]
            (gradient,) = torch.autograd.grad(score, texts, retain_graph=True)
            force = SCALE * probability[i, j] * audios[j]  # P_sup,j / tau a_j
            parallel = (force @ pull[i]) * pull[i]
            expected = torch.zeros_like(gradient)
            expected[i] = parallel + factor[i] * (force - parallel)
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_gradient_of_the_loss_is_the_sum_of_the_papers_forces() -> None:
    """[SupCLAP eq. 13, 16]: the whole gradient with the positive's force; only the perpendicular part is scaled."""
    texts, audios = related_pair()
    texts.requires_grad_()
    (gradient,) = torch.autograd.grad(support_vector_loss(texts, audios, radii(), SCALE, "dot"), texts)
    with torch.no_grad():
        pull = F.normalize(audios - texts, dim=1)
        factor = 1 - radii() / (audios - texts).norm(dim=1)
        probability = (SCALE * naive_support_vectors(texts, audios, radii()) @ audios.T).softmax(dim=1)
        force = SCALE * (probability @ audios - audios) / 5
        parallel = (force * pull).sum(1, keepdim=True) * pull
        torch.testing.assert_close(gradient, parallel + factor.unsqueeze(1) * (force - parallel), rtol=0, atol=1e-12)


# --- the optimum of the radius


def loss_at(radius: float, texts: Tensor, audios: Tensor, similarity: Similarity) -> float:
    return support_vector_loss(texts, audios, radius, SCALE, similarity).item()


def test_cosine_has_its_optimum_at_the_distance() -> None:
    """If the negatives are orthogonal to a pair, the optimal radius is exactly ||a - t||, so that t_sup = a."""
    angle = 0.8
    audios = torch.eye(6, dtype=torch.float64)[:3]
    texts = math.cos(angle) * audios + math.sin(angle) * torch.eye(6, dtype=torch.float64)[3:]
    distance = 2 * math.sin(angle / 2)
    radius = torch.tensor(distance, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(support_vector_loss(texts, audios, radius, SCALE), radius)
    assert gradient.item() == pytest.approx(0, abs=1e-9)
    at_distance = loss_at(distance, texts, audios, "cosine")
    for other in (0.0, 0.5 * distance, 0.95 * distance, 1.05 * distance, 2 * distance, 10 * distance):
        assert loss_at(other, texts, audios, "cosine") > at_distance


@pytest.mark.parametrize("spread", [0.3, 0.6, 1.0])
def test_learned_radius_settles_near_the_distance(spread: float) -> None:
    """With random negatives, gradient descent from R = 0 ends within a tenth of the mean distance."""
    texts, audios = related_pair(24, 256, spread)
    radius = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([radius], line_search_fn="strong_wolfe", max_iter=100, tolerance_grad=1e-12)

    def closure() -> float:
        optimiser.zero_grad()
        loss = 1e3 * support_vector_loss(texts, audios, radius, SCALE)
        loss.backward()
        return loss.item()

    optimiser.step(closure)
    distance = (audios - texts).norm(dim=1).mean().item()
    assert radius.item() == pytest.approx(distance, rel=0.1)


def test_dot_has_no_optimum() -> None:
    texts, audios = related_pair(24, 256)
    losses = [loss_at(radius, texts, audios, "dot") for radius in (0.0, 0.5, 1.0, 2.0, 3.0)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 5


# --- coincident pairs and low precision


@both_similarities
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_coincident_pairs_have_no_support_vector_gradient(similarity: Similarity, dtype: torch.dtype) -> None:
    """At a = t the unit vector is 0: the loss and the text's gradient are those of InfoNCE, and nothing is NaN."""
    texts = unit_rows(4, 16).to(dtype).requires_grad_()
    audios = texts.detach().clone().requires_grad_()
    radius = torch.tensor(0.5, requires_grad=True)
    loss = support_vector_loss(texts, audios, radius, SCALE, similarity)
    gradients = torch.autograd.grad(loss, (texts, audios, radius))
    plain = support_vector_loss(texts, audios, 0.0, SCALE, similarity)
    expected = torch.autograd.grad(plain, texts)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradients[0], expected[0])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[2].item() == 0
    assert radius_constraint(texts, audios, radius).item() == pytest.approx(0.5)


@both_similarities
@pytest.mark.parametrize(("dtype", "spread"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_pairs_closer_than_the_root_of_epsilon_have_no_direction(
    similarity: Similarity, dtype: torch.dtype, spread: float
) -> None:
    """Their difference is rounding, and R / ||a - t|| would multiply it: the gradient is that of radius 0."""
    texts, audios = (x.to(dtype) for x in related_pair(4, 16, spread))
    texts.requires_grad_()
    near, plain = (
        torch.autograd.grad(support_vector_loss(texts, audios, radius, SCALE, similarity), texts)[0]
        for radius in (0.5, 0.0)
    )
    torch.testing.assert_close(near, plain)
    far, _ = related_pair(4, 16, 10 * torch.finfo(dtype).eps ** 0.5)
    gradients: list[torch.Tensor] = []
    for radius in (0.5, 0.0):
        moved = far.to(dtype).requires_grad_()
        gradients += torch.autograd.grad(support_vector_loss(moved, audios, radius, SCALE, similarity), moved)
    assert (gradients[0] - gradients[1]).norm() > gradients[1].norm()  # beyond it, the radius has an effect


@both_similarities
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", range(-16, 0))
def test_nearly_coincident_pairs_are_finite(similarity: Similarity, dtype: torch.dtype, exponent: int) -> None:
    texts, audios = (x.to(dtype).requires_grad_() for x in related_pair(4, 16, spread=10.0**exponent))
    radius = torch.tensor(0.1, requires_grad=True)
    loss = support_vector_loss(texts, audios, radius, SCALE, similarity)
    gradients = torch.autograd.grad(loss, (texts, audios, radius))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("radius", [0.0, 1.0, 2.0])
def test_opposite_pairs_are_finite(radius: float) -> None:
    """Halfway between t and -t the support vector is zero, so that its cosine is undefined."""
    texts = unit_rows(4, 16).float().requires_grad_()
    loss = support_vector_loss(texts, -texts.detach(), radius, SCALE)
    (gradient,) = torch.autograd.grad(loss, texts)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("angle", [0.1, 0.01, 0.003])
def test_float32_is_exact_half_way_between_nearly_opposite_pairs(angle: float) -> None:
    """The norm of the support vector is sin(angle / 2). Its square, 1 - R (d - R), would be lost to rounding."""
    generator = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64, generator=generator)).Q
    texts = frame[:4].float().requires_grad_()
    audios = (math.sin(angle) * frame[4:8] - math.cos(angle) * frame[:4]).float().requires_grad_()
    radius = positive_distance(texts.detach().double(), audios.detach().double()) / 2
    wide = [x.detach().double().requires_grad_() for x in (texts, audios)]

    narrow_similarity = support_similarity(texts, audios, radius)
    wide_similarity = support_similarity(wide[0], wide[1], radius)
    tolerance = 2e-7 / math.sin(angle / 2)  # the rounding of the embeddings
    torch.testing.assert_close(narrow_similarity.double(), wide_similarity, rtol=0, atol=tolerance)
    weights = torch.randn(4, 4, generator=generator)
    found = torch.autograd.grad((weights * narrow_similarity).sum(), (texts, audios))
    expected = torch.autograd.grad((weights * wide_similarity).sum(), wide)
    for own, other in zip(found, expected, strict=True):
        assert (own - other).norm() < 10 * tolerance * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.01, 0.03, 0.1, 1.0])
def test_distance_is_exact_in_low_precision(dtype: torch.dtype, spread: float) -> None:
    """The distance sqrt(2 - 2 S_ii) would be inexact, because the norms of bfloat16 embeddings are not exactly 1."""
    texts, audios = (x.to(dtype) for x in related_pair(8, 64, spread))
    distance = (audios.double() - texts.double()).norm(dim=1)
    reached = support_similarity(texts, audios, distance, "dot")
    torch.testing.assert_close(reached.double(), audios.double() @ audios.double().T, rtol=0, atol=2e-6)
    if dtype == torch.bfloat16 and spread <= 0.03:
        from_similarity = (2 - 2 * (audios.double() * texts.double()).sum(1)).clamp_min(0).sqrt()
        assert ((from_similarity - distance).abs() / distance).max() > 0.1


@pytest.mark.parametrize("distance", [1e-3, 1e-2, 0.1])
def test_float32_keeps_the_value_of_close_pairs(distance: float) -> None:
    """A radius far beyond a close target multiplies the rounding error by at most R / d."""
    texts, audios = related_pair(8, 64, spread=distance)
    exact = support_similarity(texts, audios, 0.1)
    rounded = support_similarity(texts.float(), audios.float(), 0.1)
    assert (exact - rounded).abs().max().item() < 1e-6 * (1 + 0.1 / distance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_costs_only_the_rounding_of_the_embeddings(dtype: torch.dtype) -> None:
    texts, audios = (x.to(dtype).requires_grad_() for x in related_pair(8, 32))
    loss = support_vector_loss(texts, audios, 0.2, SCALE)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        support_vector_loss(texts.double(), audios.double(), 0.2, SCALE).item(), rel=1e-5, abs=1e-6
    )
    for gradient in torch.autograd.grad(loss, (texts, audios)):
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


def test_autocast_does_not_reach_the_loss() -> None:
    texts, audios = (x.float() for x in related_pair(8, 32))
    torch.manual_seed(0)
    predictor = randomised(DynamicRadius(8))

    def loss() -> float:
        radius = predictor(SCALE * similarity_matrix(texts, audios))
        return support_vector_loss(texts, audios, radius, SCALE).item()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss()
    assert inside == loss()


# --- the constraint


def test_constraint_equals_the_loops_and_trains_only_the_radius() -> None:
    texts, audios = (x.requires_grad_() for x in related_pair())
    distance = (audios - texts).norm(dim=1).detach()
    radius = (distance * torch.tensor([0.5, 1.5, -0.5, 0.0, 3.0])).requires_grad_()
    constraint = radius_constraint(texts, audios, radius)
    assert constraint.item() == pytest.approx(reference.radius_constraint(texts, audios, radius.tolist()), abs=1e-12)
    (gradient,) = torch.autograd.grad(constraint, radius)
    assert gradient.tolist() == pytest.approx([0, 0.2, -0.2, 0, 0.2])
    assert not radius_constraint(texts, audios, 0.1).requires_grad
    assert radius_constraint(texts.requires_grad_(), audios, 0.1, detach_distance=False).requires_grad


# --- the radius modules


def randomised(predictor: DynamicRadius) -> DynamicRadius:
    """Set the last layer to random weights, so that the radius depends on the row."""
    with torch.no_grad():
        list(predictor.parameters())[-2].normal_(std=0.1)
    return predictor


@pytest.fixture
def predictor() -> DynamicRadius:
    torch.manual_seed(0)
    return randomised(DynamicRadius(num_similarities=5).double())


def test_static_radius_learns_one_number() -> None:
    texts, audios = related_pair()
    module = StaticRadius(init=0.1)
    radius = module(SCALE * similarity_matrix(texts, audios))
    assert radius.shape == (5,)
    assert radius.tolist() == pytest.approx([0.1] * 5)
    assert [name for name, _ in module.named_parameters()] == ["radius"]
    (gradient,) = torch.autograd.grad(support_vector_loss(texts, audios, radius, SCALE), module.radius)
    assert gradient.item() < 0  # a larger radius reduces the loss
    assert module(torch.zeros(3, 5, 5)).shape == (3, 5)


def test_dynamic_radius_starts_as_the_static_one_and_learns() -> None:
    texts, audios = related_pair()
    module = DynamicRadius(num_similarities=5, init=0.3).double()
    scaled = SCALE * similarity_matrix(texts, audios)
    assert module(scaled).tolist() == pytest.approx([0.3] * 5)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = support_vector_loss(texts, audios, module(scaled), SCALE)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    assert module(scaled).std() > 0


def test_dynamic_radius_is_a_network_with_two_hidden_layers(predictor: DynamicRadius) -> None:
    texts, audios = related_pair()
    scaled = SCALE * similarity_matrix(texts, audios)
    first, first_bias, second, second_bias, last, last_bias = (value.detach() for value in predictor.parameters())
    for row, radius in enumerate(predictor(scaled)):
        others = [value for column, value in enumerate(scaled[row]) if column != row]
        inputs = torch.stack([scaled[row, row], *sorted(others, reverse=True)])
        hidden = (second @ (first @ inputs + first_bias).clamp(min=0) + second_bias).clamp(min=0)
        assert radius.item() == pytest.approx((last @ hidden + last_bias).item())


@pytest.mark.parametrize("order", ["sorted", "batch"])
def test_dynamic_radius_reads_the_positive_first_then_the_negatives(
    predictor: DynamicRadius, order: Literal["sorted", "batch"]
) -> None:
    predictor.order = order
    scaled = SCALE * similarity_matrix(*related_pair())
    for i, radius in enumerate(predictor(scaled)):
        negatives = [scaled[i, j].item() for j in range(5) if j != i]
        negatives = sorted(negatives, reverse=True) if order == "sorted" else negatives
        row = torch.tensor([scaled[i, i].item(), *negatives], dtype=torch.float64)
        assert radius.item() == pytest.approx(predictor.layers(row).item(), abs=1e-12)


def test_sorted_radius_follows_its_pair_through_any_order_of_the_batch(predictor: DynamicRadius) -> None:
    scaled = SCALE * similarity_matrix(*related_pair())
    order = torch.tensor([3, 0, 4, 1, 2])
    radius = predictor(scaled)
    torch.testing.assert_close(predictor(scaled[order][:, order]), radius[order])
    predictor.order = "batch"
    assert not torch.allclose(predictor(scaled[order][:, order]), predictor(scaled)[order])


def test_incomplete_batch_is_a_full_one_filled_with_unrelated_clips(predictor: DynamicRadius) -> None:
    texts, audios = related_pair(5, 7)
    unrelated = torch.eye(9, dtype=torch.float64)[7:]
    full = [torch.cat([F.pad(x[:3], (0, 2)), unrelated]) for x in (texts, audios)]
    short = predictor(SCALE * similarity_matrix(texts[:3], audios[:3]))
    torch.testing.assert_close(short, predictor(SCALE * similarity_matrix(*full))[:3])


def test_larger_batch_is_seen_through_its_hardest_negatives(predictor: DynamicRadius) -> None:
    scaled = SCALE * similarity_matrix(*related_pair(12, 7))
    easy = scaled.clone()
    for i in range(12):
        negatives = [j for j in scaled[i].argsort(descending=True).tolist() if j != i]
        easy[i, negatives[4:]] -= 1.0
    torch.testing.assert_close(predictor(easy), predictor(scaled))
    assert predictor(scaled).shape == (12,)
    assert not torch.allclose(predictor(scaled - 1.0), predictor(scaled))


def test_other_captions_of_the_clip_count_as_unrelated(predictor: DynamicRadius) -> None:
    scaled = SCALE * similarity_matrix(*related_pair())
    ids = torch.tensor(GROUPS)
    expected = scaled.masked_fill((ids.unsqueeze(1) == ids) & ~torch.eye(5, dtype=torch.bool), 0.0)
    torch.testing.assert_close(predictor(scaled, ids), predictor(expected))
    assert not torch.allclose(predictor(scaled, ids), predictor(scaled))


def test_radius_steers_the_encoders_only_on_request(predictor: DynamicRadius) -> None:
    scaled = (SCALE * similarity_matrix(*related_pair())).requires_grad_()
    (detached,) = torch.autograd.grad(predictor(scaled).sum() + 0 * scaled.sum(), scaled)
    assert not detached.any()
    predictor.detach_input = False
    (attached,) = torch.autograd.grad(predictor(scaled).sum(), scaled)
    assert attached.any(dim=1).all()


def test_predictor_takes_languages_and_low_precision(predictor: DynamicRadius) -> None:
    scaled = SCALE * similarity_matrix(*related_pair())
    stacked = predictor(torch.stack([scaled, scaled.flip(0).flip(1)]))
    torch.testing.assert_close(stacked, torch.stack([predictor(scaled), predictor(scaled).flip(0)]))
    in_batch_order = randomised(DynamicRadius(num_similarities=4, order="batch").double())
    other = scaled.flip(1).roll(2, dims=0)
    expected = torch.stack([in_batch_order(scaled), in_batch_order(other)])
    torch.testing.assert_close(in_batch_order(torch.stack([scaled, other])), expected)
    assert DynamicRadius(4)(scaled.float()).tolist() == pytest.approx([0.1] * 5)
    half = predictor.bfloat16()(scaled.float())
    assert half.dtype == torch.float32
    assert half.isfinite().all()


# --- errors


def test_errors_name_the_expected_values() -> None:
    texts, audios = related_pair()
    with pytest.raises(ValueError, match=r"\b1\b"):
        support_vector_loss(texts[:1], audios[:1], 0.1, SCALE)
    with pytest.raises(ValueError, match="similarity='euclid'"):
        support_vector_loss(texts, audios, 0.1, SCALE, similarity="euclid")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"radius.*\(5, 1\)"):
        support_vector_loss(texts, audios, radii().unsqueeze(1), SCALE)
    with pytest.raises(ValueError, match="negative"):
        support_vector_loss(texts, audios, 0.1, SCALE, decoupled=True, group_ids=torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match="num_similarities=1"):
        DynamicRadius(num_similarities=1)
    with pytest.raises(ValueError, match="order='random'"):
        DynamicRadius(num_similarities=4, order="random")  # type: ignore[arg-type]


@both_similarities
@pytest.mark.parametrize("exponent", [-9, -12])
def test_a_pair_without_direction_has_the_gradient_of_info_nce(similarity: Similarity, exponent: int) -> None:
    """A support vector of a nearly equal pair is its anchor: a radius divided by the distance would be enormous."""
    anchors = unit_rows(5, 7)
    targets = F.normalize(anchors + 10.0**exponent * unit_rows(5, 7, seed=1), dim=-1)
    gradients: list[torch.Tensor] = []
    for loss in (info_nce, partial(support_vector_loss, radius=0.5, similarity=similarity)):
        moving = anchors.clone().requires_grad_()
        total = loss(moving, targets, logit_scale=SCALE)
        gradients.append(torch.autograd.grad(total, moving)[0])
    assert gradients[1].norm(dim=-1).max() <= 2 * gradients[0].norm(dim=-1).max() + 2 * SCALE
