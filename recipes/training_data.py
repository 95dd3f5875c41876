"""Load the data of a training run: from its arguments to the rows that a trainer uses, checked and filtered once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from modeling_supclap.recipes.options import DataArguments
from modeling_supclap.recipes.running import is_first_process

if TYPE_CHECKING:
    from modeling_supclap import SupCLAPProcessor
    from modeling_supclap.training.rows import UsableRows
    from modeling_supclap.training.training_args import SupCLAPTrainingArguments

SAMPLE_ROWS = 1000
"""Number of random rows of a streamed split to check before training. Their audio is not read."""

SAMPLE_RECORDINGS = 100
"""Number of random recordings of a split to decode in a dry run."""


@dataclass(frozen=True)
class TrainingData:
    """Usable rows of each split, and the processor of their recordings and captions.

    Attributes:
        train: Training rows.
        validation: None if there is no such split.
        test: Rows for the final scores. None if there is no such split.
        selection_split: Name of the split that selects the best checkpoint, "validation" or "test".
        processor: Processor of the model that is trained.
        origins: Name of the original dataset, `{"": name}`, and of each dataset in a mixture.
        record: Number of rows and hash of each split as it was loaded (see `record_splits`).
        classes: Labels of all splits (see `list_classes`). None: no labels, or no zero-shot classification.
    """

    train: UsableRows
    validation: UsableRows | None
    test: UsableRows | None
    selection_split: str
    processor: SupCLAPProcessor
    origins: Mapping[str, str]
    record: Mapping[str, Any]
    classes: Sequence[str] | None

    @property
    def left_out(self) -> dict[str, list[str]]:
        """Ids of the clips with unusable recordings in each split that has some."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: list(rows.left_out) for name, rows in splits.items() if rows is not None and rows.left_out}

    @property
    def selection(self) -> UsableRows | None:
        """Rows that select the best checkpoint."""
        return self.test if self.selection_split == "test" else self.validation

    def count_clips(self) -> str:
        """Format the number of clips of each split, such as "64 train, 8 test clips"."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        return ", ".join(f"{len(rows)} {name}" for name, rows in splits.items() if rows is not None) + " clips"


def load_data(
    data_args: DataArguments, args: SupCLAPTrainingArguments, make_processor: Callable[[Any], SupCLAPProcessor]
) -> TrainingData:
    """Load the splits of a dataset or a mixture, check captions, labels and recordings, and apply `on_bad_audio`.

    Args:
        make_processor: Function that returns the processor. It gets the training rows, or a sample of a stream, because
            the tokenizer of a new text encoder is trained on their captions.

    Raises:
        BadAudioError: A validation or test recording is unusable, and `args.on_bad_audio` is "error".
        FileNotFoundError: Too many recordings are missing.
        ValueError: A required split, caption or label is missing.
    """
    from modeling_supclap.training.collator import min_seconds
    from modeling_supclap.training.rows import make_usable

    origins = {name: part.origin for name, part in {"": data_args, **data_args.parts}.items()}
    with args.main_process_first(desc="preparing the data"):
        splits = data_args.load_splits()
    described = describe_splits(splits, data_args, args)
    check_splits(described, data_args, args)
    processor = make_processor(described["train"])
    require_usable_audio(splits, args, min_seconds(processor))
    usable = {name: make_usable(splits.get(name), args, processor) for name in ("train", "validation", "test")}
    return TrainingData(
        **usable,
        selection_split=data_args.selection_split,
        processor=processor,
        origins=origins,
        record=record_splits(splits),
        classes=list_classes(splits) if data_args.zero_shot_templates else None,
    )


def list_classes(splits: Mapping[str, Any], further: Iterable[str] = ()) -> list[str] | None:
    """Return the labels of all splits, sorted, and `further` ones, of clips without a row. None: there are no labels.

    They are the candidates of zero-shot classification, also if no clip of a class is present. Streams are not read.
    """
    from modeling_supclap.datasets_scripts.schema import label_names
    from modeling_supclap.datasets_scripts.stream import RowStream

    labels = set(further)
    for rows in splits.values():
        if not isinstance(rows, RowStream):
            labels |= label_names(rows)
    return sorted(labels) or None


@cache
def describe_bad_audio(dataset: str, config: str, splits: str | None = None, check_all: bool = False) -> str:
    """Decode random recordings of a dataset, or all, and describe the unusable ones. Return "" if there are none.

    Args:
        config: Options of the dataset, as JSON.
        splits: Splits to read, joined by "+". None: all.
        check_all: Whether to decode all recordings, not only `SAMPLE_RECORDINGS` of each split.
    """
    import numpy as np

    from modeling_supclap.datasets_scripts import load_splits
    from modeling_supclap.datasets_scripts.bad_audio import find_bad_audio

    loaded, problems = load_splits(dataset, **json.loads(config)), []
    for name in loaded if splits is None else splits.split("+"):
        rows = loaded[name]
        chosen = np.random.default_rng(0).permutation(len(rows))[: None if check_all else SAMPLE_RECORDINGS]
        bad = find_bad_audio(rows.select(np.sort(chosen)), min(os.cpu_count() or 1, 1 + len(chosen) // 1000))
        if bad:
            counts = f"{len(bad)} of {len(chosen):,}" + ("" if len(chosen) == len(rows) else " sampled")
            first = f"first that of clip {bad[0].clip_id!r}: {bad[0].reason}"
            problems.append(f"{counts} recordings of {name} cannot be used, {first}")
    return "; ".join(problems)


def record_splits(splits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of rows of each split, and a hash of their clip ids and captions.

    `results.json` contains them as "data", so that a finished run is not taken for one on other data. Only the first
    process computes them.
    """
    from modeling_supclap.training.rows import UsableRows

    return {name: UsableRows(rows).record for name, rows in splits.items()} if is_first_process() else {}


def describe_splits(
    splits: Mapping[str, Any], data_args: DataArguments, args: SupCLAPTrainingArguments
) -> dict[str, Any]:
    """Return the splits with a random sample of a streamed training split in its place, without audio."""
    from modeling_supclap.datasets_scripts.mixture import warn_of_shared_recordings
    from modeling_supclap.datasets_scripts.schema import without_audio
    from modeling_supclap.datasets_scripts.stream import RowStream

    described = dict(splits)
    if isinstance(splits.get("train"), RowStream):
        described["train"] = list(islice(without_audio(splits["train"]).shuffle(args.seed), SAMPLE_ROWS))
        if data_args.parts:
            warn_of_shared_recordings(described)
    return described


def check_splits(splits: Mapping[str, Any], data_args: DataArguments, args: SupCLAPTrainingArguments) -> None:
    """Raise ValueError before training if required splits, captions or labels are missing."""
    from modeling_supclap.datasets_scripts.schema import label_counts, require_captions, without_audio

    name, available = data_args.dataset, ", ".join(splits)
    if "train" not in splits:
        raise ValueError(f"{name} has no training split, only {available}; choose another dataset")
    if data_args.selection_split not in splits and args.eval_strategy != "no":
        raise ValueError(
            f"{name} has no {data_args.selection_split} split, only {available}; hold clips out with "
            "--validation_fraction or --num_validation, or set --eval_strategy no --load_best_model_at_end false"
        )

    for split, rows in splits.items():
        scheme = (args.languages, args.caption_scheme) if split == "train" else (args.eval_languages, "random")
        require_captions(without_audio(rows), *scheme, split)

    if data_args.zero_shot_templates and "test" in splits:
        counts = label_counts(splits["test"])
        if not counts.all():
            clip_id = splits["test"]["clip_id"][int(counts.argmin())]
            problem = f"clip {clip_id!r} of {name}'s test split has no label"
            raise ValueError(f"{problem}, which zero_shot_templates requires; remove this option")


def require_usable_audio(splits: Mapping[str, Any], args: SupCLAPTrainingArguments, min_seconds: float = 0.0) -> None:
    """Read all validation and test recordings before training, and raise for the first unusable one.

    Recordings shorter than `min_seconds` are unusable unless `args.pad_short_clips` is set. If `args.on_bad_audio` is
    "skip" or "report", this function does nothing, because `filter_bad_audio` removes unusable recordings instead.
    """
    from modeling_supclap.datasets_scripts.audio import BadAudioError
    from modeling_supclap.datasets_scripts.bad_audio import find_bad_audio

    if args.on_bad_audio != "error":
        return
    min_seconds = 0.0 if args.pad_short_clips else min_seconds
    for name in ("validation", "test"):
        bad = []
        with args.main_process_first(local=False, desc=f"reading the recordings of the {name} split"):
            if name in splits and is_first_process():
                bad = find_bad_audio(splits[name], max(1, args.dataloader_num_workers), min_seconds)
        if bad:
            raise BadAudioError(
                f"{len(bad)} of the {len(splits[name])} {name} recordings cannot be used, first that of clip "
                f"{bad[0].clip_id!r}: {bad[0].reason}; use --on_bad_audio skip to leave such recordings out"
            )
