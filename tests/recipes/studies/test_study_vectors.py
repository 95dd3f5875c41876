"""Comparison of smaller vectors: recalls by plain loops, and the table."""

import json

import numpy as np
import pytest
from commands import run_recipe

from modeling_supclap.recipes.studies import vectors
from modeling_supclap.recipes.studies.vectors import compute_recalls, find_own, render_vectors


def unit(generator, count, dim=64):
    rows = generator.standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_recalls_are_those_of_the_loops():
    generator = np.random.default_rng(0)
    clips = unit(generator, 30)
    own = np.repeat(np.arange(30), 2)
    texts = clips[own] + 0.15 * generator.standard_normal((60, 64)).astype(np.float32)
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    found = compute_recalls(clips, texts, own)
    assert len(found) == len(vectors.WIDTHS) * len(vectors.FORMS)
    sizes = {"float32": 4, "float16": 2, "int8": 1, "binary": 1 / 8, "binary, not rescored": 1 / 8}
    for name, line in found.items():
        width, _, form = name.partition(" ")
        assert line["bytes"] == int(width) * sizes[form]

    for width in (64, 8):
        for form in ("float32", "binary, not rescored"):
            for top in (1, 10):
                hits = []
                for text, clip in zip(texts, own, strict=True):
                    scores = []
                    for other in clips:
                        a, b = text[:width], other[:width]
                        if form == "float32":
                            scores.append(a @ b / np.linalg.norm(b))
                        else:
                            scores.append(sum((a > 0) == (b > 0)))
                    better = sum(value > scores[clip] for value in scores)
                    ties = sum(value == scores[clip] for value in scores)
                    places = range(better, better + ties)
                    hits.append(sum(place < top for place in places) / ties)
                assert found[f"{width} {form}"][f"R@{top}"] == pytest.approx(np.mean(hits)), (width, form)
    assert 0.1 < found["8 float32"]["R@1"] < found["64 float32"]["R@1"]
    assert found["64 binary"]["R@1"] != found["64 binary, not rescored"]["R@1"]


def test_a_clip_that_is_no_candidate_is_not_found():
    """Of 100 binary vectors, 20 are candidates of the first result. The own clip has the most different bits."""
    stored = np.zeros((100, 1), np.uint8)
    stored[70:] = 0b11111110
    query = np.array([-0.9, -0.01, -0.01, -0.01, -0.01, -0.01, -0.01, -0.3], np.float32)
    query /= np.linalg.norm(query)
    assert find_own(stored, query, 80, "binary", 1) == 0.0
    assert find_own(stored, query, 5, "binary", 1) == pytest.approx(1 / 70)
    assert find_own(stored, query, 80, "binary, not rescored", 80) == pytest.approx(10 / 30)


@pytest.fixture
def made_models(monkeypatch):
    """Replace training and embedding; a nested model has better short vectors."""
    trained = []

    def train(nested, seed, args):
        trained.append((nested, seed))
        return f"{nested} {seed}"

    def embed_test(model, seed):
        generator = np.random.default_rng(seed)
        clips = unit(generator, 20)
        texts = clips + 0.2 * generator.standard_normal((20, 64)).astype(np.float32)
        if model.startswith("True"):
            texts[:, :16] = clips[:, :16]
        return clips, texts / np.linalg.norm(texts, axis=1, keepdims=True), np.arange(20)

    monkeypatch.setattr(vectors, "train", train)
    monkeypatch.setattr(vectors, "embed_test", embed_test)
    monkeypatch.setattr("modeling_supclap.evaluation.models.load_embedding_model", lambda folder, device: folder)
    return trained


def test_the_table_compares_both_models_of_each_seed(made_models, tmp_path):
    run_recipe(vectors, "--seeds", 3, 5, 7, "--output_dir", tmp_path)
    assert made_models == [(nested, seed) for seed in (3, 5, 7) for nested in (False, True)]
    content = json.loads((tmp_path / "mini" / "vectors.json").read_text())
    assert content["captions"] == [20, 20, 20]
    assert content["models"]["nested"]["16 float32"]["R@1"] == [1, 1, 1]
    text = (tmp_path / "mini" / "vectors.md").read_text()
    assert text == render_vectors(content)
    (line,) = [line for line in text.splitlines() if line.startswith("| 16 | float32 |")]
    mean = 100 * np.mean(content["models"]["whole"]["16 float32"]["R@1"])
    change = mean - 100 * np.mean(content["models"]["whole"]["64 float32"]["R@1"])
    assert f"| 64 | {mean:.1f} (" in line
    assert f"; {change:+.1f} (" in line.split("|")[4]
    assert f" | +{100 - mean:.1f} (" in line
    assert "Fewer than five seeds" in text
    with pytest.raises(ValueError, match=r"\[1\]"):
        run_recipe(vectors, "--seeds", 1)


def test_both_models_have_the_same_settings_but_the_widths(monkeypatch, tmp_path):
    steps = []
    monkeypatch.setattr(vectors, "run_step", steps.append)
    args = vectors.VectorArguments(output_dir=str(tmp_path))
    for nested in (False, True):
        vectors.train(nested, 3, args)
    whole, nested = ({**step.settings, "output_dir": None} for step in steps)
    assert nested.pop("matryoshka_widths") == [32, 16, 8]
    assert whole == nested
    assert whole["dataset_config"]["seed"] == whole["seed"] == 3
