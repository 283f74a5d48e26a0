"""A stand-in for the Hugging Face hub on 127.0.0.1: the endpoints that reading models needs.

    GET  /api/models/<org>/<name>[/revision/<revision>]   commit and files with sizes and hashes
    HEAD /<org>/<name>/resolve/<revision>/<file>          size, ETag and commit
    GET  /<org>/<name>/resolve/<revision>/<file>          content; honors Range
    GET  /api/models/<org>/<name>/tree/<revision>         files and folders

With `uploads`, models can be written, too: see `hub_uploads.py`.

Every request is recorded, so that a test can say what was transferred.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.helpers.hub_uploads import Uploads
from tests.helpers.serving import Handler, serve

REPO = r"(?P<repo>[^/]+/[^/]+)"
RESOLVE = re.compile(rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
INFO = re.compile(rf"/api/models/{REPO}(?:/revision/(?P<revision>[^/]+))?")
TREE = re.compile(rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)")


@dataclass
class HubStandIn:
    """`repositories`: id -> {commit: folder}; `branches`: (id, branch) -> commit."""

    endpoint: str = ""
    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    honors_ranges: bool = True
    uploads: Uploads | None = None
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, repo_id: str, folder: Path, *, branch: str = "main", commit: str | None = None) -> str:
        """Publish a folder as a new commit of a branch."""
        commit = commit or hashlib.sha1(f"{repo_id}{folder}{len(self.branches)}".encode()).hexdigest()
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

    with served() as hub:
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
        try:
            yield hub
        finally:
            close_session()


@contextmanager
def served() -> Iterator[HubStandIn]:
    """Serve a stand-in, for processes of their own that are pointed at its endpoint."""
    hub = HubStandIn()
    with serve(type("Handler", (_Handler,), {"hub": hub})) as hub.endpoint:
        yield hub


class _Handler(Handler):
    """Answers for one stand-in; `_handler` sets which."""

    hub: HubStandIn

    def handle(self) -> None:
        """Answer until the client is done, or killed."""
        with suppress(ConnectionError):
            super().handle()

    def do_PUT(self) -> None:
        if not self._uploaded(self._body()):
            self._refuse(404, "EntryNotFound")

    do_POST = do_PUT

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # a part of a request is none
            raise ConnectionResetError(f"{len(body)} of {length} bytes came")
        return body

    def _uploaded(self, body: bytes) -> bool:
        """Answer a request that writes; False if it is none."""
        if self.hub.uploads is None:
            return False
        path, token = urlsplit(self.path).path, self.headers.get("Authorization", "")
        with self.hub.lock:
            answer = self.hub.uploads.answer(self.hub, self.command, path, body, token)
        if answer is None:
            return False
        status, content, headers = answer
        self._send(status, json.dumps(content).encode(), headers)
        return True

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if match := TREE.fullmatch(path):
            self._tree(match["repo"], unquote(match["revision"]))
        elif match := INFO.fullmatch(path):
            self._info(match["repo"], unquote(match["revision"] or "main"))
        elif match := RESOLVE.fullmatch(path):
            self._file(match["repo"], unquote(match["revision"]), unquote(match["file"]))
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def _tree(self, repo: str, revision: str) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        folder = self.hub.repositories[repo][commit]
        found = []
        for path in sorted(folder.rglob("*")):
            kind, size = ("directory", 0) if path.is_dir() else ("file", path.stat().st_size)
            found.append({"type": kind, "oid": "0" * 40, "size": size, "path": path.relative_to(folder).as_posix()})
        self._send(200, json.dumps(found).encode(), {})

    def _info(self, repo: str, revision: str) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        folder = self.hub.repositories[repo][commit]
        siblings = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            entry = {"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size}
            digest = etag_of(path)
            if len(digest) == 64:
                entry["lfs"] = {"size": path.stat().st_size, "sha256": digest, "pointerSize": 130}
            siblings.append({**entry, "blobId": digest if len(digest) == 40 else "0" * 40})
        private = self.hub.uploads is not None and self.hub.uploads.private.get(repo, False)
        found = {"id": repo, "sha": commit, "private": private, "siblings": siblings}
        self._send(200, json.dumps(found).encode(), {})

    def _file(self, repo: str, revision: str, name: str) -> None:
        commit = self._commit(repo, revision)
        if commit is None:
            return
        path = self.hub.repositories[repo][commit] / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        content, status = path.read_bytes(), 200
        headers = {"ETag": f'"{etag_of(path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.hub.honors_ranges:
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._send(status, content, headers)

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

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_head(status, len(content), headers)
        sent = len(content) if self.command != "HEAD" else 0
        self.hub.requests.append((self.command, urlsplit(self.path).path, sent))
        if sent:
            self.wfile.write(content)


def etag_of(path: Path) -> str:
    """SHA-256 of a weight file (stored as a large file), git blob id of any other."""
    content = path.read_bytes()
    if path.suffix in (".safetensors", ".bin"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
