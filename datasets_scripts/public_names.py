"""What a model, a folder or an address is called where others read it: in results, cards, reports and manifests."""

import os
import re
from urllib.parse import urlsplit


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
