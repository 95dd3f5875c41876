"""Mix several datasets: concatenate their splits, and compute how often an epoch contains each clip."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value, concatenate_datasets

from .schema import EXPECTED_COUNT, FILE_SOURCE, SAMPLING, hash_rows, replace_columns, text_lists, without_audio
from .stream import ROWS_OF_A_GROUP, Row, RowGroup, RowStream

logger = logging.getLogger(__name__)

_SAMPLING_TYPE = Features({name: Value("float64") for name in ("repeats", "weight", "balance_labels", "temperature")})
_SAMPLING_TYPE["balance_labels"] = Value("bool")


def mix(
    sets: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Concatenate the splits of several datasets; audio is neither decoded nor copied.

    Clip ids start with the name of their dataset, which is also in the column `dataset`. If a dataset has no captions
    in a language, the lists of its rows are empty. The training rows have the columns `EXPECTED_COUNT` and `SAMPLING`
    (see `expected_counts` and `counts_in_epoch`). A warning is logged if a recording is in the training split of one
    dataset and in the validation or test split of another.

    If the training split of a dataset is a `RowStream`, the mixed training split is a stream that repeats rows instead
    of adding these columns. Its recordings are not compared with the other splits, because this requires
    reading the whole stream. To compare some of its rows, pass them to `warn_of_shared_recordings`.

    Args:
        sets: `{dataset name: splits}`. A split is a `Dataset`; the training split may be a `RowStream`.
        options: `{dataset name: options}`. `expected_counts` describes the options and `temperature`.

    Raises ValueError as `expected_counts` does, if `options` contains an unknown dataset or option, or if a stream is
    mixed with `balance_labels`.
    """
    options = options or {}
    train = {name: splits["train"] for name, splits in sets.items() if "train" in splits}
    is_stream = any(isinstance(rows, RowStream) for rows in train.values())
    balanced = [name for name, of_set in options.items() if of_set.get("balance_labels")]
    if is_stream and balanced:
        raise ValueError(f"balance_labels is set for {balanced}; streams do not support it; remove it")
    for name, of_set in options.items():
        if name not in sets:
            raise ValueError(f"got options of {name!r}; expected the datasets {', '.join(sets)}")
        if unknown := sorted(of_set.keys() - {"repeats", "weight", "balance_labels"}):
            raise ValueError(f"{name} has the options {unknown}; expected repeats, weight or balance_labels")
    expected = expected_counts(train, options, temperature)
    all_rows = chain.from_iterable(splits.values() for splits in sets.values())
    languages = list(dict.fromkeys(chain.from_iterable(rows.features["captions"] for rows in all_rows)))
    parts: dict[str, list[Dataset]] = {}
    for name, splits in sets.items():
        for split, rows in splits.items():
            if is_stream and split == "train":
                continue
            part = _with_languages(rows, name, languages)
            if split == "train":
                part = with_counts(part, expected[name], options.get(name, {}), temperature)
            parts.setdefault(split, []).append(part)

    mixed = {split: concatenate_datasets(of_split) for split, of_split in parts.items()}
    warn_of_shared_recordings(mixed)
    if is_stream:
        streams: dict[str, RowStream] = {}
        copies: list[float] = []
        for name, rows in train.items():
            streams[name] = rows if isinstance(rows, RowStream) else RowStream(_DatasetSplit(rows))
            copies += [float(expected[name][0])] * len(streams[name].row_groups)
        mixed["train"] = RowStream(_MixedSplit(streams, languages)).repeat(copies)
    return mixed


def warn_of_shared_recordings(splits: Mapping[str, Any]) -> None:
    """Log a warning if a training recording of one dataset is in the validation or test split of another.

    A split is a `Dataset` or a list of rows, with the columns `dataset` and `source`.
    """
    if "train" not in splits:  # a mix of streams
        return
    tables = {}
    for split, rows in splits.items():
        rows = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
        tables[split] = rows.select_columns(["dataset", "source"]).to_pandas().drop_duplicates()
    for split in tables.keys() - {"train"}:
        pairs = tables["train"].merge(tables[split], on="source")
        pairs = pairs[(pairs.dataset_x != pairs.dataset_y) & ~pairs.source.str.startswith(FILE_SOURCE)]
        for (trained, evaluated), sources in pairs.groupby(["dataset_x", "dataset_y"])["source"]:
            logger.warning(
                f"{len(sources)} recordings of the {split} split of {evaluated} are also in the training split of "
                f"{trained}, such as {sources.iloc[0]}; exclude them there, or the scores will be too high"
            )


def with_counts(
    rows: Dataset, expected: np.ndarray, options: Mapping[str, Any], temperature: float | None = None
) -> Dataset:
    """Add the columns `EXPECTED_COUNT` and `SAMPLING` to the training rows of one dataset."""
    columns = {EXPECTED_COUNT: expected.tolist(), SAMPLING: [{**options, "temperature": temperature}] * len(rows)}
    return replace_columns(rows, columns, {EXPECTED_COUNT: Value("float64"), SAMPLING: _SAMPLING_TYPE})


def counts_in_epoch(rows: Dataset, items: np.ndarray | None = None) -> np.ndarray:
    """Compute the expected counts of rows with the column `SAMPLING`, from the rows that are left of each dataset.

    If each row has several items, such as its captions, shares and labels are balanced among items, not rows.

    Args:
        rows: Rows of `mix`, or of one dataset without the column `dataset`.
        items: Number of items of each row, int `(rows,)`. None: one item per row.

    Returns:
        Expected number of times that an epoch contains each item of a row, float64 `(rows,)`.
    """
    light = without_audio(rows)
    names = np.array(light["dataset"][:] if "dataset" in light.column_names else [""] * len(light))
    sets, options, of_set, temperature = {}, {}, {}, None
    for name in dict.fromkeys(names.tolist()):
        indices = np.flatnonzero(names == name)
        sets[name], of_set[name] = light.select(indices), indices
        options[name] = {key: value for key, value in sets[name][0][SAMPLING].items() if value is not None}
        temperature = options[name].pop("temperature", None)

    counts = np.empty(len(light))
    of_items = None if items is None else {name: items[indices] for name, indices in of_set.items()}
    for name, expected in expected_counts(sets, options, temperature, of_items).items():
        counts[of_set[name]] = expected
    return counts


def expected_counts(
    sets: Mapping[str, Dataset],
    options: Mapping[str, Mapping[str, Any]],
    temperature: float | None = None,
    items: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Compute the expected number of times that an epoch contains each row, or each item of a row.

    Args:
        sets: `{dataset name: training rows}`.
        options: `{dataset name: options}` with the following options. `repeats`: number of times that an epoch contains
            the dataset; default 1. `weight`: share of the dataset in the epoch, relative to the other weights; default
            1. With weights, an epoch has as many items as all datasets together. `balance_labels`: whether to count
            each row in proportion to the sum, over its labels, of 1 / (number of rows with this label). If each row has
            one label, an epoch then contains all labels equally often.
        temperature: T; if set, the weight of a dataset is size^(1/T). With 1, the weights are the sizes; larger values
            make the weights more equal.
        items: `{dataset name: number of items of each row}`, int `(rows,)`, if each row has several items, such as its
            captions. The size of a dataset is then its number of items. None: each row is one item.

    Returns:
        `{dataset name: expected counts}`, float64 `(rows,)`, of each item of a row.

    Raises:
        ValueError: More than one of repeats, weight and temperature is used, a value is not positive, or a row has no
            label and `balance_labels` is set.
    """
    used = {"repeats", "weight"}.intersection(chain.from_iterable(options.values()))
    if len(used) + (temperature is not None) > 1:
        raise ValueError(f"got {sorted(used)} and temperature {temperature}; use one of them for all datasets")
    key = next(iter(used), "repeats")
    factors = np.array([options.get(name, {}).get(key, 1) for name in sets], np.float64)
    if not (factors > 0).all() or not (temperature is None or temperature > 0):
        raise ValueError(f"got {key} {factors.tolist()} and temperature {temperature}; expected positive values")

    if items is None:
        items = {name: np.ones(len(rows), np.int64) for name, rows in sets.items()}
    sizes = np.array([items[name].sum() for name in sets], np.float64)
    totals = factors * sizes
    if key == "weight" or temperature is not None:
        shares = factors if temperature is None else sizes ** (1 / temperature)
        totals = sizes.sum() * shares / shares.sum()

    expected = {}
    for (name, rows), total in zip(sets.items(), totals, strict=True):
        weights = items[name].astype(np.float64)  # of all items of a row
        if options.get(name, {}).get("balance_labels"):
            labels = rows["labels"][:]
            clips = Counter(chain.from_iterable(labels))
            for row, of_row in enumerate(labels):
                weights[row] = sum(1 / clips[label] for label in of_row)
            if not weights.all():
                raise ValueError(
                    f"clip {rows['clip_id'][int(weights.argmin())]!r} has no label; balance_labels requires labels; "
                    f"remove it for {name}"
                )
        expected[name] = weights * total / weights.sum() / items[name]
    return expected


class _DatasetSplit:
    """Split of a map-style dataset as the source of a stream."""

    def __init__(self, rows: Dataset) -> None:
        self.rows, self.features, self.digest = rows, rows.features, rows._fingerprint
        self.content = hash_rows(rows)
        self.licenses = dict(Counter(rows["license"][:] if "license" in rows.column_names else ()))
        starts = range(0, len(rows), ROWS_OF_A_GROUP)
        self.row_groups = [RowGroup("", start, min(ROWS_OF_A_GROUP, len(rows) - start)) for start in starts]

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        rows = self.rows.select_columns(list(columns))
        return lambda number: rows[group.location + number]


class _MixedSplit:
    """Split that mixes several streams. The `location` of a row group is (dataset name, row group of its stream)."""

    def __init__(self, streams: Mapping[str, RowStream], languages: Sequence[str]) -> None:
        self.streams, self.languages = streams, languages
        self.digest = " ".join(stream._split.digest for stream in streams.values())
        self.content = {name: stream.content_hash for name, stream in streams.items()}
        licenses: Counter[str] = Counter()
        features: dict[str, Any] = {"dataset": Value("string")}
        self.row_groups: list[RowGroup] = []
        for name, stream in streams.items():
            features |= stream.features
            licenses.update(stream.licenses or {"": stream.num_rows})
            self.row_groups += [group._replace(location=(name, group)) for group in stream.row_groups]
        features["captions"] = text_lists(languages)
        del features["clip_index"]
        self.features, self.licenses = Features(features), dict(licenses)

    def read(self, group: RowGroup, columns: Sequence[str]) -> Callable[[int], Row]:
        name, of_stream = group.location
        get_row = self.streams[name].read(of_stream, [*columns, "clip_id", "captions"])

        def get_named(number: int) -> Row:
            row = get_row(number)
            captions = {language: row["captions"].get(language) or [] for language in self.languages}
            row |= {"clip_id": f"{name}/{row['clip_id']}", "captions": captions, "dataset": name}
            return {column: row.get(column) for column in columns}

        return get_named


def _with_languages(rows: Dataset, name: str, languages: list[str]) -> Dataset:
    """Return rows with new clip ids, captions in the given languages, and the column `dataset`."""
    light, captions = without_audio(rows), []
    for of_row in light["captions"][:]:
        captions.append({language: of_row.get(language) or [] for language in languages})
    ids = [f"{name}/{clip_id}" for clip_id in light["clip_id"][:]]
    types = {"clip_id": Value("string"), "captions": text_lists(languages), "dataset": Value("string")}
    return replace_columns(rows, dict(zip(types, (ids, captions, [name] * len(rows)), strict=True)), types)
