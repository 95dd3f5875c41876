"""Wrong captions of clips (hard negatives): a table of them, and its join with a dataset."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from .parquet_files import parquet_writer, read_parquet
from .schema import replace_columns, text_lists

SCHEMA = pa.schema(
    [("clip_id", pa.string()), ("language", pa.string()), ("text", pa.string()), ("similarity", pa.float32())]
)
"""Columns of a table of negatives, one row per negative; the hardest of a clip come first."""


def write_negatives(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a table of negatives as a Parquet file, atomically."""
    with parquet_writer(path, SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA))


def add_negatives(rows: Dataset, path: str | Path) -> Dataset:
    """Add the column `negatives`, `{language: [texts]}`, from a table of negatives.

    Raises:
        FileNotFoundError: The table does not exist.
        ValueError: The table has other columns, or no clip of the dataset.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; write it with `supclap mine`")
    table = read_parquet(path)
    if missing := set(SCHEMA.names) - set(table.column_names):
        raise ValueError(f"{path} lacks the columns {sorted(missing)}; write it with `supclap mine`")

    languages = sorted(set(table["language"].to_pylist()))
    of_clip: dict[str, dict[str, list[str]]] = {}
    for row in table.select(["clip_id", "language", "text"]).to_pylist():
        texts = of_clip.setdefault(row["clip_id"], {language: [] for language in languages})
        texts[row["language"]].append(row["text"])

    clip_ids = rows["clip_id"][:]
    if not of_clip.keys() & set(clip_ids):
        raise ValueError(
            f"{path} has no clip of this dataset, such as {clip_ids[0]!r}; it has {next(iter(of_clip), '')!r}"
        )
    empty: dict[str, list[str]] = {language: [] for language in languages}
    negatives = [of_clip.get(clip_id, empty) for clip_id in clip_ids]
    return replace_columns(rows, {"negatives": negatives}, {"negatives": text_lists(languages)})
