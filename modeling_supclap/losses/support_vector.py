"""SupCLAP's loss: InfoNCE with Support Vector Regularization, SVR (SupCLAP section 3, appendices B and D).

    L = L_orig + alpha L_svr + beta L_cons                       `supclap_loss`, eq. 9
    L_orig = InfoNCE in both directions                          `info_nce`, eq. 1 and 5
    L_svr = mean_i -log softmax_j(s(t_sup_i, a_j))[i]            `support_vector_loss`, eq. 6
    t_sup = t + R u                                              `support_vectors`, section 3.1
    R, one parameter or predicted from s(t, a)                   `StaticRadius`, `DynamicRadius`, section 3.2
    L_cons = mean_i(relu(R_i - ||a_i - t_i||) + relu(-R_i))      `radius_constraint`, appendix B

Symbols of the paper, in the text-to-audio direction (t2a):

| symbol | meaning | here |
|---|---|---|
| t | text embedding, the anchor | row of `anchors` (N, d), unit norm |
| a, a+ | audio embedding, the positive of t | row of `targets` (N, d), unit norm, with the index of t |
| a- | audio embedding of another pair, a negative of t | the other rows of `targets` |
| tau | temperature | `logit_scale` is 1 / tau |
| s(t, a) | t . a / tau, the scaled cosine | `logit_scale * similarity_matrix(anchors, targets)` |
| P+, P- | softmax of s over all a, at a+ and at a- (eq. 2 and 3) | |
| F_pull | (P+ - 1) a+ / tau, the positive's part of the gradient (eq. 4) | `training.drift.contrastive_forces` |
| F_push | sum P- a- / tau, the part of the negatives (eq. 4) | `training.drift.contrastive_forces` |
| u | (a+ - t) / ||a+ - t||, the direction from t to a+ | |
| R | semantic radius, the distance from t to t_sup | `radius`, one number or (N,) |
| t_sup | support vector | row of `support_vectors(anchors, targets, radius)` |
| alpha, beta | weights of L_svr and L_cons | `alpha`, `beta` |

In the audio-to-text direction (a2t), audio embeddings are the anchors and texts are the targets, with a radius of their
own. Support vectors are used only in training.
"""

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .contrastive import info_nce, sigmoid_contrast, softmax_contrast
from .similarity import at_least_float32, check_negatives, check_pairs, positive_mask, unit_pairs
from .tiles import map_rows

Similarity = Literal["cosine", "dot"]


def supclap_loss(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: float | Tensor,
    radius_t2a: float | Tensor | None,
    radius_a2t: float | Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.01,
    original: Tensor | None = None,
    logit_bias: float | Tensor | None = None,
    similarity: Similarity = "cosine",
    decoupled: bool = False,
    detach_distance: bool = True,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
    normalize: bool | None = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of SupCLAP, L = L_orig + alpha L_svr + beta L_cons (SupCLAP eq. 9).

    L_svr and L_cons are summed over the directions that have a radius: text to audio (uni-SVR), or both (bi-SVR).

    Args:
        audio_embeds, text_embeds: (N, d), unit norm; text i belongs to audio i.
        logit_scale: 1 / temperature, > 0; a number or a 0-d tensor.
        radius_t2a, radius_a2t: R of the texts and of the clips: a number, a 0-d tensor (`StaticRadius`), or (N,)
            (`DynamicRadius`). None: no support vectors in this direction.
        alpha, beta: Weights of L_svr and L_cons. The paper constrains only dynamic radii: beta is 0 for StaticSVR.
        original: L_orig, 0-d tensor. None: `info_nce` of the embeddings.
        logit_bias: Bias of SigLIP, whose form L_svr then has. None: L_svr has the form of InfoNCE.
        similarity, decoupled: See `support_vector_loss`.
        detach_distance: See `radius_constraint`.
        group_ids, chunk_size, normalize: See `info_nce`.

    Returns:
        L, 0-d tensor, and its parts without weights: `{"original": L_orig, "svr_t2a": L_svr, "constraint_t2a": L_cons}`
        and the same for "a2t". The constraint is not computed if `beta` is 0.

    Raises:
        ValueError: As in `info_nce` and `support_vector_loss`.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> loss, parts = supclap_loss(audios, texts, logit_scale=1.0, radius_t2a=2**0.5)
    >>> {name: round(part.item(), 4) for name, part in parts.items()}
    {'original': 2.0064, 'svr_t2a': 0.3133, 'constraint_t2a': 0.0}
    >>> round(loss.item(), 3)
    2.32
    """
    audio_embeds, text_embeds = unit_pairs(audio_embeds, text_embeds, normalize)
    if original is None:
        original = info_nce(audio_embeds, text_embeds, logit_scale, group_ids, chunk_size, normalize=None)
    total, parts = original, {"original": original}
    for direction, radius in (("t2a", radius_t2a), ("a2t", radius_a2t)):
        if radius is None:
            continue
        pairs = (text_embeds, audio_embeds) if direction == "t2a" else (audio_embeds, text_embeds)
        parts[f"svr_{direction}"] = svr = support_vector_loss(
            *pairs, radius, logit_scale, similarity, decoupled, group_ids, chunk_size, logit_bias, normalize=None
        )
        total = total + alpha * svr
        if beta:
            parts[f"constraint_{direction}"] = constraint = radius_constraint(*pairs, radius, detach_distance, None)
            total = total + beta * constraint
    return total, parts


def support_vector_loss(
    anchors: Tensor,
    targets: Tensor,
    radius: float | Tensor,
    logit_scale: float | Tensor,
    similarity: Similarity = "cosine",
    decoupled: bool = False,
    group_ids: Tensor | None = None,
    chunk_size: int | None = None,
    logit_bias: float | Tensor | None = None,
    normalize: bool | None = False,
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
        chunk_size, normalize: See `info_nce`.
        logit_bias: Bias of SigLIP. The term is then the SigLIP loss on support vectors (SupCLAP tables 1 and 8),
            1/N sum_ij -log sigmoid(z_ij (logit_scale cos(t_sup_i, a_j) + logit_bias)), z_ij = +1 on positives, else -1.
            SigLIP has a single loss for both directions, so bi-SVR adds two terms to it. None: InfoNCE.

    Returns:
        0-d tensor.

    Raises:
        ValueError: The similarity is unknown, `decoupled` is set with a bias or with one group id for all pairs, or as
            in `info_nce`.

    >>> texts, audios = torch.eye(3)[:2], torch.eye(3)[1:]
    >>> round(support_vector_loss(texts, audios, radius=2**0.5, logit_scale=1.0).item(), 4)  # log(1 + exp(-1))
    0.3133
    >>> round(support_vector_loss(texts, audios, 2**0.5, logit_scale=2.0, logit_bias=-1.0).item(), 4)
    0.6265
    """
    anchors, targets = unit_pairs(anchors, targets, normalize)
    supports = support_vectors(anchors, targets, radius, similarity)
    if logit_bias is not None and decoupled:
        raise ValueError("got decoupled with a logit_bias; SigLIP has no denominator, so leave one of them out")
    if decoupled:
        check_negatives(group_ids)
    contrast: Any = partial(softmax_contrast, decoupled=decoupled)
    if logit_bias is not None:
        contrast = partial(sigmoid_contrast, logit_bias=logit_bias)
    return map_rows(partial(contrast, group_ids=group_ids), supports, targets, logit_scale, chunk_size).mean()


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
        return self.predict(self.select_inputs(inputs, group_ids))

    def select_inputs(self, scaled: Tensor, group_ids: Tensor | None = None, rows: slice = slice(None)) -> Tensor:
        """Select the inputs of the MLP, (..., n, num_similarities), from n `rows` (..., n, N) of the matrix."""
        size, device = scaled.shape[-1], scaled.device
        positives = scaled.diagonal(rows.start or 0, -2, -1).unsqueeze(-1)

        negatives = scaled
        if group_ids is not None:
            negatives = negatives.masked_fill(positive_mask(size, group_ids, device, rows), 0.0)
        negatives = negatives.masked_fill(positive_mask(size, None, device, rows), -torch.inf)
        negatives = F.pad(negatives, (0, max(self.num_negatives - (size - 1), 0)))

        hardest = negatives.topk(self.num_negatives, dim=-1)  # (..., n, num_negatives), descending
        if self.order == "sorted":
            return torch.cat([positives, hardest.values], dim=-1)
        return torch.cat([positives, negatives.gather(-1, hardest.indices.sort(dim=-1).values)], dim=-1)

    def predict(self, inputs: Tensor) -> Tensor:
        """Predict radii (..., n) from the inputs (..., n, num_similarities) of the MLP, float32 or wider."""
        with torch.autocast(inputs.device.type, enabled=False):
            radius = self.layers(inputs.to(next(self.parameters()).dtype)).squeeze(-1)
        return radius.to(torch.promote_types(radius.dtype, torch.float32))


def radius_constraint(
    anchors: Tensor,
    targets: Tensor,
    radius: float | Tensor,
    detach_distance: bool = True,
    normalize: bool | None = False,
) -> Tensor:
    """Compute the penalty for radii outside [0, distance of the pair] (SupCLAP appendix B).

    L = mean(relu(R - distance) + relu(-R)). The negatives push an anchor away. R > distance would invert the
    perpendicular component of this push, and R < 0 would amplify it (see `support_vector_loss`).

    Args:
        anchors, targets: (N, d), unit norm; target i is the positive of anchor i.
        radius: R, a number, a 0-d tensor or (N,).
        detach_distance: Whether the penalty trains only the radius. False, as printed: it also moves pairs apart if
            their radius is larger than their distance.
        normalize: Whether to normalize the embeddings first. None: neither normalize nor check them.

    Returns:
        0-d tensor.

    Raises:
        ValueError: As in `info_nce`.

    >>> round(radius_constraint(torch.eye(2), torch.eye(2).flip(0), torch.tensor([1.5142, -0.3])).item(), 4)
    0.2
    """
    distance = positive_distance(*unit_pairs(anchors, targets, normalize))
    if detach_distance:
        distance = distance.detach()
    radius = torch.as_tensor(radius, dtype=distance.dtype, device=distance.device)
    return (torch.relu(radius - distance) + torch.relu(-radius)).mean()


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


def _zero_to_infinity(norm: Tensor) -> Tensor:
    """Replace norms near 0 by infinity, so that a vector divided by its norm becomes 0."""
    return F.threshold(norm, torch.finfo(norm.dtype).eps ** 0.5, torch.inf)
