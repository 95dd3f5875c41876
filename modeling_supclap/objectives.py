"""Objectives: a loss with its parameters and its logs. Embeddings in, `(loss, {name: scalar})` out.

Called as `objective(audio_embeds, text_embeds, logit_scale, logit_bias, group_ids)` on the global batch:
audio `(N, d)`, text `(N, K, d)`, K texts a clip. Its parameters train with the model; inference never needs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .losses.contrastive import info_nce, reweighted_info_nce, sigmoid_loss, similarity_matrix
from .losses.support_vector import (
    DynamicRadius,
    Similarity,
    StaticRadius,
    radius_constraint,
    support_vector_loss,
    support_vector_sigmoid_loss,
)
from .training_args import SupCLAPTrainingArguments

Logs = dict[str, Tensor]


class SupportVectorRegularizer(nn.Module):
    """alpha L_svr + beta L_cons, in one direction or both [S eq. 6 and 9].

    Args:
        radii: a radius module for each direction that is regularised, by its name: `t2a` displaces texts toward their
            clips, `a2t` clips toward their texts.
        alpha: weight of each direction's SVR term.
        beta: weight of the constraint, which acts on dynamic radii only, as in the paper.
        similarity: of a support vector to its targets, `cosine` or `dot`.
        decoupled: leave the positive out of the denominator.
    """

    def __init__(
        self,
        radii: dict[str, nn.Module],
        alpha: float = 1.0,
        beta: float = 0.01,
        similarity: Similarity = "cosine",
        decoupled: bool = False,
    ) -> None:
        super().__init__()
        self.radii = nn.ModuleDict(radii)
        self.alpha = alpha
        self.beta = beta
        self.similarity: Similarity = similarity
        self.decoupled = decoupled

    def forward(
        self,
        audio_embeds: Tensor,
        text_embeds: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        group_ids: Tensor | None = None,
    ) -> tuple[Tensor, Logs]:
        """The regularisation of one batch; texts are `(N, d)`. With a bias the support vectors go through SigLIP."""
        total = audio_embeds.new_zeros(())
        logs: Logs = {}
        for direction, radius_of in self.radii.items():
            anchors, targets = (text_embeds, audio_embeds) if direction == "t2a" else (audio_embeds, text_embeds)
            radius = radius_of(logit_scale * similarity_matrix(anchors, targets), group_ids)
            term = self._term(anchors, targets, radius, logit_scale, logit_bias, group_ids)
            total = total + self.alpha * term
            logs |= {f"loss_svr_{direction}": term, f"radius_{direction}": radius.mean()}
            if isinstance(radius_of, DynamicRadius):
                constraint = radius_constraint(anchors, targets, radius)
                total = total + self.beta * constraint
                logs[f"loss_constraint_{direction}"] = constraint
        return total, logs

    def _term(
        self,
        anchors: Tensor,
        targets: Tensor,
        radius: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        group_ids: Tensor | None,
    ) -> Tensor:
        if logit_bias is not None:
            return support_vector_sigmoid_loss(
                anchors, targets, radius, logit_scale, logit_bias, self.similarity, group_ids
            )
        return support_vector_loss(anchors, targets, radius, logit_scale, self.similarity, self.decoupled, group_ids)


class ContrastiveObjective(nn.Module):
    """InfoNCE, SigLIP or the re-weighted InfoNCE on pairs, with or without support vectors.

    Args:
        loss: `infonce`, `siglip` or `reweighted`.
        regularizer: what is added to it, if anything.

    Raises:
        ValueError: an unknown loss.
    """

    def __init__(self, loss: str = "infonce", regularizer: SupportVectorRegularizer | None = None) -> None:
        super().__init__()
        if loss not in ("infonce", "siglip", "reweighted"):
            raise ValueError(f"got loss={loss!r}; it must be infonce, siglip or reweighted")
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
        """The loss of a batch of pairs, and its parts.

        Args:
            audio_embeds: `(N, d)`, unit norm.
            text_embeds: `(N, 1, d)`, unit norm.
            logit_scale: 1 / temperature, `()`.
            logit_bias: SigLIP's bias, `()`; only `siglip` uses it.
            group_ids: `(N,)`, clips with equal ids are positives of each other.

        Returns:
            The loss, `()`, and detached scalars by name.

        Raises:
            ValueError: several texts a clip, or `siglip` with a model that has no bias.
        """
        if text_embeds.shape[1] != 1:
            raise ValueError(f"got {text_embeds.shape[1]} texts a clip; {self.loss} contrasts pairs, give one")
        pairs = (audio_embeds, text_embeds[:, 0], logit_scale)
        bias = self._bias(logit_bias)
        base = self._base(*pairs, bias, group_ids)
        total, logs = base, {f"loss_{self.loss}": base}
        if self.regularizer is not None:
            extra, extra_logs = self.regularizer(*pairs, bias, group_ids)
            total, logs = base + extra, logs | extra_logs
        return total, {name: value.detach() for name, value in logs.items()}

    def _bias(self, logit_bias: Tensor | None) -> Tensor | None:
        if self.loss != "siglip":
            return None
        if logit_bias is None:
            raise ValueError("siglip needs a model with a bias: SupCLAPConfig(logit_bias=-10.0, temperature=0.1)")
        return logit_bias

    def _base(
        self, audio: Tensor, text: Tensor, logit_scale: Tensor, logit_bias: Tensor | None, group_ids: Tensor | None
    ) -> Tensor:
        if logit_bias is not None:
            return sigmoid_loss(audio, text, logit_scale, logit_bias, group_ids)
        if self.loss == "reweighted":
            weight = self.log_positive_weight.exp().squeeze()
            return reweighted_info_nce(audio, text, logit_scale, weight, group_ids)
        return info_nce(audio, text, logit_scale, group_ids)


def build_objective(args: SupCLAPTrainingArguments) -> nn.Module:
    """The objective that training arguments describe: `loss`, `svr` and the fields that begin with them.

    Raises:
        ValueError: `svr` on the re-weighted loss, which is the baseline that goes without, or `svr_decoupled` on
            siglip, which has no denominator to leave a positive out of.
    """
    if args.svr == "none":
        return ContrastiveObjective(args.loss)
    if args.loss == "reweighted":
        raise ValueError("loss reweighted is a baseline without support vectors; set svr to none")
    if args.loss == "siglip" and args.svr_decoupled:
        raise ValueError("svr_decoupled concerns a softmax's denominator; siglip has none")
    reach, kind = args.svr.split("-")
    directions = ("t2a", "a2t") if reach == "bi" else ("t2a",)
    regularizer = SupportVectorRegularizer(
        {direction: _radius(kind, args) for direction in directions},
        alpha=args.svr_alpha,
        beta=args.svr_beta,
        similarity=args.svr_similarity,  # type: ignore[arg-type]  # checked by the arguments
        decoupled=args.svr_decoupled,
    )
    return ContrastiveObjective(args.loss, regularizer)


def _radius(kind: str, args: Any) -> nn.Module:
    if kind == "static":
        return StaticRadius(args.radius_init)
    return DynamicRadius(args.radius_num_similarities, init=args.radius_init)
