"""Drift statistics: how far the negatives push a text off the direct path to its audio (SupCLAP section 2, C, D).

In the text-to-audio direction, InfoNCE moves text i by -g_i, where g_i = s (sum_j P_ij a_j - a_i), s = logit_scale, and
P_ij is the softmax of s t_i . a_j over j. The positive pulls the text in the direction u_i = (a_i - t_i) /
||a_i - t_i||. The negatives push the text by -s sum_{j != i} P_ij a_j. The component of this push perpendicular to u_i
causes the drift. For the audio-to-text direction, exchange the embeddings.

The statistics cost about as much as the loss, plus one matrix product P a.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..losses.contrastive import sigmoid_contrast, softmax_contrast
from ..losses.similarity import at_least_float32, positive_mask, similarity_matrix
from ..losses.support_vector import DynamicRadius, Similarity, displacement_ratio, positive_distance, support_vectors

Along = Literal["tangent", "difference", "target"]
"""Readings of the direction of the pull (see `drift_cosine`)."""


def decompose(force: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Split each force into components parallel and perpendicular to a unit vector.

    All shapes are (N, d). If the vector is 0, the parallel component is 0.

    >>> parallel, perpendicular = decompose(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]]))
    >>> parallel.tolist(), perpendicular.tolist()
    ([[0.0, 4.0]], [[3.0, 0.0]])
    """
    parallel = (force * direction).sum(dim=-1, keepdim=True) * direction
    return parallel, force - parallel


def pull_direction(anchors: Tensor, targets: Tensor) -> Tensor:
    """Compute the unit vector from each anchor to its target, (target - anchor) / ||target - anchor||.

    All shapes are (N, d). The vector is 0 if the anchor and the target are equal.

    >>> pull_direction(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])).tolist()
    [[-1.0, 0.0], [0.0, 0.0]]
    """
    anchors, targets = at_least_float32(anchors, targets)
    return (targets - anchors) * displacement_ratio(positive_distance(anchors, targets), 1.0).unsqueeze(-1)


def contrastive_forces(logits: Tensor, targets: Tensor, logit_scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Compute the two terms of the InfoNCE gradient of each anchor: the pull and the push, each (N, d).

    The pull is (P+ - 1) a+ / tau, and the push is sum P- a- / tau (SupCLAP eq. 4). P is the softmax of `logits` (N, N)
    over the targets a, + is the positive, and - are the negatives. An update moves the anchor against the gradient.
    """
    negatives = logits.softmax(dim=-1).fill_diagonal_(0)  # (N, N)
    # P+ - 1 without cancellation
    pull = -logit_scale * negatives.sum(dim=-1, keepdim=True) * targets

    with torch.autocast(targets.device.type, enabled=False):
        return pull, logit_scale * (negatives @ targets)


def distance_change(gradient: Tensor, anchors: Tensor, targets: Tensor, learning_rate: float) -> tuple[Tensor, Tensor]:
    """Compute the two terms by which a step of gradient descent changes the distance of each pair (SupCLAP eq. 12).

    An anchor t moves to t - learning_rate F. Its gradient F has a component F_parallel in the direction of its target
    a, and a component F_perpendicular. The squared distance ||a - t||^2 then changes by the sum of two terms:

    - progress: -learning_rate (2t - 2a - learning_rate F_parallel) . F_parallel, negative if the pair moves together.
    - penalty: learning_rate^2 ||F_perpendicular||^2, never negative.

    Args:
        gradient: F, (N, d).
        anchors, targets: (N, d), unit norm.
        learning_rate: Step size.

    Returns:
        Progress and penalty, each (N,).

    >>> text, audio = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    >>> progress, penalty = distance_change(torch.tensor([[1.0, 2.0]]), text, audio, learning_rate=0.5)
    >>> (text - 0.5 * torch.tensor([[1.0, 2.0]]) - audio).square().sum().item() - 4.0  # from a distance of 2
    -0.75
    >>> progress.item(), penalty.item()
    (-1.75, 1.0)
    """
    parallel, perpendicular = decompose(gradient, pull_direction(anchors, targets))
    slope = 2 * (anchors - targets) - learning_rate * parallel
    progress = -learning_rate * (slope * parallel).sum(dim=-1)
    return progress, learning_rate**2 * perpendicular.square().sum(dim=-1)


def drift_cosine(updates: Tensor, anchors: Tensor, targets: Tensor, along: Along = "tangent") -> Tensor:
    """Compute the mean cosine similarity between each anchor's update and the pull of its target (SupCLAP fig. 1).

    The paper does not define the direction of the pull in its figure. There are three readings, and SVR can raise the
    cosine in one and lower it in another:

    - "tangent": From the anchor to the target along the unit sphere. Both vectors are projected onto the tangent space
      at the anchor, because normalization removes the radial part of an update. It is the default, because the cosine
      of an update by the pull alone is then 1.
    - "difference": u, from the anchor straight to the target (SupCLAP 2.1.1). An update by F_pull alone has a cosine of
      ||target - anchor|| / 2 with u, which is lower for better models.
    - "target": The target itself, the direction of F_pull (SupCLAP eq. 4).

    The mean excludes anchors with an update of 0 and, except for "target", anchors equal to their targets.

    Args:
        updates: (N, d), negative gradient with respect to the anchors, with any norm.
        anchors: (N, d), unit norm.
        targets: (N, d), unit norm.
        along: Direction of the pull.

    Returns:
        0-d tensor, -1 to 1. 1 means no drift. It is 0 if no anchor moves.

    >>> texts, audios = torch.eye(4)[:2], torch.eye(4)[2:]
    >>> drift_cosine(audios, texts, audios)
    tensor(1.)
    """
    updates, anchors = at_least_float32(updates, anchors)
    pull = targets.to(anchors.dtype) if along == "target" else pull_direction(anchors, targets)
    if along == "tangent":
        updates, pull = decompose(updates, anchors)[1], decompose(pull, anchors)[1]

    # Dividing by the largest component first avoids underflow for tiny forces.
    largest = updates.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(updates.dtype).tiny)
    movement, pull = F.normalize(updates / largest, dim=-1), F.normalize(pull, dim=-1)
    moving = movement.any(dim=-1) & pull.any(dim=-1)
    return (movement * pull).sum() / moving.sum().clamp_min(1)


def drift_cosines(name: str, updates: Tensor, anchors: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Compute `drift_cosine` in its three readings, as `name`, `name_difference` and `name_target`."""
    cosines = {name: drift_cosine(updates, anchors, targets)}
    cosines[f"{name}_difference"] = drift_cosine(updates, anchors, targets, "difference")
    cosines[f"{name}_target"] = drift_cosine(updates, anchors, targets, "target")
    return cosines


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
    learning_rate: float = 1.0,
) -> dict[str, Tensor]:
    """Compute drift statistics of a batch, `{name: 0-d tensor}`, averaged over its texts.

    Here t is a text embedding, a its audio embedding, u the unit vector from t to a, and R the radius.

    - `drift_cosine`, `drift_cosine_difference`, `drift_cosine_target`: Result of the function `drift_cosine`, in its
      three readings, for the update by text-to-audio InfoNCE, or by the SigLIP loss if a bias is passed.
    - `push_parallel_norm`, `push_perpendicular_norm`: Norms of the InfoNCE push, summed over the negatives, parallel
      and perpendicular to u.
    - `ideal_progress`, `noise_penalty`: Mean change of the squared distance of a pair by one step of `learning_rate` on
      its text, along u and perpendicular to it (`distance_change`). Below 0 the pair moves together.
    - `distance`: ||a - t||, 0 to 2. `positive_similarity`: Cosine similarity of the positive pairs.

    If a radius is passed, the dict also contains:
    - `radius_mean`, `radius_std`: Mean and standard deviation of R (SupCLAP fig. 3).
    - `svr_factor_mean`, `svr_factor_std`: Mean and standard deviation of 1 - R / ||a - t||, the factor by which SVR
      scales the perpendicular push (SupCLAP eq. 8). The factor is 1 for pairs with equal embeddings.
    - `drift_cosine_svr`, `drift_cosine_svr_difference`, `drift_cosine_svr_target`: The same for the loss with the SVR
      term (SupCLAP eq. 6, 17, 18).

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0.
        radius: Text-to-audio radius: a number, a 0-d tensor or (N,). None: no SVR.
        logit_bias: SigLIP bias. None: the loss is InfoNCE.
        learning_rate: Step size of `ideal_progress` and `noise_penalty`.

    `alpha`, `similarity` and `decoupled` are the same as in `SupportVectorRegularizer`.

    >>> texts, audios = torch.eye(4)[:2], torch.eye(4)[2:]
    >>> statistics = drift_statistics(audios, texts, logit_scale=1.0)
    >>> round(statistics["drift_cosine"].item(), 4), round(statistics["push_perpendicular_norm"].item(), 4)
    (0.7071, 0.5)
    """
    # (N, N), [i, j] is text i, audio j
    cosines = similarity_matrix(text_embeds, audio_embeds)
    audio_embeds, text_embeds = at_least_float32(audio_embeds, text_embeds)
    distance = positive_distance(text_embeds, audio_embeds)  # (N,)
    pull, push = contrastive_forces(logit_scale * cosines, audio_embeds, logit_scale)
    parallel, perpendicular = decompose(push, pull_direction(text_embeds, audio_embeds))

    def update(loss: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad(), torch.autocast(audio_embeds.device.type, enabled=False):
            texts = text_embeds.detach().requires_grad_()
            return -torch.autograd.grad(len(texts) * loss(texts), texts)[0]

    def contrast(anchors: Tensor, decoupled: bool = False) -> Tensor:
        logits = logit_scale * anchors @ audio_embeds.T
        if logit_bias is not None:
            return sigmoid_contrast(logits, logit_bias).mean()
        return softmax_contrast(logits, decoupled=decoupled).mean()

    def svr_term(texts: Tensor) -> Tensor:
        assert radius is not None
        return contrast(support_vectors(texts, audio_embeds, radius, similarity), decoupled)

    updates = {"drift_cosine": -(pull + push) if logit_bias is None else update(contrast)}
    if radius is not None:
        updates["drift_cosine_svr"] = updates["drift_cosine"] + alpha * update(svr_term)

    statistics = {
        "push_parallel_norm": parallel.norm(dim=-1).mean(),
        "push_perpendicular_norm": perpendicular.norm(dim=-1).mean(),
        "distance": distance.mean(),
        "positive_similarity": cosines.diagonal().mean(),
    }
    for name, movement in updates.items():
        statistics |= drift_cosines(name, movement, text_embeds, audio_embeds)
    progress, penalty = distance_change(-updates["drift_cosine"], text_embeds, audio_embeds, learning_rate)
    statistics |= {"ideal_progress": progress.mean(), "noise_penalty": penalty.mean()}
    return statistics if radius is None else statistics | radius_statistics(text_embeds, audio_embeds, radius)


def radius_statistics(anchors: Tensor, targets: Tensor, radius: float | Tensor) -> dict[str, Tensor]:
    """Compute the mean and standard deviation of the radius and of the SVR factor (see `drift_statistics`).

    `anchors` and `targets` are (N, d), and `radius` is a number, a 0-d tensor or (N,).
    """
    distance = positive_distance(anchors, targets)
    factor = 1 - displacement_ratio(distance, radius)
    radius = torch.as_tensor(radius, dtype=distance.dtype, device=distance.device).expand_as(distance)
    return {
        "radius_mean": radius.mean(),
        "radius_std": radius.std(correction=0),
        "svr_factor_mean": factor.mean(),
        "svr_factor_std": factor.std(correction=0),
    }


@torch.no_grad()
def perpendicular_components(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    batch_size: int,
    group_ids: Tensor | None = None,
    num_batches: int = 32,
    pool_size: int = 720,
) -> dict[str, Tensor]:
    """Separate the perpendicular push into its global and its local component (SupCLAP 2.1.1, fig. 2, C.2).

    For each text, batches of random negatives are drawn from a pool, with a fixed seed. The push of each batch has a
    component perpendicular to the direction from the text to its audio. The global component is its mean over the
    batches, which pushes the text aside in all of them. The local component is the deviation of a batch from this mean.
    The mean squared norm of the component is the sum of the squares of both.

    Args:
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature.
        batch_size: Number of clips in a batch, including the positive.
        group_ids: (N,) integers; clips with the same id as a text are not its negatives.
        num_batches: Number B of batches for each text. The square of the global norm is overestimated by 1 / B of the
            square of the local one.
        pool_size: Number of pairs in the pool, drawn with a fixed seed; all pairs if there are fewer.

    Returns:
        `{"perpendicular_global": norm of the mean, "perpendicular_local": root mean square deviation}`, 0-d tensors,
        averaged over the texts. Empty if the pool has too few negatives for a batch.
    """
    audio_embeds, text_embeds, positives, min_negatives = _draw_pool(audio_embeds, text_embeds, group_ids, pool_size)
    if min_negatives < batch_size - 1:
        return {}

    logits = logit_scale * text_embeds @ audio_embeds.T  # (N, N)
    own = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    direction = pull_direction(text_embeds, audio_embeds)
    generator = torch.Generator().manual_seed(0)
    total, square = torch.zeros_like(text_embeds), torch.zeros_like(text_embeds[:, 0])
    for _ in range(num_batches):
        keys = torch.rand(logits.shape, generator=generator).to(logits.device).masked_fill(positives, torch.inf)
        drawn = keys.topk(batch_size - 1, dim=-1, largest=False).indices
        is_in_batch = own.scatter(1, drawn, True)
        _, push = contrastive_forces(logits.masked_fill(~is_in_batch, -torch.inf), audio_embeds, logit_scale)
        _, perpendicular = decompose(push, direction)
        total += perpendicular
        square += perpendicular.square().sum(dim=-1)

    mean = total / num_batches
    variance = (square / num_batches - mean.square().sum(dim=-1)).clamp_min(0)
    return {"perpendicular_global": mean.norm(dim=-1).mean(), "perpendicular_local": variance.sqrt().mean()}


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
    """Compute the mean text-to-audio radius as a function of the number of hard negatives (SupCLAP E.8, fig. 7).

    For each text, a batch is simulated. It contains the text's own clip, the K most similar negatives of a pool, and
    random negatives from the rest of the pool. The similarity ranks of the random negatives are drawn with a fixed
    seed, and are the same for all texts.

    Args:
        radius: Text-to-audio radius predictor. A simulated batch has as many clips as the predictor has inputs.
        audio_embeds: (N, d), unit norm.
        text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature.
        group_ids: (N,) integers; clips with the same id as a text are not its negatives.
        counts: Values of K. Values larger than the number of negatives in a batch are skipped.
        pool_size: Number of pairs in the pool, drawn with a fixed seed; all pairs if there are fewer.

    Returns:
        `{"radius_hard_K": 0-d tensor}` for each K. Empty if the pool has too few negatives for a batch.
    """
    audio_embeds, text_embeds, positives, min_negatives = _draw_pool(audio_embeds, text_embeds, group_ids, pool_size)
    if min_negatives < radius.num_negatives:
        return {}

    scaled = logit_scale * text_embeds @ audio_embeds.T
    positive = scaled.diagonal().unsqueeze(-1)  # (N, 1)
    ranked = scaled.masked_fill(positives, -torch.inf).sort(dim=-1, descending=True).values

    radii = {}
    for count in counts:
        num_random = radius.num_negatives - count
        if num_random < 0:
            continue
        order = torch.randperm(min_negatives - count, generator=torch.Generator().manual_seed(0))
        ranks = count + order[:num_random].sort().values  # sorted: the hardest first
        negatives = torch.cat([ranked[:, :count], ranked[:, ranks.to(ranked.device)]], dim=-1)
        if radius.order == "batch":
            mixed = torch.randperm(radius.num_negatives, generator=torch.Generator().manual_seed(1))
            negatives = negatives[:, mixed.to(negatives.device)]
        inputs = torch.cat([positive, negatives], dim=-1)  # (N, num_similarities)
        radii[f"radius_hard_{count}"] = radius.predict(inputs).mean()
    return radii


def _draw_pool(
    audio_embeds: Tensor, text_embeds: Tensor, group_ids: Tensor | None, size: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return `size` random pairs, drawn with a fixed seed, as at least float32.

    Also return their mask of positives (size, size), and the least number of negatives of a text.
    """
    count = len(audio_embeds)
    drawn = torch.arange(count)
    if count > size:
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:size]
    drawn = drawn.to(audio_embeds.device)
    audio, text = at_least_float32(audio_embeds[drawn], text_embeds[drawn])
    positives = positive_mask(len(drawn), None if group_ids is None else group_ids[drawn], drawn.device)
    return audio, text, positives, int((~positives).sum(dim=-1).min())


def similarity_histogram(cosines: Tensor, bins: int = 40) -> dict[str, Any]:
    """Compute a JSON-serializable histogram of the cosine similarities (N,) of positive pairs (SupCLAP fig. 4).

    The bins from "low" to "high" have the same width. Cosines above 1 by rounding count as 1.

    >>> similarity_histogram(torch.tensor([-0.4, 0.9, 1.0, 1.0000001]), bins=4)
    {'low': -1.0, 'high': 1.0, 'counts': [0, 1, 0, 3]}
    """
    counts = torch.histc(cosines.clamp(-1, 1).cpu(), bins, -1, 1)
    return {"low": -1.0, "high": 1.0, "counts": counts.int().tolist()}
