"""A Hub on this machine: speaks the endpoints that ``kernels`` and ``huggingface_hub`` use, over real HTTP.

Repositories are commits of files in memory. Faults can be planted: a status in place of the answer, a body that
breaks off, a body that is another.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repository:
    """Branches and tags, and the files of every commit."""

    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "", tag: str = "") -> str:
        """Adds a commit and lets names point to it; returns its id."""
        content = json.dumps({path: _sha256(data) for path, data in sorted(files.items())})
        commit = hashlib.sha1(f"{content}{len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        if branch:
            self.branches[branch] = commit
        if tag:
            self.tags[tag] = commit
        return commit

    def find(self, revision: str) -> str | None:
        if revision in self.commits:
            return revision
        return self.branches.get(revision) or self.tags.get(revision)


@dataclass
class Fault:
    """What to do to the requests whose ``"METHOD path"`` matches, and to how many of them.

    ``kind``: a status, ``"truncate"`` (half of the body, and the connection closes), ``"tamper"`` (other bytes of the
    same length), or ``"slow"`` (half a second before the answer).
    """

    pattern: str
    kind: int | str
    times: int = 10**6


class LoopbackHub:
    """The server; use it as a context manager."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        #: Organisations, and whether the Hub trusts them as publishers of kernels. Whoever is not here is a user.
        self.organisations: dict[str, bool] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def repository(self, name: str, trusted: bool = True) -> Repository:
        """Returns a repository, a new one if there is none of this name."""
        self.organisations.setdefault(name.split("/")[0], trusted)
        return self.repositories.setdefault(name, Repository())

    def count(self, pattern: str) -> int:
        """How many requests matched."""
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def take_fault(self, request: str) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None


class _MissingError(Exception):
    """There is no such thing; the Hub's word for it."""


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    _fault: Fault | None = None

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunked()
        self._fault = None  # a connection serves many requests
        fault = self.hub.take_fault(f"{self.command} {path}")
        if fault is not None and fault.kind == "slow":
            time.sleep(0.5)
        elif fault is not None and isinstance(fault.kind, int):
            headers = {"Retry-After": "0"} if fault.kind == 429 else {}
            self._send(fault.kind, b"{}", headers)
            return
        for pattern, handle in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match is not None:
                self._fault = fault
                try:
                    handle(self, *match.groups(), body=body)
                except _MissingError as missing:
                    self._send(404, b"{}", {"X-Error-Code": str(missing)})
                return
        self._send(404, b"{}")

    def _chunked(self) -> bytes:
        """The body of a request that announces no length."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        fault = self._fault
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if fault is not None and fault.kind == "truncate":
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.kind == "tamper":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault is not None and fault.kind == "truncate":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _json(self, data: Any, status: int = 200) -> None:
        self._send(status, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _repository(self, name: str) -> Repository:
        if name not in self.hub.repositories:
            raise _MissingError("RepoNotFound")
        return self.hub.repositories[name]

    def _files(self, name: str, revision: str) -> tuple[str, Files]:
        repository = self._repository(name)
        commit = repository.find(revision)
        if commit is None:
            raise _MissingError("RevisionNotFound")
        return commit, repository.commits[commit]

    # --- reading ---------------------------------------------------------------------------------------------

    def organisation(self, name: str, **_: Any) -> None:
        if name not in self.hub.organisations:
            raise _MissingError("RepoNotFound")
        trusted = self.hub.organisations[name]
        self._json({"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": trusted})

    def refs(self, name: str, **_: Any) -> None:
        repository = self._repository(name)

        def listed(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": c} for n, c in names.items()]

        branches, tags = listed("heads", repository.branches), listed("tags", repository.tags)
        self._json({"branches": branches, "tags": tags, "converts": []})

    def info(self, name: str, revision: str = "main", **_: Any) -> None:
        commit, files = self._files(name, revision)
        siblings = [{"rfilename": path} for path in files]
        self._json({"id": name, "sha": commit, "siblings": siblings, "private": False})

    def tree(self, name: str, revision: str, below: str | None = None, **_: Any) -> None:
        _, files = self._files(name, revision)
        recursive = "recursive=true" in self.path.lower()
        prefix = f"{below.strip('/')}/" if below else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, data in files.items():
            if not path.startswith(prefix):
                continue
            rest = path[len(prefix) :].split("/")
            for depth in range(1, len(rest)):
                folder = prefix + "/".join(rest[:depth])
                if recursive or depth == 1:
                    entries[folder] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder}
            if recursive or len(rest) == 1:
                entries[path] = {"type": "file", "oid": _blob(data), "size": len(data), "path": path}
                if _is_large(path):
                    entries[path]["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 130}
        self._json(list(entries.values()))

    def resolve(self, name: str, revision: str, path: str, **_: Any) -> None:
        commit, files = self._files(name, revision)
        if path not in files:
            raise _MissingError("EntryNotFound")
        data = files[path]
        tag = _sha256(data) if _is_large(path) else _blob(data)
        self._send(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": commit, "Accept-Ranges": "none"})

    # --- writing ---------------------------------------------------------------------------------------------

    def create(self, body: bytes, **_: Any) -> None:
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repositories:
            self._json({"url": f"{self.hub.url}/kernels/{name}", "error": "exists"}, 409)
            return
        self.hub.repository(name).commit({}, branch="main")
        self._json({"url": f"{self.hub.url}/kernels/{name}", "name": name, "id": name})

    def branch(self, name: str, branch: str, **_: Any) -> None:
        repository = self.hub.repositories[name]
        if branch in repository.branches:
            self._json({"error": "exists"}, 409)
            return
        repository.branches[branch] = repository.branches["main"]
        self._json({})

    def preupload(self, name: str, revision: str, body: bytes, **_: Any) -> None:
        files = json.loads(body)["files"]
        modes = [{"path": f["path"], "uploadMode": "lfs" if _is_large(f["path"]) else "regular"} for f in files]
        self._json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})

    def batch(self, name: str, body: bytes, **_: Any) -> None:
        objects = json.loads(body)["objects"]
        answers = [
            {**o, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}", "header": {}}}} for o in objects
        ]
        self._json({"transfer": "basic", "objects": answers})

    def put_object(self, oid: str, body: bytes, **_: Any) -> None:
        assert _sha256(body) == oid
        self.hub.objects[oid] = body
        self._json({})

    def commit(self, name: str, revision: str, body: bytes, **_: Any) -> None:
        repository = self.hub.repositories[name]
        files = dict(repository.commits[repository.branches[revision]])
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = repository.commit(files, branch=revision)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/kernels/{name}/commit/{oid}"})

    def yaml(self, **_: Any) -> None:
        self._json({"errors": [], "warnings": []})


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, Any]] = [
    (r"/api/organizations/([\w.-]+)/overview", _Handler.organisation),
    (rf"/api/kernels/{_NAME}/refs", _Handler.refs),
    (rf"/api/kernels/{_NAME}/tree/([^/]+)(/.*)?", _Handler.tree),
    (rf"/api/kernels/{_NAME}/revision/([^/]+)", _Handler.info),
    (rf"/api/kernels/{_NAME}", _Handler.info),
    (rf"/kernels/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
    (r"/api/repos/create", _Handler.create),
    (rf"/api/kernels/{_NAME}/branch/([^/]+)", _Handler.branch),
    (rf"/api/kernels/{_NAME}/preupload/([^/]+)", _Handler.preupload),
    (rf"/kernels/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/lfs/([0-9a-f]+)", _Handler.put_object),
    (rf"/api/kernels/{_NAME}/commit/([^/]+)", _Handler.commit),
    (r"/api/validate-yaml", _Handler.yaml),
]


def _is_large(path: str) -> bool:
    """Whether the Hub keeps a file apart, under its SHA-256."""
    return path.endswith(".so")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}".encode() + bytes(1) + data).hexdigest()
