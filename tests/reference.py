"""Reference implementation of the equations in the papers, as loops over Python floats (float64), to test the losses.

Each function follows its printed formula literally, so that it can be compared with the paper. Embeddings are tensors
that are converted to lists of floats at once; nothing here uses the vectorised code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Vector = list[float]


def dot(u: Vector, v: Vector) -> float:
    return sum(x * y for x, y in zip(u, v, strict=True))


def subtract(u: Vector, v: Vector) -> Vector:
    return [x - y for x, y in zip(u, v, strict=True)]


def scaled(factor: float, u: Vector) -> Vector:
    return [factor * x for x in u]


def total(vectors: Sequence[Vector]) -> Vector:
    return [math.fsum(column) for column in zip(*vectors, strict=True)]


def length(u: Vector) -> float:
    return math.sqrt(dot(u, u))


def cosine(u: Vector, v: Vector) -> float:
    return dot(u, v) / (length(u) * length(v))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def positives_of(i: int, n: int, group_ids: Sequence[int] | None) -> list[int]:
    return [i] if group_ids is None else [j for j in range(n) if group_ids[j] == group_ids[i]]


# --- SupCLAP: InfoNCE, SigLIP, re-weighting


def log_ratio(scores: list[float], positives: list[int], decoupled: bool = False) -> float:
    """Compute -log(exp(s+) / sum exp(s)), averaged over the positives."""
    candidates = [s for j, s in enumerate(scores) if not (decoupled and j in positives)]
    denominator = math.fsum(math.exp(s) for s in candidates)
    return mean([-math.log(math.exp(scores[p]) / denominator) for p in positives])


def one_direction(
    queries: list[Vector], keys: list[Vector], logit_scale: float, group_ids: Sequence[int] | None = None
) -> float:
    n = len(queries)
    return mean(
        [
            log_ratio([logit_scale * dot(queries[i], keys[j]) for j in range(n)], positives_of(i, n, group_ids))
            for i in range(n)
        ]
    )


def info_nce(audio: Tensor, text: Tensor, logit_scale: float, group_ids: Sequence[int] | None = None) -> float:
    """[SupCLAP eq. 5], averaged over the batch."""
    a, t = audio.tolist(), text.tolist()
    return one_direction(t, a, logit_scale, group_ids) + one_direction(a, t, logit_scale, group_ids)


def binary_cross_entropy(logit: float, positive: bool) -> float:
    return -math.log(1 / (1 + math.exp(-logit if positive else logit)))


def sigmoid_loss(
    audio: Tensor, text: Tensor, logit_scale: float, logit_bias: float, group_ids: Sequence[int] | None = None
) -> float:
    """Zhai et al. 2023, eq. of section 3.2."""
    a, t = audio.tolist(), text.tolist()
    n = len(a)
    terms = [
        binary_cross_entropy(logit_scale * dot(a[i], t[j]) + logit_bias, j in positives_of(i, n, group_ids))
        for i in range(n)
        for j in range(n)
    ]
    return math.fsum(terms) / n


def reweighted_info_nce(
    audio: Tensor, text: Tensor, logit_scale: float, weight: float, held: Sequence[float] | None = None
) -> float:
    """[SupCLAP E.4]: the pull of the positive, 1 - P+, times w.

    `held` are the constants that multiply the logits of the positives, clips first. Default: (w - 1) (1 - P+).
    """
    a, t = audio.tolist(), text.tolist()
    losses: list[float] = []
    for queries, keys in ((a, t), (t, a)):
        for i, query in enumerate(queries):
            own = logit_scale * dot(query, keys[i])
            positive = math.exp(own)
            negatives = math.fsum(math.exp(logit_scale * dot(query, key)) for j, key in enumerate(keys) if j != i)
            probability = positive / (positive + negatives)
            extra = (weight - 1) * (1 - probability) if held is None else held[len(losses) // 2]
            losses += [-math.log(probability), -extra * own]
    return math.fsum(losses) / len(a)


def positive_probabilities(audio: Tensor, text: Tensor, logit_scale: float) -> list[float]:
    """P+ of each clip, then of each text [SupCLAP eq. 2]."""
    a, t = audio.tolist(), text.tolist()
    probabilities = []
    for queries, keys in ((a, t), (t, a)):
        for i, query in enumerate(queries):
            exponentials = [math.exp(logit_scale * dot(query, key)) for key in keys]
            probabilities.append(exponentials[i] / math.fsum(exponentials))
    return probabilities


# --- SupCLAP: support vectors


def pull_direction(anchor: Vector, target: Vector) -> Vector:
    """Return u = (a - t) / ||a - t||, or 0 if a = t."""
    difference = subtract(target, anchor)
    distance = length(difference)
    return scaled(1 / distance, difference) if distance > 0 else [0.0] * len(anchor)


def support_vector(anchor: Vector, target: Vector, radius: float) -> Vector:
    """t_sup = t + R u, below [SupCLAP eq. 6]."""
    return total([anchor, scaled(radius, pull_direction(anchor, target))])


def support_similarity(anchors: Tensor, targets: Tensor, radii: Sequence[float], similarity: str) -> list[Vector]:
    t, a = anchors.tolist(), targets.tolist()
    measure = cosine if similarity == "cosine" else dot
    supports = [support_vector(t[i], a[i], radii[i]) for i in range(len(t))]
    return [[measure(support, target) for target in a] for support in supports]


def support_vector_loss(
    anchors: Tensor,
    targets: Tensor,
    radii: Sequence[float],
    logit_scale: float,
    similarity: str = "cosine",
    decoupled: bool = False,
    group_ids: Sequence[int] | None = None,
) -> float:
    """[SupCLAP eq. 6], averaged over the batch."""
    n = len(anchors)
    rows = support_similarity(anchors, targets, radii, similarity)
    return mean([log_ratio(scaled(logit_scale, rows[i]), positives_of(i, n, group_ids), decoupled) for i in range(n)])


def support_vector_sigmoid_loss(
    anchors: Tensor,
    targets: Tensor,
    radii: Sequence[float],
    logit_scale: float,
    logit_bias: float,
    similarity: str = "cosine",
    group_ids: Sequence[int] | None = None,
) -> float:
    n = len(anchors)
    rows = support_similarity(anchors, targets, radii, similarity)
    terms = [
        binary_cross_entropy(logit_scale * rows[i][j] + logit_bias, j in positives_of(i, n, group_ids))
        for i in range(n)
        for j in range(n)
    ]
    return math.fsum(terms) / n


def predicted_radii(
    anchors: Tensor, targets: Tensor, logit_scale: float, layers: Sequence[tuple[list[Vector], Vector]], order: str
) -> list[float]:
    """[SupCLAP 3.2]: R = f(S), S = [s(t+, a+), s(t+, a-_1), ...]. `layers`: weights and biases, with ReLU between."""
    t, a = anchors.tolist(), targets.tolist()
    radii = []
    for i, anchor in enumerate(t):
        negatives = [logit_scale * dot(anchor, target) for j, target in enumerate(a) if j != i]
        if order == "sorted":
            negatives.sort(reverse=True)
        values = [logit_scale * dot(anchor, a[i]), *negatives]
        for number, (weights, biases) in enumerate(layers):
            values = [dot(row, values) + bias for row, bias in zip(weights, biases, strict=True)]
            if number < len(layers) - 1:
                values = [max(0.0, value) for value in values]
        radii.append(values[0])
    return radii


def radius_constraint(anchors: Tensor, targets: Tensor, radii: Sequence[float]) -> float:
    """[SupCLAP appendix B]."""
    pairs = zip(anchors.tolist(), targets.tolist(), radii, strict=True)
    return mean([max(0.0, r - length(subtract(a, t))) + max(0.0, -r) for t, a, r in pairs])


# --- SupCLAP: drift


def projected(u: Vector, direction: Vector) -> Vector:
    """Return the projection of u onto a direction of unit norm."""
    return scaled(dot(u, direction), direction)


def tangent(u: Vector, point: Vector) -> Vector:
    return subtract(u, projected(u, point))


def pulls_and_pushes(
    supports: list[Vector], audios: list[Vector], tau: float
) -> list[tuple[Vector, list[tuple[int, Vector]]]]:
    """[SupCLAP eq. 2-4] for each text: F_pull, and F_push of each negative with its index."""
    n = len(audios)
    forces = []
    for i, support in enumerate(supports):
        exponentials = [math.exp(dot(support, audio) / tau) for audio in audios]
        probability = [e / math.fsum(exponentials) for e in exponentials]
        pull = scaled((probability[i] - 1) / tau, audios[i])
        forces.append((pull, [(j, scaled(probability[j] / tau, audios[j])) for j in range(n) if j != i]))
    return forces


def drift_statistics(
    audio: Tensor, text: Tensor, tau: float, radii: Sequence[float], learning_rate: float = 1.0
) -> dict[str, float]:
    """[SupCLAP 2.1, eq. 7, 8, 12, 17, 18], negative by negative."""
    a, t = audio.tolist(), text.tolist()
    n = len(a)
    plain = pulls_and_pushes(t, a, tau)
    displaced = pulls_and_pushes([support_vector(t[i], a[i], radii[i]) for i in range(n)], a, tau)
    rows: dict[str, list[float]] = {
        name: [] for name in ("drift", "difference", "target", "parallel", "perpendicular", "factor")
    }
    rows |= {"drift_svr": [], "difference_svr": [], "target_svr": [], "progress": [], "penalty": []}
    for i in range(n):
        u = pull_direction(t[i], a[i])
        factor = 1 - radii[i] / length(subtract(a[i], t[i]))
        push = total([force for _, force in plain[i][1]])
        update = scaled(-1, total([plain[i][0], push]))
        with_svr = update
        for force in (displaced[i][0], *(force for _, force in displaced[i][1])):
            parallel = projected(force, u)
            with_svr = subtract(with_svr, total([parallel, scaled(factor, subtract(force, parallel))]))
        rows["drift"].append(cosine(tangent(update, t[i]), tangent(u, t[i])))
        rows["drift_svr"].append(cosine(tangent(with_svr, t[i]), tangent(u, t[i])))
        rows["difference"].append(cosine(update, u))
        rows["difference_svr"].append(cosine(with_svr, u))
        rows["target"].append(cosine(update, scaled(-1, plain[i][0])))  # -F_pull, along a+
        rows["target_svr"].append(cosine(with_svr, scaled(-1, plain[i][0])))
        along = projected(scaled(-1, update), u)
        across = subtract(scaled(-1, update), along)
        slope = subtract(scaled(2, subtract(t[i], a[i])), scaled(learning_rate, along))
        rows["progress"].append(-learning_rate * dot(slope, along))
        rows["penalty"].append(learning_rate**2 * dot(across, across))
        rows["parallel"].append(length(projected(push, u)))
        rows["perpendicular"].append(length(subtract(push, projected(push, u))))
        rows["factor"].append(factor)
    return {
        "drift_cosine": mean(rows["drift"]),
        "drift_cosine_svr": mean(rows["drift_svr"]),
        "drift_cosine_difference": mean(rows["difference"]),
        "drift_cosine_svr_difference": mean(rows["difference_svr"]),
        "drift_cosine_target": mean(rows["target"]),
        "drift_cosine_svr_target": mean(rows["target_svr"]),
        "push_parallel_norm": mean(rows["parallel"]),
        "push_perpendicular_norm": mean(rows["perpendicular"]),
        "ideal_progress": mean(rows["progress"]),
        "noise_penalty": mean(rows["penalty"]),
        "distance": mean([length(subtract(a[i], t[i])) for i in range(n)]),
        "positive_similarity": mean([dot(a[i], t[i]) for i in range(n)]),
        "radius_mean": mean(radii),
        "radius_std": spread(radii),
        "svr_factor_mean": mean(rows["factor"]),
        "svr_factor_std": spread(rows["factor"]),
    }


def perpendicular_components(audio: Tensor, text: Tensor, tau: float, batch_size: int) -> tuple[float, float]:
    """[SupCLAP 2.1.1]: norm of the mean of the perpendicular push over all batches, and deviation from this mean."""
    a, t = audio.tolist(), text.tolist()
    norms, deviations = [], []
    for i, anchor in enumerate(t):
        u = pull_direction(anchor, a[i])
        pushes = []
        for negatives in itertools.combinations([j for j in range(len(a)) if j != i], batch_size - 1):
            exponentials = {j: math.exp(dot(anchor, a[j]) / tau) for j in (i, *negatives)}
            everything = math.fsum(exponentials.values())
            push = total([scaled(exponentials[j] / everything / tau, a[j]) for j in negatives])
            pushes.append(subtract(push, projected(push, u)))
        centre = scaled(1 / len(pushes), total(pushes))
        norms.append(length(centre))
        deviations.append(math.sqrt(mean([length(subtract(push, centre)) ** 2 for push in pushes])))
    return mean(norms), mean(deviations)


def spread(values: Sequence[float]) -> float:
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values]))


# --- ATRI


def kcl_loss(audio: Tensor, text: Tensor, logit_scale: float, group_ids: Sequence[int] | None = None) -> float:
    """[ATRI eq. 9-11]; text is (N, K, d)."""
    a, t = audio.tolist(), text.tolist()
    n, k_all = len(a), len(t[0])
    a2t = t2a = 0.0
    for k in range(k_all):
        for i in range(n):
            positives = positives_of(i, n, group_ids)
            a2t += log_ratio([logit_scale * dot(a[i], t[j][k]) for j in range(n)], positives)
            t2a += log_ratio([logit_scale * dot(t[i][k], a[j]) for j in range(n)], positives)
    return (a2t + t2a) / (2 * n * k_all)


def cacl_loss(audio: Tensor, anchor_text: Tensor, other_text: Tensor, logit_scale: float) -> float:
    """[ATRI eq. 12-13]."""
    a, e, t = audio.tolist(), anchor_text.tolist(), other_text.tolist()
    n = len(a)
    loss = 0.0
    for u, v in ((a, e), (a, t), (e, t)):
        for i in range(n):
            loss += log_ratio([logit_scale * dot(u[i], v[j]) for j in range(n)], [i])
            loss += log_ratio([logit_scale * dot(v[i], u[j]) for j in range(n)], [i])
    return loss / (6 * n)


def data_distribution_error(
    audio: Tensor, text: Tensor, logit_scale: float, trained: Sequence[Sequence[bool]]
) -> float:
    """[ATRI eq. 6]: sum over all pairs of |p - p'_e|, p over all languages and p'_e over the trained ones."""
    a, t = audio.tolist(), text.tolist()
    pairs = [(i, k) for i in range(len(a)) for k in range(len(t[0]))]
    score = {(i, k): math.exp(logit_scale * dot(a[i], t[i][k])) for i, k in pairs}
    everything = math.fsum(score.values())
    seen = math.fsum(score[i, k] for i, k in pairs if trained[i][k])
    return math.fsum(abs(score[i, k] / everything - (score[i, k] / seen if trained[i][k] else 0.0)) for i, k in pairs)


def weight_error(
    embed: Callable[[Tensor], tuple[Tensor, Tensor]],
    weights: Tensor,
    logit_scale: float,
    trained: Sequence[Sequence[bool]],
) -> tuple[float, float]:
    """Distance between SGD on p and on p'_e after one step of rate 1 [ATRI eq. 21], and its bound [eq. 25].

    The gradient of log p is computed pair by pair. `embed` maps weights to audio (N, d) and texts (N, K, d).
    """
    weights = weights.detach().requires_grad_()
    audio, text = embed(weights)
    pairs = [(i, k) for i in range(len(audio)) for k in range(text.shape[1])]
    similarity = {(i, k): logit_scale * (audio[i] * text[i, k]).sum() for i, k in pairs}
    everything = sum(score.exp() for score in similarity.values())
    seen = math.fsum(similarity[i, k].exp().item() for i, k in pairs if trained[i][k])

    apart, most, distribution = torch.zeros_like(weights), 0.0, 0.0
    for i, k in pairs:
        ideal = similarity[i, k].exp() / everything
        actual = similarity[i, k].exp().item() / seen if trained[i][k] else 0.0
        (gradient,) = torch.autograd.grad(ideal.log(), weights, retain_graph=True)
        apart += (actual - ideal.item()) * gradient
        most = max(most, gradient.norm().item())
        distribution += abs(actual - ideal.item())
    return apart.norm().item(), most * distribution


def alignment_direction_error(audio: Tensor, text: Tensor, trained: Sequence[Sequence[bool]]) -> float:
    """[ATRI 3.2, fig. 2]: mean angle in degrees between the directions from clips to trained and to all captions."""
    angles = []
    for a, captions, mask in zip(audio.tolist(), text.tolist(), trained, strict=True):
        ways = []
        for chosen in ([c for c, one in zip(captions, mask, strict=True) if one], captions):
            ways.append(
                [math.fsum(axis) / len(chosen) - at for axis, at in zip(zip(*chosen, strict=True), a, strict=True)]
            )
        cosine = dot(*ways) / math.sqrt(dot(ways[0], ways[0]) * dot(ways[1], ways[1]))
        angles.append(math.degrees(math.acos(min(1.0, cosine))))
    return mean(angles)


# --- TeminAL


def tnce(query: Vector, positive: Vector, own_block: list[Vector], others: float) -> float:
    """[TeminAL eq. 4, 5]: the block of the item in full, and the other blocks as the term C."""
    return -math.log(math.exp(dot(query, positive)) / (math.fsum(math.exp(dot(query, c)) for c in own_block) + others))


def other_block(query: Vector, i: int, block: list[Vector], alpha_same: float, alpha_cross: float) -> float:
    """[TeminAL eq. 6]: a term C, with alpha_same for the same pair and alpha_cross for the others."""
    rest = math.fsum(math.exp(dot(query, candidate)) for j, candidate in enumerate(block) if j != i)
    return alpha_same * math.exp(dot(query, block[i])) + alpha_cross * rest


def two_terms(
    query: Vector, i: int, own: list[Vector], reverse: list[Vector], over: list[Vector], so: float, co: float
) -> float:
    """[TeminAL eq. 14 and 20]: the term C^to of the appendix."""
    rest = math.fsum(math.exp(dot(query, candidate)) for j, candidate in enumerate(over) if j != i)
    return so * (math.exp(dot(query, own[i])) + math.exp(dot(query, reverse[i]))) + co * rest


def teminal_b_side(
    queries: Tensor,
    keys: Tensor,
    logit_scale: float,
    st: float,
    ct: float,
    so: float,
    co: float,
    appendix: bool = False,
) -> float:
    """[TeminAL eq. 3-7] for one of the two losses, the mean over the 3n items; rows are forward, reversed, overlaid."""
    n = len(queries) // 3
    z = [scaled(logit_scale, query) for query in queries.tolist()]
    forward, backward, overlaid = (keys.tolist()[block * n : (block + 1) * n] for block in range(3))
    loss = 0.0
    for i in range(n):
        z_f, z_r, z_o = z[i], z[n + i], z[2 * n + i]
        c_r, c_o = other_block(z_f, i, backward, st, ct), other_block(z_f, i, overlaid, so, co)
        if appendix:
            c_o = two_terms(z_f, i, forward, backward, overlaid, so, co)
        loss += tnce(z_f, forward[i], forward, c_r + c_o)
        c_r, c_o = other_block(z_r, i, forward, st, ct), other_block(z_r, i, overlaid, so, co)
        if appendix:
            c_o = two_terms(z_r, i, backward, forward, overlaid, so, co)
        loss += tnce(z_r, backward[i], backward, c_r + c_o)
        c_c = other_block(z_o, i, forward, 1.0, 1.0) + other_block(z_o, i, backward, st, ct)
        loss += tnce(z_o, overlaid[i], overlaid, c_c)
    return loss / (3 * n)


def teminal_b_loss(
    audio: Tensor,
    text: Tensor,
    logit_scale: float,
    alphas: tuple[float, float, float, float],
    beta: float,
    appendix: bool = False,
) -> float:
    """L_B = L_c + beta L_a; alphas are st, ct, so, co."""
    text_loss = teminal_b_side(audio, text, logit_scale, *alphas, appendix)
    return text_loss + beta * teminal_b_side(text, audio, logit_scale, *alphas, appendix)


def teminal_a_side(
    queries: Tensor,
    keys: Tensor,
    logit_scale: float,
    singles: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    alpha_same: float,
    alpha_diff: float,
) -> float:
    """[TeminAL eq. 22-25] for one of the two losses, the mean over the items; singles first, then pairs."""
    n = len(singles)
    z = [scaled(logit_scale, query) for query in queries.tolist()]
    single_keys, pair_keys = keys.tolist()[:n], keys.tolist()[n:]
    loss = 0.0
    for i, label in enumerate(singles):
        c_d = 0.0
        for classes, key in zip(pairs, pair_keys, strict=True):
            c_d += (alpha_same if label in classes else alpha_diff) * math.exp(dot(z[i], key))
        loss += tnce(z[i], single_keys[i], single_keys, c_d)
    for i, classes in enumerate(pairs):
        c_s = 0.0
        for label, key in zip(singles, single_keys, strict=True):
            c_s += (alpha_same if label in classes else alpha_diff) * math.exp(dot(z[n + i], key))
        loss += tnce(z[n + i], pair_keys[i], pair_keys, c_s)
    return loss / len(z)
