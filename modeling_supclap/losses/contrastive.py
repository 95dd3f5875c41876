"""Contrastive losses on one matrix of similarities: InfoNCE, SigLIP and the re-weighted InfoNCE.

Conventions of all the losses: embeddings are (N, d) with unit norm, `similarity[i, j]` is audio i against text j, and
`logit_scale` is the multiplier itself, 1 / temperature. Leading dimensions, (..., N, d), are batches of their own
(languages, say) that broadcast and over which the loss is averaged. All arithmetic is in float32 or wider, whatever
the dtype of the embeddings and under autocast too: at a temperature of 0.07 the spacing of bfloat16 near a cosine of 1
would move the logits by 0.06.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def at_least_float32(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in the widest of their dtypes and float32."""
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return first.to(dtype), second.to(dtype)


def similarity_matrix(first: Tensor, second: Tensor) -> Tensor:
    """Cosine of every row of `first` with every row of `second`.

    Args:
        first: (..., N, d), unit norm.
        second: (..., N, d), unit norm; row i is the positive of row i of `first`.

    Returns:
        (..., N, N), float32 or wider: entry [i, j] is `first[i] . second[j]`.

    Raises:
        ValueError: the shapes differ, or there are fewer than two rows.

    >>> similarity_matrix(torch.eye(2), torch.eye(2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    if first.ndim < 2 or second.ndim < 2 or first.shape[-2:] != second.shape[-2:]:
        raise ValueError(
            f"got embeddings of shapes {tuple(first.shape)} and {tuple(second.shape)}; "
            "both must be (N, d), row i of one being the positive of row i of the other"
        )
    if first.shape[-2] < 2:
        raise ValueError(f"got a batch of {first.shape[-2]}; contrast needs two: the negatives are the other clips")
    first, second = at_least_float32(first, second)
    with torch.autocast(first.device.type, enabled=False):
        return first @ second.mT


def products(first: Tensor, second: Tensor, known: Tensor | None) -> Tensor:
    """`similarity_matrix(first, second)`, or the same matrix where one has it already."""
    return similarity_matrix(first, second) if known is None else known


def positive_mask(size: int, group_ids: Tensor | None, device: torch.device) -> Tensor:
    """Which pairs are positive: the diagonal, or all pairs whose clips share a group.

    Args:
        size: N.
        group_ids: (N,) integers, or None for the diagonal alone.
        device: where the mask is to be.

    Returns:
        (N, N) bool, symmetric, true on the diagonal.

    Raises:
        ValueError: `group_ids` does not hold one id per clip.

    >>> positive_mask(3, torch.tensor([7, 7, 2]), torch.device("cpu")).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    if group_ids is None:
        return torch.eye(size, dtype=torch.bool, device=device)
    if group_ids.shape != (size,):
        raise ValueError(f"got group_ids of shape {tuple(group_ids.shape)} for {size} clips; give one id per clip")
    group_ids = group_ids.to(device)
    return group_ids.unsqueeze(1) == group_ids


def positive_mean(values: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Mean over the positives of each row of `values` (..., N, N); (..., N). Without groups, the diagonal."""
    if group_ids is None:
        return values.diagonal(dim1=-2, dim2=-1)
    positives = positive_mask(values.shape[-1], group_ids, values.device)
    return values.masked_fill(~positives, 0.0).sum(-1) / positives.sum(-1)


def softmax_contrast(logits: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """One direction of InfoNCE: mean over rows of -log softmax of the row's positives among all columns.

    >>> round(softmax_contrast(torch.eye(2)).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    return -positive_mean(logits.log_softmax(-1), group_ids).mean()


def decoupled_contrast(logits: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """`softmax_contrast` with the positives left out of the denominator, as [SupCLAP eq. 6] is printed.

    Raises:
        ValueError: some row has no negative left (all clips are in one group).

    >>> decoupled_contrast(torch.eye(2))  # log(exp(0)) - 1
    tensor(-1.)
    """
    positives = positive_mask(logits.shape[-1], group_ids, logits.device)
    if group_ids is not None and bool(positives.all(dim=-1).any()):
        raise ValueError("got one group for the whole batch; a decoupled loss needs a negative in every row")
    denominator = logits.masked_fill(positives, -torch.inf).logsumexp(-1)
    return (denominator - positive_mean(logits, group_ids)).mean()


def sigmoid_contrast(logits: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Sum over all pairs of -log sigmoid(z logit), z = +1 on positives and -1 elsewhere, divided by N.

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
    cross: Tensor | None = None,
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
            positives of each other. Default: every clip its own.
        cross: (N, N), audio . text, where it is at hand: `similarity_matrix(audio_embeds, text_embeds)`.

    Returns:
        0-d tensor.

    Raises:
        ValueError: shapes that do not fit, or fewer than two clips.

    >>> pairs = torch.eye(2)
    >>> round(info_nce(pairs, pairs, logit_scale=1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    logits = logit_scale * products(audio_embeds, text_embeds, cross)
    return softmax_contrast(logits, group_ids) + softmax_contrast(logits.mT, group_ids)


def sigmoid_loss(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    group_ids: Tensor | None = None,
    cross: Tensor | None = None,
) -> Tensor:
    """SigLIP's loss: every pair is a two-way question of its own (Zhai et al. 2023, [SupCLAP 4.2]).

    L = 1/N sum_ij -log sigmoid(z_ij (logit_scale a_i . t_j + logit_bias)), z_ij = +1 on positives, -1 elsewhere.

    A model without knowledge (logits 0) gives N log 2, and at the usual start (scale 10, bias -10, cosines 0) about 10:
    the bias already rejects all negatives. A perfect one tends to 0.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor. Starts at 10.
        logit_bias: added to every logit; a number or a 0-d tensor. Starts at -10.
        group_ids: (N,) integers; clips with the same id are positives of each other. Default: every clip its own.
        cross: (N, N), audio . text, where it is at hand: `similarity_matrix(audio_embeds, text_embeds)`.

    Returns:
        0-d tensor.

    Raises:
        ValueError: shapes that do not fit, or fewer than two clips.

    >>> pairs = torch.eye(2)
    >>> round(sigmoid_loss(pairs, pairs, logit_scale=2.0, logit_bias=-1.0).item(), 4)  # 2 log(1 + exp(-1))
    0.6265
    """
    logits = logit_scale * products(audio_embeds, text_embeds, cross) + logit_bias
    return sigmoid_contrast(logits, group_ids)


def reweighted_info_nce(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    positive_weight: float | Tensor,
    group_ids: Tensor | None = None,
    cross: Tensor | None = None,
) -> Tensor:
    """InfoNCE whose positive is re-weighted, the "Simple Reweight" baseline [SupCLAP E.4].

    Each direction: L = -(log w + s+) + log(w exp(s+) + sum_- exp(s-)), which scales the positive's probability P+ in
    the gradient. It is there to be compared with: the paper finds it worse than plain InfoNCE.

    A weight of 1 gives `info_nce`; a random model gives 2 log(1 + (N - 1) / w), a perfect one tends to 0.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        positive_weight: w > 0; a number or a 0-d tensor. A learnable one is best kept as its logarithm.
        group_ids: (N,) integers; clips with the same id are positives of each other. Default: every clip its own.
        cross: (N, N), audio . text, where it is at hand: `similarity_matrix(audio_embeds, text_embeds)`.

    Returns:
        0-d tensor.

    Raises:
        ValueError: a number w that is not positive, shapes that do not fit, or fewer than two clips.

    >>> pairs = torch.eye(2)
    >>> round(reweighted_info_nce(pairs, pairs, logit_scale=1.0, positive_weight=1.0).item(), 4)
    0.6265
    """
    if not isinstance(positive_weight, Tensor) and positive_weight <= 0:
        raise ValueError(f"got positive_weight={positive_weight}; it must be positive (1 gives plain InfoNCE)")
    logits = logit_scale * products(audio_embeds, text_embeds, cross)
    log_weight = torch.as_tensor(positive_weight, dtype=logits.dtype, device=logits.device).log()
    logits = logits + log_weight * positive_mask(logits.shape[-1], group_ids, logits.device)
    return softmax_contrast(logits, group_ids) + softmax_contrast(logits.mT, group_ids)
