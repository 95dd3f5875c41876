"""Optimisation trajectory drift: the forces on a batch's texts, split along and across the pull [SupCLAP 2, C, D].

The text-to-audio half of InfoNCE moves text i by -g_i, g_i = s (sum_j P_ij a_j - a_i), with s = logit_scale and P_ij
the softmax of s t_i . a_j over j. The positive pulls in the direction u_i = (a_i - t_i) / ||a_i - t_i||; the negatives
push with s sum_{j != i} P_ij a_j, whose part across u_i makes the text drift. Exchange the embeddings for the other
half.

Numbers from embeddings alone: those of the loss once more, and one product with the probabilities, P a.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..losses.contrastive import sigmoid_contrast, softmax_contrast
from ..losses.similarity import at_least_float32, positive_mask, similarity_matrix
from ..losses.support_vector import DynamicRadius, Similarity, displacement_ratio, positive_distance, support_vectors


def decompose(force: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Splits each force into its parts along and across a direction of unit norm (or 0); (N, d) each.

    >>> along, across = decompose(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]]))
    >>> along.tolist(), across.tolist()
    ([[0.0, 4.0]], [[3.0, 0.0]])
    """
    along = (force * direction).sum(dim=-1, keepdim=True) * direction
    return along, force - along


def pull_direction(anchors: Tensor, targets: Tensor) -> Tensor:
    """Computes u = (a - t) / ||a - t||, in which each target pulls its anchor, 0 where the two coincide; (N, d).

    >>> pull_direction(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])).tolist()
    [[-1.0, 0.0], [0.0, 0.0]]
    """
    anchors, targets = at_least_float32(anchors, targets)
    return (targets - anchors) * displacement_ratio(positive_distance(anchors, targets), 1.0).unsqueeze(-1)


def contrastive_forces(logits: Tensor, targets: Tensor, logit_scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Computes pull and push, the two terms of the gradient on each anchor [SupCLAP eq. 4]; it moves by their negative.

    Args:
        logits: (N, N), the scaled similarity of anchor i to target j, whose softmax over j weighs the forces.
        targets: (N, d), unit norm.
        logit_scale: 1 / temperature.

    Returns:
        (P+ - 1) a+ / tau and the sum over the negatives of P- a- / tau; (N, d) each.
    """
    negatives = logits.softmax(dim=-1).fill_diagonal_(0)  # (N, N)
    pull = -logit_scale * negatives.sum(dim=-1, keepdim=True) * targets  # P+ - 1 without cancellation

    with torch.autocast(targets.device.type, enabled=False):
        return pull, logit_scale * (negatives @ targets)


def drift_cosine(updates: Tensor, anchors: Tensor, targets: Tensor, literal: bool = False) -> Tensor:
    """Averages the cosine between an anchor's update and the pull of its target [SupCLAP fig. 1]; 1 is no drift.

    Both are projected on the tangent space of the sphere at the anchor, since normalisation takes the radial part of an
    update away. There the direction u toward the target and the pulling force, which the paper writes along a+, are
    one. Without the projection an update that is nothing but pull would score ||a - t|| / 2 against u, less the better
    the model. Anchors that coincide with their target or do not move are left out.

    Args:
        updates: (N, d), minus the gradient with respect to the anchors, of any norm.
        anchors: (N, d), unit norm.
        targets: (N, d), unit norm.
        literal: Whether to leave the projection out and take the cosine with a - t, to the letter of the paper.

    Returns:
        0-d tensor, -1 to 1; 0 if no anchor moves.

    >>> texts, audios = torch.eye(4)[:2], torch.eye(4)[2:]
    >>> drift_cosine(audios, texts, audios)
    tensor(1.)
    """
    updates, anchors = at_least_float32(updates, anchors)
    pull = pull_direction(anchors, targets)
    if not literal:
        updates, pull = decompose(updates, anchors)[1], decompose(pull, anchors)[1]
    movement, pull = _unit(updates), _unit(pull)

    moving = movement.any(dim=-1) & pull.any(dim=-1)
    return (movement * pull).sum() / moving.sum().clamp_min(1)


def _unit(vectors: Tensor) -> Tensor:
    """Gives vectors unit norm; 0 stays 0. The squares of the forces on a solved pair would underflow, unscaled."""
    largest = vectors.abs().amax(dim=-1, keepdim=True)
    return F.normalize(vectors / largest.clamp_min(torch.finfo(vectors.dtype).tiny), dim=-1)


@torch.no_grad()
def drift_statistics(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    radius: float | Tensor | None = None,
    alpha: float = 1.0,
    similarity: Similarity = "cosine",
    decoupled: bool = False,
    logit_bias: float | Tensor | None = None,
) -> dict[str, Tensor]:
    """Measures what drives a batch's texts off the straight way; means over the texts, by name.

    - `drift_cosine`: the function of this name on the update by InfoNCE's text-to-audio half, or by SigLIP's loss where
      there is a bias; `drift_cosine_literal`, to the letter of the paper.
    - `push_parallel_norm`, `push_perpendicular_norm`: InfoNCE's push of all negatives together, along and across u.
    - `distance`: ||a - t||, 0 to 2. `positive_similarity`: the cosine of the pairs.

    And with a radius:
    - `radius_mean`, `radius_std`: the mean and spread of R [SupCLAP fig. 3].
    - `svr_factor_mean`, `svr_factor_std`: those of 1 - R / ||a - t||, by which SVR scales the perpendicular push
      [eq. 8]; 1 where text and audio coincide.
    - `drift_cosine_svr`, `drift_cosine_svr_literal`: the same of that loss and its SVR term [eq. 6, 17, 18].

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        radius: The radius of the text-to-audio direction: a number, a 0-d tensor or (N,). Without one there is no SVR.
        alpha: The weight of the SVR term.
        similarity: That of a support vector to a target, "cosine" or "dot".
        decoupled: Whether the SVR term leaves the positive out of its denominator.
        logit_bias: SigLIP's, a number or a 0-d tensor, where that is the loss.

    Returns:
        0-d tensors by name, on the device of the embeddings (reading one waits for it: do so at logging steps).

    Raises:
        ValueError: The shapes do not fit, or there are fewer than two clips.

    >>> texts, audios = torch.eye(4)[:2], torch.eye(4)[2:]
    >>> statistics = drift_statistics(audios, texts, logit_scale=1.0)
    >>> round(statistics["drift_cosine"].item(), 4), round(statistics["push_perpendicular_norm"].item(), 4)
    (0.7071, 0.5)
    """
    cosines = similarity_matrix(text_embeds, audio_embeds)  # (N, N), [i, j] is text i, audio j
    audio_embeds, text_embeds = at_least_float32(audio_embeds, text_embeds)
    distance = positive_distance(text_embeds, audio_embeds)  # (N,)
    pull, push = contrastive_forces(logit_scale * cosines, audio_embeds, logit_scale)
    along, across = decompose(push, pull_direction(text_embeds, audio_embeds))

    def update(loss: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad(), torch.autocast(audio_embeds.device.type, enabled=False):
            texts = text_embeds.detach().requires_grad_()
            return -torch.autograd.grad(len(texts) * loss(texts), texts)[0]

    def contrast(anchors: Tensor, decoupled: bool = False) -> Tensor:
        logits = logit_scale * anchors @ audio_embeds.T
        if logit_bias is not None:
            return sigmoid_contrast(logits + logit_bias)
        return softmax_contrast(logits, decoupled=decoupled)

    def support(texts: Tensor) -> Tensor:
        assert radius is not None
        return contrast(support_vectors(texts, audio_embeds, radius, similarity), decoupled)

    updates = {"drift_cosine": -(pull + push) if logit_bias is None else update(contrast)}
    if radius is not None:
        updates["drift_cosine_svr"] = updates["drift_cosine"] + alpha * update(support)

    statistics = {
        "push_parallel_norm": along.norm(dim=-1).mean(),
        "push_perpendicular_norm": across.norm(dim=-1).mean(),
        "distance": distance.mean(),
        "positive_similarity": cosines.diagonal().mean(),
    }
    for name, own in updates.items():
        statistics[name] = drift_cosine(own, text_embeds, audio_embeds)
        statistics[f"{name}_literal"] = drift_cosine(own, text_embeds, audio_embeds, literal=True)
    if radius is None:
        return statistics

    factor = 1 - displacement_ratio(distance, radius)
    radius = torch.as_tensor(radius, dtype=distance.dtype, device=distance.device).expand_as(distance)
    return statistics | {
        "radius_mean": radius.mean(),
        "radius_std": radius.std(correction=0),
        "svr_factor_mean": factor.mean(),
        "svr_factor_std": factor.std(correction=0),
    }


@torch.no_grad()
def radius_by_hard_negatives(
    radius: DynamicRadius,
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    group_ids: Tensor | None = None,
    counts: Sequence[int] = (6, 12, 18),
    pool_size: int = 720,
) -> dict[str, Tensor]:
    """The mean radius of texts in batches with the K hardest of many negatives [SupCLAP E.8, fig. 7].

    Each text meets its own clip, the K clips of the pool that are most similar to it, and for the rest of the batch
    other clips of the pool, drawn by their ranks, always the same ones.

    Args:
        radius: The predictor of the texts' radii; a batch has as many clips as it sees.
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature.
        group_ids: (N,) integers; clips of a text's own group are none of its negatives.
        counts: The values of K; those that do not fit into a batch are left out.
        pool_size: How many pairs are looked at, the first ones, and negatives chosen from.

    Returns:
        "radius_hard_6" and so on, 0-d; nothing where the pool does not fill a batch.
    """
    audio_embeds, text_embeds = at_least_float32(audio_embeds[:pool_size], text_embeds[:pool_size])
    groups = None if group_ids is None else group_ids[:pool_size]
    own = positive_mask(len(audio_embeds), groups, audio_embeds.device)
    fewest = int((~own).sum(dim=-1).min())
    if fewest < radius.num_negatives:
        return {}

    scaled = logit_scale * text_embeds @ audio_embeds.T
    positive = scaled.diagonal().unsqueeze(-1)  # (N, 1)
    ranked = scaled.masked_fill(own, -torch.inf).sort(dim=-1, descending=True).values

    radii = {}
    for count in counts:
        room = radius.num_negatives - count
        if room < 0:
            continue
        order = torch.randperm(fewest - count, generator=torch.Generator().manual_seed(0))
        ranks = count + order[:room].sort().values  # so that the hardest stay first
        negatives = torch.cat([ranked[:, :count], ranked[:, ranks.to(ranked.device)]], dim=-1)
        seen = torch.cat([positive, negatives], dim=-1)  # (N, num_similarities)
        radii[f"radius_hard_{count}"] = radius.layers(seen.to(next(radius.layers.parameters()).dtype)).mean()
    return radii


def similarity_histogram(cosines: Tensor, bins: int = 40) -> dict[str, Any]:
    """Counts the positive pairs by their cosine, (N,) [SupCLAP fig. 4]; training moves them to the right.

    Gives the range of the bins, which have one width, "low" and "high", and their "counts", as JSON takes them. By
    rounding, a cosine may be 1.0000001, and counts as 1.

    >>> similarity_histogram(torch.tensor([-0.4, 0.9, 1.0, 1.0000001]), bins=4)
    {'low': -1.0, 'high': 1.0, 'counts': [0, 1, 0, 3]}
    """
    counts = torch.histc(cosines.clamp(-1, 1).cpu(), bins, -1, 1)
    return {"low": -1.0, "high": 1.0, "counts": counts.int().tolist()}
