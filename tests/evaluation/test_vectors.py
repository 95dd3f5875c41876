"""Smaller forms of embeddings: against plain loops, and the recall of a search in them."""

import numpy as np
import pytest

from modeling_supclap.evaluation import vectors
from modeling_supclap.evaluation.vectors import PRECISIONS, compress, require_storage, restore, score, shorten


def unit(seed, count, dim):
    embeds = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return embeds / np.linalg.norm(embeds, axis=1, keepdims=True)


@pytest.mark.parametrize("width", [None, 8, 16])
def test_vectors_are_those_of_the_loops(width):
    embeds = unit(0, 9, 16)
    for row, embed in enumerate(embeds.tolist()):
        cut = embed[: width or 16]
        norm = sum(value**2 for value in cut) ** 0.5
        peak = max(map(abs, cut))
        eighths = []
        for start in range(0, len(cut), 8):
            eighths.append(sum(2 ** (7 - bit) for bit in range(8) if cut[start + bit] > 0))
        np.testing.assert_allclose(compress(embeds, "float32", width)[row], [value / norm for value in cut], rtol=1e-6)
        assert compress(embeds, "int8", width)[row].tolist() == [round(127 * value / peak) for value in cut]
        assert compress(embeds, "binary", width)[row].tolist() == eighths
        signs = [(1 if value > 0 else -1) / len(cut) ** 0.5 for value in cut]
        np.testing.assert_allclose(restore(compress(embeds, "binary", width), "binary")[row], signs, rtol=1e-6)
        half = compress(embeds, "float16", width)
        np.testing.assert_allclose(half[row], [value / norm for value in cut], atol=1e-3)
        restored = restore(half, "float16")[row]
        np.testing.assert_allclose(restored, half[row] / np.linalg.norm(half[row].astype(float)), rtol=1e-6)
        assert (half.dtype, restored.dtype) == (np.float16, np.float32)
    np.testing.assert_allclose(np.linalg.norm(restore(compress(embeds, "int8", width), "int8"), axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(restore(compress(embeds, "int8"), "int8"), embeds, atol=0.005)
    assert shorten(embeds, 16) is embeds


def test_zeros_stay_finite():
    for precision in PRECISIONS:
        stored = compress(np.zeros((2, 8), np.float32), precision, 8)
        assert np.isfinite(restore(stored, precision)).all()
    assert np.isfinite(shorten(np.zeros((1, 4)), 2)).all()
    assert compress(np.zeros((0, 16), np.float32), "int8", 8).shape == (0, 8)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scores_are_cosines_with_the_stored_vectors(monkeypatch, precision):
    monkeypatch.setattr(vectors, "_BLOCK_ROWS", 7)
    embeds, query = unit(1, 50, 16), unit(2, 1, 16)[0]
    stored = compress(embeds, precision)
    indices, scores = score(stored, query, precision, limit=50)
    assert indices.tolist() == list(range(50))
    np.testing.assert_allclose(scores, restore(stored, precision) @ query, rtol=1e-5, atol=1e-6)


def test_binary_candidates_have_the_fewest_different_bits(monkeypatch):
    monkeypatch.setattr(vectors, "CANDIDATES", 3)
    embeds, query = unit(1, 60, 24), unit(2, 1, 24)[0]
    indices, scores = score(compress(embeds, "binary"), query, "binary", limit=2)
    different = [sum((a > 0) != (b > 0) for a, b in zip(embed, query, strict=True)) for embed in embeds]
    last = sorted(different)[5]
    assert indices.tolist() == [row for row, bits in enumerate(different) if bits <= last]
    np.testing.assert_allclose(scores, restore(compress(embeds, "binary"), "binary")[indices] @ query, rtol=1e-5)


@pytest.mark.parametrize(("precision", "least"), [("int8", 0.97), ("binary", 0.4)])
def test_the_nearest_neighbours_are_mostly_kept(precision, least):
    centres = unit(3, 30, 64)
    embeds = shorten(np.repeat(centres, 20, axis=0) + 0.6 * unit(4, 600, 64), 64)
    embeds /= np.linalg.norm(embeds, axis=1, keepdims=True)
    found = []
    for query in centres:
        exact = set(np.argsort(-(embeds @ query))[:10].tolist())
        indices, scores = score(compress(embeds, precision), query, precision, limit=10)
        found.append(len(exact & set(indices[np.argsort(-scores)[:10]].tolist())) / 10)
    assert np.mean(found) > least


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((16, "int4", None), "'int4'.*binary"),
        ((16, "int8", 17), "17.*16"),
        ((16, "int8", 0), "width is 0"),
        ((16, "binary", 12), "8, not 12"),
    ],
)
def test_invalid_forms_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        require_storage(*settings)
    forms = [("float32", None), ("float16", 16), ("int8", 1), ("binary", 8), ("binary", None)]
    assert [require_storage(16, *form) for form in forms] == [16, 16, 1, 1, 2]
