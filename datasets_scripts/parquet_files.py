"""Parquet files of this package: each page has a checksum, which is compared when the page is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from .atomic_files import ADVICE, atomic_write


@contextmanager
def parquet_writer(
    path: str | Path, schema: pyarrow.Schema, one_writer: bool = False, **options: Any
) -> Iterator[pyarrow.parquet.ParquetWriter]:
    """Write a Parquet file with checksums, atomically (see `atomic_write`).

    `options` are those of `pyarrow.parquet.ParquetWriter`.
    """
    with (
        atomic_write(path, one_writer) as unfinished,
        pyarrow.parquet.ParquetWriter(unfinished, schema, write_page_checksum=True, **options) as writer,
    ):
        yield writer


@contextmanager
def open_parquet(source: Any, name: str | Path | None = None) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a Parquet file (a path, or a file with its `name`), and compare the checksums of the pages that are read.

    Files of other programs may have no checksums.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or not Parquet; the message contains its name.
    """
    try:
        # Without threads that read ahead: one that frees bytes of a Python file while Python exits aborts the process.
        with pyarrow.parquet.ParquetFile(source, page_checksum_verification=True, pre_buffer=False) as file:
            yield file
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name or source} is damaged, or not Parquet: {error}; {ADVICE}") from error


def read_parquet(path: str | Path) -> pyarrow.Table:
    """Read a Parquet file as a table, with the checks and errors of `open_parquet`."""
    with open_parquet(path) as file:
        table = file.read()
        table.validate(full=True)
    return table
