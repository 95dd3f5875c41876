"""Fingerprints of weights: equal for equal weights, different for any other value, name, type or setting."""

import torch

from modeling_supclap.evaluation.fingerprints import weights_fingerprint


def linear(**changes) -> torch.nn.Linear:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    if changes:
        with torch.no_grad():
            layer.weight[1, 2] += changes["by"]
    return layer


def test_equal_weights_have_one_fingerprint():
    assert weights_fingerprint(linear()) == weights_fingerprint(linear())


def test_every_change_has_another():
    fingerprints = {
        weights_fingerprint(linear()),
        weights_fingerprint(linear(by=1e-6)),
        weights_fingerprint(linear().double()),
        weights_fingerprint(torch.nn.Sequential(linear())),
        weights_fingerprint(linear(), "a prompt"),
    }
    assert len(fingerprints) == 5
