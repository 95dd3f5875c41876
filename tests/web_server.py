"""Local web servers for a folder, with byte ranges as in object storage."""

import functools
import http.server
import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PartsHandler(http.server.SimpleHTTPRequestHandler):
    """Handler with support for `Range: bytes=first-last`, which the standard library lacks."""

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
    """Serve a handler while the context lasts; yield its address."""
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
    """Serve a folder while the context lasts; yield its address."""
    return serving(functools.partial(PartsHandler, directory=str(folder)))


def flaky(folder, faults, stall_seconds=1.5):
    """Serve a folder while the context lasts, with one fault per GET until `faults` is empty; yield its address.

    Args:
        folder: The folder to serve.
        faults: "busy" answers 503, "gone" 410, "drop" ends in the middle, "stall" delays the
            answer. Each GET removes one.
        stall_seconds: Delay of a stalled answer in seconds.
    """

    class FlakyHandler(PartsHandler):
        def do_GET(self):
            fault = faults.pop(0) if faults else None
            if fault in ("busy", "gone"):
                self.send_error({"busy": 503, "gone": 410}[fault])
            elif fault == "drop":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"half")
                self.close_connection = True
            else:
                if fault == "stall":
                    time.sleep(stall_seconds)
                super().do_GET()

    return serving(functools.partial(FlakyHandler, directory=str(folder)))
