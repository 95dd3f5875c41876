"""Atomic file writes, an exclusive lock per file or folder, and file hashes."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

ADVICE = "copy it again, or delete it and run its command again"
"""Advice for a damaged file of this package."""


class InUseError(RuntimeError):
    """Error if another process is writing to the same file or folder."""


@contextmanager
def atomic_write(path: str | Path, one_writer: bool = False) -> Iterator[Path]:
    """Write a file atomically: yield the path of a temporary file, and rename it to `path` at the end of the block.

    If the block raises, `path` is unchanged and the temporary file, in the same folder, is deleted. The temporary file
    is created empty and exclusively, so that a link that another user has placed there is not followed.

    If only one process writes this file (`one_writer`), the next run overwrites the temporary file of a killed run.
    Otherwise the temporary name contains the process id, and the last process to finish wins.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "a.txt")) as unfinished:
    ...         _ = unfinished.write_text("a dog barks")
    ...     print(*(path.name for path in Path(folder).iterdir()))
    a.txt
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.tmp" if one_writer else f"{target.name}.{os.getpid()}.tmp")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(exist_ok=False)
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, one_writer: bool = False) -> None:
    """Write a UTF-8 text file atomically (see `atomic_write`), with LF line ends on every system."""
    with atomic_write(path, one_writer) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, content: Any, one_writer: bool = False, **style: Any) -> None:
    """Write a JSON file atomically. `style` are arguments of `json.dumps`, by default indent=1, ensure_ascii=False."""
    write_text(path, json.dumps(content, **{"indent": 1, "ensure_ascii": False, **style}) + "\n", one_writer)


def read_json(path: str | Path) -> Any:
    """Read a JSON file of this package; raise ValueError with its name if it is damaged."""
    return parse_json(Path(path).read_bytes(), path)


def parse_json(content: bytes, name: str | Path) -> Any:
    """Parse the content of a JSON file of this package; raise ValueError with its `name` if it is damaged."""
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}; {ADVICE}") from error


@contextmanager
def folder_lock(path: str | Path, wait_seconds: float = 0) -> Iterator[None]:
    """Hold an exclusive lock on a file or folder during the block; raise InUseError if another process has the lock.

    With `wait_seconds`, wait this long for the other process before the error.
    The same process may acquire the lock several times. The lock file is `<path>.lock`; `path` itself need not exist.
    The operating system releases the lock when the process ends, even if it is killed.
    """
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_name(target.name + ".lock"), timeout=0, is_singleton=True)
    try:
        lock.acquire(timeout=wait_seconds)
    except Timeout as error:
        raise InUseError(f"another run is writing {path}; wait until it ends, or choose another output") from error

    try:
        yield
    finally:
        # Unlink before the release, so that a process that already opened the lock file notices that it was deleted.
        # Windows cannot delete open files.
        if lock.lock_counter == 1:
            with suppress(OSError):
                Path(lock.lock_file).unlink()
        lock.release()


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file as a hex string."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
