"""The endpoints of the hub that writing a model needs, for the stand-in of `hub.py`.

    POST /api/repos/create                       {"organization", "name", "visibility" | "private"}
    POST /api/validate-yaml                      head of a card
    POST /api/models/<repo>/preupload/<branch>   which files are large, and what the branch has under their names
    POST /<repo>.git/info/lfs/objects/batch      where to send large files; nothing for those that are there
    PUT  /lfs/<sha256>[/<part>]                  a large file, or a part of it
    POST /lfs/<sha256>                           the parts are complete
    POST /api/models/<repo>/commit/<branch>      lines of JSON: header, files, pointers to large files, deletions

As on the hub, all of them want a token, large files are kept by their content, and a commit is refused whose parent is
not the head of the branch any more.
"""

import base64
import hashlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPO = r"(?P<repo>[^/]+/[^/]+)"
PREUPLOAD = re.compile(rf"/api/models/{REPO}/preupload/main")
COMMIT = re.compile(rf"/api/models/{REPO}/commit/main")
BATCH = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
LARGE = re.compile(r"/lfs/(?P<oid>[0-9a-f]{64})(?:/(?P<part>\d+))?")

Answer = tuple[int, Any, dict[str, str]]


@dataclass
class Uploads:
    """What was sent to a stand-in.

    Args:
        root: folder for new commits.
        token: that is wanted; requests with another one are refused.
        may_write: names of organizations in which the token may write.
        part_bytes: larger files are sent in parts of this size.
        breaks_after: number of large files (or parts) after which every other one is refused; None: never.
        received: SHA-256 of large files (and their parts, `sha256/number`) in the order in which they were sent.
    """

    root: Path
    token: str = "secret"
    may_write: set[str] = field(default_factory=lambda: {"org"})
    part_bytes: int = 1 << 30
    breaks_after: int | None = None
    received: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, hub: Any, method: str, path: str, body: bytes, token: str) -> Answer | None:
        """Status, JSON and headers for a request; None for one that is not for us."""
        if token != f"Bearer {self.token}" and not path.startswith("/lfs/"):
            return 401, {"error": "Invalid username or password."}, {}
        if match := LARGE.fullmatch(path):
            return self._large(match["oid"], int(match["part"] or 0), method, body)
        if path == "/api/repos/create":
            return self._create(hub, json.loads(body))
        if path == "/api/validate-yaml":
            return _validated(json.loads(body)["content"])
        if match := PREUPLOAD.fullmatch(path):
            return self._preupload(hub, match["repo"], json.loads(body))
        if match := BATCH.fullmatch(path):
            return 200, {"objects": [self._action(hub, o) for o in json.loads(body)["objects"]]}, {}
        if match := COMMIT.fullmatch(path):
            return self._commit(hub, match["repo"], [json.loads(line) for line in body.splitlines()])
        return None

    def _create(self, hub: Any, given: dict[str, Any]) -> Answer:
        repo = f"{given['organization']}/{given['name']}"
        if given["organization"] not in self.may_write:
            return 403, {"error": "You don't have the rights to create a model under this namespace"}, {}
        if repo in hub.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{hub.endpoint}/{repo}"}, {}
        self.private[repo] = given.get("visibility", "private" if given.get("private") else "public") == "private"
        folder = self._folder(repo)
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        hub.add(repo, folder)
        return 200, {"url": f"{hub.endpoint}/{repo}"}, {}

    def _preupload(self, hub: Any, repo: str, given: dict[str, Any]) -> Answer:
        from tests.helpers.hub import etag_of

        there = _head(hub, repo)
        rows = []
        for file in given["files"]:
            path = there / file["path"]
            is_large = path.suffix in (".safetensors", ".bin")
            oid = etag_of(path) if path.is_file() else None
            mode = "lfs" if is_large else "regular"
            rows.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": rows}, {}

    def _action(self, hub: Any, given: dict[str, Any]) -> dict[str, Any]:
        oid, size = given["oid"], given["size"]
        if oid in self.objects:
            return {"oid": oid, "size": size}
        href, header = f"{hub.endpoint}/lfs/{oid}", {}
        if size > self.part_bytes:
            count = -(-size // self.part_bytes)
            header = {"chunk_size": str(self.part_bytes)} | {f"{n:05}": f"{href}/{n}" for n in range(1, count + 1)}
        return {"oid": oid, "size": size, "actions": {"upload": {"href": href, "header": header}}}

    def _large(self, oid: str, part: int, method: str, body: bytes) -> Answer:
        if method == "POST":
            numbers = [p["partNumber"] for p in json.loads(body)["parts"]]
            body = b"".join(self.parts[oid, n] for n in numbers)
        elif self.breaks_after is not None and len(self.received) >= self.breaks_after:
            return 403, {"error": "the connection is gone"}, {}
        else:
            self.received.append(f"{oid}/{part}" if part else oid)
        if method == "PUT" and part:
            self.parts[oid, part] = body
            return 200, {}, {"ETag": hashlib.md5(body).hexdigest()}
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "another content than announced"}, {}
        self.objects[oid] = body
        return 200, {}, {}

    def _commit(self, hub: Any, repo: str, lines: list[dict[str, Any]]) -> Answer:
        head = hub.branches[repo, "main"]
        first, *rest = lines
        if first["value"].get("parentCommit", head) != head:
            return 412, {"error": "A commit has happened since. Please refresh and try again."}, {}
        folder = self._folder(repo)
        shutil.copytree(_head(hub, repo), folder, dirs_exist_ok=True)
        for line in rest:
            value, path = line["value"], folder / line["value"]["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if line["key"] == "deletedFile":
                path.unlink()
            elif line["key"] == "lfsFile":
                path.write_bytes(self.objects[value["oid"]])
            else:
                path.write_bytes(base64.b64decode(value["content"]))
        commit = hub.add(repo, folder)
        self.commits.append({"repo": repo, "commit": commit, "paths": [x["value"]["path"] for x in rest]})
        answer = {"commitUrl": f"{hub.endpoint}/{repo}/commit/{commit}", "commitOid": commit, "success": True}
        return 200, answer, {}

    def _folder(self, repo: str) -> Path:
        folder = self.root / f"{len(list(self.root.glob('*')))}-{repo.replace('/', '-')}"
        folder.mkdir(parents=True)
        return folder


def _head(hub: Any, repo: str) -> Path:
    return Path(hub.repositories[repo][hub.branches[repo, "main"]])


def _validated(card: str) -> Answer:
    try:
        head = yaml.safe_load(card.split("---\n")[1])
    except (yaml.YAMLError, IndexError):
        return 400, {"errors": [{"message": "the head is no YAML"}]}, {}
    if not isinstance(head.get("base_model", []), list | str):
        return 400, {"errors": [{"message": '"base_model" must be a string or a list'}]}, {}
    return 200, {"errors": [], "warnings": []}, {}
