"""Temporal contrastive loss of TeminAL: an InfoNCE in which every candidate has a weight, and the two sets of weights.

A batch of TeminAL A is n single sounds and then n pairs; one of TeminAL B is n pairs in order (forward), the same n
reversed and the same n overlaid. Item i's caption is text i, so the positives are the diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contrastive import softmax_contrast
from .similarity import similarity_matrix


def temporal_nce(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    weights: Tensor,
    beta: float = 1.0,
    group_ids: Tensor | None = None,
) -> Tensor:
    """Temporal noise contrastive estimation, L = L_text + beta L_audio [TeminAL eq. 3-9, 22-26].

    L_text = mean_i -log( exp(s a_i . t_i) / sum_j w_ij exp(s a_i . t_j) ), s = logit_scale; L_audio is the same with
    the roles exchanged: w_ij then weighs audio j in the denominator of text i. Weights of 1 give `info_nce`.

    A random model gives (1 + beta) times the mean log of the rows' sums of weights, a perfect one tends to 0.

    Args:
        audio_embeds: (M, d), unit norm.
        text_embeds: (M, d), unit norm; text i belongs to audio i. Captions in K languages as (K, M, d) give the mean
            over the languages.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        weights: (M, M), 0 (no candidate) to 1, and 1 on the diagonal; from `teminal_a_weights` or `teminal_b_weights`.
        beta: The weight of the audio loss.
        group_ids: (M,) integers; items with the same id (and so the same caption, as singles of one class have) are
            positives of each other and need a weight above 0. By default every item is its own.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not fit, or there are fewer than two items.

    >>> pairs = torch.eye(2)
    >>> round(temporal_nce(pairs, pairs, logit_scale=1.0, weights=torch.ones(2, 2)).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    logits = logit_scale * similarity_matrix(audio_embeds, text_embeds)
    size = logits.shape[-1]
    if weights.shape != (size, size):
        raise ValueError(f"got weights of shape {tuple(weights.shape)} for {size} items; give ({size}, {size})")

    log_weights = weights.to(logits).log()
    text_loss = softmax_contrast(logits + log_weights, group_ids)
    audio_loss = softmax_contrast(logits.mT + log_weights, group_ids)
    return text_loss + beta * audio_loss


def _check_alphas(**alphas: float) -> None:
    for name, alpha in alphas.items():
        if not 0 <= alpha <= 1:
            raise ValueError(f"got {name}={alpha}; it must lie between 0 (no candidate) and 1 (a full one)")


def teminal_a_weights(
    single_classes: Tensor, pair_classes: Tensor, alpha_same: float = 1.0, alpha_diff: float = 1.0
) -> Tensor:
    """Weights of TeminAL A, single sounds against pairs [TeminAL eq. 22-26].

    Within a block every candidate has weight 1; across the blocks `alpha_same` where the single's class is one of the
    pair's, `alpha_diff` where it is not.

    Args:
        single_classes: (n,) integers, the class of each single sound.
        pair_classes: (m, 2) integers, the two classes of each pair; m is n as a rule.
        alpha_same: The weight across the blocks of a class that the pair has, 0 to 1.
        alpha_diff: The weight of one that it has not, 0 to 1.

    Returns:
        (n + m, n + m), symmetric; singles first.

    Raises:
        ValueError: An alpha is out of its range, classes have another shape, or a class is paired with itself.

    >>> teminal_a_weights(torch.tensor([0, 1]), torch.tensor([[0, 2]]), alpha_same=0.5, alpha_diff=0.0)
    tensor([[1.0000, 1.0000, 0.5000],
            [1.0000, 1.0000, 0.0000],
            [0.5000, 0.0000, 1.0000]])
    """
    _check_alphas(alpha_same=alpha_same, alpha_diff=alpha_diff)
    if single_classes.ndim != 1 or pair_classes.ndim != 2 or pair_classes.shape[1] != 2:
        raise ValueError(
            f"got classes of shapes {tuple(single_classes.shape)} and {tuple(pair_classes.shape)}; "
            "give (n,) for the singles and (m, 2) for the pairs"
        )
    twins = (pair_classes[:, 0] == pair_classes[:, 1]).nonzero().flatten().tolist()
    if twins:
        raise ValueError(f"got a class paired with itself in pairs {twins}; a pair needs two different classes")

    overlap = (single_classes.view(-1, 1, 1) == pair_classes).any(dim=-1)
    across = torch.where(overlap, alpha_same, alpha_diff)
    singles, pairs = across.shape

    weights = torch.ones(singles + pairs, singles + pairs, device=across.device)
    weights[:singles, singles:] = across
    weights[singles:, :singles] = across.T
    return weights


def teminal_b_weights(
    n: int,
    alpha_same_time: float = 1.0,
    alpha_cross_time: float = 1.0,
    alpha_same_overlay: float = 1.0,
    alpha_cross_overlay: float = 1.0,
) -> Tensor:
    """Weights of TeminAL B, n forward, n reversed and n overlaid pairs [TeminAL eq. 3-7].

    Within a block every candidate has weight 1. The reversed block weighs `alpha_same_time` at the same pair and
    `alpha_cross_time` elsewhere, and so does the forward block as seen from the reversed one, reversal being its own
    inverse; the overlaid block weighs `alpha_same_overlay` and `alpha_cross_overlay`; the forward block as seen from
    the overlaid one weighs 1 [eq. 6]. Table 2 of the paper does best, by and large, with all at 1.

    Args:
        n: The number of pairs.
        alpha_same_time: The paper's alpha_st, 0 to 1.
        alpha_cross_time: Its alpha_ct, 0 to 1.
        alpha_same_overlay: Its alpha_so, 0 to 1.
        alpha_cross_overlay: Its alpha_co, 0 to 1.

    Returns:
        (3n, 3n); rows and columns are the forward, the reversed and the overlaid items.

    Raises:
        ValueError: An alpha is out of its range.

    >>> teminal_b_weights(1, alpha_same_time=0.5, alpha_same_overlay=0.0)
    tensor([[1.0000, 0.5000, 0.0000],
            [0.5000, 1.0000, 0.0000],
            [1.0000, 0.5000, 1.0000]])
    """
    _check_alphas(
        alpha_same_time=alpha_same_time,
        alpha_cross_time=alpha_cross_time,
        alpha_same_overlay=alpha_same_overlay,
        alpha_cross_overlay=alpha_cross_overlay,
    )
    same_pair = torch.eye(n, dtype=torch.bool)
    own = torch.ones(n, n)
    time = torch.where(same_pair, alpha_same_time, alpha_cross_time)
    overlay = torch.where(same_pair, alpha_same_overlay, alpha_cross_overlay)
    rows = [[own, time, overlay], [time, own, overlay], [own, time, own]]
    return torch.cat([torch.cat(row, dim=1) for row in rows])
