"""TeminAL post-training: its trainer, and the collator that joins two recordings on the fly."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from modeling_supclap.datasets_scripts.schema import stable_id
from modeling_supclap.datasets_scripts.temporal.items import TemporalItems, drawn, render
from modeling_supclap.datasets_scripts.temporal.mixing import RenderOptions

from ..encoding import max_window_seconds
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from .collator import IndexedRows, Row, TrainingCollator
from .contrastive_module import ContrastiveModule
from .objectives import TemporalObjective
from .rows import UsableRows
from .trainer import SupCLAPTrainer
from .training_args import TemporalTrainingArguments


class TemporalCollator(TrainingCollator):
    """TeminAL collator that samples pairs of recordings and joins them on the fly.

    A row `{"clip_index": 7}` contains the index of a pair in the epoch. Each row is rendered as R items (clips with
    captions). In stage a, the items are a single sound and a pair of sounds. In stage b, one pair is rendered three
    times: in forward order, in reversed order, and overlaid. The batch contains B R clips, `input_ids` `(B, R K, L)`
    with K texts per item, and `group_ids` `(B, R)`, equal for items with the same meaning. In stage a it also contains
    `class_ids` `(B, 3)`.

    Args:
        items: Source of recordings, temporal relations and captions. It samples new items for each epoch.
        stage: `a` or `b`.
        window_seconds: Maximum duration of a clip, as in `ContrastiveCollator` (10.12 s for CED).
        max_audio_seconds: Maximum duration of a recording before it is joined with another one. A longer recording is
            cropped to its beginning, or from its first sound if the beginning is silent. The limit is at most half of
            `window_seconds`, and half of the maximum of the feature extractor (10 s for CLAP), so that both sounds fit.
        scheme: `kcl`: captions in all languages. `random`: all captions of a pair are in the same random language.
        **shared: Other arguments of `TrainingCollator`.
    """

    recordings_per_clip = 2
    _from_first_sound = True

    def __init__(
        self,
        processor: SupCLAPProcessor,
        items: TemporalItems,
        stage: str,
        options: RenderOptions | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(processor, **shared)
        self.items = items
        self.stage = stage
        self.options = options

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        draw = self.items.stage_a if self.stage == "a" else self.items.triple

        clips: list[np.ndarray] = []
        captions: list[list[tuple[str, str]]] = []
        meanings: list[int] = []
        classes: list[int] = []
        epoch = int(self.epoch)
        for row in rows:
            # One language for all items of a pair: otherwise the language alone would separate their captions.
            number = row["clip_index"]
            language = drawn(self.languages, self.seed, "language", epoch, number)
            captions.append([])
            for item in draw(epoch, number):  # R items
                clip = render(item, self._read, self.rate_hz, self.options)
                clips.append(self._augment(clip, {"clip_id": item.clip_id}))
                available = {language: item.captions[language]} if self.scheme == "random" else item.captions
                captions[-1] += self._draw({"clip_id": item.clip_id, "captions": available})[1]
                meanings.append(stable_id(item.meaning))
                classes += map(self.items.labels.index, item.labels)

        batch = {**self._stack(list(map(self._extract, clips))), **self._texts(captions)}
        batch["clip_index"] = torch.tensor([row["clip_index"] for row in rows])
        batch["group_ids"] = torch.tensor(meanings).view(len(rows), -1)
        if self.stage == "a":
            batch["class_ids"] = torch.tensor(classes).view(len(rows), -1)
        return batch


class TemporalTrainer(SupCLAPTrainer):
    """Hugging Face Trainer for one stage of TeminAL, which post-trains a model on the order of sounds (TeminAL 3.2).

    An item is a single sound, or two sounds joined into one clip. Evaluation measures `temporal_accuracy`: how often
    an item is closer to its own caption than to the captions of the other items made from the same two sounds.

    Args:
        model: Model to post-train. Freeze some of its parameters first, for example with `lora.train_last_layers`.
        train_items: Training items, sampled from the training split of a labelled dataset.
    """

    args: TemporalTrainingArguments

    def __init__(
        self,
        model: SupCLAPModel,
        args: TemporalTrainingArguments,
        train_items: TemporalItems,
        eval_items: TemporalItems | None = None,
        **kwargs: Any,
    ) -> None:
        self.train_items = train_items
        self.eval_items = train_items if eval_items is None else eval_items
        super().__init__(
            model,
            args,
            train_dataset=_numbered(train_items),
            eval_dataset=None if eval_items is None else _numbered(eval_items),
            **kwargs,
        )

    def _build_module(self, args: Any, objective: Any) -> ContrastiveModule:
        if objective is None:
            objective = TemporalObjective(args.stage, args.stage_beta, args.two_term_overlay, **args.alphas)
        return super()._build_module(args, objective)

    def _build_collators(self, args: Any) -> tuple[TrainingCollator, Any]:
        collator = partial(
            TemporalCollator,
            self.processor,
            stage=args.stage,
            options=RenderOptions(
                match_loudness=args.match_loudness, match_overlay_loudness=args.match_overlay_loudness
            ),
            window_seconds=max_window_seconds(self.clap.config, self.processor.feature_extractor),
            **self._collator_options(args),
        )
        return (
            collator(
                items=self.train_items,
                languages=args.languages,
                scheme=args.text_scheme,
                **self._training_options(args),
            ),
            collator(items=self.eval_items, languages=args.eval_languages[:1], seed=args.seed),
        )

    def _metric_names(self) -> list[str]:
        roles = ("single", "combined") if self.args.stage == "a" else ("order", "forward", "reversed", "overlaid")
        return ["temporal_accuracy", *(f"{role}_accuracy" for role in roles), "temporal_accuracy_chance"]

    def _metrics_of(self, rows: IndexedRows) -> Callable[[Any], dict[str, float]]:
        from ..evaluation.zste import temporal_metrics

        return temporal_metrics


def _numbered(items: TemporalItems) -> UsableRows:
    """Return a row for each pair. The items contain the recordings, which are usable."""
    pairs = [{"clip_id": f"pair {number}"} for number in range(len(items))]
    return UsableRows(pairs, described=items.rows)
