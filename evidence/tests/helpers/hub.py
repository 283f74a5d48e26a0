"""A stand-in for the Hugging Face hub on 127.0.0.1 that serves models and data sets to readers.

The id of a data set is "datasets/<org>/<name>". Every request is recorded, so that a test can say what was transferred.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REPO = r"(?P<repo>(?:datasets/)?[^/]+/[^/]+)"
RESOLVE = re.compile(rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
INFO = re.compile(rf"/api/(?:models/)?{REPO}(?:/revision/(?P<revision>[^/]+))?")
TREE = re.compile(rf"/api/(?:models/)?{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<file>.+))?")
PATHS = re.compile(rf"/api/(?:models/)?{REPO}/paths-info/(?P<revision>[^/]+)")


@dataclass
class HubStandIn:
    """`repositories`: id -> {commit: folder}; `branches`: (id, branch) -> commit; `requests`: method, path, bytes."""

    endpoint: str = ""
    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    requests: list[tuple[str, str, int]] = field(default_factory=list)

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
def served() -> Iterator[HubStandIn]:
    """Serve an empty stand-in until the block ends."""
    hub = HubStandIn()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if match := TREE.fullmatch(path):
            below = f"{unquote(match['file'])}/" if match["file"] else ""
            self._list(match, lambda name: name.startswith(below))
        elif match := INFO.fullmatch(path):
            self._describe(match)
        elif match := RESOLVE.fullmatch(path):
            self._send_file(match)
        else:
            self._refuse("EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        fields = json.loads(body) if body.startswith("{") else parse_qs(body)
        if match := PATHS.fullmatch(urlsplit(self.path).path):
            self._list(match, lambda name: name in fields["paths"])
        else:
            self._refuse("EntryNotFound")

    def _list(self, match: re.Match[str], wanted: Callable[[str], bool]) -> None:
        if (folder := self._folder(match)) is None:
            return
        rows = []
        for path in sorted(folder.rglob("*")):
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            kind = "directory" if path.is_dir() else "file"
            if wanted(name):
                rows.append({"type": kind, "oid": "0" * 40, "size": size * path.is_file(), "path": name})
        self._send(200, json.dumps(rows).encode(), {})

    def _describe(self, match: re.Match[str]) -> None:
        if (folder := self._folder(match)) is None:
            return
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        siblings = [{"rfilename": p.relative_to(folder).as_posix(), "size": p.stat().st_size} for p in files]
        name = match["repo"].removeprefix("datasets/")
        found = {"id": name, "sha": self._commit(match), "private": False, "siblings": siblings}
        self._send(200, json.dumps(found).encode(), {})

    def _send_file(self, match: re.Match[str]) -> None:
        if (folder := self._folder(match)) is None:
            return
        path = folder / unquote(match["file"])
        if not path.is_file():
            self._refuse("EntryNotFound")
            return
        content, status = path.read_bytes(), 200
        digest = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": self._commit(match), "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._send(status, content, headers)

    def _commit(self, match: re.Match[str]) -> str:
        revision = unquote(match["revision"] or "main")
        return self.hub.branches.get((match["repo"], revision), revision)

    def _folder(self, match: re.Match[str]) -> Path | None:
        """Folder of the revision that a request names; None if it was refused."""
        commits = self.hub.repositories.get(match["repo"])
        if commits is not None and self._commit(match) in commits:
            return commits[self._commit(match)]
        self._refuse("RepoNotFound" if commits is None else "RevisionNotFound")
        return None

    def _refuse(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        sent = 0 if self.command == "HEAD" else len(content)
        self.hub.requests.append((self.command, urlsplit(self.path).path, sent))
        self.wfile.write(content[:sent])
