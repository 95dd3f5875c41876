"""Read files from any fsspec address, with retries, a timeout, and errors that contain the file name."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec

from .public_names import public_name

ATTEMPTS = 4
WAIT_SECONDS = 1.0
"""Wait in seconds before the second attempt; doubles for each further attempt."""

STALL_SECONDS = 60.0
"""Seconds without data until an HTTP connection times out. Other file systems have their own timeouts."""

R = TypeVar("R")
logger = logging.getLogger(__name__)


def read_file(address: str, read: Callable[[Any], R]) -> R:
    """Open a file in binary mode and return `read(file)`, with the retries and errors of `use_files`."""

    def open_and_read(system: Any, path: str) -> R:
        with system.open(path, "rb") as file:
            return read(file)

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
            if _is_missing(error):
                raise FileNotFoundError(f"there is no file {name}") from error
            if attempt == attempts:
                raise OSError(f"{name} cannot be read after {attempt} attempts: {problem}") from error
            wait = WAIT_SECONDS * 2 ** (attempt - 1)
            logger.warning("%s cannot be read (%s); retry %d in %g s", name, problem, attempt, wait)
            time.sleep(wait)
    raise AssertionError  # the last attempt returns or raises


def _is_missing(error: Exception) -> bool:
    """Return whether the error means that the file does not exist.

    FileNotFoundError alone is not enough, because fsspec also raises it for server errors.
    """
    cause = error.__cause__
    return isinstance(error, FileNotFoundError) and (cause is None or getattr(cause, "status", None) in (404, 410))
