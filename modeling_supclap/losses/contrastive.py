"""Contrastive losses on a similarity matrix: InfoNCE, SigLIP and re-weighted InfoNCE.

All losses use the same conventions. Embeddings have shape (N, d) and unit norm: other norms raise ValueError, unless
`normalize=True` (see `similarity.unit_norm`). `similarity[i, j]` compares audio i with text j. `logit_scale` is 1 /
temperature, not its logarithm. Leading dimensions, as in (..., N, d), are separate batches, for example one per
language. The leading dimensions of audio and text are broadcast, and the loss is averaged over them.
"""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .similarity import at_least_float32, positive_mask, positive_mean, similarity_matrix, unit_norm, unit_pairs
from .tiles import map_rows


def softmax_contrast(
    logits: Tensor,
    group_ids: Tensor | None = None,
    decoupled: bool = False,
    negatives: Tensor | None = None,
    rows: slice = slice(None),
) -> Tensor:
    """Compute InfoNCE in one direction, for each row: -log softmax at the positives, averaged over the positives.

    Args:
        logits: (..., n, N) scaled similarities; all rows (n = N), or n of them. The positives are on the diagonal.
        group_ids: (N,) integers; clips with the same id are positives of each other.
        decoupled: Whether to exclude the positives from the denominator.
        negatives: (N, M) scaled similarities of further negatives of each row, from `negative_logits`.
        rows: Which of the N rows `logits` contains.

    Returns:
        (..., n).

    >>> softmax_contrast(torch.eye(2))  # log(1 + exp(-1))
    tensor([0.3133, 0.3133])
    """
    size = logits.shape[-1]
    candidates = logits if negatives is None else torch.cat([logits, negatives[rows]], dim=-1)  # (..., n, N + M)
    if not decoupled:
        return -positive_mean(candidates.log_softmax(-1)[..., :size], group_ids, rows)
    positives = F.pad(positive_mask(size, group_ids, logits.device, rows), (0, candidates.shape[-1] - size))
    denominators = candidates.masked_fill(positives, -torch.inf).logsumexp(-1)
    return denominators - positive_mean(logits, group_ids, rows)


def sigmoid_contrast(
    scaled: Tensor, logit_bias: float | Tensor, group_ids: Tensor | None = None, rows: slice = slice(None)
) -> Tensor:
    """Compute the SigLIP loss for each row: the sum of -log sigmoid(z (scaled + logit_bias)) over its pairs.

    z is +1 for positives and -1 for negatives. The other arguments and the result are as in `softmax_contrast`.

    >>> sigmoid_contrast(torch.zeros(2, 2), logit_bias=0.0)  # 2 log 2
    tensor([1.3863, 1.3863])
    """
    logits = scaled + logit_bias
    positives = positive_mask(logits.shape[-1], group_ids, logits.device, rows)
    return -F.logsigmoid(torch.where(positives, logits, -logits)).sum(-1)


def negative_logits(
    audio_embeds: Tensor,
    negatives: Tensor,
    logit_scale: float | Tensor,
    mask: Tensor | None = None,
    normalize: bool | None = False,
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
    texts = unit_norm(texts, normalize)
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
    normalize: bool | None = False,
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
        normalize: Whether to normalize the embeddings first. None: neither normalize nor check them.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not match, there are fewer than two clips, or an embedding does not have unit norm.

    >>> pairs = torch.eye(2)
    >>> round(info_nce(pairs, pairs, logit_scale=1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    audio_embeds, text_embeds = unit_pairs(audio_embeds, text_embeds, normalize)
    wrong = None
    if negatives is not None:
        wrong = negative_logits(audio_embeds, negatives, logit_scale, negative_mask, normalize)
    by_audio = partial(softmax_contrast, group_ids=group_ids, negatives=wrong)
    by_text = partial(softmax_contrast, group_ids=group_ids)
    if chunk_size is None:  # one matrix for both directions
        logits = logit_scale * similarity_matrix(audio_embeds, text_embeds)
        return by_audio(logits).mean() + by_text(logits.mT).mean()
    audio_losses = map_rows(by_audio, audio_embeds, text_embeds, logit_scale, chunk_size)
    text_losses = map_rows(by_text, text_embeds, audio_embeds, logit_scale, chunk_size)
    return audio_losses.mean() + text_losses.mean()


def sigmoid_loss(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
    negatives: Tensor | None = None,
    negative_mask: Tensor | None = None,
    normalize: bool | None = False,
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
        group_ids, chunk_size, negatives, negative_mask, normalize: See `info_nce`. Each negative is one more pair with
            z = -1.

    Returns:
        0-d tensor.

    Raises:
        ValueError: As in `info_nce`.

    >>> pairs = torch.eye(2)
    >>> round(sigmoid_loss(pairs, pairs, logit_scale=2.0, logit_bias=-1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    audio_embeds, text_embeds = unit_pairs(audio_embeds, text_embeds, normalize)
    row_losses = partial(sigmoid_contrast, logit_bias=logit_bias, group_ids=group_ids)
    loss = map_rows(row_losses, audio_embeds, text_embeds, logit_scale, chunk_size).mean()
    if negatives is None:
        return loss
    wrong = negative_logits(audio_embeds, negatives, logit_scale, negative_mask, normalize) + logit_bias  # (N, M)
    return loss - F.logsigmoid(-wrong).sum(dim=1).mean()


def reweighted_info_nce(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    positive_weight: float | Tensor,
    group_ids: Tensor | None = None,
    weighted: Literal["pull", "probability"] = "pull",
    normalize: bool | None = False,
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
        logit_scale, group_ids, normalize: See `info_nce`.
        weighted: Reading of the paper, "pull" or "probability".

    Returns:
        0-d tensor.

    Raises:
        ValueError: `weighted` is "pull" and `positive_weight` is a number that is not positive, or as in `info_nce`.

    >>> pairs = torch.eye(2)
    >>> round(reweighted_info_nce(pairs, pairs, logit_scale=1.0, positive_weight=1.0).item(), 4)
    0.6265
    """
    is_pull = weighted == "pull"
    if is_pull and not isinstance(positive_weight, Tensor) and positive_weight <= 0:
        raise ValueError(f"got positive_weight={positive_weight}; it must be positive (1 gives plain InfoNCE)")

    logits = logit_scale * similarity_matrix(*unit_pairs(audio_embeds, text_embeds, normalize))
    positives = positive_mask(logits.shape[-1], group_ids, logits.device)
    total = logits.new_zeros(())
    target = positives / positives.sum(dim=-1, keepdim=True)
    for direction in (logits, logits.mT):
        probabilities = direction.detach().softmax(dim=-1)
        force = (target - probabilities if is_pull else -probabilities) * positives  # (..., N, N)
        extra_pull = (positive_weight - 1) * (force * direction).sum(dim=-1).mean()
        total = total + softmax_contrast(direction, group_ids).mean() - extra_pull
    return total
