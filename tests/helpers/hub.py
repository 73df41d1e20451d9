"""A stand-in of the Hugging Face Hub on a loopback port: repositories in memory, its HTTP API.

Large files go by the LFS protocol, all else inside the commit, as on the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standin"


@dataclass
class StandIn:
    """What the hub holds, and what it was asked."""

    address: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Files of the LFS protocol by their digest."""
    requests: list[str] = field(default_factory=list)

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = self.repos[repo]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                assert value["algo"] == "sha256"
                files[value["path"]] = self.objects[value["oid"]]


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does, as far as pushing and loading go."""

    hub: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        self.hub.requests.append(format % args)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, code: int, data: object = None, **headers: str) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"warnings": [], "errors": []})
        elif re.match(r"/api/models/.+?/.+?/preupload/main", self.path):
            files = json.loads(body)["files"]
            large = {True: "lfs", False: "regular"}
            answers = [
                {
                    "path": file["path"],
                    "uploadMode": large[file["path"].endswith((".safetensors", ".png"))],
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self._answer(200, {"files": answers})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": each["oid"],
                    "size": each["size"],
                    "actions": {"upload": {"href": f"{self.hub.address}/lfs/{each['oid']}"}},
                }
                for each in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif match := re.match(r"/api/models/(.+?/.+?)/commit/main", self.path):
            self.hub.commit(match[1], [json.loads(line) for line in body.splitlines()])
            url = f"{self.hub.address}/{match[1]}/commit/{'0' * 40}"
            self._answer(200, {"success": True, "commitUrl": url, "commitOid": "0" * 40})
        else:
            self._answer(404, {"error": self.path})

    def _create(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization") or "me"
        repo = f"{owner}/{asked['name'].rpartition('/')[2]}"
        known = repo in self.hub.repos
        self.hub.repos.setdefault(repo, {})
        # Newer versions of the library name the visibility, older ones have a flag.
        hidden = asked.get("private") or asked.get("visibility") == "private"
        self.hub.private[repo] = bool(hidden)
        self._answer(409 if known else 200, {"url": f"{self.hub.address}/{repo}", "id": repo})

    def do_PUT(self) -> None:
        body = self._body()
        digest = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == digest
        self.hub.objects[digest] = body
        self._answer(200)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        match = re.match(r"/(.+?/.+?)/resolve/(.+?)/(.+)", self.path)
        repo, revision, name = match.groups() if match else ("", "", "")
        if repo not in self.hub.repos:
            self._answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif revision not in ("main", "v1", "0" * 40):
            self._answer(404, {"error": "no revision"}, X_Error_Code="RevisionNotFound")
        elif name not in self.hub.repos[repo]:
            self._answer(
                404, {"error": "no file"}, X_Error_Code="EntryNotFound", X_Repo_Commit="0" * 40
            )
        else:
            data = self.hub.repos[repo][name]
            tag = f'"{hashlib.sha256(data).hexdigest()}"'
            self._answer(200, data, ETag=tag, X_Repo_Commit="0" * 40)


@contextmanager
def serving() -> Iterator[StandIn]:
    """Run the stand-in within."""
    hub = StandIn()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
