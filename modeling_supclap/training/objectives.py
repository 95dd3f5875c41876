"""Objectives: modules or functions that compute the training loss from the embeddings of a batch.

`objective(audio_embeds, text_embeds, logit_scale, logit_bias, group_ids)` is called on the global batch, with audio
`(N, d)` and text `(N, K, d)`, K texts per clip. It may leave out the last three. It returns the loss, `()`, or
`(loss, {name: scalar})` with values to log. The parameters of an objective are trained with the model, but inference
does not need them.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..losses.contrastive import info_nce, reweighted_info_nce, sigmoid_loss
from ..losses.multilingual import DIRECTION_SCALE, by_language, cacl_loss, kcl_loss
from ..losses.similarity import at_least_float32
from ..losses.support_vector import DynamicRadius, Similarity, StaticRadius, positive_distance, supclap_loss
from ..losses.temporal import teminal_a_weights, teminal_b_weights, temporal_nce
from ..losses.tiles import map_rows
from .options import LOSSES, MULTILINGUAL_LOSSES
from .training_args import SupCLAPTrainingArguments

Logs = dict[str, Tensor]

TILED_CLIPS = 4096
"""Number of clips in a global batch from which the loss is computed in tiles by default."""

OPTIONAL_INPUTS = {"logit_scale", "logit_bias", "group_ids"}
"""Inputs that an objective may leave out."""


class FunctionObjective(nn.Module):
    """Objective from a function, or from a module, that takes only some of the inputs of an objective."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *embeds: Tensor, **inputs: Any) -> Any:
        """Call the function without those of `OPTIONAL_INPUTS` that it does not take."""
        left_out = _find_left_out(self.function)
        return self.function(*embeds, **{name: value for name, value in inputs.items() if name not in left_out})


def as_objective(objective: Callable[..., Any]) -> nn.Module:
    """Return a module that takes all inputs of an objective: a module that does so already, or `FunctionObjective`."""
    if isinstance(objective, nn.Module) and not _find_left_out(objective):
        return objective
    return FunctionObjective(objective)


def _find_left_out(function: Callable[..., Any]) -> set[str]:
    """Return those of `OPTIONAL_INPUTS` that a function or a module does not take."""
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return set() if takes_all else OPTIONAL_INPUTS - parameters.keys()


def split_loss(objective: nn.Module, result: Any) -> tuple[Tensor, Logs]:
    """Return the loss, `()`, and the values to log from the result of an objective.

    Raises:
        TypeError: It is neither a loss nor a loss and values to log.

    >>> split_loss(FunctionObjective(F.mse_loss), torch.tensor(6.0))
    (tensor(6.), {})
    """
    loss, logs = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or loss.ndim or not isinstance(logs, Mapping):
        found = f"a tensor {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)[:100]
        raise TypeError(
            f"the objective {name_of(objective)} returned {found}; return the loss, a tensor (), or the loss and a dict"
        )
    return loss, dict(logs)


def name_of(objective: Callable[..., Any]) -> str:
    """Return the name of the class or the function of an objective."""
    objective = getattr(objective, "function", objective)
    return getattr(objective, "__name__", type(objective).__name__)


class RelativeRadius(nn.Module):
    """Radius equal to a fixed fraction of the distance between anchor and target.

    This radius is for control experiments. It has no parameters and is not in the paper. The support vector is
    (1 - ratio) anchor + ratio target. At ratio 0 it is the anchor, and the SVR term is InfoNCE in one direction. At
    ratio 1 it is the target, and the term contrasts each target with all other targets.

    >>> RelativeRadius(0.5)(torch.eye(2), torch.eye(2).flip(0))
    tensor([0.7071, 0.7071])
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, anchors: Tensor, targets: Tensor) -> Tensor:
        """Return the radius of each anchor, (..., N), for embeddings of shape (..., N, d)."""
        return self.ratio * positive_distance(anchors, targets)


def radius_of_pairs(
    radius: Any,
    anchors: Tensor,
    targets: Tensor,
    logit_scale: Tensor,
    group_ids: Tensor | None,
    chunk_size: int | None,
) -> Tensor:
    """Compute the radius of each pair, (..., N), with a static, relative or dynamic radius module.

    The other arguments are those of the loss.
    """
    if isinstance(radius, RelativeRadius):
        return radius(anchors, targets)
    if isinstance(radius, StaticRadius):
        return radius.radius.expand(torch.broadcast_shapes(anchors.shape, targets.shape)[:-1])
    with torch.set_grad_enabled(torch.is_grad_enabled() and not radius.detach_input):
        select = partial(radius.select_inputs, group_ids=group_ids)
        inputs = map_rows(select, anchors, targets, logit_scale, chunk_size)  # (..., N, num_similarities)
    return radius.predict(inputs)


class SupportVectorRegularizer(nn.Module):
    """Support vector regularization, alpha L_svr + beta L_cons, in one or both directions (SupCLAP eq. 6 and 9).

    Args:
        radii: Radius modules, `{direction: module}`. `t2a` moves texts toward their clips, `a2t` moves clips toward
            their texts, and a module `both` is used in both directions. A radius of NaN is set to the mean distance of
            the positive pairs in the first batch.
        base: Name of the base loss, for the log. With `siglip`, `kcl` and `cacl`, the SVR term has the form and scale
            of this loss; with any other name, those of `infonce`.
        alpha: Weight of the SVR term in each direction.
        beta: Weight of the radius constraint. As in the paper, only dynamic radii are constrained.
        similarity: Similarity of a support vector and a target, `cosine` or `dot`.
        decoupled: Whether to exclude the positives from the denominator.
        constraint_gradients: Whether the radius constraint also moves the embeddings.
    """

    def __init__(
        self,
        radii: dict[str, nn.Module],
        base: str = "infonce",
        alpha: float = 1.0,
        beta: float = 0.01,
        similarity: Similarity = "cosine",
        decoupled: bool = False,
        constraint_gradients: bool = False,
    ) -> None:
        super().__init__()
        self.radii = nn.ModuleDict(radii)
        self.directions = ("t2a", "a2t") if "both" in radii else tuple(radii)
        self.constraint_gradients = constraint_gradients
        self.base, self.alpha, self.beta = base, alpha, beta
        self.similarity, self.decoupled = similarity, decoupled
        self.batch_radii: dict[str, Tensor] = {}
        """Radii of the last batch for callbacks, `{direction: radii}` with radii `(N,)` or `(K, N)`."""
        self._has_started = False

    def radius_of(self, direction: str) -> nn.Module | None:
        """Return the radius module of a direction, or None if the direction has no support vectors."""
        radii = dict(self.radii.items())
        return radii.get("both", radii.get(direction))

    @torch.no_grad()
    def start_radii(self, distance: Tensor | float) -> None:
        """Set all radii that are NaN to `distance`. Radii loaded from a checkpoint are not changed."""
        for parameter in self.radii.parameters():
            if parameter.isnan().all():
                parameter.fill_(distance)
        self._has_started = True

    def forward(
        self,
        audio_embeds: Tensor,
        text_embeds: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        group_ids: Tensor | None,
        chunk_size: int | None,
        base_loss: Callable[[], Tensor],
    ) -> tuple[Tensor, Logs]:
        """Compute the regularized loss, `()`, and values to log, `{name: value}`.

        The arguments are those of the base loss. `text_embeds` is `(N, d)`, or `(K, N, d)` for a multilingual loss.
        `base_loss` is a function that computes the base loss, `()`.
        """
        if not self._has_started:
            self.start_radii(positive_distance(text_embeds.detach(), audio_embeds.detach()).mean())

        radii: dict[str, Tensor] = {}
        for direction in self.directions:
            pair = (text_embeds, audio_embeds) if direction == "t2a" else (audio_embeds, text_embeds)
            module = self.radius_of(direction)
            radii[direction] = radius_of_pairs(module, *pair, logit_scale, group_ids, chunk_size)

        scale = DIRECTION_SCALE.get(self.base, 1.0)
        total, parts = supclap_loss(
            audio_embeds,
            text_embeds,
            logit_scale,
            radii.get("t2a"),
            radii.get("a2t"),
            alpha=scale * self.alpha,
            beta=self.beta if isinstance(module, DynamicRadius) else 0.0,  # one kind in all directions
            original=base_loss(),
            logit_bias=logit_bias if self.base == "siglip" else None,
            similarity=self.similarity,
            decoupled=self.decoupled,
            detach_distance=not self.constraint_gradients,
            group_ids=group_ids,
            chunk_size=chunk_size,
            normalize=None,
        )
        logs: Logs = {f"loss_{self.base}": parts["original"]}
        for direction, radius in radii.items():
            self.batch_radii[direction] = radius.detach()
            logs |= {f"loss_svr_{direction}": scale * parts[f"svr_{direction}"], f"radius_{direction}": radius.mean()}
            if f"constraint_{direction}" in parts:
                logs[f"loss_constraint_{direction}"] = parts[f"constraint_{direction}"]
        return total, logs


class ContrastiveObjective(nn.Module):
    """Contrastive loss between clips and captions, with optional support vector regularization (SVR).

    Args:
        loss: Base loss. With one caption per clip: `infonce`, `siglip` or `reweighted`. With several captions: `kcl`
            for all languages, or `cacl` for the anchor language and one other (ATRI eq. 9-13).
        regularizer: SVR terms to add to the base loss (SupCLAP eq. 6 and table 8). None: no SVR.
        chunk_size: Number of similarity matrix rows to compute at a time, and again in the backward pass. Memory is
            then linear in the batch size. None: all rows at once.
        reweighting: Argument `weighted` of `reweighted_info_nce`, for the loss `reweighted`.
    """

    def __init__(
        self,
        loss: str = "infonce",
        regularizer: SupportVectorRegularizer | None = None,
        chunk_size: int | None = None,
        reweighting: str = "pull",
    ) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise ValueError(f"got loss={loss!r}; it must be one of {', '.join(LOSSES)}")
        if loss == "reweighted" and chunk_size is not None:
            raise ValueError(f"got loss='reweighted' with loss_chunk_size={chunk_size}; leave loss_chunk_size out")
        self.loss, self.regularizer, self.chunk_size = loss, regularizer, chunk_size
        self.reweighting: Any = reweighting
        if loss == "reweighted" and reweighting == "pull":
            self.log_positive_weight = nn.Parameter(torch.zeros(1))
        elif loss == "reweighted":
            self.positive_weight = nn.Parameter(torch.ones(1))  # may become negative

    def forward(
        self,
        audio_embeds: Tensor,
        text_embeds: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        group_ids: Tensor | None = None,
        negative_mask: Tensor | None = None,
    ) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch, `()`, and detached scalars to log, `{name: scalar}`.

        Args:
            audio_embeds: `(N, d)`, unit norm.
            text_embeds: `(N, K, d)`, unit norm. For `kcl` and `cacl`, these are captions in K languages, with the
                anchor language first. For other losses K = 1, or K = 1 + M with M negatives of each clip.
            logit_scale: 1 / temperature, `()`.
            logit_bias: SigLIP bias, `()`.
            group_ids: `(N,)` integers; clips with equal ids are positives of each other.
            negative_mask: `(N, M)` booleans, for `infonce` and `siglip`: which of the last M texts of each clip are its
                wrong captions. SVR terms do not use them.
        """
        negatives = None
        if negative_mask is not None:
            if self.loss not in ("infonce", "siglip"):
                raise ValueError(f"got negatives for {self.loss}; only infonce and siglip use them")
            negative_mask = negative_mask.bool()
            first = text_embeds.shape[1] - negative_mask.shape[1]
            text_embeds, negatives = text_embeds[:, :first], text_embeds[:, first:]
        is_multilingual = self.loss in MULTILINGUAL_LOSSES
        count, expected = text_embeds.shape[1], 2 if is_multilingual else 1
        if count != expected and self.loss != "kcl":
            raise ValueError(f"got {count} texts per clip; {self.loss} needs {expected}")

        # (N, K, d) -> (K, N, d), or (N, d) for one caption per clip
        texts = by_language(text_embeds) if is_multilingual else text_embeds.squeeze(1)
        inputs = audio_embeds, texts, logit_scale, logit_bias, group_ids, self.chunk_size
        base_loss = partial(self._base_loss, *inputs, negatives=negatives, negative_mask=negative_mask)
        if self.regularizer is not None:
            total, logs = self.regularizer(*inputs, base_loss)
        else:
            total = base_loss()
            logs = {f"loss_{self.loss}": total}
        return total, {part: value.detach() for part, value in logs.items()}

    def _base_loss(
        self,
        audio: Tensor,
        texts: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        groups: Tensor | None,
        chunk: int | None,
        **negatives: Tensor | None,
    ) -> Tensor:
        if self.loss == "siglip":
            if bias is None:
                raise ValueError("siglip needs a model with logit_bias; set SupCLAPConfig(logit_bias=-10.0)")
            return sigmoid_loss(audio, texts, scale, bias, groups, chunk, normalize=None, **negatives)
        if self.loss == "reweighted":
            is_log = self.reweighting == "pull"
            weight = self.log_positive_weight.exp() if is_log else self.positive_weight
            return reweighted_info_nce(audio, texts, scale, weight.squeeze(), groups, self.reweighting, None)
        if self.loss == "kcl":
            return kcl_loss(audio, texts.transpose(0, 1), scale, groups, chunk, None)
        if self.loss == "cacl":
            return cacl_loss(audio, texts[0], texts[1], scale, groups, chunk, None)
        return info_nce(audio, texts, scale, groups, chunk, normalize=None, **negatives)


class MatryoshkaObjective(nn.Module):
    """Sum of a loss over nested widths of the embeddings (Kusupati et al., 2022, arXiv 2205.13147).

    L = L(d) + sum_w L(w), where L(w) is the loss of the first w values of each embedding, normalized again. The first
    values are then useful embeddings of their own, which need less memory and time.

    Args:
        objective: Any objective, also a function. Its parameters, such as radii, are shared by all widths.
        widths: Widths w below the width d of the embeddings.
    """

    def __init__(self, objective: Callable[..., Any], widths: Sequence[int]) -> None:
        super().__init__()
        if min(widths) < 1:
            raise ValueError(f"got widths {list(widths)}; expected 1 or more")
        self.objective, self.widths = as_objective(objective), sorted(set(widths))

    @property
    def regularizer(self) -> Any:
        """Regularizer of the objective, or None."""
        return getattr(self.objective, "regularizer", None)

    def forward(self, audio_embeds: Tensor, text_embeds: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch, `()`, and the values to log: those of the whole width, and the loss of each."""
        total, logs = split_loss(self.objective, self.objective(audio_embeds, text_embeds, *inputs, **named))
        radii = getattr(self.regularizer, "batch_radii", {})
        last = dict(radii)  # for callbacks, which compare them with the whole embeddings
        for width in self.widths:
            if width >= audio_embeds.shape[-1]:
                raise ValueError(f"got width {width} for embeddings of width {audio_embeds.shape[-1]}; leave it out")
            audio, text = at_least_float32(audio_embeds[..., :width], text_embeds[..., :width])
            result = self.objective(F.normalize(audio, dim=-1), F.normalize(text, dim=-1), *inputs, **named)
            loss, _ = split_loss(self.objective, result)
            total = total + loss
            logs = {**logs, f"loss_width_{width}": loss.detach()}
        radii.update(last)
        return total, logs


class TemporalObjective(nn.Module):
    """TeminAL loss for stage a or b: InfoNCE with weighted denominators (TeminAL eq. 3-9, 22-26).

    Args:
        stage: `a`: contrast single sounds with pairs of sounds. `b`: contrast pairs in forward order, the same pairs in
            reversed order, and the same pairs overlaid.
        beta: Weight of the text-to-audio direction, relative to audio-to-text.
        two_term_overlay: Argument of `teminal_b_weights`, for stage b.
        **alphas: Keyword arguments of `teminal_a_weights` or `teminal_b_weights`.
    """

    def __init__(self, stage: str, beta: float = 1.0, two_term_overlay: bool = False, **alphas: float) -> None:
        super().__init__()
        if stage not in ("a", "b"):
            raise ValueError(f"got stage={stage!r}; it must be a or b")
        self.stage, self.beta, self.alphas, self.two_term_overlay = stage, beta, alphas, two_term_overlay
        # raises now, not in the first step, if an alpha is out of range
        self._weights(1, torch.tensor([[0, 0, 1]]))

    def forward(
        self,
        audio_embeds: Tensor,
        text_embeds: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        group_ids: Tensor | None = None,
        class_ids: Tensor | None = None,
    ) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch of N samples, `()`, and detached scalars to log, `{name: scalar}`.

        A sample has R items. An item is a clip with its captions. Stage a has R = 2: a single sound and a pair of
        sounds. Stage b has R = 3: one pair in forward order, in reversed order, and overlaid.

        Args:
            audio_embeds: `(N, R, d)`, unit norm.
            text_embeds: `(N, R K, d)`, unit norm; the captions of each item in K languages.
            logit_scale: 1 / temperature, `()`.
            group_ids: `(N, R)` integers; items with equal ids are positives of each other, with weight 1.
            class_ids: `(N, 3)` integers, for stage a: the class of the single sound, then the two classes of the pair.
        """
        roles = 2 if self.stage == "a" else 3
        shape = tuple(audio_embeds.shape)
        if len(shape) != 3 or shape[1] != roles:
            raise ValueError(f"got audio of shape {shape}; stage {self.stage} expects (N, {roles}, d)")

        audio = audio_embeds.transpose(0, 1).flatten(0, 1)  # (N, R, d) -> (R N, d)
        # (N, R K, d) -> (K, R N, d)
        text = text_embeds.unflatten(1, (roles, -1)).permute(2, 1, 0, 3).flatten(1, 2)
        groups = None if group_ids is None else group_ids.T.flatten()  # (N, R) -> (R N,)

        weights = self._weights(len(audio_embeds), class_ids).to(audio)  # (R N, R N)
        if groups is not None:
            is_positive = groups.unsqueeze(1) == groups
            # alphas apply to negatives only
            weights = torch.where(is_positive, weights.clamp_min(1), weights)

        loss = temporal_nce(audio, text, logit_scale, weights, self.beta, groups, normalize=None)
        return loss, {f"loss_teminal_{self.stage}": loss.detach()}

    def _weights(self, count: int, class_ids: Tensor | None) -> Tensor:
        if self.stage == "b":
            return teminal_b_weights(count, **self.alphas, two_term_overlay=self.two_term_overlay)
        if class_ids is None:
            raise ValueError("got no class_ids; stage a needs them (N, 3) to weight the candidates")
        return teminal_a_weights(class_ids[:, 0], class_ids[:, 1:], **self.alphas)


def start_radii(objective: nn.Module, distance: float) -> None:
    """Set all radii of an objective that have no initial value."""
    for part in objective.modules():
        if isinstance(part, SupportVectorRegularizer):
            part.start_radii(distance)


def load_objective(name: str) -> nn.Module:
    """Import a class or function by its name "module:name", and create an instance of a class.

    The module may be in the current folder.
    """
    from ..evaluation.models import find_function  # here, because few runs need it

    objective = find_function(name)
    if inspect.isfunction(objective):
        return FunctionObjective(objective)
    if not isinstance(objective, type) or not issubclass(objective, nn.Module):
        raise ValueError(f"got loss={name!r}; expected the name of a function or of a subclass of nn.Module")
    try:
        return objective()
    except TypeError as error:
        raise ValueError(f"got loss={name!r}; it must need no arguments: {error}") from error


def build_objective(args: SupCLAPTrainingArguments) -> ContrastiveObjective:
    """Build the objective from `loss`, `svr` and their options. Raise ValueError if they cannot be combined.

    By default, the similarity matrix of a global batch of `TILED_CLIPS` or more is computed in tiles.
    """
    chunk_size = args.loss_chunk_size
    if chunk_size is None and args.loss != "reweighted" and args.train_batch_size * args.world_size >= TILED_CLIPS:
        chunk_size = TILED_CLIPS // 4
    if args.svr == "none":
        return ContrastiveObjective(args.loss, chunk_size=chunk_size, reweighting=args.reweighting)
    if args.loss == "reweighted":
        raise ValueError(f"got loss='reweighted' with svr={args.svr!r}; this baseline needs svr=none")
    if args.loss == "siglip" and args.svr_decoupled:
        raise ValueError("got svr_decoupled with loss='siglip'; it changes a softmax, which siglip does not have")
    init = math.nan if args.radius_init is None else args.radius_init
    radii: dict[str, nn.Module] = {}
    sides, _, kind = args.svr.partition("-")
    directions = ["t2a"] if sides == "uni" else ["t2a", "a2t"]
    if args.shared_radius:
        if sides == "uni":
            raise ValueError(f"got shared_radius with svr={args.svr!r}, which has one direction; use bi-static")
        directions = ["both"]
    for direction in directions:
        if kind == "static":
            radii[direction] = StaticRadius(init)
        elif kind == "dynamic":
            order: Any = args.radius_order
            radii[direction] = DynamicRadius(
                args.radius_num_similarities, init=init, order=order, detach_input=not args.radius_gradients
            )
        else:
            radii[direction] = RelativeRadius(args.radius_ratio if kind == "fixed" else 1.0)
    regularizer = SupportVectorRegularizer(
        radii, args.loss, args.svr_alpha, args.svr_beta, "cosine", args.svr_decoupled, args.constraint_gradients
    )
    return ContrastiveObjective(args.loss, regularizer, chunk_size)
