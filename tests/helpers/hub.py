"""A stand-in for the Hugging Face hub on 127.0.0.1: the three endpoints that reading a model needs.

    GET  /api/models/<org>/<name>[/revision/<revision>]   commit and files with sizes and hashes
    HEAD /<org>/<name>/resolve/<revision>/<file>          size, ETag and commit
    GET  /<org>/<name>/resolve/<revision>/<file>          content; honours Range

Every request is recorded, so that a test can say what was transferred.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?")


@dataclass
class HubStandIn:
    """`repositories`: id -> {commit: folder}; `branches`: (id, branch) -> commit."""

    endpoint: str = ""
    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    honours_ranges: bool = True
    requests: list[tuple[str, str, int]] = field(default_factory=list)

    def add(self, repo_id: str, folder: Path, *, branch: str = "main") -> str:
        """Publish a folder as a new commit of a branch."""
        commit = hashlib.sha1(f"{repo_id}{folder}{len(self.branches)}".encode()).hexdigest()
        self.repositories.setdefault(repo_id, {})[commit] = folder
        self.branches[repo_id, branch] = commit
        return commit

    def bytes_of(self, ending: str) -> int:
        """Bytes of content sent for files whose name ends so."""
        return sum(sent for method, path, sent in self.requests if method == "GET" and path.endswith(ending))


@contextmanager
def hub_stand_in(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubStandIn]:
    """Serve a stand-in and point the hub library at it, with its own cache and no token."""
    from huggingface_hub import close_session, constants

    hub = HubStandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    close_session()  # a client made before may carry a proxy
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        close_session()


class _Handler(BaseHTTPRequestHandler):
    """Answers for one stand-in; `_handler` sets which."""

    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        """Keep the test output clean."""

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := INFO.fullmatch(path):
            self._info(match["repo"], match["revision"] or "main")
        elif match := RESOLVE.fullmatch(path):
            self._file(match["repo"], match["revision"], match["file"], body=body)
        else:
            self._refuse(404, "EntryNotFound")

    def _info(self, repo: str, revision: str) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        folder = self.hub.repositories[repo][commit]
        siblings = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            entry = {"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size}
            digest = _etag(path)
            if len(digest) == 64:
                entry["lfs"] = {"size": path.stat().st_size, "sha256": digest, "pointerSize": 130}
            siblings.append({**entry, "blobId": digest if len(digest) == 40 else "0" * 40})
        self._send(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode(), {})

    def _file(self, repo: str, revision: str, name: str, *, body: bool) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        path = self.hub.repositories[repo][commit] / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        content, status = path.read_bytes(), 200
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.hub.honours_ranges:
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._send(status, content, headers, body=body)

    def _commit(self, repo: str, revision: str) -> str | None:
        if repo in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif repo not in self.hub.repositories:
            self._refuse(404, "RepoNotFound")
        else:
            commit = self.hub.branches.get((repo, revision), revision)
            if commit in self.hub.repositories[repo]:
                return commit
            self._refuse(404, "RevisionNotFound")
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        sent = len(content) if body and self.command == "GET" else 0
        self.hub.requests.append((self.command, urlsplit(self.path).path, sent))
        if sent:
            self.wfile.write(content)


def _handler(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"hub": hub})


def _etag(path: Path) -> str:
    """SHA-256 of a weight file (stored as a large file), git blob id of any other."""
    content = path.read_bytes()
    if path.suffix in (".safetensors", ".bin"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
