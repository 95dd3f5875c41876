"""Remove secrets and local paths from names and options before they are written to results, cards and manifests."""

import html
import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_SECRET = re.compile(
    r"(.*_)?(token|auth|authorization|signature|cookies?|pwd|bearer|jwt|session|session_id|sid)|.+_headers|"
    r"key|.*(api|access|account|auth|encryption|master|private|shared|signing|ssh|storage|subscription)_?key|"
    r".*(secret|passw|passphrase|credential|connection_string).*"
)
# Special tokens of tokenizers, which are not credentials.
_PUBLIC_TOKEN = re.compile(r".*(pad|eos|bos|unk|mask|cls|sep|start|end|special|image|audio|text)_token")


def public_name(name: str | os.PathLike[str]) -> str:
    """Return a name that is safe to publish for a model, a dataset or a file.

    Hub ids, relative paths below the current folder and other text are returned unchanged. Other paths are reduced to
    their last part ("~" for the home folder). User, password and query are removed from addresses.

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
    if not text or not (os.path.isabs(path) or leads_out or text.startswith(("~", "./"))):
        return text
    path = os.path.abspath(path)
    return "~" if path == os.path.expanduser("~") else os.path.basename(path)


def is_secret(name: str) -> bool:
    """Return whether an option name indicates a secret, such as a token or a password.

    Headers of requests are secret as a whole, because services name their credentials as they like.

    >>> is_secret("hub_token"), is_secret("Api-Key"), is_secret("accessToken"), is_secret("pad_token")
    (True, True, True, False)
    >>> is_secret("extra_headers"), is_secret("X-Session"), is_secret("jwt"), is_secret("session_seconds")
    (True, True, True, False)
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_")
    return _SECRET.fullmatch(name) is not None and not _PUBLIC_TOKEN.fullmatch(name)


def redact(value: Any, from_anywhere: bool = False) -> Any:
    """Remove tokens and passwords from options, and reduce local paths to their last part.

    `value` is any value that JSON supports, including a string that contains JSON. A dict entry is removed if its key
    indicates a secret (see `is_secret`). If `from_anywhere` is set, relative paths of existing files are also reduced
    to their last part. The result is then the same for any current folder.

    >>> redact({"hub_token": "hf_x", "data_dir": "/home/me/ESC-50", "model": "laion/clap-htsat-fused"})
    {'data_dir': 'ESC-50', 'model': 'laion/clap-htsat-fused'}
    """
    if isinstance(value, Mapping):
        public = {}
        for key, each in value.items():
            if not is_secret(str(key)):
                public[redact(key)] = redact(each, from_anywhere)
        return public
    if isinstance(value, (list, tuple)):
        return [redact(each, from_anywhere) for each in value]
    if not isinstance(value, (str, os.PathLike)):
        return value
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[", '"'):  # an option with several values
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        public = redact(parsed, from_anywhere)
        return value if public == parsed else json.dumps(public, ensure_ascii=False)
    return public_name(os.path.abspath(value) if from_anywhere and os.path.exists(value) else value)


def inline_markdown(text: str) -> str:
    r"""Escape Markdown and HTML and join lines, for text from data in model and dataset cards.

    >>> inline_markdown("CC BY\n# <b>Free</b> | [all](x)")
    'CC BY \\# &lt;b&gt;Free&lt;/b&gt; \\| \\[all\\]\\(x)'
    """
    # also the bracket of a link's address, because its text may begin before this one
    return re.sub(r"([\\`*#|\[\]]|(?<=\])\()", r"\\\1", html.escape(" ".join(text.split()), quote=False))
