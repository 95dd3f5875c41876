"""From a folder of recordings to a table of windows, for the search index and `supclap embed`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from modeling_supclap.datasets_scripts.audio import Address
from modeling_supclap.datasets_scripts.audio_files import SUFFIXES, is_audio_name, walk
from modeling_supclap.datasets_scripts.builders.recordings import Recordings
from modeling_supclap.datasets_scripts.remote_files import find_files, use_files

from ..encoding import AudioChunks
from .vectors import compress

logger = logging.getLogger(__name__)


def list_recordings(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """List the recordings in a folder and its subfolders. The folder may be an fsspec address, such as "s3://...".

    Files with other suffixes than those of audio are left out; a warning states their number and one name.

    Returns:
        Tuple of the absolute folder or address, and `{relative path: Path or Address}`, sorted by relative path.

    Raises:
        FileNotFoundError: The folder does not exist or contains no recordings.
    """
    paths: dict[str, Any] = {}
    if "://" in str(folder):
        root, files = use_files(str(folder), _list_files)
        paths = {name: Address(file) for name, file in files.items()}
    else:
        path = Recordings(folder, ()).folder
        root = str(path)
        for name in walk(path):
            paths[name] = path / name

    left_out = [name for name in paths if not is_audio_name(name)]
    for name in left_out:
        del paths[name]
    if left_out and paths:
        count = len(left_out)
        logger.warning("%s: left out %d files without a suffix of audio, such as %s", root, count, left_out[0])
    if not paths:
        raise FileNotFoundError(f"{folder} contains no recordings; supported suffixes are {', '.join(SUFFIXES)}")
    return root, paths


def _list_files(system: Any, path: str) -> tuple[str, dict[str, str]]:
    files = {name: system.unstrip_protocol(file) for name, file in find_files(system, path).items()}
    return system.unstrip_protocol(path).rstrip("/"), files


def window_table(
    recordings: Sequence[AudioChunks],
    dim: int,
    vector_name: str,
    precision: str = "float32",
    width: int | None = None,
    **fields: Sequence[str],
) -> pa.Table:
    """Return one row per window of each recording: `fields`, `start_seconds`, `end_seconds` and the embedding.

    `fields` have one value per recording. The embeddings of `dim` values are in the column `vector_name`, in the form
    that `vectors.compress` returns. A recording with an error has no windows.
    """
    embeds = np.concatenate([np.asarray(each.embeds, np.float32).reshape(-1, dim) for each in recordings])
    counts = [len(each.onset_seconds) for each in recordings]
    vectors = compress(embeds, precision, width)
    columns = {}
    for name, values in fields.items():
        columns[name] = pa.array(np.repeat(np.array(values, dtype=object), counts), pa.string())
    columns["start_seconds"] = pa.array(np.concatenate([each.onset_seconds for each in recordings]), pa.float64())
    columns["end_seconds"] = pa.array(np.concatenate([each.offset_seconds for each in recordings]), pa.float64())
    columns[vector_name] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    return pa.table(columns)
