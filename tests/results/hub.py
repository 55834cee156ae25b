"""A stand-in for the Hugging Face Hub on this machine: what creating a repository and committing files to it needs.

The wire format is that of huggingface_hub's client: repositories are created by a POST of JSON, a commit is a POST of
lines of JSON. As on the Hub, safetensors go to object storage (Git LFS, "basic" transfer), all else into the commit.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Listens on a free port of this machine.

    Attributes:
        token: requests without it are refused.
        repositories: files by path, by the id of their repository.
    """

    daemon_threads = True

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.stored: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def serve(token: str) -> Iterator[Hub]:
    with Hub(token) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        match self.path.strip("/").split("/"):
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                repository = f"{asked.get('organization') or 'me'}/{asked['name']}"
                self.server.repositories.setdefault(repository, {})
                return self._answer(200, {"url": f"{self.server.address}/{repository}", "name": repository})
            case ["api", "validate-yaml"]:
                return self._answer(200, {"errors": [], "warnings": []})
            case ["api", "models", owner, name, "preupload", "main"] if f"{owner}/{name}" in self.server.repositories:
                modes = {True: "lfs", False: "regular"}
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": modes[file["path"].endswith(".safetensors")],
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
                return self._answer(200, {"files": files})
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = [
                    {**asked, "actions": {"upload": {"href": f"{self.server.address}/objects/{asked['oid']}"}}}
                    for asked in json.loads(body)["objects"]
                ]
                return self._answer(200, {"transfer": "basic", "objects": objects})
            case ["api", "models", owner, name, "commit", "main"]:
                files = self.server.repositories[f"{owner}/{name}"]
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        files[value["path"]] = self.server.stored[value["oid"]]
                address = f"{self.server.address}/{owner}/{name}/commit/1"
                return self._answer(200, {"success": True, "commitUrl": address, "commitOid": "1" * 40})
        return self._answer(404, {"error": f"no such path: {self.path}"})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(content).hexdigest() != oid:
            return self._answer(400, {"error": "the content is not what was announced"})
        self.server.stored[oid] = content
        return self._answer(200, {})

    def do_GET(self) -> None:
        self._answer(404, {"error": f"no such path: {self.path}"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        if self.server.__dict__.get("verbose"):
            print(format % args)
