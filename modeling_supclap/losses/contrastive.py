"""Contrastive losses on a similarity matrix: InfoNCE, SigLIP and re-weighted InfoNCE.

All losses use the same conventions. Embeddings have shape (N, d) and unit norm. `similarity[i, j]` compares audio i
with text j. `logit_scale` is 1 / temperature, not its logarithm. Leading dimensions, as in (..., N, d), are separate
batches, for example one per language. The leading dimensions of audio and text are broadcast, and the loss is averaged
over them.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .similarity import at_least_float32, check_negatives, positive_mask, positive_mean, similarity_matrix
from .tiles import tiled_sigmoid_contrast, tiled_symmetric_contrast


def softmax_contrast(
    logits: Tensor, group_ids: Tensor | None = None, decoupled: bool = False, negatives: Tensor | None = None
) -> Tensor:
    """Compute InfoNCE in one direction: -log softmax at the positives, averaged over positives and rows.

    Args:
        logits: (..., N, N) scaled similarities, with positives on the diagonal.
        group_ids: (N,) integers; clips with the same id are positives of each other.
        decoupled: Whether to exclude the positives from the denominator.
        negatives: (N, M) scaled similarities of further negatives of each row, from `negative_logits`.

    >>> round(softmax_contrast(torch.eye(2)).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    size = logits.shape[-1]
    candidates = logits if negatives is None else torch.cat([logits, negatives], dim=-1)  # (..., N, N + M)
    if not decoupled:
        return -positive_mean(candidates.log_softmax(-1)[..., :size], group_ids).mean()
    check_negatives(group_ids)
    positives = F.pad(positive_mask(size, group_ids, logits.device), (0, candidates.shape[-1] - size))
    denominators = candidates.masked_fill(positives, -torch.inf).logsumexp(-1)
    return (denominators - positive_mean(logits, group_ids)).mean()


def sigmoid_contrast(logits: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Compute the sigmoid loss: the sum of -log sigmoid(z logit) over all pairs, divided by N.

    z is +1 for positives and -1 for negatives.

    >>> round(sigmoid_contrast(torch.zeros(2, 2)).item(), 4)  # 2 log 2
    1.3863
    """
    positives = positive_mask(logits.shape[-1], group_ids, logits.device)
    return -F.logsigmoid(torch.where(positives, logits, -logits)).sum(-1).mean()


def negative_logits(
    audio_embeds: Tensor, negatives: Tensor, logit_scale: float | Tensor, mask: Tensor | None = None
) -> Tensor:
    """Compute the scaled similarities of clips (N, d) and their own wrong texts (N, M, d). Return (N, M).

    The similarity is minus infinity where `mask` (N, M) is False.
    """
    if negatives.ndim != 3 or audio_embeds.shape != (negatives.shape[0], negatives.shape[2]):
        raise ValueError(
            f"got negatives of shape {tuple(negatives.shape)} for clips of shape {tuple(audio_embeds.shape)}; "
            "expected (N, M, d) for clips (N, d)"
        )
    audio, texts = at_least_float32(audio_embeds, negatives)
    with torch.autocast(audio.device.type, enabled=False):
        logits = logit_scale * (texts @ audio.unsqueeze(-1)).squeeze(-1)  # (N, M, d), (N, d, 1) -> (N, M)
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def info_nce(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
    negatives: Tensor | None = None,
    negative_mask: Tensor | None = None,
) -> Tensor:
    """Compute InfoNCE, the sum of the audio-to-text and text-to-audio losses (SupCLAP eq. 5).

    L = mean_i -log softmax_j(logit_scale a_i . t_j)[i] + mean_i -log softmax_j(logit_scale t_i . a_j)[i].

    A random model has a loss of 2 log N. The loss of a perfect model approaches 0 as `logit_scale` grows. With groups
    of g clips it approaches 2 log g, because the g positives of a row share the probability. CLIP and ML-CLAP average
    the two directions instead, so their loss is half as large.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number, or a 0-d tensor if the temperature is learned.
        group_ids: (N,) integers; clips with the same id (two captions or two crops of one recording) are positives of
            each other. None: each clip is its own group.
        chunk_size: Number of similarity matrix rows to compute at a time. Memory is then linear in N (see `tiles.py`).
            None: all rows at once.
        negatives: (N, M, d), unit norm; M wrong texts of each clip. They are further columns of the audio-to-text
            softmax of their own clip, and of no other clip, because they may be right there.
        negative_mask: (N, M) booleans, False where a clip has fewer than M negatives. None: all are used.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not match, or there are fewer than two clips.

    >>> pairs = torch.eye(2)
    >>> round(info_nce(pairs, pairs, logit_scale=1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    wrong = None
    if negatives is not None:
        wrong = negative_logits(audio_embeds, negatives, logit_scale, negative_mask)
    if chunk_size is not None:
        return tiled_symmetric_contrast(audio_embeds, text_embeds, logit_scale, group_ids, chunk_size, wrong)
    logits = logit_scale * similarity_matrix(audio_embeds, text_embeds)
    return softmax_contrast(logits, group_ids, negatives=wrong) + softmax_contrast(logits.mT, group_ids)


def sigmoid_loss(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
    negatives: Tensor | None = None,
    negative_mask: Tensor | None = None,
) -> Tensor:
    """Compute the SigLIP loss: binary classification of every audio-text pair (Zhai et al. 2023; SupCLAP 4.2).

    L = 1/N sum_ij -log sigmoid(z_ij (logit_scale a_i . t_j + logit_bias)), z_ij = +1 on positives, -1 elsewhere.

    If all logits are 0, the loss is N log 2. With the usual initialization (scale 10, bias -10) and cosines of 0, the
    loss is about 10, because the bias already classifies all negatives correctly. The loss of a perfect model
    approaches 0.

    Args:
        audio_embeds, text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor. SigLIP initializes it to 10.
        logit_bias: Bias added to every logit; a number or a 0-d tensor. SigLIP initializes it to -10.
        group_ids, chunk_size, negatives, negative_mask: See `info_nce`. Each negative is one more pair with z = -1.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not match, or there are fewer than two clips.

    >>> pairs = torch.eye(2)
    >>> round(sigmoid_loss(pairs, pairs, logit_scale=2.0, logit_bias=-1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    if chunk_size is not None:
        loss = tiled_sigmoid_contrast(audio_embeds, text_embeds, logit_scale, logit_bias, group_ids, chunk_size)
    else:
        logits = logit_scale * similarity_matrix(audio_embeds, text_embeds) + logit_bias
        loss = sigmoid_contrast(logits, group_ids)
    if negatives is None:
        return loss
    wrong = negative_logits(audio_embeds, negatives, logit_scale, negative_mask) + logit_bias  # (N, M)
    return loss - F.logsigmoid(-wrong).sum(dim=-1).mean()


def reweighted_info_nce(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    positive_weight: float | Tensor,
    group_ids: Tensor | None = None,
    weighted: Literal["pull", "probability"] = "pull",
) -> Tensor:
    """Compute InfoNCE with a re-weighted positive, the "Simple Reweight" baseline (SupCLAP E.4).

    Let s+ be the logit of the positive and P+ its softmax probability (SupCLAP eq. 2). InfoNCE pulls an anchor toward
    its positive with force logit_scale (1 - P+) (SupCLAP eq. 4). At w = 1 the loss equals `info_nce`.

    The paper describes the baseline only in words: a learnable scalar w scales P+, to amplify the gradient of the
    positive. There are two readings. The factors before s+ are detached, so that they set the gradient:

    - "pull": The force is logit_scale w (1 - P+). L = InfoNCE - (w - 1) (1 - P+) s+. A larger w amplifies the pull.
    - "probability": The force is logit_scale (1 - w P+), as printed. L = InfoNCE + (w - 1) P+ s+. A smaller w amplifies
      the pull; w may be negative. Without the detached factor, as in -log(w P+), w would not change the gradient.

    The paper reports lower retrieval scores than for plain InfoNCE. "pull" reproduces the decrease; a weight inside the
    softmax does not (see `recipes/studies/LOG.md`).

    Args:
        audio_embeds, text_embeds: (N, d), unit norm; text i belongs to audio i.
        positive_weight: w; a number or a 0-d tensor. For "pull" w > 0; if it is learned, store its logarithm as the
            parameter.
        logit_scale, group_ids: See `info_nce`.
        weighted: Reading of the paper, "pull" or "probability".

    Returns:
        0-d tensor.

    Raises:
        ValueError: `weighted` is "pull" and `positive_weight` is a number that is not positive, the shapes do not
            match, or there are fewer than two clips.

    >>> pairs = torch.eye(2)
    >>> round(reweighted_info_nce(pairs, pairs, logit_scale=1.0, positive_weight=1.0).item(), 4)
    0.6265
    """
    is_pull = weighted == "pull"
    if is_pull and not isinstance(positive_weight, Tensor) and positive_weight <= 0:
        raise ValueError(f"got positive_weight={positive_weight}; it must be positive (1 gives plain InfoNCE)")

    logits = logit_scale * similarity_matrix(audio_embeds, text_embeds)
    positives = positive_mask(logits.shape[-1], group_ids, logits.device)
    total = logits.new_zeros(())
    target = positives / positives.sum(dim=-1, keepdim=True)
    for direction in (logits, logits.mT):
        probabilities = direction.detach().softmax(dim=-1)
        force = (target - probabilities if is_pull else -probabilities) * positives  # (..., N, N)
        extra_pull = (positive_weight - 1) * (force * direction).sum(dim=-1).mean()
        total = total + softmax_contrast(direction, group_ids) - extra_pull
    return total
