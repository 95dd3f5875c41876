"""Rows of a run: converted, checked and filtered once, then read by the data loader in an order of each epoch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from modeling_supclap.datasets_scripts import bad_audio
from modeling_supclap.datasets_scripts.schema import (
    hash_rows,
    require_captions,
    warn_of_shared_captions,
    without_audio,
)
from modeling_supclap.datasets_scripts.stream import EpochBatches, EpochRows, RowStream

from ..processing_supclap import SupCLAPProcessor
from .collator import IndexedRows, min_seconds
from .training_args import SupCLAPTrainingArguments

logger = logging.getLogger(__name__)

MANY_ROWS = 5_000_000
"""Number of map-style rows above which streaming is advised."""

BYTES_PER_ROW = 340
"""Measured memory per map-style row with one caption: columns of the table, and the order of an epoch."""


@dataclass(frozen=True)
class UsableRows:
    """Rows of a split that a trainer can use as they are: the result of `make_usable`.

    Attributes:
        rows: Map-style dataset in the format of `schema.Row` without unusable recordings, or a `RowStream`.
        described: Rows with the clip ids and captions that identify the data. None: `rows`.
        left_out: Ids of the clips with unusable recordings, which `rows` lacks.
    """

    rows: Any
    described: Any = None
    left_out: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Number of rows, and a hash of their clip ids and captions in their order: `{"rows": n, "sha256": hash}`.

        Equal rows have equal records, wherever they are stored. The hash of a stream is that of its file names and row
        groups, because its rows are not read before the training.
        """
        if isinstance(self.rows, RowStream):
            return {"rows": self.rows.num_rows, "sha256": self.rows.content_hash}
        described = self.rows if self.described is None else self.described
        return {"rows": len(self.rows), "sha256": hash_rows(described)}


def make_usable(rows: Any, args: SupCLAPTrainingArguments, processor: SupCLAPProcessor) -> Any:
    """Convert rows to the format of `schema.Row`, and apply `args.on_bad_audio`. Warn of clips with the same captions.

    The recordings are read if `on_bad_audio` is "skip" or "report". A stream is only wrapped.

    Args:
        rows: A map-style dataset, a `RowStream`, or a dict of them. A `datasets.Dataset` with other columns is
            converted by `builders.hf.as_rows`. `UsableRows` and None are returned unchanged.

    Returns:
        `UsableRows`, or a dict of them. A trainer takes them in place of a dataset, and does not read them again.

    Raises:
        BadAudioError: All recordings are unusable.
        ValueError: The columns of a dataset contain no audio or no captions.
    """
    if rows is None or isinstance(rows, UsableRows):
        return rows
    if isinstance(rows, Mapping):
        return {name: make_usable(each, args, processor) for name, each in rows.items()}
    if isinstance(rows, RowStream):
        return UsableRows(rows)

    plain = as_plain_rows(rows, args)
    usable = filter_bad_audio(plain, args, min_seconds(processor))
    if args.positives == "clip" and args.process_index == 0:
        warn_of_shared_captions(usable)
    return UsableRows(usable, left_out=list_left_out(plain, usable))


def list_left_out(rows: Any, usable: Any) -> list[str]:
    """Return the ids of the rows that `filter_bad_audio` has removed."""
    if len(rows) == len(usable):
        return []
    ids = {row["clip_id"] for row in without_audio(usable)}
    return [row["clip_id"] for row in without_audio(rows) if row["clip_id"] not in ids]


def map_sets(function: Callable[[Any], Any], rows: Any) -> Any:
    """Apply a function to rows, or to each in a dict. None is returned unchanged."""
    if isinstance(rows, Mapping):
        return {name: map_sets(function, each) for name, each in rows.items()}
    return rows if rows is None else function(rows)


def plain_rows(usable: Any) -> Any:
    """Return the rows of `UsableRows`, or of each in a dict. Other rows and None are returned unchanged."""
    return map_sets(lambda each: each.rows if isinstance(each, UsableRows) else each, usable)


def dataset_names(rows: Any) -> set[str]:
    """Return the names of the datasets in a mixture (`mixture.mix`). The set is empty for other rows."""
    if "dataset" in (getattr(rows, "column_names", None) or ()):
        return set(rows.unique("dataset"))
    return {row["dataset"] for row in rows if "dataset" in row} if isinstance(rows, list) else set()


def as_plain_rows(rows: Any, args: SupCLAPTrainingArguments) -> Any:
    """Return rows in the format of `schema.Row`: those of `UsableRows`, or of a dataset, which is converted.

    Raises:
        ValueError: The dataset has a transform of its own, or no captions or audio.
    """
    if isinstance(rows, IndexedRows):  # of this trainer
        return rows
    form = getattr(rows, "format", None)  # of `datasets.Dataset`
    if isinstance(form, Mapping) and form.get("type") == "custom":
        raise ValueError(
            "the dataset has a transform (with_transform or set_transform), without which its columns would be read; "
            "apply it with map(), or pass a map-style dataset of your own with rows as in schema.Row"
        )
    # reads Parquet: only if rows are given
    from modeling_supclap.datasets_scripts.builders.hf import ensure_rows

    return rows.rows if isinstance(rows, UsableRows) else ensure_rows(rows, args.languages[0])


def filter_bad_audio(rows: Any, args: SupCLAPTrainingArguments, min_seconds: float = 0.0) -> Any:
    """Remove rows with unusable recordings, if requested by `args.on_bad_audio`.

    All processes and resumed runs use the same rows, because the result is cached in `bad_audio.json` in the output
    folder. The recordings are read once, by `args.dataloader_num_workers` processes. Recordings shorter than
    `min_seconds` are unusable unless `args.pad_short_clips` is set.
    """
    with args.main_process_first(desc="reading the recordings"):
        cache = Path(args.output_dir or ".") / "bad_audio.json"
        workers = max(1, args.dataloader_num_workers)
        shortest = 0.0 if args.pad_short_clips else min_seconds
        return bad_audio.filter_bad_audio(rows, args.on_bad_audio, workers, cache, shortest)


def read_in_epochs(usable: UsableRows | None, args: SupCLAPTrainingArguments) -> tuple[Any, EpochBatches | None]:
    """Prepare training rows for the data loader.

    Returns:
        The rows as `IndexedRows`, or as `EpochRows` of a stream; None without training rows. And the batch sampler of a
        stream; None for map-style rows, which the Trainer shuffles and batches.

    Raises:
        ValueError: The rows are fewer than one batch, would end with a batch of one clip, or lack captions that
            `track_language_errors` needs.
    """
    if usable is None:
        return None, None
    rows: IndexedRows | EpochRows
    batches = None
    if isinstance(usable.rows, RowStream):
        shard = usable.rows.shuffle(args.seed).shard(args.process_index, args.world_size)
        batches = EpochBatches(shard, args.train_batch_size, args.dataloader_num_workers)
        rows, count = EpochRows(shard), len(usable)
    else:
        rows = IndexedRows(usable.rows, args.languages[0] if args.every_caption else None, args.seed)
        count = len(rows)

    if count > MANY_ROWS and batches is None:
        logger.warning(
            f"{count:,} rows take about {count * BYTES_PER_ROW / 1e9:.0f} GB of memory in each process; stream them "
            "from a prepared set with --streaming true, or load_splits(..., streaming=True)"
        )
    batch = args.train_batch_size * args.world_size
    if count < batch:
        raise ValueError(f"{count} clips are fewer than a batch of {batch}; lower per_device_train_batch_size")
    if not args.dataloader_drop_last and args.world_size == 1 and count % batch == 1:
        raise ValueError(f"{count} clips leave a last batch of one clip; set dataloader_drop_last to true")
    if args.track_language_errors:
        require_captions(without_audio(usable.rows), args.languages, "kcl", "train")
    return rows, batches
