"""Losses for control experiments. Each changes one part of a method.

supclap train --loss modeling_supclap.recipes.studies.controls:ShuffledTargets
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from modeling_supclap.losses.contrastive import softmax_contrast
from modeling_supclap.losses.similarity import similarity_matrix
from modeling_supclap.losses.support_vector import DynamicRadius, positive_distance, radius_constraint, support_vectors
from modeling_supclap.training.objectives import ContrastiveObjective, Logs, SupportVectorRegularizer


class ShuffledRegularizer(SupportVectorRegularizer):
    """SVR with support vectors that move toward the target of another pair.

    Everything else is as in SVR. The radii are predicted from the similarities of the true pairs, and the loss compares
    a support vector with the target of its own pair. If SVR gains because anchors move toward their own targets, this
    control does not gain.
    """

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
        """Compute the regularized loss, `()`, and the values to log, `{name: value}`."""
        if not self._has_started:
            self.start_radii(positive_distance(text_embeds.detach(), audio_embeds.detach()).mean())

        total = base_loss()
        logs = {f"loss_{self.base}": total}
        for direction, module in self.radii.items():
            assert isinstance(module, DynamicRadius)
            pair = (text_embeds, audio_embeds)
            anchors, targets = pair if direction == "t2a" else pair[::-1]
            others = targets.roll(1, 0)  # the target of the previous pair of the batch
            radius = module(logit_scale * similarity_matrix(anchors, targets), group_ids)
            supports = support_vectors(anchors, others, radius)
            term = softmax_contrast(logit_scale * similarity_matrix(supports, targets), group_ids).mean()
            constraint = radius_constraint(anchors, others, radius)
            total = total + self.alpha * term + self.beta * constraint
            logs |= {f"loss_svr_{direction}": term, f"radius_{direction}": radius.detach().mean()}
        return total, logs


class ShuffledTargets(ContrastiveObjective):
    """InfoNCE with `ShuffledRegularizer` in both directions, for batches of at least `num_similarities` pairs."""

    def __init__(self, num_similarities: int = 24) -> None:
        radii: dict[str, nn.Module] = {
            direction: DynamicRadius(num_similarities, init=math.nan) for direction in ("t2a", "a2t")
        }
        super().__init__(regularizer=ShuffledRegularizer(radii))
