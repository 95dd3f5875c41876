"""Support Vector Regularisation [SupCLAP 3.1, 3.2, appendices B and D]: the loss, its constraint, and the radius.

An anchor t (a text, say) is displaced by a radius R toward its target a (its clip) and contrasted from there:
t_sup = t + R u, u = (a - t) / d, d = ||a - t||. Text anchors and audio targets give the text-to-audio direction;
exchange the two, with a radius of its own, for the other. Nothing here is needed at inference.

A support vector is a point on the line through t and a, so that with S = anchors . targets, A = targets . targets and
the ratio r = R / d
    t_sup_i . a_j = (1 - r_i) S_ij + r_i A_ij    and    ||t_sup_i||^2 = 1 - r_i (1 - r_i) d_i^2   (unit norms).

The distance is taken from the difference of the embeddings, which costs as little as normalising them. From S_ii it
would be sqrt(2 - 2 S_ii), whose error near 0 is the square root of the rounding error: 3e-4 in float32, and 0.02 to
0.05 for bfloat16 embeddings (of 1024 to 64 dimensions), whose norms are not quite 1. Pairs closer than the square root
of the machine epsilon (3e-4 in float32, a cosine within 6e-8 of 1) count as coincident: u = 0, t_sup = t, the gradient
is that of InfoNCE.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from .contrastive import sigmoid_contrast, softmax_contrast
from .fused import FEW_ROWS, displaced_contrast
from .similarity import at_least_float32, check_pairs, positive_mask, similarity_matrix
from .tiles import checkpoint_tiles, pairs_of_batches, tiled_row_contrast, tiled_sigmoid_contrast

Similarity = Literal["cosine", "dot"]


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
        radius: A number, a 0-d tensor or (..., N).

    Returns:
        (..., N).

    Raises:
        ValueError: The radius has another shape.

    >>> displacement_ratio(torch.tensor([0.0, 0.5]), 0.1)
    tensor([0.0000, 0.2000])
    """
    radius = torch.as_tensor(radius, dtype=distance.dtype, device=distance.device)
    if radius.ndim and radius.shape != distance.shape:
        raise ValueError(
            f"got a radius of shape {tuple(radius.shape)} for pairs of shape {tuple(distance.shape)}; "
            "give one number for all or one per pair"
        )
    return radius / nn.functional.threshold(distance, torch.finfo(distance.dtype).eps ** 0.5, torch.inf)


def displacement(distance: Tensor, radius: float | Tensor, similarity: Similarity = "cosine") -> tuple[Tensor, Tensor]:
    """The support vectors as sums of the embeddings, near_i anchors_i + far_i targets_i.

    Args:
        distance: (..., N), from `positive_distance`.
        radius: R, a distance like ||a - t||: a number, a 0-d tensor or (..., N).
        similarity: "cosine" re-normalises the support vectors, "dot" does not; see `support_similarity`.

    Returns:
        The factors `near` and `far`, (..., N) each.

    Raises:
        ValueError: The similarity is unknown, or the radius has another shape.

    >>> displacement(torch.tensor([2**0.5]), radius=0.5**0.5, similarity="dot")  # half-way
    (tensor([0.5000]), tensor([0.5000]))
    """
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"got similarity={similarity!r}; it must be 'cosine' or 'dot'")

    ratio = displacement_ratio(distance, radius)
    if similarity == "dot":
        return 1 - ratio, ratio

    moved = ratio * distance  # the radius, but 0 where the two coincide
    squared_norm = 1 - moved * (distance - moved)
    # Zero only half-way between opposite vectors, where the products are zero as well.
    inverse_norm = squared_norm.clamp_min(torch.finfo(ratio.dtype).eps).rsqrt()
    far = inverse_norm * ratio
    return inverse_norm - far, far


def support_similarity(
    anchors: Tensor, targets: Tensor, radius: float | Tensor, similarity: Similarity = "cosine"
) -> Tensor:
    """Similarity of every anchor's support vector to every target.

    Args:
        anchors: (N, d), unit norm; those that are displaced.
        targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: R, a distance like ||a - t||: a number, a 0-d tensor or (N,).
        similarity: "cosine" re-normalises the support vector, so that R has an optimum, which tends to ||a - t||; "dot"
            does not, as in the paper's derivation [SupCLAP appendix D], and then rewards ever larger radii.

    Returns:
        (N, N), float32 or wider.

    Raises:
        ValueError: The shapes do not fit, there are fewer than two pairs, or the similarity is unknown.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> support_similarity(texts, audios, radius=2**0.5)  # moved all the way: the audios among themselves
    tensor([[1., 0.],
            [0., 1.]])
    """
    return similarity_matrix(_support_vectors(anchors, targets, radius, similarity), targets)


def support_vector_contrast(
    cross: Tensor,
    distance: Tensor,
    targets: Tensor,
    radius: float | Tensor,
    logit_scale: float | Tensor,
    similarity: Similarity = "cosine",
    decoupled: bool = False,
    group_ids: Tensor | None = None,
) -> Tensor:
    """`support_vector_loss` where the products of anchors and targets are at hand, as InfoNCE has them.

    Args:
        cross: (..., N, N), anchors . targets: `similarity_matrix(anchors, targets)`.
        distance: (..., N), from `positive_distance`; of both directions the same.
        targets: As in `support_vector_loss`, like all that follows; (..., N, d).
        radius: A number, a 0-d tensor or (..., N).
        logit_scale: A number or a 0-d tensor.
        similarity: "cosine" or "dot".
        decoupled: Whether the positives are left out of the denominator.
        group_ids: (N,) integers.

    Returns:
        0-d tensor.
    """
    near, far = displacement(distance, radius, similarity)
    if 2 * cross.shape[-1] <= FEW_ROWS and not decoupled:  # it makes more of a row than InfoNCE does
        within = similarity_matrix(targets, targets)
        rows = torch.addcmul(near.unsqueeze(-1) * cross, far.unsqueeze(-1), within)
        return softmax_contrast(logit_scale * rows, group_ids)
    return displaced_contrast(cross, targets, near, far, logit_scale, group_ids, decoupled)


def support_vector_loss(
    anchors: Tensor,
    targets: Tensor,
    radius: float | Tensor,
    logit_scale: float | Tensor,
    similarity: Similarity = "cosine",
    decoupled: bool = False,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
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
        similarity: That of a support vector to a target, "cosine" or "dot"; see `support_similarity`.
        decoupled: Whether the positives are left out of the denominator, as eq. 6 is printed; eq. 3, to which eq. 16
            refers, has them in.
        group_ids: (N,) integers; targets with the same id are positives of each other's anchors, the target being
            uniform over them. An anchor is always displaced toward its own. By default every pair is its own.
        chunk_size: So many rows of the similarities are made at a time, as in `info_nce`.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not fit, there are fewer than two pairs, the similarity is unknown, or a decoupled
            row has no negative.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> round(support_vector_loss(texts, audios, radius=2**0.5, logit_scale=1.0).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    if chunk_size is None:
        cross = similarity_matrix(anchors, targets)
        distance = positive_distance(anchors, targets)
        return support_vector_contrast(cross, distance, targets, radius, logit_scale, similarity, decoupled, group_ids)
    supports = _support_vectors(anchors, targets, radius, similarity)
    return tiled_row_contrast(supports, targets, logit_scale, group_ids, decoupled, chunk_size)


def support_vector_sigmoid_loss(
    anchors: Tensor,
    targets: Tensor,
    radius: float | Tensor,
    logit_scale: float | Tensor,
    logit_bias: float | Tensor,
    similarity: Similarity = "cosine",
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The SVR term for SigLIP, one direction [SupCLAP tables 1 and 8]: its loss on the displaced anchors.

    L = 1/N sum_ij -log sigmoid(z_ij (logit_scale cos(t_sup_i, a_j) + logit_bias)), z_ij = +1 on positives, else -1.

    A radius of 0 gives `sigmoid_loss`, which has one direction only: there bi-SVR adds two terms to one.

    Args:
        anchors: (N, d), unit norm; texts for the text-to-audio direction.
        targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: R, the distance by which anchors move: a number, a 0-d tensor or (N,).
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        logit_bias: The number added to every logit, or a 0-d tensor.
        similarity: That of a support vector to a target, "cosine" or "dot"; see `support_similarity`.
        group_ids: (N,) integers; targets with the same id are positives of each other's anchors.
        chunk_size: So many rows of the similarities are made at a time, as in `info_nce`.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not fit, there are fewer than two pairs, or the similarity is unknown.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> round(support_vector_sigmoid_loss(texts, audios, 2**0.5, logit_scale=2.0, logit_bias=-1.0).item(), 4)
    0.6265
    """
    if chunk_size is None:
        logits = logit_scale * support_similarity(anchors, targets, radius, similarity) + logit_bias
        return sigmoid_contrast(logits, group_ids)
    supports = _support_vectors(anchors, targets, radius, similarity)
    return tiled_sigmoid_contrast(supports, targets, logit_scale, logit_bias, group_ids, chunk_size)


def _support_vectors(anchors: Tensor, targets: Tensor, radius: float | Tensor, similarity: Similarity) -> Tensor:
    """(..., N, d), where the products that the linear form shares are not at hand, or are too few to matter."""
    check_pairs(anchors, targets)
    anchors, targets = at_least_float32(anchors, targets)
    near, far = displacement(positive_distance(anchors, targets), radius, similarity)
    return torch.addcmul(near.unsqueeze(-1) * anchors, far.unsqueeze(-1), targets)


def radius_constraint(anchors: Tensor, targets: Tensor, radius: float | Tensor) -> Tensor:
    """Penalty of a radius outside [0, ||a - t||], L = mean(relu(R - ||a - t||) + relu(-R)) [SupCLAP appendix B].

    Beyond the target the perpendicular push would be inverted, below 0 magnified. The distance is detached: the term
    trains the radius, not the encoders. 0 for every radius inside the range.

    Args:
        anchors: (N, d), unit norm.
        targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: A number, a 0-d tensor or (N,).

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
        init: The radius at the start of training, a distance between unit vectors (0 to 2).

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

    def in_tiles(
        self,
        anchors: Tensor,
        targets: Tensor,
        logit_scale: float | Tensor,
        group_ids: Tensor | None = None,
        chunk_size: int = 1024,
    ) -> Tensor:
        """The same radius for each pair of (..., N, d) embeddings; (..., N)."""
        return self.radius.expand(torch.broadcast_shapes(anchors.shape, targets.shape)[:-1])


class DynamicRadius(nn.Module):
    """DynamicSVR: a three-layer perceptron reads each pair's radius off its row of similarities [SupCLAP 3.2].

    R_i = f([s(t_i, a_i), s(t_i, a_j), ...]): the positive first, then the hardest `num_similarities - 1` negatives. The
    paper's predictor is tied to its batch size, f: R^N -> R; with `num_similarities` = N this is the same. A smaller
    batch is filled up with zeros *before* the hardest are taken: it gets the radius it would get in a full batch whose
    other clips are unrelated (orthogonal), whatever the temperature, and a zero adds nothing to the first layer. A
    larger batch is seen through its hardest negatives.

    The last layer starts at zero with bias `init`, so that training starts from `StaticRadius(init)`.

    Args:
        num_similarities: The length of the perceptron's input, the positive included; the training batch size, say.
        hidden_size: The width of the two hidden layers.
        order: "sorted" puts the negatives in descending order, so that the radius does not depend on the order of the
            batch; "batch" keeps them as they come.
        init: The radius at the start of training.
        detach_input: Whether to keep the radius from steering the encoders.

    Raises:
        ValueError: There is no room for a negative, or the order is unknown.

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
        return self._radius(self._seen(scaled_similarities, 0, group_ids))

    def in_tiles(
        self,
        anchors: Tensor,
        targets: Tensor,
        logit_scale: float | Tensor,
        group_ids: Tensor | None = None,
        chunk_size: int = 1024,
    ) -> Tensor:
        """`forward` from embeddings whose similarities are made `chunk_size` rows at a time.

        Args:
            anchors: (..., N, d), unit norm.
            targets: (..., N, d), unit norm.
            logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
            group_ids: (N,) integers, as in `forward`.
            chunk_size: How many rows of similarities exist at a time.

        Returns:
            (..., N), as from `forward`.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach_input):
            inputs = []
            for own_anchors, own_targets in pairs_of_batches(anchors, targets):

                def seen(rows: slice, first: Tensor = own_anchors, second: Tensor = own_targets) -> Tensor:
                    return self._seen(logit_scale * first[rows] @ second.mT, rows.start, group_ids)

                inputs.append(torch.cat(checkpoint_tiles(seen, len(own_anchors), chunk_size)))

        radius = self._radius(torch.stack(inputs))  # (batches, N, num_similarities) -> (batches, N)
        return radius.reshape(torch.broadcast_shapes(anchors.shape, targets.shape)[:-1])

    def _seen(self, scaled: Tensor, start: int, group_ids: Tensor | None) -> Tensor:
        """What the perceptron sees of n rows of similarities, the first being row `start`: (..., n, N) to its input."""
        size, device = scaled.shape[-1], scaled.device
        positive = scaled.diagonal(start, -2, -1).unsqueeze(-1)
        rows = slice(start, start + scaled.shape[-2])

        negatives = scaled
        if group_ids is not None:
            negatives = negatives.masked_fill(positive_mask(size, group_ids, device)[rows], 0.0)
        missing = self.num_negatives - (size - 1)
        if missing > 0:
            negatives = nn.functional.pad(negatives, (0, missing))

        # One more than wanted: the positive is then left out where it is among them, and the last where it is not.
        hardest = negatives.topk(self.num_negatives + 1, dim=-1)  # (..., n, N) -> (..., n, num_similarities)
        own = torch.arange(size, device=device)[rows, None]
        kept = hardest.values.masked_fill(hardest.indices == own, -torch.inf).topk(self.num_negatives, dim=-1)
        if self.order == "sorted":
            return torch.cat([positive, kept.values], dim=-1)
        places = hardest.indices.gather(-1, kept.indices).sort(dim=-1).values
        return torch.cat([positive, negatives.gather(-1, places)], dim=-1)

    def _radius(self, seen: Tensor) -> Tensor:
        with torch.autocast(seen.device.type, enabled=False):
            radius = self.layers(seen.to(next(self.parameters()).dtype)).squeeze(-1)
        return radius.to(torch.promote_types(radius.dtype, torch.float32))
