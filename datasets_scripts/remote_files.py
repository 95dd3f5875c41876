"""Read files at any fsspec address with retries, a timeout, and the file name in every error."""

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
"""Seconds before the second attempt; doubled before each later one."""

STALL_SECONDS = 60.0
"""Seconds without data after which a web server counts as stalled; other file systems have their own limits."""

R = TypeVar("R")
logger = logging.getLogger(__name__)


def read_file(address: str, read: Callable[[Any], R]) -> R:
    """Open a file and return the result of `read` on it; for retries and errors see `use_files`."""

    def open_and_read(system: Any, path: str) -> R:
        with system.open(path, "rb") as file:
            return read(file)

    return use_files(address, open_and_read)


def use_files(address: str, use: Callable[[Any, str], R]) -> R:
    """Call `use` with the file system of an address and the path in it, and return the result.

    Args:
        address: A path, or an address such as `s3://bucket/file` or `https://host/file`. Addresses get `ATTEMPTS`.
        use: Function that reads; it may be called again after an error.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be read; the message contains its name.
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
    """Return whether a file does not exist; fsspec raises FileNotFoundError also for errors of a server."""
    cause = error.__cause__
    return isinstance(error, FileNotFoundError) and (cause is None or getattr(cause, "status", None) in (404, 410))
