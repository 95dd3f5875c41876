"""Objectives: modules that compute a loss and the values to log from the embeddings of a batch.

Call `objective(audio_embeds, text_embeds, logit_scale, logit_bias, group_ids)` on the global batch, with audio `(N, d)`
and text `(N, K, d)`, K texts per clip. It returns `(loss, {name: scalar})`. The parameters of an objective train with
the model; inference does not need them.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..losses.contrastive import info_nce, reweighted_info_nce, sigmoid_loss
from ..losses.multilingual import DIRECTION_SCALE, by_language, cacl_loss, kcl_loss
from ..losses.similarity import similarity_matrix
from ..losses.support_vector import (
    DynamicRadius,
    Similarity,
    StaticRadius,
    positive_distance,
    radius_constraint,
    support_vector_loss,
    support_vector_sigmoid_loss,
)
from ..losses.temporal import teminal_a_weights, teminal_b_weights, temporal_nce
from .options import LOSSES, MULTILINGUAL_LOSSES
from .training_args import SupCLAPTrainingArguments

Logs = dict[str, Tensor]


class SupportVectorRegularizer(nn.Module):
    """Support vector regularization alpha L_svr + beta L_cons, in one direction or both [S eq. 6 and 9].

    Args:
        radii: Radius modules by direction: `t2a` displaces texts toward their clips, `a2t` clips toward their texts. A
            radius of NaN is initialised with the mean distance of the pairs of the first batch.
        base: The base loss, `infonce`, `siglip`, `kcl` or `cacl`. The SVR term has its form and scale.
        alpha: Weight of the SVR term of each direction.
        beta: Weight of the constraint, which applies to dynamic radii only, as in the paper.
        similarity: Similarity of a support vector to a target, `cosine` or `dot`.
        decoupled: Whether to leave the positives out of the denominator.
    """

    def __init__(
        self,
        radii: dict[str, nn.Module],
        base: Literal["infonce", "siglip", "kcl", "cacl"] = "infonce",
        alpha: float = 1.0,
        beta: float = 0.01,
        similarity: Similarity = "cosine",
        decoupled: bool = False,
    ) -> None:
        super().__init__()
        self.radii = nn.ModuleDict(radii)
        self.base: Literal["infonce", "siglip", "kcl", "cacl"] = base
        self.alpha = alpha
        self.beta = beta
        self.similarity: Similarity = similarity
        self.decoupled = decoupled
        self.batch_radii: dict[str, Tensor] = {}
        """Radius of each pair of the last batch by direction, `(N,)` or `(K, N)`; callbacks read it."""
        self._has_started = False

    @torch.no_grad()
    def start_radii(self, distance: Tensor | float) -> None:
        """Initialise the radii that are NaN; radii loaded from a checkpoint are not changed.

        Args:
            distance: Initial radius, the mean distance between a clip and its text, `()`.
        """
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
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Logs]:
        """Compute the regularization of one batch.

        Args:
            audio_embeds: `(N, d)`, unit norm.
            text_embeds: `(N, d)`, or `(K, N, d)` on a multilingual loss, unit norm.
            logit_scale: 1 / temperature, `()`.
            logit_bias: Bias of SigLIP, `()`.
            group_ids: `(N,)` integers; clips with equal ids are positives of each other.
            chunk_size: Rows of the similarity matrix computed at a time. None: all rows.

        Returns:
            The term to add to the base loss, `()`, and the values to log by name.
        """
        if not self._has_started:
            self.start_radii(positive_distance(text_embeds.detach(), audio_embeds.detach()).mean())

        total = audio_embeds.new_zeros(())
        logs: Logs = {}
        for direction, radius_module in self.radii.items():
            assert isinstance(radius_module, StaticRadius | DynamicRadius)
            anchors, targets = audio_embeds, text_embeds
            if direction == "t2a":
                anchors, targets = text_embeds, audio_embeds

            if isinstance(radius_module, StaticRadius) or chunk_size is not None:
                radius = radius_module.in_tiles(anchors, targets, logit_scale, group_ids, chunk_size or len(anchors))
            else:
                radius = radius_module(logit_scale * similarity_matrix(anchors, targets), group_ids)

            options: dict[str, Any] = {
                "similarity": self.similarity,
                "group_ids": group_ids,
                "chunk_size": chunk_size,
            }
            if self.base == "siglip":
                bias = _required_bias(logit_bias)
                term = support_vector_sigmoid_loss(anchors, targets, radius, logit_scale, bias, **options)
            else:
                options["decoupled"] = self.decoupled
                term = support_vector_loss(anchors, targets, radius, logit_scale, **options)

            scale = DIRECTION_SCALE.get(self.base, 1.0)
            total = total.add(term, alpha=scale * self.alpha)
            self.batch_radii[direction] = radius.detach()
            logs |= {f"loss_svr_{direction}": scale * term.detach(), f"radius_{direction}": radius.detach().mean()}

            if isinstance(radius_module, DynamicRadius):
                constraint = radius_constraint(anchors, targets, radius)
                total = total + self.beta * constraint
                logs[f"loss_constraint_{direction}"] = constraint
        return total, logs


class ContrastiveObjective(nn.Module):
    """A base loss of clips and their captions, with or without support vectors.

    Args:
        loss: With one caption per clip: `infonce`, `siglip` or `reweighted`. With several: `kcl`, captions in all
            languages, or `cacl`, captions in the anchor language and one other [A eq. 9-13].
        regularizer: SVR terms to add to the base loss; None: no terms [S eq. 6 and table 8].
        chunk_size: Rows of the similarity matrix computed at a time, and again in the backward pass; memory is then
            linear in the batch size. None: all rows.

    Raises:
        ValueError: The loss is unknown, or `reweighted` with a chunk size.
    """

    def __init__(
        self, loss: str = "infonce", regularizer: SupportVectorRegularizer | None = None, chunk_size: int | None = None
    ) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise ValueError(f"got loss={loss!r}; it must be one of {', '.join(LOSSES)}")
        if loss == "reweighted" and chunk_size is not None:
            raise ValueError(
                f"got loss='reweighted' with loss_chunk_size={chunk_size}; this loss needs the whole matrix, "
                "leave loss_chunk_size out"
            )
        self.chunk_size = chunk_size
        self.loss = loss
        self.regularizer = regularizer
        if loss == "reweighted":
            self.log_positive_weight = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        audio_embeds: Tensor,
        text_embeds: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        group_ids: Tensor | None = None,
    ) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch and the values to log.

        Args:
            audio_embeds: `(N, d)`, unit norm.
            text_embeds: `(N, K, d)`, unit norm: one caption per clip. For `kcl` and `cacl`, the caption in K languages;
                `cacl` needs the anchor language first.
            logit_scale: 1 / temperature, `()`.
            logit_bias: Bias of SigLIP, `()`; only `siglip` uses it.
            group_ids: `(N,)` integers; clips with equal ids are positives of each other.

        Returns:
            The loss, `()`, and detached scalars by name.

        Raises:
            ValueError: The number of texts per clip does not suit the loss, or the loss is `siglip` and the model has
                no bias.
        """
        count = text_embeds.shape[1]
        if self.loss == "cacl" and count != 2:
            raise ValueError(f"got {count} texts per clip; cacl needs two, the anchor language first")
        if self.loss == "kcl" and count < 2:
            raise ValueError(f"got captions in K = {count} languages; kcl needs two or more")
        if self.loss not in MULTILINGUAL_LOSSES and count != 1:
            raise ValueError(f"got {count} texts per clip; {self.loss} needs one")

        # (N, K, d) -> (K, N, d), or (N, d) for one caption per clip
        texts = by_language(text_embeds) if self.loss in MULTILINGUAL_LOSSES else text_embeds.squeeze(1)
        options: dict[str, Any] = {"group_ids": group_ids, "chunk_size": self.chunk_size}

        if self.loss == "siglip":
            base = sigmoid_loss(audio_embeds, texts, logit_scale, _required_bias(logit_bias), **options)
        elif self.loss == "reweighted":
            weight = self.log_positive_weight.exp().squeeze()
            base = reweighted_info_nce(audio_embeds, texts, logit_scale, weight, group_ids)
        elif self.loss == "kcl":
            base = kcl_loss(audio_embeds, text_embeds, logit_scale, **options)
        elif self.loss == "cacl":
            base = cacl_loss(audio_embeds, texts[0], texts[1], logit_scale, **options)
        else:
            base = info_nce(audio_embeds, texts, logit_scale, **options)

        total, logs = base, {f"loss_{self.loss}": base}
        if self.regularizer is not None:
            extra, extra_logs = self.regularizer(
                audio_embeds, texts, logit_scale, logit_bias, group_ids, self.chunk_size
            )
            total, logs = base + extra, logs | extra_logs
        return total, {part: value.detach() for part, value in logs.items()}


class TemporalObjective(nn.Module):
    """TeminAL stage A or B: InfoNCE over all roles of a batch, with weighted denominators [T eq. 3-9, 22-26].

    Args:
        stage: `a`: single sounds against pairs; `b`: forward, reversed and overlaid pairs.
        beta: Weight of the text-to-audio direction, relative to audio-to-text.
        alphas: Arguments of `teminal_a_weights` or `teminal_b_weights` by name.

    Raises:
        ValueError: The stage is unknown, or an alpha is outside 0 to 1.
    """

    def __init__(self, stage: str, beta: float = 1.0, **alphas: float) -> None:
        super().__init__()
        if stage not in ("a", "b"):
            raise ValueError(f"got stage={stage!r}; it must be a or b")
        self.stage = stage
        self.beta = beta
        self.alphas = alphas
        self._weights(1, torch.tensor([[0, 0, 1]]))  # raises now, not in the first step, if an alpha is out of range

    def forward(
        self,
        audio_embeds: Tensor,
        text_embeds: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        group_ids: Tensor | None = None,
        class_ids: Tensor | None = None,
    ) -> tuple[Tensor, Logs]:
        """Compute the loss of N pairs of recordings, each in R roles.

        Args:
            audio_embeds: `(N, R, d)`, unit norm. The roles are single and combined in stage a, and forward, reversed
                and overlaid in stage b.
            text_embeds: `(N, R K, d)`, unit norm: the caption of each role in K languages.
            logit_scale: 1 / temperature, `()`.
            logit_bias: Not used.
            group_ids: `(N, R)` integers; items with equal ids have the same meaning and are positives of each other,
                with weight 1.
            class_ids: `(N, 3)` integers, the class of the single sound and the two classes of the pair; only for stage
                a, which requires them.

        Returns:
            The loss, `()`, and detached scalars by name.

        Raises:
            ValueError: The number of roles is not that of the stage, or class ids are missing.
        """
        roles = 2 if self.stage == "a" else 3
        if audio_embeds.ndim != 3 or audio_embeds.shape[1] != roles:
            raise ValueError(
                f"got audio of shape {tuple(audio_embeds.shape)}; stage {self.stage} expects (N, {roles}, d)"
            )

        audio = audio_embeds.transpose(0, 1).flatten(0, 1)  # (N, R, d) -> (R N, d)
        text = text_embeds.unflatten(1, (roles, -1)).permute(2, 1, 0, 3).flatten(1, 2)  # (N, R K, d) -> (K, R N, d)
        groups = None if group_ids is None else group_ids.T.flatten()  # (N, R) -> (R N,)

        weights = self._weights(len(audio_embeds), class_ids).to(audio)  # (R N, R N)
        if groups is not None:
            weights = weights.masked_fill(groups.unsqueeze(1) == groups, 1.0)  # alphas apply to negatives only

        loss = temporal_nce(audio, text, logit_scale, weights, self.beta, groups)
        return loss, {f"loss_teminal_{self.stage}": loss.detach()}

    def _weights(self, count: int, class_ids: Tensor | None) -> Tensor:
        if self.stage == "b":
            return teminal_b_weights(count, **self.alphas)
        if class_ids is None:
            raise ValueError("got no class_ids; stage a needs them (N, 3) to weight the candidates")
        return teminal_a_weights(class_ids[:, 0], class_ids[:, 1:], **self.alphas)


def build_objective(args: SupCLAPTrainingArguments) -> ContrastiveObjective:
    """Build the objective from the training arguments: `loss`, `svr`, and the options of both.

    Raises:
        ValueError: `svr` with the loss `reweighted`, or `svr_decoupled` with `siglip`, which has no softmax.
    """
    if args.svr == "none":
        return ContrastiveObjective(args.loss, chunk_size=args.loss_chunk_size)
    if args.loss == "reweighted":
        raise ValueError(
            f"got loss='reweighted' with svr={args.svr!r}; this baseline has no support vectors, set svr=none"
        )
    if args.loss == "siglip" and args.svr_decoupled:
        raise ValueError(
            "got svr_decoupled with loss='siglip'; it changes the denominator of a softmax, which siglip does not have"
        )

    directions, kind = args.svr.split("-")
    init = math.nan if args.radius_init is None else args.radius_init
    radii: dict[str, nn.Module] = {}
    for direction in ("t2a", "a2t") if directions == "bi" else ("t2a",):
        if kind == "static":
            radii[direction] = StaticRadius(init)
        else:
            radii[direction] = DynamicRadius(args.radius_num_similarities, init=init)

    regularizer = SupportVectorRegularizer(
        radii,
        base=args.loss,  # type: ignore[arg-type]  # checked by the arguments
        alpha=args.svr_alpha,
        beta=args.svr_beta,
        similarity=args.svr_similarity,  # type: ignore[arg-type]  # checked by the arguments
        decoupled=args.svr_decoupled,
    )
    return ContrastiveObjective(args.loss, regularizer, args.loss_chunk_size)


def _required_bias(logit_bias: Tensor | None) -> Tensor:
    if logit_bias is None:
        raise ValueError(
            "got a model without logit_bias; siglip needs one: SupCLAPConfig(logit_bias=-10.0, temperature=0.1)"
        )
    return logit_bias
