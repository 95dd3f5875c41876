"""Contrastive losses on one matrix of similarities: InfoNCE, SigLIP and the re-weighted InfoNCE.

Conventions of all the losses: embeddings are (N, d) with unit norm, `similarity[i, j]` is audio i against text j, and
`logit_scale` is the multiplier itself, 1 / temperature. Leading dimensions, (..., N, d), are batches of their own
(languages, say) that broadcast and over which the loss is averaged.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .similarity import check_negatives, positive_mask, positive_mean, similarity_matrix
from .tiles import tiled_sigmoid_contrast, tiled_symmetric_contrast


def softmax_contrast(logits: Tensor, group_ids: Tensor | None = None, decoupled: bool = False) -> Tensor:
    """Compute one direction of InfoNCE: mean over rows of -log softmax of the row's positives among all columns.

    Args:
        logits: (..., N, N), the positives on the diagonal.
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
    """Compute 1/N times the sum over all pairs of -log sigmoid(z logit), z = +1 on positives and -1 elsewhere.

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
    """InfoNCE, the sum of its two directions [SupCLAP eq. 5].

    L = mean_i -log softmax_j(logit_scale a_i . t_j)[i] + mean_i -log softmax_j(logit_scale t_i . a_j)[i].

    A random model gives 2 log N. A perfect one tends to 0 as the scale grows; with groups of g clips to 2 log g, since
    the target is then uniform over the g positives of a row. CLIP and ML-CLAP take the mean of the two directions,
    which is half of this.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor, which then gets a gradient.
        group_ids: (N,) integers; clips with the same id (two captions of one recording, two crops of one file) are
            positives of each other. By default every clip is its own.
        chunk_size: So many rows of the similarities are made at a time, which keeps the memory linear in N; see
            `tiles`. By default they are one matrix.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not fit, or there are fewer than two clips.

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
    """SigLIP's loss: every pair is a two-way question of its own (Zhai et al. 2023, [SupCLAP 4.2]).

    L = 1/N sum_ij -log sigmoid(z_ij (logit_scale a_i . t_j + logit_bias)), z_ij = +1 on positives, -1 elsewhere.

    A model without knowledge (logits 0) gives N log 2, and at the usual start (scale 10, bias -10, cosines 0) about 10:
    the bias already rejects all negatives. A perfect one tends to 0.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor. Starts at 10.
        logit_bias: The number added to every logit, or a 0-d tensor. Starts at -10.
        group_ids: (N,) integers; clips with the same id are positives of each other. By default every clip is its own.
        chunk_size: So many rows are made at a time, as in `info_nce`.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not fit, or there are fewer than two clips.

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
    """InfoNCE whose positive is re-weighted, the "Simple Reweight" baseline [SupCLAP E.4].

    It is there to be compared with: the paper finds it worse than plain InfoNCE. The paper says in words only that a
    learnable w amplifies the gradient of the positive, and so changes its direction and inflates its size. With P+ the
    positive's probability, InfoNCE moves an anchor by logit_scale ((1 - P+) a+ - sum_- P a-), and the readings are:

    - "pull": the first of the two terms is multiplied by w. The loss is InfoNCE - (w - 1) (1 - P+) s+ with 1 - P+ held
      constant. Its derivative with respect to w is -(1 - P+) s+: w grows while the positives are similar, and with it
      the pull. This is what the paper describes, and of the readings the one that costs retrieval (`recipes/LOG.md`).
    - "softmax": w multiplies exp(s+) in the softmax, L = -log(w exp(s+) / (w exp(s+) + sum_- exp(s-))). As this is
      P+ of other logits, both terms of the gradient shrink alike as w grows and its direction stays, whereas
      dL/dlog w = -(1 - P+) is always negative: w grows until nothing is left of the gradient.

    A weight of 1 gives `info_nce` in both.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        positive_weight: w > 0; a number or a 0-d tensor. A learnable one is best kept as its logarithm.
        group_ids: (N,) integers; clips with the same id are positives of each other. By default every clip is its own.
        reading: What is re-weighted, "pull" or "softmax".

    Returns:
        0-d tensor.

    Raises:
        ValueError: The number w is not positive, the reading is unknown, the shapes do not fit, or there are fewer than
            two clips.

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
        weighed = logits + log_weight * positives
        return softmax_contrast(weighed, group_ids) + softmax_contrast(weighed.mT, group_ids)

    total = logits.new_zeros(())
    target = positives / positives.sum(dim=-1, keepdim=True)
    for scores in (logits, logits.mT):
        pull = (target - scores.detach().softmax(dim=-1)) * positives  # (..., N, N)
        added = (positive_weight - 1) * (pull * scores).sum(dim=-1).mean()
        total = total + softmax_contrast(scores, group_ids) - added
    return total
