"""Objectives, compared with sums of the loss functions as in the papers, and their logs."""

import math

import builders
import pytest
import reference
import torch
import torch.nn.functional as F
from test_trainer import QUICK, processor
from test_trainer import arguments as short_arguments

from modeling_supclap.losses import (
    DynamicRadius,
    StaticRadius,
    cacl_loss,
    info_nce,
    kcl_loss,
    radius_constraint,
    reweighted_info_nce,
    sigmoid_loss,
    similarity_matrix,
    support_vector_loss,
    teminal_a_weights,
    teminal_b_weights,
    temporal_nce,
)
from modeling_supclap.recipes.studies.controls import ShuffledRegularizer, ShuffledTargets
from modeling_supclap.training.objectives import (
    ContrastiveObjective,
    MatryoshkaObjective,
    RelativeRadius,
    SupportVectorRegularizer,
    TemporalObjective,
    build_objective,
    load_objective,
    radius_of_pairs,
)
from modeling_supclap.training.options import LOSSES, captions_per_clip, chance_loss, clips_per_batch
from modeling_supclap.training.trainer import SupCLAPTrainer
from modeling_supclap.training.training_args import SupCLAPTrainingArguments, TemporalTrainingArguments

GENERATOR = torch.Generator().manual_seed(0)
AUDIO, TEXT = torch.nn.functional.normalize(torch.randn(2, 6, 5, generator=GENERATOR, dtype=torch.float64), dim=-1)
SCALE, BIAS = torch.tensor(10.0, dtype=torch.float64), torch.tensor(-3.0, dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 1, 2, 3, 4])
TEXTS = torch.nn.functional.normalize(torch.randn(6, 3, 5, generator=GENERATOR, dtype=torch.float64), dim=-1)
ROLES = torch.nn.functional.normalize(torch.randn(2, 4, 3, 5, generator=GENERATOR, dtype=torch.float64), dim=-1)


def objective(tmp_path, **kwargs):
    return build_objective(
        SupCLAPTrainingArguments(output_dir=str(tmp_path), **{"radius_init": 0.1, **kwargs})
    ).double()


def evaluate(module, **kwargs):
    return module(AUDIO, TEXT[:, None], SCALE, **kwargs)


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_plain_losses(tmp_path, groups):
    for loss, bias, expected in (
        ("infonce", None, info_nce(AUDIO, TEXT, SCALE, groups)),
        ("siglip", BIAS, sigmoid_loss(AUDIO, TEXT, SCALE, BIAS, groups)),
        ("reweighted", None, reweighted_info_nce(AUDIO, TEXT, SCALE, 1.0, groups)),
    ):
        total, logs = evaluate(objective(tmp_path, loss=loss), logit_bias=bias, group_ids=groups)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(logs[f"loss_{loss}"], expected)


@pytest.mark.parametrize(("options", "decoupled"), [({}, False), ({"svr_decoupled": True}, True)])
def test_bidirectional_static_support_vectors(tmp_path, options, decoupled):
    total, logs = evaluate(objective(tmp_path, svr="bi-static", svr_alpha=0.5, **options), group_ids=GROUPS)
    radius = torch.full((6,), torch.tensor(0.1, dtype=torch.float32).double())
    t2a = support_vector_loss(TEXT, AUDIO, radius, SCALE, "cosine", decoupled, GROUPS)
    a2t = support_vector_loss(AUDIO, TEXT, radius, SCALE, "cosine", decoupled, GROUPS)
    torch.testing.assert_close(total, info_nce(AUDIO, TEXT, SCALE, GROUPS) + 0.5 * (t2a + a2t))
    assert logs["radius_t2a"].item() == pytest.approx(0.1)
    assert t2a != a2t


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_radius_starts_at_the_distance_of_the_first_batch(tmp_path, kind):
    module = objective(tmp_path, svr=f"bi-{kind}", radius_init=None)
    distance = (AUDIO - TEXT).norm(dim=-1).mean().item()
    for clips in (AUDIO, AUDIO.flip(0)):  # the second batch has another distance
        _, logs = module(clips, TEXT[:, None], SCALE)
        assert logs["radius_t2a"].item() == logs["radius_a2t"].item() == pytest.approx(distance)

    resumed = objective(tmp_path, svr=f"bi-{kind}", radius_init=None)
    resumed.load_state_dict(module.state_dict())
    _, logs = resumed(AUDIO.flip(0), TEXT[:, None], SCALE)
    assert logs["radius_t2a"].item() == pytest.approx(distance)


@pytest.mark.parametrize("options", [{"svr": "within-modality"}, {"svr": "bi-fixed", "radius_ratio": 1.0}])
def test_a_support_vector_at_the_target_contrasts_within_each_modality(tmp_path, options):
    total, _ = evaluate(objective(tmp_path, **options))
    within = 0.0
    for embeds in (AUDIO, TEXT):
        logits = SCALE * embeds @ embeds.T
        within += torch.nn.functional.cross_entropy(logits, torch.arange(len(embeds)))
    torch.testing.assert_close(total, info_nce(AUDIO, TEXT, SCALE) + within)


def test_a_relative_radius_is_a_share_of_the_distance_to_the_own_target():
    expected = [0.3 * math.dist(text, audio) for text, audio in zip(TEXT.tolist(), AUDIO.tolist(), strict=True)]
    assert RelativeRadius(0.3)(TEXT, AUDIO).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("size", [4, 9])
@pytest.mark.parametrize("detach_input", [True, False])
def test_radii_in_tiles_are_those_of_the_matrix(groups, size, detach_input):
    torch.manual_seed(0)
    module = DynamicRadius(size, detach_input=detach_input).double()
    torch.nn.init.normal_(module.layers[-1].weight, std=0.1)
    audio, texts = AUDIO.clone().requires_grad_(), TEXTS.transpose(0, 1).clone().requires_grad_()  # (3, 6, d)
    expected = module(SCALE * similarity_matrix(texts, audio), groups)
    inputs = [*module.parameters(), *([] if detach_input else [audio, texts])]
    for chunk_size in (None, 4):
        radii = radius_of_pairs(module, texts, audio, SCALE, groups, chunk_size)
        torch.testing.assert_close(radii, expected, rtol=0, atol=1e-12)
        gradients = [torch.autograd.grad(each.sum(), inputs, retain_graph=True) for each in (radii, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    static = radius_of_pairs(StaticRadius(0.3), texts, audio, SCALE, groups, 4)
    torch.testing.assert_close(static, torch.full((3, 6), 0.3))


def test_a_fixed_radius_of_zero_is_infonce(tmp_path):
    total, logs = evaluate(objective(tmp_path, svr="bi-fixed", radius_ratio=0.0))
    torch.testing.assert_close(total, 2 * info_nce(AUDIO, TEXT, SCALE))
    assert logs["radius_t2a"] == 0


def test_shuffled_targets_move_anchors_toward_the_target_of_another_pair():
    module = ShuffledTargets(num_similarities=4).double()
    first = evaluate(module)[1]["radius_t2a"].item()
    assert first == pytest.approx(
        reference.mean([math.dist(*pair) for pair in zip(AUDIO.tolist(), TEXT.tolist(), strict=True)])
    )
    torch.manual_seed(0)
    for parameter in module.regularizer.radii.parameters():  # so that similarities change the radii
        parameter.data += 0.02 * torch.rand_like(parameter)
    total, logs = evaluate(module)
    svr, constraints = [], []
    for direction, anchors, targets in (("t2a", TEXT, AUDIO), ("a2t", AUDIO, TEXT)):
        radii = module.regularizer.radii[direction](SCALE * anchors @ targets.T, None).tolist()
        assert max(radii) - min(radii) > 0.05
        rows = []
        for i, anchor in enumerate(anchors.tolist()):
            support = reference.support_vector(anchor, targets[i - 1].tolist(), radii[i])
            rows.append([SCALE.item() * reference.cosine(support, target) for target in targets.tolist()])
        svr.append(reference.mean([reference.log_ratio(row, [i]) for i, row in enumerate(rows)]))
        constraints.append(reference.radius_constraint(anchors, targets.roll(1, 0), radii))
    assert min(constraints) > 0
    assert [logs["loss_svr_t2a"].item(), logs["loss_svr_a2t"].item()] == pytest.approx(svr)
    total_constraint = module.regularizer.beta * sum(constraints)
    assert total.item() == pytest.approx(reference.info_nce(AUDIO, TEXT, SCALE.item()) + sum(svr) + total_constraint)


def test_shuffled_targets_start_from_the_distance_of_the_true_pairs_and_have_both_weights():
    radii = {direction: DynamicRadius(4, init=math.nan) for direction in ("t2a", "a2t")}
    regularizer = ShuffledRegularizer(radii, alpha=0.5, beta=2.0).double()
    far = AUDIO.clone()
    far[1] = -TEXT[1]  # the mean distance is larger than that of some shuffled pairs
    distance = reference.mean([math.dist(*pair) for pair in zip(TEXT.tolist(), far.tolist(), strict=True)])
    total, logs = regularizer(far, TEXT, SCALE, None, GROUPS, None, lambda: torch.tensor(7.0))
    expected = 7.0
    for direction, anchors, targets in (("t2a", TEXT, far), ("a2t", far, TEXT)):
        constraint = reference.radius_constraint(anchors, targets.roll(1, 0), [distance] * 6)
        assert constraint > 0
        expected += 0.5 * logs[f"loss_svr_{direction}"].item() + 2.0 * constraint
        assert logs[f"radius_{direction}"].item() == pytest.approx(distance)
    assert logs["loss_infonce"] == 7
    assert total.item() == pytest.approx(expected)
    again, _ = regularizer(far, TEXT, SCALE, None, None, None, lambda: torch.tensor(7.0))
    assert again != total  # equal recordings are positives


@pytest.mark.parametrize("named", [{}, {"base": "hinge"}])
@pytest.mark.parametrize("directions", [("t2a",), ("t2a", "a2t")])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_support_vectors_are_added_to_any_base_loss(named, directions, chunk_size):
    regularizer = SupportVectorRegularizer({name: StaticRadius(0.3) for name in directions}, alpha=0.5, **named)
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    total, logs = regularizer.double()(AUDIO, TEXT, SCALE, None, None, chunk_size, lambda: 617 * weight)
    svr = 0
    for name in directions:
        anchors, targets = (TEXT, AUDIO) if name == "t2a" else (AUDIO, TEXT)
        svr += support_vector_loss(anchors, targets, regularizer.radii[name].radius.expand(6), SCALE)
    torch.testing.assert_close(total, 617 * weight + 0.5 * svr)
    assert logs[f"loss_{named.get('base', 'infonce')}"] == 2 * 617
    total.backward()
    assert weight.grad == 617


MASK = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 1], [1, 1], [1, 0]])


@pytest.mark.parametrize("loss", ["infonce", "siglip"])
@pytest.mark.parametrize("options", [{}, {"svr": "bi-static", "svr_alpha": 0.5}, {"loss_chunk_size": 2}])
def test_negatives_are_added_to_the_base_loss(tmp_path, loss, options):
    module, plain = (objective(tmp_path, loss=loss, **options) for _ in range(2))
    inputs = {"logit_bias": BIAS} if loss == "siglip" else {}
    total, _ = module(AUDIO, TEXTS, SCALE, group_ids=GROUPS, negative_mask=MASK, **inputs)
    without, _ = plain(AUDIO, TEXTS[:, :1], SCALE, group_ids=GROUPS, **inputs)
    wrong = {"negatives": TEXTS[:, 1:], "negative_mask": MASK.bool(), "group_ids": GROUPS}
    if loss == "infonce":
        more = info_nce(AUDIO, TEXTS[:, 0], SCALE, **wrong) - info_nce(AUDIO, TEXTS[:, 0], SCALE, GROUPS)
    else:
        more = sigmoid_loss(AUDIO, TEXTS[:, 0], SCALE, BIAS, **wrong) - sigmoid_loss(
            AUDIO, TEXTS[:, 0], SCALE, BIAS, GROUPS
        )
    torch.testing.assert_close(total, without + more)
    assert more > 0.01
    with pytest.raises(ValueError, match=r"negatives.*kcl"):
        objective(tmp_path, loss="kcl", languages=["eng", "fra"])(AUDIO, TEXTS, SCALE, negative_mask=MASK)


@pytest.mark.parametrize("options", [{}, {"svr": "bi-static"}, {"loss": "kcl", "languages": ["eng", "fra", "deu"]}])
def test_nested_widths_are_the_sum_of_the_losses(tmp_path, options):
    texts = TEXTS if "loss" in options else TEXTS[:, :1]
    module = MatryoshkaObjective(objective(tmp_path, **options), [3, 2, 3])
    assert module.widths == [2, 3]
    total, logs = module(AUDIO, texts, SCALE, group_ids=GROUPS)
    expected = 0
    for width in (5, 3, 2):
        audio, cut = AUDIO[:, :width], texts[..., :width]
        audio, cut = (embeds / embeds.norm(dim=-1, keepdim=True) for embeds in (audio, cut))
        part, whole = objective(tmp_path, **options)(audio, cut, SCALE, group_ids=GROUPS)
        expected = expected + part
        if width < 5:
            torch.testing.assert_close(logs[f"loss_width_{width}"], part.detach())
        else:
            for name, value in whole.items():
                torch.testing.assert_close(logs[name], value)
    torch.testing.assert_close(total, expected)


def test_radii_of_nested_widths_are_those_of_the_whole_embeddings(tmp_path):
    module = MatryoshkaObjective(objective(tmp_path, svr="bi-dynamic", radius_init=None), [2])
    plain = objective(tmp_path, svr="bi-dynamic", radius_init=None)
    module(AUDIO, TEXT[:, None], SCALE)
    plain(AUDIO, TEXT[:, None], SCALE)
    for direction, radius in plain.regularizer.batch_radii.items():
        torch.testing.assert_close(module.regularizer.batch_radii[direction], radius)
    with pytest.raises(ValueError, match="width 5"):
        MatryoshkaObjective(plain, [5])(AUDIO, TEXT[:, None], SCALE)
    with pytest.raises(ValueError, match=r"\[3, 0\]"):
        MatryoshkaObjective(plain, [3, 0])
    with pytest.raises(ValueError, match=r"\[\]; expected at least one"):
        MatryoshkaObjective(plain, [])


def test_unidirectional_displaces_texts_only(tmp_path):
    total, logs = evaluate(objective(tmp_path, svr="uni-static"))
    radius = torch.full((6,), torch.tensor(0.1, dtype=torch.float32).double())
    expected = info_nce(AUDIO, TEXT, SCALE) + support_vector_loss(TEXT, AUDIO, radius, SCALE)
    torch.testing.assert_close(total, expected)
    assert "radius_a2t" not in logs


def test_support_vectors_on_siglip_go_through_the_sigmoid(tmp_path):
    total, _ = evaluate(objective(tmp_path, loss="siglip", svr="uni-static"), logit_bias=BIAS)
    radius = torch.full((6,), torch.tensor(0.1, dtype=torch.float32).double())
    svr = support_vector_loss(TEXT, AUDIO, radius, SCALE, logit_bias=BIAS)
    torch.testing.assert_close(total, sigmoid_loss(AUDIO, TEXT, SCALE, BIAS) + svr)


def test_a_dynamic_radius_is_constrained(tmp_path):
    module = objective(tmp_path, svr="uni-dynamic", svr_beta=0.3, radius_init=1.9)
    total, logs = evaluate(module)
    radius = torch.full((6,), torch.tensor(1.9, dtype=torch.float32).double())
    constraint = radius_constraint(TEXT, AUDIO, radius)
    assert constraint > 0
    torch.testing.assert_close(logs["loss_constraint_t2a"], constraint)
    svr = support_vector_loss(TEXT, AUDIO, radius, SCALE)
    torch.testing.assert_close(total, info_nce(AUDIO, TEXT, SCALE) + svr + 0.3 * constraint)


# --- the papers' own variants, where the defaults differ


def slopes(function, point):
    """Return the gradient of a function of a matrix by central differences."""
    gradient = torch.zeros_like(point)
    for index in range(point.numel()):
        step = torch.zeros_like(point)
        step.view(-1)[index] = 1e-5
        gradient.view(-1)[index] = (function(point + step) - function(point - step)) / 2e-5
    return gradient


def dynamic(tmp_path, **options):
    """Return an objective with a radius that depends on the similarities, and the layers of its predictor."""
    module = objective(tmp_path, svr="uni-dynamic", svr_beta=0.7, radius_num_similarities=6, **options)
    layers = module.regularizer.radius_of("t2a").layers
    torch.nn.init.normal_(layers[4].weight, std=0.15, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        layers[4].bias.fill_(1.2)  # above the distance of some pairs, and below that of others
    return module, [(layer.weight.tolist(), layer.bias.tolist()) for layer in layers if hasattr(layer, "weight")]


def loops_of_dynamic(text, radii, distances=None):
    """Compute the loss with the given radii. `distances` are the texts from which the constraint is computed."""
    scale = SCALE.item()
    svr = reference.support_vector_loss(text, AUDIO, radii, scale)
    constraint = reference.radius_constraint(text if distances is None else distances, AUDIO, radii)
    return reference.info_nce(AUDIO, text, scale) + svr + 0.7 * constraint


@pytest.mark.parametrize("order", ["sorted", "batch"])
def test_the_order_of_the_predictors_inputs_equals_the_loops(tmp_path, order):
    module, layers = dynamic(tmp_path, radius_order=order)
    total, logs = evaluate(module)
    radii = reference.predicted_radii(TEXT, AUDIO, SCALE.item(), layers, order)
    other = reference.predicted_radii(TEXT, AUDIO, SCALE.item(), layers, {"sorted": "batch", "batch": "sorted"}[order])
    assert logs["radius_t2a"].item() == pytest.approx(reference.mean(radii), abs=1e-12)
    assert abs(reference.mean(radii) - reference.mean(other)) > 1e-3
    assert total.item() == pytest.approx(loops_of_dynamic(TEXT, radii), abs=1e-12)


@pytest.mark.parametrize("radius_gradients", [False, True])
@pytest.mark.parametrize("constraint_gradients", [False, True])
def test_gradients_through_the_radius_and_the_distance_equal_the_loops(
    tmp_path, radius_gradients, constraint_gradients
):
    flags = {"radius_gradients": radius_gradients, "constraint_gradients": constraint_gradients}
    module, layers = dynamic(tmp_path, **flags)
    text = TEXT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(AUDIO, text[:, None], SCALE)[0], text)

    def loops(moved):
        radii = reference.predicted_radii(moved if radius_gradients else TEXT, AUDIO, SCALE.item(), layers, "sorted")
        return loops_of_dynamic(moved, radii, distances=None if constraint_gradients else TEXT)

    torch.testing.assert_close(gradient, slopes(loops, TEXT), rtol=1e-6, atol=1e-7)


def test_one_radius_for_both_directions_equals_the_loops(tmp_path):
    module = objective(tmp_path, svr="bi-static", shared_radius=True, radius_init=0.3)
    (radius,) = module.parameters()
    total, logs = evaluate(module)
    radii = [radius.item()] * 6

    def loops(values):
        value = values.tolist() * 6
        svr = reference.support_vector_loss(TEXT, AUDIO, value, SCALE.item())
        svr += reference.support_vector_loss(AUDIO, TEXT, value, SCALE.item())
        return reference.info_nce(AUDIO, TEXT, SCALE.item()) + svr

    assert total.item() == pytest.approx(loops(radius.detach()), abs=1e-12)
    (gradient,) = torch.autograd.grad(total, radius)
    torch.testing.assert_close(gradient, slopes(loops, radius.detach()), rtol=1e-6, atol=1e-7)
    assert logs["radius_t2a"] == logs["radius_a2t"] == pytest.approx(radii[0])
    with pytest.raises(ValueError, match="uni-static"):
        objective(tmp_path, svr="uni-static", shared_radius=True)


def test_one_predictor_for_both_directions_is_constrained_in_both(tmp_path):
    module = objective(tmp_path, svr="bi-dynamic", shared_radius=True, radius_init=1.9)
    _, logs = evaluate(module)
    assert {"loss_constraint_t2a", "loss_constraint_a2t", "radius_t2a", "radius_a2t"} <= logs.keys()
    assert all(name.startswith("regularizer.radii.both.") for name, _ in module.named_parameters())


def test_the_probability_that_is_scaled_as_printed_trains_as_in_the_loops(tmp_path):
    """P+ in the gradient, eq. 4, is multiplied by w, which starts at 1 and may become negative."""
    module = objective(tmp_path, loss="reweighted", reweighting="probability")
    (weight,) = module.parameters()
    assert weight.item() == 1
    torch.nn.init.constant_(weight, -0.5)
    text = TEXT.clone().requires_grad_()
    total, _ = module(AUDIO, text[:, None], SCALE)
    probabilities = reference.positive_probabilities(AUDIO, TEXT, SCALE.item())

    def loops(moved, w=-0.5):
        held = [-(w - 1) * probability for probability in probabilities]
        return reference.reweighted_info_nce(AUDIO, moved, SCALE.item(), w, held)

    assert total.item() == pytest.approx(loops(TEXT), abs=1e-12)
    of_text, of_weight = torch.autograd.grad(total, (text, weight))
    torch.testing.assert_close(of_text, slopes(loops, TEXT), rtol=1e-6, atol=1e-7)
    assert of_weight.item() == pytest.approx((loops(TEXT, 0.5) - loops(TEXT, -0.5)), abs=1e-12)  # linear in w


def test_the_overlay_term_of_the_appendix_equals_the_loops():
    alphas = (0.5, 0.25, 0.75, 0.125)
    names = ("alpha_same_time", "alpha_cross_time", "alpha_same_overlay", "alpha_cross_overlay")
    given = dict(zip(names, alphas, strict=True))
    total, _ = TemporalObjective("b", beta=0.7, two_term_overlay=True, **given)(*ROLES, SCALE)
    expected = reference.teminal_b_loss(*blocks(*ROLES), SCALE.item(), alphas, beta=0.7, appendix=True)
    assert total.item() == pytest.approx(expected, abs=1e-6)  # the weights are float32
    main = reference.teminal_b_loss(*blocks(*ROLES), SCALE.item(), alphas, beta=0.7)
    assert abs(main - expected) > 0.01


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_multilingual_losses_with_support_vectors(tmp_path, groups):
    radius = torch.tensor(0.1, dtype=torch.float32).double()
    for loss, count, scale in (("kcl", 3, 1 / 2), ("cacl", 2, 1 / 3)):
        module = objective(tmp_path, loss=loss, svr="bi-static", languages=["eng", "fra", "deu"])
        total, logs = module(AUDIO, TEXTS[:, :count], SCALE, group_ids=groups)
        svr = sum(
            support_vector_loss(TEXTS[:, k], AUDIO, radius, SCALE, group_ids=groups)
            + support_vector_loss(AUDIO, TEXTS[:, k], radius, SCALE, group_ids=groups)
            for k in range(count)
        )
        if loss == "kcl":
            base = kcl_loss(AUDIO, TEXTS, SCALE, groups)
        else:
            base = cacl_loss(AUDIO, TEXTS[:, 0], TEXTS[:, 1], SCALE, groups)
        torch.testing.assert_close(logs[f"loss_{loss}"], base)
        torch.testing.assert_close(total, base + scale * svr / count)


def blocks(*sides):
    """Reshape (N, R, d) to blocks of one role each, the format of the loss functions."""
    return [torch.cat([side[:, role] for role in range(side.shape[1])]) for side in sides]


def test_temporal_stage_b_orders_roles_in_blocks():
    alphas = {"alpha_same_time": 0.5, "alpha_cross_time": 0.25, "alpha_same_overlay": 0.75, "alpha_cross_overlay": 0.0}
    total, logs = TemporalObjective("b", beta=0.7, **alphas)(*ROLES, SCALE)
    expected = temporal_nce(*blocks(*ROLES), SCALE, teminal_b_weights(4, **alphas).double(), beta=0.7)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(logs["loss_teminal_b"], expected)


def test_temporal_stage_a_weighs_by_class():
    audio, text = ROLES[:, :, :2]
    classes = torch.tensor([[0, 0, 1], [1, 2, 3], [2, 1, 0], [3, 0, 2]])
    total, _ = TemporalObjective("a", alpha_same=0.0, alpha_diff=0.5)(audio, text, SCALE, class_ids=classes)
    weights = teminal_a_weights(classes[:, 0], classes[:, 1:], alpha_same=0.0, alpha_diff=0.5).double()
    torch.testing.assert_close(total, temporal_nce(*blocks(audio, text), SCALE, weights))


def test_a_temporal_batch_in_several_languages_is_the_mean_over_them():
    audio, text = ROLES
    other = text.flip(0)
    several = torch.stack([text, other], dim=2).flatten(1, 2)
    stage_b = TemporalObjective("b")
    expected = (stage_b(audio, text, SCALE)[0] + stage_b(audio, other, SCALE)[0]) / 2
    torch.testing.assert_close(stage_b(audio, several, SCALE)[0], expected)


def test_temporal_items_of_one_group_are_positives_of_each_other():
    groups = torch.tensor([[0, 1, 2], [0, 3, 4], [5, 6, 7], [8, 9, 10]])
    grouped, _ = TemporalObjective("b")(*ROLES, SCALE, group_ids=groups)
    weights = teminal_b_weights(4).double()
    torch.testing.assert_close(grouped, temporal_nce(*blocks(*ROLES), SCALE, weights, group_ids=groups.T.flatten()))
    assert not torch.isclose(grouped, TemporalObjective("b")(*ROLES, SCALE)[0])


def test_a_positive_in_a_block_that_alpha_leaves_out_is_still_a_positive():
    # the second pair is the first one reversed
    groups = torch.tensor([[0, 1, 2], [1, 0, 2], [3, 4, 5], [6, 7, 8]])
    alphas = {"alpha_same_time": 0.0, "alpha_cross_time": 0.0, "alpha_cross_overlay": 0.0}
    total, _ = TemporalObjective("b", **alphas)(*ROLES, SCALE, group_ids=groups)
    blocked = groups.T.flatten()
    weights = teminal_b_weights(4, **alphas).double().masked_fill(blocked[:, None] == blocked, 1.0)
    torch.testing.assert_close(total, temporal_nce(*blocks(*ROLES), SCALE, weights, group_ids=blocked))


@pytest.mark.parametrize("svr", ["bi-static", "bi-dynamic"])
def test_every_parameter_of_an_objective_trains(tmp_path, svr):
    module = objective(tmp_path, svr=svr)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if name.endswith("4.weight"):
            torch.nn.init.normal_(
                parameter
            )  # it starts at zero, so that the layers below have no gradient in the first step
    evaluate(module)[0].backward()
    assert {name for name, parameter in parameters.items() if not parameter.grad.any()} == set()


def test_logs_hold_no_graph(tmp_path):
    _, logs = evaluate(objective(tmp_path, svr="bi-dynamic"))
    assert not any(value.requires_grad for value in logs.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: objective(path, loss="reweighted", svr="bi-static"), "reweighted.*svr"),
        (lambda path: objective(path, loss="siglip", svr="bi-static", svr_decoupled=True), "siglip"),
        (lambda path: evaluate(objective(path, loss="siglip")), "siglip.*logit_bias"),
        (lambda path: objective(path)(AUDIO, TEXT[:, None].repeat(1, 2, 1), SCALE), r"\b2 texts"),
        (lambda path: objective(path)(AUDIO[:1], TEXT[:1, None], SCALE), r"\b1\b"),
        (lambda path: ContrastiveObjective("nce"), "loss='nce'"),
        (lambda path: ContrastiveObjective("cacl")(AUDIO, TEXTS, SCALE), r"\b3 texts.*cacl"),
        (lambda path: ContrastiveObjective("kcl")(AUDIO, TEXTS[:, :1], SCALE), "K = 1"),
        (lambda path: objective(path, loss="kcl"), "kcl"),
        (lambda path: TemporalObjective("c"), "stage='c'"),
        (lambda path: load_objective("torch.nn:Linear"), "torch.nn:Linear.*in_features"),
        (lambda path: load_objective("torch.nn:functional"), "torch.nn:functional"),
        (lambda path: load_objective("collections:Counter"), "collections:Counter.*subclass of nn.Module"),
        (lambda path: TemporalObjective("a")(*ROLES, SCALE), r"\(N, 2, d\)"),
        (lambda path: TemporalObjective("a")(*ROLES[:, :, :2], SCALE), "class_ids"),
    ],
)
def test_incompatible_options_are_rejected(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def cross_entropy(audio_embeds, text_embeds, logit_scale):
    logits = logit_scale * audio_embeds @ text_embeds[:, 0].T
    return F.cross_entropy(logits, torch.arange(len(logits)))


class Bare(torch.nn.Module):
    """Module that returns the loss alone, and takes only the embeddings."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, audio, text):
        return self.weight * (audio - text[:, 0]).square().sum()


def with_logs(audio_embeds, text_embeds, logit_bias, **inputs):
    assert set(inputs) == {"logit_scale", "group_ids"}
    return (audio_embeds * text_embeds[:, 0]).sum(), {"own": 617.0}


@pytest.mark.parametrize(
    "own",
    [cross_entropy, Bare(), with_logs, "test_objectives:cross_entropy"],
    ids=["function", "module", "logs", "name"],
)
@pytest.mark.parametrize("widths", [[], [4]])
def test_functions_and_bare_losses_are_objectives(tmp_path, rows, own, widths):
    named = {"loss": own} if isinstance(own, str) else {}
    args = short_arguments(tmp_path, max_steps=2, matryoshka_widths=widths, **QUICK, **named)
    objective = None if named else own
    trainer = SupCLAPTrainer(builders.supclap_model(), args, rows, None, processor(), objective=objective)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert ("own" in entry) == (own is with_logs)
    assert ("loss_width_4" in entry) == bool(widths)
    name = {"Bare": "Bare"}.get(type(own).__name__, str(getattr(own, "__name__", own)).rpartition(":")[2])
    if not widths:
        assert trainer.module.objective_name == name
    if isinstance(own, Bare):
        assert own.weight != 1  # its parameters train


@pytest.mark.parametrize(
    "result",
    [{"loss": torch.ones(())}, torch.ones(3), (torch.ones(()), 1.0), None, 0.5],
    ids=lambda each: repr(each)[:9],
)
def test_other_results_of_an_objective_are_named(tmp_path, rows, result):
    def own_loss(audio_embeds, text_embeds, logit_scale):
        return result

    args = short_arguments(tmp_path, max_steps=1, **QUICK)
    trainer = SupCLAPTrainer(builders.supclap_model(), args, rows, None, processor(), objective=own_loss)
    with pytest.raises(TypeError, match=r"own_loss returned .*\breturn the loss"):
        trainer.train()


@pytest.mark.parametrize(
    ("batch", "options", "chunk"),
    [
        (4095, {}, None),
        (4096, {}, 1024),
        (4096, {"svr": "bi-dynamic", "loss": "siglip"}, 1024),
        (4096, {"loss_chunk_size": 50}, 50),
        (24, {"loss_chunk_size": 50}, 50),
        (4096, {"loss": "reweighted"}, None),
    ],
)
def test_large_batches_are_computed_in_tiles(tmp_path, batch, options, chunk):
    assert build_objective(short_arguments(tmp_path, per_device_train_batch_size=batch, **options)).chunk_size == chunk


# ---- the loss of random embeddings ----


def random_rows(*shape, seed):
    """Return random rows of unit norm. In 8,192 dimensions, all are nearly orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, 8192, generator=generator), dim=-1)


@pytest.mark.parametrize(
    ("options", "is_known"),
    [
        *(({"loss": loss}, loss not in ("siglip", "reweighted")) for loss in LOSSES),
        ({"loss": "kcl", "languages_per_clip": 2}, True),
        ({"positives": "captions"}, True),
        ({"svr": "bi-static"}, False),
        ({"negatives_per_clip": 2}, False),
        ({"matryoshka_widths": [8]}, False),
    ],
    ids=str,
)
def test_the_chance_loss_is_that_of_random_embeddings_or_unknown(tmp_path, options, is_known):
    options = {"languages": ["eng", "fra", "deu"], "per_device_train_batch_size": 48, **options}
    args = SupCLAPTrainingArguments(str(tmp_path), use_cpu=True, **options)
    chance = chance_loss(args)
    assert (chance is not None) == is_known
    if is_known:
        texts = captions_per_clip(args.loss, args.languages, args.languages_per_clip)
        groups = torch.arange(48) // 2 if args.positives == "captions" else None
        embeds = random_rows(48, seed=0), random_rows(48, texts, seed=1)
        loss, _ = build_objective(args)(*embeds, torch.tensor(5.0), None, groups)
        assert loss.item() == pytest.approx(chance, rel=5e-3)


@pytest.mark.parametrize(
    ("options", "is_known"),
    [
        ({"stage": "a"}, True),
        ({"stage": "a", "temporal_beta": 0.5, "temporal_beta_a": 3.0, "alpha_same_time": 0.5}, True),
        ({"stage": "a", "alpha_diff": 0.5}, False),
        ({"stage": "b", "temporal_beta": 0.5, "alpha_diff": 0.5}, True),
        ({"stage": "b", "two_term_overlay": True}, True),
        ({"stage": "b", "alpha_cross_overlay": 0.0}, False),
    ],
    ids=str,
)
def test_the_chance_loss_of_teminal_counts_all_clips_of_a_pair(tmp_path, options, is_known):
    args = TemporalTrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=20, **options)
    chance = chance_loss(args)
    assert (chance is not None) == is_known
    roles = {"a": 2, "b": 3}[args.stage]
    assert clips_per_batch(args) == 20 * roles
    objective = TemporalObjective(args.stage, args.stage_beta, args.two_term_overlay, **args.alphas)
    classes = torch.arange(60).reshape(20, 3)
    embeds = random_rows(20, roles, seed=0), random_rows(20, 2 * roles, seed=1)
    loss, _ = objective(*embeds, torch.tensor(5.0), class_ids=classes)
    if is_known:
        assert loss.item() == pytest.approx(chance, rel=5e-3)
