"""Training batches that contain hard negatives: clips with captions similar to that of an anchor (SupCLAP E.8)."""

from collections.abc import Iterator

import numpy as np
from accelerate.utils import broadcast
from torch.utils.data import Sampler

from modeling_supclap.datasets_scripts.schema import group_id, without_audio

from .. import encoding
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor
from .collator import IndexedRows
from .training_args import SupCLAPTrainingArguments

POOL_SIZE = 720
"""Number of random items from which hard negatives are selected, as in SupCLAP E.8."""


class HardBatches(Sampler[int]):
    """Order of the training items in which each batch contains an anchor and hard negatives of the anchor.

    Each epoch contains every item once. A batch consists of a random anchor, the K items most similar to it among
    `pool_size` random ones, and random items. They are drawn from the items that are left in the epoch, so the last
    batches have smaller pools. The order depends only on the seed and the epoch.

    Args:
        embeds: Embeddings of the items, (N, d), unit norm.
        group_ids: (N,) integers; items with the group id of the anchor are not its negatives.
        batch_size: Number of items in a batch.
        count: Number K of hard negatives, less than `batch_size`.
        pool_size: Number of items from which the hard negatives are selected.
    """

    def __init__(
        self,
        embeds: np.ndarray,
        group_ids: np.ndarray,
        batch_size: int,
        count: int,
        pool_size: int = POOL_SIZE,
        seed: int = 0,
    ) -> None:
        self.embeds, self.group_ids, self.seed = embeds, group_ids, seed
        self.batch_size, self.count, self.pool_size = batch_size, count, pool_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.embeds)

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng([self.seed, self.epoch])
        left = np.arange(len(self))
        while len(left):
            shuffled = random.permutation(left)
            anchor, others = shuffled[0], shuffled[1:]
            is_hard = np.zeros(len(others), dtype=bool)
            is_hard[self._hardest(anchor, others[: self.pool_size])] = True

            hard, easy = others[is_hard], others[~is_hard]
            num_easy = self.batch_size - 1 - len(hard)
            yield from [int(anchor), *hard.tolist(), *easy[:num_easy].tolist()]
            left = easy[num_easy:]

    def _hardest(self, anchor: int, pool: np.ndarray) -> np.ndarray:
        """Return the positions in a pool of the K items most similar to the anchor, without its positives."""
        negatives = np.flatnonzero(self.group_ids[pool] != self.group_ids[anchor])
        similarity = self.embeds[pool[negatives]] @ self.embeds[anchor]  # (P,)
        return negatives[np.argsort(-similarity, kind="stable")[: self.count]]


def order_by_captions(
    model: SupCLAPModel, processor: SupCLAPProcessor, rows: IndexedRows, args: SupCLAPTrainingArguments
) -> HardBatches:
    """Embed a caption of each training item, and return the order of `args.hard_negatives_per_batch`.

    The caption is in the first of `args.languages` in which the clip has one. All processes use the embeddings of the
    first process.
    """
    languages, texts, groups = [], [], []
    light = without_audio(rows.rows)
    for item in range(len(rows)):
        index, number = (item, 0) if rows.captions is None else rows.captions.locate(item)
        row = light[index]
        language = next(code for code in args.languages if row["captions"].get(code))
        languages.append(language)
        texts.append(row["captions"][language][number])
        groups.append(group_id(row, args.positives))
    size = args.per_device_eval_batch_size
    embeds = encoding.encode_text(
        model, texts, processor, language=languages, batch_size=size, convert_to_tensor=True, device=args.device
    )
    return HardBatches(
        broadcast(embeds).cpu().numpy(),
        np.array(groups),
        args.train_batch_size * args.world_size,  # processes take consecutive parts of it
        args.hard_negatives_per_batch,
        seed=args.seed,
    )
