"""Fake endpoint of a language model; it translates by adding the language before the text."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock


def translated(text: str, language: str) -> str:
    """Return the translation of a text; a translation into English removes the language again."""
    return text.partition(": ")[2] if language == "English" else f"{language}: {text}"


def completion(content: Any, **choice: Any) -> bytes:
    """Return a response of `/chat/completions` with a text, or an object as JSON, as its message."""
    text = content if isinstance(content, str) else json.dumps(content)
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, **choice}]}).encode()


class FakeEndpoint(ThreadingHTTPServer):
    """Server that answers the first requests as scripted and all others with translations.

    Args:
        script: One entry per request: `(status, headers, body)`, a function from the requested texts to the body, or
            None for a translation.
    """

    daemon_threads = True

    def __init__(self, script: list[Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.seen: list[dict[str, str]] = []
        self.before_answer: Callable[[], None] = lambda: None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Return the value of `--endpoint`."""
        return f"http://127.0.0.1:{self.server_port}"

    def texts(self, number: int) -> dict[str, str]:
        """Return the texts of a request by number."""
        return json.loads(self.requests[number]["messages"][1]["content"])


class _Handler(BaseHTTPRequestHandler):
    server: FakeEndpoint

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(request)
            self.server.seen.append({"path": self.path, **{name.title(): text for name, text in self.headers.items()}})
            step = self.server.script.pop(0) if self.server.script else None
        self.server.before_answer()
        texts = json.loads(request["messages"][1]["content"])
        language = request["messages"][0]["content"].partition("native speaker of ")[2].partition(".")[0]
        usual = completion({number: translated(text, language) for number, text in texts.items()})
        status, headers, body = step if isinstance(step, tuple) else (200, {}, step(texts) if step else usual)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def fake_endpoint(*script: Any) -> Iterator[FakeEndpoint]:
    """Serve while the block runs; the platform name is patched, because the client would start a process for it."""
    server = FakeEndpoint(list(script))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        with mock.patch("platform.platform", return_value="Linux"):
            yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
