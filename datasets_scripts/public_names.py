"""What a model, a folder or an address is called where others read it: in results, cards, reports and manifests."""

import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_SECRET = re.compile(
    r"(.*_)?(token|auth|authorization|signature|cookie|pwd|bearer)|"
    r"key|.*(api|access|account|auth|encryption|master|private|shared|signing|ssh|storage|subscription)_?key|"
    r".*(secret|passw|passphrase|credential|connection_string).*"
)
# What texts are marked with, not who sends them.
_PUBLIC_TOKEN = re.compile(r".*(pad|eos|bos|unk|mask|cls|sep|start|end|special|image|audio|text)_token")


def public_name(name: str | os.PathLike[str]) -> str:
    """What a model, a dataset or a file is called in files that others read.

    Args:
        name: A Hub id, a path within the current folder or any other word, which stay as they are; another path on
            this machine, of which only the last name is anybody's business ("~" for the home folder itself); or an
            address, which stays without a user, a password and a query.

    >>> public_name("laion/clap-htsat-fused"), public_name("/home/ann/ESC-50/"), public_name("https://me:x@a.org/b?key=y")
    ('laion/clap-htsat-fused', 'ESC-50', 'https://a.org/b')
    """
    text = os.fspath(name)
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        parts = urlsplit(text)
        if parts.scheme == "file":
            return public_name(parts.path)
        return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
    path = os.path.expanduser(text)
    leads_out = os.path.normpath(path).split(os.sep)[0] in (os.pardir, os.curdir)
    if not text or not (os.path.isabs(path) or leads_out or text.startswith(("~", "./", "../", "..\\"))):
        return text
    path = os.path.abspath(path)
    return "~" if path == os.path.expanduser("~") else os.path.basename(path)


def is_secret(name: str) -> bool:
    """Whether an argument of this name holds a token, a password or the like.

    >>> is_secret("hub_token"), is_secret("Api-Key"), is_secret("pad_token")
    (True, True, False)
    """
    name = name.lower().replace("-", "_").replace(" ", "_")
    return _SECRET.fullmatch(name) is not None and not _PUBLIC_TOKEN.fullmatch(name)


def redact(value: Any, from_anywhere: bool = False) -> Any:
    """A value as others may read it: without tokens and passwords, and of a path on this machine its last part only.

    Args:
        value: Anything that JSON knows, and texts of JSON. What is called a token, a password or the like is left out.
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
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):  # an option that holds several
        try:
            held = json.loads(value)
        except (ValueError, RecursionError):
            return value
        public = redact(held, from_anywhere)
        return value if public == held else json.dumps(public, ensure_ascii=False)
    return public_name(os.path.abspath(value) if from_anywhere and os.path.exists(value) else value)


def inline_markdown(text: str) -> str:
    r"""Return a text on one line with Markdown's characters escaped, for data in cards.

    >>> inline_markdown("CC BY\n# <b>Free</b> | [all](x)")
    'CC BY \\# \\<b\\>Free\\</b\\> \\| \\[all\\](x)'
    """
    return re.sub(r"([\\`*#<>|\[\]])", r"\\\1", " ".join(text.split()))
