"""A hub on this machine: the few requests by which huggingface_hub makes a repository, lists it, and commits to it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE_BYTES = 4096  # from which on a file goes to the store of large files
TOKEN = "hf_of_the_fake_hub"


class FakeHub(ThreadingHTTPServer):
    """Hold repositories: ``repositories[name]`` maps paths to contents, ``commits[name]`` lists headers of commits."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[dict[str, Any]]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.full = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def head(self, name: str) -> str:
        """Return the hash of the last commit."""
        return f"{len(self.commits[name]):040x}"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub until the block ends."""
    hub = FakeHub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Requests(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        found = re.match(r"/api/models/([\w.-]+/[\w.-]+)(/tree/\w+|/revision/\w+)?(\?|$)", self.path)
        name = found[1] if found else ""
        if name not in self.server.repositories:
            self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        elif ((found and found[2]) or "").startswith("/tree"):
            files = self.server.repositories[name].items()
            self._answer([{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in files])
        else:
            self._answer({"id": name, "sha": self.server.head(name), "private": False, "tags": [], "siblings": []})

    def do_PUT(self) -> None:
        content = self._body()
        digest = hashlib.sha256(content).hexdigest()
        good = self.path == f"/large/{digest}"
        if good:
            self.server.large[digest] = content
        self._answer({}, 200 if good else 400)

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path.endswith("/info/lfs/objects/batch"):
            links = [
                {**entry, "actions": {"upload": {"href": f"{self.server.url}/large/{entry['oid']}", "header": {}}}}
                for entry in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": links})
        elif "/preupload/" in self.path:
            files = [
                {
                    "path": entry["path"],
                    "uploadMode": "lfs" if entry["size"] >= LARGE_BYTES else "regular",
                    "shouldIgnore": False,
                }
                for entry in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif found := re.match(r"/api/models/([\w.-]+/[\w.-]+)/commit/main", self.path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"error": f"no {self.path}"}, 404)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        self.server.repositories[name] = {".gitattributes": b"*.safetensors filter=lfs\n"}
        self.server.commits[name] = []
        self.server.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
        self._answer({"url": f"{self.server.url}/{name}", "name": name})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        if self.server.full:
            self._answer({"error": "Your storage is full"}, 403)
            return
        header, *operations = (line["value"] for line in lines)
        kinds = [line["key"] for line in lines[1:]]
        if header.get("parentCommit") not in (None, self.server.head(name)):
            self._answer({"error": "A commit has happened since"}, 412)
            return
        files = self.server.repositories[name]
        for kind, value in zip(kinds, operations, strict=True):
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                assert kind == "deletedFile"
                del files[value["path"]]
        self.server.commits[name].append(header)
        head = self.server.head(name)
        answer = {"commitUrl": f"{self.server.url}/{name}/commit/{head}", "commitOid": head, "pullRequestUrl": None}
        self._answer({"success": True, **answer})
