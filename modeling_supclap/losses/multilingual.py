"""Multilingual losses of ATRI (KCL and CACL), and its error measures for steps that train only some of the languages.

For one random language per clip (ML-CLAP), use `info_nce` with captions in random languages.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .contrastive import info_nce
from .similarity import at_least_float32

# Factor of a one-direction loss (a mean over clips and languages) in the total loss. KCL: NK / (2NK). CACL: 2N / (6N),
# because each clip has two texts. SVR terms have the same factor (SupCLAP table 8). CACL has no SVR term for L_et.
DIRECTION_SCALE = {"kcl": 1 / 2, "cacl": 1 / 3}


def by_language(text_embeds: Tensor) -> Tensor:
    """Move the language dimension to the front, (N, K, d) -> (K, N, d), because losses average over leading dimensions.

    >>> by_language(torch.zeros(4, 8, 16)).shape
    torch.Size([8, 4, 16])
    """
    if text_embeds.ndim != 3:
        raise ValueError(
            f"got text_embeds of shape {tuple(text_embeds.shape)}; "
            "expected (N, K, d), the caption of each clip in K languages"
        )
    return text_embeds.transpose(0, 1)


def kcl_loss(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
    normalize: bool | None = False,
) -> Tensor:
    """Compute the 1-to-K contrastive loss (KCL) between clips and captions in all K languages (ATRI eq. 9-11).

    L = 1/(2NK) sum_ik (-log softmax_j(logit_scale a_i . t_jk)[i] - log softmax_j(logit_scale t_ik . a_j)[i]), the mean
    over languages and directions. Column k is one contrast: if it has one language, a caption and its negatives are in
    the same language. With `languages_per_clip`, column k has a random language of each clip. `info_nce` sums the two
    directions, so its value is twice as large. A random model has a loss of log N; the loss of a perfect model
    approaches 0.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, K, d), unit norm; [i, k] is the caption of clip i in language k.
        logit_scale, group_ids, chunk_size, normalize: See `info_nce`.

    Returns:
        0-d tensor.

    Raises:
        ValueError: There is only one language, or as in `info_nce`.

    >>> pairs = torch.eye(2)
    >>> round(kcl_loss(pairs, torch.stack([pairs, pairs], dim=1), logit_scale=1.0).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    texts = by_language(text_embeds)
    if len(texts) < 2:
        raise ValueError(
            f"got captions in K = {len(texts)} languages; KCL needs two or more, use info_nce for one language"
        )
    return DIRECTION_SCALE["kcl"] * info_nce(
        audio_embeds, texts, logit_scale, group_ids, chunk_size, normalize=normalize
    )


def cacl_loss(
    audio_embeds: Tensor,
    anchor_text_embeds: Tensor,
    other_text_embeds: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
    normalize: bool | None = False,
) -> Tensor:
    """Compute the audio-English co-anchor loss (CACL), with English and one other language per clip (ATRI eq. 12-13).

    L = 1/(6N) (L_ae + L_at + L_et). Each term is summed over clips and both directions, so L is the mean of the six
    one-direction losses between audio (a), English (e) and the other language (t). A random model has a loss of log N;
    the loss of a perfect model approaches 0.

    Args:
        audio_embeds: (N, d), unit norm.
        anchor_text_embeds: (N, d), unit norm; captions in the anchor language, English.
        other_text_embeds: (N, d), unit norm; the same captions, each in another language chosen at random.
        logit_scale, group_ids, chunk_size, normalize: See `info_nce`.

    Returns:
        0-d tensor.

    Raises:
        ValueError: As in `info_nce`.

    >>> pairs = torch.eye(2)
    >>> round(cacl_loss(pairs, pairs, pairs, logit_scale=1.0).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    contrast = partial(
        info_nce, logit_scale=logit_scale, group_ids=group_ids, chunk_size=chunk_size, normalize=normalize
    )
    audio_anchor = contrast(audio_embeds, anchor_text_embeds)
    audio_other = contrast(audio_embeds, other_text_embeds)
    anchor_other = contrast(anchor_text_embeds, other_text_embeds)
    return (audio_anchor + audio_other + anchor_other) / 6


@torch.no_grad()
def language_distribution_error(trained: Tensor) -> Tensor:
    """Compute the distance between the languages that a step trains on and all languages (ATRI eq. 6).

    The distance is mean_i sum_k |1/K - q_ik|, where q_i is uniform over the trained languages of clip i. It does not
    depend on the model. It is 0 for KCL, 2(1 - 2/K) for CACL, and at most 2(1 - 1/K), for one language per clip.

    Args:
        trained: (N, K) bool; [i, k] is True if this step trains clip i in language k. Each clip needs at least one
            True.

    Returns:
        0-d tensor, 0 to 2.

    >>> language_distribution_error(torch.eye(4, dtype=torch.bool))
    tensor(1.5000)
    """
    distribution = trained.float() / trained.sum(dim=1, keepdim=True)
    return (distribution - 1 / trained.shape[1]).abs().sum(dim=1).mean()


@torch.no_grad()
def data_distribution_error(
    audio_embeds: Tensor, text_embeds: Tensor, logit_scale: float | Tensor, trained: Tensor
) -> Tensor:
    """Compute the data distribution error of a batch, sum |p - p'_e| (ATRI eq. 2, 4 and 6).

    p is the softmax of the scaled similarities over all positive pairs of the batch, in all languages. p'_e is the
    softmax over the pairs trained in one step. The error equals 2 (1 - sum of p over the trained pairs). It is 0 for
    KCL, which trains all pairs. If all similarities are equal and a step trains k of K languages, it is 2 (1 - k/K).

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, K, d), unit norm; [i, k] is the caption of clip i in language k.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        trained: (N, K) bool; [i, k] is True if this step trains clip i in language k.

    Returns:
        0-d tensor, 0 to 2, without gradient.

    >>> captions = torch.eye(2).unsqueeze(1).expand(2, 4, 2)
    >>> data_distribution_error(torch.eye(2), captions, 1.0, torch.eye(4, dtype=torch.bool)[:2])
    tensor(1.5000)
    """
    logits, trained = _positive_logits(audio_embeds, text_embeds, logit_scale, trained)
    ideal = logits.softmax(0)
    actual = logits.masked_fill(~trained, -torch.inf).softmax(0)
    return (ideal - actual).abs().sum()


def weight_error_term(
    audio_embeds: Tensor, text_embeds: Tensor, logit_scale: float | Tensor, trained: Tensor
) -> Tensor:
    """Compute a scalar with a gradient norm equal to the weight error (ATRI eq. 21).

    The weight error compares one SGD step on some languages with one SGD step on all languages, both from the same
    weights w. It is the distance between the new weights, divided by the learning rate: the norm of
    sum (p'_e - p) grad_w log p (p and p'_e are defined in `data_distribution_error`). This sum is the gradient of the
    returned scalar sum (p'_e - p) log p, in which (p'_e - p) is detached. The scalar is 0 for KCL.

    The arguments are the same as in `data_distribution_error`.
    """
    logits, trained = _positive_logits(audio_embeds, text_embeds, logit_scale, trained)
    ideal = logits.detach().softmax(0)
    actual = logits.detach().masked_fill(~trained, -torch.inf).softmax(0)
    return ((actual - ideal) * logits.log_softmax(0)).sum()


def weight_error_bound(
    distribution_errors: Sequence[float],
    gradient_norms: Sequence[Sequence[float]],
    lipschitz: float,
    learning_rate: float,
    start: float = 0.0,
) -> list[float]:
    """Compute the bound of the weight error after each epoch of SGD (ATRI eq. 6-8, 24, 25).

    The weight error is the distance ||w - w'|| between the weights of two runs: one trains on all languages, with the
    distribution p over the pairs, and the other on some of them, with p'_e in epoch e. In an epoch of T steps,

        bound_e = a^T bound_(e-1) + learning_rate D_e sum_(j=0)^(T-1) a^j g_(T-1-j),  a = 1 + learning_rate L.

    The sum starts at j = 0, as in eq. 25; eq. 6 prints j = 1.

    Args:
        distribution_errors: D_e, sum |p - p'_e| in each epoch (`data_distribution_error`).
        gradient_norms: For each epoch, the largest gradient norm over the pairs, g_max in eq. 7, before each of its T
            steps, at the weights of the run on all languages.
        lipschitz: L, the Lipschitz constants of the gradients of the pairs, averaged over p'_e.
        learning_rate: Learning rate of SGD.
        start: Weight error before the first epoch.

    Returns:
        The bound after each epoch.

    >>> weight_error_bound([0.5, 0.0], [[1.0, 1.0], [1.0, 1.0]], lipschitz=1.0, learning_rate=1.0)  # a = 2
    [1.5, 6.0]
    """
    growth = 1 + learning_rate * lipschitz
    bounds = []
    bound = start
    for error, norms in zip(distribution_errors, gradient_norms, strict=True):
        for norm in norms:
            bound = growth * bound + learning_rate * error * norm
        bounds.append(bound)
    return bounds


def momentum_error_bound(
    momentum_error: float,
    weight_error: float,
    distribution_error: float,
    gradient_norm: float,
    lipschitz: float,
    beta1: float = 0.9,
) -> float:
    """Compute the bound of the error of Adam's first moment after a step (ATRI eq. 26, 27 and 32, ACL appendix F.1).

    ||m_t - m'_t|| <= beta1 ||m_(t-1) - m'_(t-1)|| + (1 - beta1) (L ||w_(t-1) - w'_(t-1)|| + g D). The two runs are
    those of `weight_error_bound`. The last line of eq. 32 prints ||w - w'|| in place of the first term, beta1
    ||m - m'||, which its earlier lines contain.

    Args:
        momentum_error: ||m - m'|| before the step.
        weight_error: ||w - w'|| before the step.
        distribution_error: D, sum |p - p'_e|.
        gradient_norm: g, the largest gradient norm over the pairs, at the weights w before the step.
        lipschitz: L, the Lipschitz constants of the gradients of the pairs, averaged over p'_e.
        beta1: Decay of the first moment.

    >>> round(momentum_error_bound(1.0, 2.0, 0.5, 3.0, lipschitz=0.5, beta1=0.75), 6)  # 0.75 + 0.25 (1 + 1.5)
    1.375
    """
    return beta1 * momentum_error + (1 - beta1) * (lipschitz * weight_error + gradient_norm * distribution_error)


def _positive_logits(
    audio_embeds: Tensor, text_embeds: Tensor, logit_scale: float | Tensor, trained: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scaled similarities of the clips to their captions, and `trained`. Both are flattened to (N K,)."""
    if trained.shape != text_embeds.shape[:2]:
        raise ValueError(
            f"got trained of shape {tuple(trained.shape)} for text_embeds {tuple(text_embeds.shape)}; expected (N, K)"
        )
    audio_embeds, text_embeds = at_least_float32(audio_embeds, text_embeds)
    logits = logit_scale * (audio_embeds.unsqueeze(1) * text_embeds).sum(-1)  # (N, 1, d), (N, K, d) -> (N, K)
    return logits.flatten(), trained.flatten()


@torch.no_grad()
def alignment_direction_error(audio_embeds: Tensor, text_embeds: Tensor, trained: Tensor) -> Tensor:
    """Compute the angle between the ideal and the trained direction of each clip (ATRI 3.2, fig. 2).

    The ideal direction points from the audio embedding to the mean embedding of the captions in all languages (ATRI eq.
    20). The trained direction points to the mean embedding of the captions that the step trains. The angle is 0 for
    KCL, which trains all languages.

    The arguments are the same as in `data_distribution_error`. Each clip needs at least one trained language.

    Returns:
        0-d tensor without gradient: mean angle over the clips in degrees, 0 to 180.

    >>> captions = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> alignment_direction_error(torch.zeros(1, 2), captions, torch.tensor([[True, False]]))
    tensor(45.)
    """
    audio_embeds, text_embeds = at_least_float32(audio_embeds, text_embeds)
    weights = trained.to(text_embeds) / trained.sum(dim=1, keepdim=True)
    aligned = (weights.unsqueeze(-1) * text_embeds).sum(dim=1) - audio_embeds  # (N, K, d) -> (N, d)
    best = text_embeds.mean(dim=1) - audio_embeds

    # atan2 is exact for small angles, the arc cosine is not.
    aligned, best = F.normalize(aligned, dim=-1), F.normalize(best, dim=-1)
    half = torch.atan2((aligned - best).norm(dim=-1), (aligned + best).norm(dim=-1))
    return half.mul(2).rad2deg().mean()
