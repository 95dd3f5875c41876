"""Which parameters have weight decay, and learning rates of parts of the model."""

import re

import builders
import open_clip_folders
import pytest
import torch
from test_trainer import QUICK, build, losses
from torch import nn

from modeling_supclap.losses import StaticRadius
from modeling_supclap.training.objectives import SupportVectorRegularizer
from modeling_supclap.training.parameter_groups import as_rates, decays, split_by_rate


class OwnObjective(nn.Module):
    """Objective with a radius, a matrix and a scalar."""

    def __init__(self):
        super().__init__()
        self.regularizer = SupportVectorRegularizer({"t2a": StaticRadius(0.1)})
        self.mixing, self.scalar = nn.Parameter(torch.eye(2)), nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("model", "without"),
    [
        (builders.supclap_model, {"audio_model.time_pos_embed", "audio_model.freq_pos_embed"}),
        (lambda: builders.supclap_model(), {"text_model.embeddings.position_embeddings.weight"}),
        (lambda: open_clip_folders.build("D")[0], {f"audio_model.embeds.{kind}_token" for kind in ("cls", "reg")}),
        (lambda: open_clip_folders.build("C")[0], {"audio_model.embeds.reg_token", "text_model.reg_tokens"}),
    ],
)
def test_only_matrices_decay_and_no_tables_of_positions_or_learned_tokens(model, without):
    model = model()
    names = {name for name, parameter in model.named_parameters() if decays(name, parameter)}
    every = dict(model.named_parameters())
    assert without <= every.keys()
    assert not without & names
    assert not {name for name in names if every[name].ndim < 2}
    left = {name for name, parameter in every.items() if parameter.ndim > 1} - names
    assert all("pos" in name or "_token" in name for name in left), left
    words = next(name for name in every if name.endswith(("word_embeddings.weight", "token_embedding.weight")))
    assert {"text_projection.linear1.weight", words} <= names


def test_radii_do_not_decay_but_other_matrices_of_an_objective_do():
    names = {name for name, parameter in OwnObjective().named_parameters() if decays(name, parameter)}
    assert names == {"mixing"}


@pytest.mark.parametrize("svr", ["bi-static", "bi-dynamic"])
def test_the_optimizer_decays_no_scalar_and_no_radius(tmp_path, rows, svr):
    trainer = build(tmp_path, rows, weight_decay=0.2, svr=svr, **QUICK)
    optimizer = trainer.create_optimizer()
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in trainer.model.named_parameters() if id(p) in decayed}
    assert "model.text_projection.linear1.weight" in names
    assert not [name for name in names if "radii" in name or "logit_scale" in name or "norm" in name]


def test_the_temperature_is_the_same_with_and_without_decay(tmp_path, rows):
    scales = []
    for decay in (0.0, 0.5):
        model = builders.supclap_model()
        model.requires_grad_(False)
        model.logit_scale.requires_grad_(True)
        build(tmp_path / str(decay), rows, model, weight_decay=decay, max_steps=8, **QUICK).train()
        scales.append(model.logit_scale.item())
    assert scales[0] == scales[1]


RATES = {"text_model": 1e-5, "text_model.encoder.layer.1": 3e-5, "logit_scale": 0.0, "objective": 0.5}


def test_each_part_has_its_rate(tmp_path, rows):
    trainer = build(tmp_path, rows, svr="bi-static", weight_decay=0.1, learning_rates=RATES, max_steps=2, **QUICK)
    start = trainer.clap.logit_scale.item()
    trainer.train()
    rate_of = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rate_of[id(parameter)] = group["initial_lr"], group["weight_decay"]
    for name, parameter in trainer.model.named_parameters():
        expected = 1e-3
        for part in sorted(RATES, key=len):
            if f"{name.removeprefix('model.')}.".startswith(f"{part}."):
                expected = RATES[part]
        assert rate_of[id(parameter)] == (expected, 0.1 if decays(name, parameter) and "bias" not in name else 0.0), (
            name
        )
    assert trainer.clap.logit_scale.item() == start
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged[0] == 1e-3  # the general rate is the logged one


def test_equal_rates_change_nothing(tmp_path, rows):
    plain = build(tmp_path / "plain", rows, max_steps=3, **QUICK)
    split = build(tmp_path / "split", rows, max_steps=3, learning_rates='{"text_model": 1e-3}', **QUICK)
    plain.train()
    split.train()
    assert losses(plain) == losses(split)


def test_parts_without_trainable_parameters_are_named(tmp_path, rows):
    model = builders.supclap_model()
    model.audio_model.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    known = ["audio_model", "audio_projection", "logit_scale", "text_model", "text_projection"]
    for parts in (["audio_model"], ["text_mod", "text_model.encoder.layer.7"]):
        message = f"learning_rates has {parts}, without trainable parameters; the model has {known}"
        with pytest.raises(ValueError, match=re.escape(message)):
            split_by_rate(optimizer, model.named_parameters(), dict.fromkeys([*parts[::-1], "text_model"], 0.1))
    with pytest.raises(ValueError, match="learning_rates"):
        type(trainer := build(tmp_path, rows, learning_rates={"text_model": 1e-5}, **QUICK))(
            trainer.clap, trainer.args, rows, None, trainer.processor, optimizers=(optimizer, None)
        )


def test_parameters_that_fsdp_wraps_have_the_rates_of_their_part():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    names = [
        "model.text_model.layers.1._fsdp_wrapped_module.weight",
        "model.text_model.layers.10.weight",
        "objective.w",
    ]
    split_by_rate(optimizer, zip(names, weights, strict=True), {"text_model.layers.1": 0.1, "objective": 0.2})
    assert [(group["lr"], group["params"]) for group in optimizer.param_groups] == [
        (1.0, [weights[1]]),
        (0.1, [weights[0]]),
        (0.2, [weights[2]]),
    ]


@pytest.mark.parametrize("value", ["text_model", "[1]", {"text_model": "fast"}, {"text_model": -1}, '{"a": NaN}', 3])
def test_rates_that_are_no_mapping_of_numbers_are_refused(value):
    with pytest.raises(ValueError, match="learning_rates"):
        as_rates(value)
