"""Fingerprints of weights: equal for equal weights, different for any other value, name, type or setting."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from modeling_supclap.evaluation.fingerprints import settings_text, tokenizer_text, weights_fingerprint


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


def test_settings_that_differ_between_copies_are_left_out():
    here = {
        "rate": 16_000,
        "_name_or_path": "here",
        "layers": [{"dtype": "float32", "auto_map": {}, "width": Path("a")}],
    }
    there = {
        "layers": [{"width": Path("a"), "_commit": "b"}],
        "architectures": ["A"],
        "processor_class": "P",
        "rate": 16_000,
    }
    there["transformers_version"] = "5"
    assert settings_text(here) == settings_text(there) == '{"layers": [{"width": "a"}], "rate": 16000}'


def test_a_tokenizer_is_its_vocabulary_and_rules():
    slow = SimpleNamespace(get_vocab=lambda: {"rain": 0})
    assert json.loads(tokenizer_text(slow)) == {"vocabulary": {"rain": 0}, "padding": None, "truncation": None}
    rules = {"normalizer": "lower", "padding": {"length": 9}, "truncation": {"max_length": 9}}
    fast = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: json.dumps(rules)))
    assert json.loads(tokenizer_text(fast)) == {"normalizer": "lower", "padding": None, "truncation": None}
