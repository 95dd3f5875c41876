"""Support Vector Regularisation [SupCLAP 3.1, 3.2, appendices B and D]: the loss, its constraint, and the radius.

An anchor t (a text, say) is displaced by a radius R toward its target a (its clip) and contrasted from there:
t_sup = t + R u, u = (a - t) / d, d = ||a - t||. Text anchors and audio targets give the text-to-audio direction;
exchange the two, with a radius of its own, for the other. Nothing here is needed at inference.

No support vector is ever formed. It is a point on the line through t and a, so that with S = anchors . targets,
A = targets . targets and the ratio r = R / d
    t_sup_i . a_j = (1 - r_i) S_ij + r_i A_ij    and    ||t_sup_i||^2 = 1 - r_i (1 - r_i) d_i^2   (unit norms).

The distance is taken from the difference of the embeddings, which costs as little as normalising them. From S_ii it
would be sqrt(2 - 2 S_ii), whose error near 0 is the square root of the rounding error: 3e-4 in float32, and 0.02 to
0.05 for bfloat16 embeddings (of 1024 to 64 dimensions), whose norms are not quite 1. Pairs closer than the square root
of the machine epsilon (3e-4 in float32, a cosine within 6e-8 of 1) count as coincident: u = 0, t_sup = t, the gradient
is that of InfoNCE.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .contrastive import (
    at_least_float32,
    decoupled_contrast,
    positive_mask,
    products,
    sigmoid_contrast,
    softmax_contrast,
)

Similarity = Literal["cosine", "dot"]


class _Gram(torch.autograd.Function):
    """x x^T, whose gradient (g + g^T) x is one product; automatic differentiation would make two."""

    @staticmethod
    def forward(ctx: Any, embeds: Tensor) -> Tensor:
        ctx.save_for_backward(embeds)
        return embeds @ embeds.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (embeds,) = ctx.saved_tensors
        return (gradient + gradient.mT) @ embeds


def gram_matrix(embeds: Tensor) -> Tensor:
    """Cosine of every row with every row, (..., N, d) to (..., N, N), float32 or wider.

    >>> gram_matrix(torch.eye(2)).equal(torch.eye(2))
    True
    """
    embeds, _ = at_least_float32(embeds, embeds)
    with torch.autocast(embeds.device.type, enabled=False):
        return _Gram.apply(embeds)


def positive_distance(anchors: Tensor, targets: Tensor) -> Tensor:
    """d_i = ||targets_i - anchors_i||, between 0 and 2 for unit norms; (..., N), float32 or wider.

    >>> positive_distance(torch.eye(2), torch.eye(2).flip(0))
    tensor([1.4142, 1.4142])
    """
    anchors, targets = at_least_float32(anchors, targets)
    return torch.linalg.vector_norm(targets - anchors, dim=-1)


def displacement_ratio(distance: Tensor, radius: float | Tensor) -> Tensor:
    """r_i = R_i / d_i: how far along the way to its target each anchor is moved; 0 where the two coincide.

    1 - r_i is the factor by which SVR scales the perpendicular push [SupCLAP eq. 8].

    Args:
        distance: (..., N), from `positive_distance`.
        radius: a number, a 0-d tensor or (..., N).

    Returns:
        (..., N).

    Raises:
        ValueError: a radius of another shape.

    >>> displacement_ratio(torch.tensor([0.0, 0.5]), 0.1)
    tensor([0.0000, 0.2000])
    """
    radius = torch.as_tensor(radius, dtype=distance.dtype, device=distance.device)
    if radius.ndim and radius.shape != distance.shape:
        raise ValueError(
            f"got a radius of shape {tuple(radius.shape)} for pairs of shape {tuple(distance.shape)}; "
            "give one number for all or one per pair"
        )
    coincident = distance <= torch.finfo(distance.dtype).eps ** 0.5
    return radius / distance.masked_fill(coincident, torch.inf)


def displaced_similarity(
    cross: Tensor,
    within: Tensor,
    distance: Tensor,
    radius: float | Tensor,
    similarity: Similarity = "cosine",
    logit_scale: float | Tensor = 1.0,
) -> Tensor:
    """`support_similarity` from matrices one already has (InfoNCE's `cross` serves here too).

    Args:
        cross: S, (..., N, N), anchors . targets.
        within: A, (..., N, N), targets . targets.
        distance: (..., N), from `positive_distance`.
        radius: a number, a 0-d tensor or (..., N).
        similarity: "cosine" or "dot".
        logit_scale: what the result is multiplied by, on the way.

    Returns:
        (..., N, N): entry [i, j] is the similarity of anchor i's support vector to target j.

    Raises:
        ValueError: an unknown similarity or a radius of another shape.

    >>> cross, within, distance = torch.zeros(2, 2), torch.eye(2), torch.tensor([2**0.5, 2**0.5])
    >>> displaced_similarity(cross, within, distance, radius=0.5**0.5, similarity="dot")  # half-way
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"got similarity={similarity!r}; it must be 'cosine' or 'dot'")
    ratio = displacement_ratio(distance, radius)
    strength = logit_scale * torch.ones_like(ratio)
    if similarity == "cosine":
        squared_norm = 1 - ratio * (1 - ratio) * distance.square()
        # Zero only half-way between opposite vectors, where the products are zero as well.
        strength = strength * squared_norm.clamp_min(torch.finfo(ratio.dtype).eps).rsqrt()
    # Everything that belongs to a row is multiplied first: two passes over the matrices, and not five.
    near, far = (strength * (1 - ratio)).unsqueeze(-1), (strength * ratio).unsqueeze(-1)
    return torch.addcmul(near * cross, far, within)


def support_similarity(
    anchors: Tensor,
    targets: Tensor,
    radius: float | Tensor,
    similarity: Similarity = "cosine",
    cross: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
) -> Tensor:
    """Similarity of every anchor's support vector to every target, in the linear form of the module docstring.

    Args:
        anchors: (N, d), unit norm; those that are displaced.
        targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: R, a distance like ||a - t||: a number, a 0-d tensor or (N,).
        similarity: "cosine" re-normalises the support vector, so that R has an optimum, which tends to ||a - t||; "dot"
            does not, as in the paper's derivation [SupCLAP appendix D], and then rewards ever larger radii.
        cross: (N, N), anchors . targets, where it is at hand.
        logit_scale: what the result is multiplied by, on the way.

    Returns:
        (N, N), float32 or wider.

    Raises:
        ValueError: shapes that do not fit, fewer than two pairs, or an unknown similarity.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> support_similarity(texts, audios, radius=2**0.5)  # moved all the way: the audios among themselves
    tensor([[1., 0.],
            [0., 1.]])
    """
    cross, within = at_least_float32(products(anchors, targets, cross), gram_matrix(targets))
    distance = positive_distance(anchors, targets)
    return displaced_similarity(cross, within, distance, radius, similarity, logit_scale)


def support_vector_loss(
    anchors: Tensor,
    targets: Tensor,
    radius: float | Tensor,
    logit_scale: float | Tensor,
    similarity: Similarity = "cosine",
    decoupled: bool = False,
    group_ids: Tensor | None = None,
    cross: Tensor | None = None,
) -> Tensor:
    """The SVR term, one direction [SupCLAP eq. 6]: InfoNCE of the displaced anchors against all targets.

    L = mean_i -log( exp(s(t_sup_i, a_i)) / sum_j exp(s(t_sup_i, a_j)) ), t_sup_i = t_i + R_i u_i, s = logit_scale cos.

    Compared with InfoNCE the push of the negatives along u is unchanged and that across u is scaled by
    1 - R / ||a - t|| (exactly so for `similarity="dot"`, eq. 16). A random model gives log N at R = 0 and less above
    it; a perfect one tends to 0.

    Args:
        anchors: (N, d), unit norm; texts for the text-to-audio direction.
        targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: R, the distance by which anchors move: a number, a 0-d tensor (StaticSVR) or (N,) (DynamicSVR).
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        similarity: of a support vector to a target, "cosine" or "dot"; see `support_similarity`.
        decoupled: leave the positives out of the denominator, as eq. 6 is printed; eq. 3, to which eq. 16 refers, has
            them in.
        group_ids: (N,) integers; targets with the same id are positives of each other's anchors, the target being
            uniform over them. An anchor is always displaced toward its own. Default: every pair its own.
        cross: (N, N), anchors . targets, where it is at hand.

    Returns:
        0-d tensor.

    Raises:
        ValueError: shapes that do not fit, fewer than two pairs, an unknown similarity, or a decoupled row without
            negatives.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> round(support_vector_loss(texts, audios, radius=2**0.5, logit_scale=1.0).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    logits = support_similarity(anchors, targets, radius, similarity, cross, logit_scale)
    return decoupled_contrast(logits, group_ids) if decoupled else softmax_contrast(logits, group_ids)


def support_vector_sigmoid_loss(
    anchors: Tensor,
    targets: Tensor,
    radius: float | Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    similarity: Similarity = "cosine",
    group_ids: Tensor | None = None,
    cross: Tensor | None = None,
) -> Tensor:
    """The SVR term for SigLIP, one direction [SupCLAP tables 1 and 8]: its loss on the displaced anchors.

    L = 1/N sum_ij -log sigmoid(z_ij (logit_scale cos(t_sup_i, a_j) + logit_bias)), z_ij = +1 on positives, else -1.

    A radius of 0 gives `sigmoid_loss`, which has one direction only: there bi-SVR adds two terms to one.

    Args:
        anchors: (N, d), unit norm; texts for the text-to-audio direction.
        targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: R, the distance by which anchors move: a number, a 0-d tensor or (N,).
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        logit_bias: added to every logit; a number or a 0-d tensor.
        similarity: of a support vector to a target, "cosine" or "dot"; see `support_similarity`.
        group_ids: (N,) integers; targets with the same id are positives of each other's anchors.
        cross: (N, N), anchors . targets, where it is at hand.

    Returns:
        0-d tensor.

    Raises:
        ValueError: shapes that do not fit, fewer than two pairs, or an unknown similarity.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> round(support_vector_sigmoid_loss(texts, audios, 2**0.5, logit_scale=2.0, logit_bias=-1.0).item(), 4)
    0.6265
    """
    logits = support_similarity(anchors, targets, radius, similarity, cross, logit_scale) + logit_bias
    return sigmoid_contrast(logits, group_ids)


def radius_constraint(anchors: Tensor, targets: Tensor, radius: float | Tensor) -> Tensor:
    """Penalty of a radius outside [0, ||a - t||], L = mean(relu(R - ||a - t||) + relu(-R)) [SupCLAP appendix B].

    Beyond the target the perpendicular push would be inverted, below 0 magnified. The distance is detached: the term
    trains the radius, not the encoders. 0 for every radius inside the range.

    Args:
        anchors: (N, d), unit norm.
        targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: a number, a 0-d tensor or (N,).

    Returns:
        0-d tensor.

    >>> round(radius_constraint(torch.eye(2), torch.eye(2).flip(0), torch.tensor([1.5142, -0.3])).item(), 4)
    0.2
    """
    distance = positive_distance(anchors.detach(), targets.detach())
    radius = torch.as_tensor(radius, dtype=distance.dtype, device=distance.device)
    return (torch.relu(radius - distance) + torch.relu(-radius)).mean()


class StaticRadius(nn.Module):
    """StaticSVR: one learnable radius for all pairs [SupCLAP 3.2].

    Args:
        init: the radius at the start of training, a distance between unit vectors (0 to 2).

    >>> StaticRadius(init=0.25)(torch.zeros(3, 3)).tolist()
    [0.25, 0.25, 0.25]
    """

    def __init__(self, init: float = 0.1) -> None:
        super().__init__()
        # One element and not 0-d: FSDP shards no scalar parameters.
        self.radius = nn.Parameter(torch.tensor([init]))

    def forward(self, scaled_similarities: Tensor, group_ids: Tensor | None = None) -> Tensor:
        """The same radius for every row of `scaled_similarities` (..., N, N); (..., N)."""
        return self.radius.expand(scaled_similarities.shape[:-1])


class DynamicRadius(nn.Module):
    """DynamicSVR: a three-layer perceptron reads each pair's radius off its row of similarities [SupCLAP 3.2].

    R_i = f([s(t_i, a_i), s(t_i, a_j), ...]): the positive first, then the hardest `num_similarities - 1` negatives. The
    paper's predictor is tied to its batch size, f: R^N -> R; with `num_similarities` = N this is the same. A smaller
    batch is filled up with zeros *before* the hardest are taken: it gets the radius it would get in a full batch whose
    other clips are unrelated (orthogonal), whatever the temperature, and a zero adds nothing to the first layer. A
    larger batch is seen through its hardest negatives.

    The last layer starts at zero with bias `init`, so that training starts from `StaticRadius(init)`.

    Args:
        num_similarities: length of the perceptron's input, the positive included; the training batch size, say.
        hidden_size: width of the two hidden layers.
        order: "sorted" puts the negatives in descending order, so that the radius does not depend on the order of the
            batch; "batch" keeps them as they come.
        init: the radius at the start of training.
        detach_input: do not let the radius steer the encoders.

    Raises:
        ValueError: no room for a negative, or an unknown order.

    >>> DynamicRadius(num_similarities=4)(torch.eye(3)).tolist() == StaticRadius()(torch.eye(3)).tolist()
    True
    """

    def __init__(
        self,
        num_similarities: int,
        hidden_size: int = 64,
        order: Literal["sorted", "batch"] = "sorted",
        init: float = 0.1,
        detach_input: bool = True,
    ) -> None:
        super().__init__()
        if num_similarities < 2:
            raise ValueError(f"got num_similarities={num_similarities}; at least 2, the positive and one negative")
        if order not in ("sorted", "batch"):
            raise ValueError(f"got order={order!r}; it must be 'sorted' or 'batch'")
        self.num_negatives = num_similarities - 1
        self.order = order
        self.detach_input = detach_input
        last = nn.Linear(hidden_size, 1)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, init)
        self.layers = nn.Sequential(
            nn.Linear(num_similarities, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size), nn.ReLU(), last
        )

    def forward(self, scaled_similarities: Tensor, group_ids: Tensor | None = None) -> Tensor:
        """A radius for each row.

        Args:
            scaled_similarities: (..., N, N), logit_scale times anchors . targets, the positives on the diagonal.
            group_ids: (N,) integers; the other positives of a row are no negatives, and count as unrelated clips.

        Returns:
            (..., N), float32 or wider; may be negative or too large, which `radius_constraint` penalises.
        """
        if self.detach_input:
            scaled_similarities = scaled_similarities.detach()
        positive = scaled_similarities.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        rows = torch.cat([positive, self.hardest_negatives(scaled_similarities, group_ids)], dim=-1)
        with torch.autocast(rows.device.type, enabled=False):
            radius = self.layers(rows.to(next(self.parameters()).dtype)).squeeze(-1)
        return radius.to(torch.promote_types(radius.dtype, torch.float32))

    def hardest_negatives(self, scaled_similarities: Tensor, group_ids: Tensor | None = None) -> Tensor:
        """The perceptron's (..., N, num_similarities - 1) negatives, in its order."""
        size, device = scaled_similarities.shape[-1], scaled_similarities.device
        negatives = scaled_similarities.masked_fill(positive_mask(size, group_ids, device), 0.0)
        negatives = negatives.masked_fill(positive_mask(size, None, device), -torch.inf)
        missing = self.num_negatives - (size - 1)
        if missing > 0:
            negatives = nn.functional.pad(negatives, (0, missing))
        hardest = negatives.topk(self.num_negatives, dim=-1)
        if self.order == "sorted":
            return hardest.values
        return negatives.gather(-1, hardest.indices.sort(dim=-1).values)
