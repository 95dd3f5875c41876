"""A local web server, and a folder on it that, as object storages do, gives parts of files."""

import functools
import http.server
import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PartsHandler(http.server.SimpleHTTPRequestHandler):
    """Answers `Range: bytes=first-last`, which the handler of the standard library does not know."""

    def log_message(self, *arguments):
        pass

    def send_head(self):
        parts = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if parts is None:
            return super().send_head()
        first, last = map(int, parts.groups())
        with open(self.translate_path(self.path), "rb") as file:
            content = file.read()

        self.send_response(206)
        part = content[first : last + 1]
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)


@contextmanager
def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address at which the handler answers, as long as the context lasts."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def served(folder):
    """The address of the folder, as long as the context lasts."""
    return serving(functools.partial(PartsHandler, directory=str(folder)))
