"""What a model, a folder or an address is called where others read it: in results, cards, reports and manifests."""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_SECRET = re.compile(
    r"token|.*hub_token|.*(auth|access|api)_?(token|key)|.*(secret|password|credential).*", re.IGNORECASE
)


def public_name(name: str | os.PathLike[str]) -> str:
    """What a model, a dataset or a file is called in files that others read.

    Args:
        name: A Hub id, a path within the current folder or any other word, which stay as they are; another path on
            this machine, of which only the last name is anybody's business; or an address, which stays without a user,
            a password and a query.

    >>> public_name("laion/clap-htsat-fused"), public_name("/home/ann/ESC-50/"), public_name("https://me:x@a.org/b?key=y")
    ('laion/clap-htsat-fused', 'ESC-50', 'https://a.org/b')
    """
    text = os.fspath(name)
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        parts = urlsplit(text)
        return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
    is_private = os.path.isabs(text) or text.startswith(("~", "./", "../", "..\\")) or text in (".", "..")
    return os.path.basename(os.path.abspath(os.path.expanduser(text))) if is_private else text


def is_secret(name: str) -> bool:
    """Whether an argument of this name holds a token, a password or the like.

    >>> is_secret("hub_token"), is_secret("pad_token")
    (True, False)
    """
    return _SECRET.fullmatch(name) is not None


def redact(value: Any, from_anywhere: bool = False) -> Any:
    """A value as others may read it: without tokens and passwords, and of a path on this machine its last part only.

    Args:
        value: Anything that JSON knows. What is called a token, a password or the like is left out.
        from_anywhere: Makes the same of a file or folder from whatever folder it is named, as a manifest does.

    >>> redact({"hub_token": "hf_x", "data_dir": "/home/me/ESC-50", "model": "laion/clap-htsat-fused"})
    {'data_dir': 'ESC-50', 'model': 'laion/clap-htsat-fused'}
    """
    if isinstance(value, Mapping):
        kept = {}
        for key, each in value.items():
            if not is_secret(str(key)):
                kept[key] = redact(each, from_anywhere)
        return kept
    if isinstance(value, (list, tuple)):
        return [redact(each, from_anywhere) for each in value]
    if not isinstance(value, (str, os.PathLike)):
        return value
    return public_name(os.path.abspath(value) if from_anywhere and os.path.exists(value) else value)
