"""Record the source recordings that a run has trained on, so that an evaluation can reject them."""

import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_files import ADVICE, atomic_write
from ..schema import FILE_SOURCE, without_audio

FILE_NAME = "trained_sources.npy"
"""File in the model folder: sorted 64-bit hashes of the sources."""


def save_trained_sources(rows: Any, folder: str | Path, *starts: str | Path | None) -> None:
    """Save the hashes of the sources of training `rows` in a model folder.

    The file also contains the hashes of the models in `starts`, from which the training started.
    """
    hashes = np.unique(np.concatenate([_hash_sources(rows), *map(load_trained_sources, starts)]))
    with atomic_write(Path(folder, FILE_NAME)) as unfinished, unfinished.open("wb") as file:
        np.save(file, hashes)


def load_trained_sources(folder: str | Path | None) -> np.ndarray:
    """Load the hashes of the training sources of a model, uint64; return an empty array if there is no such file."""
    path = Path(folder or "", FILE_NAME)
    if folder is None or not path.is_file():
        return np.empty(0, np.uint64)
    try:
        return np.load(path)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}; {ADVICE}") from error


def exclude_trained_sources(rows: Any, model: str) -> tuple[Any, int]:
    """Remove the rows with sources that a model has trained on. Return the other rows, and the number of removed ones.

    Raises ValueError if no rows are left.
    """
    is_trained = np.isin(_hash_sources(rows), load_trained_sources(model))
    if is_trained.all():
        raise ValueError(f"{model} has trained on all {len(rows)} clips; evaluate on other clips")
    return rows.select(np.flatnonzero(~is_trained)), int(is_trained.sum())


def refuse_trained_sources(rows: Any, model: str, allow: bool = False) -> int:
    """Raise ValueError if a model has trained on the sources of any rows; if `allow`, warn, and return their number."""
    is_trained = np.isin(_hash_sources(rows), load_trained_sources(model))
    count = int(is_trained.sum())
    if count:
        example = without_audio(rows)[int(is_trained.argmax())]["source"]
        problem = f"{model} has trained on {count} of {len(rows)} clips, for example {example}"
        if not allow:
            raise ValueError(f"{problem}; evaluate on other clips, or set --exclude_trained or --allow_trained true")
        warnings.warn(problem, stacklevel=2)
    return count


def _hash_sources(rows: Any) -> np.ndarray:
    """Hash the source of each row. A source that is only a file name is hashed with the clip id.

    Other recordings may have the same file name, even in another split of the same dataset.
    """
    hashes = []
    for row in without_audio(rows):
        source = row["source"]
        if source.startswith(FILE_SOURCE):
            source += " " + row["clip_id"].removeprefix(f"{row.get('dataset')}/")  # added by a mixture
        hashes.append(hashlib.blake2b(source.encode(), digest_size=8).digest())
    return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)
