"""Contrastive losses on one similarity matrix: InfoNCE, SigLIP and the re-weighted InfoNCE.

Conventions of all losses: embeddings are (N, d) with unit norm, `similarity[i, j]` compares audio i with text j, and
`logit_scale` is 1 / temperature, not its logarithm. Leading dimensions, (..., N, d), are separate batches (for example
languages). They broadcast, and the loss is their mean.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .similarity import check_negatives, positive_mask, positive_mean, similarity_matrix
from .tiles import tiled_sigmoid_contrast, tiled_symmetric_contrast


def softmax_contrast(logits: Tensor, group_ids: Tensor | None = None, decoupled: bool = False) -> Tensor:
    """Compute one direction of InfoNCE: the mean over rows of -log softmax at the row's positives.

    Args:
        logits: (..., N, N), positives on the diagonal.
        group_ids: (N,) integers; clips with the same id are positives of each other.
        decoupled: Leave the positives out of the denominator.

    Raises:
        ValueError: A decoupled row has no negative.

    >>> round(softmax_contrast(torch.eye(2)).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    if not decoupled:
        return -positive_mean(logits.log_softmax(-1), group_ids).mean()
    check_negatives(group_ids)
    positives = positive_mask(logits.shape[-1], group_ids, logits.device)
    denominators = logits.masked_fill(positives, -torch.inf).logsumexp(-1)
    return (denominators - positive_mean(logits, group_ids)).mean()


def sigmoid_contrast(logits: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Compute 1/N times the sum of -log sigmoid(z logit) over all pairs, z = +1 for positives and -1 for negatives.

    >>> round(sigmoid_contrast(torch.zeros(2, 2)).item(), 4)  # 2 log 2
    1.3863
    """
    positives = positive_mask(logits.shape[-1], group_ids, logits.device)
    return -F.logsigmoid(torch.where(positives, logits, -logits)).sum(-1).mean()


def info_nce(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute InfoNCE, the sum of the audio-to-text and text-to-audio directions [SupCLAP eq. 5].

    L = mean_i -log softmax_j(logit_scale a_i . t_j)[i] + mean_i -log softmax_j(logit_scale t_i . a_j)[i].

    The loss of a random model is 2 log N. That of a perfect model tends to 0 as the scale grows. With groups of g clips
    it tends to 2 log g, because the target is uniform over the g positives of a row. CLIP and ML-CLAP use the mean of
    the two directions, half of this loss.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number, or a 0-d tensor if it is learned.
        group_ids: (N,) integers; clips with the same id (two captions of one recording, two crops of one file) are
            positives of each other. None: each clip is its own group.
        chunk_size: Rows of the similarity matrix computed at a time; memory is then linear in N (see `tiles`). None:
            all rows.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not match, or there are fewer than two clips.

    >>> pairs = torch.eye(2)
    >>> round(info_nce(pairs, pairs, logit_scale=1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    if chunk_size is not None:
        return tiled_symmetric_contrast(audio_embeds, text_embeds, logit_scale, group_ids, chunk_size)
    logits = logit_scale * similarity_matrix(audio_embeds, text_embeds)
    return softmax_contrast(logits, group_ids) + softmax_contrast(logits.mT, group_ids)


def sigmoid_loss(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute the SigLIP loss: a binary classification of every pair (Zhai et al. 2023, [SupCLAP 4.2]).

    L = 1/N sum_ij -log sigmoid(z_ij (logit_scale a_i . t_j + logit_bias)), z_ij = +1 on positives, -1 elsewhere.

    With all logits 0 the loss is N log 2. At the usual start (scale 10, bias -10, cosines 0) it is about 10, because
    the bias already rejects all negatives. For a perfect model it tends to 0.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor. SigLIP starts at 10.
        logit_bias: Added to every logit; a number or a 0-d tensor. SigLIP starts at -10.
        group_ids: (N,) integers; clips with the same id are positives of each other. None: each clip is its own group.
        chunk_size: Rows of the similarity matrix computed at a time, as in `info_nce`. None: all rows.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not match, or there are fewer than two clips.

    >>> pairs = torch.eye(2)
    >>> round(sigmoid_loss(pairs, pairs, logit_scale=2.0, logit_bias=-1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    if chunk_size is not None:
        return tiled_sigmoid_contrast(audio_embeds, text_embeds, logit_scale, logit_bias, group_ids, chunk_size)
    return sigmoid_contrast(logit_scale * similarity_matrix(audio_embeds, text_embeds) + logit_bias, group_ids)


def reweighted_info_nce(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    positive_weight: float | Tensor,
    group_ids: Tensor | None = None,
    reading: Literal["pull", "softmax"] = "pull",
) -> Tensor:
    """Compute InfoNCE with a re-weighted positive, the "Simple Reweight" baseline [SupCLAP E.4].

    The paper reports lower retrieval than with plain InfoNCE. It prints no equation: a learnable scalar w amplifies the
    gradient of the positive, which changes the direction of the gradient and increases its size. Let P+ be the
    probability of the positive. InfoNCE moves an anchor by logit_scale ((1 - P+) a+ - sum_- P a-). Two readings fit:

    - "pull": w multiplies the first term. The loss is InfoNCE - (w - 1) (1 - P+) s+, with 1 - P+ detached. Its
      derivative with respect to w is -(1 - P+) s+, so w and the pull grow while the positives are similar. This is
      closer to the paper's description, and only this reading lowers retrieval here (`recipes/LOG.md`).
    - "softmax": w multiplies exp(s+) in the softmax, L = -log(w exp(s+) / (w exp(s+) + sum_- exp(s-))). Both terms of
      the gradient shrink by the same factor as w grows, and its direction does not change. dL/dlog w = -(1 - P+) is
      always negative, so w grows until the gradient vanishes.

    With w = 1 both equal `info_nce`.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        positive_weight: w > 0; a number or a 0-d tensor. If it is learned, store its logarithm as the parameter.
        group_ids: (N,) integers; clips with the same id are positives of each other. None: each clip is its own group.
        reading: Which quantity w multiplies, "pull" or "softmax".

    Returns:
        0-d tensor.

    Raises:
        ValueError: The number w is not positive, the reading is unknown, the shapes do not match, or there are fewer
            than two clips.

    >>> pairs = torch.eye(2)
    >>> round(reweighted_info_nce(pairs, pairs, logit_scale=1.0, positive_weight=1.0).item(), 4)
    0.6265
    """
    if not isinstance(positive_weight, Tensor) and positive_weight <= 0:
        raise ValueError(f"got positive_weight={positive_weight}; it must be positive (1 gives plain InfoNCE)")
    if reading not in ("pull", "softmax"):
        raise ValueError(f"got reading={reading!r}; it must be 'pull' or 'softmax'")

    logits = logit_scale * similarity_matrix(audio_embeds, text_embeds)
    positives = positive_mask(logits.shape[-1], group_ids, logits.device)
    if reading == "softmax":
        log_weight = torch.as_tensor(positive_weight, dtype=logits.dtype, device=logits.device).log()
        weighted = logits + log_weight * positives
        return softmax_contrast(weighted, group_ids) + softmax_contrast(weighted.mT, group_ids)

    total = logits.new_zeros(())
    target = positives / positives.sum(dim=-1, keepdim=True)
    for direction in (logits, logits.mT):
        pull = (target - direction.detach().softmax(dim=-1)) * positives  # (..., N, N)
        extra_pull = (positive_weight - 1) * (pull * direction).sum(dim=-1).mean()
        total = total + softmax_contrast(direction, group_ids) - extra_pull
    return total
