"""TeminAL loss: InfoNCE with a weight for each candidate, and the weights of the two TeminAL stages.

A TeminAL A batch contains n single sounds, then n pairs of sounds. A TeminAL B batch contains n pairs of sounds in
forward order, then the same pairs in reversed order, then the same pairs overlaid. Text i is the caption of item i.
"""

import torch
from torch import Tensor

from .similarity import positive_mean, similarity_matrix, unit_pairs


def temporal_nce(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    weights: Tensor,
    beta: float = 1.0,
    group_ids: Tensor | None = None,
    normalize: bool | None = False,
) -> Tensor:
    """Compute the temporal contrastive loss of TeminAL, L = L_text + beta L_audio (TeminAL eq. 3-9, 22-26).

    L_text = mean_i -log( exp(s a_i . t_i) / sum_j w_ij exp(s a_i . t_j) ), s = logit_scale. L_audio is the same with
    audio and text exchanged; w_ij is then the weight of audio j in the denominator of text i. With weights of 1 and
    beta = 1 the loss equals `info_nce`. The numerator has no weight.

    A random model has a loss of (1 + beta) mean_i log sum_j w_ij. The loss of a perfect model approaches 0.

    Args:
        audio_embeds: (M, d), unit norm.
        text_embeds: (M, d), unit norm; text i belongs to audio i. Captions in K languages have shape (K, M, d), and
            the loss is averaged over the languages.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        weights: (M, M), from `teminal_a_weights` or `teminal_b_weights`, at least 0. 0 removes a candidate from the
            denominator.
        beta: Weight of L_audio, the text-to-audio loss.
        group_ids: (M,) integers; items with the same id are positives of each other. Items with the same caption, such
            as single sounds of one class, should have the same id. The papers do not have such groups. None: each item
            is its own group.
        normalize: Whether to normalize the embeddings first. None: neither normalize nor check them.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not match, there are fewer than two items, or an embedding does not have unit norm.

    >>> pairs = torch.eye(2)
    >>> round(temporal_nce(pairs, pairs, logit_scale=1.0, weights=torch.ones(2, 2)).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    logits = logit_scale * similarity_matrix(*unit_pairs(audio_embeds, text_embeds, normalize))
    size = logits.shape[-1]
    if weights.shape != (size, size):
        raise ValueError(f"got weights of shape {tuple(weights.shape)} for {size} items; expected ({size}, {size})")

    log_weights = weights.to(logits).log()
    text_loss = _weighted_contrast(logits, log_weights, group_ids)
    return text_loss + beta * _weighted_contrast(logits.mT, log_weights, group_ids)


def _weighted_contrast(logits: Tensor, log_weights: Tensor, group_ids: Tensor | None) -> Tensor:
    """Compute InfoNCE in one direction, with weights in the denominator only."""
    return ((logits + log_weights).logsumexp(-1) - positive_mean(logits, group_ids)).mean()


def _check_alphas(**alphas: float) -> None:
    for name, alpha in alphas.items():
        if not 0 <= alpha <= 1:
            raise ValueError(f"got {name}={alpha}; it must be between 0 (ignore the candidate) and 1 (full weight)")


def teminal_a_weights(
    single_classes: Tensor, pair_classes: Tensor, alpha_same: float = 1.0, alpha_diff: float = 1.0
) -> Tensor:
    """Build the weights of all candidates in TeminAL A, which contrasts single sounds with pairs (TeminAL eq. 22-26).

    The weight between two single sounds or between two pairs is 1. Between a single sound and a pair, it is
    `alpha_same` if the pair contains the class of the single sound, otherwise `alpha_diff`.

    Args:
        single_classes: (n,) integers, class of each single sound.
        pair_classes: (m, 2) integers, classes of the two sounds of each pair; usually m = n.
        alpha_same, alpha_diff: Weights between a single sound and a pair, 0 to 1.

    Returns:
        (n + m, n + m), symmetric; the single sounds come first.

    Raises:
        ValueError: An alpha is outside [0, 1], the classes have the wrong shape, or both sounds of a pair have the same
            class.

    >>> teminal_a_weights(torch.tensor([0, 1]), torch.tensor([[0, 2]]), alpha_same=0.5, alpha_diff=0.0)
    tensor([[1.0000, 1.0000, 0.5000],
            [1.0000, 1.0000, 0.0000],
            [0.5000, 0.0000, 1.0000]])
    """
    _check_alphas(alpha_same=alpha_same, alpha_diff=alpha_diff)
    if single_classes.ndim != 1 or pair_classes.ndim != 2 or pair_classes.shape[1] != 2:
        raise ValueError(
            f"got classes of shapes {tuple(single_classes.shape)} and {tuple(pair_classes.shape)}; "
            "expected (n,) for the singles and (m, 2) for the pairs"
        )
    repeated = (pair_classes[:, 0] == pair_classes[:, 1]).nonzero().flatten().tolist()
    if repeated:
        raise ValueError(f"got the same class twice in pairs {repeated}; a pair needs two different classes")

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
    two_term_overlay: bool = False,
) -> Tensor:
    """Build the candidate weights of TeminAL B, for n forward, n reversed and n overlaid pairs (TeminAL eq. 3-7).

    The table shows the weight of a candidate for each item. In the table, "time" is `alpha_same_time` if item and
    candidate come from the same pair of sounds, otherwise `alpha_cross_time`. "overlay" is `alpha_same_overlay` or
    `alpha_cross_overlay` by the same rule.

    | item \\ candidate | forward | reversed | overlaid |
    |---|---|---|---|
    | forward | 1 | time | overlay |
    | reversed | time | 1 | overlay |
    | overlaid | 1 (eq. 6) | time | 1 |

    The paper prints no equation for the second row, the reversed items. It follows from the first row by symmetry.

    The appendix of the paper prints another term for the overlaid candidates of the first row (TeminAL eq. 14 and 20).
    With `two_term_overlay`, `alpha_same_overlay` weights two captions of the same pair, the forward and the reversed
    one, in addition to their weights in the table. The overlaid caption of the same pair has the weight 0. The second
    row follows by symmetry again; the third has no such term.

    In table 2 of the paper, most of the best results have all weights set to 1.

    Args:
        n: Number of pairs of sounds.
        alpha_same_time, alpha_cross_time: alpha_st and alpha_ct in the paper, 0 to 1.
        alpha_same_overlay, alpha_cross_overlay: alpha_so and alpha_co in the paper, 0 to 1.
        two_term_overlay: Whether to use the overlay term of the appendix.

    Returns:
        (3n, 3n); rows and columns are in the order forward, reversed, overlaid.

    Raises:
        ValueError: An alpha is outside [0, 1].

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
    ones = torch.ones(n, n)
    time = torch.where(same_pair, alpha_same_time, alpha_cross_time)
    overlay = torch.where(same_pair, alpha_same_overlay, alpha_cross_overlay)
    forward, reverse = ones, time
    if two_term_overlay:
        forward, reverse = (block + alpha_same_overlay * same_pair for block in (ones, time))
        overlay = overlay.masked_fill(same_pair, 0.0)
    rows = [[forward, reverse, overlay], [reverse, forward, overlay], [ones, time, ones]]
    return torch.cat([torch.cat(row, dim=1) for row in rows])
