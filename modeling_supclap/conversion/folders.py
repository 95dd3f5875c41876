"""Write a model folder completely, or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing_folder(folder: str | Path) -> Iterator[Path]:
    """Context manager that yields a temporary folder, and renames it to `folder` if no error occurs.

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
        os.replace(written, folder)
