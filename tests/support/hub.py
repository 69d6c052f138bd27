"""A stand-in of the Hub: an HTTP server on loopback that speaks what huggingface_hub's client asks for.

It knows repositories, commits, LFS uploads, listings and downloads, and keeps every body that it was sent, so that a
test can look for what must never have been uploaded. Start the client in a process of its own with `client_env`,
because huggingface_hub reads the address when it is imported. No package on PyPI offers these endpoints.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

USER = "someone"
BINARY = (".safetensors", ".bin", ".pt", ".pth", ".png", ".parquet")
"""Files that the Hub stores in LFS."""


@dataclass
class Repo:
    """A repository with one branch."""

    kind: str
    name: str
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[str, list[str]]] = field(default_factory=list)
    """(message, paths of the files that were added) of each commit."""

    @property
    def sha(self) -> str:
        return hashlib.sha1(f"{self.name}/{len(self.commits)}".encode()).hexdigest()


class Hub:
    """The state of the server.

    Attributes:
        repos: the repositories by kind (`"model"` or `"dataset"`) and name.
        received: every body that a client has sent, with base64 contents decoded.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.received: list[bytes] = []
        self.unknown: list[str] = []
        self.endpoint = ""
        self.lock = threading.Lock()

    def model(self, name: str) -> Repo:
        return self.repos["model", name]

    def sent(self, text: str) -> bool:
        """Whether a client has sent the text, in a commit, an LFS upload or a sample."""
        return any(text.encode() in body for body in self.received)

    def client_env(self, home: str) -> dict[str, str]:
        """Return the variables that send a client to this server and nowhere else."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": home,
            "HF_TOKEN": "hf_stand_in",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
        }

    # What the client asks for

    def create(self, request: dict) -> tuple[int, dict]:
        kind, name = request.get("type") or "model", f"{request.get('organization') or USER}/{request['name']}"
        prefix = "" if kind == "model" else f"{kind}s/"
        answer = {"url": f"{self.endpoint}/{prefix}{name}", "name": name, "id": name}
        if (kind, name) in self.repos:
            return 409, answer | {"error": "You already created this repo"}
        self.repos[kind, name] = Repo(kind, name)
        return 200, answer

    def preupload(self, request: dict) -> dict:
        self.received += [base64.b64decode(file["sample"]) for file in request["files"]]
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(BINARY) else "regular",
                    "shouldIgnore": False,
                }
                for file in request["files"]
            ]
        }

    def commit(self, repo: Repo, body: bytes) -> dict:
        message, added = "", []
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                content = base64.b64decode(value["content"])
                self.received.append(content)
                repo.files[value["path"]] = content
                added.append(value["path"])
            elif item["key"] == "lfsFile":
                repo.files[value["path"]] = self.objects[value["oid"]]
                added.append(value["path"])
            else:
                raise ValueError(f"the stand-in knows no {item['key']}")
        repo.commits.append((message, added))
        url = f"{self.endpoint}/{repo.name}/commit/{repo.sha}"
        return {"success": True, "commitOid": repo.sha, "commitUrl": url, "hookOutput": ""}

    def batch(self, request: dict) -> dict:
        return {
            "transfer": "basic",
            "objects": [
                {**each, "actions": {"upload": {"href": f"{self.endpoint}/objects/{each['oid']}"}}}
                for each in request["objects"]
            ],
        }

    def tree(self, repo: Repo) -> list[dict]:
        return [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in sorted(repo.files.items())
        ]

    def info(self, repo: Repo) -> dict:
        return {
            "id": repo.name,
            "modelId": repo.name,
            "sha": repo.sha,
            "private": False,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(repo.files)],
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            if self.command == "PUT" and path.startswith("/objects/"):
                assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2], "the upload is damaged"
                self.hub.received.append(body)
                self.hub.objects[path.rpartition("/")[2]] = body
                self._answer(200, {})
            elif path == "/api/whoami-v2":
                self._answer(200, {"type": "user", "name": USER, "orgs": []})
            elif path == "/api/repos/create":
                self._answer(*self.hub.create(json.loads(body)))
            elif path == "/api/validate-yaml":
                self._answer(200, {"errors": [], "warnings": []})
            elif self._of_repo(path, body):
                pass
            else:
                self.hub.unknown.append(f"{self.command} {self.path}")
                self._answer(404, {"error": "unknown"}, {"X-Error-Code": "RepoNotFound"})

    def _of_repo(self, path: str, body: bytes) -> bool:
        """Answer a request about a repository; `False` if there is no such repository or request."""
        api = re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(preupload|commit|revision|tree)/(.*))?", path)
        lfs = re.fullmatch(r"/(?:(dataset)s/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path)
        file = re.fullmatch(r"/(?:(dataset)s/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        match = api or lfs or file
        repo = match and self.hub.repos.get((match[1] or "model", match[2]))
        if not repo:
            return False
        if file:
            self._send_file(repo, file[3])
        elif lfs:
            self._answer(200, self.hub.batch(json.loads(body)))
        elif api[3] == "preupload":
            self._answer(200, self.hub.preupload(json.loads(body)))
        elif api[3] == "commit":
            self._answer(200, self.hub.commit(repo, body))
        elif api[3] == "tree":
            self._answer(200, self.hub.tree(repo))
        else:
            self._answer(200, self.hub.info(repo))
        return True

    def _send_file(self, repo: Repo, path: str) -> None:
        commit = {"X-Repo-Commit": repo.sha}
        if path not in repo.files:
            self._answer(404, {"error": "Entry not found"}, commit | {"X-Error-Code": "EntryNotFound"})
            return
        content = repo.files[path]
        etag = hashlib.sha256(content).hexdigest()
        self._reply(200, content, commit | {"ETag": f'"{etag}"', "Content-Type": "application/octet-stream"})

    def _answer(self, status: int, content: dict | list, headers: dict[str, str] | None = None) -> None:
        self._reply(status, json.dumps(content).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run the stand-in on a free port of loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
