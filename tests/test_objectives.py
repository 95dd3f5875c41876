"""Objectives: the papers' sums of losses, put together from the pure functions by hand, and their logs."""

import pytest
import torch

from modeling_supclap.losses import (
    info_nce,
    radius_constraint,
    reweighted_info_nce,
    sigmoid_loss,
    support_vector_loss,
    support_vector_sigmoid_loss,
)
from modeling_supclap.objectives import ContrastiveObjective, build_objective
from modeling_supclap.training_args import SupCLAPTrainingArguments

GENERATOR = torch.Generator().manual_seed(0)
AUDIO, TEXT = torch.nn.functional.normalize(torch.randn(2, 6, 5, generator=GENERATOR, dtype=torch.float64), dim=-1)
SCALE, BIAS = torch.tensor(10.0, dtype=torch.float64), torch.tensor(-3.0, dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 1, 2, 3, 4])


def objective(tmp_path, **kwargs):
    return build_objective(SupCLAPTrainingArguments(output_dir=str(tmp_path), **kwargs)).double()


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


@pytest.mark.parametrize(
    ("options", "similarity", "decoupled"),
    [({}, "cosine", False), ({"svr_similarity": "dot"}, "dot", False), ({"svr_decoupled": True}, "cosine", True)],
)
def test_bidirectional_static_support_vectors(tmp_path, options, similarity, decoupled):
    total, logs = evaluate(objective(tmp_path, svr="bi-static", svr_alpha=0.5, **options), group_ids=GROUPS)
    radius = torch.full((6,), torch.tensor(0.1, dtype=torch.float32).double())
    t2a = support_vector_loss(TEXT, AUDIO, radius, SCALE, similarity, decoupled, GROUPS)
    a2t = support_vector_loss(AUDIO, TEXT, radius, SCALE, similarity, decoupled, GROUPS)
    torch.testing.assert_close(total, info_nce(AUDIO, TEXT, SCALE, GROUPS) + 0.5 * (t2a + a2t))
    assert logs["radius_t2a"].item() == pytest.approx(0.1)
    assert t2a != a2t


def test_unidirectional_displaces_texts_only(tmp_path):
    total, logs = evaluate(objective(tmp_path, svr="uni-static"))
    radius = torch.full((6,), torch.tensor(0.1, dtype=torch.float32).double())
    expected = info_nce(AUDIO, TEXT, SCALE) + support_vector_loss(TEXT, AUDIO, radius, SCALE)
    torch.testing.assert_close(total, expected)
    assert "radius_a2t" not in logs


def test_support_vectors_on_siglip_go_through_the_sigmoid(tmp_path):
    total, _ = evaluate(objective(tmp_path, loss="siglip", svr="uni-static"), logit_bias=BIAS)
    radius = torch.full((6,), torch.tensor(0.1, dtype=torch.float32).double())
    svr = support_vector_sigmoid_loss(TEXT, AUDIO, radius, SCALE, BIAS)
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


@pytest.mark.parametrize("svr", ["bi-static", "bi-dynamic"])
def test_every_parameter_of_an_objective_trains(tmp_path, svr):
    module = objective(tmp_path, svr=svr)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if name.endswith("4.weight"):
            torch.nn.init.normal_(parameter)  # starts at zero, which hides the layers below it for one step
    evaluate(module)[0].backward()
    assert {name for name, parameter in parameters.items() if not parameter.grad.any()} == set()


def test_logs_hold_no_graph(tmp_path):
    _, logs = evaluate(objective(tmp_path, svr="bi-dynamic"))
    assert not any(value.requires_grad for value in logs.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: objective(path, loss="reweighted", svr="bi-static"), "baseline without support vectors"),
        (lambda path: objective(path, loss="siglip", svr="bi-static", svr_decoupled=True), "siglip has none"),
        (lambda path: evaluate(objective(path, loss="siglip")), r"siglip needs a model with a bias"),
        (lambda path: objective(path)(AUDIO, TEXT[:, None].repeat(1, 2, 1), SCALE), "got 2 texts a clip"),
        (lambda path: objective(path)(AUDIO[:1], TEXT[:1, None], SCALE), "contrast needs two"),
        (lambda path: ContrastiveObjective("nce"), "got loss='nce'"),
    ],
)
def test_what_does_not_go_together(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)
