"""TeminAL's temporal loss and its weights, compared with loops, hand-written matrices and closed forms."""

import itertools
import math
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from builders import related_pair, unit_rows

from modeling_supclap.losses import info_nce, teminal_a_weights, teminal_b_weights, temporal_nce

SCALE = 1 / 0.07
SINGLES, PAIRS = [0, 3, 2], [(0, 1), (2, 3), (1, 4)]


# --- the loss


@pytest.mark.parametrize("alphas", [*itertools.product((0.0, 1.0), repeat=4), (0.75, 0.25, 0.5, 0.125)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_teminal_b_equals_the_loops_for_all_alphas_and_betas(
    alphas: tuple[float, float, float, float], beta: float
) -> None:
    audio, text = related_pair(9)
    loss = temporal_nce(audio, text, SCALE, teminal_b_weights(3, *alphas), beta)
    assert loss.item() == pytest.approx(reference.teminal_b_loss(audio, text, SCALE, alphas, beta), abs=1e-12)


@pytest.mark.parametrize("alphas", [(0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.75, 0.25, 0.5, 0.125)])
def test_the_overlay_term_of_the_appendix_equals_the_loops(alphas: tuple[float, float, float, float]) -> None:
    audio, text = related_pair(9)
    weights = teminal_b_weights(3, *alphas, two_term_overlay=True)
    expected = reference.teminal_b_loss(audio, text, SCALE, alphas, 0.5, appendix=True)
    assert temporal_nce(audio, text, SCALE, weights, 0.5).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("alphas", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.25)])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_teminal_a_equals_the_loops(alphas: tuple[float, float], beta: float) -> None:
    audio, text = related_pair(6)
    weights = teminal_a_weights(torch.tensor(SINGLES), torch.tensor(PAIRS), *alphas)
    expected = reference.teminal_a_side(audio, text, SCALE, SINGLES, PAIRS, *alphas)
    expected += beta * reference.teminal_a_side(text, audio, SCALE, SINGLES, PAIRS, *alphas)
    assert temporal_nce(audio, text, SCALE, weights, beta).item() == pytest.approx(expected, abs=1e-12)


def test_weights_of_one_are_info_nce() -> None:
    audio, text = related_pair(6)
    expected = info_nce(audio, text, SCALE)
    torch.testing.assert_close(temporal_nce(audio, text, SCALE, torch.ones(6, 6)), expected)
    torch.testing.assert_close(temporal_nce(audio, text, SCALE, teminal_b_weights(2)), expected)
    ids = torch.tensor([0, 1, 0, 2, 2, 2])
    torch.testing.assert_close(
        temporal_nce(audio, text, SCALE, torch.ones(6, 6), group_ids=ids), info_nce(audio, text, SCALE, ids)
    )


def test_gradcheck() -> None:
    audio, text = (x.requires_grad_() for x in related_pair(6, 3))
    scale = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    weights = teminal_b_weights(2, 1.0, 0.5, 0.0, 0.25)
    torch.autograd.gradcheck(lambda a, t, s: temporal_nce(a, t, s, weights, 0.7), (audio, text, scale))
    ids = torch.tensor([0, 0, 1, 2, 3, 4])
    torch.autograd.gradcheck(lambda a, t, s: temporal_nce(a, t, s, weights, 0.7, ids), (audio, text, scale))


def test_values_of_a_random_and_of_a_perfect_batch() -> None:
    alike = F.normalize(torch.ones(6, 8, dtype=torch.float64), dim=1)
    weights = teminal_b_weights(2, 0.0, 0.0, 0.0, 0.0)
    # rows: 2 candidates for forward and reversed items; 4 for overlaid items, which always include the forward block
    expected = 2 * (4 * math.log(2) + 2 * math.log(4)) / 6
    assert temporal_nce(alike, alike, SCALE, weights).item() == pytest.approx(expected)
    perfect = torch.eye(6, dtype=torch.float64)
    assert temporal_nce(perfect, perfect, 100.0, torch.ones(6, 6)).item() == pytest.approx(0, abs=1e-12)
    assert temporal_nce(alike, alike, SCALE, torch.eye(6)).item() == 0


def test_captions_in_several_languages_give_their_mean() -> None:
    """For captions in several languages (K, M, d), the loss is the mean over the languages."""
    audio, text = related_pair(6)
    texts = torch.stack([text, unit_rows(6, 7, seed=2)])
    weights = teminal_b_weights(2, 1.0, 0.5, 0.0, 0.25)
    expected = (temporal_nce(audio, text, SCALE, weights) + temporal_nce(audio, texts[1], SCALE, weights)) / 2
    torch.testing.assert_close(temporal_nce(audio, texts, SCALE, weights), expected)


# --- the weights


def test_example_weights_of_teminal_b() -> None:
    st, ct, so, co = 0.5, 0.25, 0.75, 0.125
    expected = [
        # forward   reversed  overlaid
        [1, 1, st, ct, so, co],
        [1, 1, ct, st, co, so],
        [st, ct, 1, 1, so, co],
        [ct, st, 1, 1, co, so],
        [1, 1, st, ct, 1, 1],
        [1, 1, ct, st, 1, 1],
    ]
    assert teminal_b_weights(2, st, ct, so, co).tolist() == expected


def test_example_weights_of_teminal_a() -> None:
    same, diff = 0.5, 0.25
    expected = [
        # singles 0, 3, 2   pairs (0, 1), (2, 3), (1, 4)
        [1, 1, 1, same, diff, diff],
        [1, 1, 1, diff, same, diff],
        [1, 1, 1, diff, same, diff],
        [same, diff, diff, 1, 1, 1],
        [diff, same, same, 1, 1, 1],
        [diff, diff, diff, 1, 1, 1],
    ]
    assert teminal_a_weights(torch.tensor(SINGLES), torch.tensor(PAIRS), same, diff).tolist() == expected


def test_singles_and_pairs_may_differ_in_number() -> None:
    weights = teminal_a_weights(torch.tensor(SINGLES), torch.tensor(PAIRS[:1]), 0.5, 0.0)
    assert weights.shape == (4, 4)
    assert weights[:3, 3].tolist() == [0.5, 0, 0]


# --- errors


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize("position", range(4))
def test_alphas_of_teminal_b_lie_between_0_and_1(value: float, position: int) -> None:
    names = ("alpha_same_time", "alpha_cross_time", "alpha_same_overlay", "alpha_cross_overlay")
    alpha: dict[str, Any] = {names[position]: value}
    with pytest.raises(ValueError, match=f"{names[position]}={value}"):
        teminal_b_weights(2, **alpha)


def test_errors_name_the_expected_values() -> None:
    audio, text = related_pair(6)
    singles, pairs = torch.tensor(SINGLES), torch.tensor(PAIRS)
    with pytest.raises(ValueError, match="alpha_diff=2"):
        teminal_a_weights(singles, pairs, alpha_diff=2)
    with pytest.raises(ValueError, match=r"pairs \[1\]"):
        teminal_a_weights(singles, torch.tensor([[0, 1], [2, 2], [1, 4]]))
    with pytest.raises(ValueError, match=r"\(3,\).*\(3, 3\)"):
        teminal_a_weights(singles, torch.zeros(3, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"weights.*\(3, 3\)"):
        temporal_nce(audio, text, SCALE, teminal_b_weights(1))
    with pytest.raises(ValueError, match=r"\b1\b"):
        temporal_nce(audio[:1], text[:1], SCALE, torch.ones(1, 1))
