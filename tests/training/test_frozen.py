"""Frozen towers: each text and recording is embedded once, and the results equal those without a cache."""

import random
from collections import Counter

import builders
import numpy as np
import pytest
import torch
from test_trainer import QUICK, build

from modeling_supclap.training import frozen
from modeling_supclap.training.frozen import FrozenCache

EPOCHS = 3


def train(folder, rows, frozen, dropout=0.0, **kwargs):
    """Train in float64 with frozen towers; return weights, losses, and the number of rows that each tower embeds."""
    text = builders.bert_config(hidden_dropout_prob=dropout)
    model = builders.supclap_model(builders.supclap_config(text))
    for name in frozen:
        model.get_submodule(f"{name}_model").requires_grad_(False)

    seen = Counter()
    for name in ("audio", "text"):
        tower = model.get_submodule(f"{name}_model")
        tower.register_forward_hook(
            lambda module, args, kwargs, output, name=name: seen.update({name: len(next(iter(kwargs.values())))}),
            with_kwargs=True,
        )
    options = {"num_train_epochs": EPOCHS, "languages": ["eng", "fra"], **QUICK, **kwargs}
    trainer = build(folder, rows, model=model, **options)
    trainer.model.double()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.model.state_dict(), losses, seen


@pytest.mark.parametrize(("frozen", "loss"), [(["text"], "kcl"), (["audio"], "infonce"), (["audio", "text"], "kcl")])
def test_the_run_is_the_one_without_a_cache(tmp_path, rows, frozen, loss):
    weights, losses, seen = train(tmp_path / "auto", rows, frozen, loss=loss)
    plain_weights, plain_losses, plain_seen = train(tmp_path / "never", rows, frozen, loss=loss, cache_frozen="never")
    assert losses == pytest.approx(plain_losses, abs=1e-9)
    for name, value in plain_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-7)

    for name in ("audio", "text"):
        assert plain_seen[name] >= EPOCHS * 12
    if "audio" in frozen:
        assert seen["audio"] == 12 + 1  # one more to detect random numbers
    if "text" in frozen:  # each clip has two captions in two languages
        texts = {text for row in rows for several in row["captions"].values() for text in several}
        assert seen["text"] <= len(texts) + 1 < plain_seen["text"]


def test_the_collator_computes_the_keys_of_texts(tmp_path, rows, monkeypatch):
    expected = train(tmp_path / "expected", rows, ["text"], loss="kcl")
    # called only in the collator, which has its own reference
    monkeypatch.setattr(frozen, "content_keys", None)
    weights, losses, seen = train(tmp_path / "keys", rows, ["text"], loss="kcl")
    assert (losses, seen) == expected[1:]
    assert all(torch.equal(weights[name], value) for name, value in expected[0].items())


def test_dropout_in_a_frozen_tower_is_that_of_the_run_without_a_cache(tmp_path, rows):
    weights, losses, seen = train(tmp_path / "auto", rows, ["text"], dropout=0.3)
    plain_weights, plain_losses, plain_seen = train(tmp_path / "never", rows, ["text"], 0.3, cache_frozen="never")
    assert losses == plain_losses
    assert all(torch.equal(weights[name], value) for name, value in plain_weights.items())
    assert seen["text"] == plain_seen["text"] + 1


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), np.random.random, random.random])
def test_a_tower_that_draws_random_numbers_is_not_repeatable(draw):
    states = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    inputs = {"x": torch.ones(2, 3)}
    assert not FrozenCache([Tower()]).is_repeatable(lambda rows: rows["x"] + float(draw()), inputs)
    assert FrozenCache([Tower()]).is_repeatable(lambda rows: rows["x"], inputs)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[2], random.getstate()) == states[1:]


def test_always_puts_frozen_towers_in_evaluation_mode(tmp_path, rows):
    _, losses, seen = train(tmp_path / "always", rows, ["text"], dropout=0.3, cache_frozen="always")
    _, without_dropout, _ = train(tmp_path / "none", rows, ["text"], cache_frozen="never")
    assert losses == pytest.approx(without_dropout, abs=1e-9)
    assert seen["text"] < EPOCHS * 12


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.rows = 0

    def forward(self, inputs):
        self.rows += len(inputs["x"])
        return self.weight * inputs["x"]


def test_it_remembers_by_content_up_to_its_limit_and_until_weights_change():
    tower = Tower()
    cache = FrozenCache([tower], limit_bytes=2 * 3 * 4)
    first, second = torch.tensor([[1.0, 2, 3], [4, 5, 6], [1, 2, 3]]), torch.tensor([[7.0, 8, 9], [4, 5, 6]])
    padded = {"x": torch.tensor([[4.0, 5, 9, 9]]), "mask": torch.tensor([[1, 1, 0, 0]])}
    # the cache is full for the third text
    for inputs, rows in ((first, 2), (second, 1), (second, 1), (first, 0)):
        before = tower.rows
        torch.testing.assert_close(cache(tower, {"x": inputs}, None), inputs)
        assert tower.rows == before + rows

    with torch.no_grad():
        tower.weight.mul_(2)
    torch.testing.assert_close(cache(tower, {"x": first}, None), 2 * first)

    cache = FrozenCache([tower])
    cache(tower, padded, "mask")
    before = tower.rows
    cache(tower, {name: tensor[:, :3] for name, tensor in padded.items()}, "mask")
    assert tower.rows == before  # padding is ignored

    tower.weight.requires_grad_(True)
    assert not cache.is_frozen()
