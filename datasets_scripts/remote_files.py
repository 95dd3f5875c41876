"""Read files and folders from any fsspec address, with retries, a timeout, and errors that contain the file name."""

import gzip
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import fsspec

from .atomic_files import atomic_write, read_json, write_json
from .public_names import public_name

ATTEMPTS = 4
WAIT_SECONDS = 1.0
"""Wait in seconds before the second attempt; doubles for each further attempt."""

STALL_SECONDS = 60.0
"""Seconds without data until an HTTP connection times out. Other file systems have their own timeouts."""

UNPACKED_BYTES = 2**27
UNPACKED_RATIO = 50
"""An archive may unpack to this many times its size, or to `UNPACKED_BYTES` if that is more. Audio has 1 to 5."""

R = TypeVar("R")
logger = logging.getLogger(__name__)


def read_file(address: str, read: Callable[[Any], R]) -> R:
    """Open a file in binary mode and return `read(file)`, with the retries and errors of `use_files`."""

    def open_and_read(system: Any, path: str) -> R:
        with system.open(path, "rb") as file:
            try:
                return read(file)
            except Exception:
                file.seek(0)
                refuse_pointer(file.read(100), path)
                raise

    return use_files(address, open_and_read)


def use_files(address: str, use: Callable[[Any, str], R]) -> R:
    """Call `use(file_system, path)` for a path or fsspec address, and return the result.

    Remote addresses, such as `s3://bucket/file`, are tried up to `ATTEMPTS` times.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be read; the message contains the file name.
    """
    is_local = "://" not in address or address.startswith("file://")
    name = address if is_local else public_name(address)
    options: dict[str, Any] = {}
    if address.startswith(("http://", "https://")):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
        options = {"client_kwargs": {"timeout": timeout}}

    attempts = 1 if is_local else ATTEMPTS
    for attempt in range(1, attempts + 1):
        try:
            return use(*fsspec.core.url_to_fs(address, **options))
        except Exception as error:
            reason = re.sub(r"\w+://[^\s'\"]+", lambda match: public_name(match[0]), str(error.__cause__ or error))
            problem = f"{type(error).__name__}: {reason}"
            # fsspec also raises FileNotFoundError for server errors, and names their status
            cause = error.__cause__
            is_missing = isinstance(error, FileNotFoundError)
            if is_missing and (cause is None or getattr(cause, "status", None) in (404, 410)):
                raise FileNotFoundError(f"there is no file {name}") from error
            if attempt == attempts:
                raise OSError(f"{name} cannot be read after {attempt} attempts: {problem}") from error
            wait = WAIT_SECONDS * 2 ** (attempt - 1)
            logger.warning("%s cannot be read (%s); retry %d in %g s", name, problem, attempt, wait)
            time.sleep(wait)
    raise AssertionError  # the last attempt returns or raises


def refuse_pointer(head: bytes, name: str | Path) -> None:
    """Raise ValueError if a file begins like a pointer of Git LFS or git-annex, whose content was not downloaded."""
    if head.startswith((b"version https://git-lfs", b"/annex/objects/")):
        raise ValueError(f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`, or download the file")


def find_files(system: Any, folder: str) -> dict[str, str]:
    """Return the files of a remote folder as `{relative path: path}`.

    Listings of web servers contain encoded names, which are decoded, and links that sort the listing, which are not
    files.
    """
    files, is_web = {}, folder.startswith("http")
    for path in sorted(system.find(folder)):
        name = os.path.relpath(unquote(path), unquote(folder)) if is_web else os.path.relpath(path, folder)
        is_link = is_web and re.search("[?#]|/$", path)
        if not (is_link or name.startswith(os.pardir)):  # such as the key "sounds/../a.wav" of an object store
            files[name] = path
    return files


def local_folder(address: str | Path) -> Path:
    """Return the path of a local folder, or download the folder at an fsspec address into the cache of `datasets`.

    A later call downloads only new and changed files, and deletes local copies of deleted files. Raises
    FileNotFoundError if there are no files at the address.
    """
    address = str(address)
    if "://" not in address:
        return Path(address).expanduser()
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE, "folders", hashlib.sha256(address.encode()).hexdigest())
    record = folder.with_suffix(".json")  # not in the folder, where a downloaded file could replace it

    def download(system: Any, path: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        before: dict[str, str] = read_json(record) if record.is_file() else {}
        versions: dict[str, str] = {}
        try:
            for relative, name in find_files(system, path).items():
                target, version = folder / relative, system.ukey(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                if before.get(relative) != version or not target.is_file():
                    with atomic_write(target) as unfinished:
                        system.get_file(name, str(unfinished))
                versions[relative] = version
            for relative in before.keys() - versions.keys():
                (folder / relative).unlink(missing_ok=True)
            before = {}
        finally:
            write_json(record, before | versions)
        if not versions:
            raise FileNotFoundError(address)

    use_files(address, download)
    return folder


def unpacked_name(name: str) -> str:
    """Return the name of a tar file without the suffix of gzip.

    >>> unpacked_name("a.tar.gz"), unpacked_name("a.tgz"), unpacked_name("a.tar")
    ('a.tar', 'a.tar', 'a.tar')
    """
    return re.sub(r"(\.tar\.gz|\.tgz)$", ".tar", name)


def unpacked_tar(address: str) -> str:
    """Unpack a `.tar.gz` or `.tgz` file into the cache of `datasets`, and return the path of the `.tar` file.

    Compressed files can only be read from their beginning. A later call unpacks the file only if it has changed. An
    archive of more than `UNPACKED_RATIO` times its size is refused, and its unpacked part deleted.
    """
    import datasets

    def unpack(system: Any, path: str) -> str:
        version = hashlib.sha256(f"{address} {system.ukey(path)}".encode()).hexdigest()
        name = os.path.basename(unpacked_name(path))
        target = Path(datasets.config.HF_DATASETS_CACHE, "tars", version, name)
        if not target.is_file():
            logger.warning("%s is unpacked once to %s", public_name(address), target)
            target.parent.mkdir(parents=True, exist_ok=True)
            with (
                system.open(path, "rb") as file,
                gzip.open(file) as content,
                atomic_write(target) as unfinished,
                unfinished.open("wb") as output,
            ):
                limit = max(UNPACKED_BYTES, UNPACKED_RATIO * system.size(path))
                while block := content.read(2**20):
                    if output.tell() > limit:
                        advice = "unpack it yourself if you trust it, and pass the .tar file"
                        raise ValueError(f"it unpacks to more than {limit} bytes; {advice}")
                    output.write(block)
        return str(target)

    return use_files(address, unpack)
