"""Support Vector Regularization, SVR (SupCLAP section 3, appendices B and D).

A support vector is a text embedding t (the anchor), moved by a semantic radius R toward its positive audio embedding a
(the target). The SVR term is InfoNCE between the support vectors and all audio embeddings:

    t_sup = t + R u,    u = (a - t) / ||a - t||,    L = mean_i -log softmax_j(cos(t_sup_i, a_j) / temperature)[i].

This is the text-to-audio direction. For the audio-to-text direction, pass audio as anchors and texts as targets, with a
separate radius. Support vectors are used only in training.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .contrastive import sigmoid_contrast, softmax_contrast
from .similarity import at_least_float32, check_pairs, positive_mask, positive_mean, similarity_matrix
from .tiles import checkpoint_tiles, pairs_of_batches, tiled_row_contrast, tiled_sigmoid_contrast

Similarity = Literal["cosine", "dot"]


def positive_distance(anchors: Tensor, targets: Tensor) -> Tensor:
    """Compute the distance ||target - anchor|| of each pair, (..., N, d) -> (..., N), in float32 or wider.

    It is computed from the difference, because sqrt(2 - 2 cos) has rounding errors of up to 3e-4 in float32.

    >>> positive_distance(torch.eye(2), torch.eye(2).flip(0))
    tensor([1.4142, 1.4142])
    """
    anchors, targets = at_least_float32(anchors, targets)
    return torch.linalg.vector_norm(targets - anchors, dim=-1)


def displacement_ratio(distance: Tensor, radius: float | Tensor) -> Tensor:
    """Compute R / distance (SupCLAP eq. 8), the fraction of the way that each anchor moves toward its target.

    For pairs closer than the square root of the machine epsilon (3e-4 in float32) the ratio is 0, because their
    direction is not reliable.

    Args:
        distance: (..., N), from `positive_distance`.
        radius: R, a number, a 0-d tensor or (..., N).

    Raises:
        ValueError: The shape of the radius does not match the shape of `distance`.

    >>> displacement_ratio(torch.tensor([0.0, 0.5]), 0.1)
    tensor([0.0000, 0.2000])
    """
    radius = torch.as_tensor(radius, dtype=distance.dtype, device=distance.device)
    if radius.ndim and radius.shape != distance.shape:
        raise ValueError(
            f"got a radius of shape {tuple(radius.shape)} for pairs of shape {tuple(distance.shape)}; "
            "expected one number for all pairs or one per pair"
        )
    return radius / _zero_to_infinity(distance)


def support_vectors(
    anchors: Tensor, targets: Tensor, radius: float | Tensor, similarity: Similarity = "cosine"
) -> Tensor:
    """Compute the support vectors anchor + R (target - anchor) / ||target - anchor||.

    The arguments are the same as in `support_vector_loss`.

    Returns:
        (N, d), float32 or wider; unit norm if `similarity` is "cosine".

    >>> support_vectors(torch.eye(3)[:2], torch.eye(3)[1:], radius=0.5**0.5, similarity="dot")  # half the distance
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000]])
    """
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"got similarity={similarity!r}; it must be 'cosine' or 'dot'")
    check_pairs(anchors, targets)
    anchors, targets = at_least_float32(anchors, targets)

    difference = targets - anchors
    ratio = displacement_ratio(torch.linalg.vector_norm(difference, dim=-1), radius)
    supports = anchors + ratio.unsqueeze(-1) * difference
    if similarity == "dot":
        return supports
    # Halfway between opposite embeddings the support vector is zero, and has no direction.
    return supports / _zero_to_infinity(torch.linalg.vector_norm(supports, dim=-1, keepdim=True))


def _zero_to_infinity(norm: Tensor) -> Tensor:
    """Replace norms near 0 by infinity, so that a vector divided by its norm becomes 0."""
    return F.threshold(norm, torch.finfo(norm.dtype).eps ** 0.5, torch.inf)


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
    """Compute the SVR term in one direction: InfoNCE between the support vectors and all targets (SupCLAP eq. 6).

    L = mean_i -log( exp(s(t_sup_i, a_i)) / sum_j exp(s(t_sup_i, a_j)) ), t_sup_i = t_i + R_i u_i, s = logit_scale cos.

    Here t_i is anchor i (a text), a_i is target i (its audio clip), and u_i is the unit vector from t_i to a_i. In
    InfoNCE, the negatives push the anchor away. This push has a component perpendicular to u and one parallel to u. The
    SVR term multiplies the perpendicular one by 1 - R / ||a - t||, and keeps the other (SupCLAP eq. 7 and 8). This is
    exact for `similarity="dot"` (SupCLAP eq. 16). A random model has a loss of log N at R = 0, and a smaller loss at R
    > 0. The loss of a perfect model approaches 0.

    Args:
        anchors: (N, d), unit norm; texts for the text-to-audio direction.
        targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: R, a distance on the scale of ||a - t||: a number, a 0-d tensor (StaticSVR) or (N,) (DynamicSVR).
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        similarity: Similarity of a support vector to a target: "cosine", as in the paper, or "dot". With "dot", a
            larger R always increases the similarity of positive pairs. With "cosine", the best R is near ||a - t||.
        decoupled: Whether to exclude the positives from the denominator, as printed in eq. 6 of the paper. The paper's
            eq. 3 includes them, and eq. 16 is derived from eq. 3.
        group_ids: (N,) integers; all pairs with the same id are positives of each other, and the loss of an anchor is
            averaged over its positives. The support vector of anchor i is always computed from target i. None: each
            pair is its own group.
        chunk_size: Number of similarity matrix rows to compute at a time, as in `info_nce`. None: all rows at once.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The shapes do not match, there are fewer than two pairs, the similarity is unknown, or `decoupled`
            is set and all pairs have the same group id.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> round(support_vector_loss(texts, audios, radius=2**0.5, logit_scale=1.0).item(), 4)  # log(1 + exp(-1))
    0.3133
    """
    supports = support_vectors(anchors, targets, radius, similarity)
    if chunk_size is not None:
        return tiled_row_contrast(supports, targets, logit_scale, group_ids, decoupled, chunk_size)
    return softmax_contrast(logit_scale * similarity_matrix(supports, targets), group_ids, decoupled)


def info_nce_with_support_vectors(
    anchors: Tensor,
    targets: Tensor,
    radii: Tensor,
    logit_scale: float | Tensor,
    similarity: Similarity = "cosine",
    group_ids: Tensor | None = None,
) -> Tensor:
    """Compute InfoNCE and the SVR term in both directions with one matrix product and one softmax.

    The values are the same as those of `info_nce` and `support_vector_loss`. On a GPU, one call of this function is
    faster than calls of the two functions.

    Args:
        anchors: (..., N, d), unit norm.
        targets: (..., N, d), unit norm; target i is the positive of anchor i.
        radii: (2, ..., N), the radii of the anchors (row 0) and of the targets (row 1).
        logit_scale, similarity, group_ids: See `support_vector_loss`.

    Returns:
        (2, 2), the losses of InfoNCE (row 0) and SVR (row 1). Column 0 is the direction from anchors to targets, and
        column 1 from targets to anchors.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> info_nce_with_support_vectors(texts, audios, torch.full((2, 2), 2**0.5), logit_scale=1.0)
    tensor([[1.0032, 1.0032],
            [0.3133, 0.3133]])
    """
    check_pairs(anchors, targets)
    pairs = torch.stack(torch.broadcast_tensors(*at_least_float32(anchors, targets)))  # (2, ..., N, d)
    partners = pairs.flip(0)
    supports = support_vectors(pairs, partners, radii, similarity)
    with torch.autocast(anchors.device.type, enabled=False):
        cosines = torch.cat([pairs, supports], dim=-2) @ partners.mT  # (2, ..., 2 N, N)
    logits = (logit_scale * cosines).unflatten(-2, (2, -1)).movedim(-3, 0)  # (2, 2, ..., N, N)
    losses = -positive_mean(logits.log_softmax(-1), group_ids)
    return losses.flatten(2).mean(-1)  # (2, 2, ..., N) -> (2, 2)


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
    """Compute the SVR term of SigLIP in one direction: the SigLIP loss on support vectors (SupCLAP tables 1 and 8).

    L = 1/N sum_ij -log sigmoid(z_ij (logit_scale cos(t_sup_i, a_j) + logit_bias)), z_ij = +1 on positives, else -1.

    Here t_sup_i is the support vector of anchor i, and a_j is target j. At R = 0 this equals `sigmoid_loss`. SigLIP
    has a single loss for both directions, so SVR in both directions (bi-SVR) adds two terms to it. The other arguments,
    the result and the errors are the same as in `support_vector_loss`.

    Args:
        logit_bias: Bias added to every logit; a number or a 0-d tensor.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> round(support_vector_sigmoid_loss(texts, audios, 2**0.5, logit_scale=2.0, logit_bias=-1.0).item(), 4)
    0.6265
    """
    supports = support_vectors(anchors, targets, radius, similarity)
    if chunk_size is not None:
        return tiled_sigmoid_contrast(supports, targets, logit_scale, logit_bias, group_ids, chunk_size)
    return sigmoid_contrast(logit_scale * similarity_matrix(supports, targets) + logit_bias, group_ids)


class StaticRadius(nn.Module):
    """StaticSVR: one learnable radius for all pairs (SupCLAP 3.2).

    Args:
        init: Initial radius, a distance between unit vectors (0 to 2).

    >>> StaticRadius(init=0.25)(torch.zeros(3, 3)).tolist()
    [0.25, 0.25, 0.25]
    """

    def __init__(self, init: float = 0.1) -> None:
        super().__init__()
        # One element, not 0-d: FSDP does not shard scalar parameters.
        self.radius = nn.Parameter(torch.tensor([init]))

    def forward(self, scaled_similarities: Tensor, group_ids: Tensor | None = None) -> Tensor:
        """Return the radius of each anchor, (..., N), for a similarity matrix of shape (..., N, N)."""
        return self.radius.expand(scaled_similarities.shape[:-1])

    def in_tiles(self, anchors: Tensor, targets: Tensor, *_: object) -> Tensor:
        """Return the radius of each anchor, (..., N), for embeddings of shape (..., N, d)."""
        return self.radius.expand(torch.broadcast_shapes(anchors.shape, targets.shape)[:-1])


class RelativeRadius(nn.Module):
    """Radius equal to a fixed fraction of the distance between anchor and target.

    This radius is for control experiments. It has no parameters and is not in the paper. The support vector is
    (1 - ratio) anchor + ratio target. At ratio 0 it is the anchor, and the SVR term is InfoNCE in one direction. At
    ratio 1 it is the target, and the term contrasts each target with all other targets.

    >>> RelativeRadius(0.5).in_tiles(torch.eye(2), torch.eye(2).flip(0), 1.0)
    tensor([0.7071, 0.7071])
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def in_tiles(self, anchors: Tensor, targets: Tensor, *_: object) -> Tensor:
        """Return the radius of each anchor, (..., N), for embeddings of shape (..., N, d)."""
        return self.ratio * positive_distance(anchors, targets)


class DynamicRadius(nn.Module):
    """DynamicSVR: an MLP that predicts the radius of each pair from its similarities (SupCLAP 3.2).

    R_i = f([s(t_i, a_i), s(t_i, a_j), ...]), where t_i is anchor i and a_j is target j. The input is the similarity of
    the positive, followed by the similarities of the `num_similarities - 1` hardest negatives. In the paper, f uses all
    N similarities of the batch (`num_similarities` = N). If a batch is smaller, the input is padded with zeros, the
    similarity of orthogonal embeddings.

    The last layer is initialized with zero weights and bias `init`, so that training starts from `StaticRadius(init)`.

    Args:
        num_similarities: Number of MLP inputs, including the positive; usually the training batch size.
        hidden_size: Width of the two hidden layers.
        init: Initial radius.
        order: Order of the negatives: "sorted" (by descending similarity), or "batch" (as in the batch, like in the
            paper).
        detach_input: Whether to stop gradients from the radius to the encoders. The paper does not stop them.

    Raises:
        ValueError: `num_similarities` is below 2, or `order` is unknown.

    >>> DynamicRadius(num_similarities=4)(torch.eye(3)).tolist() == StaticRadius()(torch.eye(3)).tolist()
    True
    """

    def __init__(
        self,
        num_similarities: int,
        hidden_size: int = 64,
        init: float = 0.1,
        order: Literal["sorted", "batch"] = "sorted",
        detach_input: bool = True,
    ) -> None:
        super().__init__()
        if order not in ("sorted", "batch"):
            raise ValueError(f"got order={order!r}; it must be 'sorted' or 'batch'")
        if num_similarities < 2:
            raise ValueError(
                f"got num_similarities={num_similarities}; it must be at least 2, the positive and one negative"
            )
        self.num_negatives = num_similarities - 1
        self.order, self.detach_input = order, detach_input
        last = nn.Linear(hidden_size, 1)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, init)
        self.layers = nn.Sequential(
            nn.Linear(num_similarities, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size), nn.ReLU(), last
        )

    def forward(self, scaled_similarities: Tensor, group_ids: Tensor | None = None) -> Tensor:
        """Predict the radius of each anchor from the similarity matrix.

        Args:
            scaled_similarities: (..., N, N) cosines of anchors (rows) and targets (columns), times logit_scale.
            group_ids: (N,) integers; pairs with the same id are not negatives of each other, so their similarity is
                replaced by 0.

        Returns:
            (..., N), float32 or wider. The radii are not clamped; `radius_constraint` penalizes radii outside
            [0, ||a - t||].
        """
        inputs = scaled_similarities.detach() if self.detach_input else scaled_similarities
        return self._predict(self._inputs(inputs, 0, group_ids))

    def in_tiles(
        self,
        anchors: Tensor,
        targets: Tensor,
        logit_scale: float | Tensor,
        group_ids: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Predict the same radii as `forward`, computing `chunk_size` rows of the similarity matrix at a time.

        The embeddings have shape (..., N, d), and the radii (..., N). By default, all rows are computed at once.
        """
        if chunk_size is None:
            return self(logit_scale * similarity_matrix(anchors, targets), group_ids)
        inputs = []
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach_input):
            for first, second in pairs_of_batches(anchors, targets):

                def tile_inputs(rows: slice, first: Tensor = first, second: Tensor = second) -> Tensor:
                    return self._inputs(logit_scale * first[rows] @ second.mT, rows.start, group_ids)

                inputs.append(torch.cat(checkpoint_tiles(tile_inputs, len(first), chunk_size)))

        radius = self._predict(torch.stack(inputs))  # (batches, N, num_similarities) -> (batches, N)
        return radius.reshape(torch.broadcast_shapes(anchors.shape, targets.shape)[:-1])

    def _inputs(self, scaled: Tensor, start: int, group_ids: Tensor | None) -> Tensor:
        """Select the MLP inputs (..., n, num_similarities) of n anchors, starting with anchor `start`."""
        size, device = scaled.shape[-1], scaled.device
        rows = slice(start, start + scaled.shape[-2])
        positives = scaled.diagonal(start, -2, -1).unsqueeze(-1)

        negatives = scaled
        if group_ids is not None:
            negatives = negatives.masked_fill(positive_mask(size, group_ids, device, rows), 0.0)
        negatives = negatives.masked_fill(positive_mask(size, None, device, rows), -torch.inf)
        negatives = F.pad(negatives, (0, max(self.num_negatives - (size - 1), 0)))

        hardest = negatives.topk(self.num_negatives, dim=-1)  # (..., n, num_negatives), descending
        if self.order == "sorted":
            return torch.cat([positives, hardest.values], dim=-1)
        return torch.cat([positives, negatives.gather(-1, hardest.indices.sort(dim=-1).values)], dim=-1)

    def _predict(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            radius = self.layers(inputs.to(next(self.parameters()).dtype)).squeeze(-1)
        return radius.to(torch.promote_types(radius.dtype, torch.float32))


def radius_constraint(
    anchors: Tensor, targets: Tensor, radius: float | Tensor, detach_distance: bool = True
) -> Tensor:
    """Compute the penalty for radii outside [0, distance of the pair] (SupCLAP appendix B).

    L = mean(relu(R - distance) + relu(-R)). The negatives push an anchor away. R > distance would invert the
    perpendicular component of this push, and R < 0 would amplify it (see `support_vector_loss`).

    Args:
        anchors, targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: R, a number, a 0-d tensor or (N,).
        detach_distance: Whether the penalty trains only the radius. False, as printed: it also moves pairs apart if
            their radius is larger than their distance.

    Returns:
        0-d tensor.

    >>> round(radius_constraint(torch.eye(2), torch.eye(2).flip(0), torch.tensor([1.5142, -0.3])).item(), 4)
    0.2
    """
    distance = positive_distance(anchors, targets)
    if detach_distance:
        distance = distance.detach()
    radius = torch.as_tensor(radius, dtype=distance.dtype, device=distance.device)
    return (torch.relu(radius - distance) + torch.relu(-radius)).mean()
