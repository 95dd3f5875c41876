"""Fake Hub server with the HTTP requests of one push and one download."""

import base64
import hashlib
import json
import re
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

from web_server import serving

COMMIT = "0" * 39 + "1"


class FakeHub(BaseHTTPRequestHandler):
    """Handler that keeps the files of all repositories in memory, without LFS."""

    protocol_version = "HTTP/1.1"
    files: dict[str, dict[str, bytes]] = {}  # noqa: RUF012, shared by all requests

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            request = json.loads(body)
            repository = f"{request['organization']}/{request['name']}"
            self.files.setdefault(repository, {})
            self.answer({"url": f"http://{self.headers['Host']}/{repository}", "id": repository})
        elif preupload := re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            assert preupload[1] in self.files
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        elif commit := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[commit[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/{commit[1]}/commit/{COMMIT}"
            self.answer({"commitUrl": url, "commitOid": COMMIT, "hookOutput": "", "success": True})
        else:  # the model card's check
            self.answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if file := re.fullmatch(r"/(.+)/resolve/[^/]+/(.+)", path):
            content = self.files.get(file[1], {}).get(file[2])
            if content is None:
                self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            else:
                etag = hashlib.sha1(content).hexdigest()
                self.answer(content, X_Repo_Commit=COMMIT, ETag=f'"{etag}"')
        elif listing := re.fullmatch(r"/api/models/(.+)/tree/[^/]+(/.*)?", path):
            paths = self.files[listing[1]] if not listing[2] else {}
            self.answer([{"type": "file", "path": p, "size": len(paths[p]), "oid": COMMIT} for p in paths])
        elif info := re.fullmatch(r"/api/models/(.+?)(/revision/.+)?", path):
            siblings = [{"rfilename": name} for name in self.files[info[1]]]
            self.answer({"id": info[1], "sha": COMMIT, "siblings": siblings})
        else:
            self.answer(b"", 404)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def fake_hub(kind: type[FakeHub] = FakeHub) -> AbstractContextManager[str]:
    """Serve an empty Hub while the block runs; yield its address for HF_ENDPOINT."""
    FakeHub.files.clear()
    return serving(kind)
