"""Files that are there whole or not at all and have one writer, for other processes and for runs that are killed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


class InUseError(RuntimeError):
    """Another process is writing to the same place."""


@contextmanager
def atomic_write(path: str | Path, one_writer: bool = False) -> Iterator[Path]:
    """A file beside `path` to write; at the end of the block it takes the place of `path`, at one stroke.

    Where the block raises, `path` stays as it was and the unfinished file goes.

    Args:
        path: The file that is to appear; its folder exists.
        one_writer: Only one process ever writes it. The unfinished file then has one name, and what a killed run leaves
            of it goes with the next; otherwise the name tells the process, and the last one to finish wins.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "a.txt")) as unfinished:
    ...         _ = unfinished.write_text("a dog barks")
    ...     print(*(path.name for path in Path(folder).iterdir()))
    a.txt
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.tmp" if one_writer else f"{target.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def apply_umask(folder: str | Path) -> None:
    """Give the weights in a folder the permissions of other new files, because safetensors writes them for their owner
    alone.
    """
    umask = os.umask(0)
    os.umask(umask)
    for path in Path(folder).glob("*.safetensors"):
        path.chmod(0o666 & ~umask)


def write_text(path: str | Path, text: str, one_writer: bool = False) -> None:
    """Writes a text in UTF-8, the same bytes on every system; arguments as of `atomic_write`."""
    with atomic_write(path, one_writer) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, content: Any, one_writer: bool = False, **style: Any) -> None:
    """Writes JSON, the same bytes for the same content.

    Args:
        path: As of `atomic_write`.
        content: What JSON knows.
        one_writer: As of `atomic_write`.
        **style: Of `json.dumps`, where it is another than an indent of 1 and every letter as it is.
    """
    write_text(path, json.dumps(content, **{"indent": 1, "ensure_ascii": False, **style}) + "\n", one_writer)


@contextmanager
def folder_lock(path: str | Path) -> Iterator[None]:
    """Within it, no other process is within it for the same file or folder; this one may be so twice.

    The lock lies beside the path, which need not exist yet, and is the system's: it goes with the process, however that
    ends. Where another process is at it, an `InUseError`.
    """
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_name(target.name + ".lock"), timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout as error:
        raise InUseError(
            f"{path} is being written by another run; wait until that has ended, or choose another output"
        ) from error

    try:
        yield
    finally:
        # While it is held: whoever has opened the file and not locked it finds it gone. Windows keeps open files.
        if lock.lock_counter == 1:
            with suppress(OSError):
                Path(lock.lock_file).unlink()
        lock.release()
