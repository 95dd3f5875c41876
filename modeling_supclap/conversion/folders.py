"""Write a model folder completely, or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modeling_supclap.datasets_scripts.overlap.trained_sources import FILE_NAME as TRAINED_SOURCES

from ..strict_loading import apply_umask
from .provenance import PROVENANCE_FILE


@contextmanager
def writing_folder(folder: str | Path) -> Iterator[Path]:
    """Context manager that yields a temporary folder, and renames it to `folder` if no error occurs.

    Weight files have the permissions that the umask sets for new files, also those of a model of transformers.

    Raises:
        ValueError: `folder` exists and is not an empty folder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; give a folder that is empty or does not exist")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        written = Path(temporary) / "folder"
        written.mkdir()
        yield written
        apply_umask(written)
        os.replace(written, folder)


def copy_origin(model: Any, folder: Path) -> None:
    """Copy the files on the origin and the training recordings of a model from the folder that it was loaded from."""
    for name in (PROVENANCE_FILE, TRAINED_SOURCES):
        if (source := Path(model.name_or_path or os.devnull, name)).is_file():
            shutil.copyfile(source, folder / name)
